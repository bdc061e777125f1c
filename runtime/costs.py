"""What rounds cost by measurement, and how texts began: what requests know of each other.

Nothing here reads a clock. Times are seconds where they come in, and plain steps (one token of the
target alone, sampling and host included) where they go out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

WINDOW = 9  # rounds that the level is the median of
RELATIONS = 15  # to the level, that a gamma's is the median of
SETTLED = 4  # rounds after a change of gamma, before one is what it costs with warm caches
FIRST = 2  # timings of one kind before they are believed: the lower of two is no outlier
MOVED = 0.02  # what a relative cost must move by, or the choices go on with the old one
PRIOR = 0.8  # acceptance before any draft was seen
WEIGHT = 4.0  # tokens for which that of earlier texts counts in a new one
MEMORY = 256  # tokens for which the beginnings of earlier texts are remembered, together
MOST_SETTINGS = 64  # of sampling, whose beginnings are remembered apart


class Openings:
    """Which acceptance texts began with: tokens examined and accepted, fading.

    prior: what is taken for it before there were any. among: others, which are told too.
    """

    def __init__(self, prior: float = PRIOR, among: Openings | None = None):
        self._seen, self._kept, self._among = WEIGHT, prior * WEIGHT, among

    def began(self) -> None:
        """A text. It counts as one token of hope: texts that are too short to try a draft that did
        badly would otherwise never hear that there is a better one."""
        self.add(1, PRIOR)

    def add(self, examined: int, accepted: float) -> None:
        """Of the first tokens that a text drafted."""
        fade = 1 - examined / MEMORY
        self._seen, self._kept = fade * self._seen + examined, fade * self._kept + accepted
        if self._among is not None:
            self._among.add(examined, accepted)

    @property
    def prior(self) -> float:
        """The acceptance that a text may expect."""
        return self._kept / self._seen


class Costs:
    """What requests with one kind of draft know of each other: what rounds cost, by batch size and
    gamma, and which acceptance texts began with, by the settings of their sampling: p and q are
    what is left after temperatures and filters, and acceptance is a property of those two.

    Each cost is a median of timings: outliers may be of any size (a machine taken away for 50 ms),
    and no scale has to be known as for clipped updates. The first call of each batch size and gamma
    does not count: shapes that are new are prepared in it. What is not in use does not go stale:
    all costs of a batch size follow the level of the gamma that is, in five rounds (`_Timings`).

    No verification is taken to cost more than a wider one that was seen. So a plain step that was
    last timed at the end of a long text does not make drafts look fast at the start of the next.
    A gamma that was not seen twice lies on the line between its neighbours; beyond them on the line
    from the first to the last, never falling and never steeper than in proportion to the tokens
    verified. With one gamma seen, every verification costs what that one does. A batch size without
    timings has the nearest's.

    What is observed is worked out when it is asked for: beside a plain step of a millisecond, even
    a median takes time.
    """

    def __init__(self, max_gamma: int):
        self.max_gamma = max_gamma
        self._lacking: int | None = 0
        # Rounds since then; of many, which were alike or somebody would have asked, the last.
        self._new: deque[tuple[int, int, float, float]] = deque(maxlen=2 * WINDOW)
        self._sizes: dict[int, _Timings] = defaultdict(_Timings)
        self._relative: dict[int, tuple[list[float], float, float]] = {}  # see `_costs`
        self._openings = Openings()
        self._settings: dict[Hashable, Openings] = {}

    def observe(self, batch: int, gamma: int, time_draft: float, time_rest: float) -> None:
        """A round of `batch` sequences with `gamma` draft steps: seconds in those, and in all else
        but the choosing and what `caught_up` is told."""
        self._new.append((batch, gamma, time_draft, time_rest))

    def caught_up(self, batch: int, tokens: int, seconds: float) -> None:
        """The draft read tokens that it lacked: a prompt, or what rounds without it had added."""
        self._work_out()
        self._sizes[batch].read(tokens, seconds)
        self._relative.clear()

    @property
    def lacking(self) -> int | None:
        """A gamma to time before `rounds` has something to go by: 0, what all else is compared
        with, then 1."""
        if self._lacking is not None:
            self._work_out()
            sizes = self._sizes.values()
            plain = any(mine.knows(0) for mine in sizes)
            drafts = any(mine.draft.known for mine in sizes)
            self._lacking = 0 if not plain else None if drafts else 1
        return self._lacking

    @property
    def timed(self) -> bool:
        return self.lacking is None

    def rounds(self, batch: int) -> list[float]:
        """By gamma, 0 to max_gamma: what a round costs in plain steps, gamma c + verification."""
        return self._costs(batch)[0]

    def unseen(self, batch: int) -> list[int]:
        """The gammas whose rounds were not timed; their costs are lines between others', and a
        verification has steps where a matrix product's blocks are full. A round of several counts
        as its widest gamma's, so of a batch some may never be."""
        mine = self._sizes[batch]
        return [g for g in range(1, self.max_gamma + 1) if not mine.knows(g)]

    def reading(self, batch: int, tokens: int) -> float:
        """Plain steps for what the draft has to catch up with: a call, which costs what a draft
        step does, and what each token adds to it; 0 if that was never seen."""
        if not tokens:
            return 0.0
        _, call, each = self._costs(batch)
        return call + tokens * each

    def openings(self, settings: Hashable = None) -> Openings:
        """Of texts with these settings. New ones begin with what all others began with."""
        mine = self._settings.pop(settings, None) or Openings(self._openings.prior, self._openings)
        self._settings[settings] = mine  # as the one that was used last
        if len(self._settings) > MOST_SETTINGS:
            del self._settings[next(iter(self._settings))]
        return mine

    def _costs(self, batch: int) -> tuple[list[float], float, float]:
        """In plain steps: rounds by gamma; a call of the draft; a token more to read in it."""
        self._work_out()
        if batch not in self._relative:
            mine = self._nearest(batch, lambda size: bool(size.rest))
            rest = mine.rests(self.max_gamma)

            def plain(size: _Timings) -> float:
                return rest[0] if size is mine else size.rests(self.max_gamma)[0]

            near = self._nearest(batch, lambda size: size.draft.known)
            call = near.draft.value / plain(near)
            near = self._nearest(batch, lambda size: bool(size.rest and size.readings))
            each = near.reading / plain(near) if near.readings else 0.0
            rounds = [cost / rest[0] + g * call for g, cost in enumerate(rest)]
            self._relative[batch] = rounds, call, each
        return self._relative[batch]

    def _work_out(self) -> None:
        for batch, gamma, time_draft, time_rest in self._new:
            # A coarse clock may say 0.
            if self._sizes[batch].add(gamma, time_draft, max(time_rest, 1e-9)):
                self._relative.clear()
        self._new.clear()

    def _nearest(self, batch: int, wanted: Callable[[_Timings], bool]) -> _Timings:
        sizes = [size for size, mine in self._sizes.items() if wanted(mine)]
        nearest = min(sizes, key=lambda size: (abs(size - batch), size), default=None)
        return _Timings() if nearest is None else self._sizes[nearest]


