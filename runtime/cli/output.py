"""What the command line writes: texts as they come and progress, to streams whose failures have a
name."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import RawIOBase
from typing import TextIO

from ..files.errors import OutriderError, discard
from ..text.engine import TextEngine
from ..text.options import Options
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

    def write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            discard(self._stream)
            raise OutriderError(
                "disk",
                f"cannot write to {self._name}: {error.strerror}",
                "Free some space, or redirect it to another place.",
            ) from None

    def line(self, text: str) -> None:
        self.write(text + "\n")

    def lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.line(line)


@dataclass(frozen=True)
class Session:
    """What a command works with: an open bundle, what was asked for, stdout and stderr."""

    engine: TextEngine
    args: Namespace
    options: Options
    out: Output
    err: Output

    def show(self, stream: Stream) -> str:
        """Write a text as it comes, or with --no-stream nothing; returns what is to be seen."""
        shown: list[str] = []
        with ExitStack() as stack:
            smooth = None
            if self.args.pace == "smooth":
                smooth = stack.enter_context(Smooth(self.out.write))
            for event in stream:
                pieces = [report.color(*p) if self.args.color else p[0] for p in event.pieces]
                if smooth is not None:
                    smooth.show(pieces)
                elif self.args.stream:
                    self.out.write("".join(pieces))
                shown += pieces
        return "".join(shown)

    def show_engine(self) -> None:
        """What its texts do not depend on, and its memory."""
        if self.args.stats != "none":
            self.err.line(self.engine.bits.line())
            if self.engine.memory:
                self.err.line(report.memory(self.engine.memory))


def standard_streams(*, json: bool) -> tuple[Output, Output]:
    """stdout and stderr. json: UTF-8 then, as JSON prescribes. Raises "disk" for a closed stdout;
    a closed stderr is a wish for silence. They, and stdin, wait for who is at their other end."""
    if sys.stdout is None:  # `>&-`
        raise OutriderError("disk", "stdout is closed", "Redirect it to a file or a pipe.")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(
            encoding="utf-8" if json else None, errors="strict" if json else "backslashreplace"
        )
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # A process with an event loop may hand on one that does not block: a prompt would be cut
        # off where its writer paused, and a text where its reader did.
        with suppress(AttributeError, OSError, ValueError):  # closed, or no file
            os.set_blocking(stream.fileno(), True)
    return Output(_buffered(sys.stdout), "stdout"), Output(_buffered(sys.stderr), "stderr")


def _buffered(stream: TextIO | None) -> TextIO | None:
    """The stream, but of PYTHONUNBUFFERED one with a buffer: Python's own would write what a disk
    or a pipe has room for, and drop the rest of the text without an error."""
    if not isinstance(getattr(stream, "buffer", None), RawIOBase):
        return stream
    assert stream is not None
    return open(stream.fileno(), "w", encoding=stream.encoding, errors=stream.errors, closefd=False)


class Progress:
    """A line on a terminal that is rewritten in place, and gone at the end of the block."""

    def __init__(self, err: Output, count: int):
        self._err, self._count, self._shown = err, count, 0.0

    def show(self, done: int, speed: float) -> None:
        now = time.perf_counter()
        if self._err.terminal and now - self._shown > 0.1:
            self._shown = now
            self._err.write(f"\r{done}/{self._count} done, {speed:.1f} tok/s\x1b[K")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._err.write("\r\x1b[K")
