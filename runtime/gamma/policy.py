"""Chooses gamma for the next round, from the acceptance of texts so far and the cost of rounds.

Exactness is not affected: a round's gamma is chosen from what came before the round, never from its
own draft tokens. Given the past, a round is Algorithm 1 with a constant gamma, which emits from p
for any constant. A choice by measured times differs from run to run, so at temperature > 0 the same
seed can give a different text, of the same distribution; at 0 only near-ties can differ.

Nothing here draws a random number or reads a clock. Costs are in plain steps (one token of the
target alone, sampling and host included).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .measured import MeasuredPolicy, Policy, SharedGamma


def choose_together(policies: Sequence[Policy], batch: int, fixed: int = 0) -> None:
    """Before a round of `batch` texts: let those whose gamma is measured choose it together.

    policies: of the texts with one kind of draft. fixed: the largest gamma of those that have that
    kind of draft, but no policy.
    """
    texts = [policy for policy in policies if isinstance(policy, MeasuredPolicy)]
    if texts:
        others = (policy.next() for policy in policies if not isinstance(policy, MeasuredPolicy))
        texts[0].shared.choose(texts, batch, max([fixed, *others]))


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
