"""The linear layers of a model with quantised weights: as torch computes them, and as a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .blocks import BLOCK, Quantised

PRODUCT = (
    "QuantizedMatMul"  # of plugins/onnxruntime; until the graph is written in ONNX's operators
)
_rounds_activations = False


class QuantisedLinear(torch.nn.Module):
    """x [.., K] -> x W^T + bias, [.., N]."""

    levels: torch.Tensor  # int8 [N, K]
    scales: torch.Tensor  # [N, K / BLOCK, rounded up], in the model's dtype

    def __init__(self, weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.bits = weight.bits
        self.register_buffer("levels", torch.from_numpy(weight.levels))
        self.register_buffer("scales", torch.from_numpy(weight.scales).to(dtype))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.onnx.is_in_onnx_export():
            y = torch.onnx.ops.symbolic(
                f"outrider::{PRODUCT}",
                [x, self.levels, self.scales],
                {"bits": self.bits},
                dtype=x.dtype,
                shape=(*x.shape[:-1], self.levels.shape[0]),
                version=1,
            )
        else:
            columns = self.levels.shape[1]
            scales = self.scales.repeat_interleave(BLOCK, dim=1)[:, :columns]
            weight = self.levels.to(scales.dtype) * scales
            x = rounded(x) if _rounds_activations else x
            y = torch.nn.functional.linear(x, weight)
        return y if self.bias is None else y + self.bias


def replace(model: PreTrainedModel, weights: Mapping[str, Quantised]) -> None:
    """Put `QuantisedLinear` in the place of the layers that have these weights, by the parameters'
    names (`quantise_model`). An embedding that shares a weight keeps its own, dense."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear | Conv1D):
            continue
        if (weight := weights.get(names[id(module.weight)])) is None:
            continue
        parent, _, child = path.rpartition(".")
        layer = QuantisedLinear(weight, module.bias, module.weight.dtype)
        setattr(model.get_submodule(parent), child, layer.train(False))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [.., K] as liboutrider multiplies it: rounded to 8 bits in blocks (outrider_product.h)."""
    *rows, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK))
    blocks = padded.reshape(*rows, -1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros_like(largest))
    levels = torch.round(blocks * inverse)
    return (levels * (largest / 127)).reshape(*rows, -1)[..., :columns].to(x.dtype)


@contextmanager
def rounding_activations() -> Iterator[None]:
    """Within it the layers compute as liboutrider does."""
    global _rounds_activations
    _rounds_activations = True
    try:
        yield
    finally:
        _rounds_activations = False
