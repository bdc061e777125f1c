"""What rounds cost, and how well earlier texts were drafted: what requests know of each other.

Nothing here reads a clock: times are seconds where they come in. Where they go out they are plain
steps: one token of the target alone, sampling and host included.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

WINDOW = 9  # timings that a median is of: four outliers of any size do not move it far
COLD = 4  # rounds after a change of gamma, while caches still hold what the other one used
TIMED = 2  # rounds, the faster of which is believed
PRIOR, WEIGHT = 0.8, 4.0  # acceptance before anything is known, and how many tokens it counts for
MEMORY = 256  # tokens for which the acceptance of earlier texts is remembered
MOST_SETTINGS = 64  # of sampling, whose texts are remembered apart


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """What rounds cost. plain: seconds of a plain step. In plain steps: draft, a step of the draft
    (the paper's c); verify[k], all else of a round with k draft tokens; reading, what each token
    that the draft has missed adds to the call in which it reads them."""

    plain: float
    draft: float
    verify: list[float]
    reading: float = 0.0

    @classmethod
    def of(
        cls, draft: float, rest: Mapping[int, float], max_gamma: int, reading: float = 0.0
    ) -> RoundCosts:
        """From seconds. rest: all of a round but its draft steps, by gamma, for one gamma at least.

        A gamma that is not there lies on the line between its neighbours. One beyond the largest
        lies on the line from the smallest to the largest, which does not fall; one below the
        smallest costs what that does.
        """
        low, high = min(rest), max(rest)
        slope = max(0.0, rest[high] - rest[low]) / max(1, high - low)
        points = {max_gamma: rest[high] + slope * (max_gamma - high), **rest}
        gammas = sorted(points)
        seconds = np.interp(np.arange(max_gamma + 1), gammas, [points[g] for g in gammas]).tolist()
        plain = seconds[0]
        return cls(plain, draft / plain, [each / plain for each in seconds], reading / plain)

    def round(self, gamma: int) -> float:
        """Plain steps of a round: the denominator of Theorem 3.8, with what a width costs."""
        return gamma * self.draft + self.verify[gamma]

    def catching_up(self, tokens: int) -> float:
        """Plain steps that the draft takes to read what it has missed."""
        return self.draft + tokens * self.reading if tokens else 0.0


class EarlierTexts:
    """Acceptance of the texts before, fading.

    prior: what is taken for it before there were any. among: others, which are told too.
    """

    def __init__(self, prior: float = PRIOR, among: EarlierTexts | None = None):
        self._seen, self._kept, self._among = WEIGHT, prior * WEIGHT, among

    def began(self) -> None:
        """A text. It counts as one token of hope: texts that are too short to try a draft that did
        badly would otherwise never hear that there is a better one."""
        self.add(1, PRIOR)

    def add(self, examined: int, accepted: float) -> None:
        """Draft tokens of a round."""
        fade = 1 - examined / MEMORY
        self._seen, self._kept = fade * self._seen + examined, fade * self._kept + accepted
        if self._among is not None:
            self._among.add(examined, accepted)

    @property
    def acceptance(self) -> float:
        """What a text may expect."""
        return self._kept / self._seen


@dataclass(slots=True)
class _Series:
    """Timings of one thing. Those with warm caches count, and where there are none the others."""

    cold: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    warm: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, seconds: float, warm: bool) -> None:
        (self.warm if warm else self.cold).append(seconds)

    @property
    def known(self) -> bool:
        return len(self.warm) + len(self.cold) >= TIMED

    @property
    def value(self) -> float:
        return median_low(self.warm or self.cold)


@dataclass(slots=True)
class _Timings:
    """Seconds, of one batch size. rest: all of a round but its draft steps, by gamma."""

    draft: _Series = field(default_factory=_Series)
    rest: dict[int, _Series] = field(default_factory=lambda: defaultdict(_Series))
    # For each token, and how many there were: of a call with few of them it is mostly noise.
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0
    gamma: int = 0
    stay: int = 0  # rounds of this gamma before the last
    made: RoundCosts | None = None

    @property
    def plain_known(self) -> bool:
        return 0 in self.rest and self.rest[0].known

    def reading(self) -> float:
        """The median by tokens."""
        half = sum(tokens for _, tokens in self.readings) / 2
        for each, tokens in sorted(self.readings):
            half -= tokens
            if half <= 0:
                return each
        return 0.0


class Costs:
    """What requests with one kind of draft know of each other: what rounds cost, by batch size, and
    how well texts were drafted, by the settings of their sampling: p and q are what is left after
    temperatures and filters, and acceptance is a property of those two."""

    def __init__(self, max_gamma: int):
        self.max_gamma = max_gamma
        self._batches: dict[int, _Timings] = defaultdict(_Timings)
        self._texts = EarlierTexts()
        self._settings: dict[Hashable, EarlierTexts] = {}

    def observe(self, batch: int, gamma: int, time_draft: float, time_rest: float) -> None:
        """A round of `batch` sequences with `gamma` draft steps: seconds in those, and in all else
        but the choosing and what `caught_up` is told."""
        seen = self._batches[batch]
        seen.count += 1
        seen.stay = seen.stay + 1 if gamma == seen.gamma else 0
        seen.gamma, seen.made = gamma, None
        warm = seen.stay >= COLD or gamma == 0  # it is mostly the draft that grows cold
        seen.rest[gamma].add(max(time_rest, 1e-9), warm)  # a coarse clock may say 0
        if gamma:
            seen.draft.add(time_draft / gamma, warm)

    def caught_up(self, batch: int, tokens: int, seconds: float) -> None:
        """The draft read tokens that it lacked: a prompt, or what rounds without it had added."""
        seen = self._batches[batch]
        if seen.draft.known:
            each = max(0.0, seconds - seen.draft.value) / max(1, tokens)
            seen.readings.append((each, tokens))
            seen.made = None

    def lacking(self, batch: int) -> int | None:
        """A gamma to time before `rounds` has something to go by: 0, what all else is compared
        with, then 1. None where both are known, or others decide which rounds there are."""
        seen = self._batches[batch]
        if seen.count >= 4 * TIMED:
            return None
        if not seen.plain_known:
            return 0
        return None if seen.draft.known else 1

    def rounds(self, batch: int) -> RoundCosts:
        """Of medians. No verification is taken to cost more than a wider one that was seen: so a
        plain step that was last timed at the end of a long text, or on a busy machine, does not
        make drafts look fast. A batch size must have been observed."""
        seen = self._batches[batch]
        if seen.made is None:
            known = {g: rest for g, rest in seen.rest.items() if rest.known} or seen.rest
            least, rest = float("inf"), {}
            for gamma in sorted(known, reverse=True):
                rest[gamma] = least = min(least, known[gamma].value)
            # A draft that was never timed is tried only after a pause.
            draft = seen.draft.value if seen.draft.known else min(rest.values())
            seen.made = RoundCosts.of(draft, rest, self.max_gamma, seen.reading())
        return seen.made

    def timed(self, batch: int) -> RoundCosts | None:
        """`rounds`, where a plain step and a draft step were timed; None where it would guess."""
        seen = self._batches.get(batch)
        if seen is None or not (seen.plain_known and seen.draft.known):
            return None
        return self.rounds(batch)

    def earlier(self, settings: Hashable = None) -> EarlierTexts:
        """Those with these settings. New settings begin with what all texts say together."""
        mine = self._settings.pop(settings, None) or EarlierTexts(
            self._texts.acceptance, self._texts
        )
        self._settings[settings] = mine  # as the one that was used last
        if len(self._settings) > MOST_SETTINGS:
            del self._settings[next(iter(self._settings))]
        return mine
