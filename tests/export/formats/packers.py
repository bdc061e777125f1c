"""Quantised checkpoints written from random levels and scales, with the weights that they encode.

This is independent of export/: words are packed and weights dequantised by a second implementation,
mostly block by block, as the sources of the formats describe.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from exported import edit_json
from safetensors.torch import load_file, save_file

Rng = np.random.Generator
Parts = dict[str, torch.Tensor]
# Given a projection's shape, returns its tensors by the last part of their names, and the dense
# weight.
Packer = Callable[[tuple[int, int], Rng], tuple[Parts, np.ndarray]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write(
    folder: Path, source: Path, packer: Packer, **quantization: Any
) -> dict[str, torch.Tensor]:
    """Write the checkpoint `source` with packed projections, except those of the vision part.
    Returns the dense tensors that it encodes."""
    shutil.copytree(source, folder)
    dense = load_file(folder / "model.safetensors")
    stored, rng = {}, np.random.default_rng(3)
    for name, tensor in dense.items():
        if not name.endswith("proj.weight") or name.startswith("visual."):
            stored[name] = tensor
            continue
        rows, width = tensor.shape
        parts, weight = packer((rows, width), rng)
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
        dense[name] = torch.from_numpy(weight)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=quantization)
    return dense


def mxfp4(folder: Path, source: Path) -> dict[str, torch.Tensor]:
    """Write a GPT-OSS checkpoint with packed experts; returns its dense tensors."""
    shutil.copytree(source, folder)
    dense, stored = load_file(folder / "model.safetensors"), {}
    rng = np.random.default_rng(3)
    for name, tensor in dense.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = tensor.bfloat16()
            dense[name] = stored[name].float()
            continue
        experts, width, rows = tensor.shape
        codes = rng.integers(0, 16, (experts, rows, width))
        powers = rng.integers(118, 124, (experts, rows, width // 32))
        stored[name + "_blocks"] = torch.from_numpy(
            (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.uint8)
        ).view(experts, rows, -1, 16)
        stored[name + "_scales"] = torch.from_numpy(powers.astype(np.uint8))
        sign, power, half = codes >> 3, codes >> 1 & 3, codes & 1  # e2m1
        number = np.where(power > 0, (1 + half / 2) * 2.0 ** (power - 1), half / 2)
        number *= (1 - 2 * sign) * np.exp2(powers.repeat(32, axis=-1) - 127.0)
        dense[name] = torch.from_numpy(number.swapaxes(1, 2).astype(np.float32))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "mxfp4"}
    edit_json(folder / "config.json", quantization_config=method, dtype="bfloat16")
    return dense


def words(levels: np.ndarray, bits: int) -> torch.Tensor:
    """Pack unsigned levels into int32 along the last axis, the first in the lowest bits."""
    many = 32 // bits
    padded = np.pad(levels, [(0, 0)] * (levels.ndim - 1) + [(0, -levels.shape[-1] % many)])
    packed = np.zeros((*padded.shape[:-1], padded.shape[-1] // many), np.uint32)
    for place in range(many):
        packed |= padded[..., place::many].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def scales(shape: tuple[int, ...], rng: Rng, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.002, 0.02, shape)).to(dtype)


def multiplied(
    levels: np.ndarray, zeros: np.ndarray, scale: torch.Tensor, group: np.ndarray
) -> np.ndarray:
    """Dequantise levels [N, K] with zeros and scale [N, G]; group [K] maps columns to groups."""
    dense = np.empty(levels.shape, np.float32)
    for column, which in enumerate(group):
        factor = scale[:, which].float().numpy()
        dense[:, column] = (levels[:, column] - zeros[:, which]).astype(np.float32) * factor
    return dense


def gptq(bits: int, size: int, *, symmetric: bool, shuffled: bool = False, less: int = 1) -> Packer:
    def pack(shape: tuple[int, int], rng: Rng) -> tuple[Parts, np.ndarray]:
        rows, width = shape
        groups = width // size
        group = np.arange(width) // size
        if shuffled:
            group = rng.permutation(group)
        levels = rng.integers(0, 2**bits, shape)
        zeros = rng.integers(1, 2**bits, (rows, groups))
        if symmetric:
            zeros[:] = 2 ** (bits - 1)
        scale = scales((rows, groups), rng)
        parts = {
            "qweight": words(levels, bits).T.contiguous(),
            "qzeros": words(zeros.T - less, bits),
            "scales": scale.T.contiguous(),
            "g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        return parts, multiplied(levels, zeros, scale, group)

    return pack


def awq(size: int) -> Packer:
    def pack(shape: tuple[int, int], rng: Rng) -> tuple[Parts, np.ndarray]:
        rows, width = shape
        levels = rng.integers(0, 16, shape)
        zeros = rng.integers(0, 16, (rows, width // size))
        scale = scales(zeros.shape, rng)

        def ordered(table: np.ndarray) -> torch.Tensor:
            """Pack [N, X] into words of eight outputs, [X, N / 8]."""
            mixed = np.concatenate(
                [table.T[:, first + np.array(AWQ_ORDER)] for first in range(0, rows, 8)], axis=1
            )
            return words(mixed, 4)

        parts = {"qweight": ordered(levels), "qzeros": ordered(zeros), "scales": scale.T}
        dense = multiplied(levels, zeros, scale, np.arange(width) // size)
        return {name: tensor.contiguous() for name, tensor in parts.items()}, dense

    return pack


def compressed(
    bits: int,
    size: int | None,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
    packed: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> Packer:
    """Integers of compressed-tensors, packed in words or as int8. size: None for whole rows."""

    def pack(shape: tuple[int, int], rng: Rng) -> tuple[Parts, np.ndarray]:
        rows, width = shape
        group = np.arange(width) // (size or width)
        count, middle = int(group.max()) + 1, 2 ** (bits - 1)
        if shuffled:
            group = rng.permutation(group)
        levels = rng.integers(-middle, middle, shape)
        zeros = rng.integers(-middle, middle, (rows, count)) * (not symmetric)
        scale = scales((rows, count), rng, dtype)
        parts = {"weight_scale": scale}
        if packed:
            parts["weight_packed"] = words(levels + middle, bits)
            parts["weight_shape"] = torch.tensor(shape)
        else:
            parts["weight"] = torch.from_numpy(levels.astype(np.int8))
            parts["input_scale"] = torch.ones(1)
        if not symmetric:
            parts["weight_zero_point"] = (
                words((zeros + middle).T, bits).T.contiguous()
                if packed
                else torch.from_numpy(zeros.astype(np.int8))
            )
        if shuffled:
            parts["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        return parts, multiplied(levels, zeros, scale, group)

    return pack


def float8(block: int | None) -> Packer:
    """block: number of rows and columns that share a scale; None for one scale per row."""

    def pack(shape: tuple[int, int], rng: Rng) -> tuple[Parts, np.ndarray]:
        rows, width = shape
        weight = torch.from_numpy(rng.standard_normal(shape)).to(torch.float8_e4m3fn)
        down, along = (block, block) if block else (1, width)
        scale = scales((-(-rows // down), -(-width // along)), rng, torch.float32)
        grown = scale.repeat_interleave(down, 0)[:rows].repeat_interleave(along, 1)[:, :width]
        dense = weight.float() * grown
        return {"weight": weight, "weight_scale": scale}, dense.numpy()

    return pack
