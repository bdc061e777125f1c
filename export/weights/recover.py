"""The blocks that a dense weight came from, found again: whole multiples of a float16 scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from .blocks import BLOCK, RANGE, Bits, Quantised, row_slices

_SAMPLE = 256  # blocks that say whether the search is worth while, and which peaks are likely
_AT_ONCE = 1 << 22  # numbers that are searched
Floats = npt.NDArray[np.float32]


def recover(weight: torch.Tensor | Floats, bits: Bits) -> Quantised | None:
    """Levels and scales with `dense()` equal to `weight` [N, K], of any floating type, bit for bit;
    None where a block of 32 along K is no lattice of `bits` bits.

    A dequantised block is level * scale, which float32 holds exactly. So the scale is the block's
    largest magnitude divided by the level there, and no more than 2 ** (bits - 1) levels come into
    question.
    """
    rows, width = weight.shape
    count = -(-width // BLOCK)
    sample = np.arange(0, rows * count, max(1, rows * count // _SAMPLE))
    blocks = _blocks(weight[sample // count])[np.arange(len(sample)), sample % count]
    peaks = np.arange(-RANGE[bits][0], 0, -1)
    found = _search(blocks, peaks, bits)
    if found is None:
        return None
    seen = np.bincount(np.abs(found[0]).max(axis=1), minlength=peaks[0] + 1)
    peaks = peaks[np.argsort(-seen[peaks], kind="stable")]
    levels, scales = np.empty(weight.shape, np.int8), np.empty((rows, count), np.float16)
    for here in row_slices(rows, width, _AT_ONCE):
        found = _search(_blocks(weight[here]).reshape(-1, BLOCK), peaks, bits)
        if found is None:
            return None
        levels[here] = found[0].reshape(-1, count * BLOCK)[:, :width]
        scales[here] = found[1].reshape(-1, count)
    return Quantised(levels, scales, bits)


def _blocks(weight: torch.Tensor | Floats) -> Floats:
    """[N, K] as float32 [N, blocks, 32], made up with zeros."""
    rows, width = weight.shape
    blocks = np.zeros((rows, -(-width // BLOCK) * BLOCK), np.float32)
    blocks[:, :width] = weight.float() if isinstance(weight, torch.Tensor) else weight
    return blocks.reshape(rows, -1, BLOCK)


def _search(
    values: Floats, peaks: npt.NDArray[np.int64], bits: Bits
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]] | None:
    """Levels [B, 32] and scales [B] of all blocks; None where one has none, as one with NaN or
    infinity. peaks: what the largest level may be, the most likely first."""
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
