"""Weights in a packed format: a description of them, and tensors that are dequantised on access."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from runtime.files.errors import OutriderError, convert_errors

# Transformers loads with several threads, and unpacking takes several times a tensor's memory.
_LOCK = threading.RLock()
DOWNLOAD = "Download the checkpoint again."
_FLOATS = {"F16", "BF16", "F32", "F64"}
_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Lazy:
    """A tensor of the checkpoint that is read, or dequantised, on each access by `lazy[...]`, as
    Transformers accesses a safetensors file.

    make: returns an object that is indexed by a slice or row numbers, or by `...` for all rows: a
    tensor, `Levels` or similar. dtype: in safetensors' notation.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: str = "F32"

    def sizes(self, count: int) -> tuple[int, ...]:
        """The first `count` sizes, with 0 for each that is missing: damaged tensors may have any
        number of dimensions."""
        return (*self.shape, *[0] * count)[:count]

    def stored(self) -> Any:
        """The object that returns its rows, in about as many bytes as in the file."""
        with _LOCK:
            return self.make()

    def __getitem__(self, _: object) -> torch.Tensor:
        dense: torch.Tensor = self.stored()[...]
        return dense


@dataclass(frozen=True)
class Levels:
    """A matrix level * scale, or level * scale + minimum; `levels[rows]` dequantises rows.

    levels: [N, K], of any type whose values float32 holds. scales, minimum: float32 [N, G]. group:
    the group of each column, int64 [K]; None for G consecutive groups of equal width.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    minimum: torch.Tensor | None = None
    group: torch.Tensor | None = None

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """float32 [.., K]. The product of a 9-bit integer and a 16-bit scale is exact."""
        dense, scales = _to_float32(self.levels[rows]), self.scales[rows]
        if self.group is not None:
            return dense.mul_(scales.index_select(-1, self.group))
        blocks = torch.unflatten(dense, -1, (scales.shape[-1], -1)).mul_(scales[..., None])
        if self.minimum is not None:
            blocks.add_(self.minimum[rows][..., None])
        return dense


def _to_float32(levels: torch.Tensor) -> torch.Tensor:
    """A copy in float32. torch's own conversion of float8 is four times as slow as a look-up."""
    if levels.dtype != torch.float8_e4m3fn:
        return levels.to(torch.float32, copy=True)
    codes = levels.view(torch.uint8).flatten().int()
    return _FLOAT8.index_select(0, codes).view(levels.shape)


@dataclass(frozen=True)
class Reordered:
    """The rows of another object, in the order `order`, int64 [N]."""

    rows: Any
    order: torch.Tensor

    def __getitem__(self, rows: Any) -> torch.Tensor:
        found: torch.Tensor = self.rows[self.order[rows]]
        return found


@dataclass(frozen=True)
class Packed:
    """How weights are stored that are not plain floating point.

    bits: width of most of the packed weights; 16 or more if none is quantised. details: further
    information for the user. tensors: returns all tensors of the checkpoint under Transformers'
    names, unread; raises OutriderError "checkpoint" if one is missing or malformed. remark: what is
    not carried over from the format. narrow: whether 16 bits hold the values exactly.
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
        f"{name} is quantised in an unsupported format: {what}",
        "Use the checkpoint that it was made from, with float weights.",
    )


def damaged(name: str, what: str) -> OutriderError:
    return OutriderError("checkpoint", f"{name}: {what}", DOWNLOAD)


def damage(name: str, what: str) -> AbstractContextManager[None]:
    """Converts what a library raises about a damaged file."""
    return convert_errors("checkpoint", f"{name}: {what}", DOWNLOAD)


def read_folder(name: str, folder: Path) -> dict[str, Lazy]:
    """All tensors of the folder's safetensors files, by name, unread."""
    found: dict[str, Lazy] = {}
    for path in _files(name, folder):
        with damage(name, f"{path.name} cannot be read"):
            file: Any = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118 - not a mapping
                view = file.get_slice(key)
                read = partial(file.get_tensor, key)
                found[key] = Lazy(read, tuple(view.get_shape()), view.get_dtype())
    return found


