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
from .memory import results_dtype
from .programs import Shape, enqueue_all
from .rounds import DeviceRounds, InFlight

RING_ENTRIES = 16  # rounds that the GPU may be ahead; a power of two, since the counters wrap
POLL_SECONDS = 20e-6  # seconds between two polls of the ring
CACHE_LINE = 64  # bytes: counters written by host and GPU are in different cache lines


class LoopingRounds(DeviceRounds):
    """`DeviceRounds` as a loop. Rounds run one by one if a request wants log-probabilities, which
    need each round's logits, and, with a warning, if the driver has no conditional nodes."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, ahead=False, **options)
        self._result_bytes = results_dtype(self._sizes.slots, self._sizes.max_gamma).itemsize
        self._ring = self._device.allocate_pinned(RING_ENTRIES * self._result_bytes).reshape(
            RING_ENTRIES, self._result_bytes
        )
        counters = self._device.allocate_pinned(3 * CACHE_LINE)
        counters[:] = 0
        self._written_count, self._read_count, self._stop = (
            counters[i * CACHE_LINE :][:4].view(np.uint32) for i in range(3)
        )
        self._loops: dict[Shape, Graph | None] = {}
        # The running loop: its shape, and the gamma of each sequence in it.
        self._running_loop: tuple[Shape, dict[ActiveSequence, int]] | None = None
        self._unread_rounds: dict[ActiveSequence, deque[InFlight]] = {}  # of loops that were ended
        self._forgotten: set[ActiveSequence] = set()

    def start(self, sequence: ActiveSequence) -> SlotResult:
        self._end_loop()
        return super().start(sequence)

    def forget(self, sequence: ActiveSequence) -> None:
        # May be called at any time, even during a round of others: the next call of `run` or
        # `start` ends the loop.
        self._stop[0] = 1
        self._forgotten.add(sequence)
        super().forget(sequence)

    def run(self, plans: Sequence[SlotPlan], /) -> RoundResult:
        self._device.make_current()
        gammas = {plan.sequence: plan.gamma for plan in plans}
        use_loop = all(plan.sequence.request.logprobs is None for plan in plans)
        if self._running_loop and (self._running_loop[1] != gammas or not use_loop):
            self._end_loop()
        for sequence in gammas:
            if unread := self._unread_rounds.get(sequence):
                self._pending[sequence] = unread.popleft()
        # A gamma that was requested for a single round runs as a round, not as a loop.
        if not use_loop or any(x in self._pending or x in self._requested_gammas for x in gammas):
            return super().run(plans)
        result = RoundResult()
        in_flight = self._next_round()
        if in_flight is None:
            if not self._begin_loop(plans, gammas, result):
                return super().run(plans)
            in_flight = self._next_round()
            assert in_flight is not None, "a loop begins with a round"
        result.parts = [self._slot_result(in_flight, plan, result) for plan in plans]
        return result

    def _begin_loop(
        self, plans: Sequence[SlotPlan], gammas: dict[ActiveSequence, int], result: RoundResult
    ) -> bool:
        """Launch a loop. Returns False if this shape has none."""
        shape = self._shape(plans, 0)
        if shape not in self._loops:
            self._loops[shape] = self._capture_loop(shape) if self._use_graphs else None
        loop = self._loops[shape]
        if loop is None:
            return False
        self._catch_up(plans, result)
        self._stop[0] = 0
        self._upload_gammas(gammas, shape.batch)
        self._device.replay(loop, self._stream)
        self._running_loop = shape, gammas
        return True

    def _next_round(self) -> InFlight | None:
        """Wait for the loop's next round; None if the loop has ended and all rounds were read."""
        if self._running_loop is None:
            return None
        seen = int(self._read_count[0])
        while int(self._written_count[0]) == seen:
            # Check in this order: the loop may have written a round just before it ended.
            if self._device.is_stream_done(self._stream) and int(self._written_count[0]) == seen:
                self._running_loop = None
                return None
            time.sleep(POLL_SECONDS)
        memory = self._ring[seen % RING_ENTRIES].copy()
        self._read_count[0] = (seen + 1) % 2**32
        shape, gammas = self._running_loop
        return InFlight(shape, gammas, memory, None, set(gammas), shape.read(memory))

    def _end_loop(self) -> None:
        """Stop the loop after its current round, and keep the rounds that nobody has read."""
        if self._running_loop is not None:
            self._device.make_current()
            self._stop[0] = 1
            self._device.wait_for_stream(self._stream)
            while flight := self._next_round():
                for sequence in flight.gammas:
                    self._unread_rounds.setdefault(sequence, deque()).append(flight)
        while self._forgotten:
            self._unread_rounds.pop(self._forgotten.pop(), None)

    def _capture_loop(self, shape: Shape) -> Graph | None:
        owner = ("loop", shape)  # engine state separate from that of the single round's graph
        program = self._round_program(shape, owner)
        at, counters = self._buffers, (self._written_count, self._read_count, self._stop)

        def body(condition: int) -> None:
            enqueue_all(program)
            written, seen, stop = (counter.ctypes.data for counter in counters)
            ring = Ring(
                condition, at.sequences, at.gammas, at.results, self._ring.ctypes.data, written,
                seen, stop, shape.batch, self._result_bytes, RING_ENTRIES, 0,
            )  # fmt: skip
            self._device.launch_bookkeeping("outrider_again", ring, self._stream)

        return self._capture(
            shape, program, lambda: self._device.capture_loop(body, self._stream), "loop"
        )
