"""What proofs of exactness share: the measure of an outcome's uniforms, and Pearson's test.

An outcome is piecewise constant in each uniform that it depends on. Bisection finds where it
changes, and the length of each piece is the weight of its outcome: no sample, no noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from scipy import stats

ONE = math.nextafter(1.0, 0.0)  # the largest uniform
BISECTIONS = 26  # a boundary is known to 2^-26
NEAR = 2.0**-20


def change_point(accepted: Callable[[float], bool]) -> float:
    """Length of {u in [0, 1): accepted(u)}, for a predicate that is true below some point."""
    if not accepted(0.0):
        return 0.0
    if accepted(ONE):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low


def pieces(token_at: Callable[[float], int], guesses: Iterable[float] = ()) -> dict[int, float]:
    """{token: length of its u} for an inverse CDF, which is monotone in u.

    guesses: where it may change. One that is right saves calls, one that is wrong costs two.
    """
    around = (guess + step for guess in guesses for step in (-NEAR, NEAR))
    points = [0.0, *sorted(u for u in around if 0 < u < ONE), ONE]
    tokens = [token_at(u) for u in points]
    lengths: dict[int, float] = {}

    def split(a: float, token_a: int, b: float, token_b: int) -> None:
        if token_a == token_b or b - a <= 2.0**-BISECTIONS:
            lengths[token_a] = lengths.get(token_a, 0.0) + (b - a)
            return
        middle = (a + b) / 2
        token = token_at(middle)
        split(a, token_a, middle, token)
        split(middle, token, b, token_b)

    assert tokens == sorted(tokens)
    for i in range(len(points) - 1):
        split(points[i], tokens[i], points[i + 1], tokens[i + 1])
    return lengths


def chi_square(counts: npt.NDArray[np.float64], probs: npt.NDArray[np.float64]) -> float:
    """p-value of Pearson's test; bins with an expectation under 5 are merged into one."""
    expected = probs * counts.sum()
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < 5:  # all of the small ones together: into the smallest other
            smallest = expected[:-1].argmin()
            for row in (counts, expected):
                row[smallest] += row[-1]
            counts, expected = counts[:-1], expected[:-1]
    assert len(expected) > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))
