"""Which gamma a request's next round uses: what it has seen, and what rounds have cost.

Exactness is untouched: a round's gamma is chosen from what came before the round, never from its
own draft tokens, so that given the past a round is Algorithm 1 with a constant, which emits from p
whatever the constant. A choice by measured times differs from run to run, so at temperature > 0
the same seed can give another text, of the same distribution; at 0 only near-ties can differ.

Nothing here draws a random number or reads a clock. Times are seconds where they come in, and
plain steps (one token of the target alone, sampling and host included) from there on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

WINDOW = 9  # timings that a median is over
FIRST = 2  # timings of one kind before they are believed: the lower of two is no outlier
MOVED = 0.02  # what a median must move by, or the choices go on with the old one
PRIOR = 0.8, 4.0  # acceptance before anything was seen, and for how many tokens that counts
KEEP = 0.96  # what was seen counts that much less with every round
SHRINK = 16.0  # tokens for which the common acceptance counts at each position
SWITCH = 1.03  # another gamma must promise to be that much faster; 0 must only be faster
PROBE_LOSS = 0.01  # of the time, by estimate, goes to rounds of another gamma while drafts pay
PROBE_EVERY = 8  # rounds at least
PAUSE, LONGEST_PAUSE = 16, 1024  # rounds without drafts before they are tried again
ALLOWANCE, RATE = 4.0, 0.03  # plain steps, and of every token: what a text may lose


class Costs:
    """What rounds cost, by batch size and gamma; one for all requests of a decoder.

    Each figure is the median of the last 9 timings: four of them may be outliers of any size (a
    machine taken away for 50 ms), no scale has to be known as for clipped updates, and after a
    lasting change it has followed in five rounds.

    No verification is taken to cost more than a wider one that was seen. So a plain step that was
    last timed at the end of a long text does not make drafts look fast at the start of the next.
    A gamma that was not seen twice lies on the line between its neighbours; beyond them on the line
    from the first to the last, never falling and never steeper than in proportion to the tokens
    verified. With one gamma seen, every verification costs what that one does. A batch size without
    timings has the nearest's.
    """

    def __init__(self, max_gamma: int):
        self.max_gamma = max_gamma
        self._sizes: dict[int, _Timings] = defaultdict(_Timings)
        self._rounds: dict[int, list[float]] = {}  # by batch, until the next timing

    def observe(self, batch: int, gamma: int, time_draft: float, time_rest: float) -> None:
        """A round of `batch` sequences with `gamma` draft steps: seconds in those, and in all else
        but what `caught_up` is told."""
        mine = self._sizes[batch]
        moved = mine.rest[gamma].add(max(time_rest, 1e-9))  # a coarse clock may say 0
        if gamma:
            moved |= mine.draft.add(time_draft / gamma)
        if moved:
            self._rounds.clear()

    def caught_up(self, batch: int, tokens: int, seconds: float) -> None:
        """The draft read tokens that rounds without it had added to one text (not the prompt)."""
        self._sizes[batch].reading.add(seconds / max(1, tokens))

    @property
    def timed(self) -> bool:
        """Whether draft steps have been timed; until then `rounds` has nothing to go by."""
        return any(mine.draft.known for mine in self._sizes.values())

    def rounds(self, batch: int) -> list[float]:
        """By gamma, 0 to max_gamma: what a round costs in plain steps, gamma c + verification."""
        if batch not in self._rounds:
            rest = self._nearest(batch, lambda mine: bool(mine.rest)).rests(self.max_gamma)
            near = self._nearest(batch, lambda mine: mine.draft.known)
            cost = near.draft.value / near.rests(self.max_gamma)[0]
            self._rounds[batch] = [rest[g] / rest[0] + g * cost for g in range(len(rest))]
        return self._rounds[batch]

    def reading(self, batch: int) -> float:
        """Plain steps for each token that the draft has to catch up with; 0 if never seen."""
        near = self._nearest(batch, lambda mine: bool(mine.rest) and mine.reading.known)
        return near.reading.value / near.rests(self.max_gamma)[0] if near.rest else 0.0

    def _nearest(self, batch: int, wanted: Callable[[_Timings], bool]) -> _Timings:
        sizes = [size for size, mine in self._sizes.items() if wanted(mine)]
        nearest = min(sizes, key=lambda size: (abs(size - batch), size), default=None)
        return _Timings() if nearest is None else self._sizes[nearest]


class _Median:
    """Of the last values; of an even number the lower middle one."""

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)
        self.value = self._told = 0.0

    def add(self, value: float) -> bool:
        """Whether it is worth computing with the new median: it moved by `MOVED`, or is young."""
        self.values.append(value)
        self.value = sorted(self.values)[(len(self.values) - 1) // 2]
        moved = len(self.values) <= FIRST or abs(self.value - self._told) > MOVED * self._told
        if moved:
            self._told = self.value
        return moved

    @property
    def known(self) -> bool:
        return len(self.values) >= FIRST


@dataclass(slots=True)
class _Timings:
    """Of one batch size, in seconds. rest: by gamma."""

    draft: _Median = field(default_factory=_Median)  # a step
    reading: _Median = field(default_factory=_Median)  # a token
    rest: dict[int, _Median] = field(default_factory=lambda: defaultdict(_Median))

    def rests(self, max_gamma: int) -> list[float]:
        """By gamma, seen or not; see `Costs`."""
        seen = sorted(g for g, rest in self.rest.items() if rest.known) or sorted(self.rest)
        known = np.minimum.accumulate([self.rest[g].value for g in reversed(seen)])[::-1]
        values: list[float] = np.interp(range(max_gamma + 1), seen, known).tolist()
        low, high, first, last = seen[0], seen[-1], float(known[0]), float(known[-1])
        slope = (last - first) / max(1, high - low)
        for g in range(low):
            values[g] = max(first - slope * (low - g), first * (g + 1) / (low + 1))
        for g in range(high + 1, max_gamma + 1):
            values[g] = min(last + slope * (g - high), last * (g + 1) / (high + 1))
        return values


class Policy(Protocol):
    """Of one request."""

    def next(self, batch: int) -> int:
        """gamma for the next round, in which `batch` sequences take part. Each request chooses as
        if the others did the same."""
        ...

    def observe(self, gamma: int, examined: int, accepted: int, all_accepted: bool) -> None:
        """A round gave this. gamma: drafts that were verified, which may be fewer than asked for.
        examined: of them, looked at before the first rejection, that one included."""
        ...


def make_policy(gamma: int | str, costs: Costs, max_gamma: int, *, fallback: bool) -> Policy:
    """gamma: a number, "auto", or "transformers". fallback: go without drafts while they lose,
    which "auto" always does. Raises ValueError."""
    if gamma == "auto":
        return Measured(costs, max_gamma)
    if gamma == "transformers":
        named: Policy = Transformers(max_gamma)
    elif isinstance(gamma, int) and 0 <= gamma <= max_gamma:
        named = Constant(gamma)
    else:
        raise ValueError(f"gamma {gamma!r} of at most {max_gamma}")
    return Measured(costs, max_gamma, named) if fallback and gamma != 0 else named


class Constant:
    def __init__(self, gamma: int):
        self.gamma = gamma

    def next(self, batch: int) -> int:
        return self.gamma

    def observe(self, gamma: int, examined: int, accepted: int, all_accepted: bool) -> None:
        pass


class Transformers:
    """The schedule "heuristic" of Hugging Face Transformers: from 5, 2 more after a round that
    accepted all drafts, else 1 less, at least 1.

    `AssistedCandidateGenerator.update_candidate_strategy` in generation/candidate_generator.py,
    the same from 4.38 to 5.23; 5 and "heuristic" were the defaults until 4.45, 20 and "constant"
    are now. There it grows without end; here to max_gamma.
    """

    def __init__(self, max_gamma: int):
        self.max_gamma = max_gamma
        self.gamma = min(5, max_gamma)

    def next(self, batch: int) -> int:
        return self.gamma

    def observe(self, gamma: int, examined: int, accepted: int, all_accepted: bool) -> None:
        if gamma:
            self.gamma = min(self.gamma + 2, self.max_gamma) if all_accepted else self.gamma - 1
            self.gamma = max(1, self.gamma)


class Measured:
    """The fastest gamma by measured costs and acceptance; with `named`, what that says or 0.

    Theorem 3.8 of Leviathan et al. 2023 with what a round really costs in place of gamma c + 1,
    and acceptance by position in place of alpha.

    Two bounds. While drafts pay, a round of another gamma (twice as deep, or 0, in turn) comes so
    seldom that 1 % of the time is lost by it, by estimate. And of every text, whatever the draft
    does: a round with drafts is run only where the text's loss against plain decoding, should the
    round accept none, stays within 4 plain steps + 3 % of its tokens: 4.6 % of 256 tokens. Losses
    are counted at measured costs; beyond them are the first two rounds of a decoder, which draft
    one token each to have any, and the draft's reading of the prompt. The reading of what rounds
    without drafts have added is a loss too: where it costs more than 3 % of a plain step a token, a
    draft that was left behind is tried again only out of earlier gains.

    16 rounds after drafts were given up, what was seen is nearly forgotten and they are tried
    again, with one token if need be; each time that they lose, after twice as many rounds, up to
    1,024.
    """

    def __init__(self, costs: Costs, max_gamma: int, named: Policy | None = None):
        self.costs, self.max_gamma, self.named = costs, max_gamma, named
        self.current = named.next(1) if named else 1
        # Tokens examined and accepted, fading: of all positions, and of each.
        self.seen, self.kept = PRIOR[1], PRIOR[0] * PRIOR[1]
        self.seen_at, self.kept_at = [0.0] * max_gamma, [0.0] * max_gamma
        self.tokens, self.lost = 0, 0.0  # of the text; against plain decoding, negative is a gain
        self.lost_before = 0.0  # when drafts were last resumed
        self.unsettled: list[tuple[int, int, int]] = []  # rounds: gamma, tokens, caught up with
        self.behind = 0  # tokens that the draft has not read
        self.since, self.pause = 0, PAUSE
        self.deeper = False  # the next probe

    def next(self, batch: int) -> int:
        if not self.costs.timed:
            return 1
        cost, reading = self.costs.rounds(batch), self.costs.reading(batch)
        for gamma, tokens, behind in self.unsettled:
            self.tokens += tokens
            self.lost += cost[gamma] + behind * reading - tokens
            if gamma and self.current == 0:  # a trial: at once again if it gained
                gained = tokens > cost[gamma]
                self.pause = self.pause if gained else min(2 * self.pause, LONGEST_PAUSE)
                self.since = self.pause if gained else 0
        self.unsettled.clear()
        named = None if self.named is None else self.named.next(batch)
        if named is not None and self.current:
            self.current = named
        gamma = self._choose(cost, range(len(cost)) if named is None else (0, named))
        risk = self.lost + cost[gamma] - 1 + self.behind * reading
        return gamma if risk <= ALLOWANCE + RATE * self.tokens else 0

    def observe(self, gamma: int, examined: int, accepted: int, all_accepted: bool) -> None:
        self.unsettled.append((gamma, accepted + 1, self.behind if gamma else 0))
        if gamma == 0:
            self.behind += 1
            return
        self.behind = 0
        if self.named:
            self.named.observe(gamma, examined, accepted, all_accepted)
        examined = min(examined, accepted + 1)  # a rule for whole blocks looks beyond a rejection
        self.seen = KEEP * self.seen + examined
        self.kept = KEEP * self.kept + min(accepted, examined)
        for i in range(examined):
            self.seen_at[i] = KEEP * self.seen_at[i] + 1
            self.kept_at[i] = KEEP * self.kept_at[i] + (i < accepted)

    def _choose(self, cost: list[float], choices: Sequence[int]) -> int:
        trial = self.current == 0 and self.since >= self.pause
        if trial:
            self._forget()
        self.since += 1
        tokens = self._expected()
        speed = [t / c for t, c in zip(tokens, cost, strict=True)]
        best = max(choices, key=speed.__getitem__)
        if speed[best] > speed[self.current] * (SWITCH if best else 1):
            self._switch(best)
        if self.current == 0:
            self.since = 0 if trial else self.since
            return int(trial)
        deep = min(2 * self.current + 1, self.max_gamma)
        other = deep if self.deeper and self.named is None and deep > self.current else 0
        loss = cost[other] - tokens[other] / speed[self.current]
        if self.since < max(PROBE_EVERY, loss / (PROBE_LOSS * cost[self.current])):
            return self.current
        self.since, self.deeper = 0, not self.deeper
        return other

    def _switch(self, gamma: int) -> None:
        if gamma == 0:
            gained = self.lost <= self.lost_before
            self.pause = PAUSE if gained else min(2 * self.pause, LONGEST_PAUSE)
            self.since = 0
        elif self.current == 0:
            self.lost_before = self.lost
            self.since = 0
        self.current = gamma

    def _expected(self) -> list[float]:
        """Tokens of a round, by gamma: equation (1) with an acceptance for each position that was
        reached, which few sightings leave near the common one."""
        alpha, reached, tokens = self.kept / self.seen, 1.0, [1.0]
        for seen, kept in zip(self.seen_at, self.kept_at, strict=True):
            reached *= (kept + SHRINK * alpha) / (seen + SHRINK)
            tokens.append(tokens[-1] + reached)
        return tokens

    def _forget(self) -> None:
        """One token of what was seen stays, beside the prior."""
        self.kept = self.kept / max(1.0, self.seen) + PRIOR[0] * PRIOR[1]
        self.seen = min(1.0, self.seen) + PRIOR[1]
        self.kept_at = [k / max(1.0, s) for k, s in zip(self.kept_at, self.seen_at, strict=True)]
        self.seen_at = [min(1.0, s) for s in self.seen_at]
