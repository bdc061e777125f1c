"""GGUF, llama.cpp's file format: metadata, a table of tensors, and their blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.integrations.gguf import dequant, reader

from runtime.files.errors import OutriderError

from .packed import Lazy, Levels, damage, damaged, unsupported

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = 2, 3, 6, 7, 8, 12, 13, 14
# Weights and bytes of a block. Transformers does not unpack the last two, which are common in files
# of small models: llama.cpp uses them for rows that are not a multiple of 256.
_BLOCK = {**dequant.GGML_BLOCK, _Q5_0: (32, 22), _Q5_1: (32, 24)}
_NAME = {**dequant.GGML_NAME, _Q5_0: "Q5_0", _Q5_1: "Q5_1", 0: "F32", 1: "F16", 30: "BF16"}
_BITS = {0: 32, 1: 16, 30: 16}
TOKENS = "tokenizer.ggml.tokens"
_BLOCKS_AT_A_TIME = 1 << 15  # blocks to split at a time


@dataclass(frozen=True)
class GgufFile:
    """metadata: by llama.cpp's keys; for a list of strings other than the tokens, only its length.
    tensors: unread, by llama.cpp's names. bits: width of most weights. kinds: llama.cpp's types of
    the matrices, most common first."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Lazy]
    bits: int
    kinds: list[str]


def locate(name: str, path: Path) -> Path | None:
    """The GGUF file at this path, or in this folder, which has no other weights; None if none.

    Raises OutriderError "checkpoint" for another kind of file, or a folder with several.
    """
    if path.is_file():
        if path.suffix != ".gguf" and path.open("rb").read(4) != b"GGUF":
            raise OutriderError(
                "checkpoint", f"{name} is a file but not GGUF", "Give the checkpoint's folder."
            )
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        raise OutriderError(
            "checkpoint",
            f"{name} has {len(files)} GGUF files",
            f"Name one of them, such as {name}/{files[0].name}.",
        )
    return files[0] if files else None


