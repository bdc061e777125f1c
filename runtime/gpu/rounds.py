"""The round on a GPU: draft, verification and sampling as one CUDA graph, with one wait per round.

Texts and lengths are kept on the device (outrider.h, "between the calls of the models"), so the
graph of the next round is launched before the host has read this one's results, which are copied
while the GPU goes on. The host decides which sequences take part and when a text has ended; a round
that was launched for a text that turns out to have ended is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.device import DeviceCall, DeviceEngine
from ..backends.engine import Logits
from ..files.errors import OutriderError
from ..sampling import kernel
from ..sampling.rules import Verdict
from ..sampling.sampler import SlotSampling
from ..sequence import ActiveSequence, Request, RoundResult, SlotPlan, SlotResult
from ..slots import SlotTable
from .launch import BLOCK, COUPLED, FILTERS, PENALTIES, SEQUENCE
from .memory import MAX_END_IDS, results_dtype
from .programs import Action, Programs, Shape, enqueue_all


@dataclass(slots=True)
class InFlight:
    """A round that was launched. gammas: draft tokens of each sequence that takes part; readers:
    the sequences that have not read their results yet."""

    shape: Shape
    gammas: dict[ActiveSequence, int]
    memory: npt.NDArray[np.uint8]
    event: Any
    readers: set[ActiveSequence]
    results: Any = None  # see `memory.results_dtype`; set once they have arrived
    timed: bool = False


class DeviceRounds(Programs):
    """See `Rounds`; engines and options are those of `Programs`. Only the engines and this object
    use the stream.

    draft_max_len: the draft's own context length. ahead: launch a round before the results of the
    last one are read.
    """

    def __init__(
        self, *engines: Any, draft_max_len: int | None = None, ahead: bool = True, **options: Any
    ):
        super().__init__(*engines, **options)
        self.slots = SlotTable(self.target.slots)
        self.on_host = False
        self._max_len, self._ahead = self._sizes.max_len, ahead
        self._draft_max_len = (draft_max_len or self._max_len) if self.draft else 0
        self._first_token_programs: dict[tuple[Shape, int], list[Action]] = {}  # of each slot
        self._pending: dict[ActiveSequence, InFlight] = {}
        # Pinned memory for reuse, and its event.
        self._free_downloads: list[tuple[npt.NDArray[np.uint8], Any]] = []
        # Gammas requested while a round with another gamma had been launched ahead.
        self._requested_gammas: dict[ActiveSequence, int] = {}

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset({"model"} if self.draft else ())

    # Rounds

    def read_prompt(self, sequence: ActiveSequence) -> SlotResult:
        begin = time.perf_counter()
        self._device.make_current()
        index = sequence.slot.index
        self._upload_sequence(sequence)
        logits = self._prefill(
            self.target, self._buffers.tokens, index, 0, len(sequence.slot.tokens)
        )
        shape = Shape(0, 1, flags_of(sequence.request))
        program = self._first_token_programs.get((shape, index))
        if program is None:
            program = self._first_token_programs[shape, index] = self._first_token_program(
                shape, index, logits
            )
        self._upload_gammas({sequence: 0}, index + 1)
        enqueue_all(program)
        in_flight = self._enqueue_download(shape, {sequence: 0})
        result = self._slot_result(in_flight, SlotPlan(sequence, 0, 0, 1))
        sequence.stats.time_prefill = time.perf_counter() - begin
        return result

    def run(self, plans: Sequence[SlotPlan], /) -> RoundResult:
        self._device.make_current()
        result = RoundResult()
        new = []
        for plan in plans:
            if in_flight := self._pending.get(plan.sequence):
                if plan.gamma != in_flight.gammas[plan.sequence]:
                    self._requested_gammas[plan.sequence] = plan.gamma
            else:  # a policy may request a gamma for a single round, to try it
                new.append(
                    replace(plan, gamma=self._requested_gammas.pop(plan.sequence, plan.gamma))
                )
        if new:
            self._catch_up(new, result)
            self._launch_round(new, 0)
        launched = [self._pending.pop(plan.sequence) for plan in plans]
        # A round ahead would overwrite the logits that log-probabilities are read from.
        if self._ahead and all(plan.sequence.request.logprobs is None for plan in plans):
            self._launch_round(
                [
                    plan
                    for plan, in_flight in zip(plans, launched, strict=True)
                    if plan.tokens_left > 1 and plan.gamma == in_flight.gammas[plan.sequence]
                ],
                1,
            )
        for plan, in_flight in zip(plans, launched, strict=True):
            result.parts.append(self._slot_result(in_flight, plan, result))
        return result

    def forget(self, sequence: ActiveSequence) -> None:
        self._requested_gammas.pop(sequence, None)
        if in_flight := self._pending.pop(sequence, None):
            self._mark_read(in_flight, sequence)
        if sequence.error is not None:
            self._device.make_current()
            self.clear(sequence)

    def _shape(self, plans: Sequence[SlotPlan], ahead: int) -> Shape:
        """The shape of a round that comes `ahead` rounds after the one that the plans are for."""
        # To need few graphs, a text near its end drafts fewer tokens in a graph of the same width.
        drafting = any(plan.gamma and plan.max_drafts > ahead for plan in plans)
        return Shape(
            max(plan.gamma for plan in plans) if drafting else 0,
            1 + max(plan.sequence.slot.index for plan in plans),
            reduce(or_, (flags_of(plan.sequence.request) for plan in plans)),
        )

    def _launch_round(self, plans: Sequence[SlotPlan], ahead: int) -> None:
        """Launch a round for these plans. ahead: see `_shape`."""
        if not plans:
            return
        gammas = {plan.sequence: plan.gamma for plan in plans}
        shape = self._shape(plans, ahead)
        enqueue_round = self._round_action(shape)
        self._upload_gammas(gammas, shape.batch)
        enqueue_round()
        in_flight = self._enqueue_download(shape, gammas)
        for sequence in gammas:
            self._pending[sequence] = in_flight

    def _enqueue_download(self, shape: Shape, gammas: dict[ActiveSequence, int]) -> InFlight:
        """Enqueue the copy of the results to the host, behind the round on the stream."""
        if self._free_downloads:
            memory, event = self._free_downloads.pop()
        else:
            size = results_dtype(self._sizes.slots, self._sizes.max_gamma).itemsize
            memory, event = self._device.allocate_pinned(size), self._device.create_event()
        end = shape.results_dtype.itemsize
        self._device.download(memory[:end], self._buffers.results, self._stream)
        self._device.record(event, self._stream)
        return InFlight(shape, gammas, memory, event, set(gammas))

    def _slot_result(
        self, in_flight: InFlight, plan: SlotPlan, result: RoundResult | None = None
    ) -> SlotResult:
        """Wait for the round, and read this sequence's results."""
        if in_flight.results is None:
            self._device.wait_for_event(in_flight.event)
            in_flight.results = in_flight.shape.read(in_flight.memory.copy())
        results = in_flight.results
        if result is not None and not in_flight.timed:
            begin, drafted, end = results["clock"].tolist()
            result.time_draft += (drafted - begin) * 1e-9
            result.time_verify += (end - drafted) * 1e-9
            in_flight.timed = True
        sequence = plan.sequence
        self._mark_read(in_flight, sequence)
        single_slot = in_flight.shape.batch == 1  # slot 0, or a first token in any slot
        row = 0 if single_slot else sequence.slot.index
        gamma = min(in_flight.gammas[sequence], plan.max_drafts)
        record, ratios = results["verdicts"][row], results["ratios"][row]
        if record["status"]:
            slot = sequence.slot
            sampling = SlotSampling(sequence.request.params, gamma, len(slot.tokens), slot.index)
            return SlotResult.failed(kernel.verdict_error(kernel.load(), record, sampling))
        verdict = Verdict(
            int(record["accepted"]), int(record["token"]), tuple(ratios[: record["examined"]])
        )
        drafts = results["drafts"][row, :gamma].tolist()
        return SlotResult(
            drafts, verdict, lambda: self._download_logits(row, in_flight.shape.gamma + 1)
        )

    def _download_logits(self, row: int, count: int) -> Logits:
        """Copy the target's logits of the last round from the device."""
        address = self._buffers.target_logits + row * count * self.target.row_bytes
        return self.target.read_logits(address, count)

    def _mark_read(self, in_flight: InFlight, sequence: ActiveSequence) -> None:
        """Record that this sequence has read the results. Their memory may be reused even if the
        copy into it is still pending, since the next one comes later on the same stream."""
        in_flight.readers.discard(sequence)
        if not in_flight.readers:
            self._free_downloads.append((in_flight.memory, in_flight.event))

    # Texts

    def _upload_sequence(self, sequence: ActiveSequence) -> None:
        """Write the prompt and the options of a sequence to its place on the device."""
        at, request, index = self._buffers, sequence.request, sequence.slot.index
        ids = np.array(sequence.slot.tokens, np.int64)
        ends = np.array(sorted(request.eos_token_ids), np.int64)
        if len(ends) > MAX_END_IDS:
            raise OutriderError(
                "option", f"{len(ends)} end-of-text ids; a GPU supports {MAX_END_IDS}", "Use fewer."
            )
        texts = 8 * index * self._max_len
        text, draft_text = at.tokens + texts, at.draft_tokens + texts
        own_ends = at.ends + 8 * index * MAX_END_IDS
        record, slot = np.zeros(1, SEQUENCE), np.zeros(1, kernel.SLOT)
        kernel.fill_slot(slot, 0, SlotSampling(request.params, -1, len(ids), index=index))
        slot["context"] = text if request.params.repetition_penalty != 1 else 0
        slot["suppress"] = own_ends
        slot["suppress_length"] = len(ends)
        record[0] = (
            text, draft_text, own_ends,
            0 if request.ignore_eos else len(ends), len(ids),
            min(len(ids) + request.max_new_tokens, self._max_len), self._draft_max_len,
            len(ids) + request.min_new_tokens, 0,
        )  # fmt: skip
        uploads = [
            (text, ids),
            (own_ends, ends),
            (at.sequences + index * SEQUENCE.itemsize, record),
            (at.slots + index * kernel.SLOT.itemsize, slot),
        ]
        if self.draft is not None:
            # A narrower draft reads the target's extra tokens as 0: `calls.replace_unknown_ids`.
            read = np.where(ids < self.draft.vocab_size, ids, 0)
            uploads.append((draft_text, read))
        for address, array in uploads:
            self._device.upload(address, array, self._stream)

    def _catch_up(self, plans: Sequence[SlotPlan], result: RoundResult) -> None:
        """Compute the rows that the draft lacks: those of the prompt, later of plain rounds."""
        begin, any_rows = time.perf_counter(), False
        for plan in plans:
            slot = plan.sequence.slot
            if plan.drafts and slot.draft_unread:
                assert self.draft is not None
                need = slot.draft_len + slot.draft_unread
                self._prefill(
                    self.draft, self._buffers.draft_tokens, slot.index, slot.draft_len, need
                )
                slot.draft_len, any_rows = need, True
        if any_rows:
            self._device.wait_for_stream(self._stream)  # once per text, to measure the time
            result.time_draft_prefill = time.perf_counter() - begin

    def _prefill(
        self, engine: DeviceEngine, tokens: int, slot: int, start: int, end: int
    ) -> kernel.Logits:
        """Compute the rows start .. end - 1 from the ids at `tokens`. Returns the place of the last
        row's logits."""
        counting = self._buffers.counting
        logits = (
            self._buffers.target_logits if engine is self.target else self._buffers.draft_logits
        )
        for begin in range(start, end, engine.chunk):
            count = min(engine.chunk, end - begin)
            engine.enqueue(
                DeviceCall(
                    1, count, 1, tokens + 8 * (slot * self._max_len + begin),
                    counting + 8 * begin, counting + 8 * (count - 1), logits, slot,
                )
            )  # fmt: skip
        return self._logits_view(engine, logits, 0, engine.row_bytes)


def flags_of(request: Request) -> int:
    """The flags of the sampling features that a request uses (outrider.h, OUTRIDER_DEVICE_...)."""
    params, flags = request.params, 0
    if params.repetition_penalty != 1 or (request.min_new_tokens and request.eos_token_ids):
        flags |= PENALTIES
    if params.temperature > 0:
        if params.top_k or params.top_p < 1 or params.min_p > 0:
            flags |= FILTERS
        if params.verify == "block":
            flags |= BLOCK
        if params.verify == "coupled":
            flags |= COUPLED
    return flags
