"""Layers that compute in float32 and leave their matrices as the checkpoint has them: in 16 bits,
mapped from its files, which takes no memory that the system cannot have back. Experts too, which
lie in memory, where the checkpoint has them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ..checkpoint import Checkpoint
from ..decoder import NAME
from ..loading import load, read, ready
from .experts import are_experts
from .layers import QuantisedTable, Table, become, beside

_HALF = {"F16": torch.float16, "BF16": torch.bfloat16}  # by the letters of safetensors
_PIECE = 1 << 20  # numbers of a matrix that are float32 at a time: what caches hold


class _NarrowLinear(torch.nn.Linear):
    """Its weight is float32 to whoever asks for it, and made so piece by piece to be multiplied."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows: Any = parameter(self)
        pieces = rows.split(max(1, _PIECE // self.in_features))
        y = torch.cat([torch.nn.functional.linear(input, piece.float()) for piece in pieces], -1)
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return parameter(self).float()


class _NarrowTable(torch.nn.Embedding):
    """What an embedding becomes beside what it is: the rows that are looked up are made float32."""

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        table = parameter(self)
        return Table.of(lambda ids: table[ids].float(), table.shape, torch.float32)


def parameter(module: torch.nn.Module) -> torch.nn.Parameter:
    """Its weight as it is stored, which `module.weight` may be computed from."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def load_as_stored(checkpoint: Checkpoint) -> PreTrainedModel:
    """A model that computes in float32, its layers narrow where the checkpoint has 16 bits, and
    tables but the tokens'. Raises as `load`."""
    stored, held = _stored(checkpoint)
    if stored is None:
        return load(checkpoint, torch.float32)
    with _made(stored, held):
        model = read(checkpoint, torch.float32)
    first: Any = model.get_input_embeddings()  # type: ignore[no-untyped-call]
    parameter(first).data = parameter(first).float()  # whose type is `model.dtype`
    for module in model.modules():
        if are_experts(module):
            experts: Any = module
            experts.config._experts_implementation = NAME  # which makes them wide one by one
        elif type(module) is torch.nn.Linear and parameter(module).dtype == stored:
            become(module, _NarrowLinear)
        elif isinstance(module, torch.nn.Embedding) and parameter(module).dtype == stored:
            become(module, beside(_NarrowTable, module))
    return ready(model, checkpoint)


def _stored(checkpoint: Checkpoint) -> tuple[torch.dtype | None, set[str]]:
    """The type of 16 bits that all of its matrices are in, None where there is no one such; and
    what modules that have one are called."""
    if checkpoint.packed:
        return torch.bfloat16 if checkpoint.packed.narrow else None, set()
    types: dict[str, str] = {}
    try:
        for file in checkpoint.files:
            types |= _types(file)
    except Exception:  # noqa: BLE001 - of a damaged file, which `load` names
        return None, set()
    found = set(types.values())
    held = {name.split(".")[-2] for name in types if name.endswith(".weight")}
    return _HALF.get(found.pop()) if len(found) == 1 else None, held


def _types(file: Path) -> dict[str, str]:
    """Of floating point, of the matrices in a file, whose numbers are not read."""
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as tensors:
            views = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            types = {name: v.get_dtype() for name, v in views.items() if len(v.get_shape()) > 1}
        return {name: type_ for name, type_ in types.items() if type_.startswith(("F", "BF"))}
    letters = {dtype: name for name, dtype in _HALF.items()}
    return {
        name: letters.get(tensor.dtype, "F32")
        for name, tensor in torch.load(file, map_location="meta", weights_only=True).items()
        if tensor.dim() > 1 and tensor.is_floating_point()
    }


@contextmanager
def _made(dtype: torch.dtype, held: set[str]) -> Iterator[None]:
    """Within it, of a model that Transformers makes, linear layers, experts and tables that the
    checkpoint has are of this type, and all else, such as what it computes, is not rounded to it.
    """
    plan = PreTrainedModel._get_dtype_plan  # asked when there are parameters, without numbers yet

    def narrow(model: PreTrainedModel, asked: torch.dtype) -> Any:
        for path, module in model.named_modules():
            table = isinstance(module, torch.nn.Embedding) and path.split(".")[-1] in held
            matrix = table or type(module) is torch.nn.Linear
            for name, weight in [*module.named_parameters(recurse=False)]:
                if (matrix and name == "weight") or (are_experts(module) and weight.dim() == 3):
                    setattr(module, name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))
        return plan(model, asked)

    with patch.object(PreTrainedModel, "_get_dtype_plan", narrow):
        yield


def widen(model: PreTrainedModel) -> None:
    """Make the layers that are left usual ones, in the type that the model computes in."""
    for module in model.modules():
        if isinstance(module, _NarrowLinear):
            parameter(module).data = module.weight
            become(module, torch.nn.Linear)
        elif isinstance(module, _NarrowTable) and not isinstance(module, QuantisedTable):
            parameter(module).data = parameter(module).float()
            become(module, type(module).__bases__[1])
        elif are_experts(module):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.to(model.dtype)
