"""Chooses gamma for a request's next round, from its acceptance so far and the cost of rounds.

Exactness is not affected: a round's gamma is chosen from what came before the round, never from its
own draft tokens. Given the past, a round is Algorithm 1 with a constant gamma, which emits from p
for any constant. A choice by measured times differs from run to run, so at temperature > 0 the same
seed can give a different text, of the same distribution; at 0 only near-ties can differ.

Nothing here draws a random number or reads a clock. Costs are in plain steps (one token of the
target alone, sampling and host included).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from .costs import PRIOR_ACCEPTANCE, PRIOR_WEIGHT, Costs, EarlierTexts, RoundCosts

DECAY = 0.96  # factor by which earlier observations fade with every round
ROUNDS_PER_CHOICE = 8  # rounds for which a choice is kept
PAUSE, LONGEST_PAUSE = 16, 1024  # rounds without drafts before they are tried again
LOSS_ALLOWANCE, LOSS_RATE = 3.0, 0.03  # what a text may lose: plain steps, and those per token


class Policy(Protocol):
    """Chooses gamma for the rounds of one request."""

    def next(self, batch: int) -> int:
        """gamma for the next round, in which `batch` sequences take part. Each request chooses as
        if the others choose the same."""

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        """Record the result of a round. gamma: drafts that were verified, which may be fewer than
        requested. examined: those up to the first rejection, that one included."""


def make_policy(
    gamma: int | str, costs: Costs, max_gamma: int, *, fallback: bool, settings: Hashable = None
) -> Policy:
    """Make a policy. gamma: a number, "auto", or "transformers". fallback: decode without drafts
    while they lose time, which "auto" always does. settings: what p and q depend on besides the
    models. Raises ValueError."""
    if gamma == "auto":
        return MeasuredPolicy(costs, max_gamma, settings=settings)
    if gamma == "transformers":
        base: Policy = TransformersPolicy(max_gamma)
    elif isinstance(gamma, int) and 0 <= gamma <= max_gamma:
        base = ConstantPolicy(gamma)
    else:
        raise ValueError(f"gamma {gamma!r} of at most {max_gamma}")
    if fallback and gamma != 0:
        return MeasuredPolicy(costs, max_gamma, base, settings)
    return base


class ConstantPolicy:
    def __init__(self, gamma: int):
        self.gamma = gamma

    def next(self, batch: int) -> int:
        return self.gamma

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        pass


class TransformersPolicy:
    """The "heuristic" schedule of Hugging Face Transformers: starts at 5, adds 2 after a round that
    accepted all drafts, otherwise subtracts 1, down to 1.

    `AssistedCandidateGenerator.update_candidate_strategy` in generation/candidate_generator.py,
    the same from 4.38 to 5.23; 5 and "heuristic" were the defaults until 4.45, 20 and "constant"
    are now. There it grows without limit; here up to max_gamma.
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
    """The acceptance of one text's draft tokens by position in a round, as fading averages.

    prior: the initial acceptance.
    """

    def __init__(self, max_gamma: int, prior: float):
        # Tokens examined and accepted: in total, and at each position.
        self.examined, self.accepted = PRIOR_WEIGHT, prior * PRIOR_WEIGHT
        self.examined_at, self.accepted_at = [0.0] * max_gamma, [0.0] * max_gamma

    def add(self, examined: int, accepted: int) -> None:
        self.examined = DECAY * self.examined + examined
        self.accepted = DECAY * self.accepted + accepted
        for i in range(examined):
            self.examined_at[i] = DECAY * self.examined_at[i] + 1
            self.accepted_at[i] = DECAY * self.accepted_at[i] + (i < accepted)

    def tokens(self) -> list[float]:
        """Expected tokens per round, by gamma: equation (1) with an acceptance for each position,
        which stays near the common one while there are few observations."""
        common, reached, tokens = self.accepted / self.examined, 1.0, [1.0]
        for examined, accepted in zip(self.examined_at, self.accepted_at, strict=True):
            reached *= (accepted + PRIOR_WEIGHT * common) / (examined + PRIOR_WEIGHT)
            tokens.append(tokens[-1] + reached)
        return tokens

    def forget(self) -> None:
        """Forget all but one token of what was observed, and add one with the prior acceptance."""
        self.accepted = self.accepted / max(1.0, self.examined) + PRIOR_ACCEPTANCE
        self.examined = min(1.0, self.examined) + 1
        pairs = zip(self.accepted_at, self.examined_at, strict=True)
        self.accepted_at = [accepted / max(1.0, examined) for accepted, examined in pairs]
        self.examined_at = [min(1.0, examined) for examined in self.examined_at]


