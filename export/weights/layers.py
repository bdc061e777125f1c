"""Layers with quantised weights: computed by torch, and as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .blocks import BLOCK, FLOAT8, Quantised, scale_width

# Nodes until the graph is rewritten in ONNX's operators: a product, which is also an operator of
# plugins/onnxruntime, and the dense matrix of levels and scales.
PRODUCT, TABLE = "QuantizedMatMul", "QuantizedTable"
_PIECE_SIZE = 1 << 20  # numbers of a matrix to dequantise at a time, which fit into caches
_rounds_activations = _rounds_as_stored = False


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
        """[N, K], dequantised on access."""
        return dense(self.levels, self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.onnx.is_in_onnx_export():
            y = torch.onnx.ops.symbolic(
                f"outrider::{PRODUCT}",
                [x, self.levels, self.scales],
                {"bits": [self.bits]},  # a list, as two matrices may be packed into one product
                dtype=x.dtype,
                shape=(*x.shape[:-1], self.levels.shape[0]),
                version=1,
            )
        else:
            y = multiply(x, self.levels, self.scales)
        return y if self.bias is None else y + self.bias


def multiply(x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply x [.., K] by levels and scales [N, ..]: [.., N]."""
    x = rounded(x) if _rounds_activations else x
    product: torch.Tensor = _Product.apply(x, partial(dense, levels, scales), None)  # type: ignore[no-untyped-call]
    return product


