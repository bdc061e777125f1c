"""Which gamma a request's next round uses: what it has seen, and what rounds have cost.

Exactness is untouched: a round's gamma is chosen from what came before the round, never from its
own draft tokens, so that given the past a round is Algorithm 1 with a constant, which emits from p
whatever the constant. A choice by measured times differs from run to run, so at temperature > 0
the same seed can give another text, of the same distribution; at 0 only near-ties can differ.

Nothing here draws a random number or reads a clock. Times are seconds where they come in, and
plain steps (one token of the target alone, sampling and host included) from there on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from .costs import PRIOR, WEIGHT, Costs, Openings

OPENING = 32  # tokens of each text that are told to later ones
KEEP = 0.96  # what was seen counts that much less with every round
SHRINK = 16.0  # tokens for which the common acceptance counts at each position
SWITCH = 1.03  # another gamma must promise to be that much faster; 0 must only be faster
HOLD = 4  # rounds that a choice is for, while drafts gain
PROBE_LOSS = 0.01  # of the time, by estimate, goes to rounds of another gamma while drafts pay
PROBE_EVERY = 8  # rounds at least
PAUSE, LONGEST_PAUSE = 16, 1024  # rounds without drafts before they are tried again
ALLOWANCE, RATE = 3.0, 0.03  # plain steps, and of every token: what a text may lose


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


def make_policy(
    gamma: int | str,
    costs: Costs,
    max_gamma: int,
    *,
    fallback: bool,
    settings: Hashable = None,
) -> Policy:
    """gamma: a number, "auto", or "transformers". fallback: go without drafts while they lose,
    which "auto" always does. settings: what p and q depend on beside the models. Raises
    ValueError."""
    if gamma == "auto":
        return Measured(costs, max_gamma, settings=settings)
    if gamma == "transformers":
        named: Policy = Transformers(max_gamma)
    elif isinstance(gamma, int) and 0 <= gamma <= max_gamma:
        named = Constant(gamma)
    else:
        raise ValueError(f"gamma {gamma!r} of at most {max_gamma}")
    if fallback and gamma != 0:
        return Measured(costs, max_gamma, named, settings)
    return named


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
    and acceptance by position in place of alpha. A text begins with the acceptance that earlier
    ones with its settings began with: where that says so, without drafts.

    Two bounds. While drafts pay, a round of another gamma comes so seldom that 1 % of the time is
    lost by it, by estimate: 0, and in turn with it the most promising one that was never timed, or
    twice as deep a one. And of every text, whatever the draft does: a round with drafts is run only
    where the text's loss against plain decoding, should the round accept none, stays within 3 plain
    steps + 3 % of its tokens: 4.2 % of 256 tokens. Losses are counted at measured costs; beyond
    them are three rounds of a decoder, which after three plain ones draft one token each to have
    any, the draft's reading of the prompt, and what a round takes longer whose caches are cold. The
    reading of what rounds without drafts have added is a loss too: where it costs more than 3 % of
    a plain step a token, a draft that was left behind is tried again only out of earlier gains.

    16 rounds after drafts were given up, what was seen is nearly forgotten and they are tried
    again, with one token if need be; each time that they lose, after twice as many rounds, up to
    1,024. A text that begins without drafts tries them after 32.

    A plain step may be as short as a millisecond, and choosing takes some of that. So nothing is
    worked out until drafts are tried again; and once they have gained, a choice is for 4 rounds,
    where the second bound leaves room for four that accept nothing.
    """

    def __init__(
        self,
        costs: Costs,
        max_gamma: int,
        named: Policy | None = None,
        settings: Hashable = None,
    ):
        self.costs, self.max_gamma, self.named = costs, max_gamma, named
        self.current = named.next(1) if named else 1
        self.settings = settings
        self.openings: Openings | None = None  # until the first round: a text may never run
        # Tokens examined and accepted, fading: of all positions, and of each.
        self.seen, self.kept = WEIGHT, PRIOR * WEIGHT
        self.seen_at, self.kept_at = [0.0] * max_gamma, [0.0] * max_gamma
        self.opening = OPENING  # tokens still to be told to later texts
        self.tokens, self.lost = 0, 0.0  # of the text; against plain decoding, negative is a gain
        self.lost_before = 0.0  # when drafts were last resumed
        # Rounds with drafts since the last choice: as `observe` was told, and how much was read.
        self.unsettled: list[tuple[int, int, int, int]] = []
        self.behind = 0  # tokens that the draft has not read
        self.since, self.pause = 0, PAUSE // 2  # doubled when drafts lose
        self.gaining = False  # the last trial did
        self.deeper = False  # the next probe
        self.batch, self.held = 0, 0  # of the last choice; rounds that it is still for

    def next(self, batch: int) -> int:
        # What a trial gave is looked at at once.
        if self.held and batch == self.batch and (self.current or not self.unsettled):
            self.held -= 1
            return self.named.next(batch) if self.named and self.current else self.current
        if self.openings is None:
            self.openings = self.costs.openings(self.settings)
            self.openings.began()
            self.kept = self.openings.prior * self.seen
        if (lacking := self.costs.lacking) is not None:
            return lacking
        self.since -= self.held  # the rounds that were not held after all
        self.batch, self.held = batch, 0
        cost = self.costs.rounds(batch)
        for told in self.unsettled:
            self._settle(cost, *told)
        self.unsettled.clear()
        named = None if self.named is None else self.named.next(batch)
        if named is not None and self.current:
            self.current = named
        gamma = self._choose(cost, range(len(cost)) if named is None else (0, named))
        if gamma == 0:
            self._hold(0 if self.current else self.pause - self.since)
            return 0
        risk = cost[gamma] - 1 + self.costs.reading(batch, self.behind)
        spare = ALLOWANCE + RATE * self.tokens - self.lost
        if self.current and self.lost < self.lost_before:
            later = max(cost) if self.named else cost[self.current]
            if risk + (HOLD - 1) * (later - 1) <= spare:
                self._hold(HOLD - 1)
        return gamma if risk <= spare else 0

    def observe(self, gamma: int, examined: int, accepted: int, all_accepted: bool) -> None:
        if gamma == 0:  # a plain step loses nothing
            self.behind += 1
            self.tokens += 1
            return
        self.unsettled.append((gamma, examined, accepted, self.behind))
        self.behind = 0
        if self.named:
            self.named.observe(gamma, examined, accepted, all_accepted)

    def _hold(self, rounds: int) -> None:
        """Go on with the current gamma."""
        self.held = rounds
        self.since += rounds

    def _settle(
        self, cost: list[float], gamma: int, examined: int, accepted: int, behind: int
    ) -> None:
        """A round with drafts, after which nothing was chosen yet."""
        tokens = accepted + 1
        self.tokens += tokens
        self.lost += cost[gamma] + self.costs.reading(self.batch, behind) - tokens
        if self.current == 0:  # a trial: at once again if it gained
            self.gaining = tokens > cost[gamma]
            self.pause = self.pause if self.gaining else min(2 * self.pause, LONGEST_PAUSE)
            self.since = self.pause if self.gaining else 0
        examined = min(examined, tokens)  # a rule for whole blocks looks beyond a rejection
        accepted = min(accepted, examined)
        if self.opening > 0:
            assert self.openings is not None, "a round was chosen"
            self.opening -= examined
            self.openings.add(examined, accepted)
        self.seen = KEEP * self.seen + examined
        self.kept = KEEP * self.kept + accepted
        for i in range(examined):
            self.seen_at[i] = KEEP * self.seen_at[i] + 1
            self.kept_at[i] = KEEP * self.kept_at[i] + (i < accepted)

    def _choose(self, cost: list[float], choices: Sequence[int]) -> int:
        trial = self.current == 0 and self.since >= self.pause
        if trial and not self.gaining:
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
        other = 0
        if self.deeper and self.named is None:
            deep = min(2 * self.current + 1, self.max_gamma)
            other = max(self.costs.unseen(self.batch), key=speed.__getitem__, default=deep)
            other = 0 if other == self.current else other
        loss = cost[other] - tokens[other] / speed[self.current]
        if not other:
            loss += self.costs.reading(self.batch, 1)
        if self.since < max(PROBE_EVERY, loss / (PROBE_LOSS * cost[self.current])):
            return self.current
        self.since, self.deeper = 0, not self.deeper
        return other

    def _switch(self, gamma: int) -> None:
        if gamma == 0:
            if self.opening == OPENING:  # nothing was drafted: it is earlier texts that say so
                self.pause = 2 * PAUSE
            elif self.lost <= self.lost_before:
                self.pause = PAUSE
            else:
                self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.since = 0
        elif self.current == 0:
            self.lost_before = self.lost
            self.since = 0
        self.gaining = False
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
        """One token of what was seen stays, and one of hope."""
        self.kept, self.seen = self.kept / max(1.0, self.seen) + PRIOR, min(1.0, self.seen) + 1
        self.kept_at = [k / max(1.0, s) for k, s in zip(self.kept_at, self.seen_at, strict=True)]
        self.seen_at = [min(1.0, s) for s in self.seen_at]
