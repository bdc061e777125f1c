"""Matrices of 16 bits: float32 weights whose values are all float16 or bfloat16 numbers, such as
those of a checkpoint that is stored in 16 bits. Nothing is rounded.

In graph.onnx they are in the layout of liboutrider's products, and Transpose, Reshape and Cast make
them float32, once, when a backend loads the graph. host.onnx multiplies by the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .blocks import row_slices
from .operators import (
    OWN_DOMAIN,
    PANEL,
    constant,
    find_producer,
    initializer,
    is_transpose,
    replace,
)

PRODUCT, GATHER = "HalfMatMul", "HalfGather"
Half = Literal[1, 2]  # OUTRIDER_FLOAT16, OUTRIDER_BFLOAT16
_TYPES: dict[Half, ir.DataType] = {1: ir.DataType.FLOAT16, 2: ir.DataType.BFLOAT16}
# From panels [N / PANEL, K, PANEL] to [N / PANEL, PANEL, K], or, transposed, [K, N / PANEL, PANEL].
_UNPACK = {False: (0, 2, 1), True: (1, 0, 2)}


def store_in_16_bits(model: ir.Model) -> str:
    """Store the matrices of products, and tables, in 16 bits, in place, where these hold them.
    Returns the share of the float32 weights that are stored so, in words."""
    layouts: dict[ir.Value, set[bool]] = defaultdict(set)
    for node in model.graph:
        if (found := _matrix_of(node)) is not None:
            layouts[found[2]].add(found[3])
    weights = [value for value in model.graph.initializers.values() if _is_weight(value)]
    total, stored = sum(map(_size, weights)), 0
    for weight in weights:
        if len(layouts[weight]) == 1 and _store(model, weight, *layouts[weight]):
            stored += _size(weight)
            del model.graph.initializers[str(weight.name)]
    return f", {stored / total:.0%} of its weights in 16 bits" if stored else ""


def use_own_operators(model: ir.Model) -> int:
    """Replace products with matrices of 16 bits, and lookups in them, by liboutrider's operators,
    in place. Returns the number of products."""
    products = 0
    for node in list(model.graph):
        found = _matrix_of(node)
        if found is None:
            continue
        kind, x, weight, transposed = found
        if (matrix := _panels_of(model, weight, transposed)) is None:
            continue
        packed, dtype = matrix
        assert isinstance(weight.shape, ir.Shape)
        sizes = weight.shape.numpy()
        rows, columns = sizes[::-1] if transposed else sizes
        attributes = {"rows": rows, "columns": columns, "dtype": dtype}
        new = ir.node(kind, [x, packed], attributes, domain=OWN_DOMAIN)
        if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
            model.graph.insert_before(node, new)
            new = ir.node("Add", [new.outputs[0], node.inputs[2]])
        replace(model, node, new)
        products += kind == PRODUCT
    return products


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) > 1


def _size(value: ir.Value) -> int:
    assert value.const_value is not None
    return value.const_value.size


def _matrix_of(node: ir.Node) -> tuple[str, ir.Value | None, ir.Value, bool] | None:
    """The operator that replaces this node, its x, its matrix, and whether that is [K, N] instead
    of [N, K]; None if the node is no product with a matrix, and looks up no rows."""
    if node.op_type not in ("MatMul", "Gemm", "Gather"):
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
    if weight is None or weight.shape is None or len(weight.shape) != 2:
        return None
    return kind, x, weight, transposed


def _store(model: ir.Model, weight: ir.Value, transposed: bool) -> bool:
    """Replace a matrix by one that is made of panels; False if 16 bits cannot hold it."""
    tensor = weight.const_value
    assert tensor is not None
    sizes = tensor.shape.numpy()
    if 0 in sizes or (dtype := _half_type(tensor.numpy())) is None:
        return False
    type_ = _TYPES[dtype]
    rows, columns = sizes[::-1] if transposed else sizes
    panels = -(-rows // PANEL)

    def pack() -> ir.TensorProtocol:
        dense: npt.NDArray[np.float32] = tensor.numpy()
        packed = pack_halves(dense.T if transposed else dense, dtype)
        return ir.tensor(packed.view(type_.numpy()), dtype=type_)

    shape, name = ir.Shape([panels, columns, PANEL]), f"{weight.name}.panels"
    stored = initializer(model, ir.LazyTensor(pack, dtype=type_, shape=shape, name=name))
    whole = [columns, panels * PANEL] if transposed else [panels * PANEL, columns]
    whole_shape = constant(model, f"{weight.name}.shape", np.array(whole, np.int64))
    nodes = [
        turned := ir.node("Transpose", [stored], {"perm": _UNPACK[transposed]}),
        ir.node("Reshape", [turned.outputs[0], whole_shape]),
    ]
    if rows % PANEL:
        ends = [("first", 0), ("end", rows), ("axis", int(transposed))]
        inputs = [
            constant(model, f"{weight.name}.{what}", np.array([number], np.int64))
            for what, number in ends
        ]
        nodes.append(ir.node("Slice", [nodes[-1].outputs[0], *inputs]))
    # Last, as the others then move half of the bytes.
    nodes.append(ir.node("Cast", [nodes[-1].outputs[0]], {"to": ir.DataType.FLOAT}))
    model.graph.insert_before(model.graph[0], nodes)
    made = nodes[-1].outputs[0]
    made.shape, made.type = weight.shape, weight.type
    ir.convenience.replace_all_uses_with(weight, made)
    return True


def _panels_of(model: ir.Model, matrix: ir.Value, transposed: bool) -> tuple[ir.Value, Half] | None:
    """The panels that a matrix is made of, as the operators read them, and their type; None if it
    is made otherwise."""
    turned = find_producer(matrix, "Transpose", "Cast", "Slice", "Reshape")
    if not is_transpose(turned, *_UNPACK[transposed]):
        return None
    assert turned is not None
    value = turned.inputs[0]
    tensor = value.const_value if value is not None else None
    dtypes = [half for half, type_ in _TYPES.items() if tensor and tensor.dtype == type_]
    if tensor is None or not dtypes:
        return None
    name, words = f"{tensor.name}.words", ir.DataType.UINT16
    if (found := model.graph.initializers.get(name)) is not None:
        return found, dtypes[0]
    if isinstance(tensor, ir.ExternalTensor):  # the same bytes of the same file
        where = tensor.location, tensor.offset, tensor.length
        same = ir.ExternalTensor(
            *where, words, shape=tensor.shape, name=name, base_dir=tensor.base_dir
        )
        return initializer(model, same), dtypes[0]
    return constant(model, name, tensor.numpy().view(np.uint16)), dtypes[0]


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
