"""Reads prompts from --prompt, --prompt-file, --messages, and the JSON lines of --batch."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..files.errors import OutriderError
from ..files.progress import size_text
from ..text.options import Options, Prompt
from .arguments import seeded

MAX_FILE_BYTES, MAX_BATCH_BYTES = 16 << 20, 256 << 20  # most bytes read; /dev/zero has no end


def prompt_from(args: Namespace) -> Prompt | None:
    """The prompt of --prompt, --prompt-file or --messages; None without any.

    Raises "prompt" or "option".
    """
    if args.messages is not None:
        text, name = _read(args.messages), source_name(args.messages)
        return _check_messages(_parse_json(text, name), args.system, name)
    return text_from(args.prompt, args.prompt_file)


def text_from(given: str | None, file: str | None) -> str | None:
    """A text that was given, or is in a file or standard input ("-"); None if there is neither.
    Raises "prompt"."""
    if file is None and given != "-":
        return given
    return _read(file or "-").removesuffix("\n").removesuffix("\r")


def batch_requests(args: Namespace, options: Options) -> list[tuple[int, Prompt | None, Options]]:
    """(line number, prompt, options) of each line of --batch; empty lines are skipped.

    Raises "prompt" or "option", naming the line.
    """
    requests = []
    # Not splitlines: JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(_read(args.batch, MAX_BATCH_BYTES).split("\n"), start=1):
        if line.strip():
            where = _line_name(args, number)
            try:
                prompt, changed = _parse_request(_parse_json(line, where), options, where)
            except OutriderError as error:
                raise error_at_line(args, number, error) from None
            requests.append((number, prompt, seeded(changed)))
    if not requests:
        raise OutriderError("prompt", f"{source_name(args.batch)} has no requests", _BATCH_REMEDY)
    return requests


def error_at_line(
    args: Namespace, number: int, error: OutriderError, more: str = ""
) -> OutriderError:
    """The error with its --batch line in the cause. more: text to insert after the line number."""
    where = _line_name(args, number)
    cause = error.cause if where in error.cause else f"{where}{more}: {error.cause}"
    return OutriderError(error.kind, cause, error.remedy)


def _line_name(args: Namespace, number: int) -> str:
    return f"line {number} of {source_name(args.batch)}"


_BATCH_REMEDY = (
    'A line is {"prompt": "..."}, {"messages": [...]} or {"source": "..."}, '
    "optionally with generation options."
)


def _parse_request(body: Any, options: Options, where: str) -> tuple[Prompt | None, Options]:
    if not isinstance(body, dict):
        raise OutriderError("prompt", f"{where} is not a JSON object", _BATCH_REMEDY)
    needed = options.source is None and body.get("source") is None
    if len(body.keys() & {"prompt", "messages"}) not in ((1,) if needed else (0, 1)):
        cause = f"{where} needs either a prompt or messages"
        raise OutriderError("prompt", cause, _BATCH_REMEDY)
    given = {name: value for name, value in body.items() if name not in ("prompt", "messages")}
    changed = options.updated(given)
    if "messages" in body:
        if changed.chat is False:
            cause = "messages need the chat template"
            raise OutriderError("option", cause, "Leave --no-chat-template out.")
        return _check_messages(body["messages"], changed.system, where), changed
    if "prompt" not in body:
        return None, changed
    prompt = body["prompt"]
    ids = isinstance(prompt, list) and all(type(item) is int and item >= 0 for item in prompt)
    if not (ids or isinstance(prompt, str)):
        cause = f"{where}: the prompt is neither a string nor a list of token ids"
        raise OutriderError("prompt", cause, _BATCH_REMEDY)
    return prompt, changed


def _check_messages(value: Any, system: str | None, where: str) -> list[Mapping[str, Any]]:
    remedy = 'Messages are a JSON list: [{"role": "user", "content": "..."}].'
    if not isinstance(value, list) or not value:
        raise OutriderError("prompt", f"{where} has no list of messages", remedy)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise OutriderError("prompt", f"{where}: message {i} has no role", remedy)
        if system is not None and message["role"] == "system":
            cause = f"--system contradicts the system message of {where}"
            raise OutriderError("option", cause, "Leave one of them out.")
    return value


def _parse_json(text: str, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                cause = f"{where} has {key!r} more than once"
                raise OutriderError("prompt", cause, "Leave all but one out.")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        cause = f"{where} is not JSON: {error}"
        remedy = "Check it with python -m json.tool (--json-lines for a batch)."
        raise OutriderError("prompt", cause, remedy) from None


def source_name(source: str) -> str:
    return "standard input" if source == "-" else source


def _read(source: str, max_bytes: int = MAX_FILE_BYTES) -> str:
    """The text of a file, or of standard input for "-". Raises "prompt", also for more
    than max_bytes."""
    remedy = "Give a readable UTF-8 text file, or - for standard input."
    name = source_name(source)
    try:
        if source != "-":
            with open(source, "rb") as file:
                content = file.read(max_bytes + 1)
        elif sys.stdin is None:
            raise OutriderError("prompt", "standard input is closed", remedy)
        else:
            content = sys.stdin.buffer.read(max_bytes + 1)
        if len(content) > max_bytes:
            cause = f"{name} is larger than {size_text(max_bytes)}"
            raise OutriderError("prompt", cause, "Give a shorter one; no context is that long.")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        cause = f"{name} is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        raise OutriderError("prompt", cause, remedy) from None
    except OSError as error:
        raise OutriderError("prompt", f"cannot read {name}: {error.strerror}", remedy) from None
