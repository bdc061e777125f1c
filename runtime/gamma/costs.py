"""The cost of rounds and the acceptance of earlier texts, which requests share.

Nothing here reads a clock. Times passed in are seconds; those returned are in plain steps: the time
of one token of the target alone, sampling and host included.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np

WINDOW = 9  # the latest timings that are kept of a quantity
COLD_ROUNDS = 4  # after a change of gamma, while caches still hold the data of the previous one
MIN_TIMINGS = 2  # rounds needed for a first estimate
MIN_WARM = 3  # timings with warm caches needed to leave the others out
TIMED_ROUNDS = 8  # of a batch size, at most: those that measure the costs before any choice
TIMED_AGAIN = 1024  # rounds after which they are measured again: the machine may have been busy
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.8, 4.0  # before anything is known; the weight is in tokens
MEMORY_TOKENS = 256  # tokens over which the acceptance of earlier texts fades
MAX_SETTINGS = 64  # sampling settings whose texts are remembered separately


@dataclass(frozen=True, slots=True)
class RoundCosts:
    """The costs of rounds. plain: seconds of a plain step. In plain steps: draft, a step of the
    draft (the paper's c); verify[k], the rest of a round with k draft tokens; reading, the cost of
    each token that the draft has missed, in the call that reads them."""

    plain: float
    draft: float
    verify: list[float]
    reading: float = 0.0

    @classmethod
    def of(
        cls, draft: float, rest: Mapping[int, float], max_gamma: int, reading: float = 0.0
    ) -> RoundCosts:
        """Make the costs from seconds. rest: a round without its draft steps, by gamma, for at
        least one gamma.

        Other gammas are interpolated linearly between their neighbours. Those above the largest lie
        on the line from the smallest to the largest, with a slope of at least 0; those below the
        smallest cost as much as the smallest.
        """
        low, high = min(rest), max(rest)
        slope = max(0.0, rest[high] - rest[low]) / max(1, high - low)
        points = {max_gamma: rest[high] + slope * (max_gamma - high), **rest}
        gammas = sorted(points)
        seconds = np.interp(np.arange(max_gamma + 1), gammas, [points[g] for g in gammas]).tolist()
        plain = seconds[0]
        return cls(plain, draft / plain, [each / plain for each in seconds], reading / plain)

    def round(self, gamma: int) -> float:
        """Plain steps per round: the denominator of Theorem 3.8, with the measured cost of each
        width."""
        return gamma * self.draft + self.verify[gamma]

    def catch_up(self, tokens: int) -> float:
        """Plain steps that the draft takes to read the tokens it has missed."""
        return self.draft + tokens * self.reading if tokens else 0.0


class EarlierTexts:
    """The fading average of the acceptance of earlier texts, and what drafts have gained in them.

    prior: the acceptance assumed before there are any. parent: a more general average, which is
    updated too. gained: in plain steps.
    """

    def __init__(self, prior: float = PRIOR_ACCEPTANCE, parent: EarlierTexts | None = None):
        self._examined, self._accepted, self._parent = PRIOR_WEIGHT, prior * PRIOR_WEIGHT, parent
        self.gained: float = parent.gained if parent else 0.0

    def record_start(self) -> None:
        """Record the start of a text, as one token with the prior acceptance. Otherwise, texts too
        short to retry a draft that did badly would never find out that it has improved."""
        self.add(1, PRIOR_ACCEPTANCE)

    def add(self, examined: int, accepted: float, loss: float = 0.0) -> None:
        """Record the draft tokens of a round, and its loss in plain steps."""
        fade = 1 - examined / MEMORY_TOKENS
        self._examined = fade * self._examined + examined
        self._accepted = fade * self._accepted + accepted
        self.gained = fade * self.gained - loss
        if self._parent is not None:
            self._parent.add(examined, accepted, loss)

    @property
    def acceptance(self) -> float:
        """The expected acceptance of a new text."""
        return self._accepted / self._examined


@dataclass(slots=True)
class _Series:
    """Timings of one quantity. Other processes only make a round slower, so the least counts, or
    the second of many. Those with warm caches are used if there are enough: cold ones are not
    renewed while a gamma is kept, and would hide that it has become slower."""

    cold: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    warm: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def add(self, seconds: float, warm: bool) -> None:
        (self.warm if warm else self.cold).append(seconds)

    @property
    def known(self) -> bool:
        return len(self.warm) + len(self.cold) >= MIN_TIMINGS

    @property
    def value(self) -> float:
        used = self.warm if len(self.warm) >= MIN_WARM else [*self.warm, *self.cold]
        return sorted(used)[len(used) // 8]


@dataclass(slots=True)
class _Timings:
    """Timings in seconds for one batch size, by gamma. steps: a draft step, of which the first in a
    round takes longer than the others, because the target has evicted the draft from the caches.
    rest: a round without its draft steps."""

    steps: dict[int, _Series] = field(default_factory=lambda: defaultdict(_Series))
    rest: dict[int, _Series] = field(default_factory=lambda: defaultdict(_Series))
    # (Seconds per token, number of tokens) of each call; with few tokens it is mostly noise.
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    count: int = 0
    timed_at: int = 0  # the count when the costs were last measured before any choice
    # Whether the next timing of a plain step, or of any draft, replaces the earlier ones.
    renew_plain: bool = False
    renew_drafts: bool = False
    gamma: int = 0
    repeats: int = 0  # consecutive rounds with this gamma before the last one
    cached: RoundCosts | None = None

    @property
    def plain_known(self) -> bool:
        return 0 in self.rest and self.rest[0].known

    def step(self) -> float | None:
        """Seconds of a draft step in the longest rounds that were timed; None if none were."""
        known = [gamma for gamma, step in self.steps.items() if step.known]
        known = known or [gamma for gamma, step in self.steps.items() if step.cold or step.warm]
        return self.steps[max(known)].value if known else None

    def reading(self) -> float:
        """The median seconds per token, weighted by tokens."""
        half = sum(tokens for _, tokens in self.readings) / 2
        for each, tokens in sorted(self.readings):
            half -= tokens
            if half <= 0:
                return each
        return 0.0


class Costs:
    """What requests with one kind of draft share: the costs of rounds, by batch size, and the
    acceptance of texts, by their sampling settings: acceptance depends on p and q after
    temperatures and filters."""

    def __init__(self, max_gamma: int, reads_model: bool = True):
        """reads_model: whether the draft has to read a text before it drafts."""
        self.max_gamma, self.reads_model = max_gamma, reads_model
        self._batches: dict[int, _Timings] = defaultdict(_Timings)
        self._texts = EarlierTexts()
        self._settings: dict[Hashable, EarlierTexts] = {}

    def observe(self, batch: int, gamma: int, time_draft: float, time_rest: float) -> None:
        """Record a round of `batch` sequences with `gamma` draft steps: the seconds in those, and
        in the rest, without the choice of gamma and what `observe_catch_up` records."""
        timings = self._batches[batch]
        timings.count += 1
        timings.repeats = timings.repeats + 1 if gamma == timings.gamma else 0
        timings.gamma, timings.cached = gamma, None
        # Mostly the draft's data leaves the caches.
        warm = timings.repeats >= COLD_ROUNDS or gamma == 0
        if gamma and timings.renew_drafts:
            for other in [other for other in timings.rest if other]:
                del timings.rest[other]
            timings.steps.clear()
            timings.renew_drafts = False  # last: there may be an interrupt
        if not gamma and timings.renew_plain:
            timings.rest.pop(0, None)
            timings.renew_plain = False
        timings.rest[gamma].add(max(time_rest, 1e-9), warm)  # a coarse clock may return 0
        if gamma:
            timings.steps[gamma].add(time_draft / gamma, warm)

    def observe_catch_up(self, batch: int, tokens: int, seconds: float) -> None:
        """Record that the draft read tokens it lacked: a prompt, or those of rounds without it."""
        timings = self._batches[batch]
        if (step := timings.step()) is not None:
            each = max(0.0, seconds - step) / max(1, tokens)
            timings.readings.append((each, tokens))
            timings.cached = None

    def gamma_to_time(self, batch: int, fixed: int = 0) -> int | None:
        """A gamma that must be timed before `rounds` can be used: 0, the baseline of all
        comparisons, then 1 until its caches are warm: a draft that seems slow because it was cold
        would never be used, and so never be warm. None if both are known, or if requests with the
        gamma `fixed` determine the rounds. After TIMED_AGAIN rounds this begins anew: here, not in
        `observe`, because a request may not ask for a gamma for a long time."""
        timings = self._batches[batch]
        if timings.count - timings.timed_at >= TIMED_AGAIN:
            timings.timed_at = timings.count
            timings.renew_plain = timings.renew_drafts = True
        if not fixed and not timings.plain_known:
            return 0
        if timings.count - timings.timed_at >= TIMED_ROUNDS:
            return None
        if timings.renew_plain or not timings.plain_known:
            return 0
        first = timings.steps[1]
        return None if first.known and first.warm and not timings.renew_drafts else 1

    def rounds(self, batch: int) -> RoundCosts:
        """The costs. No verification is assumed to cost more than a wider one that was timed: a
        plain step last timed at the end of a long text, or on a busy machine, must not make drafts
        look fast. What the draft steps of shorter rounds cost more than those of longer ones counts
        as their rest. The batch size must have been observed."""
        timings = self._batches[batch]
        if timings.cached is None:
            known = {g: rest for g, rest in timings.rest.items() if rest.known} or timings.rest
            least, rest = float("inf"), {}
            step = timings.step()
            for gamma in sorted(known, reverse=True):
                least = min(least, known[gamma].value)
                dearer = timings.steps[gamma].value - step if gamma and step is not None else 0.0
                rest[gamma] = least + gamma * dearer
            rest.setdefault(0, least)  # without what draft steps cost
            if step is None:
                # Tried only after a pause; a lookup may find nothing for long, which costs nothing.
                step = least if self.reads_model else 0.0
            timings.cached = RoundCosts.of(step, rest, self.max_gamma, timings.reading())
        return timings.cached

    def often_timed(self, batch: int, gamma: int) -> bool:
        """Whether rounds with this gamma were timed so often that the least time says something."""
        rest = self._batches[batch].rest.get(gamma)
        return rest is not None and len(rest.warm) + len(rest.cold) >= WINDOW

    def rounds_if_timed(self, batch: int) -> RoundCosts | None:
        """`rounds` if a plain step and a draft step were timed; None if it would be a guess."""
        timings = self._batches.get(batch)
        if timings is None or not timings.plain_known or timings.step() is None:
            return None
        return self.rounds(batch)

    def rounds_of_nearest(self, batch: int) -> RoundCosts | None:
        """`rounds_if_timed` for the nearest batch size for which it is known, None if for none."""
        sizes = sorted(self._batches, key=lambda size: abs(size - batch))
        return next((known for size in sizes if (known := self.rounds_if_timed(size))), None)

    def earlier_texts(self, settings: Hashable = None) -> EarlierTexts:
        """Earlier texts with these settings. New settings start from the average of all texts."""
        mine = self._settings.pop(settings, None) or EarlierTexts(
            self._texts.acceptance, self._texts
        )
        self._settings[settings] = mine  # now the most recently used
        if len(self._settings) > MAX_SETTINGS:
            del self._settings[next(iter(self._settings))]
        return mine
