"""Matrices in blocks of 32 numbers that share a scale: 8-bit or 4-bit levels, no zero points.

Or with one scale per row and 8-bit levels: integers, or float8. TensorRT multiplies by those
directly, whereas it makes a dense copy of a matrix with 8-bit blocks in each call.

This module chooses 8-bit levels, and recovers the levels from which a dense matrix was computed;
`feedback` chooses 4-bit levels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

Bits = Literal[4, 8]
Rows = Literal["int8", "fp8"]  # type of the levels of a matrix with one scale per row
FLOAT8: np.dtype[Any] = ir.DataType.FLOAT8E4M3FN.numpy()
_MAX_LEVEL: dict[Rows, float] = {"int8": 127.0, "fp8": 448.0}
BLOCK = 32
# Lowest and highest level. The 8-bit level -128 occurs only in checkpoints quantised elsewhere.
RANGE: dict[int, tuple[int, int]] = {4: (-8, 7), 8: (-128, 127)}
_FLOAT16_MAX = 65504.0
UNQUANTISABLE = "a weight is NaN, infinite or too large for a float16 scale"
SLICE = 1 << 16  # numbers at a time: temporary results stay in a core's cache
LARGE_SLICE = 1 << 22  # numbers at a time where larger pieces are faster
_SAMPLE_BLOCKS = 256  # blocks that show whether a search is worthwhile, and which peaks are likely
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Quantised:
    """W [N outputs, K inputs] as level * scale.

    levels: int8 [N, K], within `RANGE[bits]`, or float8 (e4m3fn). scales: float16
    [N, ceil(K / 32)], or [N, 1] for whole rows, finite; a scale of 0 has only levels 0. With 4 bits
    some scales are negative. With 8 bits none that is chosen here is: TensorRT accepts negative
    scales only with 4 bits.
    """

    levels: npt.NDArray[Any]
    scales: npt.NDArray[np.float16]
    bits: Bits

    def dense(self) -> npt.NDArray[np.float32]:
        """The matrix [N, K], bitwise equal to the one that a dequantised product multiplies by."""
        columns = self.levels.shape[1]
        width = scale_width(columns, self.scales.shape[1])
        dense = np.repeat(self.scales.astype(np.float32), width, axis=1)[:, :columns]
        dense *= self.levels.astype(np.float32)
        return dense

    @property
    def size(self) -> int:
        """Size in bytes; see `size_in_bytes`."""
        rows, columns = self.levels.shape
        width = scale_width(columns, self.scales.shape[1])
        return size_in_bytes(rows, columns, self.bits, width)


def size_in_bytes(rows: int, columns: int, bits: Bits, width: int = BLOCK) -> int:
    """Size of a matrix in bytes, with two 4-bit levels per byte and rows padded to whole blocks of
    `width`."""
    return rows * -(-columns // width) * (width * bits // 8 + 2)


def bits_per_weight(weights: Collection[Quantised]) -> float:
    """Average number of bits per weight, scales included."""
    return 8 * sum(w.size for w in weights) / sum(w.levels.size for w in weights)


def scale_width(columns: int, scales: int) -> int:
    """How many neighbours along K share a scale, if a row has so many scales: a block, or all."""
    return BLOCK if scales == -(-columns // BLOCK) else columns


def quantise8(weight: torch.Tensor) -> Quantised:
    """Round the matrix [N, K], of any floating type, to nearest, with the scale for each block that
    its largest number requires.

    Raises ValueError for NaN, infinity and numbers too large for a float16 scale.
    """
    rows, columns = weight.shape
    levels = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, -(-columns // BLOCK)), np.float16)
    for here in row_slices(rows, columns):
        blocks = _as_blocks(weight[here].float())
        scale = _scale_of(blocks.abs().amax(-1), RANGE[8][1])
        level = (blocks * _inverse(scale)[..., None]).round_().clamp_(*RANGE[8])
        levels[here] = level.view(len(blocks), -1)[:, :columns].to(torch.int8).numpy()
        scales[here] = scale.to(torch.float16).numpy()
    return Quantised(levels, scales, 8)


def quantise_rows(weight: torch.Tensor, kind: Rows) -> Quantised:
    """Round the matrix [N, K], of any floating type, to nearest, with the scale for each row that
    its largest number requires. Smaller numbers get the absolute precision that this leaves, or
    float8's relative one.

    Raises ValueError for NaN, infinity and numbers too large for a float16 scale.
    """
    max_level, dtype = _MAX_LEVEL[kind], np.dtype(np.int8) if kind == "int8" else FLOAT8
    levels, scales = np.empty(weight.shape, dtype), np.empty((len(weight), 1), np.float16)
    for here in row_slices(*weight.shape):
        part = weight[here].float()
        scale = _scale_of(part.abs().amax(-1, keepdim=True), max_level)
        level = (part * _inverse(scale)).clamp_(-max_level, max_level)
        whole = level.round_() if kind == "int8" else level
        levels[here], scales[here] = whole.numpy().astype(dtype), scale.numpy()
    return Quantised(levels, scales, 8)


def row_slices(rows: int, columns: int, numbers: int = SLICE) -> Iterator[slice]:
    """Slices that cover all rows of a matrix, of about that many numbers each."""
    step = max(1, numbers // columns)
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))


def _as_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] as [N, blocks, 32], padded with zeros."""
    missing = -weight.shape[1] % BLOCK
    if missing:
        weight = torch.nn.functional.pad(weight, (0, missing))
    return weight.reshape(weight.shape[0], -1, BLOCK)


