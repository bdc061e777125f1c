"""Log-probabilities, the largest of them, and confidences of a row of logits, in double precision.

By liboutrider where it is there, so that a C++ program reports the same numbers to the bit; by
NumPy otherwise, equal but for the rounding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import kernel
from .distribution import FloatRow, SumRow


def log_softmax(row: FloatRow) -> SumRow:
    """Natural logarithms of the softmax of logits float32 [V]; float64 [V]."""
    if not kernel.available():
        shifted = row.astype(np.float64) - row.max()
        logprobs: SumRow = shifted - np.log(np.exp(shifted).sum())
        return logprobs
    row = np.ascontiguousarray(row, np.float32)
    found = np.empty(len(row))
    kernel.load().outrider_log_softmax(row.ctypes.data, len(row), found.ctypes.data)
    return found


def largest(values: SumRow, count: int) -> npt.NDArray[np.intp]:
    """Where the `count` largest of [V] are, from the largest down, the first of equal ones first.

    Not by sorting all: that takes longer than a step of a small model with many tokens.
    """
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.intp)
    least = np.partition(values, -count)[-count]
    found = np.flatnonzero(values >= least)
    return found[np.argsort(-values[found], kind="stable")[:count]]


def confidence(row: FloatRow, token: int, temperature: float) -> float:
    """The softmax probability of a token where the logits [V] are divided by `temperature`."""
    if not kernel.available():
        weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
        return float(weights[token] / weights.sum())
    row = np.ascontiguousarray(row, np.float32)
    found = kernel.load().outrider_confidence(row.ctypes.data, len(row), token, temperature)
    return float(found)
