"""Express products with quantised weights in ONNX's operators, for all backends, or in our own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from .blocks import BLOCK, LARGE_SLICE, Bits, Quantised, recover, row_slices, scale_width
from .experts import PRODUCT as EXPERTS_PRODUCT
from .layers import PRODUCT, TABLE

OWN_DOMAIN = "outrider"  # of plugins/onnxruntime
GATHER = "QuantizedGather"
PANEL = 16  # outputs that are interleaved in memory: see outrider_product.h


class PiecewiseTensor(ir.LazyTensor):
    """A tensor that is computed and written some rows at a time. make: computes a slice of the
    first axis."""

    def __init__(
        self,
        make: Callable[[slice], npt.NDArray[Any]],
        dtype: ir.DataType,
        shape: ir.Shape,
        name: str,
        rows: int,
    ):
        def make_whole() -> ir.TensorProtocol:
            return ir.tensor(make(slice(None)), dtype=dtype)

        super().__init__(make_whole, dtype=dtype, shape=shape, name=name)
        self._make, self._rows = make, rows

    def tofile(self, file: BinaryIO) -> None:
        for here in row_slices(self.shape.numpy()[0], 1, self._rows):
            part = np.ascontiguousarray(self._make(here))
            file.write(part.view(np.uint8).data)


def make_tables_dense(model: ir.Model) -> None:
    """Replace the quantised tables of embeddings by dense ones, in place, as ONNX cannot look up
    rows of levels. The dense tables are computed only while they are written."""
    for node in [node for node in model.graph if node.op_type == TABLE]:
        levels, scales = map(_weight, node.inputs)
        table = node.outputs[0]
        assert levels is not None and scales is not None and table.dtype is not None
        make = partial(_dense_rows, levels, scales, table.dtype)
        rows, columns = levels.shape.numpy()
        shape, name = ir.Shape([rows, columns]), f"{levels.name}.dense"
        lazy = PiecewiseTensor(make, table.dtype, shape, name, LARGE_SLICE // columns)
        ir.convenience.replace_all_uses_with(table, initializer(model, lazy))
        model.graph.remove(node, safe=True)


def _dense_rows(
    levels: ir.TensorProtocol, scales: ir.TensorProtocol, dtype: ir.DataType, here: slice
) -> npt.NDArray[Any]:
    dense = Quantised(levels.numpy()[here], scales.numpy()[here], 8).dense()
    return dense.astype(dtype.numpy(), copy=False)


def dequantise_linear(model: ir.Model) -> None:
    """Replace the products of `QuantisedLinear` by DequantizeLinear and MatMul, in place. A product
    with 4-bit and 8-bit matrices becomes one of each, and a Concat."""
    for node in [node for node in model.graph if node.op_type in (PRODUCT, EXPERTS_PRODUCT)]:
        x, *matrices = node.inputs
        bits, experts = node.attributes["bits"].as_ints(), node.attributes.get_int("experts", 0)
        nodes: list[ir.Node] = []
        for levels, scales, each in zip(matrices[::2], matrices[1::2], bits, strict=True):
            assert levels is not None and scales is not None
            dequantise = _dequantise(model, levels, scales, each, experts)
            nodes += [dequantise, ir.node("MatMul", [x, dequantise.outputs[0]])]
        if len(bits) > 1:
            products = [product.outputs[0] for product in nodes[1::2]]
            nodes.append(ir.node("Concat", products, {"axis": -1}))
        model.graph.insert_before(node, nodes[:-1])
        replace(model, node, nodes[-1])
    model.graph.opset_imports.pop(OWN_DOMAIN, None)


def _dequantise(
    model: ir.Model, levels: ir.Value, scales: ir.Value, bits: int, experts: int
) -> ir.Node:
    """The DequantizeLinear that gives the matrix [K, N]. Scales belong to blocks along K, or to
    outputs."""
    assert isinstance(levels.shape, ir.Shape) and isinstance(scales.shape, ir.Shape)
    (rows, columns), (_, several) = levels.shape.numpy(), scales.shape.numpy()
    dtype = ir.DataType.INT4 if bits == 4 else levels.dtype
    weights = [_transposed(model, levels, dtype, experts)]
    if scale_width(columns, several) == BLOCK:
        weights.append(_transposed(model, scales, scales.dtype, experts))
        attributes = {"axis": 1 if experts else 0, "block_size": BLOCK}
    else:
        weights.append(_transposed(model, scales, scales.dtype, sizes=[rows]))
        attributes = {"axis": 1}
    node = ir.node("DequantizeLinear", weights, attributes)
    node.outputs[0].type = ir.TensorType(scales.dtype or ir.DataType.FLOAT)
    return node


def _transposed(
    model: ir.Model,
    value: ir.Value,
    dtype: ir.DataType | None,
    experts: int = 0,
    sizes: list[int] | None = None,
) -> ir.Value:
    """The transposed initializer, materialised only while it is written. Each product gets its own:
    ONNX Runtime does not fuse products that share one. experts: if not 0, [E N, K] becomes
    [E, K, N]. sizes: its shape, if not [K, N]."""
    tensor = value.const_value
    assert tensor is not None and dtype is not None and value.name is not None
    rows, columns = tensor.shape.numpy()
    expert_axis = [experts] if experts else []
    shape = ir.Shape(sizes or [*expert_axis, columns, rows // (experts or 1)])
    name, number = f"{value.name}.T", 1
    while name in model.graph.initializers:  # torch merges equal tensors into one
        name, number = f"{value.name}.{number}.T", number + 1

    def materialise() -> ir.TensorProtocol:
        by_expert = tensor.numpy().reshape(*expert_axis, -1, columns).swapaxes(-1, -2)
        transposed = np.ascontiguousarray(by_expert).reshape(shape.numpy())
        return ir.tensor(transposed.astype(dtype.numpy(), copy=False), dtype=dtype)

    return initializer(model, ir.LazyTensor(materialise, dtype=dtype, shape=shape, name=name))


@dataclass(frozen=True)
class StoredMatrix:
    """A weight as written by `dequantise_linear`: levels [K, N] and scales [K / BLOCK, N], or
    [E, K, N] and [E, K / BLOCK, N] for experts."""

    levels: ir.TensorProtocol
    scales: ir.TensorProtocol

    @property
    def bits(self) -> Bits:
        return 4 if self.levels.dtype == ir.DataType.INT4 else 8

    @property
    def experts(self) -> int:
        """The number of experts, or 0 for other weights."""
        count, *_ = self.levels.shape.numpy()
        return count if len(self.levels.shape) == 3 else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """N, K."""
        *_, columns, rows = self.levels.shape.numpy()
        return rows, columns

    @property
    def panels(self) -> int:
        return -(-self.sizes[0] // PANEL) * max(1, self.experts)

    def read(self, rows: slice = slice(None)) -> Quantised:
        """These rows of the matrix. Experts are concatenated, each padded to whole panels."""
        levels, scales = (self._rows(part)[rows] for part in (self.levels, self.scales))
        return Quantised(levels.astype(np.int8), scales.astype(np.float16), self.bits)

    def _rows(self, part: ir.TensorProtocol) -> npt.NDArray[Any]:
        rows: npt.NDArray[Any] = part.numpy().swapaxes(-1, -2)
        if not self.experts:
            return rows
        padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % PANEL), (0, 0)))
        return padded.reshape(-1, rows.shape[2])


def use_own_operators(model: ir.Model) -> int:
    """Replace the products of `dequantise_linear`, except those of experts, and the embedding (its
    table is dense, but was computed from levels) by liboutrider's operators, in place. Returns the
    number of products, including those of experts."""
    found = [
        (node, stored) for node in model.graph if (stored := stored_matrix_of(node)) is not None
    ]
    products = [(node, stored) for node, stored in found if not stored.experts]
    tables = [
        (node, table)
        for node in model.graph
        if node.op_type == "Gather"
        and (table := _weight(node.inputs[0])) is not None
        and len(table.shape) == 2
    ]
    for node, stored in products:
        matrix = packed_initializers(model, stored, f"{node.outputs[0].name}.weight")
        replace_by_own(model, node, PRODUCT, [node.inputs[0], *matrix], stored)
        for gather, table in list(tables):
            if stored.sizes == tuple(table.shape.numpy()) and _is_table(table, stored):  # tied
                replace_by_own(model, gather, GATHER, [gather.inputs[1], *matrix], stored)
                tables.remove((gather, table))
    _merge_mixed_products(model)
    for gather, table in tables if products else ():
        levels = recover(table.numpy(), 4) or recover(table.numpy(), 8)
        if levels is not None:
            dtype = ir.DataType.INT4 if levels.bits == 4 else ir.DataType.INT8
            transposed_levels = ir.tensor(
                levels.levels.T.astype(dtype.numpy(), copy=False), dtype=dtype
            )
            stored = StoredMatrix(transposed_levels, ir.tensor(levels.scales.T))
            matrix = packed_initializers(model, stored, f"{gather.outputs[0].name}.table")
            replace_by_own(model, gather, GATHER, [gather.inputs[1], *matrix], stored)
    return len(found)


def _merge_mixed_products(model: ir.Model) -> None:
    """Merge a 4-bit and an 8-bit product of the same x, whose outputs are concatenated, into one
    node."""
    for concat in [node for node in model.graph if node.op_type == "Concat"]:
        parts = [find_producer(value, PRODUCT) for value in concat.inputs]
        alone = [part for part in parts if part and _has_one_matrix_and_use(part)]
        if len(parts) != 2 or len(alone) != 2 or concat.attributes.get_int("axis") != -1:
            continue
        first, second = alone
        (bits, rows, columns), (others, more, _) = map(_sizes, alone)
        if first.inputs[0] is not second.inputs[0] or bits == others or rows % PANEL:
            continue
        attributes = {"bits": bits, "rows": rows + more, "columns": columns}
        inputs = [*first.inputs, *second.inputs[1:]]
        replace(model, concat, ir.node(PRODUCT, inputs, attributes, domain=OWN_DOMAIN))
        model.graph.remove(alone, safe=True)


def _has_one_matrix_and_use(product: ir.Node) -> bool:
    return len(product.inputs) == 3 and len(product.outputs[0].uses()) == 1


def _sizes(product: ir.Node) -> list[int]:
    return [product.attributes.get_int(name, 0) for name in ("bits", "rows", "columns")]


def stored_matrix_of(product: ir.Node) -> StoredMatrix | None:
    """The quantised weight of a product; None if the node is no such product."""
    if product.op_type != "MatMul":
        return None
    source = find_producer(product.inputs[1], "DequantizeLinear")
    levels, scales = map(_weight, source.inputs) if source else (None, None)
    return StoredMatrix(levels, scales) if levels is not None and scales is not None else None


def _weight(value: ir.Value | None) -> ir.TensorProtocol | None:
    return value.const_value if value is not None and value.is_initializer() else None


def _is_table(table: ir.TensorProtocol, stored: StoredMatrix) -> bool:
    dense = table.numpy()
    return all(
        np.array_equal(dense[here], stored.read(here).dense()) for here in row_slices(*dense.shape)
    )


def packed_initializers(model: ir.Model, stored: StoredMatrix, name: str) -> list[ir.Value]:
    """The initializers of one of our operators, computed only while they are written."""
    _, columns = stored.sizes
    panels, blocks = stored.panels, -(-columns // BLOCK)
    # For experts all at once, as every piece would transpose all of them.
    panels_at_a_time = panels if stored.experts else LARGE_SLICE // (columns * PANEL)

    def make(here: slice, pack: Callable[[Quantised], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        begin, end, _ = here.indices(panels)
        return pack(stored.read(slice(begin * PANEL, end * PANEL)))

    parts = (
        ("levels", ir.DataType.UINT8, 64 * stored.bits, pack_levels),
        ("scales", ir.DataType.FLOAT16, PANEL, pack_scales),
    )
    values = []
    for part, dtype, size, pack in parts:
        shape, tensor_name = ir.Shape([panels, blocks, size]), f"{name}.{part}"
        lazy = PiecewiseTensor(
            partial(make, pack=pack), dtype, shape, tensor_name, panels_at_a_time
        )
        values.append(initializer(model, lazy))
    return values


def replace_by_own(
    model: ir.Model, old: ir.Node, kind: str, inputs: list[ir.Value | None], stored: StoredMatrix
) -> None:
    """Replace a node by an operator of ours that reads this weight."""
    rows, columns = stored.sizes
    attributes = {"bits": stored.bits, "rows": rows, "columns": columns}
    if stored.experts:
        attributes["experts"] = stored.experts
    replace(model, old, ir.node(kind, inputs, attributes, domain=OWN_DOMAIN))


def replace(model: ir.Model, old: ir.Node, new: ir.Node) -> None:
    """Replace a node by another, whose output takes over the name."""
    model.graph.insert_before(old, new)
    replace_value(old.outputs[0], new.outputs[0])
    model.graph.remove(old, safe=True)


def initializer(model: ir.Model, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a weight or constant to the graph."""
    value = ir.val(tensor.name, const_value=tensor)
    model.graph.register_initializer(value)
    return value


