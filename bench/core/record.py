"""A text with its rounds: how many drafts each had, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from runtime.sequence import ActiveSequence, RoundResult, SlotPlan, SlotResult
from runtime.stats import Stats
from runtime.text.engine import TextEngine

from .clock import sample


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """gamma: drafts. Seconds: of the round, of the draft's missing rows, of the draft's steps."""

    gamma: int
    seconds: float
    catch_up: float
    draft: float


@dataclass(frozen=True, slots=True)
class Run:
    """One text. lost: the share of its time that went to other processes."""

    rounds: Sequence[RoundRecord]
    stats: Stats
    lost: float = 0.0

    @property
    def seconds(self) -> float:
        """Of its rounds. The prompt's prefill is left out, the draft's too; what a draft has to
        read after rounds that went without it is not."""
        prompt = next((x.catch_up for x in self.rounds if x.catch_up), 0.0)
        return sum(x.seconds for x in self.rounds) - prompt


class _Watched:
    """Stands before a decoder's rounds (`runtime.sequence.Rounds`) and notes what had been counted
    when each of them began."""

    sequence: ActiveSequence

    def __init__(self, rounds: Any):
        self._rounds = rounds
        self.gammas: list[int] = []
        self.marks: list[tuple[float, float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rounds, name)

    def start(self, sequence: ActiveSequence) -> SlotResult:
        self.sequence = sequence
        part: SlotResult = self._rounds.start(sequence)
        return part

    def run(self, plans: Sequence[SlotPlan]) -> RoundResult:
        self.mark()
        result: RoundResult = self._rounds.run(plans)
        (part,) = result.parts
        self.gammas.append(len(part.drafts))
        return result

    def mark(self) -> None:
        stats = self.sequence.stats
        self.marks.append((stats.elapsed, stats.time_draft_prefill, stats.time_draft))


def recorded(engine: TextEngine, generate: Callable[[], object]) -> Run:
    """generate: decodes one text by this engine."""
    decoder = engine.decoder
    rounds, watched = decoder.rounds, _Watched(decoder.rounds)
    decoder.rounds = watched
    try:
        lost = sample(generate).lost
    finally:
        decoder.rounds = rounds
    watched.mark()
    found = [
        RoundRecord(gamma, *(after - before for before, after in zip(*marks, strict=True)))
        for gamma, marks in zip(watched.gammas, pairwise(watched.marks), strict=True)
    ]
    return Run(found, watched.sequence.stats, lost)
