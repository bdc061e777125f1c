"""Chooses gamma for the next round, from the acceptance of texts so far and the cost of rounds.

Exactness is not affected: a round's gamma is chosen from what came before the round, never from its
own draft tokens. Given the past, a round is Algorithm 1 with a constant gamma, which emits from p
for any constant. A choice by measured times differs from run to run, so at temperature > 0 the same
seed can give a different text, of the same distribution; at 0 only near-ties can differ.

Nothing here draws a random number or reads a clock. Costs are in plain steps (one token of the
target alone, sampling and host included).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from .costs import PRIOR_ACCEPTANCE, Costs, EarlierTexts, RoundCosts

DECAY = 0.96  # factor by which earlier observations fade with every round
# Weights, in tokens, of earlier texts in a new one, and of all positions in the acceptance at each.
TEXT_WEIGHT, POSITION_WEIGHT = 16.0, 8.0
ROUNDS_PER_CHOICE = 8  # rounds for which a choice is kept
PAUSE, LONGEST_PAUSE = 16, 1024  # rounds without drafts before they are tried again
LOSS_ALLOWANCE, LOSS_RATE = 3.0, 0.03  # what a text may lose: plain steps, and those per token


class Policy(Protocol):
    """Chooses gamma for the rounds of one request."""

    def next(self) -> int:
        """gamma for the next round, after `choose_together`."""

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        """Record the result of a round. gamma: drafts that were verified, which may be fewer than
        requested. examined: those up to the first rejection, that one included."""


def choose_together(policies: Iterable[Policy | None], batch: int) -> None:
    """Before a round of `batch` texts: let those whose gamma is measured choose it together."""
    groups: dict[SharedGamma, list[MeasuredPolicy]] = {}
    for policy in policies:
        if isinstance(policy, MeasuredPolicy):
            groups.setdefault(policy.shared, []).append(policy)
    for shared, texts in groups.items():
        shared.choose(texts, batch)


def make_policy(
    gamma: int | str, shared: SharedGamma, *, fallback: bool, settings: Hashable = None
) -> Policy:
    """Make a policy. gamma: a number, "auto", or "transformers". fallback: decode without drafts
    while they lose time, which "auto" always does. settings: what p and q depend on besides the
    models. Raises ValueError."""
    max_gamma = shared.max_gamma
    if gamma == "auto":
        return MeasuredPolicy(shared, settings=settings)
    if gamma == "transformers":
        base: Policy = TransformersPolicy(max_gamma)
    elif isinstance(gamma, int) and 0 <= gamma <= max_gamma:
        base = ConstantPolicy(gamma)
    else:
        raise ValueError(f"gamma {gamma!r} of at most {max_gamma}")
    if fallback and gamma != 0:
        return MeasuredPolicy(shared, base, settings)
    return base


class ConstantPolicy:
    def __init__(self, gamma: int):
        self.gamma = gamma

    def next(self) -> int:
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

    def next(self) -> int:
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
        self.examined, self.accepted = TEXT_WEIGHT, prior * TEXT_WEIGHT
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
            reached *= (accepted + POSITION_WEIGHT * common) / (examined + POSITION_WEIGHT)
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
    """The gamma that texts choose together (`SharedGamma`); with `base`, the choice of that policy,
    or 0 if they choose 0."""

    def __init__(self, shared: SharedGamma, base: Policy | None = None, settings: Hashable = None):
        self.shared, self.base, self.settings = shared, base, settings
        # Both are set in the first round: a request may never run.
        self.acceptance: Acceptance
        self.earlier_texts: EarlierTexts | None = None
        self.unread_tokens = 0  # tokens that the draft has not read
        self.tokens, self.loss = 0, 0.0  # of the text; loss: plain steps, negative is a gain

    def begin(self) -> None:
        """Before the first round."""
        if self.earlier_texts is None:
            self.earlier_texts = self.shared.costs.earlier_texts(self.settings)
            self.earlier_texts.record_start()
            self.acceptance = Acceptance(self.shared.max_gamma, self.earlier_texts.acceptance)

    def width(self, gamma: int) -> int:
        """gamma of this text if `gamma` is the common choice."""
        return self.base.next() if self.base and gamma else gamma

    def next(self) -> int:
        return self.shared.gamma if self.shared.measures else self.width(self.shared.gamma)

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        self.shared.parts.append(_Part(self, gamma, examined, accepted, self.unread_tokens))
        self.unread_tokens = 0 if gamma else self.unread_tokens + 1
        if self.base:
            self.base.observe(gamma, examined, accepted)

    def learn(self, examined: int, accepted: int, loss: float) -> None:
        """Add the result of a round. loss: in plain steps."""
        self.tokens += accepted + 1
        self.loss += loss
        examined = min(examined, accepted + 1)  # the block rule examines tokens after a rejection
        if examined and self.earlier_texts is not None:
            self.earlier_texts.add(examined, min(accepted, examined))
            self.acceptance.add(examined, min(accepted, examined))


@dataclass(frozen=True, slots=True)
class _Part:
    """A text's part of a round: the arguments of `Policy.observe`, and the tokens that the draft
    had to read before it."""

    text: MeasuredPolicy
    gamma: int
    examined: int
    accepted: int
    unread: int


class SharedGamma:
    """The fastest gamma for texts that are decoded together with one kind of draft, by measured
    costs and acceptance. For a single text as for many: a round takes as long as its largest gamma,
    so that a smaller one would save a text nothing.

    Theorem 3.8 of Leviathan et al. 2023, with the measured cost of a round instead of gamma c + 1,
    and the mean over texts of the tokens expected from acceptance by position instead of alpha. A
    text starts with the acceptance of earlier texts with its settings, and without drafts if that
    is too low. A choice is kept for 8 rounds of the same texts.

    Their loss is bounded, whatever the draft does: a round with drafts is run only if the mean loss
    against plain decoding, should the round accept none, stays within 3 plain steps + 3 % of the
    tokens: 4.2 % of 256 tokens. If the best gamma could lose more than is left, the best of those
    that cannot is used, until its gains suffice. Losses are counted at measured costs. Not counted
    are the first seven rounds of a batch size and seven in 1,024 later ones, which measure the
    costs (and in which the draft reads at most what 3 plain steps take), the draft's reading of the
    prompt, and the extra time of rounds with cold caches. Reading the tokens of rounds without
    drafts counts as a loss: if it costs more than 3 % of a plain step per token, a draft that was
    left behind is tried again only at the expense of earlier gains.

    16 rounds after drafts were given up, most observations are forgotten and drafts are tried again
    with one token; each time they lose, the pause doubles, up to 1,024 rounds.
    """

    def __init__(self, costs: Costs):
        self.costs, self.max_gamma = costs, costs.max_gamma
        # Of the current round; if it measures costs, texts with a `base` have this gamma too.
        self.gamma, self.measures = 0, False
        self.parts: list[_Part] = []  # of the current round
        self._pending: list[list[_Part]] = []  # rounds with drafts that no text has learnt from
        # The choice, its texts and their batch size, and the rounds for which it is still kept.
        self._choice, self._batch, self._rounds_left = 1, 0, 0
        self._texts: set[MeasuredPolicy] = set()
        self._pause = PAUSE
        self._loss = 0.0  # since drafts were last resumed, in plain steps of all texts

    def choose(self, texts: Sequence[MeasuredPolicy], batch: int) -> None:
        """Set `gamma` for a round of these texts. batch: how many texts are in the round, with
        those that do not choose."""
        if any(part.gamma for part in self.parts):
            self._pending.append(self.parts)
        else:
            for part in self.parts:  # a plain step loses nothing
                part.text.learn(0, 0, 0.0)
        self.parts, self.measures = [], False
        self.gamma = self._next(texts, batch)

    def _next(self, texts: Sequence[MeasuredPolicy], batch: int) -> int:
        if self._rounds_left and batch == self._batch and self._texts == set(texts):
            self._rounds_left -= 1
            return self._choice
        for text in texts:
            text.begin()
        untimed, known = self.costs.gamma_to_time(batch), self.costs.rounds_if_timed(batch)
        again = _catch_up(known, texts) if untimed and known else 0.0
        if untimed is not None and again <= LOSS_ALLOWANCE:
            self.measures = True
            return untimed
        self._texts, self._batch = set(texts), batch
        costs = self.costs.rounds(batch)
        is_trial = self._choice == 0 and not self._rounds_left  # the pause is over
        if is_trial:
            for text in texts:
                text.acceptance.forget()
        for parts in self._pending:
            self._learn(costs, parts)
        self._pending.clear()
        budget = fmean(LOSS_ALLOWANCE + LOSS_RATE * text.tokens - text.loss for text in texts)
        budget -= _catch_up(costs, texts)
        if is_trial:
            self._choice, self._loss = 1, 0.0
            gamma = 1
        else:
            gamma = self._choose(costs, texts, budget)
        if gamma == 0:
            return 0
        width = max(text.width(gamma) for text in texts)
        budget -= costs.round(width) - 1
        # Keep the choice only for as many rounds as may all accept nothing.
        longest = self.max_gamma if any(text.base for text in texts) else width
        worst_loss = costs.round(longest) - 1
        self._rounds_left = min(self._rounds_left, max(0, int(budget / max(worst_loss, 1e-9))))
        return gamma if budget >= 0 else 0

    def _learn(self, costs: RoundCosts, parts: Sequence[_Part]) -> None:
        """Let texts learn from their round, whose loss they share equally."""
        time = costs.round(max(part.gamma for part in parts))
        time += sum(costs.catch_up(part.unread) for part in parts if part.gamma)
        loss = time - fmean(part.accepted + 1 for part in parts)
        self._loss += loss
        for part in parts:
            part.text.learn(part.examined, part.accepted, loss)

    def _choose(self, costs: RoundCosts, texts: Sequence[MeasuredPolicy], budget: float) -> int:
        """gamma of the next round; sets the choice, and for how many more rounds it is kept.
        budget: what a round may still lose."""
        tokens = [text.acceptance.tokens() for text in texts]
        widths = [[text.width(gamma) for text in texts] for gamma in range(self.max_gamma + 1)]
        rounds = [costs.round(max(some)) for some in widths]
        speed = [
            fmean(expected[width] for expected, width in zip(tokens, some, strict=True)) / time
            for some, time in zip(widths, rounds, strict=True)
        ]
        gammas = range(self.max_gamma + 1)
        best = max(gammas, key=speed.__getitem__)
        if best == 0:
            if self._choice == 0:  # a pause goes on, whoever comes and goes
                self._rounds_left -= 1
                return 0
            self._pause = PAUSE if self._loss < 0 else min(2 * self._pause, LONGEST_PAUSE)
            self._choice, self._rounds_left = 0, self._pause - 1
            return 0
        # The best may be too expensive for now; another one can earn what it costs.
        affordable = [gamma for gamma in gammas if rounds[gamma] - 1 <= budget]
        self._choice = max(affordable, key=speed.__getitem__, default=0) or best
        self._rounds_left = ROUNDS_PER_CHOICE - 1
        return self._choice


def _catch_up(costs: RoundCosts, texts: Iterable[MeasuredPolicy]) -> float:
    """Plain steps that the draft takes to read what it has missed of these texts."""
    return sum(costs.catch_up(text.unread_tokens) for text in texts)
