"""A conversation in the terminal: what was said before is part of every prompt."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import suppress
from typing import Any

from ..files.errors import OutriderError
from ..text.engine import TextEngine
from ..text.options import Options
from . import report
from .arguments import refuse_unread
from .output import Output, show

HELP = "Ctrl-C ends an answer, /reset forgets what was said, Ctrl-D ends the conversation."


def converse(
    engine: TextEngine, args: Namespace, options: Options, out: Output, err: Output
) -> int:
    """Read a line, stream the answer, and again until standard input ends.

    An answer that is interrupted stays in the conversation as far as it came; a message that is
    refused does not.
    """
    if not engine.manifest.pair.tokenizer.chat_template:
        raise OutriderError(
            "option",
            f"--chat needs a chat template, and {args.engines} has none",
            "Use --prompt, or a checkpoint with a chat template.",
        )
    refuse_unread(args, [engine.request("", options)])
    if err.terminal:
        _line_editing()
        err.line(HELP)
    said: list[dict[str, Any]] = []
    while (text := _read(err)) is not None:
        if text.strip() == "/reset":
            said.clear()
        elif text.strip():
            said.append({"role": "user", "content": text})
            try:
                answer = _answer(engine, args, said, options, out, err)
                said.append({"role": "assistant", "content": answer})
            except OutriderError as error:
                said.pop()
                err.line(f"error: {error}")
    return 0


def _answer(
    engine: TextEngine,
    args: Namespace,
    said: list[dict[str, Any]],
    options: Options,
    out: Output,
    err: Output,
) -> str:
    """The answer's text, shown as it comes."""
    with engine.stream(said, **vars(options)) as stream:
        try:
            show(stream, args, out)
        except KeyboardInterrupt:
            stream.close()
        finally:
            out.write("\n")
    if stream.result is not None and args.stats != "none":
        err.line(report.answer(stream.result))
    return stream.text


def _read(err: Output) -> str | None:
    """The next message; None at the end of standard input."""
    while True:
        try:
            if sys.stdin is None:
                return None
            if sys.stdin.isatty() and sys.stdout.isatty():
                return input("> ")
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        except EOFError:
            err.line("")
            return None
        except KeyboardInterrupt:  # of a line that was begun
            err.line("")
        except UnicodeDecodeError:
            err.line("error: prompt: the message is not UTF-8. Type it again.")


def _line_editing() -> None:
    """Arrow keys and history, where Python has them."""
    with suppress(ImportError):
        import readline  # noqa: F401