def constant(model: ir.Model, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """The graph's constant of this name, which is added if it is missing."""
    found = model.graph.initializers.get(name)
    return initializer(model, ir.tensor(array, name=name)) if found is None else found


def find_producer(value: ir.Value | None, kind: str, *through: str) -> ir.Node | None:
    """The node of this kind that computes a value, directly or followed by nodes of the kinds
    `through`; None if there is none."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in through:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == kind else None


def is_transpose(node: ir.Node | None, *permutation: int) -> bool:
    """Whether the node is a Transpose with this permutation."""
    if node is None or node.op_type != "Transpose":
        return False
    return tuple(node.attributes["perm"].as_ints()) == permutation


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replace a value by another, which takes over its name."""
    new.shape, new.type = old.shape, old.type
    new.name, old.name = old.name, f"{old.name}.before"
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def pack_levels(weight: Quantised) -> npt.NDArray[np.uint8]:
    """Levels in the layout of outrider_product.h, [panels, blocks, 64 * bits]."""
    rows, columns = weight.levels.shape
    panels, blocks = -(-rows // PANEL), -(-columns // BLOCK)
    levels = np.full((panels * PANEL, blocks * BLOCK), 1 << (weight.bits - 1), np.uint8)
    levels[:rows, :columns] += weight.levels.view(np.uint8)  # modulo 256, as intended
    # [panel, lane, block, number], with a block's numbers split into vector, half and place.
    parts = levels.reshape(panels, PANEL, blocks, weight.bits, -1, 4).transpose(0, 2, 3, 1, 4, 5)
    if weight.bits == 4:
        parts = parts[..., 0, :] | parts[..., 1, :] << 4
    return np.ascontiguousarray(parts).reshape(panels, blocks, 64 * weight.bits)


def pack_scales(weight: Quantised) -> npt.NDArray[np.float16]:
    """Scales in the same layout, [panels, blocks, PANEL]."""
    rows, blocks = weight.scales.shape
    panels = -(-rows // PANEL)
    scales = np.zeros((panels * PANEL, blocks), np.float16)
    scales[:rows] = weight.scales
    return np.ascontiguousarray(scales.reshape(panels, PANEL, blocks).transpose(0, 2, 1))
