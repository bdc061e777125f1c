"""The blocks that a dense weight came from, found again: whole multiples of a float16 scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .blocks import BLOCK, RANGE, Bits, Quantised

_SAMPLE = 256  # blocks that say whether the search is worth while, and which peaks are likely
Floats = npt.NDArray[np.float32]


def recover(weight: Floats, bits: Bits) -> Quantised | None:
    """Levels and scales with `dense()` equal to `weight`, float32 [N, K], bit for bit; None where a
    block of 32 along K is no lattice of `bits` bits.

    A dequantised block is level * scale, which float32 holds exactly. So the scale is the block's
    largest magnitude divided by the level there, and no more than 2 ** (bits - 1) levels come into
    question.
    """
    rows, width = weight.shape
    count = -(-width // BLOCK)
    padded = np.zeros((rows, count * BLOCK), np.float32)
    padded[:, :width] = weight
    values = padded.reshape(-1, BLOCK)
    if not np.isfinite(values).all():
        return None
    peaks = np.arange(-RANGE[bits][0], 0, -1)
    found = _search(values[:: max(1, len(values) // _SAMPLE)], peaks, bits)
    if found is not None:
        seen = np.bincount(np.abs(found[0]).max(axis=1), minlength=peaks[0] + 1)
        found = _search(values, peaks[np.argsort(-seen[peaks], kind="stable")], bits)
    if found is None:
        return None
    levels, scales = found
    return Quantised(levels.reshape(rows, -1)[:, :width], scales.reshape(rows, count), bits)


def _search(
    values: Floats, peaks: npt.NDArray[np.int64], bits: Bits
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]] | None:
    """Levels [B, 32] and scales [B] of all blocks. peaks: what the largest level may be, the most
    likely first."""
    lowest, highest = RANGE[bits]
    largest = np.abs(values).max(axis=1)
    levels, scales = np.zeros(values.shape, np.int8), np.zeros(len(values), np.float16)
    left = np.flatnonzero(largest)  # a block of zeros has scale 0
    for peak in peaks:
        if not len(left):
            break
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scale = (largest[left] / np.float32(peak)).astype(np.float16)
            exact = scale.astype(np.float32)[:, None]
            level = np.rint(values[left] / exact)
            fits = (level * exact == values[left]).all(axis=1)
            # 4 bits reach further down than up: 8 is -8 of a negative scale.
            sign = np.where(level.max(axis=1) > highest, -1, 1).astype(np.float16)
            level *= sign[:, None]
            fits &= (level.min(axis=1) >= lowest) & (level.max(axis=1) <= highest)
        levels[left[fits]] = level[fits]
        scales[left[fits]] = (scale * sign)[fits]
        left = left[~fits]
    return None if len(left) else (levels, scales)
