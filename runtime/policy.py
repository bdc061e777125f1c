"""Which gamma a request's next round uses: what it has seen, and what rounds have cost.

Exactness is untouched: a round's gamma is chosen from what came before the round, never from its
own draft tokens, so that given the past a round is Algorithm 1 with a constant, which emits from p
whatever the constant. A choice by measured times differs from run to run, so at temperature > 0
the same seed can give another text, of the same distribution; at 0 only near-ties can differ.

Nothing here draws a random number or reads a clock. Times are seconds where they come in, and
plain steps (one token of the target alone, sampling and host included) from there on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from .costs import PRIOR, WEIGHT, Costs, EarlierTexts, RoundCosts

KEEP = 0.96  # what was seen counts that much less with every round
STAY = 8  # rounds that a choice is for
PAUSE, LONGEST_PAUSE = 16, 1024  # rounds without drafts before they are tried again
ALLOWANCE, RATE = 3.0, 0.03  # plain steps, and of every token: what a text may lose


class Policy(Protocol):
    """Of one request."""

    def next(self, batch: int) -> int:
        """gamma for the next round, in which `batch` sequences take part. Each request chooses as
        if the others did the same."""

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        """A round gave this. gamma: drafts that were verified, which may be fewer than asked for.
        examined: of them, looked at before the first rejection, that one included."""


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

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
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

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        if gamma:
            self.gamma += 2 if accepted == gamma else -1
            self.gamma = min(max(1, self.gamma), self.max_gamma)


class Acceptance:
    """Of one text: which draft tokens were accepted, by their position in a round, fading.

    prior: the acceptance that it begins with.
    """

    def __init__(self, max_gamma: int, prior: float):
        # Tokens examined and accepted: of all positions, and of each.
        self.seen, self.kept = WEIGHT, prior * WEIGHT
        self.seen_at, self.kept_at = [0.0] * max_gamma, [0.0] * max_gamma

    def add(self, examined: int, accepted: int) -> None:
        self.seen = KEEP * self.seen + examined
        self.kept = KEEP * self.kept + accepted
        for i in range(examined):
            self.seen_at[i] = KEEP * self.seen_at[i] + 1
            self.kept_at[i] = KEEP * self.kept_at[i] + (i < accepted)

    def tokens(self) -> list[float]:
        """Of a round, by gamma: equation (1) with an acceptance for each position that was reached,
        which few sightings leave near the common one."""
        common, reached, tokens = self.kept / self.seen, 1.0, [1.0]
        for seen, kept in zip(self.seen_at, self.kept_at, strict=True):
            reached *= (kept + WEIGHT * common) / (seen + WEIGHT)
            tokens.append(tokens[-1] + reached)
        return tokens

    def forget(self) -> None:
        """One token of what was seen stays, and one of hope."""
        self.kept, self.seen = self.kept / max(1.0, self.seen) + PRIOR, min(1.0, self.seen) + 1
        self.kept_at = [k / max(1.0, s) for k, s in zip(self.kept_at, self.seen_at, strict=True)]
        self.seen_at = [min(1.0, s) for s in self.seen_at]


class Measured:
    """The fastest gamma by measured costs and acceptance; with `named`, what that says or 0.

    Theorem 3.8 of Leviathan et al. 2023 with what a round really costs in place of gamma c + 1,
    and acceptance by position in place of alpha. A text begins with the acceptance of earlier ones
    with its settings: where that says so, without drafts. A choice is for 8 rounds.

    What a text may lose is bounded, whatever the draft does: a round with drafts is run only where
    the text's loss against plain decoding, should the round accept none, stays within 3 plain steps
    + 3 % of its tokens: 4.2 % of 256 tokens. Where the best gamma may lose more, the best that may
    not earns what it takes. Losses are counted at measured costs; beyond them are four rounds of a
    batch size, to have any costs, the draft's reading of the prompt, and what a round takes longer
    whose caches are cold. The reading of what rounds without drafts have added is a loss too: where
    it costs more than 3 % of a plain step a token, a draft that was left behind is tried again only
    out of earlier gains.

    16 rounds after drafts were given up, what was seen is nearly forgotten and they are tried
    again, with one token; each time that they lose, after twice as many rounds, up to 1,024.
    """

    def __init__(
        self,
        costs: Costs,
        max_gamma: int,
        named: Policy | None = None,
        settings: Hashable = None,
    ):
        self.costs, self.max_gamma, self.named = costs, max_gamma, named
        self.settings = settings
        # Both from the first round on: a text may never run.
        self.acceptance: Acceptance | None = None
        self.earlier: EarlierTexts | None = None
        # What was chosen, for which batch, and how many more rounds it is for.
        self.gamma, self.batch, self.left = 1, 0, 0
        # Rounds with drafts since then: as `observe` was told, and how many tokens were read.
        self.unsettled: list[tuple[int, int, int, int]] = []
        self.behind = 0  # tokens that the draft has not read
        self.tokens, self.lost = 0, 0.0  # of the text; against plain decoding, negative is a gain
        self.lost_before = 0.0  # when drafts were last resumed
        self.pause = PAUSE

    def next(self, batch: int) -> int:
        if self.left and (batch == self.batch or self.gamma == 0):
            self.left -= 1
            return self.named.next(batch) if self.named and self.gamma else self.gamma
        if self.acceptance is None or self.earlier is None:
            self.earlier = self.costs.earlier(self.settings)
            self.earlier.began()
            self.acceptance = Acceptance(self.max_gamma, self.earlier.acceptance)
        if (lacking := self.costs.lacking(batch)) is not None:
            return lacking
        self.batch, self.left = batch, 0
        costs = self.costs.rounds(batch)
        for gamma, examined, accepted, behind in self.unsettled:
            tokens = accepted + 1
            self.tokens += tokens
            self.lost += costs.round(gamma) + costs.catching_up(behind) - tokens
            examined = min(examined, tokens)  # a rule for whole blocks looks beyond a rejection
            self.earlier.add(examined, min(accepted, examined))
            self.acceptance.add(examined, min(accepted, examined))
        self.unsettled.clear()
        spare = ALLOWANCE + RATE * self.tokens - self.lost - costs.catching_up(self.behind)
        gamma = self._choose(costs, self.acceptance, spare)
        if gamma == 0:
            return 0
        spare -= costs.round(gamma) - 1
        # As many more as may all accept nothing.
        later = costs.round(self.max_gamma if self.named else gamma) - 1
        self.left = min(self.left, max(0, int(spare / max(later, 1e-9))))
        return gamma if spare >= 0 else 0

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        if gamma == 0:  # a plain step loses nothing
            self.behind += 1
            self.tokens += 1
            return
        self.unsettled.append((gamma, examined, accepted, self.behind))
        self.behind = 0
        if self.named:
            self.named.observe(gamma, examined, accepted)

    def _choose(self, costs: RoundCosts, acceptance: Acceptance, spare: float) -> int:
        """gamma of the next round; `gamma` of the `left` ones after it. spare: what a round may
        still lose."""
        if self.gamma == 0:  # the pause is over
            acceptance.forget()
            self.gamma, self.lost_before = 1, self.lost
            return 1
        speed = [t / costs.round(gamma) for gamma, t in enumerate(acceptance.tokens())]
        choices = range(len(speed)) if self.named is None else (0, self.named.next(self.batch))
        self.gamma = max(choices, key=speed.__getitem__)
        if self.gamma == 0:
            gained = self.lost < self.lost_before
            self.pause = PAUSE if gained else min(2 * self.pause, LONGEST_PAUSE)
            self.left = self.pause - 1
            return 0
        # The best may be too dear for now, and another earn what it takes.
        within = [gamma for gamma in choices if costs.round(gamma) - 1 <= spare]
        self.gamma = max(within, key=speed.__getitem__, default=0) or self.gamma
        self.left = STAY - 1
        return self.gamma
