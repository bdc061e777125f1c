"""A matrix in blocks of 32 numbers that share a scale: levels of 8 or 4 bits, no zero points.

Or with one scale for each row, levels of 8 bits: whole numbers, or float8. TensorRT multiplies
those as they lie, where it makes a dense copy of blocks of 8 bits in each call.

The nearest levels of a scale are the best there are, so what is to be chosen is the scale. For 8
bits the largest number of a block decides. For 4 bits a grid of scales is tried, as the makers of
llama.cpp's formats do, and the one that leaves the least squared error is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
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
# Which level a block's largest number would have, where the range went on: beyond -8 it is clipped,
# which the others may gain from. A positive one gets a negative scale, so that the longer side of
# the range is always its side.
_REACH = (-9.2, -8.8, -8.4, -8.1, -7.9, -7.6, -7.3, -7.0)
SLICE = 1 << 16  # numbers at a time: what is made of them stays in a core's cache


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
        """Bytes, with 4-bit levels two to a byte and each row made up to whole blocks."""
        width = sharing(self.levels.shape[1], self.scales.shape[1])
        return self.scales.size * (width * self.bits // 8 + 2)


def sharing(columns: int, scales: int) -> int:
    """How many neighbours along K share a scale in a row of so many: a block, or the row."""
    return BLOCK if scales == -(-columns // BLOCK) else columns


def quantise(weight: torch.Tensor, bits: Bits) -> Quantised:
    """The matrix [N, K], of any floating type, rounded to nearest, with the best scales of a grid.

    Raises ValueError for NaN, infinity and what no float16 scale reaches.
    """
    rows, columns = weight.shape
    levels = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, -(-columns // BLOCK)), np.float16)
    for here in row_slices(rows, columns):
        blocks = as_blocks(weight[here].float())
        scale = best_scales(blocks, bits)
        level = nearest_levels(blocks, scale, bits).view(blocks.shape[0], -1)
        levels[here] = level[:, :columns].to(torch.int8).numpy()
        scales[here] = scale.to(torch.float16).numpy()
    return Quantised(levels, scales, bits)


def quantise_rows(weight: torch.Tensor, kind: Rows) -> Quantised:
    """The matrix [N, K], of any floating type, rounded to nearest, with the scale for each row that
    its largest number needs: what is smaller has the precision that is left, and float8's own.

    Raises ValueError for NaN, infinity and what no float16 scale reaches.
    """
    most, dtype = _MOST[kind], np.dtype(np.int8) if kind == "int8" else FLOAT8
    levels, scales = np.empty(weight.shape, dtype), np.empty((len(weight), 1), np.float16)
    for here in row_slices(*weight.shape):
        part = weight[here].float()
        peak = part.abs().amax(-1, keepdim=True)
        _check_reach(peak, most)
        scale = _to_float16(peak / most)
        level = (part * ratio(1.0, scale)).clamp_(-most, most)
        whole = level.round_() if kind == "int8" else level
        levels[here], scales[here] = whole.numpy().astype(dtype), scale.numpy()
    return Quantised(levels, scales, 8)


def row_slices(rows: int, columns: int, numbers: int = SLICE) -> Iterator[slice]:
    """All rows of a matrix, about that many numbers at a time."""
    step = max(1, numbers // columns)
    for begin in range(0, rows, step):
        yield slice(begin, min(rows, begin + step))


def as_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] as [N, blocks, 32], made up with zeros."""
    missing = -weight.shape[1] % BLOCK
    if missing:
        weight = torch.nn.functional.pad(weight, (0, missing))
    return weight.reshape(weight.shape[0], -1, BLOCK)


def best_scales(blocks: torch.Tensor, bits: Bits) -> torch.Tensor:
    """float32 [N, blocks], each a number of float16, for blocks float32 [N, blocks, 32].

    The levels l of a scale leave the squared error |x|^2 - (l x)^2 / |l|^2 when the scale is fitted
    to them (least squares, as `make_qx_quants` of llama.cpp does): so the best reach has the
    largest (l x)^2 / |l|^2. The fitted scale, rounded, has to beat the one that fits the largest
    number into the range, so no block is worse off than with that.
    Raises ValueError for NaN, infinity and what no float16 scale reaches.
    """
    low, high = blocks.amin(-1), blocks.amax(-1)
    peak = torch.where(-low > high, low, high)  # of the largest magnitude, with its sign
    widest = _to_float16(peak.abs() / RANGE[bits][1])
    _check_reach(peak.abs(), RANGE[bits][1])
    if bits == 8:
        return widest
    most, fitted = torch.zeros_like(peak), widest
    for reach in _REACH:
        level = nearest_levels(blocks, peak / reach, bits)
        along, square = (level * blocks).sum(-1), level.square_().sum(-1)
        score = ratio(along.square(), square)
        better = score > most
        most = torch.where(better, score, most)
        fitted = torch.where(better, ratio(along, square), fitted)
    fitted = _to_float16(fitted)
    worse = _squared_error(blocks, fitted, bits) > _squared_error(blocks, widest, bits)
    return torch.where(worse, widest, fitted)


def _check_reach(peak: torch.Tensor, most: float) -> None:
    """peak: largest magnitudes. most: the highest level."""
    if not bool((peak <= _LARGEST * most).all()):  # NaN is not
        raise ValueError("a weight is NaN, infinite or beyond what a float16 scale reaches")


def nearest_levels(blocks: torch.Tensor, scale: torch.Tensor, bits: Bits) -> torch.Tensor:
    """float32 whole numbers [..., 32] for blocks [..., 32] and their scales [...]."""
    return (blocks * ratio(1.0, scale)[..., None]).round_().clamp_(*RANGE[bits])


def _squared_error(blocks: torch.Tensor, scale: torch.Tensor, bits: Bits) -> torch.Tensor:
    difference = nearest_levels(blocks, scale, bits).mul_(scale[..., None]).sub_(blocks)
    return difference.square_().sum(-1)


def _to_float16(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(-_LARGEST, _LARGEST).to(torch.float16).to(torch.float32)


def ratio(above: torch.Tensor | float, below: torch.Tensor) -> torch.Tensor:
    """0 where it is divided by what is 0 in float16: of a block of zeros, or of next to nothing."""
    return torch.where(below.abs() < 2**-25, 0.0, above / below)
