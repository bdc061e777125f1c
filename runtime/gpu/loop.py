"""Rounds as a loop on the GPU: one launch, and results through a ring in page-locked memory.

The round's graph is the body of a conditional node (CUDA Programming Guide, "Conditional graph
nodes"): the GPU begins the next round without the host. The loop ends when all texts have ended or
the ring is full of results that the host has not read. The host ends it when a sequence joins,
leaves or changes its gamma. Off by default until it has been measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backends.cuda import Graph
from ..sequence import ActiveSequence, RoundResult, SlotPlan, SlotResult
from .launch import Ring
from .memory import results
from .programs import Shape, play_all
from .rounds import DeviceRounds, InFlight

ENTRIES = 16  # rounds that the GPU may be ahead; a power of two, since the counters wrap
PAUSE = 20e-6  # seconds between two polls of the ring
LINE = 64  # bytes: counters written by host and GPU are in different cache lines


class LoopingRounds(DeviceRounds):
    """`DeviceRounds` as a loop. Rounds run one by one if a request wants log-probabilities, which
    need each round's logits, and, with a warning, if the driver has no conditional nodes."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, ahead=False, **options)
        self._size = results(self._sizes.slots, self._sizes.max_gamma).itemsize
        self._ring = self._device.pinned(ENTRIES * self._size).reshape(ENTRIES, self._size)
        counters = self._device.pinned(3 * LINE)
        counters[:] = 0
        self._written, self._seen, self._stop = (
            counters[i * LINE :][:4].view(np.uint32) for i in range(3)
        )
        self._loops: dict[Shape, Graph | None] = {}
        # The running loop: its shape, and the gamma of each sequence in it.
        self._current: tuple[Shape, dict[ActiveSequence, int]] | None = None
        self._unread: dict[ActiveSequence, deque[InFlight]] = {}  # rounds of loops that were ended
        self._gone: set[ActiveSequence] = set()

    def start(self, sequence: ActiveSequence) -> SlotResult:
        self._end()
        return super().start(sequence)

    def forget(self, sequence: ActiveSequence) -> None:
        # May be called at any time, even during a round of others: the next call of `run` or
        # `start` ends the loop.
        self._stop[0] = 1
        self._gone.add(sequence)
        super().forget(sequence)

    def run(self, plans: Sequence[SlotPlan], /) -> RoundResult:
        self._device.use()
        wanted = {plan.sequence: plan.gamma for plan in plans}
        loops = all(plan.sequence.request.logprobs is None for plan in plans)
        if self._current and (self._current[1] != wanted or not loops):
            self._end()
        for sequence in wanted:
            if unread := self._unread.get(sequence):
                self._pending[sequence] = unread.popleft()
        # A gamma that was requested for a single round runs as a round, not as a loop.
        if not loops or any(x in self._pending or x in self._wished for x in wanted):
            return super().run(plans)
        result = RoundResult()
        in_flight = self._next()
        if in_flight is None:
            if not self._begin(plans, wanted, result):
                return super().run(plans)
            in_flight = self._next()
            assert in_flight is not None, "a loop begins with a round"
        result.parts = [self._part(in_flight, plan, result) for plan in plans]
        return result

    def _begin(
        self, plans: Sequence[SlotPlan], wanted: dict[ActiveSequence, int], result: RoundResult
    ) -> bool:
        """Launch a loop. Returns False if this shape has none."""
        shape = self._shape(plans, 0)
        if shape not in self._loops:
            self._loops[shape] = self._capture_loop(shape) if self._graphs_wanted else None
        loop = self._loops[shape]
        if loop is None:
            return False
        self._catch_up(plans, result)
        self._stop[0] = 0
        self._upload_turns(wanted, shape.batch)
        self._device.replay(loop, self._stream)
        self._current = shape, wanted
        return True

    def _next(self) -> InFlight | None:
        """Wait for the loop's next round; None if the loop has ended and all rounds were read."""
        if self._current is None:
            return None
        seen = int(self._seen[0])
        while int(self._written[0]) == seen:
            # Check in this order: the loop may have written a round just before it ended.
            if self._device.done(self._stream) and int(self._written[0]) == seen:
                self._current = None
                return None
            time.sleep(PAUSE)
        memory = self._ring[seen % ENTRIES].copy()
        self._seen[0] = (seen + 1) % 2**32
        shape, wanted = self._current
        return InFlight(shape, wanted, memory, None, set(wanted), shape.read(memory))

    def _end(self) -> None:
        """Stop the loop after its current round, and keep the rounds that nobody has read."""
        if self._current is not None:
            self._device.use()
            self._stop[0] = 1
            self._device.wait(self._stream)
            while flight := self._next():
                for sequence in flight.wanted:
                    self._unread.setdefault(sequence, deque()).append(flight)
        while self._gone:
            self._unread.pop(self._gone.pop(), None)

    def _capture_loop(self, shape: Shape) -> Graph | None:
        owner = ("loop", shape)  # engine state separate from that of the single round's graph
        program = self._program(shape, owner)
        at, counters = self._at, (self._written, self._seen, self._stop)

        def body(condition: int) -> None:
            play_all(program)
            written, seen, stop = (counter.ctypes.data for counter in counters)
            ring = Ring(
                condition, at.sequences, at.turns, at.results, self._ring.ctypes.data, written,
                seen, stop, shape.batch, self._size, ENTRIES, 0,
            )  # fmt: skip
            self._device.launch_loop("outrider_again", ring, self._stream)

        return self._capture(
            shape, program, lambda: self._device.capture_loop(body, self._stream), "loop"
        )
