"""The gain of speculative decoding: the formulas of Leviathan, Kalman, Matias 2023, as functions.

All assume that tokens are accepted independently (section 3.1). Times are in units of a plain step
of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

MAX_GAMMA = 64


def expected_tokens(alpha: float, gamma: float) -> float:
    """Expected tokens per round, including the correction or bonus token: equation (1)."""
    return gamma + 1 if alpha >= 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: float, cost: float, verify: float = 1.0) -> float:
    """Speedup over plain decoding: Theorem 3.8, where `verify` is 1.

    cost: c, time of a draft step. verify: time of the verification of gamma + 1 tokens.
    """
    return expected_tokens(alpha, gamma) / (gamma * cost + verify)


def operations(alpha: float, gamma: float, cost: float) -> float:
    """Arithmetic operations, as a multiple of plain decoding's: Theorem 3.11. cost: ĉ, the draft's
    operations per token."""
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(
    alpha: float, cost: float, verify: Sequence[float] = (1.0,) * (MAX_GAMMA + 1)
) -> tuple[int, float]:
    """The gamma with the largest speedup, and that speedup; 0, 1 if none gains. Section 3.5.

    verify[gamma]: cost of the verification of gamma + 1 tokens, for gamma 0 to the largest allowed.
    """
    gains = {0: 1.0}
    gains |= {g: speedup(alpha, g, cost, verify[g]) for g in range(1, len(verify))}
    return max(gains.items(), key=itemgetter(1))  # of equal ones the first


def oracle(alpha: float, cost: float) -> float:
    """The upper bound of section 3.5 on the speedup, for any choice of gamma: exactly the tokens
    that will be accepted are drafted, alpha / (1 - alpha) on average, and a round adds one more."""
    return float("inf") if alpha >= 1 and cost == 0 else 1 / (1 - alpha + cost * alpha)


def break_even(overhead: float, gain: float) -> float:
    """Number of output tokens from which on speculation pays off; infinite if there is no speedup.

    overhead: one-time cost in plain steps (the draft's prefill). gain: the speedup after that.
    """
    return overhead / (1 - 1 / gain) if gain > 1 else float("inf")


def table(alpha: float, cost: float, verify: Sequence[float]) -> str:
    """A line for each gamma above 0: tokens per round, speedup, operations. verify: as in
    `best_gamma`."""
    rows = (
        f"{gamma:>5}  {expected_tokens(alpha, gamma):>14.2f}  "
        f"{speedup(alpha, gamma, cost, verify[gamma]):>6.2f}x  "
        f"{operations(alpha, gamma, cost):>9.2f}x"
        for gamma in range(1, len(verify))
    )
    return "\n".join(["gamma  tokens a round  speedup  operations (c^ = c)", *rows])
