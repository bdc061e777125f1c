"""GGUF, llama.cpp's file: metadata, a table of tensors, and their blocks."""

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

from runtime.files.errors import OutriderError, first_line

from .packed import Lazy, Levels, damaged, unsupported

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _Q4_K, _Q5_K, _Q6_K = 2, 3, 6, 7, 8, 12, 13, 14
# Weights and bytes of a block. The last two Transformers does not unpack, and files for small
# models are full of them: llama.cpp takes them for rows that are no multiple of 256.
_BLOCK = {**dequant.GGML_BLOCK, _Q5_0: (32, 22), _Q5_1: (32, 24)}
_NAME = {**dequant.GGML_NAME, _Q5_0: "Q5_0", _Q5_1: "Q5_1", 0: "F32", 1: "F16", 30: "BF16"}
_BITS = {0: 32, 1: 16, 30: 16}
TOKENS = "tokenizer.ggml.tokens"
_AT_ONCE = 1 << 15  # blocks that are split


@dataclass(frozen=True)
class GgufFile:
    """metadata: llama.cpp's keys; of a list of strings, unless it is the tokens, only the length.
    tensors: unread, under llama.cpp's names. bits: of most of the weights. kinds: llama.cpp's types
    of the matrices, the commonest first."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Lazy]
    bits: int
    kinds: list[str]


def locate(name: str, path: Path) -> Path | None:
    """The GGUF file that is meant by a file, or by a folder that has no other weights.

    Raises OutriderError "checkpoint" where a folder has several.
    """
    if path.is_file():
        if path.suffix != ".gguf" and path.open("rb").read(4) != b"GGUF":
            raise OutriderError(
                "checkpoint", f"{name} is a file, and no GGUF", "Give the checkpoint's folder."
            )
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) > 1:
        raise OutriderError(
            "checkpoint",
            f"{name} has {len(files)} GGUF files",
            f"Name the one that is meant, as {name}/{files[0].name}.",
        )
    return files[0] if files else None


def read(name: str, path: Path) -> GgufFile:
    """The header. Raises OutriderError "checkpoint" for what is none, is one of several parts, is
    shorter than it says, or has a type that is not read."""
    try:
        content: npt.NDArray[np.uint8] = np.memmap(path, mode="c", dtype=np.uint8)
        # Not `GgufHeader`, which refuses the two types above.
        metadata, count, position = reader._read_metadata(content, name, (TOKENS,))
        table, position = reader._read_tensor_table(content, count, position)
        alignment = int(metadata.get("general.alignment", 32))
        begin = -(-position // alignment) * alignment
        parts = int(metadata.get("split.count", 1))
    except Exception as error:  # noqa: BLE001 - of damaged bytes: struct's, Unicode's, NumPy's
        raise damaged(name, f"it cannot be read as GGUF: {first_line(error)}") from None
    if parts > 1:
        raise OutriderError(
            "checkpoint",
            f"{name} is one of {parts} parts",
            "Merge them first: llama-gguf-split --merge.",
        )
    tensors: dict[str, Lazy] = {}
    kinds: Counter[int] = Counter()
    for key, shape, kind, offset in table:
        if kind not in _PLAIN and kind not in _BLOCK:
            raise unsupported(name, f"{key} has ggml's type {kind}")
        size = _bytes(kind, shape)
        if size is None or begin + offset + size > len(content):
            raise damaged(name, f"it ends before {key} does")
        data = content[begin + offset : begin + offset + size]
        tensors[key] = Lazy(_reader(data, kind, shape), shape, _NAME[kind])
        if len(shape) > 1:
            kinds[kind] += prod(shape)
    common = [kind for kind, _ in kinds.most_common()]
    if not common:
        raise damaged(name, "it has no weights")
    return GgufFile(path, metadata, tensors, _bits(common[0]), [_NAME[kind] for kind in common])


def _bits(kind: int) -> int:
    """Q4_K is 4 bits, IQ2_XS is 2."""
    return _BITS.get(kind) or next(int(letter) for letter in _NAME[kind] if letter.isdigit())


def _bytes(kind: int, shape: tuple[int, ...]) -> int | None:
    """Of a tensor; None where a row is not made of whole blocks."""
    if kind in _PLAIN:
        return prod(shape) * _PLAIN[kind].itemsize
    weights, size = _BLOCK[kind]
    return prod(shape) // weights * size if shape and shape[-1] % weights == 0 else None


def _reader(
    data: npt.NDArray[np.uint8], kind: int, shape: tuple[int, ...]
) -> Callable[[], torch.Tensor | Levels | _Blocks]:
    def make() -> torch.Tensor | Levels | _Blocks:
        raw = torch.from_numpy(data)  # mapped
        if kind in _PLAIN:
            return raw.view(_PLAIN[kind]).view(shape)
        blocks = _Blocks(raw.view(*shape[:-1], -1), kind)
        return _levels(blocks) if kind in _SPLIT else blocks

    return make


@dataclass(frozen=True)
class _Blocks:
    """As the file has them; `blocks[rows]` makes rows dense. data: uint8 [.., bytes of a row]."""

    data: torch.Tensor
    kind: int

    def __getitem__(self, rows: Any) -> torch.Tensor:
        data = self.data[rows]
        dense: torch.Tensor = dequant.dequantize(data.flatten(), self.kind)
        return dense.view(*data.shape[:-1], -1)


def _levels(blocks: _Blocks) -> Levels:
    """The same in a byte a number: of these kinds rows are made dense three times as fast then."""
    *rows, _ = blocks.data.shape
    pieces = torch.split(blocks.data.view(-1, _BLOCK[blocks.kind][1]), _AT_ONCE)
    parts = zip(*(_SPLIT[blocks.kind](piece, blocks.kind) for piece in pieces), strict=True)
    return Levels(*(torch.cat(part).view(*rows, -1) for part in parts))


def _split_32(blocks: torch.Tensor, kind: int) -> Sequence[torch.Tensor]:
    """Blocks of 32: scale, perhaps a minimum, perhaps the fifth bits, then the others. Levels int8
    [B, 32], scales float32 [B, 1], and minima."""
    scale = _half(blocks, 0)
    if kind == _Q8_0:
        return blocks[:, 2:].view(torch.int8), scale
    level, least = _fields(blocks[:, -16:], 4, 16), kind in (_Q4_1, _Q5_1)
    middle = 8
    if kind in (_Q5_0, _Q5_1):
        level, middle = level | _fields(blocks[:, -20:-16], 1, 1) << 4, 16
    level = level.view(torch.int8)
    return (level, scale, _half(blocks, 2)) if least else (level - middle, scale)


def _split_256(blocks: torch.Tensor, kind: int) -> Sequence[torch.Tensor]:
    """Q4_K and Q5_K: eight times 32. Levels int8 [B, 256], scales and minima float32 [B, 8]."""
    scale, least = dequant._k_scales(blocks[:, 4:16])
    level = _fields(blocks[:, -128:], 4, 32)
    if kind == _Q5_K:
        level = level | _fields(blocks[:, 16:48], 1, 32) << 4
    return level.view(torch.int8), _half(blocks, 0) * scale, -(_half(blocks, 2) * least)


def _split_q6(blocks: torch.Tensor, _: int) -> Sequence[torch.Tensor]:
    """Q6_K: sixteen times 16. Levels int8 [B, 256], scales float32 [B, 16]."""
    level = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return level.view(torch.int8) - 32, scale


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].view(torch.float16).float()


def _fields(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """uint8 [B, bytes]: of each `width` bytes the lowest bits of all, then the next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    apart = torch.unflatten(data, 1, (-1, 1, width)) >> shifts
    return apart.bitwise_and_(2**bits - 1).flatten(1)


_SPLIT = {
    **dict.fromkeys((_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0), _split_32),
    **dict.fromkeys((_Q4_K, _Q5_K), _split_256),
    _Q6_K: _split_q6,
}
