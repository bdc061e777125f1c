"""A conversation in the terminal; every prompt includes the messages before it."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

from ..files.errors import OutriderError
from . import report
from .arguments import refuse_unread
from .output import Output, Session

HELP = "Ctrl-C stops an answer, /reset starts a new conversation, Ctrl-D exits."


def converse(session: Session) -> None:
    """Read a line and stream the answer, repeatedly until standard input ends.

    The part of an interrupted answer that was generated stays in the conversation; a refused
    message does not. Raises OutriderError "disk" if an answer cannot be written.
    """
    engine, args, err = session.engine, session.args, session.err
    if engine.tokenizer.chat_template is None and engine.manifest.pair.start_ids is None:
        cause = f"--chat needs a chat template, and {args.engines} has none"
        raise OutriderError("option", cause, "Use --prompt, or add --chat-template FILE.")
    request = engine.request([{"role": "user", "content": "."}], session.options)
    refuse_unread(args, [request.draft] if request.gamma else [])
    if err.is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - arrow keys and history, where Python has them
        err.line(HELP)
    messages: list[dict[str, Any]] = []
    while (text := _read(err)) is not None:
        if text.strip() == "/reset":
            messages.clear()
        elif text.strip():
            messages.append({"role": "user", "content": text})
            try:
                messages.append({"role": "assistant", "content": _answer(session, messages)})
            except OutriderError as error:
                if error.kind == "disk":
                    raise
                messages.pop()
                err.line(f"error: {error}")


def _answer(session: Session, messages: list[dict[str, Any]]) -> str:
    with session.engine.stream(messages, session.options) as stream:
        try:
            session.show(stream)
        except KeyboardInterrupt:
            stream.close()
        finally:
            session.out.write("\n")
    if stream.result is not None and session.args.stats != "none":
        session.err.line(report.answer(stream.result))
        if session.args.stats == "detailed":
            session.err.lines(report.detailed(stream.result.stats))
    return stream.text


def _read(err: Output) -> str | None:
    """The next message; None at the end of standard input."""
    while True:
        try:
            if sys.stdin is None:
                return None
            if sys.stdin.isatty() and sys.stdout.isatty():
                return input("> ")
            # Bytes: text is decoded in blocks, and an error would lose all messages of its block.
            line = sys.stdin.buffer.readline()
            return line.decode().rstrip("\r\n") if line else None
        except EOFError:
            err.line("")
            return None
        except KeyboardInterrupt:  # discards the line typed so far
            err.line("")
        except UnicodeDecodeError:
            err.line("error: prompt: the message is not UTF-8. Type it again.")
