"""Every round of a measurement, for bench/report.py: its drafts, what stood, how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from runtime.files.errors import OutriderError
from runtime.sequence import ActiveSequence, RoundResult, SlotPlan, SlotResult
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.measure import Findings, findings, measure

from .timing import DISTURBED, sample

REPEATS = 3
PATIENCE = 12.0  # seconds for which a prompt waits for as many undisturbed runs


@dataclass(frozen=True, slots=True)
class Round:
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
class Text:
    """gamma: what was asked for; a round near the end of the text drafts less."""

    gamma: int
    rounds: tuple[Round, ...]
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

    def to(self, other: _Mark) -> Round:
        return Round(
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

    def take(self) -> list[Text]:
        """The texts since the last call."""
        texts = []
        for sequence, marks in self._texts:
            ends = [*marks, _Mark.of(sequence)][1:]
            rounds = tuple(a.to(b) for a, b in zip(marks, ends, strict=True))
            texts.append(Text(sequence.request.gamma, rounds, sequence.stats))
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


def quickest(texts: Sequence[Text]) -> Text:
    """The same text several times over, of each round the time that was least: on a machine that is
    not ours alone the others were kept waiting. Texts of other rounds than the quickest's do not
    count."""
    best = min(texts, key=lambda text: text.stats.elapsed)
    alike = [
        text.rounds
        for text in texts
        if [x.fate() for x in text.rounds] == [x.fate() for x in best.rounds]
    ]
    now = ttft = min(text.stats.ttft for text in texts)
    rounds = []
    for same in zip(*alike, strict=True):
        least = min(same, key=lambda x: x.seconds)
        rounds.append(replace(least, begin=now, end=now + least.seconds))
        now = rounds[-1].end
    catch_up = sum(x.catch_up for x in rounds)
    stats = replace(
        best.stats,
        time_prefill=min(text.stats.time_prefill for text in texts),
        time_draft_prefill=catch_up,
        time_draft=sum(x.draft for x in rounds),
        time_verify=sum(x.verify for x in rounds),
        time_sample=sum(x.sample for x in rounds),
        time_rounds=now - ttft - catch_up,
        ttft=ttft,
        elapsed=now,
    )
    return Text(best.gamma, tuple(rounds), stats)


def record(
    engine: TextEngine,
    prompts: Sequence[str],
    temperature: float,
    tokens: int,
    note: Callable[[str], None],
) -> tuple[Findings, dict[int, list[Text]], float]:
    """What the costs come to; of every gamma the text of every prompt; and the seconds for which
    threads waited for a core in each second (bench/timing.py), the median of the quietest runs.
    Raises OutriderError "prompt"."""
    texts: dict[int, list[Text]] = {gamma: [] for gamma in range(engine.decoder.max_gamma + 1)}
    quiet: list[float] = []
    with recording(engine) as recorder:
        for number, prompt in enumerate(prompts, start=1):
            note(f"prompt {number} of {len(prompts)}, with gamma 0 to {engine.decoder.max_gamma}")
            runs: list[dict[int, Text]] = []
            lost: list[float] = []
            begin = time.perf_counter()
            while len(runs) < REPEATS or (
                sum(share <= DISTURBED for share in lost) < REPEATS
                and time.perf_counter() - begin < PATIENCE
            ):  # all gammas each time: what changes, changes for all of them
                lost.append(sample(partial(measure, engine, [prompt], temperature, tokens)).lost)
                # The last of each gamma: those before it warmed up.
                runs.append({text.gamma: text for text in recorder.take()})
            quiet += sorted(lost)[:REPEATS]
            for gamma, some in texts.items():
                text = quickest([run[gamma] for run in runs])
                if not text.rounds:
                    raise OutriderError(
                        "prompt",
                        f"prompt {number} leaves no room for a round",
                        "Shorten it, or build the bundle with a larger MAX_LEN",
                    )
                some.append(text)
    found = findings({gamma: [text.stats for text in some] for gamma, some in texts.items()})
    return found, texts, median(quiet)
