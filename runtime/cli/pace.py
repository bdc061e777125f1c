"""Text at an even pace: a round's text is shown token by token until the next round.

A separate thread shows it, so decoding does not wait; the last round's text is shown at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread

INTERVAL_WEIGHT = 0.3  # weight of the latest interval between rounds in the moving average
MAX_SPREAD = 0.5  # most seconds over which a round's text is spread


class SmoothWriter:
    """A context manager around `write`, which is called from another thread.

    The pieces of a round are spread evenly over the expected interval between rounds, or written
    faster if more than one round is waiting. What `write` raises is raised by `show`, or on exit.
    """

    def __init__(self, write: Callable[[str], None]):
        self._write = write
        self._queue: SimpleQueue[tuple[str, float] | None] = SimpleQueue()
        self._interval, self._last = 0.0, time.monotonic()
        self._failure: BaseException | None = None
        self._ending = False
        self._thread = Thread(target=self._run, name="pace", daemon=True)

    def __enter__(self) -> SmoothWriter:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._ending = True
        self._queue.put(None)
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def show(self, pieces: Sequence[str]) -> None:
        """Queue the text of a round."""
        if self._failure is not None:
            raise self._failure
        now = time.monotonic()
        interval, self._last = now - self._last, now
        self._interval += (INTERVAL_WEIGHT if self._interval else 1.0) * (interval - self._interval)
        pieces = [piece for piece in pieces if piece]
        for piece in pieces:
            waiting = max(self._queue.qsize() + 1, len(pieces))
            self._queue.put((piece, min(self._interval, MAX_SPREAD) / waiting))

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                piece, pause = item
                self._write(piece)
                until = time.monotonic() + pause
                while not self._ending and (left := until - time.monotonic()) > 0:
                    time.sleep(min(left, 0.02))  # short, to notice the end of the text
        except BaseException as error:  # noqa: BLE001 - it is raised in the other thread
            self._failure = error
