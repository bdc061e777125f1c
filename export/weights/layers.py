"""The layers of a model with quantised weights: as torch computes them, and as a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils import parametrize
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .blocks import BLOCK, FLOAT8, Quantised, sharing

# Nodes until the graph is written in ONNX's operators: one of plugins/onnxruntime, and the dense
# matrix of levels and scales.
PRODUCT, TABLE = "QuantizedMatMul", "QuantizedTable"
_rounds_activations = False


class QuantisedLinear(torch.nn.Module):
    """x [.., K] -> x W^T + bias, [.., N]."""

    levels: torch.Tensor  # int8 or float8 [N, K]
    scales: torch.Tensor  # [N, K / BLOCK, rounded up] or [N, 1], in the model's dtype

    def __init__(self, weight: Quantised, bias: torch.Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.bits = weight.bits
        self.register_buffer("levels", _levels(weight))
        self.register_buffer("scales", torch.from_numpy(weight.scales).to(dtype))
        self.bias = bias

    @property
    def weight(self) -> torch.Tensor:
        """[N, K], made when it is asked for."""
        return _dense(self.levels, self.scales)

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
            y = multiply(x, self.levels, self.scales)
        return y if self.bias is None else y + self.bias


def multiply(x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[.., K] by levels and scales [N, ..]: [.., N]."""
    x = rounded(x) if _rounds_activations else x
    return torch.nn.functional.linear(x, _dense(levels, scales))


class _Table(torch.nn.Module):
    """What the table of an embedding is computed from."""

    levels: torch.Tensor  # int8 or float8 [V, K]
    scales: torch.Tensor  # float16 [V, K / BLOCK, rounded up] or [V, 1]

    def __init__(self, weight: Quantised, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype
        self.register_buffer("levels", _levels(weight))
        self.register_buffer("scales", torch.from_numpy(weight.scales))

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic(
                f"outrider::{TABLE}",
                [self.levels, self.scales],
                dtype=self.dtype,
                shape=self.levels.shape,
                version=1,
            )
        return _dense(self.levels, self.scales.float()).to(self.dtype)


def put(model: PreTrainedModel, path: str, weight: Quantised) -> None:
    """Give the linear layer or embedding at this path its quantised weight, and let go of the dense
    one. An embedding stays what it is, whose class may do more than look up; its table is computed.
    """
    module = model.get_submodule(path)
    assert isinstance(module.weight, torch.Tensor)
    dtype = module.weight.dtype
    if isinstance(module, torch.nn.Embedding):
        none = torch.empty(0, dtype=dtype)
        module.weight = torch.nn.Parameter(none, requires_grad=False)
        table = _Table(weight, dtype)
        parametrize.register_parametrization(module, "weight", table, unsafe=True)
        return
    assert isinstance(module, torch.nn.Linear | Conv1D)
    parent, _, child = path.rpartition(".")
    layer = QuantisedLinear(weight, module.bias, dtype)
    setattr(model.get_submodule(parent), child, layer.train(False))


def _dense(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Levels times scales, in the scales' dtype: the only thing of this size that is made."""
    dense, width = levels.to(scales.dtype), sharing(levels.shape[1], scales.shape[1])
    whole = levels.shape[1] // width
    dense[:, : whole * width].view(len(dense), whole, width).mul_(scales[:, :whole, None])
    dense[:, whole * width :].mul_(scales[:, whole:])
    return dense


def _levels(weight: Quantised) -> torch.Tensor:
    if weight.levels.dtype != FLOAT8:
        return torch.from_numpy(weight.levels)
    return torch.from_numpy(weight.levels.view("u1")).view(torch.float8_e4m3fn)


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


@contextmanager
def in_double(model: PreTrainedModel) -> Iterator[None]:
    """Within it a quantised model of float32 computes in float64; levels stay as they are."""
    tables = [module for module in model.modules() if isinstance(module, _Table)]
    model.double()
    for table in tables:
        table.dtype = torch.float64
    try:
        yield
    finally:
        model.float()  # type: ignore[no-untyped-call]
        for table in tables:
            table.dtype, table.scales = torch.float32, table.scales.half()
