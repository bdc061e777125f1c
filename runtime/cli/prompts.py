"""Where prompts come from: --prompt, --prompt-file, --messages, and the JSON lines of --batch."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files.errors import OutriderError
from ..text.engine import Options, Prompt
from .arguments import refuse, seeded


def prompt_from(args: Namespace) -> Prompt:
    """The prompt of --prompt, --prompt-file or --messages. Raises "prompt"."""
    if args.messages is not None:
        text, name = _read(args.messages), source_name(args.messages)
        return _messages(_json(text, name), args.system, name)
    if args.prompt is not None and args.prompt != "-":
        return str(args.prompt)
    return _read(args.prompt or args.prompt_file).removesuffix("\n").removesuffix("\r")


def batch_requests(args: Namespace, options: Options) -> list[tuple[int, Prompt, Options]]:
    """(line number, prompt, options) of each line of --batch; empty lines are skipped.

    Raises "prompt" or "option", naming the line.
    """
    requests = []
    # Not splitlines: JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(_read(args.batch).split("\n"), start=1):
        if line.strip():
            where = f"line {number} of {source_name(args.batch)}"
            try:
                prompt, changed = _request(_json(line, where), options, args.draft, where)
                refuse(changed)
            except OutriderError as error:
                cause = error.cause if where in error.cause else f"{where}: {error.cause}"
                raise OutriderError(error.kind, cause, error.remedy) from None
            requests.append((number, prompt, seeded(changed)))
    if not requests:
        raise OutriderError("prompt", f"{source_name(args.batch)} has no requests", _BATCH_REMEDY)
    return requests


_BATCH_REMEDY = 'A line is {"prompt": "..."} or {"messages": [...]}, with options if need be.'


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole, value))


_WHOLE = (_is_whole, "a whole number from 0 up")
_NUMBER = (lambda value: type(value) in (int, float), "a number")
_FLAG = (lambda value: type(value) is bool, "true or false")
_STRING = (lambda value: type(value) is str, "a string")
# What JSON may say for each option; null where the default is None.
JSON_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: _is_whole(value) and value > 0, "a whole number from 1 up"),
    "min_new_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "seed": _WHOLE,
    "gamma": (
        lambda value: _is_whole(value) or value in ("auto", "transformers"),
        "a whole number from 0 up, auto or transformers",
    ),
    "fallback": _STRING,
    "draft": _STRING,
    "draft_temperature": _NUMBER,
    "draft_threshold": _NUMBER,
    "verify": _STRING,
    "lenience": _NUMBER,
    "stop": (lambda value: type(value) is str or _is_strings(value), "a string or a list of them"),
    "stop_token_ids": (_is_ids, "a list of token ids"),
    "ignore_eos": _FLAG,
    "logprobs": _WHOLE,
    "chat": _FLAG,
    "system": _STRING,
}


def _request(body: Any, options: Options, draft: str | None, where: str) -> tuple[Prompt, Options]:
    if not isinstance(body, dict):
        raise OutriderError("prompt", f"{where} is not a JSON object", _BATCH_REMEDY)
    if ("prompt" in body) == ("messages" in body):
        cause = f"{where} needs either a prompt or messages"
        raise OutriderError("prompt", cause, _BATCH_REMEDY)
    for name, value in body.items():
        if name in ("prompt", "messages"):
            continue
        if name not in JSON_TYPES:
            raise OutriderError(
                "option", f"unknown key {name!r}", f"There are {', '.join(JSON_TYPES)}."
            )
        fits, kind = JSON_TYPES[name]
        if not fits(value) and not (value is None and getattr(Options, name) is None):
            raise OutriderError("option", f"{name}={value!r} does not fit", f"It is {kind}.")
    overrides = {name: body[name] for name in JSON_TYPES if name in body}
    changed = replace(options, **overrides)
    if draft == "none" and changed.gamma != 0:
        raise OutriderError(
            "option", f"gamma={changed.gamma} contradicts --draft none", "Leave one of them out."
        )
    if "messages" in body:
        if changed.chat is False:
            raise OutriderError(
                "option", "messages need the chat template", "Leave --no-chat-template out."
            )
        return _messages(body["messages"], changed.system, where), changed
    prompt = body["prompt"]
    if not isinstance(prompt, str) and not _is_ids(prompt):
        cause = f"{where}: the prompt is neither a text nor a list of token ids"
        raise OutriderError("prompt", cause, _BATCH_REMEDY)
    return prompt, changed


def _messages(value: Any, system: str | None, where: str) -> list[Mapping[str, Any]]:
    remedy = 'Messages are a JSON list: [{"role": "user", "content": "..."}].'
    if not isinstance(value, list) or not value:
        raise OutriderError("prompt", f"{where} has no list of messages", remedy)
    for i, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise OutriderError("prompt", f"{where}: message {i} has no role", remedy)
        if system is not None and message["role"] == "system":
            raise OutriderError(
                "option",
                f"--system contradicts the system message of {where}",
                "Leave one of them out.",
            )
    return value


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OutriderError(
            "prompt", f"{where} is not JSON: {error}", "Check it with python -m json.tool."
        ) from None


def source_name(source: str) -> str:
    return "standard input" if source == "-" else source


def _read(source: str) -> str:
    """The text of a file, or of standard input for "-". Raises "prompt"."""
    remedy = "Give a readable UTF-8 text file, or - for standard input."
    try:
        if source != "-":
            content = Path(source).read_bytes()
        elif sys.stdin is None:
            raise OutriderError("prompt", "standard input is closed", remedy)
        else:
            content = sys.stdin.buffer.read()
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        cause = (
            f"{source_name(source)} is not UTF-8: byte {error.start} is {content[error.start]:#04x}"
        )
        raise OutriderError("prompt", cause, remedy) from None
    except OSError as error:
        cause = f"cannot read {source_name(source)}: {error.strerror}"
        raise OutriderError("prompt", cause, remedy) from None
