"""What the command line writes: texts as they come and progress, to streams whose failures have a
name."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TextIO

from ..files.errors import OutriderError
from ..text.pace import Smooth
from ..text.stream import Stream
from . import report


class Output:
    """A standard stream whose failures have a name: disk full, closed.

    A closed pipe passes as BrokenPipeError, which ends the command quietly.
    """

    def __init__(self, stream: TextIO | None, name: str):
        self._stream, self._name = stream, name
        self.terminal = stream is not None and stream.isatty()

    def encode(self, encoding: str | None, errors: str) -> None:
        if self._stream is not None and hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(encoding=encoding, errors=errors)

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            # What is buffered would fail again when the interpreter exits, with a traceback.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            raise OutriderError(
                "disk",
                f"cannot write to {self._name}: {error.strerror}",
                "Free some space, or redirect it to another place.",
            ) from None

    def line(self, text: str) -> None:
        self.write(text + "\n")

    def lines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.line(line)


def show(stream: Stream, args: Namespace, out: Output) -> str:
    """Write a text as it comes, or with --no-stream nothing; returns what is to be seen of it."""
    shown: list[str] = []
    with ExitStack() as stack:
        smooth = stack.enter_context(Smooth(out.write)) if args.pace == "smooth" else None
        for event in stream:
            pieces = [report.color(*p) if args.color else p[0] for p in event.pieces]
            if smooth is not None:
                smooth.show(pieces)
            elif args.stream:
                out.write("".join(pieces))
            shown += pieces
    return "".join(shown)


def standard_streams(*, json: bool) -> tuple[Output, Output]:
    """stdout and stderr. json: UTF-8 then, as JSON prescribes. Raises "disk" for a closed stdout;
    a closed stderr is a wish for silence."""
    if sys.stdout is None:  # `>&-`
        raise OutriderError("disk", "stdout is closed", "Redirect it to a file or a pipe.")
    out = Output(sys.stdout, "stdout")
    if json:
        out.encode("utf-8", "strict")
    else:
        out.encode(None, "backslashreplace")
    return out, Output(sys.stderr, "stderr")


class Progress:
    """A line on a terminal that is rewritten in place, and gone at the end."""

    def __init__(self, err: Output, count: int):
        self._err, self._count, self._shown = err, count, 0.0

    def show(self, done: int, speed: float) -> None:
        now = time.perf_counter()
        if self._err.terminal and now - self._shown > 0.1:
            self._shown = now
            self._err.write(f"\r{done}/{self._count} done, {speed:.1f} tok/s\x1b[K")

    def clear(self) -> None:
        if self._shown:
            self._err.write("\r\x1b[K")
