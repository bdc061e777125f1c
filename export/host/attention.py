"""Find the attention of each layer in graph.onnx: its inputs and its result."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..functions.attention import is_own
from ..weights.operators import find_producer, is_transpose

WIDEST_HEAD = 512  # OUTRIDER_ATTENTION_WIDTH
_SWAPPED_AXES = (0, 2, 1, 3)  # between [B, N, H, D] and [B, H, N, D]


class NotLowered(Exception):
    """The graph cannot be rewritten for the CPU; the message is the reason."""


@dataclass(frozen=True)
class Rotary:
    """The inputs and attribute of a RotaryEmbedding node that determine the rotation."""

    cos: ir.Value
    sin: ir.Value
    interleaved: int


@dataclass(frozen=True)
class SourceLayer:
    """Attention to the source, whose keys and values are inputs of the graph, [B, H, E, D]."""

    node: ir.Node
    output: ir.Value  # [B, N, H D] or [B N, H D]
    query: ir.Value  # [B, N, H, D] or [B, N, H D]
    mask: ir.Value | None  # bool, or added to the scores; None: no row is masked
    heads: int
    key_heads: int
    sinks: ir.Value | None  # [H]
    softcap: float  # 0 for none


@dataclass(frozen=True)
class Layer(SourceLayer):
    """Attention to the text. query, key, value: before the rotation by `rotary`."""

    mask: ir.Value
    key: ir.Value
    value: ir.Value
    rotary: Rotary | None
    cache_writes: tuple[ir.Node, ir.Node]  # which write keys and values to their caches


def layers_of(model: ir.Model) -> tuple[list[Layer], list[SourceLayer]]:
    """Attention to the text and to the source, in the order of the graph. Raises NotLowered."""
    nodes = [node for node in model.graph if node.op_type == "Attention" or is_own(node)]
    if not nodes:
        raise NotLowered("it has no Attention operator")
    if max(size(rows, 3) for node in nodes for rows in node.inputs[1:3]) > WIDEST_HEAD:
        raise NotLowered(f"its heads are wider than {WIDEST_HEAD}")
    inputs = set(model.graph.inputs)
    of_source = [node for node in nodes if node.inputs[1] in inputs]
    return (
        [_layer(model, node) for node in nodes if node not in of_source],
        [_source_layer(model, node) for node in of_source],
    )


def _layer(model: ir.Model, node: ir.Node) -> Layer:
    output = _attention_output(node)
    query, key_cache, value_cache = node.inputs[:3]
    mask, sinks = _mask_and_sinks(node)
    new_keys, new_values = (
        find_producer(cache, "TensorScatter") for cache in (key_cache, value_cache)
    )
    if new_keys is None or new_values is None:
        raise NotLowered("its attention is not fed by TensorScatter")
    transposed_inputs = query, new_keys.inputs[1], new_values.inputs[1]
    found = [_untransposed_rows(model, each) for each in transposed_inputs]
    rotary = found[0][1] if found[0] and found[1] and found[0][1] == found[1][1] else None
    # If the rotation has another form, it stays, and its results are transposed back.
    query, key, value = (
        rows[0] if rows and rows[1] == wanted else _transposed(model, each)
        for rows, wanted, each in zip(found, (rotary, rotary, None), transposed_inputs, strict=True)
    )
    if mask is None:
        raise NotLowered("its attention has no mask")
    return Layer(
        node, output, query, mask, size(node.inputs[0], 1), size(key_cache, 1), sinks,
        node.attributes.get_float("softcap", 0), key, value, rotary, (new_keys, new_values),
    )  # fmt: skip


def _source_layer(model: ir.Model, node: ir.Node) -> SourceLayer:
    output, rows = _attention_output(node), _untransposed_rows(model, node.inputs[0])
    if rows is None or rows[1] is not None:
        raise NotLowered("its queries to the source are not transposed as expected")
    mask, sinks = _mask_and_sinks(node)
    heads, key_heads = (size(value, 1) for value in node.inputs[:2])
    cap = node.attributes.get_float("softcap", 0)
    return SourceLayer(node, output, rows[0], mask, heads, key_heads, sinks, cap)


def _mask_and_sinks(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """The mask and the sinks, if any."""
    return (*node.inputs[3:], None, None)[:2]


def _attention_output(node: ir.Node) -> ir.Value:
    if not is_own(node) and set(node.attributes) != {"scale"}:
        raise NotLowered("its Attention operator has other attributes than scale")
    swap = _only_use(node.outputs[0], "Transpose")
    if not is_transpose(swap, *_SWAPPED_AXES):
        raise NotLowered("the output of its attention is not transposed back")
    return _only_use(swap.outputs[0], "Reshape").outputs[0]


def _only_use(value: ir.Value, kind: str) -> ir.Node:
    uses = list(value.uses())
    if len(uses) != 1 or uses[0].node.op_type != kind:
        raise NotLowered(f"its attention is not followed by {kind}")
    return uses[0].node


def size(value: ir.Value | None, axis: int) -> int:
    assert value is not None and value.shape is not None
    found = value.shape[axis]
    assert isinstance(found, int)
    return found


def _untransposed_rows(
    model: ir.Model, value: ir.Value | None
) -> tuple[ir.Value, Rotary | None] | None:
    """For a value that is transposed to [B, H, N, D], and possibly normalised and rotated: the
    value as [B, N, H, D], normalised but not rotated, and the rotation. None for other values."""
    rotary = norm = None
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "RotaryEmbedding" and len(node.inputs) == 3:
        before, cos, sin = node.inputs
        assert before is not None and cos is not None and sin is not None
        rotary = Rotary(cos, sin, node.attributes.get_int("interleaved", 0))
        node = before.producer()
    # A norm over D, with a scale of D, does not depend on the order of the other axes.
    if node is not None and node.op_type == "RMSNormalization" and _dimensions(node.inputs[1]) == 1:
        norm, before = node, node.inputs[0]
        node = before.producer() if before is not None else None
    if node is None or not is_transpose(node, *_SWAPPED_AXES):
        return None
    source = node.inputs[0]
    assert source is not None
    if norm is not None:
        moved_norm = ir.node("RMSNormalization", [source, *norm.inputs[1:]], norm.attributes)
        moved_norm.outputs[0].shape, moved_norm.outputs[0].type = source.shape, norm.outputs[0].type
        model.graph.append(moved_norm)
        source = moved_norm.outputs[0]
    return source, rotary


def _dimensions(value: ir.Value | None) -> int:
    return len(value.shape) if value is not None and value.shape is not None else 0


def _transposed(model: ir.Model, value: ir.Value | None) -> ir.Value:
    """Transpose [B, H, N, D] to [B, N, H, D]."""
    swap = ir.node("Transpose", [value], {"perm": _SWAPPED_AXES})
    model.graph.append(swap)
    return swap.outputs[0]
