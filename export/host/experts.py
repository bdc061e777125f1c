"""Quantised experts: in graph.onnx all of them compute every token, in host.onnx only the chosen.

A value [E, T, ..] becomes [k, T, ..], as does everything computed between two products: those nodes
treat each expert along the first axis separately.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ..weights.experts import PRODUCT
from ..weights.operators import (
    find_producer,
    initializer,
    packed_initializers,
    replace_by_own,
    stored_matrix_of,
)
from .attention import NotLowered


def compute_only_chosen(model: ir.Model) -> None:
    """Let only the chosen experts compute, in place. Raises NotLowered."""
    weights = {
        node: stored
        for node in model.graph
        if (stored := stored_matrix_of(node)) is not None and stored.experts
    }
    nodes = list(model.graph)
    while weights:
        first = next(iter(weights))
        path, weighting, input_index, (chosen, routing) = _path_to_weighting(
            nodes[nodes.index(first) :]
        )
        for value in (value for node in (*path, weighting) for value in node.outputs):
            value.shape = None  # was that of all experts
        for node in path:
            if (stored := weights.pop(node, None)) is not None:
                matrix = packed_initializers(model, stored, f"{node.outputs[0].name}.weight")
                replace_by_own(model, node, PRODUCT, [node.inputs[0], *matrix, chosen], stored)
            elif node.op_type == "Add":
                _choose_bias(model, node, chosen)
        weighting.replace_input_with(input_index, routing)


_Routing = tuple[ir.Value, ir.Value]  # the chosen experts, int64 [k, T]; their weights, [k, T, 1]


def _path_to_weighting(nodes: Sequence[ir.Node]) -> tuple[list[ir.Node], ir.Node, int, _Routing]:
    """The nodes from the first one up to the product with the routing weights; that product, the
    index of the weights among its inputs, and the routing."""
    path, reached = [nodes[0]], set(nodes[0].outputs)
    for node in nodes[1:]:
        others = [i for i, value in enumerate(node.inputs) if value not in reached]
        if len(others) == len(node.inputs):
            continue
        if node.op_type == "Mul" and others and (routing := _routing(node.inputs[others[0]])):
            return path, node, others[0], routing
        path.append(node)
        reached.update(node.outputs)
    raise NotLowered("its experts are not weighted as expected")


def _routing(value: ir.Value | None) -> _Routing | None:
    """The chosen experts and weights that the sparse routing weights [E, T, 1] are made from."""
    total = find_producer(value, "ReduceSum", "Unsqueeze", "Transpose", "Cast")
    product = find_producer(total.inputs[0], "Mul") if total else None
    if product is None:
        return None
    one_hot, weights = product.inputs
    equal = find_producer(one_hot, "Equal", "Cast")
    index = find_producer(equal.inputs[0], "Unsqueeze") if equal else None
    if index is None or index.inputs[0] is None or weights is None:
        return None
    return index.inputs[0], weights


def _choose_bias(model: ir.Model, add: ir.Node, chosen: ir.Value) -> None:
    """Replace a bias of all experts, [E, 1, N], by those of the chosen ones, [k, T, N]."""
    for input_index, value in enumerate(add.inputs):
        unsqueeze = find_producer(value, "Unsqueeze")
        weight = unsqueeze.inputs[0] if unsqueeze else value
        if value is None or weight is None or not weight.is_initializer():
            continue
        if value.shape is None or len(value.shape) != 3:  # the same for all experts
            continue
        gather = ir.node("Gather", [value, chosen], {"axis": 0})
        axis = initializer(model, ir.tensor(np.array([2]), name=f"{add.outputs[0].name}.axis"))
        squeeze = ir.node("Squeeze", [gather.outputs[0], axis])
        model.graph.insert_before(add, [gather, squeeze])
        add.replace_input_with(input_index, squeeze.outputs[0])