def read(name: str, path: Path) -> GgufFile:
    """Read the header. Raises OutriderError "checkpoint" if the file is not GGUF, is one of several
    parts, is truncated, or has tensors of an unsupported type."""
    with damage(name, "it cannot be read as GGUF"):
        content: npt.NDArray[np.uint8] = np.memmap(path, mode="c", dtype=np.uint8)
        # Not `GgufHeader`, which refuses Q5_0 and Q5_1.
        metadata, count, position = reader._read_metadata(content, name, (TOKENS,))
        table, position = reader._read_tensor_table(content, count, position)
        alignment = int(metadata.get("general.alignment", 32))
        begin = -(-position // alignment) * alignment
        parts = int(metadata.get("split.count", 1))
    if parts > 1:
        cause = f"{name} is one of {parts} parts"
        raise OutriderError("checkpoint", cause, "Merge them first: llama-gguf-split --merge.")
    tensors: dict[str, Lazy] = {}
    kinds: Counter[int] = Counter()
    for key, shape, kind, offset in table:
        if kind not in _PLAIN and kind not in _BLOCK:
            raise unsupported(name, f"{key} has ggml type {kind}")
        size = _tensor_size(kind, shape)
        if size is None or begin + offset + size > len(content):
            raise damaged(name, f"it ends before {key} does")
        data = content[begin + offset : begin + offset + size]
        tensors[key] = Lazy(_reader(data, kind, shape), shape, _NAME[kind])
        if len(shape) > 1:
            kinds[kind] += prod(shape)
    most_common = [kind for kind, _ in kinds.most_common()]
    if not most_common:
        raise damaged(name, "it has no weights")
    return GgufFile(
        path,
        metadata,
        tensors,
        _bits_of_kind(most_common[0]),
        [_NAME[kind] for kind in most_common],
    )


def _bits_of_kind(kind: int) -> int:
    """Bits of a type, by its name: Q4_K has 4, IQ2_XS has 2."""
    return _BITS.get(kind) or next(int(letter) for letter in _NAME[kind] if letter.isdigit())


def _tensor_size(kind: int, shape: tuple[int, ...]) -> int | None:
    """Size of a tensor; None if its rows are not made of whole blocks."""
    if kind in _PLAIN:
        return prod(shape) * _PLAIN[kind].itemsize
    weights, size = _BLOCK[kind]
    return prod(shape) // weights * size if shape and shape[-1] % weights == 0 else None


def _reader(
    data: npt.NDArray[np.uint8], kind: int, shape: tuple[int, ...]
) -> Callable[[], torch.Tensor | Levels | _Blocks]:
    def make() -> torch.Tensor | Levels | _Blocks:
        raw = torch.from_numpy(data)  # memory-mapped
        if kind in _PLAIN:
            return raw.view(_PLAIN[kind]).view(shape)
        blocks = _Blocks(raw.view(*shape[:-1], -1), kind)
        return _levels(blocks) if kind in _SPLIT else blocks

    return make


@dataclass(frozen=True)
class _Blocks:
    """Blocks as stored; `blocks[rows]` dequantises rows. data: uint8 [.., bytes of a row]."""

    data: torch.Tensor
    kind: int

    def __getitem__(self, rows: Any) -> torch.Tensor:
        data = self.data[rows]
        dense: torch.Tensor = dequant.dequantize(data.flatten(), self.kind)
        return dense.view(*data.shape[:-1], -1)


def _levels(blocks: _Blocks) -> Levels:
    """The same with a byte per number, from which rows of these kinds are dequantised three times
    as fast."""
    *rows, _ = blocks.data.shape
    pieces = torch.split(blocks.data.view(-1, _BLOCK[blocks.kind][1]), _BLOCKS_AT_A_TIME)
    parts = zip(*(_SPLIT[blocks.kind](piece, blocks.kind) for piece in pieces), strict=True)
    return Levels(*(torch.cat(part).view(*rows, -1) for part in parts))


def _split_32(blocks: torch.Tensor, kind: int) -> Sequence[torch.Tensor]:
    """Split blocks of 32: a scale, possibly a minimum, possibly the fifth bits, then the other
    bits. Returns levels int8 [B, 32], scales float32 [B, 1], and minima if there are any."""
    scale = _half(blocks, 0)
    if kind == _Q8_0:
        return blocks[:, 2:].view(torch.int8), scale
    level, has_minimum = _unpack_fields(blocks[:, -16:], 4, 16), kind in (_Q4_1, _Q5_1)
    zero_level = 8
    if kind in (_Q5_0, _Q5_1):
        level, zero_level = level | _unpack_fields(blocks[:, -20:-16], 1, 1) << 4, 16
    level = level.view(torch.int8)
    return (level, scale, _half(blocks, 2)) if has_minimum else (level - zero_level, scale)


def _split_256(blocks: torch.Tensor, kind: int) -> Sequence[torch.Tensor]:
    """Split Q4_K and Q5_K, eight groups of 32: levels int8 [B, 256], scales and minima float32
    [B, 8]."""
    scale, minimum = dequant._k_scales(blocks[:, 4:16])
    level = _unpack_fields(blocks[:, -128:], 4, 32)
    if kind == _Q5_K:
        level = level | _unpack_fields(blocks[:, 16:48], 1, 32) << 4
    return level.view(torch.int8), _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _split_q6(blocks: torch.Tensor, _: int) -> Sequence[torch.Tensor]:
    """Split Q6_K, sixteen groups of 16: levels int8 [B, 256], scales float32 [B, 16]."""
    level = _unpack_fields(blocks[:, :128], 4, 64) | _unpack_fields(blocks[:, 128:192], 2, 32) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return level.view(torch.int8) - 32, scale


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].view(torch.float16).float()


def _unpack_fields(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Unpack uint8 [B, bytes]: for each `width` bytes, the lowest bits of all, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    apart = torch.unflatten(data, 1, (-1, 1, width)) >> shifts
    return apart.bitwise_and_(2**bits - 1).flatten(1)


_SPLIT = {
    **dict.fromkeys((_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0), _split_32),
    **dict.fromkeys((_Q4_K, _Q5_K), _split_256),
    _Q6_K: _split_q6,
}
