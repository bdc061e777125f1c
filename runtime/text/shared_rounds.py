"""Rounds shared by threads: a request for a round made while another one runs joins the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ..sequence import ActiveSequence

RunRound = Callable[[Callable[[], list[ActiveSequence]]], None]
WAIT_SHARE = 0.1  # how long to wait for the last round's participants, as a share of its duration


@dataclass(eq=False)
class _RoundRequest:
    sequences: Collection[ActiveSequence]
    thread: int = field(default_factory=threading.get_ident)
    error: Exception | None = None
    done: bool = False
    withdrawn: bool = False


class RoundSharer:
    """One thread runs a round for all threads that have asked by then; the others wait for it.

    A round of two sequences costs little more than a round of one. So the next round waits a moment
    for the sequences of the last one, most of which come back at once. One that does not is not
    waited for again until it asks.
    """

    def __init__(self) -> None:
        # Used instead of `with` on the condition, which an interrupt can break.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[_RoundRequest] = []
        self._runner: _RoundRequest | None = None  # whose thread runs the round of `_joined`
        self._joined: list[_RoundRequest] = []
        self._last_participants: set[ActiveSequence] = set()  # those that are unfinished
        self._last_seconds = 0.0  # duration of the last round

    def round(self, sequences: Collection[ActiveSequence], run: RunRound) -> None:
        """One round of these sequences and those of other threads. run: runs a round; it must call
        its argument for the sequences, once no thread can release any of them. Raises what the
        round raises, in every thread that takes part."""
        request = _RoundRequest(list(sequences))
        try:
            if self._join(request):
                self._run_round(run)
        except BaseException:  # an interrupt, wherever it came: this thread wants no round any more
            self._withdraw(request)
            raise
        if request.error is not None:
            raise request.error

    @property
    def is_running(self) -> bool:
        return self._runner is not None

    def is_used_by(self, thread: int) -> bool:
        """Whether this thread runs a round, or waits for one."""
        requests = (*self._waiting, *self._joined)
        return any(x.thread == thread and not x.withdrawn for x in requests)

    def forget(self, sequence: ActiveSequence) -> None:
        """Stop waiting for a sequence that has left."""
        with self._lock:
            self._last_participants.discard(sequence)
            self._changed.notify_all()

    def _join(self, request: _RoundRequest) -> bool:
        """Wait for a round of another thread, or become the thread that runs the next one. Returns
        True in the latter case."""
        with self._lock:
            self._waiting.append(request)
            self._changed.notify_all()
            while not request.done and self._runner is not None:
                self._changed.wait()
            if request.done:
                return False
            self._runner = request
            self._wait_for_last_participants()
            self._joined, self._waiting = self._waiting, []
            return True

    def _wait_for_last_participants(self) -> None:
        """Wait for the sequences of the last round."""
        until = time.perf_counter() + WAIT_SHARE * self._last_seconds
        while self._last_participants - {x for request in self._waiting for x in request.sequences}:
            left = until - time.perf_counter()
            if left <= 0 or not self._changed.wait(left):
                return

    def _run_round(self, run: RunRound) -> None:
        def wanted() -> list[ActiveSequence]:
            requests = [request for request in self._joined if not request.withdrawn]
            asking = [x for request in requests for x in request.sequences]
            # An interrupt may have come after a round ended and before its threads were notified.
            participants.extend(x for x in asking if x.finish_reason is None)
            return participants

        begin, error, participants = time.perf_counter(), None, list[ActiveSequence]()
        try:
            run(wanted)
        except Exception as failed:  # noqa: BLE001 - any error is raised in all participants
            error = failed
        with self._lock:
            for request in self._joined:
                request.error, request.done = error, True
            self._last_participants = {x for x in participants if x.finish_reason is None}
            self._last_seconds = time.perf_counter() - begin
            self._runner, self._joined = None, []
            self._changed.notify_all()

    def _withdraw(self, request: _RoundRequest) -> None:
        """Leave the round. If this thread was to run it, the others try again without it."""
        with self._lock:
            request.withdrawn = True
            if self._runner is request:
                self._waiting = [x for x in self._joined if not x.done] + self._waiting
                self._runner, self._joined = None, []
            self._waiting = [x for x in self._waiting if not x.withdrawn]
            self._changed.notify_all()