class _Product(torch.autograd.Function):
    """x W^T + bias, [.., N], with a W that is dequantised for it, and again for the gradient:
    keeping all of them until then would take the memory of the dense model."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[], torch.Tensor], bias: Any) -> Any:
        ctx.make = make
        return torch.nn.functional.linear(x, make(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient @ ctx.make(), None, None


class Table(torch.Tensor):
    """A matrix whose rows are dequantised when they are looked up or multiplied by. Its type and
    sizes are free; any other operation dequantises the whole matrix."""

    _rows: Callable[[Any], torch.Tensor]  # from a slice, or row numbers [..], to rows [.., K]
    _narrow: torch.Tensor | None  # the whole matrix as stored, if that is in 16 bits

    @staticmethod
    def of(
        rows: Callable[[Any], torch.Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        narrow: torch.Tensor | None = None,
    ) -> Table:
        table = torch.empty((), dtype=dtype).expand(*shape).as_subclass(Table)
        table._rows, table._narrow = rows, narrow
        return table

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        if function is torch.nn.functional.embedding:
            ids, table = arguments[:2]
            return table._rows(ids)
        if function is torch.nn.functional.linear and isinstance(arguments[1], Table):
            return _multiply_by_pieces(*arguments, **keywords)
        if function is _TENSOR.__getitem__ and not isinstance(arguments[1], tuple):
            return arguments[0] if arguments[1] is ... else arguments[0]._rows(arguments[1])
        if function in _IDENTITY_FUNCTIONS or (
            function is _TENSOR.to and keywords.get("dtype") == arguments[0].dtype
        ):
            return arguments[0]
        if function in _SHAPE_FUNCTIONS:
            return super().__torch_function__(function, types, arguments, keywords)  # type: ignore[no-untyped-call]
        arguments, keywords = tree_map_only(Table, Table.whole, (arguments, keywords))
        return function(*arguments, **keywords)

    def whole(self) -> torch.Tensor:
        return self._rows(slice(None))


_TENSOR: Any = torch.Tensor
_SHAPE_FUNCTIONS = {
    _TENSOR.dtype.__get__, _TENSOR.shape.__get__, _TENSOR.device.__get__, _TENSOR.is_meta.__get__,
    _TENSOR.requires_grad.__get__, _TENSOR.grad_fn.__get__, _TENSOR.is_floating_point,
    _TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.__len__,
}  # fmt: skip
_IDENTITY_FUNCTIONS = {_TENSOR.detach, _TENSOR.requires_grad_}  # operations that a parameter needs


def _multiply_by_pieces(
    x: torch.Tensor, table: Table, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [.., K] -> x W^T + bias, [.., N], some rows of W at a time. With pieces of a multiple of 16
    rows, and no small one at the end, MKL gives bitwise the same result as for all rows at once."""
    narrow = table._narrow
    if _rounds_as_stored and narrow is not None and narrow.dtype == torch.bfloat16:
        product = torch.nn.functional.linear(x.to(narrow.dtype), narrow).to(x.dtype)
        return product if bias is None else product + bias
    rows, columns = table.shape
    step, y = max(16, _PIECE_SIZE // columns // 16 * 16), x.new_empty(*x.shape[:-1], rows)
    begins = range(0, max(1, rows - 15), step)
    for begin, end in pairwise([*begins, rows]):
        here = slice(begin, end)
        own = None if bias is None else bias[here]
        y[..., here] = _Product.apply(x, partial(table._rows, here), own)  # type: ignore[no-untyped-call]
    return y


class QuantisedTable(torch.nn.Embedding):
    """Mixed into the class of a quantised embedding, which may do more than look up rows."""

    levels: torch.Tensor  # int8 or float8 [V, K]
    scales: torch.Tensor  # float16 [V, K / BLOCK, rounded up] or [V, 1]
    dtype: torch.dtype

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        if torch.onnx.is_in_onnx_export():
            return torch.onnx.ops.symbolic(
                f"outrider::{TABLE}",
                [self.levels, self.scales],
                dtype=self.dtype,
                shape=self.levels.shape,
                version=1,
            )
        return Table.of(self._look_up, self.levels.shape, self.dtype)

    def _look_up(self, ids: Any) -> torch.Tensor:
        return dense(self.levels[ids], self.scales[ids].float()).to(self.dtype)


def replace_weight(model: PreTrainedModel, path: str, weight: Quantised) -> None:
    """Replace the weight of the linear layer or embedding at this path, dense or quantised, by this
    one. An embedding keeps its class; its table is dequantised on access.
    """
    module: Any = model.get_submodule(path)
    is_quantised = isinstance(module, QuantisedLinear | QuantisedTable)
    dtype = module.scales.dtype if is_quantised else module.weight.dtype
    if isinstance(module, torch.nn.Embedding):
        if not is_quantised:
            del module._parameters["weight"]
            module.__class__ = type(QuantisedTable.__name__, (QuantisedTable, type(module)), {})
            module.dtype = dtype
        module.register_buffer("levels", _levels(weight))
        module.register_buffer("scales", torch.from_numpy(weight.scales))
        return
    assert is_quantised or isinstance(module, torch.nn.Linear | Conv1D)
    parent, _, child = path.rpartition(".")
    layer = QuantisedLinear(weight, module.bias, dtype)
    setattr(model.get_submodule(parent), child, layer.train(False))


def dense(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Levels times scales, in the scales' dtype, without other temporaries of this size."""
    matrix, width = levels.to(scales.dtype), scale_width(levels.shape[-1], scales.shape[-1])
    whole = levels.shape[-1] // width
    blocks = torch.unflatten(matrix[..., : whole * width], -1, (whole, width))
    blocks.mul_(scales[..., :whole, None])
    matrix[..., whole * width :].mul_(scales[..., whole:])
    return matrix


def _levels(weight: Quantised) -> torch.Tensor:
    if weight.levels.dtype != FLOAT8:
        return torch.from_numpy(weight.levels)
    return torch.from_numpy(weight.levels.view("u1")).view(torch.float8_e4m3fn)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x [.., K] rounded to 8 bits in blocks, as in liboutrider's products (outrider_product.h)."""
    *rows, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -columns % BLOCK))
    blocks = padded.reshape(*rows, -1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, torch.zeros_like(largest))
    levels = torch.round(blocks * inverse)
    return (levels * (largest / 127)).reshape(*rows, -1)[..., :columns].to(x.dtype)


@contextmanager
def rounding_activations() -> Iterator[None]:
    """Within the context, layers round activations as liboutrider does."""
    global _rounds_activations
    _rounds_activations = True
    try:
        yield
    finally:
        _rounds_activations = False


@contextmanager
def rounding_as_stored() -> Iterator[None]:
    """Within the context, products with a matrix that is stored in bfloat16 are computed in
    bfloat16, if the processor has instructions for that: four to five times as fast."""
    global _rounds_as_stored
    _rounds_as_stored = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    try:
        yield
    finally:
        _rounds_as_stored = False


@contextmanager
def in_double(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, a quantised float32 model computes in float64; levels stay unchanged."""
    tables = [module for module in model.modules() if isinstance(module, QuantisedTable)]
    model.double()
    for table in tables:
        table.dtype = torch.float64
    try:
        yield
    finally:
        model.float()  # type: ignore[no-untyped-call]
        for table in tables:
            table.dtype, table.scales = torch.float32, table.scales.half()
