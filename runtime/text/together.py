"""Rounds shared by threads: a request for a round made while another one runs joins the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..sequence import ActiveSequence

Run = Callable[[Callable[[], list[ActiveSequence]]], None]
PATIENCE = 0.1  # how long to wait for the last round's participants, as a share of its duration


@dataclass(eq=False)
class _Asked:
    sequences: Collection[ActiveSequence]
    error: Exception | None = None
    done: bool = False
    withdrawn: bool = False


class Together:
    """One thread runs a round for all threads that have asked by then; the others wait for it.

    A round of two sequences costs little more than a round of one. So the next round waits a moment
    for the sequences of the last one, most of which come back at once. One that does not is not
    waited for again until it asks.
    """

    def __init__(self) -> None:
        # Used instead of `with` on the condition, which an interrupt can break.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[_Asked] = []
        self._runner: _Asked | None = None  # whose thread runs the round of `_chosen`
        self._chosen: list[_Asked] = []
        self._last: set[ActiveSequence] = set()  # unfinished participants of the last round
        self._seconds = 0.0  # duration of the last round

    def round(self, sequences: Collection[ActiveSequence], run: Run) -> None:
        """One round of these sequences and those of other threads. run: runs a round; it must call
        its argument for the sequences, once no thread can release any of them. Raises what the
        round raises, in every thread that takes part."""
        asked = _Asked(list(sequences))
        try:
            if self._join(asked):
                self._serve(run)
        except BaseException:  # an interrupt, wherever it came: this thread wants no round any more
            self._withdraw(asked)
            raise
        if asked.error is not None:
            raise asked.error

    def forget(self, sequence: ActiveSequence) -> None:
        """Stop waiting for a sequence that has left."""
        with self._lock:
            self._last.discard(sequence)
            self._changed.notify_all()

    def _join(self, asked: _Asked) -> bool:
        """Wait for a round of another thread, or become the thread that runs the next one. Returns
        True in the latter case."""
        with self._lock:
            self._waiting.append(asked)
            self._changed.notify_all()
            while self._runner is not None and not asked.done:
                self._changed.wait()
            if asked.done:
                return False
            self._runner = asked
            self._gather()
            self._chosen, self._waiting = self._waiting, []
            return True

    def _gather(self) -> None:
        """Wait for the sequences of the last round."""
        until = time.perf_counter() + PATIENCE * self._seconds
        while self._last - {x for asked in self._waiting for x in asked.sequences}:
            left = until - time.perf_counter()
            if left <= 0 or not self._changed.wait(left):
                return

    def _serve(self, run: Run) -> None:
        def wanted() -> list[ActiveSequence]:
            asking = [x for asked in self._chosen if not asked.withdrawn for x in asked.sequences]
            # An interrupt may have come after a round ended and before its threads were notified.
            took_part.extend(x for x in asking if x.finish_reason is None)
            return took_part

        begin, error, took_part = time.perf_counter(), None, list[ActiveSequence]()
        try:
            run(wanted)
        except Exception as failed:  # noqa: BLE001 - any error is raised in all participants
            error = failed
        with self._lock:
            for asked in self._chosen:
                asked.error, asked.done = error, True
            self._last = {x for x in took_part if x.finish_reason is None}
            self._seconds = time.perf_counter() - begin
            self._runner, self._chosen = None, []
            self._changed.notify_all()

    def _withdraw(self, asked: _Asked) -> None:
        """Leave the round. If this thread was to run it, the others try again without it."""
        with self._lock:
            asked.withdrawn = True
            if self._runner is asked:
                self._waiting = [x for x in self._chosen if not x.done] + self._waiting
                self._runner, self._chosen = None, []
            self._waiting = [x for x in self._waiting if x is not asked]
            self._changed.notify_all()
