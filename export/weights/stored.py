"""Linear layers that compute in float32 and leave their matrices as the checkpoint has them: in 16
bits, mapped from its files, which takes no memory that the system cannot have back. Experts too,
which lie in memory, where the checkpoint has them one by one."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint import Checkpoint
from ..decoder import NAME
from ..loading import load
from .experts import are_experts

_HALF = (torch.float16, torch.bfloat16)
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


def parameter(module: torch.nn.Module) -> torch.nn.Parameter:
    """Its weight as it is stored, which `module.weight` may be computed from."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def load_as_stored(checkpoint: Checkpoint) -> PreTrainedModel:
    """A model that computes in float32, its layers narrow where the checkpoint has 16 bits. Raises
    as `load`."""
    if checkpoint.packed and not checkpoint.packed.narrow:
        return load(checkpoint, torch.float32)
    model = load(checkpoint, "auto")
    if _rounded(model):
        del model
        return load(checkpoint, torch.float32)
    linear = {module for module in model.modules() if type(module) is torch.nn.Linear}
    for module in model.modules():
        of_experts: Any = module if are_experts(module) else None
        if of_experts:
            of_experts.config._experts_implementation = NAME  # which makes them wide one by one
        for name, weight in module.named_parameters(recurse=False):
            narrow = weight.dim() == 3 if of_experts else module in linear and name == "weight"
            if not narrow:
                weight.data = weight.data.float()
    for module in linear:
        if parameter(module).dtype in _HALF:  # that of an embedding is not any more
            _become(module, _NarrowLinear)
    model.config.dtype = torch.float32
    return model


def widen(model: PreTrainedModel) -> None:
    """Make the layers that are left usual ones, in the type that the model computes in."""
    for module in model.modules():
        if isinstance(module, _NarrowLinear):
            parameter(module).data = module.weight
            _become(module, torch.nn.Linear)
        elif are_experts(module):
            for weight in module.parameters(recurse=False):
                weight.data = weight.data.to(model.dtype)


def _become(module: torch.nn.Module, kind: type[torch.nn.Linear]) -> None:
    module.__class__ = kind


def _rounded(model: PreTrainedModel) -> bool:
    """Whether something that is no weight was rounded when it was made, such as a factor of the
    embedding: of that nobody knows what it was."""
    return any(
        isinstance(value, torch.Tensor) and value.dtype in _HALF
        for module in model.modules()
        for value in (*module._buffers.values(), *vars(module).values())
    )
