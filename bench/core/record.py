"""Every round of a text: its drafts, what stood, how long it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from runtime.sequence import ActiveSequence, RoundResult, SlotPlan, SlotResult
from runtime.stats import Stats
from runtime.text.engine import TextEngine


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """begin, end: seconds that the decoder had spent on this text. The others: seconds, of the
    draft's missing rows, of its steps, of the target's call, of draws, verdict and commit."""

    drafts: tuple[int, ...]
    accepted: int
    emitted: int
    begin: float
    end: float
    catch_up: float
    draft: float
    verify: float
    sample: float

    @property
    def gamma(self) -> int:
        return len(self.drafts)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def fate(self) -> tuple[tuple[int, ...], int]:
        return self.drafts, self.accepted


@dataclass(frozen=True, slots=True)
class TextRecord:
    """gamma: what was asked for; a round near the end of the text drafts less."""

    gamma: int
    rounds: tuple[RoundRecord, ...]
    stats: Stats


@dataclass(frozen=True, slots=True)
class _Mark:
    """What had been counted when a round began. drafts, accepted: of that round."""

    elapsed: float
    catch_up: float
    draft: float
    verify: float
    sample: float
    output: int
    drafts: tuple[int, ...] = ()
    accepted: int = 0

    @classmethod
    def of(cls, sequence: ActiveSequence) -> _Mark:
        s = sequence.stats
        times = s.elapsed, s.time_draft_prefill, s.time_draft, s.time_verify, s.time_sample
        return cls(*times, len(sequence.output))

    def to(self, other: _Mark) -> RoundRecord:
        return RoundRecord(
            drafts=self.drafts,
            accepted=self.accepted,
            emitted=other.output - self.output,
            begin=self.elapsed,
            end=other.elapsed,
            catch_up=other.catch_up - self.catch_up,
            draft=other.draft - self.draft,
            verify=other.verify - self.verify,
            sample=other.sample - self.sample,
        )


class Recorder:
    """Stands before a decoder's rounds (`runtime.rounds.Rounds`) and looks at what they give. One
    text at a time."""

    def __init__(self, rounds: Any):
        self._rounds = rounds
        self._texts: list[tuple[ActiveSequence, list[_Mark]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rounds, name)

    def start(self, sequence: ActiveSequence) -> SlotResult:
        self._texts.append((sequence, []))
        part: SlotResult = self._rounds.start(sequence)
        return part

    def run(self, turns: Sequence[SlotPlan]) -> RoundResult:
        sequence, marks = self._texts[-1]
        mark = _Mark.of(sequence)
        outcome: RoundResult = self._rounds.run(turns)
        (part,) = outcome.parts
        drafts = tuple(part.drafts)
        marks.append(replace(mark, drafts=drafts, accepted=part.verdict.accepted))
        return outcome

    def take(self) -> list[TextRecord]:
        """The texts since the last call."""
        texts = []
        for sequence, marks in self._texts:
            ends = [*marks, _Mark.of(sequence)][1:]
            rounds = tuple(a.to(b) for a, b in zip(marks, ends, strict=True))
            texts.append(TextRecord(sequence.request.gamma, rounds, sequence.stats))
        self._texts.clear()
        return texts


@contextmanager
def recording(engine: TextEngine) -> Iterator[Recorder]:
    rounds = engine.decoder.rounds
    recorder = Recorder(rounds)
    engine.decoder.rounds = recorder
    try:
        yield recorder
    finally:
        engine.decoder.rounds = rounds
