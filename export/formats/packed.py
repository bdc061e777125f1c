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
_FLOAT8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class Lazy:
    """A tensor of the checkpoint that is read, or made dense, each time it is asked for: by
    `lazy[...]`, as Transformers asks a safetensors file.

    make: what gives rows for a slice or their numbers, all of them for `...`: a tensor, or `Levels`
    and the like. dtype: in safetensors' letters.
    """

    make: Callable[[], Any]
    shape: tuple[int, ...]
    dtype: str = "F32"

    def stored(self) -> Any:
        """What gives its rows, in about as many bytes as the file has them in."""
        with _ONE:
            return self.make()

    def __getitem__(self, _: object) -> torch.Tensor:
        dense: torch.Tensor = self.stored()[...]
        return dense


@dataclass(frozen=True)
class Levels:
    """A matrix level * scale, or level * scale + least; `levels[rows]` makes rows of it dense.

    levels: [N, K], of any type that float32 holds. scales, least: float32 [N, G]. group: of each
    column, int64 [K]; None for G groups of equal width, one after the other.
    """

    levels: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor | None = None
    group: torch.Tensor | None = None

    def __getitem__(self, rows: Any) -> torch.Tensor:
        """float32 [.., K]. The product of an integer of 9 bits and a scale of 16 is exact."""
        dense, scales = _widened(self.levels[rows]), self.scales[rows]
        if self.group is not None:
            return dense.mul_(scales.index_select(-1, self.group))
        blocks = torch.unflatten(dense, -1, (scales.shape[-1], -1)).mul_(scales[..., None])
        if self.least is not None:
            blocks.add_(self.least[rows][..., None])
        return dense


def _widened(levels: torch.Tensor) -> torch.Tensor:
    """A copy in float32. torch's own of float8 takes four times as long as a look-up does."""
    if levels.dtype != torch.float8_e4m3fn:
        return levels.to(torch.float32, copy=True)
    which = levels.view(torch.uint8).flatten().int()
    return _FLOAT8.index_select(0, which).view(levels.shape)


@dataclass(frozen=True)
class Reordered:
    """Rows of something else, whose numbers are `order`, int64 [N]."""

    rows: Any
    order: torch.Tensor

    def __getitem__(self, rows: Any) -> torch.Tensor:
        found: torch.Tensor = self.rows[self.order[rows]]
        return found


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


@dataclass(frozen=True)
class PackedModule:
    """What a checkpoint has in the place of one weight.

    checkpoint: its name, for errors. path: what the names of the parts begin with. tensors: the
    table, out of which parts are taken.
    """

    checkpoint: str
    path: str
    tensors: dict[str, Lazy]

    def take(self, part: str) -> Lazy:
        """Raises OutriderError where it is missing."""
        found = self.take_if_there(part)
        if found is None:
            raise damaged(self.checkpoint, f"it lacks {self.path}{part}")
        return found

    def take_if_there(self, part: str) -> Lazy | None:
        return self.tensors.pop(self.path + part, None)

    def damaged(self, what: str) -> OutriderError:
        """what: of a part, whose name comes first."""
        return damaged(self.checkpoint, self.path + what)

    def expect(self, part: str, tensor: Lazy, dtypes: set[str], *shape: int) -> None:
        """Raises OutriderError where the tensor is another than the weight needs."""
        if tensor.dtype not in dtypes or tensor.shape != shape:
            has, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{min(dtypes)} {list(shape)}"
            raise self.damaged(f"{part} is {has} in place of {wanted}")

    def expect_scales(self, part: str, tensor: Lazy, *shape: int) -> None:
        self.expect(part, tensor, _FLOATS, *shape)

    def groups(self, part: str, tensor: Lazy, count: int) -> torch.Tensor:
        """The group of each column, int64 [K]; each must be one of `count`."""
        index = tensor[...].long()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
            raise self.damaged(f"{part} names groups beyond the {count} that there are")
        return index


Make = Callable[[PackedModule], Lazy]


def read_packed(
    name: str, folder: Path, kinds: dict[str, Make], but: tuple[str, ...] = ()
) -> dict[str, Lazy]:
    """The same with each packed weight in place of its parts. kinds: by the part that modules of a
    kind have, what makes their weights. but: how the names end of what is left out."""
    tensors = read_folder(name, folder)
    for key in [key for key in tensors if key.endswith(but)]:
        del tensors[key]
    for part, make in kinds.items():
        for module in modules(name, tensors, part):
            tensors[module.path + "weight"] = make(module)
    expect_floats(name, tensors)
    return tensors


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


def modules(name: str, tensors: dict[str, Lazy], part: str) -> Iterator[PackedModule]:
    """All that have this part; the table may change in the meantime."""
    for key in list(tensors):
        path, dot, last = key.rpartition(".")
        if last == part:
            yield PackedModule(name, path + dot, tensors)


def expect_floats(name: str, tensors: dict[str, Lazy]) -> None:
    """What is left must be plain: integers without a scale are no weights."""
    for key, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise damaged(name, f"{key} is {tensor.dtype}, and nothing says its scale")


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers of 4 or 8 bits out of int32 words along the last axis, the lowest bits
    first: int8 or int16."""
    data = words.contiguous().view(torch.uint8)
    if bits == 8:
        return data.to(torch.int16)
    return torch.stack([data & 15, data >> 4], -1).flatten(-2).view(torch.int8)


def quantised(
    levels: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    group: torch.Tensor | None = None,
) -> Levels:
    """(level - zero) * scale, in a byte a number where that holds all differences.

    levels: [N, K]. scales, zeros: [N, G]. group: as `Levels` has it, or in order after all.
    """
    width, count = levels.shape[1], scales.shape[1]
    order = torch.arange(width) // max(1, width // count)
    if group is not None and width % count == 0 and torch.equal(group, order):
        group = None
    if zeros is not None:
        floats = levels.is_floating_point() or zeros.is_floating_point()
        wide = torch.float32 if floats else torch.int16
        levels = levels.to(wide, copy=True)
        levels -= zeros.to(wide)[:, order if group is None else group]
    if levels.dtype == torch.int16 and levels.numel():
        low, high = levels.aminmax()
        levels = levels.to(torch.int8) if low >= -128 and high <= 127 else levels
    return Levels(levels.contiguous(), scales.to(torch.float32).contiguous(), group=group)
