"""One line per stage: what, how long; while it runs, a ticking line on a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stage:
    """What to say about a stage when it is done, such as a size or a difference."""

    note = ""


@contextmanager
def stage(part: str, what: str) -> Iterator[Stage]:
    """Print `part  what  seconds  note` on stderr when the block ends well."""
    begin, done, said = time.perf_counter(), threading.Event(), Stage()
    head = f"{part:<9} {what:<34}"

    def tick() -> None:
        while not done.wait(0.5):
            sys.stderr.write(f"\r{head} {time.perf_counter() - begin:6.1f} s ...")
            sys.stderr.flush()

    ticker = threading.Thread(target=tick, daemon=True)
    if sys.stderr.isatty():
        ticker.start()
    try:
        yield said
    finally:
        done.set()
        if ticker.is_alive():
            ticker.join()
            sys.stderr.write("\r\x1b[K")
    seconds = time.perf_counter() - begin
    print(f"{head} {seconds:6.1f} s  {said.note}".rstrip(), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Something that the user should know, and that is no error."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def size_text(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
