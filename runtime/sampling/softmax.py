"""Log-probabilities, the largest of them, and confidences of a row of logits, in double precision.

Computed by liboutrider if it is available, so that a C++ program reports bitwise the same numbers;
otherwise by NumPy, with results equal up to rounding.
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
    """Indices of the `count` largest of [V], in descending order; equal values in index order.

    Does not sort all values: that takes longer than a step of a small model with a large
    vocabulary.
    """
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.intp)
    least = np.partition(values, -count)[-count]
    found = np.flatnonzero(values >= least)
    return found[np.argsort(-values[found], kind="stable")[:count]]


def confidence(row: FloatRow, token: int, temperature: float) -> float:
    """The softmax probability of a token, with the logits [V] divided by `temperature`."""
    if not kernel.available():
        weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
        return float(weights[token] / weights.sum())
    row = np.ascontiguousarray(row, np.float32)
    found = kernel.load().outrider_confidence(row.ctypes.data, len(row), token, temperature)
    return float(found)
