"""Figures as they are told: means of documents or texts with their errors, and their digits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def ratio_estimates(sums: Numbers, counts: Numbers) -> tuple[list[float], list[float]]:
    """Of sums [D, M] and counts [D]: all sums over all counts, [M], and the standard errors of
    those as ratio estimates, in which each of the D counts once, however large it is."""
    means = sums.sum(0) / counts.sum()
    off = sums - means * counts[:, None]
    degrees = max(1, len(counts) - 1)
    errors = np.sqrt((off**2).sum(0) * len(counts) / degrees) / counts.sum()
    return means.tolist(), errors.tolist()


def rounded(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")
