"""Load models that compute in float32 while their matrices stay as the checkpoint stores them: in
16 bits, mapped from its files, so that the system can reclaim their memory at any time, or as
levels of a byte. Experts stay in 16 bits too, but in memory if the checkpoint stores them one by
one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ..checkpoint import Checkpoint
from ..formats.packed import Lazy
from ..functions.own import IMPLEMENTATION
from ..loading import prepare, read_weights, release_memory
from .experts import are_experts
from .layers import Table

_HALF = {"F16": torch.float16, "BF16": torch.bfloat16}  # by the letters of safetensors


def parameter(module: torch.nn.Module) -> torch.nn.Parameter:
    """The stored parameter, from which `module.weight` may be computed."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def load_as_stored(checkpoint: Checkpoint) -> PreTrainedModel:
    """Load a model that computes in float32, with a `Table` in place of each matrix that the
    checkpoint packs or stores in 16 bits. Raises as `load`."""
    stored, modules = _stored_type(checkpoint)
    with _create_narrow(stored, modules) if stored else nullcontext():
        model = read_weights(checkpoint, torch.float32, _as_table)
    release_memory()  # memory used for unpacking
    if stored is None:
        return prepare(model, checkpoint)
    tables: dict[int, Table] = {}  # one for tied matrices
    for module in model.modules():
        if are_experts(module):
            experts: Any = module
            experts.config._experts_implementation = IMPLEMENTATION  # which widens them one by one
            continue
        for name, weight in module._parameters.items():
            if weight is not None and weight.dtype == stored:
                table = tables.setdefault(id(weight), _table(weight, weight.shape))
                module._parameters[name] = torch.nn.Parameter(table, requires_grad=False)
    return prepare(model, checkpoint)


def _as_table(tensor: Lazy) -> Lazy:
    """A tensor that stays a `Table` if Transformers uses it unchanged, and is dense otherwise."""
    if len(tensor.shape) != 2:
        return tensor
    return replace(tensor, make=lambda: _table(tensor.stored(), tensor.shape))


def _table(rows: Any, shape: Sequence[int]) -> Table:
    narrow = rows if isinstance(rows, torch.Tensor) else None
    return Table.of(lambda which: rows[which].float(), shape, torch.float32, narrow)


def _stored_type(checkpoint: Checkpoint) -> tuple[torch.dtype | None, set[str] | None]:
    """The 16-bit type of all its matrices, None if there is no such single type; and the names of
    the modules that have one, None if only experts do."""
    if checkpoint.packed:
        return torch.bfloat16 if checkpoint.packed.narrow else None, None
    types: dict[str, str] = {}
    try:
        for file in checkpoint.files:
            types |= _types(file)
    except Exception:  # noqa: BLE001 - a damaged file, which `load` reports
        return None, set()
    found = set(types.values())
    modules = {name.split(".")[-2] for name in types if name.endswith(".weight")}
    return _HALF.get(found.pop()) if len(found) == 1 else None, modules


def _types(file: Path) -> dict[str, str]:
    """Types of the floating-point matrices in a file, by name, without reading their numbers."""
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
def _create_narrow(dtype: torch.dtype, modules: set[str] | None) -> Iterator[None]:
    """Within the context, Transformers creates models whose linear layers, experts and tables have
    this type if the checkpoint stores them. All else, such as computed tables, is not rounded to
    it.
    """
    # Called when the parameters exist, still without values.
    original_plan = PreTrainedModel._get_dtype_plan

    def narrow_plan(model: PreTrainedModel, requested: torch.dtype) -> Any:
        for path, module in model.named_modules():
            table = isinstance(module, torch.nn.Embedding) and path.split(".")[-1] in (
                modules or ()
            )
            matrix = modules is not None and (table or type(module) is torch.nn.Linear)
            for name, weight in [*module.named_parameters(recurse=False)]:
                if (matrix and name == "weight") or (are_experts(module) and weight.dim() == 3):
                    setattr(module, name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))
        return original_plan(model, requested)

    with patch.object(PreTrainedModel, "_get_dtype_plan", narrow_plan):
        yield


def widen(model: PreTrainedModel) -> None:
    """Turn remaining `Table`s and narrow experts into ordinary parameters of the model's type."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, Table):
                whole = torch.nn.Parameter(weight.whole(), requires_grad=False)
                module._parameters[name] = whole
            elif weight is not None and are_experts(module):
                weight.data = weight.data.to(model.dtype)