def _scale_of(peak: torch.Tensor, max_level: float) -> torch.Tensor:
    """Scales by which the highest level represents these magnitudes: float32, rounded to
    float16."""
    if not bool((peak <= _FLOAT16_MAX * max_level).all()):  # NaN is not
        raise ValueError(UNQUANTISABLE)
    return (peak / max_level).to(torch.float16).to(torch.float32)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, or 0 where the scale is 0 in float16, as for blocks of zeros or tiny numbers."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def recover(weight: torch.Tensor | Floats, bits: Bits) -> Quantised | None:
    """Find levels and scales with `dense()` equal to `weight` [N, K], of any floating type, bit for
    bit; None if some block of 32 along K has none with `bits` bits.

    A dequantised block is level * scale, which float32 holds exactly. So the scale is the block's
    largest magnitude divided by the level there, and no more than 2 ** (bits - 1) levels are
    possible.
    """
    rows, width = weight.shape
    count = -(-width // BLOCK)
    sample = np.arange(0, rows * count, max(1, rows * count // _SAMPLE_BLOCKS))
    blocks = _as_floats(weight[sample // count])[np.arange(len(sample)), sample % count]
    peaks = np.arange(-RANGE[bits][0], 0, -1)
    found = _search(blocks, peaks, bits)
    if found is None:
        return None
    peak_counts = np.bincount(np.abs(found[0]).max(axis=1), minlength=peaks[0] + 1)
    peaks = peaks[np.argsort(-peak_counts[peaks], kind="stable")]
    levels, scales = np.empty(weight.shape, np.int8), np.empty((rows, count), np.float16)
    for here in row_slices(rows, width, LARGE_SLICE):
        found = _search(_as_floats(weight[here]).reshape(-1, BLOCK), peaks, bits)
        if found is None:
            return None
        levels[here] = found[0].reshape(-1, count * BLOCK)[:, :width]
        scales[here] = found[1].reshape(-1, count)
    return Quantised(levels, scales, bits)


def _as_floats(weight: torch.Tensor | Floats) -> Floats:
    """[N, K] as float32 [N, blocks, 32], padded with zeros."""
    rows, width = weight.shape
    blocks = np.zeros((rows, -(-width // BLOCK) * BLOCK), np.float32)
    blocks[:, :width] = weight.float() if isinstance(weight, torch.Tensor) else weight
    return blocks.reshape(rows, -1, BLOCK)


def _search(
    values: Floats, peaks: npt.NDArray[np.int64], bits: Bits
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]] | None:
    """Levels [B, 32] and scales [B] of all blocks; None if some block has none, for example because
    of NaN or infinity. peaks: possible magnitudes of the largest level, most likely first."""
    lowest, highest = RANGE[bits]
    largest = np.abs(values).max(axis=1)
    levels, scales = np.zeros(values.shape, np.int8), np.zeros(len(values), np.float16)
    remaining = np.flatnonzero(largest)  # a block of zeros has scale 0
    for peak in peaks:
        if not len(remaining):
            break
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scale = (largest[remaining] / np.float32(peak)).astype(np.float16)
            exact = scale.astype(np.float32)[:, None]
            level = np.rint(values[remaining] / exact)
            fits = (level * exact == values[remaining]).all(axis=1)
            # 4 bits range from -8 to 7: 8 is represented as -8 with a negative scale.
            sign = np.where(level.max(axis=1) > highest, -1, 1).astype(np.float16)
            level *= sign[:, None]
            fits &= (level.min(axis=1) >= lowest) & (level.max(axis=1) <= highest)
        levels[remaining[fits]] = level[fits]
        scales[remaining[fits]] = (scale * sign)[fits]
        remaining = remaining[~fits]
    return None if len(remaining) else (levels, scales)
