"""gamma from measured costs and acceptance, common to the texts of a round."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .costs import PRIOR_ACCEPTANCE, Costs, EarlierTexts, RoundCosts

DECAY = 0.96  # factor by which earlier observations fade with every round
# Weights, in tokens, of earlier texts in a new one, and of all positions in the acceptance at each.
TEXT_WEIGHT, POSITION_WEIGHT = 16.0, 8.0
ROUNDS_PER_CHOICE = 8  # rounds for which a choice is kept
PAUSE, LONGEST_PAUSE = 16, 1024  # rounds without drafts before they are tried again
LOSS_ALLOWANCE, LOSS_RATE = 3.0, 0.03  # what a text may lose: plain steps, and those per token
MAX_CREDIT = 8.0  # plain steps of what earlier texts have gained, which a text may lose too


class Policy(Protocol):
    """Chooses gamma for the rounds of one request."""

    def next(self) -> int:
        """gamma for the next round, after `choose_together`."""

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        """Record the result of a round. gamma: drafts that were verified, which may be fewer than
        requested. examined: those up to the first rejection, that one included."""


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
        # Set in the first round: a request may never run. allowance: plain steps to lose at once.
        self.acceptance: Acceptance
        self.allowance: float
        self.earlier_texts: EarlierTexts | None = None
        self.is_drafting = True  # otherwise the draft has been left behind
        self.room = shared.max_gamma  # the most tokens that it can have drafted
        self.unread_tokens = 0  # tokens of rounds without drafts that the draft has yet to read
        self.tokens, self.loss = 0, 0.0  # of the text; loss: plain steps, negative is a gain

    def begin(self) -> None:
        """Before the first round."""
        if self.earlier_texts is None:
            earlier = self.shared.costs.earlier_texts(self.settings)
            earlier.record_start()
            self.allowance = LOSS_ALLOWANCE + min(MAX_CREDIT, max(0.0, earlier.gained))
            self.acceptance = Acceptance(self.shared.max_gamma, earlier.acceptance)
            self.earlier_texts = earlier  # last: there may be an interrupt

    def width(self, gamma: int) -> int:
        """gamma of this text if `gamma` is the common choice."""
        if not self.is_drafting:
            return 0
        return min(self.room, self.base.next() if self.base and gamma else gamma)

    def next(self) -> int:
        if self.shared.measures:  # also with a `base`
            return self.shared.gamma if self.is_drafting else 0
        return self.width(self.shared.gamma)

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        part = _Part(self, gamma, examined, accepted, self.unread_tokens)
        self.shared.round.parts.append(part)
        reads = gamma == 0 and self.shared.costs.reads_model
        self.unread_tokens = self.unread_tokens + 1 if reads else 0
        if self.base:
            self.base.observe(gamma, examined, accepted)

    def learn(self, examined: int, accepted: int, loss: float) -> None:
        """Add the result of a round. loss: in plain steps."""
        self.tokens += accepted + 1
        self.loss += loss
        examined = min(examined, accepted + 1)  # the block rule examines tokens after a rejection
        if examined and self.earlier_texts is not None:
            self.earlier_texts.add(examined, min(accepted, examined), loss)
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


@dataclass(frozen=True, slots=True)
class _Round:
    """batch, fixed: as in `choose_together`."""

    batch: int
    fixed: int
    parts: list[_Part] = field(default_factory=list)


class SharedGamma:
    """The fastest gamma for texts that are decoded together with one kind of draft, by measured
    costs and acceptance. For a single text as for many: a round takes as long as its largest gamma,
    so that a smaller one would save a text nothing.

    Theorem 3.8 of Leviathan et al. 2023, with the measured cost of a round instead of gamma c + 1,
    and the mean over texts of the tokens expected from acceptance by position instead of alpha. A
    text starts with the acceptance of earlier texts with its settings, and without drafts if that
    is too low. A choice is kept for 8 rounds of the same texts.

    The mean loss of the texts of a round is bounded, whatever the draft does: a round with drafts
    is run only if the loss against plain decoding, should the round accept none, stays within 3
    plain steps + 3 % of the tokens: 4.2 % of 256 tokens. To this come up to 8 plain steps of what
    earlier texts with the same settings have gained lately, since a text with a good draft may
    begin with bad luck; with new settings, of what all have gained. If the best gamma could lose
    more than is left, the best of those that cannot is used, until its gains suffice. Losses are
    counted at measured costs. Not bounded are the first seven rounds of a batch size and seven in
    1,024 later ones, which measure the costs; not counted, the draft's reading of the prompt and
    the extra time of rounds with cold caches. Reading the tokens of rounds without drafts counts. A
    text for which that would lose too much is left behind, without drafts, until gains suffice.

    16 rounds after drafts were given up, most observations are forgotten and drafts are tried again
    with one token; each time they lose, the pause doubles, up to 1,024 rounds.
    """

    def __init__(self, costs: Costs):
        self.costs, self.max_gamma = costs, costs.max_gamma
        # The current round; if it measures costs, texts with a `base` have its gamma too.
        self.round, self.gamma, self.measures = _Round(0, 0), 0, False
        self._pending: list[_Round] = []  # rounds with drafts that no text has learnt from
        # The choice; the gamma that is kept, for how many more rounds, and what for.
        self._choice, self._kept, self._rounds_left = 1, 0, 0
        self._made_for: tuple[int, int, set[MeasuredPolicy]] = 0, 0, set()
        self._pause = PAUSE
        self._loss = 0.0  # mean of the texts since the last trial, in plain steps

    def choose(self, texts: Sequence[MeasuredPolicy], batch: int, fixed: int = 0) -> None:
        """Set `gamma` for a round of these texts. batch, fixed: as in `choose_together`."""
        if any(part.gamma for part in self.round.parts):
            self._pending.append(self.round)
        else:
            for part in self.round.parts:  # a plain step loses nothing
                part.text.learn(0, 0, 0.0)
        self.round, self.measures = _Round(batch, fixed), False
        made_for = batch, fixed, set(texts)
        if self._rounds_left and made_for == self._made_for:
            self._rounds_left -= 1
            self.gamma = self._kept
        else:
            self.gamma = self._next(texts)
            if not self.measures:
                self._made_for, self._kept = made_for, self.gamma

    def _next(self, texts: Sequence[MeasuredPolicy]) -> int:
        batch = self.round.batch
        is_trial = self._choice == 0 and not self._rounds_left  # the pause is over
        for text in texts:
            text.begin()
            text.is_drafting = True
            if is_trial:
                text.acceptance.forget()
        untimed = self.costs.gamma_to_time(batch, self.round.fixed)
        known = self.costs.rounds if untimed is None else self.costs.rounds_of_nearest
        if costs := known(batch):
            while self._pending:
                each = self._pending.pop(0)
                self._learn(self.costs.rounds_if_timed(each.batch) or costs, each)
        if untimed and costs:
            self._admit(costs, texts, 0, max(0.0, self._budget(texts)))
        if untimed is not None and any(text.is_drafting for text in texts):
            self.measures = True
            if untimed and is_trial:  # this is the trial
                self._choice, self._loss = 1, 0.0
            return untimed
        costs = self.costs.rounds(batch)
        budget = self._admit(costs, texts, 1, self._budget(texts))
        if not any(text.is_drafting for text in texts):
            is_pause = self._choice == 0 and not is_trial
            self._rounds_left = self._rounds_left - 1 if is_pause else ROUNDS_PER_CHOICE - 1
            return 0
        if is_trial:
            self._choice, self._loss, gamma = 1, 0.0, 1
        else:
            gamma = self._best(costs, texts, budget)
        if gamma == 0:
            return 0
        budget -= self._excess(costs, texts, gamma)
        # Keep the choice only for as many rounds as may all accept nothing.
        longest = self.max_gamma if any(text.base for text in texts) else gamma
        worst = costs.round(max(longest, self.round.fixed)) - costs.round(self.round.fixed)
        self._rounds_left = min(self._rounds_left, max(0, int(budget / max(worst, 1e-9))))
        return gamma if budget >= 0 else 0

    def _learn(self, costs: RoundCosts, done: _Round) -> None:
        """Let texts learn from a round, whose loss they share equally."""
        time = costs.round(max(done.fixed, *(part.gamma for part in done.parts)))
        time += sum(costs.catch_up(part.unread) for part in done.parts if part.gamma)
        tokens = _mean([part.accepted + 1 for part in done.parts])
        loss = time - tokens * costs.round(done.fixed)
        self._loss += loss
        for part in done.parts:
            part.text.learn(part.examined, part.accepted, loss)

    @staticmethod
    def _budget(texts: Sequence[MeasuredPolicy]) -> float:
        """The mean of what the texts may still lose."""
        return _mean([text.allowance + LOSS_RATE * text.tokens - text.loss for text in texts])

    def _admit(
        self, costs: RoundCosts, texts: Sequence[MeasuredPolicy], gamma: int, budget: float
    ) -> float:
        """Choose the texts that draft: those that the draft has read, and those that it can read
        within the budget and before a round with this gamma. Returns the rest of the budget."""
        for text in texts:  # anew: if an earlier call left all behind, no text would have a width
            text.is_drafting = True
        least = self._excess(costs, texts, gamma)
        for text in sorted(texts, key=lambda text: text.unread_tokens):
            needed = costs.catch_up(text.unread_tokens)
            text.is_drafting = bool(text.room > 0 and needed + least <= budget)
            budget -= needed if text.is_drafting else 0.0
        return budget

    def _best(self, costs: RoundCosts, texts: Sequence[MeasuredPolicy], budget: float) -> int:
        """gamma of the next round; sets the choice, and for how many more rounds it is kept.
        budget: what a round may still lose."""
        gammas, fixed = range(self.max_gamma + 1), self.round.fixed
        expected = [text.acceptance.tokens() for text in texts]
        widths = [[text.width(gamma) for text in texts] for gamma in gammas]
        tokens = [
            _mean([of_text[width] for of_text, width in zip(expected, each, strict=True)])
            for each in widths
        ]
        plain = costs.round(fixed)
        losses = [costs.round(max(fixed, *each)) - plain for each in widths]
        reading = sum(costs.catch_up(x.unread_tokens) for x in texts if x.is_drafting)
        times = [plain + loss + reading / ROUNDS_PER_CHOICE for loss in losses]
        times[0] = plain
        speed = [tokens[gamma] / times[gamma] for gamma in gammas]
        best = max(gammas, key=speed.__getitem__)
        if best == 0:
            if self._choice == 0:  # a pause goes on, whoever comes and goes
                self._rounds_left -= 1
                return 0
            self._pause = PAUSE if self._loss < 0 else min(2 * self._pause, LONGEST_PAUSE)
            self._choice, self._rounds_left = 0, self._pause - 1
            return 0
        # The best may be too expensive for now. Another one can earn what it costs, or 0 is used.
        affordable = [gamma for gamma in gammas if losses[gamma] <= budget]
        best = max(affordable, key=speed.__getitem__) or best
        # A few times that were disturbed must not hide for ever that the next gamma is better, as
        # it would be if one more token took nothing but a step of the draft.
        more = best + 1
        untried = more in affordable and not self.costs.often_timed(self.round.batch, more)
        if untried and tokens[more] / (times[best] + costs.draft) > speed[best]:
            best = more
        self._choice, self._rounds_left = best, ROUNDS_PER_CHOICE - 1
        return best

    def _excess(self, costs: RoundCosts, texts: Sequence[MeasuredPolicy], gamma: int) -> float:
        """Plain steps that a round with this gamma takes beyond one without, reading excluded."""
        fixed = self.round.fixed
        return costs.round(max(fixed, *(x.width(gamma) for x in texts))) - costs.round(fixed)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # statistics.fmean takes four times as long