def _median(values: Iterable[float]) -> float:
    """Of an even number the lower middle one."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _just_settled(before: list[int], gamma: int) -> bool:
    """Whether a round of gamma is the fifth after those of others."""
    in_a_row = before[-SETTLED:] == [gamma] * SETTLED
    return in_a_row and before.count(gamma) == SETTLED < len(before)


@dataclass(slots=True)
class _Series:
    """Of one gamma, in relation to the level of their batch size. value: the median of the settled
    ones, and before there are any of the others; told: that when it was last used."""

    settled: deque[float] = field(default_factory=lambda: deque(maxlen=RELATIONS))
    others: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    value: float = 0.0
    told: float = 0.0

    def add(self, value: float, settled: bool) -> bool:
        """Whether it is worth computing with the new median."""
        (self.settled if settled else self.others).append(value)
        self.value = _median(self.settled or self.others)
        few = len(self.settled) + len(self.others) <= FIRST
        if not few and abs(self.value - self.told) <= MOVED * self.told:
            return False
        self.told = self.value
        return True

    @property
    def known(self) -> bool:
        return len(self.settled) + len(self.others) >= FIRST


@dataclass(slots=True)
class _Timings:
    """Of one batch size. rest: by gamma. draft: of a step.

    A longer cache, or a machine with other work, makes all rounds slower, and only the gamma in use
    is timed. So there is a common level in seconds, the median of what the last nine rounds say,
    and of each gamma a relation to it, about which only a change of gamma tells something. Not at
    once: without the other's warm caches a round takes a tenth longer, and a first draft step half
    as long again. So the fifth round of a gamma counts, and the four before where there is none.

    The plain step keeps its relation, as what all others are relative to: what it tells, after one
    round already where it is a probe, is told of the gamma before it. Otherwise the gammas in use
    would drift away from the rest together: new texts begin with a change, and are faster.
    """

    draft: _Series = field(default_factory=_Series)
    rest: dict[int, _Series] = field(default_factory=lambda: defaultdict(_Series))
    readings: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    last: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    called: set[int] = field(default_factory=set)
    has_read: bool = False

    def knows(self, gamma: int) -> bool:
        return gamma in self.rest and self.rest[gamma].known

    def add(self, gamma: int, time_draft: float, time_rest: float) -> bool:
        """Whether what rounds cost, in relation to each other, moved."""
        if gamma not in self.called:
            self.called.add(gamma)
            return False
        moved, before = False, [g for g, _, _ in self.last]
        if gamma == 0 and self.knows(0):
            if before[-1] or _just_settled(before, 0):
                moved = self._relate_to_plain(time_rest)
        elif (settled := _just_settled(before, gamma)) or before.count(gamma) < SETTLED:
            others = [x for x in self.last if x[0] != gamma]
            plain = [x for x in others if x[0] == 0]
            level = self._level_of(plain or others or self.last) or time_rest
            moved = self._relate(gamma, time_draft, time_rest, level, settled)
        self.last.append((gamma, time_draft, time_rest))
        return moved

    def _relate_to_plain(self, seconds: float) -> bool:
        """The gamma before this plain round."""
        gamma = next(g for g, _, _ in reversed(self.last) if g)
        mine = [(draft, rest) for g, draft, rest in self.last if g == gamma]
        draft, rest = (_median(times) for times in zip(*mine, strict=True))
        level = seconds / self.rest[0].value
        return self._relate(gamma, draft, rest, level, settled=len(mine) > SETTLED)

    def _relate(
        self, gamma: int, time_draft: float, time_rest: float, level: float, settled: bool
    ) -> bool:
        moved = self.rest[gamma].add(time_rest / level, settled)
        if gamma:
            moved |= self.draft.add(time_draft / gamma / level, settled)
        return moved

    def _level_of(self, rounds: Iterable[tuple[int, float, float]]) -> float:
        """Seconds; 0 of none."""
        said = [seconds / self.rest[gamma].value for gamma, _, seconds in rounds]
        return _median(said) if said else 0.0

    def read(self, tokens: int, seconds: float) -> None:
        if self.has_read and (level := self._level_of(self.last)):
            each = max(0.0, seconds / level - self.draft.value) / max(1, tokens)
            self.readings.append((each, tokens))
        self.has_read = True

    @property
    def reading(self) -> float:
        """For each token beside the call's own: the median by tokens, since of a call with few of
        them it is mostly noise."""
        half = sum(tokens for _, tokens in self.readings) / 2
        for each, tokens in sorted(self.readings):
            half -= tokens
            if half <= 0:
                return each
        return 0.0

    def rests(self, max_gamma: int) -> list[float]:
        """By gamma, seen or not; see `Costs`."""
        seen = sorted(g for g, rest in self.rest.items() if rest.known) or sorted(self.rest)
        values = [0.0] * (max_gamma + 1)
        low, high = seen[0], seen[-1]
        values[high] = last = self.rest[high].value
        for left, right in zip(seen[-2::-1], seen[:0:-1], strict=True):
            values[left] = min(values[right], self.rest[left].value)
            slope = (values[right] - values[left]) / (right - left)
            for g in range(left + 1, right):
                values[g] = values[left] + slope * (g - left)
        first = values[low]
        slope = (last - first) / max(1, high - low)
        for g in range(low):
            values[g] = max(first - slope * (low - g), first * (g + 1) / (low + 1))
        for g in range(high + 1, max_gamma + 1):
            values[g] = min(last + slope * (g - high), last * (g + 1) / (high + 1))
        return values
