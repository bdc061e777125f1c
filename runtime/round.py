"""A round as the decoder asks for it, and the one that the host drives, call by call.

`device_rounds.DeviceRounds` is the one that a GPU runs by itself. Both give the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .backends.engine import Engine, Logits
from .drafts.calls import idle_positions, place, prefill, span
from .drafts.host import HostDraft
from .drafts.lookup import Corpus
from .drafts.tables import Tables
from .sampling.rules import Verdict
from .sampling.sampler import Sampler
from .sequence import ActiveSequence, DraftKind
from .slots import SlotTable


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One sequence's part of a round.

    gamma: draft tokens that are wanted. limit: how many can still become text or fit a context.
    left: tokens that the text can still have.
    """

    sequence: ActiveSequence
    gamma: int
    limit: int
    left: int


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What a round made of one sequence. rows: the target's raw logits [K, V], K > len(drafts);
    valid until the next round."""

    drafts: list[int]
    verdict: Verdict
    rows: Callable[[], Logits]


@dataclass(slots=True)
class RoundResult:
    """One part for each turn, and seconds: in the draft's steps, in rows that it lacked before
    them, in the target, in draws and verification. A GPU's draws count as drafting, and its
    verification as the target's."""

    parts: list[SlotResult] = field(default_factory=list)
    time_draft: float = 0.0
    time_draft_prefill: float = 0.0
    time_verify: float = 0.0
    time_sample: float = 0.0


class Rounds(Protocol):
    """Two engines, their slots, and the sampling between them; one thread at a time."""

    @property
    def target(self) -> Engine: ...

    @property
    def draft(self) -> Engine | None: ...

    @property
    def slots(self) -> SlotTable: ...

    @property
    def kinds(self) -> frozenset[DraftKind]:
        """Who can propose here."""
        ...

    @property
    def supports_draft_options(self) -> bool:
        """Whether a draft can have a temperature of its own, and stop where it is unsure."""
        ...

    def start(self, sequence: ActiveSequence) -> SlotResult:
        """Prefill the target with the prompt and draw the first token. Raises "numeric"."""
        ...

    def run(self, turns: Sequence[SlotPlan]) -> RoundResult:
        """One round: draft, verify, accept or correct or extend. Nothing is committed to the slots,
        but `draft_len` where the draft was given rows that it lacked. One that was launched ahead
        keeps the gamma of its launch. Raises "numeric"; of a sequence that took part nothing can be
        said then, and it must be released."""
        ...

    def forget(self, sequence: ActiveSequence) -> None:
        """The sequence leaves its slot."""
        ...


class HostRounds:
    """See `Rounds`. sampler: for as many slots as the engines have. draft: who proposes; it says
    what else may be given: `host_draft.HostDraft`."""

    supports_draft_options = True

    def __init__(
        self,
        target: Engine,
        draft: Engine | None,
        sampler: Sampler,
        inner: Sampler | None = None,
        tables: Tables | None = None,
        corpus: Corpus | None = None,
    ):
        self.target, self.sampler = target, sampler
        self.slots = SlotTable(target.slots)
        self.proposer = HostDraft(draft, sampler, self.slots, inner, tables, corpus)
        self.kinds = self.proposer.kinds

    @property
    def draft(self) -> Engine | None:
        return self.proposer.engine

    def start(self, sequence: ActiveSequence) -> SlotResult:
        slot = sequence.slot
        begin = time.perf_counter()
        rows = prefill(self.target, slot.index, slot.tokens, 0)[None, None]
        sequence.stats.time_prefill = time.perf_counter() - begin
        self.sampler.begin([place(sequence, 0)])
        (verdict,) = self.sampler.verify(rows, first_slot=slot.index)
        return SlotResult([], verdict, lambda: rows[0])

    def forget(self, sequence: ActiveSequence) -> None:
        self.proposer.forget(sequence)

    def run(self, turns: Sequence[SlotPlan]) -> RoundResult:
        gammas = {turn.sequence: min(turn.gamma, turn.limit) for turn in turns}
        drafted = self.proposer.propose(gammas)
        begin = time.perf_counter()
        first, logits = self._verify(gammas, drafted.tokens)
        after_verify = time.perf_counter()
        verdicts = self.sampler.verify(logits, drafted.logits or None, first_slot=first)
        outcome = RoundResult()
        for sequence, verdict in zip(gammas, verdicts, strict=True):
            rows = logits[sequence.slot.index - first]
            part = SlotResult(drafted.tokens[sequence], verdict, lambda rows=rows: rows)  # type: ignore[misc]
            outcome.parts.append(part)
        outcome.time_draft, outcome.time_draft_prefill = drafted.time_draft, drafted.time_prefill
        outcome.time_verify = after_verify - begin
        outcome.time_sample = drafted.time_sample + time.perf_counter() - after_verify
        return outcome

    def _verify(
        self, gammas: dict[ActiveSequence, int], drafts: dict[ActiveSequence, list[int]]
    ) -> tuple[int, Logits]:
        """One target call over [pending, x1..x(gamma)]: logits [B, gamma+1, V] of slots first.."""
        first, last = span(gammas)
        width = max(gammas.values()) + 1
        ids = np.zeros((last - first, width), np.int64)
        position = idle_positions(self.slots, first, last, "target_len")
        for sequence in gammas:
            row = sequence.slot.index - first
            feed = [sequence.slot.pending, *drafts[sequence]]
            ids[row, : len(feed)] = feed
            position[row] = sequence.slot.target_len
        return first, self.target.forward(ids, position, np.arange(width), first_slot=first)
