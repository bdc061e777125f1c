"""A matrix in blocks of 32 numbers that share a scale: levels of 8 or 4 bits, no zero points.

Or with one scale for each row, levels of 8 bits: whole numbers, or float8. TensorRT multiplies
those as they lie, where it makes a dense copy of blocks of 8 bits in each call.

Here those of 8 bits are chosen, and those found again that a dense matrix was made of; `feedback`
chooses those of 4.
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
Rows = Literal["int8", "fp8"]  # the levels of a matrix with one scale for each row
FLOAT8: np.dtype[Any] = ir.DataType.FLOAT8E4M3FN.numpy()
_MOST: dict[Rows, float] = {"int8": 127.0, "fp8": 448.0}
BLOCK = 32
# Lowest and highest level. With 8 bits -128 is what other makers' checkpoints have; ours do not.
RANGE: dict[int, tuple[int, int]] = {4: (-8, 7), 8: (-128, 127)}
_LARGEST = 65504.0  # of float16
OUT_OF_REACH = "a weight is NaN, infinite or beyond what a float16 scale reaches"
SLICE = 1 << 16  # numbers at a time: what is made of them stays in a core's cache
AT_ONCE = 1 << 22  # where more of them are quicker
_SAMPLE = 256  # blocks that say whether a search is worth while, and which peaks are likely
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Quantised:
    """W [N outputs, K inputs] as level * scale.

    levels: int8 [N, K], of `RANGE[bits]`, or float8 (e4m3fn). scales: float16 [N, ceil(K / 32)], or
    [N, 1] for whole rows, finite; one that is 0 has only levels 0. With 4 bits some are negative.
    With 8 bits none that is chosen here is: TensorRT takes those of 4 bits alone.
    """

    levels: npt.NDArray[Any]
    scales: npt.NDArray[np.float16]
    bits: Bits

    def dense(self) -> npt.NDArray[np.float32]:
        """The matrix itself, [N, K]: what a dequantised product multiplies by, to the bit."""
        columns = self.levels.shape[1]
        width = sharing(columns, self.scales.shape[1])
        dense = np.repeat(self.scales.astype(np.float32), width, axis=1)[:, :columns]
        dense *= self.levels.astype(np.float32)
        return dense

    @property
    def size(self) -> int:
        """Bytes, as `bytes_of`."""
        rows, columns = self.levels.shape
        width = sharing(columns, self.scales.shape[1])
        return bytes_of(rows, columns, self.bits, width)


def bytes_of(rows: int, columns: int, bits: Bits, width: int = BLOCK) -> int:
    """With 4-bit levels two to a byte, and each row made up to whole blocks of `width`."""
    return rows * -(-columns // width) * (width * bits // 8 + 2)


def bits_a_weight(weights: Collection[Quantised]) -> float:
    """On average over all of them, scales included."""
    return 8 * sum(w.size for w in weights) / sum(w.levels.size for w in weights)


def sharing(columns: int, scales: int) -> int:
    """How many neighbours along K share a scale in a row of so many: a block, or the row."""
    return BLOCK if scales == -(-columns // BLOCK) else columns


def quantise8(weight: torch.Tensor) -> Quantised:
    """The matrix [N, K], of any floating type, rounded to nearest, with the scale for each block
    that its largest number needs.

    Raises ValueError for NaN, infinity and what no float16 scale reaches.
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
    """The matrix [N, K], of any floating type, rounded to nearest, with the scale for each row that
    its largest number needs: what is smaller has the precision that is left, and float8's own.

    Raises ValueError for NaN, infinity and what no float16 scale reaches.
    """
    most, dtype = _MOST[kind], np.dtype(np.int8) if kind == "int8" else FLOAT8
    levels, scales = np.empty(weight.shape, dtype), np.empty((len(weight), 1), np.float16)
    for here in row_slices(*weight.shape):
        part = weight[here].float()
        scale = _scale_of(part.abs().amax(-1, keepdim=True), most)
        level = (part * _inverse(scale)).clamp_(-most, most)
        whole = level.round_() if kind == "int8" else level
        levels[here], scales[here] = whole.numpy().astype(dtype), scale.numpy()
    return Quantised(levels, scales, 8)


def row_slices(rows: int, columns: int, numbers: int = SLICE) -> Iterator[slice]:
    """All rows of a matrix, about that many numbers at a time."""
    step = max(1, numbers // columns)
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))


def _as_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] as [N, blocks, 32], made up with zeros."""
    missing = -weight.shape[1] % BLOCK
    if missing:
        weight = torch.nn.functional.pad(weight, (0, missing))
    return weight.reshape(weight.shape[0], -1, BLOCK)


def _scale_of(peak: torch.Tensor, most: float) -> torch.Tensor:
    """float32, each a number of float16, by which the highest level reaches these magnitudes."""
    if not bool((peak <= _LARGEST * most).all()):  # NaN is not
        raise ValueError(OUT_OF_REACH)
    return (peak / most).to(torch.float16).to(torch.float32)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """0 of what is 0 in float16: of a block of zeros, or of next to nothing."""
    return torch.where(scale == 0, 0.0, 1 / scale)


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
    blocks = _as_floats(weight[sample // count])[np.arange(len(sample)), sample % count]
    peaks = np.arange(-RANGE[bits][0], 0, -1)
    found = _search(blocks, peaks, bits)
    if found is None:
        return None
    seen = np.bincount(np.abs(found[0]).max(axis=1), minlength=peaks[0] + 1)
    peaks = peaks[np.argsort(-seen[peaks], kind="stable")]
    levels, scales = np.empty(weight.shape, np.int8), np.empty((rows, count), np.float16)
    for here in row_slices(rows, width, AT_ONCE):
        found = _search(_as_floats(weight[here]).reshape(-1, BLOCK), peaks, bits)
        if found is None:
            return None
        levels[here] = found[0].reshape(-1, count * BLOCK)[:, :width]
        scales[here] = found[1].reshape(-1, count)
    return Quantised(levels, scales, bits)


def _as_floats(weight: torch.Tensor | Floats) -> Floats:
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
