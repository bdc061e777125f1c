"""GGUF, llama.cpp's file: metadata, a table of tensors, and their blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.integrations.gguf import dequant, reader

from runtime.files.errors import OutriderError, first_line

from .packed import Lazy, damaged, unsupported

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# What Transformers does not unpack and files for small models are full of: llama.cpp takes these
# for rows that are no multiple of 256. Weights and bytes of a block.
_Q5_0, _Q5_1 = 6, 7
_BLOCK = {**dequant.GGML_BLOCK, _Q5_0: (32, 22), _Q5_1: (32, 24)}
_NAME = {**dequant.GGML_NAME, _Q5_0: "Q5_0", _Q5_1: "Q5_1", 0: "F32", 1: "F16", 30: "BF16"}
_BITS = {0: 32, 1: 16, 30: 16}


@dataclass(frozen=True)
class GgufFile:
    """metadata: llama.cpp's keys; of a list of strings only the length. tensors: unread, under
    llama.cpp's names. bits: of most of the weights. kinds: llama.cpp's types of the matrices, the
    commonest first."""

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
        content: npt.NDArray[np.uint8] = np.memmap(path, mode="r", dtype=np.uint8)
        # Not `GgufHeader`, which refuses the two types above.
        metadata, count, position = reader._read_metadata(content, name)
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
) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        raw = torch.from_numpy(np.array(data))
        if kind in _PLAIN:
            dense = raw.view(_PLAIN[kind]).to(torch.float32)
        elif kind in (_Q5_0, _Q5_1):
            dense = _five_bits(raw.view(-1, _BLOCK[kind][1]), kind)
        else:
            dense = dequant.dequantize(raw, kind)
        return dense.reshape(shape)

    return make


def _five_bits(blocks: torch.Tensor, kind: int) -> torch.Tensor:
    """Blocks of 32: scale, with Q5_1 a minimum, then the fifth bits, then the others. float32."""
    head = 2 if kind == _Q5_0 else 4
    scale = blocks[:, :head].view(torch.float16).to(torch.float32)
    fifth = blocks[:, head : head + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    nibbles = blocks[:, head + 4 :]
    low = torch.cat([nibbles & 15, nibbles >> 4], dim=1)
    level = low.to(torch.float32) + 16 * fifth.flatten(1)
    return scale[:, :1] * (level - 16) if kind == _Q5_0 else scale[:, :1] * level + scale[:, 1:]
