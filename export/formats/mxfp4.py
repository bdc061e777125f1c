"""MXFP4 as used for GPT-OSS's experts: 4-bit numbers (e2m1), and a power of two for each 32.

OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 6.3. bfloat16 holds its values as
exactly as float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .packed import Lazy, Packed, PackedModule, damaged, expect_floats, read_folder, unpack

_BLOCK = 32
_NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # and their negatives, in this order
_BIAS = 127  # of the exponents, in which 255 means NaN
_ROWS = 1 << 16  # blocks at a time


def packed(name: str, folder: Path, _: dict[str, Any]) -> Packed:
    details = f"4 bits of floating point, groups of {_BLOCK}"
    return Packed("MXFP4", 4, details, lambda: _tensors(name, folder), narrow=True)


def _tensors(name: str, folder: Path) -> dict[str, Lazy]:
    tensors = read_folder(name, folder)
    for key in [key for key in tensors if key.endswith("_blocks")]:
        weight = key.removesuffix("_blocks")
        if weight in tensors:
            raise damaged(name, f"it has {weight} twice, packed and not")
        tensors[weight] = _experts(PackedModule(name, weight, tensors))
    expect_floats(name, tensors)
    return tensors


def _experts(module: PackedModule) -> Lazy:
    """From blocks uint8 [E, N, K / 32, 16], with the first number in the lower half of a byte, and
    scales uint8 [E, N, K / 32], to bfloat16 [E, K, N], as in the model."""
    blocks, scales = map(module.take, ("_blocks", "_scales"))
    experts, rows, count = blocks.sizes(3)
    module.expect("_blocks", blocks, {"U8"}, experts, rows, count, _BLOCK // 2)
    module.expect("_scales", scales, {"U8"}, experts, rows, count)
    numbers = torch.tensor(_NUMBERS + [-number for number in _NUMBERS])

    def make() -> torch.Tensor:
        exponents = scales[...].flatten()
        if bool((exponents == 255).any()):
            raise module.damaged("_scales contains NaN")
        dense = torch.empty(len(exponents), _BLOCK, dtype=torch.bfloat16)
        all_of = blocks[...].view(-1, _BLOCK // 2), exponents, dense
        parts = zip(*(torch.split(tensor, _ROWS) for tensor in all_of), strict=True)
        for codes, exponent, part in parts:
            part[:] = torch.ldexp(numbers[unpack(codes, 4).int()], exponent.int()[:, None] - _BIAS)
        return dense.view(experts, rows, count * _BLOCK).transpose(1, 2).contiguous()

    return Lazy(make, (experts, count * _BLOCK, rows), "BF16")
