"""The round on a GPU: draft, verification and sampling as one CUDA graph, one wait a round.

Texts and lengths live on the device (outrider.h, "between the calls of the models"), so the graph
of the next round is launched before the host has read this one: its results cross while the GPU
goes on. The host decides who takes part and when a text is over; a round that was launched for a
text that turns out to be over is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.cuda import CaptureError
from ..backends.device import DeviceCall, DeviceEngine
from ..backends.engine import Logits
from ..files.errors import OutriderError
from ..sampling import kernel
from ..sampling.rules import Verdict
from ..sampling.sampler import SlotSampling
from ..sequence import ActiveSequence, Request, RoundResult, SlotPlan, SlotResult
from ..slots import SlotTable
from . import launch as cuda_kernel
from .launch import BLOCK, FILTERS, PENALTIES, SEQUENCE, Device, DeviceLogits, Loop
from .memory import MOST_ENDS, Buffers, Results, Sizes, step_bytes

logger = logging.getLogger("outrider")
Action = Callable[[], None]  # puts something on the stream


@dataclass(frozen=True, slots=True)
class Shape:
    """What a graph is for: draft steps, the slots 0 .. batch - 1, what they may ask of sampling."""

    gamma: int
    batch: int
    flags: int


@dataclass(slots=True)
class InFlight:
    """A round that was launched. wanted: draft tokens, by who takes part; readers: those of them
    who have not seen its results."""

    shape: Shape
    wanted: dict[ActiveSequence, int]
    memory: npt.NDArray[np.uint8]
    event: Any
    readers: set[ActiveSequence] = field(default_factory=set)
    arrays: list[Any] | None = None  # of Results.views, once it has landed
    timed: bool = False


class DeviceRounds:
    """See `Rounds`. The engines enqueue on `stream`, and nobody else does.

    graphs: capture rounds; otherwise, and where a capture fails (which is said), each call is
    launched by itself. ahead: launch a round before the last one's results are read.
    """

    def __init__(
        self,
        device: Device,
        stream: int,
        target: DeviceEngine,
        draft: DeviceEngine | None,
        *,
        vocab_size: int,
        max_len: int,
        max_gamma: int,
        draft_max_len: int | None = None,
        graphs: bool = True,
        ahead: bool = True,
    ):
        self.target, self.draft, self.slots = target, draft, SlotTable(target.slots)
        self.supports_draft_options = False
        self.kinds: frozenset[str] = frozenset({"model"} if draft else ())
        self._device, self._stream = device, stream
        self._vocab_size, self._max_len = vocab_size, max_len
        self._draft_width = min(vocab_size, draft.vocab_size) if draft else 0
        self._draft_max_len = (draft_max_len or max_len) if draft else 0
        self._graphs_wanted, self._ahead = graphs, ahead
        sizes = Sizes(
            target.slots, max_gamma if draft else 0, max_len, target.capacity, target.vocab_size,
            draft.vocab_size if draft else 0,
        )  # fmt: skip
        self._sizes = sizes
        self._at = Buffers.allocate(device, sizes, stream)
        self._programs: dict[Shape, list[Action]] = {}
        self._first_tokens: dict[tuple[Shape, int], list[Action]] = {}  # of each slot
        self._graphs: dict[Shape, Any] = {}
        self._pending: dict[ActiveSequence, InFlight] = {}
        self._landed: list[tuple[npt.NDArray[np.uint8], Any]] = []  # pinned memory to use again
        self._flags: dict[ActiveSequence, int] = {}
        self._wished: dict[
            ActiveSequence, int
        ] = {}  # gammas asked for while another's round was ahead
        self._turns = b""  # those on the device

    # Rounds

    def start(self, sequence: ActiveSequence) -> SlotResult:
        begin = time.perf_counter()
        self._device.use()
        index = sequence.slot.index
        self._flags[sequence] = flags_of(sequence.request)
        self._write(sequence)
        logits = self._prefill(self.target, self._at.tokens, index, 0, len(sequence.slot.tokens))
        shape = Shape(0, 1, self._flags[sequence])
        program = self._first_tokens.get((shape, index))
        if program is None:
            program = self._first_tokens[shape, index] = self._first_token(shape, index, logits)
        self._upload_turns({sequence: 0}, index + 1)
        for action in program:
            action()
        in_flight = self._fly(shape, {sequence: 0})
        result = self._part(in_flight, SlotPlan(sequence, 0, 0, 1))
        sequence.stats.time_prefill = time.perf_counter() - begin
        return result

    def run(self, plans: Sequence[SlotPlan], /) -> RoundResult:
        self._device.use()
        result = RoundResult()
        new = []
        for plan in plans:
            if in_flight := self._pending.get(plan.sequence):
                if plan.gamma != in_flight.wanted[plan.sequence]:
                    self._wished[plan.sequence] = plan.gamma
            else:  # a policy may ask for a gamma once, to try it
                new.append(replace(plan, gamma=self._wished.pop(plan.sequence, plan.gamma)))
        if new:
            self._catch_up(new, result)
            self._launch(new, 0)
        launched = [self._pending.pop(plan.sequence) for plan in plans]
        # The rows that a log-probability is read from would be overwritten.
        if self._ahead and all(plan.sequence.request.logprobs is None for plan in plans):
            self._launch(
                [
                    plan
                    for plan, in_flight in zip(plans, launched, strict=True)
                    if plan.left > 1 and plan.gamma == in_flight.wanted[plan.sequence]
                ],
                1,
            )
        for plan, in_flight in zip(plans, launched, strict=True):
            result.parts.append(self._part(in_flight, plan, result))
        return result

    def forget(self, sequence: ActiveSequence) -> None:
        self._flags.pop(sequence, None)
        self._wished.pop(sequence, None)
        if in_flight := self._pending.pop(sequence, None):
            self._read(in_flight, sequence)
        if sequence.error is not None:
            self._device.use()
            for engine in (self.target, self.draft):
                if engine is not None:
                    engine.clear(sequence.slot.index)

    def _shape(self, plans: Sequence[SlotPlan], ahead: int) -> Shape:
        """Of a round `ahead` rounds after the one that the plans' limits are of."""
        # Few graphs: near the end of a text the kernels draft fewer, in a graph of the same width.
        drafting = any(plan.gamma and plan.limit > ahead for plan in plans)
        flags = 0
        for plan in plans:
            flags |= self._flags[plan.sequence]
        return Shape(
            max(plan.gamma for plan in plans) if drafting else 0,
            1 + max(plan.sequence.slot.index for plan in plans),
            flags,
        )

    def _launch(self, plans: Sequence[SlotPlan], ahead: int) -> None:
        """Launch a round for these; see `_shape`."""
        if not plans:
            return
        wanted = {plan.sequence: plan.gamma for plan in plans}
        shape = self._shape(plans, ahead)
        play = self._player(shape)
        self._upload_turns(wanted, shape.batch)
        play()
        in_flight = self._fly(shape, wanted)
        for sequence in wanted:
            self._pending[sequence] = in_flight

    def _fly(self, shape: Shape, wanted: dict[ActiveSequence, int]) -> InFlight:
        """Have the results of what is on the stream copied down."""
        if self._landed:
            memory, event = self._landed.pop()
        else:
            most = Results.size(self._sizes.slots, self._sizes.max_gamma)
            memory, event = self._device.pinned(most), self._device.event()
        end = Results(shape.batch, shape.gamma).end
        self._device.download(memory[:end], self._at.results, self._stream)
        self._device.record(event, self._stream)
        return InFlight(shape, wanted, memory, event, set(wanted))

    def _part(
        self, in_flight: InFlight, plan: SlotPlan, result: RoundResult | None = None
    ) -> SlotResult:
        """Wait for the round, and read what is this sequence's."""
        if in_flight.arrays is None:
            self._device.wait_for(in_flight.event)
            layout = Results(in_flight.shape.batch, in_flight.shape.gamma)
            in_flight.arrays = list(layout.views(in_flight.memory.copy()))
        verdicts, ratios, drafts, clock = in_flight.arrays
        if result is not None and not in_flight.timed:
            begin, drafted, end = (int(t) for t in clock)
            result.time_draft += (drafted - begin) * 1e-9
            result.time_verify += (end - drafted) * 1e-9
            in_flight.timed = True
        sequence = plan.sequence
        self._read(in_flight, sequence)
        alone = in_flight.shape.batch == 1  # a first token: of any slot
        row = 0 if alone else sequence.slot.index
        gamma = min(in_flight.wanted[sequence], plan.limit)
        found = verdicts[row]
        if found["status"]:
            asked = SlotSampling(
                sequence.request.params, gamma, len(sequence.slot.tokens),
                name=f"slot {sequence.slot.index}",
            )  # fmt: skip
            return SlotResult.broken(kernel.failure(kernel.load(), found, asked))
        verdict = Verdict(
            int(found["accepted"]), int(found["token"]), tuple(ratios[row, : found["examined"]])
        )
        return SlotResult(
            drafts[row, :gamma].tolist(),
            verdict,
            lambda: self._rows(row, in_flight.shape.gamma + 1),
        )

    def _rows(self, row: int, count: int) -> Logits:
        """The target's logits of the last round, from the device."""
        logits = np.empty((count, self.target.vocab_size), np.float32)
        address = self._at.target_logits + row * logits.nbytes
        self._device.read(logits.ctypes.data, address, logits.nbytes)
        return logits

    def _read(self, in_flight: InFlight, sequence: ActiveSequence) -> None:
        """This one needs the results no more. The memory may be used again although a copy into it
        is still to come: the next one into it comes later on the same stream."""
        in_flight.readers.discard(sequence)
        if not in_flight.readers and in_flight.event is not None:
            self._landed.append((in_flight.memory, in_flight.event))

    # Texts

    def _write(self, sequence: ActiveSequence) -> None:
        """The prompt and the options of a sequence to its place on the device."""
        at, request, index = self._at, sequence.request, sequence.slot.index
        ids = np.array(sequence.slot.tokens, np.int64)
        ends = np.array(sorted(request.eos_token_ids), np.int64)
        if len(ends) > MOST_ENDS:
            raise OutriderError(
                "option",
                f"{len(ends)} ids end the text, and a GPU takes {MOST_ENDS}",
                "Leave some out.",
            )
        cuda_kernel.check(request.params)
        texts = 8 * index * self._max_len
        record, slot = np.zeros(1, SEQUENCE), np.zeros(1, kernel.SLOT)
        kernel.fill_slot(slot, 0, SlotSampling(request.params, -1, len(ids), index=index))
        slot["context"] = at.tokens + texts if request.params.repetition_penalty != 1 else 0
        slot["suppress"] = at.ends + 8 * index * MOST_ENDS
        slot["suppress_length"] = len(ends)
        record[0] = (
            at.tokens + texts, at.draft_tokens + texts, at.ends + 8 * index * MOST_ENDS,
            0 if request.ignore_eos else len(ends), len(ids),
            min(len(ids) + request.max_new_tokens, self._max_len), self._draft_max_len,
            len(ids) + request.min_new_tokens, 0,
        )  # fmt: skip
        uploads = [
            (at.tokens + texts, ids),
            (at.ends + 8 * index * MOST_ENDS, ends),
            (at.sequences + index * SEQUENCE.itemsize, record),
            (at.slots + index * kernel.SLOT.itemsize, slot),
        ]
        if self.draft is not None:
            # A narrower draft reads the target's extra tokens as 0 (see `calls.readable`).
            read = np.where(ids < self.draft.vocab_size, ids, 0)
            uploads.append((at.draft_tokens + texts, read))
        for address, array in uploads:
            self._device.upload(address, array, self._stream)

    def _upload_turns(self, wanted: dict[ActiveSequence, int], batch: int) -> None:
        gammas = np.full(batch, -1, np.int32)
        for sequence, gamma in wanted.items():
            gammas[sequence.slot.index] = gamma
        if gammas.tobytes() != self._turns:  # from round to round the same, mostly
            self._turns = gammas.tobytes()
            self._device.upload(self._at.turns, gammas, self._stream)

    def _catch_up(self, plans: Sequence[SlotPlan], result: RoundResult) -> None:
        """Give the draft the rows it lacks: the prompt at first, plain rounds later."""
        begin, any_rows = time.perf_counter(), False
        for plan in plans:
            slot = plan.sequence.slot
            need = len(slot.tokens) - 2  # the first draft step feeds the last two itself
            if min(plan.gamma, plan.limit) and slot.draft_len < need:
                assert self.draft is not None
                self._prefill(self.draft, self._at.draft_tokens, slot.index, slot.draft_len, need)
                slot.draft_len, any_rows = need, True
        if any_rows:
            self._device.wait(self._stream)  # once a text, so that its time is known
            result.time_draft_prefill = time.perf_counter() - begin

    def _prefill(
        self, engine: DeviceEngine, tokens: int, slot: int, start: int, end: int
    ) -> DeviceLogits:
        """Compute the rows start .. end - 1 from the ids at `tokens`; where the last one's logits
        are."""
        counting = self._at.counting
        logits = self._at.target_logits if engine is self.target else self._at.draft_logits
        for begin in range(start, end, engine.chunk):
            count = min(engine.chunk, end - begin)
            engine.enqueue(
                DeviceCall(
                    1, count, 1, tokens + 8 * (slot * self._max_len + begin),
                    counting + 8 * begin, counting + 8 * (count - 1), logits, slot,
                )
            )  # fmt: skip
        return DeviceLogits(logits, 0, 4 * engine.vocab_size, self._vocab_size, "float32")

    # What is launched

    def _player(self, shape: Shape) -> Action:
        """What puts a round of this shape on the stream: a graph, or each call by itself."""
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = self._program(shape, shape)
        if self._graphs_wanted and shape not in self._graphs:
            body = partial(play_all, program)
            self._graphs[shape] = self._capture(
                shape, program, lambda: self._device.capture(body, self._stream)
            )
        graph = self._graphs.get(shape)
        if graph is not None:
            return lambda: self._device.replay(graph, self._stream)
        return lambda: play_all(program)

    def _capture(
        self, shape: Shape, program: list[Action], capture: Callable[[], Any], what: str = "graph"
    ) -> Any:
        """What `capture` makes of a program; None, said in one line, where it cannot be done."""
        # Once for real, with nobody taking part: engines make ready what a capture forbids.
        self._upload_turns({}, shape.batch)
        play_all(program)
        self._device.wait(self._stream)
        try:
            with ExitStack() as stack:
                for engine in (self.target, self.draft):
                    if engine is not None:
                        stack.enter_context(engine.capturing())
                return capture()
        except CaptureError as error:
            logger.warning(
                "rounds of gamma=%d run without a CUDA %s, slower: %s", shape.gamma, what, error
            )
            return None

    def _loop(self, shape: Shape, first: int = 0) -> Loop:
        at, results = self._at, Results(shape.batch, shape.gamma)
        return Loop(
            sequences=at.sequences + first * SEQUENCE.itemsize,
            slots=at.slots + first * kernel.SLOT.itemsize,
            turns=at.turns + 4 * first,
            drafts=at.results + results.drafts,
            verdicts=at.results + results.verdicts,
            draft_ids=at.draft_ids,
            draft_position=at.draft_position,
            step_ids=at.step_ids,
            step_position=at.step_position,
            target_ids=at.target_ids,
            target_position=at.target_position,
            clock=at.results + results.clock,
            slot_count=shape.batch,
            width=shape.gamma,
            draft_vocab_size=self.draft.vocab_size if self.draft else 2**31 - 1,
        )

    def _launch_loop(self, name: str, loop: Loop, step: int = 0) -> Action:
        own = Loop.from_buffer_copy(loop)
        own.step = step
        return lambda: self._device.launch_loop(name, own, self._stream)

    def _launch_plan(self, plan: cuda_kernel.Plan) -> Action:
        return lambda: self._device.launch(plan, self._stream)

    def _sampling(self, shape: Shape, first: int) -> tuple[cuda_kernel.Sizes, cuda_kernel.Buffers]:
        """What the plans of a shape share, with a workspace of its own."""
        results = Results(shape.batch, shape.gamma)
        sizes = cuda_kernel.Sizes(
            shape.batch, shape.gamma, self._vocab_size, self._draft_width if shape.gamma else 0,
            shape.flags, 0,
        )  # fmt: skip
        workspace = self._device.allocate(cuda_kernel.workspace_size(sizes))
        return sizes, cuda_kernel.Buffers(
            self._at.slots + first * kernel.SLOT.itemsize,
            self._at.results + results.drafts,
            self._at.rows,
            self._at.results + results.verdicts,
            self._at.results + results.ratios,
            workspace,
        )

    def _first_token(self, shape: Shape, slot: int, logits: DeviceLogits) -> list[Action]:
        """After a prefill: draw from p alone, as a round without drafts does."""
        sizes, buffers = self._sampling(shape, slot)
        loop = self._loop(shape, slot)
        return [
            self._launch_loop("outrider_begin", loop),
            self._launch_plan(cuda_kernel.plan_verify(sizes, logits, None, buffers, by_index=True)),
            self._launch_loop("outrider_commit", loop),
        ]

    def _program(self, shape: Shape, graph: object) -> list[Action]:
        """A round, in order. All addresses are fixed; what varies is in device memory. graph: whose
        it is (see `DeviceEngine.enqueue`)."""
        at, batch, gamma = self._at, shape.batch, shape.gamma
        sizes, buffers = self._sampling(shape, 0)
        loop = self._loop(shape)
        actions = [self._launch_loop("outrider_begin", loop)]
        drafts = None
        if gamma:
            draft = self.draft
            assert draft is not None
            row, spacing = 4 * draft.vocab_size, step_bytes(batch, draft.vocab_size)
            drafts = DeviceLogits(at.draft_logits, row, spacing, self._draft_width, "float32")
            for step in range(gamma):
                logits = at.draft_logits + step * spacing
                # Two tokens first: after a fully accepted round the draft lacks a row.
                call = (
                    DeviceCall(batch, 1, 1, at.step_ids, at.step_position, at.counting, logits)
                    if step
                    else DeviceCall(batch, 2, 1, at.draft_ids, at.draft_position, at.one, logits)
                )
                actions.append(lambda call=call: draft.enqueue(call, graph))  # type: ignore[misc]
                drawn = DeviceLogits(logits, row, row, self._draft_width, "float32")
                actions.append(
                    self._launch_plan(cuda_kernel.plan_draw(sizes, drawn, buffers, step))
                )
                actions.append(self._launch_loop("outrider_feed", loop, step))
        row = 4 * self.target.vocab_size
        verify = DeviceCall(
            batch, gamma + 1, gamma + 1, at.target_ids, at.target_position, at.counting,
            at.target_logits,
        )  # fmt: skip
        target = DeviceLogits(at.target_logits, (gamma + 1) * row, row, self._vocab_size, "float32")
        verdicts = cuda_kernel.plan_verify(sizes, target, drafts, buffers, by_index=True)
        return [
            *actions,
            lambda: self.target.enqueue(verify, graph),
            self._launch_plan(verdicts),
            self._launch_loop("outrider_commit", loop),
        ]


def play_all(program: list[Action]) -> None:
    for action in program:
        action()


def flags_of(request: Request) -> int:
    """What a request asks of the sampling plans (outrider.h, OUTRIDER_DEVICE_...)."""
    params, flags = request.params, 0
    if params.repetition_penalty != 1 or (request.min_new_tokens and request.eos_token_ids):
        flags |= PENALTIES
    if params.temperature > 0:
        if params.top_k or params.top_p < 1 or params.min_p > 0:
            flags |= FILTERS
        if params.verify == "block":
            flags |= BLOCK
    return flags
