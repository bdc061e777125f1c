"""What a report measures, and the numbers that it makes of that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import median

from runtime.files.errors import OutriderError
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.formulas import best_gamma, speedup
from runtime.theory.measure import Findings, findings, measure

from ..core.clock import DISTURBED, sample
from ..core.costs import total
from ..core.record import RoundRecord, TextRecord, recording

REPEATS = 3
PATIENCE = 12.0  # seconds for which a prompt waits for as many undisturbed runs
TRACED = 6  # rounds of the longest draft in the trace
PARTS = "draft", "verify", "sample", "host"


@dataclass(frozen=True)
class Measurement:
    """texts[gamma]: one for each prompt, in their order. lost: seconds for which threads waited
    for a core, in each second of measuring."""

    found: Findings
    texts: Mapping[int, Sequence[TextRecord]]
    lost: float = 0.0

    @property
    def gammas(self) -> list[int]:
        """Those with drafts."""
        return list(self.found.measured)

    @property
    def best(self) -> int:
        """The gamma to use; 0 where nothing gains."""
        found = self.found
        return best_gamma(found.alpha, found.costs.draft, found.costs.verify)[0]

    @property
    def shown(self) -> int:
        """The gamma, 1 or more, whose rounds are looked into: of the largest expected speedup."""
        return max(self.gammas, key=self.expected)

    def expected(self, gamma: int) -> float:
        """Theorem 3.8 with the verification's measured width."""
        found = self.found
        return speedup(found.alpha, gamma, found.costs.draft, found.costs.verify[gamma])

    def stats(self, gamma: int) -> Stats:
        return total(self.texts[gamma])


def take(
    engine: TextEngine,
    prompts: Sequence[str],
    temperature: float,
    tokens: int,
    note: Callable[[str], None],
) -> Measurement:
    """Every prompt with every gamma, several times over. Raises OutriderError "prompt"."""
    texts: dict[int, list[TextRecord]] = {g: [] for g in range(engine.decoder.max_gamma + 1)}
    quiet: list[float] = []
    with recording(engine) as recorder:
        for number, prompt in enumerate(prompts, start=1):
            note(f"prompt {number} of {len(prompts)}, with gamma 0 to {engine.decoder.max_gamma}")
            runs: list[dict[int, TextRecord]] = []
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
                        "Shorten it, or build the bundle with a larger MAX_LEN.",
                    )
                some.append(text)
    found = findings({gamma: [text.stats for text in some] for gamma, some in texts.items()})
    return Measurement(found, texts, median(quiet))


def quickest(texts: Sequence[TextRecord]) -> TextRecord:
    """The same text several times over, of each round the time that was least: on a machine that is
    not ours alone the others were kept waiting. Texts of other rounds than the quickest's do not
    count."""
    best = min(texts, key=lambda text: text.stats.elapsed)
    fates = [x.fate() for x in best.rounds]
    alike = [text.rounds for text in texts if [x.fate() for x in text.rounds] == fates]
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
    return TextRecord(best.gamma, tuple(rounds), stats)


def by_position(rounds: Sequence[RoundRecord]) -> list[tuple[int, int]]:
    """(reached, accepted) of each draft position; reached: all drafts before it were accepted."""
    return [
        (
            sum(x.gamma > i and x.accepted >= i for x in rounds),
            sum(x.accepted > i for x in rounds),
        )
        for i in range(max((x.gamma for x in rounds), default=0))
    ]


def interval(part: int, whole: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's of a share, 95 %."""
    if not whole:
        return 0.0, 1.0
    share, square = part / whole, z * z
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = z * sqrt(share * (1 - share) / whole + square / (4 * whole**2)) / (1 + square / whole)
    return max(0.0, middle - half), min(1.0, middle + half)


def speed_ratios(texts: Mapping[int, Sequence[TextRecord]], gamma: int) -> list[float]:
    """Of each prompt, the speed over plain decoding's, without the prefill."""
    return [
        (a.stats.round_tokens / a.stats.time_rounds) / (b.stats.round_tokens / b.stats.time_rounds)
        for a, b in zip(texts[gamma], texts[0], strict=True)
    ]


def parts(stats: Stats) -> dict[str, float]:
    """Seconds of a round, the mean."""
    times = stats.time_draft, stats.time_verify, stats.time_sample, stats.time_host
    return {name: x / max(1, stats.rounds) for name, x in zip(PARTS, times, strict=True)}


def by_length(m: Measurement) -> list[tuple[float, float, float]]:
    """Speedup of the first 1, 2, ... tokens with gamma `shown`: median, least and most of the
    prompts that have as many. Prefills included."""

    def times(text: TextRecord) -> list[float]:  # from the start of the request to each token
        return [text.stats.ttft, *(x.end for x in text.rounds for _ in range(x.emitted))]

    curves = [
        [b / a for a, b in zip(times(fast), times(plain), strict=False)]
        for fast, plain in zip(m.texts[m.shown], m.texts[0], strict=True)
    ]
    points = []
    for n in range(max(map(len, curves))):
        here = [curve[n] for curve in curves if len(curve) > n]
        points.append((median(here), min(here), max(here)))
    return points


def ahead_from(points: Sequence[tuple[float, float, float]]) -> int | None:
    """The output length from which on the median prompt is ahead of plain decoding for good."""
    behind = [n for n, point in enumerate(points, start=1) if point[0] <= 1]
    first = behind[-1] + 1 if behind else 1
    return first if first <= len(points) else None


def traced(m: Measurement) -> dict[int, list[RoundRecord]]:
    """The first rounds of the first prompt by gamma, longest draft first, up to the same number of
    tokens or what a round takes it to."""
    gammas = {m.shown, 1, 0}
    if len(gammas) < 3:
        gammas.add(min(4, max(m.gammas)))
    order = sorted(gammas, reverse=True)
    tokens = sum(x.emitted for x in m.texts[order[0]][0].rounds[:TRACED])
    chosen: dict[int, list[RoundRecord]] = {}
    for gamma in order:
        chosen[gamma], emitted = [], 0
        for x in m.texts[gamma][0].rounds:
            if emitted >= tokens:
                break
            chosen[gamma].append(x)
            emitted += x.emitted
    return chosen
