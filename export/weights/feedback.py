"""Round to 4 bits with error feedback: later columns of a matrix compensate the error of earlier
ones.

GPTQ (Frantar et al. 2022, arXiv 2210.17323): for inputs x of a product W x, the error to minimise
is E[|dW x|^2], which depends on x only through the matrix E[x x^T]. The inputs come from text that
the model itself generates, so no calibration data is needed. The elementwise work, including the
choice of scales, is in liboutrider (plugins/cpu/outrider_rounding.cpp): as small operations of
torch it took twice as long with two threads as with one.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.files.errors import OutriderError, first_line
from runtime.files.library import find_library

from .blocks import BLOCK, UNQUANTISABLE, Quantised

# This share of the diagonal's mean is added to it, for directions that the inputs did not contain.
_DAMPING = 0.01
_ROWS = 8192  # rows of a matrix at a time; they are independent
_COLUMNS = 512  # columns of E[x x^T] at a time
_BAD_PARAMETER = 2  # a status of outrider.h
_PANEL = 256  # columns whose errors are passed on together to all later columns


def factor(inputs: torch.Tensor) -> torch.Tensor:
    """The weights of earlier columns' errors in a later column, for inputs [T, K]: float32 [K, K],
    upper triangular with a unit diagonal.

    It is R in E[x x^T] = R D R^T, damped. Errors d of a row cost |d R D^1/2|^2, to which column j
    contributes d_j + sum_{i<j} d_i R_ij: this determines the best d_j. Unlike GPTQ's own form, it
    does not need the inverse of E[x x^T], and it makes the same decisions (Chen et al. 2025, arXiv
    2507.18553).
    """
    for dtype in (torch.float32, torch.float64):
        x = inputs.to(dtype).flip(1)  # reversed, as the Cholesky factor is lower triangular
        hessian = x.new_zeros(x.shape[1], x.shape[1])
        for begin in range(0, len(hessian), _COLUMNS):  # only its lower triangle is read
            end = begin + _COLUMNS
            torch.mm(x[:, begin:].T, x[:, begin:end], out=hessian[begin:, begin:end])
        diagonal = hessian.diagonal()
        diagonal += _DAMPING * diagonal.mean() + 1e-12
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed and bool(lower.diagonal().isfinite().all()):  # it sums the squares of a row
            break
    del hessian
    lower /= lower.diagonal().clone()
    upper: torch.Tensor = lower.flip(0, 1).float()
    return upper


def quantise4(weight: torch.Tensor, factor: torch.Tensor | None = None) -> Quantised:
    """Round the matrix [N, K], of any floating type, for inputs with this `factor` [K, K]; with
    None, each number is rounded separately.

    The scales of a block are chosen after the errors of earlier columns were added to it. Raises
    ValueError for NaN, infinity and numbers too large for a float16 scale, and as `load_rounding`.
    """
    rows, columns = weight.shape
    levels = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, -(-columns // BLOCK)), np.float16)
    for begin in range(0, rows, _ROWS):
        here = slice(begin, begin + _ROWS)
        _quantise_rows(weight[here], factor, levels[here], scales[here])
    return Quantised(levels, scales, 4)


def _quantise_rows(
    weight: torch.Tensor,  # may be computed on access
    factor: torch.Tensor | None,
    levels: npt.NDArray[np.int8],  # output
    scales: npt.NDArray[np.float16],  # output
) -> None:
    rows, columns = weight.shape
    pending_errors = torch.zeros(0 if factor is None else columns, rows, dtype=torch.float32)
    for first in range(0, columns, _PANEL):
        last = min(first + _PANEL, columns)
        panel = torch.empty(last - first, rows, dtype=torch.float32)  # columns are contiguous
        panel.copy_(weight[:, first:last].T)
        for start in range(first, last, BLOCK):
            end = min(start + BLOCK, last)
            compensated = block = panel[start - first : end - first]
            inverse = None
            if factor is not None:
                inverse = _inverse(factor[start:end, start:end])
                compensated = torch.addmm(block, inverse.T, pending_errors[start:end])
            block_scales = _round(compensated, block, inverse, levels[:, start:end])
            scales[:, start // BLOCK] = block_scales.to(torch.float16).numpy()
            if factor is not None:
                pending_errors[end:last].addmm_(factor[start:end, end:last].T, block)
        if factor is not None:
            pending_errors[last:].addmm_(factor[first:last, last:].T, panel)


def _round(
    compensated: torch.Tensor,  # float32 [columns, N]
    numbers: torch.Tensor,  # float32 [columns, N]; replaced by their rounding errors
    inverse: torch.Tensor | None,  # float32 [columns, columns]
    levels: npt.NDArray[np.int8],  # [N, columns], output
) -> torch.Tensor:
    """Round one block of columns, and return its scales, float32 [N]."""
    columns, rows = compensated.shape
    scales = torch.empty(rows, dtype=torch.float32)
    status = load_rounding()(
        compensated.data_ptr(), numbers.data_ptr(), rows, columns,
        None if inverse is None else inverse.data_ptr(),
        levels.ctypes.data, levels.strides[0], scales.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    if status == _BAD_PARAMETER:
        raise ValueError(UNQUANTISABLE)
    assert status == 0
    return scales


@functools.cache
def load_rounding() -> Any:
    """`outrider_round4` of liboutrider. Raises OutriderError "backend" if it is missing."""
    library, remedy = find_library(), "Install a C++ compiler, and run make plugins."
    if library is None:
        cause = "quantised weights need liboutrider, which was not compiled"
        raise OutriderError("backend", cause, remedy)
    try:
        rounding = ctypes.CDLL(str(library)).outrider_round4
    except (OSError, AttributeError) as error:  # built for another platform, or an older version
        cause = f"{library.name} cannot round weights ({first_line(error)})"
        raise OutriderError("backend", cause, remedy) from None
    pointer, long, int_ = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    rounding.argtypes = [pointer, pointer, long, int_, pointer, pointer, long, pointer, int_]
    return rounding


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    inverse: torch.Tensor = torch.linalg.solve_triangular(
        upper, torch.eye(len(upper), dtype=upper.dtype), upper=True, unitriangular=True
    )
    return inverse.contiguous()