class MeasuredPolicy:
    """The fastest gamma by measured costs and acceptance; with `base`, the choice of that policy
    or 0.

    Theorem 3.8 of Leviathan et al. 2023, with the measured cost of a round instead of gamma c + 1
    and acceptance by position instead of alpha. A text starts with the acceptance of earlier texts
    with its settings, and without drafts if that is too low. A choice is kept for 8 rounds.

    A text's loss is bounded, whatever the draft does: a round with drafts is run only if the text's
    loss against plain decoding, should the round accept none, stays within 3 plain steps + 3 % of
    its tokens: 4.2 % of 256 tokens. If the best gamma could lose more than is left, the best of
    those that cannot is used, until its gains suffice. Losses are counted at measured costs. Not
    counted are the first seven rounds of a batch size and seven in 1,024 later ones, which measure
    the costs (and in which the draft reads at most what 3 plain steps take), the draft's reading of
    the prompt, and the extra time of rounds with cold caches. Reading the tokens of rounds without
    drafts counts as a loss: if it costs more than 3 % of a plain step per token, a draft that was
    left behind is tried again only at the expense of earlier gains.

    16 rounds after drafts were given up, most observations are forgotten and drafts are tried again
    with one token; each time they lose, the pause doubles, up to 1,024 rounds.
    """

    def __init__(
        self, costs: Costs, max_gamma: int, base: Policy | None = None, settings: Hashable = None
    ):
        self.costs, self.max_gamma, self.base = costs, max_gamma, base
        self.settings = settings
        # Both are set in the first round: a request may never run.
        self.acceptance: Acceptance | None = None
        self.earlier_texts: EarlierTexts | None = None
        # The choice, its batch size, and the number of rounds for which it is still kept.
        self.gamma, self.batch, self.rounds_left = 1, 0, 0
        # Rounds with drafts since then: the arguments of `observe`, and how many tokens were read.
        self.pending_rounds: list[tuple[int, int, int, int]] = []
        self.unread_tokens = 0  # tokens that the draft has not read
        self.tokens, self.loss = 0, 0.0  # of the text; loss: plain steps, negative is a gain
        self.loss_at_resume = 0.0  # `loss` when drafts were last resumed
        self.pause = PAUSE

    def next(self, batch: int) -> int:
        if self.rounds_left and (batch == self.batch or self.gamma == 0):
            self.rounds_left -= 1
            return self.base.next(batch) if self.base and self.gamma else self.gamma
        if self.acceptance is None or self.earlier_texts is None:
            self.earlier_texts = self.costs.earlier_texts(self.settings)
            self.earlier_texts.record_start()
            self.acceptance = Acceptance(self.max_gamma, self.earlier_texts.acceptance)
        if (untimed := self.costs.gamma_to_time(batch)) is not None:
            known = self.costs.rounds_if_timed(batch)  # they are measured again
            if not (untimed and known) or known.catch_up(self.unread_tokens) <= LOSS_ALLOWANCE:
                return untimed
        self.batch, self.rounds_left = batch, 0
        costs = self.costs.rounds(batch)
        for gamma, examined, accepted, unread in self.pending_rounds:
            tokens = accepted + 1
            self.tokens += tokens
            self.loss += costs.round(gamma) + costs.catch_up(unread) - tokens
            examined = min(examined, tokens)  # the block rule examines tokens after a rejection
            self.earlier_texts.add(examined, min(accepted, examined))
            self.acceptance.add(examined, min(accepted, examined))
        self.pending_rounds.clear()
        loss_budget = LOSS_ALLOWANCE + LOSS_RATE * self.tokens - self.loss
        loss_budget -= costs.catch_up(self.unread_tokens)
        gamma = self._choose(costs, self.acceptance, loss_budget)
        if gamma == 0:
            return 0
        loss_budget -= costs.round(gamma) - 1
        # Keep the choice only for as many rounds as may all accept nothing.
        worst_loss = costs.round(self.max_gamma if self.base else gamma) - 1
        self.rounds_left = min(self.rounds_left, max(0, int(loss_budget / max(worst_loss, 1e-9))))
        return gamma if loss_budget >= 0 else 0

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        if gamma == 0:  # a plain step loses nothing
            self.unread_tokens += 1
            self.tokens += 1
            return
        self.pending_rounds.append((gamma, examined, accepted, self.unread_tokens))
        self.unread_tokens = 0
        if self.base:
            self.base.observe(gamma, examined, accepted)

    def _choose(self, costs: RoundCosts, acceptance: Acceptance, loss_budget: float) -> int:
        """gamma of the next round; sets `gamma` and `rounds_left` for the rounds after it.
        loss_budget: what a round may still lose."""
        if self.gamma == 0:  # the pause is over
            acceptance.forget()
            self.gamma, self.loss_at_resume = 1, self.loss
            return 1
        speed = [t / costs.round(gamma) for gamma, t in enumerate(acceptance.tokens())]
        choices = range(len(speed)) if self.base is None else (0, self.base.next(self.batch))
        self.gamma = max(choices, key=speed.__getitem__)
        if self.gamma == 0:
            gained = self.loss < self.loss_at_resume
            self.pause = PAUSE if gained else min(2 * self.pause, LONGEST_PAUSE)
            self.rounds_left = self.pause - 1
            return 0
        # The best may be too expensive for now; another one can earn what it costs.
        affordable = [gamma for gamma in choices if costs.round(gamma) - 1 <= loss_budget]
        self.gamma = max(affordable, key=speed.__getitem__, default=0) or self.gamma
        self.rounds_left = ROUNDS_PER_CHOICE - 1
        return self.gamma
