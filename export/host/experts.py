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
    OWN_DOMAIN,
    initializer,
    made_by,
    packed_values,
    replace,
    stored_of,
)
from .attention import NotLowered


def ask_the_chosen(model: ir.Model) -> None:
    """Let only the chosen experts compute, in place. Raises NotLowered."""
    weights = {
        node: stored
        for node in model.graph
        if (stored := stored_of(node)) is not None and stored.experts
    }
    nodes = list(model.graph)
    while weights:
        first = next(iter(weights))
        way, end, place, (chosen, routing) = _to_the_sum(nodes[nodes.index(first) :])
        for value in (value for node in (*way, end) for value in node.outputs):
            value.shape = None  # was that of all experts
        for node in way:
            if (stored := weights.pop(node, None)) is not None:
                rows, columns = stored.sizes
                matrix = packed_values(model, stored, f"{node.outputs[0].name}.weight")
                attributes = {
                    "bits": stored.bits, "rows": rows, "columns": columns, "experts": stored.experts
                }  # fmt: skip
                inputs = [node.inputs[0], *matrix, chosen]
                replace(model, node, ir.node(PRODUCT, inputs, attributes, domain=OWN_DOMAIN))
            elif node.op_type == "Add":
                _choose_bias(model, node, chosen)
        end.replace_input_with(place, routing)


_Routing = tuple[ir.Value, ir.Value]  # the chosen experts, int64 [k, T]; their weights, [k, T, 1]


def _to_the_sum(nodes: Sequence[ir.Node]) -> tuple[list[ir.Node], ir.Node, int, _Routing]:
    """The nodes from the first one up to the product with the routing weights; that product, the
    index of the weights among its inputs, and the routing."""
    way, reached = [nodes[0]], set(nodes[0].outputs)
    for node in nodes[1:]:
        apart = [i for i, value in enumerate(node.inputs) if value not in reached]
        if len(apart) == len(node.inputs):
            continue
        if node.op_type == "Mul" and apart and (routing := _routing(node.inputs[apart[0]])):
            return way, node, apart[0], routing
        way.append(node)
        reached.update(node.outputs)
    raise NotLowered("its experts are not weighted as expected")


def _routing(value: ir.Value | None) -> _Routing | None:
    """The chosen experts and weights that the sparse routing weights [E, T, 1] are made from."""
    total = made_by(value, "ReduceSum", "Unsqueeze", "Transpose", "Cast")
    product = made_by(total.inputs[0], "Mul") if total else None
    if product is None:
        return None
    one_hot, weights = product.inputs
    equal = made_by(one_hot, "Equal", "Cast")
    index = made_by(equal.inputs[0], "Unsqueeze") if equal else None
    if index is None or index.inputs[0] is None or weights is None:
        return None
    return index.inputs[0], weights


def _choose_bias(model: ir.Model, add: ir.Node, chosen: ir.Value) -> None:
    """Replace a bias of all experts, [E, 1, N], by those of the chosen ones, [k, T, N]."""
    for place, value in enumerate(add.inputs):
        before = made_by(value, "Unsqueeze")
        weight = before.inputs[0] if before else value
        if value is None or weight is None or not weight.is_initializer():
            continue
        if value.shape is None or len(value.shape) != 3:  # the same for all experts
            continue
        gather = ir.node("Gather", [value, chosen], {"axis": 0})
        axis = initializer(model, ir.tensor(np.array([2]), name=f"{add.outputs[0].name}.axis"))
        squeeze = ir.node("Squeeze", [gather.outputs[0], axis])
        model.graph.insert_before(add, [gather, squeeze])
        add.replace_input_with(place, squeeze.outputs[0])
