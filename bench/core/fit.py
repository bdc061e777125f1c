"""Summary statistics: median with quartiles, ratio estimates, exponents of growth.

The growth of y with x is described by a power law, or by a power law plus a constant.
`fit_power_law` fits the former by least squares in log-log space, with Student's t for the 95 %
interval; `worst` shows how well a power law describes the curve over the measured range. A time
with a constant part (reading the weights, starting Python) bends the curve. `fit_shifted_power_law`
therefore fits y = a + b x^k with relative errors, so that k is the exponent of the growing part.
Its interval is a profile interval: all k that fit hardly worse than the best one (an F test of one
parameter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

EXPONENTS = np.arange(1, 301) / 100  # tried by `fit_shifted_power_law`


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of `count` values."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None if there are no values."""
        if not values:
            return None
        low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).round(3).tolist()
        return Spread(middle, low, high, len(values))

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.median:.2f}"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio_estimates(sums: Numbers, counts: Numbers) -> tuple[list[float], list[float]]:
    """The ratios of total sums to the total count, [M], and their standard errors.

    sums: [D, M] for D documents or texts. counts: [D]. The errors are those of ratio estimates,
    where each of the D documents is one observation, whatever its size.
    """
    means = sums.sum(0) / counts.sum()
    off = sums - means * counts[:, None]
    degrees = max(1, len(counts) - 1)
    errors = np.sqrt((off**2).sum(0) * len(counts) / degrees) / counts.sum()
    return means.tolist(), errors.tolist()


def rounded(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class PowerLaw:
    """y = c x^exponent. low, high: the 95 % interval of the exponent. worst: the largest relative
    deviation of a point from the fit."""

    exponent: float
    low: float
    high: float
    worst: float

    def __str__(self) -> str:
        interval = f"({self.low:.2f} to {self.high:.2f})"
        return f"x^{self.exponent:.2f} {interval}, off by at most {self.worst:.0%}"


@dataclass(frozen=True)
class ShiftedPowerLaw:
    """y = constant + b x^exponent. low, high: the 95 % interval of the exponent, None if the points
    do not bound it, because the growing part is too small or too few points show it."""

    constant: float
    exponent: float
    low: float | None
    high: float | None


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw | None:
    """Fit a power law. None if there are fewer than three points, or one is not positive."""
    if len(x) < 3 or min(*x, *y) <= 0:
        return None
    from scipy import stats  # imported here: most importers of this module fit nothing

    log_x, log_y = np.log(x), np.log(y)
    line = stats.linregress(log_x, log_y)
    slope = float(line.slope)
    worst = float(np.abs(np.expm1(log_y - line.intercept - slope * log_x)).max())
    half = _student_quantile(len(x) - 2) * float(line.stderr)
    return PowerLaw(slope, slope - half, slope + half, worst)


def fit_shifted_power_law(x: Sequence[float], y: Sequence[float]) -> ShiftedPowerLaw | None:
    """Fit a power law plus a constant. None if there are fewer than four points, or one is not
    positive."""
    if len(x) < 4 or min(*x, *y) <= 0:
        return None
    scaled, weights = np.asarray(x) / max(x), 1 / np.asarray(y)
    fits = [_with_constant(scaled**k * weights, weights) for k in EXPONENTS]
    losses = np.array([loss for loss, _ in fits])
    best = int(losses.argmin())
    freedom = len(x) - 3
    near = EXPONENTS[losses <= losses[best] * (1 + _student_quantile(freedom) ** 2 / freedom)]
    low = float(near[0]) if near[0] > EXPONENTS[0] else None
    high = float(near[-1]) if near[-1] < EXPONENTS[-1] else None
    return ShiftedPowerLaw(fits[best][1], float(EXPONENTS[best]), low, high)


def _with_constant(growing: Numbers, constant: Numbers) -> tuple[float, float]:
    """Solve a * constant + b * growing = 1 by least squares with a, b >= 0; returns the sum of
    squares and a."""
    from scipy import optimize

    (a, _), norm = optimize.nnls(np.stack([constant, growing], axis=1), np.ones(len(constant)))
    return float(norm**2), float(a)


def _student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t."""
    from scipy import stats

    return float(stats.t.ppf(0.975, freedom))
