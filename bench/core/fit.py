"""What many figures come to: a median with quartiles, ratio estimates, exponents of growth.

How fast y grows with x is a power law, or a power law on top of a constant. `power` is least
squares in log-log, with Student's t for the 95 % interval: what a curve does over the measured
range, good or bad as a power law may describe it (`worst` says which). A time that has a part that
does not grow (reading the weights, starting Python) bends there. `marginal` fits y = a + b x^k with
relative errors, so that k is the exponent of what does grow. Its interval is the profile's: all k
that fit hardly worse than the best one (an F test of one parameter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

EXPONENTS = np.arange(1, 301) / 100  # that `marginal` tries


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles, of `count` values."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).round(3).tolist()
        return Spread(middle, low, high, len(values))

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_estimates(sums: Numbers, counts: Numbers) -> tuple[list[float], list[float]]:
    """All sums over all counts, [M], and the standard errors of those.

    sums: [D, M], of D documents or texts. counts: [D]. The errors are those of ratio estimates, in
    which each of the D counts once, however large it is.
    """
    means = sums.sum(0) / counts.sum()
    off = sums - means * counts[:, None]
    degrees = max(1, len(counts) - 1)
    errors = np.sqrt((off**2).sum(0) * len(counts) / degrees) / counts.sum()
    return means.tolist(), errors.tolist()


def rounded(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Power:
    """y = c x^exponent. low, high: the 95 % interval of the exponent. worst: the largest deviation
    of a point from the line, relative to it."""

    exponent: float
    low: float
    high: float
    worst: float

    def __str__(self) -> str:
        interval = f"({self.low:.2f} to {self.high:.2f})"
        return f"x^{self.exponent:.2f} {interval}, off by {self.worst:.0%} at most"


@dataclass(frozen=True)
class Marginal:
    """y = constant + b x^exponent. low, high: the 95 % interval, None where the points do not bound
    it: what there is beside the constant is too little, or too few points show it."""

    constant: float
    exponent: float
    low: float | None
    high: float | None


def power(x: Sequence[float], y: Sequence[float]) -> Power | None:
    """None for fewer than three points, or where one is not positive."""
    if len(x) < 3 or min(*x, *y) <= 0:
        return None
    from scipy import stats  # here: most who import this module fit nothing

    log_x, log_y = np.log(x), np.log(y)
    line = stats.linregress(log_x, log_y)
    slope = float(line.slope)
    worst = float(np.abs(np.expm1(log_y - line.intercept - slope * log_x)).max())
    half = _student(len(x) - 2) * float(line.stderr)
    return Power(slope, slope - half, slope + half, worst)


def marginal(x: Sequence[float], y: Sequence[float]) -> Marginal | None:
    """None for fewer than four points, or where one is not positive."""
    if len(x) < 4 or min(*x, *y) <= 0:
        return None
    scaled, weights = np.asarray(x) / max(x), 1 / np.asarray(y)
    fits = [_with_constant(scaled**k * weights, weights) for k in EXPONENTS]
    losses = np.array([loss for loss, _ in fits])
    best = int(losses.argmin())
    freedom = len(x) - 3
    near = EXPONENTS[losses <= losses[best] * (1 + _student(freedom) ** 2 / freedom)]
    low = float(near[0]) if near[0] > EXPONENTS[0] else None
    high = float(near[-1]) if near[-1] < EXPONENTS[-1] else None
    return Marginal(fits[best][1], float(EXPONENTS[best]), low, high)


def _with_constant(growing: Numbers, constant: Numbers) -> tuple[float, float]:
    """Least squares of a * constant + b * growing = 1 with a, b >= 0: the sum and a."""
    from scipy import optimize

    (a, _), norm = optimize.nnls(np.stack([constant, growing], axis=1), np.ones(len(constant)))
    return float(norm**2), float(a)


def _student(freedom: int) -> float:
    """Student's t at 97.5 %."""
    from scipy import stats

    return float(stats.t.ppf(0.975, freedom))
