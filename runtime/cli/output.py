"""What the command line writes: text as it comes and progress, to streams with named errors."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from io import RawIOBase
from typing import TextIO

from ..files.errors import OutriderError, check_stdout, discard
from ..text.engine import TextEngine
from ..text.options import Options
from ..text.stream import Stream
from . import report
from .pace import SmoothWriter


class Output:
    """A standard stream whose write errors become OutriderError("disk").

    A closed pipe still raises BrokenPipeError, which ends the command quietly.
    """

    def __init__(self, stream: TextIO | None, name: str):
        self._stream, self._name = stream, name
        self.is_terminal = stream is not None and stream.isatty()

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
                "Free some space, or redirect the output elsewhere.",
            ) from None

    def line(self, text: str) -> None:
        self.write(text + "\n")

    def lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.line(line)


@dataclass(frozen=True)
class Session:
    """What a command works with: an open bundle, the arguments, stdout and stderr."""

    engine: TextEngine
    args: Namespace
    options: Options
    out: Output
    err: Output

    def show(self, stream: Stream) -> str:
        """Write the text as it comes (nothing with --no-stream); returns the text as displayed."""
        shown: list[str] = []
        smooth = SmoothWriter(self.out.write) if self.args.pace == "smooth" else None
        with smooth or nullcontext():
            for event in stream:
                pieces = [report.color(*p) if self.args.color else p[0] for p in event.pieces]
                if smooth is not None:
                    smooth.show(pieces)
                elif self.args.stream:
                    self.out.write("".join(pieces))
                shown += pieces
        return "".join(shown)

    def show_engine(self) -> None:
        """Print what the output is independent of (the `bits:` line), and the memory used."""
        if self.args.stats != "none":
            self.err.line(self.engine.bits.line())
            if self.engine.memory:
                self.err.line(report.memory(self.engine.memory))


def standard_streams(*, json: bool) -> tuple[Output, Output]:
    """stdout and stderr. json: write UTF-8, as JSON prescribes. Raises "disk" if stdout is closed;
    a closed stderr silences messages. These streams and stdin are made blocking."""
    check_stdout()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(
            encoding="utf-8" if json else None, errors="strict" if json else "backslashreplace"
        )
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # A parent with an event loop may pass non-blocking streams: input would be cut off where
        # its writer pauses, and output where its reader does.
        with suppress(AttributeError, OSError, ValueError):  # closed, or not a file
            os.set_blocking(stream.fileno(), True)
    return Output(_buffered(sys.stdout), "stdout"), Output(_buffered(sys.stderr), "stderr")


def _buffered(stream: TextIO | None) -> TextIO | None:
    """The stream, with a buffer even under PYTHONUNBUFFERED: Python's unbuffered streams write
    what a disk or pipe has room for, and drop the rest of the text without an error."""
    if not isinstance(getattr(stream, "buffer", None), RawIOBase):
        return stream
    assert stream is not None
    return open(stream.fileno(), "w", encoding=stream.encoding, errors=stream.errors, closefd=False)


class Progress:
    """A progress line on a terminal, rewritten in place and erased at the end of the block."""

    def __init__(self, err: Output, count: int):
        self._err, self._count, self._shown = err, count, 0.0

    def show(self, done: int, speed: float) -> None:
        now = time.perf_counter()
        if self._err.is_terminal and now - self._shown > 0.1:
            self._shown = now
            self._err.write(f"\r{done}/{self._count} done, {speed:.1f} tok/s\x1b[K")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._err.write("\r\x1b[K")