@dataclass(frozen=True)
class PackedModule:
    """The tensors that a checkpoint stores instead of one weight.

    checkpoint: its name, for errors. path: prefix of the names of the parts. tensors: the table
    that parts are taken from.
    """

    checkpoint: str
    path: str
    tensors: dict[str, Lazy]

    def take(self, part: str) -> Lazy:
        """Remove the part from the table and return it. Raises OutriderError if it is missing."""
        found = self.take_optional(part)
        if found is None:
            raise damaged(self.checkpoint, f"it lacks {self.path}{part}")
        return found

    def take_optional(self, part: str) -> Lazy | None:
        return self.tensors.pop(self.path + part, None)

    def damaged(self, what: str) -> OutriderError:
        """what: the defect, beginning with the name of the part."""
        return damaged(self.checkpoint, self.path + what)

    def expect(self, part: str, tensor: Lazy, dtypes: set[str], *shape: int) -> None:
        """Raise OutriderError unless the tensor has one of these types and this shape."""
        if tensor.dtype not in dtypes or tensor.shape != shape:
            actual = f"{tensor.dtype} {list(tensor.shape)}"
            raise self.damaged(f"{part} is {actual} instead of {min(dtypes)} {list(shape)}")

    def expect_scales(self, part: str, tensor: Lazy, *shape: int) -> None:
        self.expect(part, tensor, _FLOATS, *shape)

    def groups(self, part: str, tensor: Lazy, count: int) -> torch.Tensor:
        """The group of each column, int64 [K], checked to be less than `count`."""
        index = tensor[...].long()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
            raise self.damaged(f"{part} names groups outside the {count} that exist")
        return index


Make = Callable[[PackedModule], Lazy]


def read_packed(
    name: str, folder: Path, kinds: dict[str, Make], ignored: tuple[str, ...] = ()
) -> dict[str, Lazy]:
    """As `read_folder`, with each packed weight in place of its parts. kinds: functions that make
    the weights, by the part that identifies such a module. ignored: suffixes of names."""
    tensors = read_folder(name, folder)
    for key in [key for key in tensors if key.endswith(ignored)]:
        del tensors[key]
    for part, make in kinds.items():
        for module in packed_modules(name, tensors, part):
            tensors[module.path + "weight"] = make(module)
    expect_floats(name, tensors)
    return tensors


def _files(name: str, folder: Path) -> list[Path]:
    """model.safetensors, else the files of the index if there is one, else the only file."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        with damage(name, f"{index.name} cannot be read"):
            return shards(index)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise OutriderError(
            "checkpoint",
            f"{name} is quantised and has {len(files)} safetensors files without an index",
            "Download the complete checkpoint, in safetensors format.",
        )
    return files


def shards(index: Path) -> list[Path]:
    """The files that an index names. Raises what its contents cause."""
    names = json.loads(index.read_text("utf-8"))["weight_map"].values()
    return [index.parent / str(name) for name in sorted(set(names))]


def packed_modules(name: str, tensors: dict[str, Lazy], part: str) -> Iterator[PackedModule]:
    """All modules with this part; the table may change during the iteration."""
    for key in list(tensors):
        path, dot, last = key.rpartition(".")
        if last == part:
            yield PackedModule(name, path + dot, tensors)


def expect_floats(name: str, tensors: dict[str, Lazy]) -> None:
    """Raise OutriderError unless all tensors are floating point: integers lack a scale."""
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise damaged(name, f"{key} is {tensor.dtype} without a scale")


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack unsigned 4-bit or 8-bit integers from words or bytes along the last axis, lowest bits
    first. Returns int8 for 4 bits, int16 for 8."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data.to(torch.int16)
    return torch.stack([data & 15, data >> 4], -1).flatten(-2).view(torch.int8)


def make_levels(
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: torch.Tensor | None = None,
) -> Levels:
    """`Levels` for (level - zero) * scale, with a byte per number if that holds all differences.

    levels: [N, K]. scales, zeros: [N, G]. group: as in `Levels`; omitted if groups are in order.
    """
    width, count = levels.shape[1], scales.shape[1]
    in_order = torch.arange(width) // max(1, width // count)
    if group is not None and width % count == 0 and torch.equal(group, in_order):
        group = None
    if zeros is not None:
        floats = levels.is_floating_point() or zeros.is_floating_point()
        wide = torch.float32 if floats else torch.int16
        levels = levels.to(wide, copy=True)
        levels -= zeros.to(wide)[:, in_order if group is None else group]
    if levels.dtype == torch.int16 and levels.numel():
        low, high = levels.aminmax()
        levels = levels.to(torch.int8) if low >= -128 and high <= 127 else levels
    return Levels(levels.contiguous(), scales.to(torch.float32).contiguous(), group=group)
