"""Matrices of 16 bits: float32 weights whose values are all float16 or bfloat16 numbers, such as
those of a checkpoint that is stored in 16 bits. Nothing is rounded."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from runtime.files.errors import OutriderError

from ..weights.blocks import LARGE_SLICE, row_slices
from ..weights.operators import (
    OWN_DOMAIN,
    PANEL,
    PiecewiseTensor,
    find_producer,
    initializer,
    is_transpose,
    replace,
)

PRODUCT, GATHER = "HalfMatMul", "HalfGather"
Half = Literal[1, 2]  # OUTRIDER_FLOAT16, OUTRIDER_BFLOAT16


def store_in_16_bits(model: ir.Model) -> str:
    """Replace products with constant matrices, and lookups in tables, by liboutrider's operators,
    in place, where 16 bits hold the matrix. Returns the share of weights that are stored so, in
    words. Raises OutriderError "checkpoint" if that is less than half."""
    made: dict[tuple[ir.Value, bool], tuple[ir.Value, dict[str, int]] | None] = {}
    for node in list(model.graph):
        if (found := _matrix_of(node)) is None:
            continue
        kind, x, weight, transposed = found
        if (weight, transposed) not in made:
            made[weight, transposed] = _store(model, weight, transposed)
        if (stored := made[weight, transposed]) is None:
            continue
        matrix, attributes = stored
        new = ir.node(kind, [x, matrix], attributes, domain=OWN_DOMAIN)
        if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
            model.graph.insert_before(node, new)
            new = ir.node("Add", [new.outputs[0], node.inputs[2]])
        replace(model, node, new)
    kept = sum(_size(weight) for (weight, _), stored in made.items() if stored is not None)
    # Experts have three dimensions.
    others = [value for value in model.graph.initializers.values() if _dimensions(value) > 2]
    share = kept / (sum(map(_size, others)) + sum(_size(weight) for weight, _ in made) or 1)
    if share < 0.5:
        raise OutriderError(
            "checkpoint",
            f"16 bits hold only {share:.0%} of the weights: experts stay float32, and so does what "
            "is not stored in 16 bits",
            "Build with WEIGHTS=full, int8 or int4.",
        )
    return f", {share:.0%} of the weights in 16 bits"


def _dimensions(value: ir.Value) -> int:
    tensor = value.const_value
    return len(tensor.shape) if tensor is not None and tensor.dtype == ir.DataType.FLOAT else 0


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return value.const_value.size


def _matrix_of(node: ir.Node) -> tuple[str, ir.Value | None, ir.Value, bool] | None:
    """The operator that replaces this node, its x, its weight, and whether that is [K, N] instead
    of [N, K]; None if the node multiplies by no constant matrix, and looks up no rows of one."""
    if node.op_type not in ("MatMul", "FusedMatMul", "Gemm", "Gather"):
        return None
    (x, weight), get = node.inputs[:2], node.attributes.get_int
    kind, transposed = PRODUCT, not get("transB", 0)
    if node.op_type == "Gather":
        kind, x, weight, transposed = GATHER, weight, x, False
        if x is None or x.dtype != ir.DataType.INT64:
            return None
    scales = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    if get("axis", 0) or get("transA", 0) or scales != [1, 1]:
        return None
    if (turned := find_producer(weight, "Transpose")) is not None and is_transpose(turned, 1, 0):
        weight, transposed = turned.inputs[0], not transposed
    if weight is None or not weight.is_initializer():
        return None
    if _dimensions(weight) != 2 or not _size(weight):
        return None
    return kind, x, weight, transposed


def _store(
    model: ir.Model, weight: ir.Value, transposed: bool
) -> tuple[ir.Value, dict[str, int]] | None:
    """The matrix in 16 bits and its attributes; None if 16 bits cannot hold it."""
    tensor = weight.const_value
    assert tensor is not None
    dense: npt.NDArray[np.float32] = tensor.numpy()
    if (dtype := _half_type(dense)) is None:
        return None
    rows, columns = dense.shape[::-1] if transposed else dense.shape
    panels = -(-rows // PANEL)

    def pack(here: slice) -> npt.NDArray[np.uint16]:
        begin, end, _ = here.indices(panels)
        own = slice(begin * PANEL, end * PANEL)
        return pack_halves(dense[:, own].T if transposed else dense[own], dtype)

    name = f"{weight.name}.halves{'.T' if transposed else ''}"
    shape, count = ir.Shape([panels, columns, PANEL]), max(1, LARGE_SLICE // (columns * PANEL))
    packed = initializer(model, PiecewiseTensor(pack, ir.DataType.UINT16, shape, name, count))
    return packed, {"rows": rows, "columns": columns, "dtype": dtype}


def _half_type(dense: npt.NDArray[np.float32]) -> Half | None:
    """The 16-bit type that holds all numbers of a matrix; None if neither does."""
    if all(_is_bfloat16(dense[here]) for here in row_slices(*dense.shape)):
        return 2
    if all(_is_float16(dense[here]) for here in row_slices(*dense.shape)):
        return 1
    return None


def _is_bfloat16(part: npt.NDArray[np.float32]) -> bool:
    return not (np.ascontiguousarray(part).view(np.uint32) & 0xFFFF).any()


def _is_float16(part: npt.NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return np.array_equal(part.astype(np.float16).astype(np.float32), part)


def pack_halves(dense: npt.NDArray[np.float32], dtype: Half) -> npt.NDArray[np.uint16]:
    """Rows [N, K], whose numbers 16 bits hold, in the layout of outrider_product.h,
    [panels, K, PANEL]."""
    rows, columns = dense.shape
    numbers = np.zeros((-(-rows // PANEL) * PANEL, columns), np.uint16)
    if dtype == 1:
        numbers[:rows] = dense.astype(np.float16).view(np.uint16)
    else:
        numbers[:rows] = np.ascontiguousarray(dense).view(np.uint32) >> 16
    return np.ascontiguousarray(numbers.reshape(-1, PANEL, columns).swapaxes(1, 2))
