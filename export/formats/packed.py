"""Weights that a checkpoint packs: what is said of them, and each made dense when it is wanted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runtime.files.errors import OutriderError, first_line

# Transformers reads with several threads, and unpacking takes several times a tensor's memory.
_ONE = threading.RLock()
_FLOATS = {"F16", "BF16", "F32", "F64"}


@dataclass(frozen=True)
class Lazy:
    """A tensor of the checkpoint that is read, or made dense, each time it is asked for: by
    `lazy[...]`, as Transformers asks a safetensors file. dtype: in safetensors' letters."""

    make: Callable[[], torch.Tensor]
    shape: tuple[int, ...]
    dtype: str = "F32"

    def __getitem__(self, _: object) -> torch.Tensor:
        with _ONE:
            return self.make()


@dataclass(frozen=True)
class Packed:
    """How the weights are stored, where not as plain floating point.

    bits: of most of the packed weights; 16 or more where none is quantised. details: what else a
    user should see. tensors: all of the checkpoint under Transformers' names, none of them read
    yet; raises OutriderError "checkpoint" where one is missing or not as it should be. remark: what
    of the format is not carried over. narrow: whether 16 bits hold what they say.
    """

    format: str
    bits: int
    details: str
    tensors: Callable[[], dict[str, Lazy]]
    remark: str = ""
    narrow: bool = False

    def __str__(self) -> str:
        return f"{self.format}, {self.details}"


def unsupported(name: str, what: str) -> OutriderError:
    return OutriderError(
        "checkpoint",
        f"{name} is quantised in a way that is not read: {what}",
        "Use the checkpoint that it was made from, with float weights.",
    )


def damaged(name: str, what: str) -> OutriderError:
    return OutriderError("checkpoint", f"{name}: {what}", "Download the checkpoint again.")


def read_folder(name: str, folder: Path) -> dict[str, Lazy]:
    """All tensors of the folder's safetensors files, unread."""
    found: dict[str, Lazy] = {}
    for path in _files(name, folder):
        try:
            file: Any = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                view = file.get_slice(key)
                read = _reader(file, key)
                found[key] = Lazy(read, tuple(view.get_shape()), view.get_dtype())
        except Exception as error:  # noqa: BLE001 - safetensors raises its own, and OSError
            raise damaged(name, f"{path.name} cannot be read: {first_line(error)}") from None
    return found


def _reader(file: Any, key: str) -> Callable[[], torch.Tensor]:
    return lambda: file.get_tensor(key)


def _files(name: str, folder: Path) -> list[Path]:
    """Those of the index where there is one, else the only one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            return [folder / str(shard) for shard in shards]
        except Exception as error:  # noqa: BLE001 - whatever an index can be in place of a table
            raise damaged(name, f"{index.name} cannot be read: {first_line(error)}") from None
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise OutriderError(
            "checkpoint",
            f"{name} is quantised and has {len(files)} safetensors files without an index",
            "Download the checkpoint completely, in safetensors.",
        )
    return files


def modules(tensors: dict[str, Lazy], part: str) -> Iterator[str]:
    """The names of all modules that have this part; the table may change in the meantime."""
    for key in list(tensors):
        module, dot, last = key.rpartition(".")
        if last == part:
            yield module + dot


def take(name: str, tensors: dict[str, Lazy], key: str) -> Lazy:
    """Out of the table. Raises OutriderError where it is missing."""
    if key not in tensors:
        raise damaged(name, f"it lacks {key}")
    return tensors.pop(key)


def expect(name: str, key: str, tensor: Lazy, dtypes: set[str], *shape: int) -> None:
    """Raises OutriderError where the tensor is another than its module needs."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        has, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{min(dtypes)} {list(shape)}"
        raise damaged(name, f"{key} is {has} in place of {wanted}")


def expect_scales(name: str, key: str, tensor: Lazy, *shape: int) -> None:
    expect(name, key, tensor, _FLOATS, *shape)


def expect_floats(name: str, tensors: dict[str, Lazy]) -> None:
    """What is left must be plain: integers without a scale are no weights."""
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise damaged(name, f"{key} is {tensor.dtype}, and nothing says its scale")


def groups(name: str, key: str, tensor: Lazy, count: int) -> torch.Tensor:
    """The group of each column, int64 [K]; each must be one of `count`."""
    index = tensor[...].long()
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise damaged(name, f"{key} names groups beyond the {count} that there are")
    return index


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers out of int32 words along the last axis, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return torch.flatten((words[..., None] >> shifts).bitwise_and_(2**bits - 1), -2)


def dequantise(
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    group: torch.Tensor | None = None,
) -> torch.Tensor:
    """(level - zero) * scale in float32, [N, K]. The product of an integer of 8 bits and a scale
    of 16 is exact.

    levels: [N, K]. scales, zeros: [N, G]. group: of each column, int64 [K]; None for G groups of
    equal width, one after the other.
    """
    (rows, width), count = levels.shape, scales.shape[1]
    scales = scales.to(torch.float32)
    if group is not None:
        whole = levels if zeros is None else levels - zeros[:, group]
        return whole.to(torch.float32) * scales[:, group]
    blocks = levels.reshape(rows, count, width // count)
    whole = blocks if zeros is None else blocks - zeros[..., None]
    return whole.to(torch.float32).mul_(scales[..., None]).reshape(rows, width)
