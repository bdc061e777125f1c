"""Prints one line per stage: what, and how long it took. A running stage updates a line on a
terminal, and elsewhere prints one now and then, so that a log is not silent for minutes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.5  # seconds between updates
FIRST_LINE = 5.0  # seconds until a running stage is first logged; the interval then doubles


class Stage:
    """note: what to print when the stage is done, such as a size or a difference. phase: what it is
    doing now, shown while it runs."""

    note = ""
    phase = ""


@contextmanager
def stage(part: str, what: str) -> Iterator[Stage]:
    """Print `part  what  seconds  note` on stderr when the block succeeds; nothing if stderr is
    closed."""
    if sys.stderr is None:  # `2>&-`; print would fall back to stdout
        yield Stage()
        return
    begin, done, stage_info = time.perf_counter(), threading.Event(), Stage()
    head, terminal = f"{part:<9} {what:<34}", sys.stderr.isatty()

    def tick() -> None:
        following = FIRST_LINE
        while not done.wait(TICK):
            seconds = time.perf_counter() - begin
            text = f"{head} {seconds:6.1f} s ..."
            if terminal:
                sys.stderr.write(f"\r{text} {stage_info.phase[:30]:<30}".rstrip(" ") + "\x1b[K")
                sys.stderr.flush()
            elif seconds >= following:
                print(f"{text} {stage_info.phase}".rstrip(), file=sys.stderr, flush=True)
                following = 2 * seconds  # no line for what passed unseen, as in a suspended process

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield stage_info
    finally:
        done.set()
        ticker.join()
        if terminal:
            sys.stderr.write("\r\x1b[K")
    seconds = time.perf_counter() - begin
    print(f"{head} {seconds:6.1f} s  {stage_info.note}".rstrip(), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print something that the user should know and that is not an error."""
    if sys.stderr is not None:  # as above
        print(f"note: {text}", file=sys.stderr, flush=True)


def size_text(size: int) -> str:
    """A number of bytes in human-readable form."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
