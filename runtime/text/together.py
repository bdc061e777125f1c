"""Rounds that threads share: who wants one while another runs joins the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..sequence import ActiveSequence

Run = Callable[[Callable[[], list[ActiveSequence]]], None]
PATIENCE = 0.1  # of the last round's time, for which those that took part in it are awaited


@dataclass(eq=False)
class _Asked:
    sequences: Collection[ActiveSequence]
    error: Exception | None = None
    done: bool = False
    withdrawn: bool = False


class Together:
    """One thread runs a round for all that have asked by then; the others wait for it.

    A round of two costs little more than a round of one. So whoever took part in the last round is
    awaited for a moment, since most come back at once. Who does not is not awaited again before it
    asks.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # not by the condition, whose `with` an interrupt may cut
        self._changed = threading.Condition(self._lock)
        self._waiting: list[_Asked] = []
        self._runner: _Asked | None = None  # whose thread runs the round of those that are chosen
        self._chosen: list[_Asked] = []
        self._last: set[ActiveSequence] = set()  # who took part in the last round, and may again
        self._seconds = 0.0  # of the last round

    def round(self, sequences: Collection[ActiveSequence], run: Run) -> None:
        """One round of these, and of those of others. run: a round, of sequences that it asks for
        once nobody can release any of them. Raises what the round raises, to all of them."""
        asked = _Asked(list(sequences))
        try:
            if self._join(asked):
                self._serve(run)
        except BaseException:  # an interrupt, wherever it came: nobody wants this round any more
            self._withdraw(asked)
            raise
        if asked.error is not None:
            raise asked.error

    def forget(self, sequence: ActiveSequence) -> None:
        """The sequence has left: nobody awaits it."""
        with self._lock:
            self._last.discard(sequence)
            self._changed.notify_all()

    def _join(self, asked: _Asked) -> bool:
        """Wait for a round of another thread, or be the one who runs the next: whether it is."""
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
        """Those of the last round are awaited."""
        until = time.perf_counter() + PATIENCE * self._seconds
        while self._last - {x for asked in self._waiting for x in asked.sequences}:
            left = until - time.perf_counter()
            if left <= 0 or not self._changed.wait(left):
                return

    def _serve(self, run: Run) -> None:
        def wanted() -> list[ActiveSequence]:
            asking = [x for asked in self._chosen if not asked.withdrawn for x in asked.sequences]
            # An interrupt may have come when the round was over and nobody had been told.
            took_part.extend(x for x in asking if x.finish_reason is None)
            return took_part

        begin, error, took_part = time.perf_counter(), None, list[ActiveSequence]()
        try:
            run(wanted)
        except Exception as failed:  # noqa: BLE001 - whatever it is, all that took part are told
            error = failed
        with self._lock:
            for asked in self._chosen:
                asked.error, asked.done = error, True
            self._last = {x for x in took_part if x.finish_reason is None}
            self._seconds = time.perf_counter() - begin
            self._runner, self._chosen = None, []
            self._changed.notify_all()

    def _withdraw(self, asked: _Asked) -> None:
        """Take no part in a round; the others of one that this thread runs try again without it."""
        with self._lock:
            asked.withdrawn = True
            if self._runner is asked:
                self._waiting = [x for x in self._chosen if not x.done] + self._waiting
                self._runner, self._chosen = None, []
            self._waiting = [x for x in self._waiting if x is not asked]
            self._changed.notify_all()
