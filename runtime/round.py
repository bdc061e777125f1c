"""Algorithm 1 of Leviathan et al. 2023 on the host. `gpu.rounds.DeviceRounds` runs it on a GPU,
with the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from .backends.engine import Engine, source_ids
from .calls import copy_prompt, encode_source, forward_slots, prefill, slot_range, slot_sampling
from .drafts.draft import Sources
from .drafts.lookup import Corpus
from .drafts.proposer import Proposer
from .drafts.tables import Tables
from .files.errors import PER_REQUEST_KINDS, OutriderError
from .sampling.sampler import Sampler
from .sequence import ActiveSequence, RoundResult, Rounds, SlotPlan, SlotResult
from .slots import SlotTable
from .stats import Stopwatch


def speculate(
    plans: Sequence[SlotPlan],
    proposer: Proposer,
    target: Engine,
    sampler: Sampler,
    slots: SlotTable,
) -> list[SlotResult]:
    """Algorithm 1 of Leviathan et al. 2023 for several sequences, each in its slot with its own
    gamma, up to the commit (`Slot.commit`), which the decoder does.

    Raises OutriderError("numeric") for a broken row. The round can then be repeated: nothing is
    committed, and random numbers depend only on the position in the text.
    """
    gammas = {plan.sequence: plan.drafts for plan in plans}
    # Sample x1..x(gamma) from the draft, with their distributions q; the sampler's round begins.
    for sequence in proposer.sequences_behind(gammas):
        proposer.catch_up(sequence)
    drafted = proposer.propose(gammas)

    # Run the target once: p1..p(gamma+1) after the text, after x1, ... after x(gamma).
    bounds = slot_range(gammas)
    inputs = {
        x: (x.slot.target_len, [x.slot.pending, *drafts]) for x, drafts in drafted.tokens.items()
    }
    logits = forward_slots(target, slots.target_lengths, bounds, inputs)

    # Accept each x with probability min(1, p/q); correct the first rejected one, or extend.
    verdicts = sampler.verify(logits, drafted.logits or None, first_slot=bounds[0])
    return [
        SlotResult(drafts, verdict, partial(logits.__getitem__, sequence.slot.index - bounds[0]))
        for (sequence, drafts), verdict in zip(drafted.tokens.items(), verdicts, strict=True)
    ]


class HostRounds(Rounds):
    """`Rounds` on the host. sampler: for as many slots as the engines have. inner, tables, corpus:
    see `drafts.draft.Sources`. reuse: use rows that a slot still holds for a new prompt."""

    on_host = True

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        sampler: Sampler,
        inner: Sampler | None = None,
        tables: Tables | None = None,
        corpus: Corpus | None = None,
        *,
        reuse: bool = True,
    ):
        held_rows = (target.cached_rows, draft.cached_rows if draft else None) if reuse else ()
        self.target, self.draft, self.sampler = target, draft, sampler
        copies = reuse and not target.cached_rows.states and hasattr(target, "copy_rows")
        self.slots = SlotTable(target.slots, *held_rows, copies=copies)
        self._clock = clock = Stopwatch()
        width = min(sampler.vocab_size, draft.vocab_size) if draft else sampler.vocab_size
        sources = Sources(width, self.slots, draft, inner, tables, corpus)
        # Rounds and drafts contain no timing code; the objects they call are timed.
        self._sampler = clock.timed_proxy(
            sampler, begin="host", give="host", draw="sample", verify="sample"
        )
        self._target = clock.timed_proxy(target, forward="verify", encode="verify")
        self.proposer = Proposer(sources, self._sampler)
        self._proposer = clock.timed_proxy(self.proposer, propose="draft", catch_up="draft_prefill")

    @property
    def kinds(self) -> frozenset[str]:
        return self.proposer.kinds

    def prepare_prompt(self, sequence: ActiveSequence) -> int:
        slot, source = sequence.slot, sequence.request.source
        if self.target.cached_rows.slot_with(source) is None:
            return len(slot.tokens) + (len(source_ids(source)) or self.target.chunk)
        self._encode(sequence)  # at most a copy
        return len(slot.tokens) - copy_prompt(self.target, self.slots, sequence)

    def _encode(self, sequence: ActiveSequence) -> None:
        slot = sequence.slot
        sequence.request = encode_source(self._target, slot.index, sequence.request)
        slot.tokens[:] = sequence.request.prompt

    def read_prompt(self, sequence: ActiveSequence) -> SlotResult | None:
        slot = sequence.slot
        self._clock.lap()
        self._encode(sequence)
        end = min(slot.target_len + self.target.chunk, len(slot.tokens))
        rows = prefill(self._target, slot.index, slot.tokens[:end], slot.target_len)[None, None]
        sequence.stats.time_prefill += self._clock.lap()["verify"]
        if end < len(slot.tokens):
            slot.target_len = end
            return None
        self.sampler.begin([slot_sampling(sequence, 0)])
        try:
            (verdict,) = self.sampler.verify(rows, first_slot=slot.index)
        except OutriderError as error:
            return SlotResult.failed(error)
        return SlotResult([], verdict, lambda: rows[0])

    def read_ahead(self, sequence: ActiveSequence) -> bool:
        self.proposer.catch_up(sequence, one_chunk=True)
        return True

    def run(self, plans: Sequence[SlotPlan], /) -> RoundResult:
        self._clock.lap()
        parts = self._run_or_split(plans)
        lap = self._clock.lap()
        return RoundResult(parts, lap["draft"], lap["draft_prefill"], lap["verify"], lap["sample"])

    def _run_or_split(self, plans: Sequence[SlotPlan]) -> list[SlotResult]:
        """Run a round; if it fails because of one sequence, run each sequence separately."""
        try:
            return speculate(plans, self._proposer, self._target, self._sampler, self.slots)
        except OutriderError as error:
            if error.kind not in PER_REQUEST_KINDS:
                raise
            if len(plans) == 1:
                return [SlotResult.failed(error)]
        alone = (part for plan in plans for part in self._run_or_split([plan]))
        # Copied, because the logits of these rounds share a buffer.
        return [replace(part, rows=partial(np.asarray, part.rows().copy())) for part in alone]

    def forget(self, sequence: ActiveSequence) -> None:
        if sequence.error is not None:
            self.clear(sequence)
        self.proposer.forget(sequence)  # last: a draft of one's own may raise
