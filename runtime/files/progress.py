"""One line per stage: what, how long. While it runs: a ticking line on a terminal, and elsewhere a
line now and then, so that a log does not stand still for minutes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK = 0.5  # seconds between two looks at the clock
FIRST_LINE = 5.0  # seconds until a log hears of a stage that goes on; then each time twice as long


class Stage:
    """note: what to say about a stage when it is done, such as a size or a difference. phase: what
    it is doing, for who waits."""

    note = ""
    phase = ""


@contextmanager
def stage(part: str, what: str) -> Iterator[Stage]:
    """Print `part  what  seconds  note` on stderr when the block ends well; nothing on a closed
    one."""
    if sys.stderr is None:  # `2>&-`; print would take stdout for it
        yield Stage()
        return
    begin, done, said = time.perf_counter(), threading.Event(), Stage()
    head, terminal = f"{part:<9} {what:<34}", sys.stderr.isatty()

    def tick() -> None:
        following = FIRST_LINE
        while not done.wait(TICK):
            seconds = time.perf_counter() - begin
            text = f"{head} {seconds:6.1f} s ..."
            if terminal:
                sys.stderr.write(f"\r{text} {said.phase[:30]:<30}".rstrip(" ") + "\x1b[K")
                sys.stderr.flush()
            elif seconds >= following:
                print(f"{text} {said.phase}".rstrip(), file=sys.stderr, flush=True)
                following *= 2

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield said
    finally:
        done.set()
        ticker.join()
        if terminal:
            sys.stderr.write("\r\x1b[K")
    seconds = time.perf_counter() - begin
    print(f"{head} {seconds:6.1f} s  {said.note}".rstrip(), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Something that the user should know, and that is no error."""
    if sys.stderr is not None:  # as above
        print(f"note: {text}", file=sys.stderr, flush=True)


def size_text(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
