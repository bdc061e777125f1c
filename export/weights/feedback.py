"""Rounding with error feedback: what a column of a matrix loses, the columns behind it make good.

GPTQ (Frantar et al. 2022, arXiv 2210.17323): with inputs x of a product W x, the error that counts
is E[|dW x|^2], which the matrix E[x x^T] alone decides. The inputs come from text that the model
itself wrote, so nobody has to bring data.
"""

from __future__ import annotations

import numpy as np
import torch

from .blocks import BLOCK, RANGE, Bits, Quantised, as_blocks, best_scales, ratio

# Of the mean of the diagonal, added to it: what was never seen in the inputs may occur.
_DAMPING = 0.01
_ROWS = 8192  # of a matrix at a time; they have nothing to do with each other
_COLUMNS = 512  # of E[x x^T] at a time


def factor(inputs: torch.Tensor) -> torch.Tensor:
    """How the errors of earlier columns weigh on a later one, for inputs [T, K]: float32 [K, K],
    upper triangular with ones on its diagonal.

    It is R of E[x x^T] = R D R^T, damped. Errors d of a row cost |d R D^1/2|^2, of which column j
    has d_j + sum_{i<j} d_i R_ij: this says which d_j is best. It needs no inverse of that matrix,
    which GPTQ's own form does, and takes the same decisions (Chen et al. 2025, arXiv 2507.18553).
    """
    for dtype in (torch.float32, torch.float64):
        x = inputs.to(dtype).flip(1)  # turned round, as Cholesky's factor is a lower one
        hessian = x.new_zeros(x.shape[1], x.shape[1])
        for begin in range(0, len(hessian), _COLUMNS):  # its lower triangle is all that is read
            end = begin + _COLUMNS
            torch.mm(x[:, begin:].T, x[:, begin:end], out=hessian[begin:, begin:end])
        diagonal = hessian.diagonal()
        diagonal += _DAMPING * diagonal.mean() + 1e-12
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not failed and bool(lower.isfinite().all()):
            break
    del hessian
    lower /= lower.diagonal().clone()
    upper: torch.Tensor = lower.flip(0, 1).float()
    return upper


def quantise_with_feedback(weight: torch.Tensor, factor: torch.Tensor, bits: Bits) -> Quantised:
    """The matrix [N, K], of any floating type, for inputs with this `factor` [K, K].

    A block's scales are chosen when it is its turn, for what its columns have to be by then.
    Raises ValueError for NaN, infinity and what no float16 scale reaches.
    """
    rows, columns = weight.shape
    levels = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, -(-columns // BLOCK)), np.float16)
    for begin in range(0, rows, _ROWS):
        here = slice(begin, begin + _ROWS)
        piece = weight[here]  # which may be made for it
        owed = torch.zeros(columns, len(piece))  # a column is a row in memory
        for block, start in enumerate(range(0, columns, BLOCK)):
            end = min(start + BLOCK, columns)
            inverse = _inverse(factor[start:end, start:end])
            full = piece[:, start:end].T.float()
            part = torch.addmm(full, inverse.T, owed[start:end])
            scale = best_scales(as_blocks(part.T), bits)[:, 0]
            inverse_scale, level = ratio(1.0, scale), torch.empty_like(part)
            scales[here, block] = scale.to(torch.float16).numpy()
            for i, (wanted, chosen) in enumerate(zip(part, level, strict=True)):
                torch.mul(wanted, inverse_scale, out=chosen).round_().clamp_(*RANGE[bits])
                lost = torch.addcmul(wanted, chosen, scale, value=-1)
                part[i + 1 :].addr_(inverse[i, i + 1 :], lost, alpha=-1)
            levels[here, start:end] = level.T.to(torch.int8).numpy()
            errors = torch.addcmul(full, level, scale, value=-1)
            owed[end:].addmm_(factor[start:end, end:].T, errors)
    return Quantised(levels, scales, bits)


def _inverse(upper: torch.Tensor) -> torch.Tensor:
    inverse: torch.Tensor = torch.linalg.solve_triangular(
        upper, torch.eye(len(upper)), upper=True, unitriangular=True
    )
    return inverse
