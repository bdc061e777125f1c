"""Records the rounds of a text: the number of drafts and the time of each."""

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
    """One round. gamma: number of drafts. seconds: time of the whole round. catch_up: time to
    compute rows that were missing in the draft's cache. draft: time of the draft's steps."""

    gamma: int
    seconds: float
    catch_up: float
    draft: float


@dataclass(frozen=True, slots=True)
class Run:
    """One text. lost: share of its time that was lost to other processes."""

    rounds: Sequence[RoundRecord]
    stats: Stats
    lost: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of its rounds. Excludes the prompt's prefill, also the draft's; includes the time in
        which the draft catches up after rounds without drafts."""
        prompt = next((x.catch_up for x in self.rounds if x.catch_up), 0.0)
        return sum(x.seconds for x in self.rounds) - prompt


class _RecordedRounds:
    """Wraps a decoder's rounds (`runtime.sequence.Rounds`) and records the time counters at the
    start of each round."""

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


def record_run(engine: TextEngine, generate: Callable[[], object]) -> Run:
    """Record the text that `generate` decodes with this engine."""
    decoder = engine.decoder
    rounds, recording = decoder.rounds, _RecordedRounds(decoder.rounds)
    decoder.rounds = recording
    try:
        lost = sample(generate).lost
    finally:
        decoder.rounds = rounds
    recording.mark()
    found = [
        RoundRecord(gamma, *(after - before for before, after in zip(*marks, strict=True)))
        for gamma, marks in zip(recording.gammas, pairwise(recording.marks), strict=True)
    ]
    return Run(found, recording.sequence.stats, lost)
