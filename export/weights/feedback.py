"""Rounding with error feedback: what a column of a matrix loses, the columns behind it make good.

GPTQ (Frantar et al. 2022, arXiv 2210.17323): with inputs x of a product W x, the error that counts
is E[|dW x|^2], which the matrix E[x x^T] alone decides. The inputs come from text that the model
itself wrote, so nobody has to bring data.
"""

from __future__ import annotations

import numpy as np
import torch

from .blocks import BLOCK, Bits, Quantised, as_blocks, best_scales, nearest_levels

# Of the mean of the diagonal, added to it: what was never seen in the inputs may occur.
_DAMPING = 0.01
_ROWS = 8192  # of a matrix at a time; they have nothing to do with each other


def factor(inputs: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of E[x x^T], damped: float32 [K, K] for [T, K].

    Its row i says, over its diagonal, how the columns behind i make up for an error in column i.
    """
    x = inputs.float()
    hessian = (x.T @ x).double()
    diagonal = hessian.diagonal()
    diagonal += _DAMPING * diagonal.mean() + 1e-12
    # With H = R R^T, R upper, the factor is R^-1. Cholesky's of H with both axes turned round is R,
    # turned round, so the inverse of H need not be made.
    lower = torch.linalg.cholesky(hessian.flip(0, 1)).float()
    inverse: torch.Tensor = torch.linalg.solve_triangular(lower, torch.eye(len(lower)), upper=False)
    return inverse.flip(0, 1)


def quantise_with_feedback(weight: torch.Tensor, factor: torch.Tensor, bits: Bits) -> Quantised:
    """The matrix float32 [N, K] for inputs with this `factor` [K, K].

    A block's scales are chosen when it is its turn, for what its columns have to be by then.
    Raises ValueError for NaN, infinity and what no float16 scale reaches.
    """
    rows, columns = weight.shape
    levels = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, -(-columns // BLOCK)), np.float16)
    for begin in range(0, rows, _ROWS):
        here = slice(begin, begin + _ROWS)
        left = weight[here].T.contiguous()  # a column is a row in memory
        for block, start in enumerate(range(0, columns, BLOCK)):
            end = min(start + BLOCK, columns)
            part = left[start:end]
            scale = best_scales(as_blocks(part.T), bits)
            scales[here, block] = scale[:, 0].to(torch.float16).numpy()
            errors = torch.empty_like(part)
            for i, column in enumerate(range(start, end)):
                level = nearest_levels(part[i, :, None, None], scale, bits)[:, 0, 0]
                levels[here, column] = level.to(torch.int8).numpy()
                errors[i] = (part[i] - level * scale[:, 0]) / factor[column, column]
                part[i:].addr_(factor[column, column:end], errors[i], alpha=-1)
            left[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return Quantised(levels, scales, bits)
