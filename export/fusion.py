"""Fuse the norms and rotary embeddings of a traced graph into one operator each."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import MatchResult, RewriteRuleSet
from onnxscript.rewriter.rules.fusion import _rms_normalization, _rotary_embedding

from .weights.operators import constant

_fusion: Any = _rotary_embedding  # untyped


def fuse_norms(model: ir.Model) -> None:
    """Fuse RMS norms, in place."""
    _split_inverse_roots(model)
    _add_unit_scales(model)
    _rms_normalization.fuse_rms_normalization(model)
    _match_norm_types(model)


def _split_inverse_roots(model: ir.Model) -> None:
    """Rewrite x ** -0.5, as in Gemma 3n and 4, to the form that the library's rule matches."""
    for node in [node for node in model.graph if node.op_type == "Pow"]:
        x, power = node.inputs
        exponent = ir.convenience.get_const_tensor(power) if power is not None else None
        if exponent is None or exponent.size != 1 or exponent.numpy().item() != -0.5:
            continue
        old = node.outputs[0]
        root = ir.node("Sqrt", [x])
        inverse = ir.node("Reciprocal", root.outputs)
        for value in (root.outputs[0], inverse.outputs[0]):
            value.shape, value.type = old.shape, old.type
        model.graph.insert_before(node, [root, inverse])
        ir.convenience.replace_all_uses_with(old, inverse.outputs[0])
        model.graph.remove(node, safe=True)


def _add_unit_scales(model: ir.Model) -> None:
    """Give a norm without a scale, or with several, a scale of ones: the operator needs one."""
    for node in [node for node in model.graph if node.op_type == "Mul"]:
        x, normed = node.inputs[0], node.outputs[0]
        width = x.shape[-1] if x is not None and x.shape is not None and len(x.shape) else None
        if not (isinstance(width, int) and _is_inverse_of_root(node.inputs[1])):
            continue
        uses = list(normed.uses())
        if len(uses) == 1 and _is_scaled(uses[0].node, normed):
            continue
        assert normed.dtype is not None
        name = f"ones.{width}.{normed.dtype.name}"
        ones = constant(model, name, np.ones(width, normed.dtype.numpy()))
        scaled = ir.node("Mul", [normed, ones])
        scaled.outputs[0].shape, scaled.outputs[0].type = normed.shape, normed.type
        ir.convenience.replace_all_uses_with(normed, scaled.outputs[0])
        scaled.replace_input_with(0, normed)
        model.graph.insert_after(node, scaled)


def _is_inverse_of_root(value: ir.Value | None) -> bool:
    """Whether the value is 1 / sqrt(mean(x ** 2) + epsilon)."""
    for kind in ("Reciprocal", "Sqrt", "Add", "ReduceMean", "Pow"):
        node = value.producer() if value is not None else None
        if node is None or node.op_type != kind:
            return False
        value = node.inputs[0]
    return True


def _is_scaled(node: ir.Node, value: ir.Value) -> bool:
    """Whether the node multiplies the value, possibly after a cast, by a number per column."""
    if node.op_type == "Cast":
        cast = node.outputs[0]
        return any(_is_scaled(use.node, cast) for use in cast.uses())
    if node.op_type != "Mul":
        return False
    return any(
        other is not value and other is not None and other.shape is not None
        and len(other.shape) == 1
        for other in node.inputs
    )  # fmt: skip


def _match_norm_types(model: ir.Model) -> None:
    """Cast the input of a norm to the type of its scale, which is its output's type.

    Gemma, OLMo 2 and GPT-OSS scale in float32 before they round. The operator allows two types,
    but its function body, which ONNX Runtime runs, multiplies one by the other.
    """
    for node in list(model.graph):
        if node.op_type != "RMSNormalization":
            continue
        x, scale = node.inputs[:2]
        assert x is not None and scale is not None and scale.dtype is not None
        if x.dtype != scale.dtype:
            cast = ir.node("Cast", [x], {"to": scale.dtype})
            cast.outputs[0].shape, cast.outputs[0].dtype = x.shape, scale.dtype
            model.graph.insert_before(node, cast)
            node.replace_input_with(0, cast.outputs[0])


def fuse_rotary(model: ir.Model) -> None:
    """Fuse rotary embeddings, in place."""
    RewriteRuleSet([_TransposeFirst.rule()]).apply_to_model(model)
    RewriteRuleSet([_Rotary.rule()]).apply_to_model(model)
    _rotary_embedding.fuse_partial_rotary_embedding(model)


class _Rotary(_fusion.RotaryEmbedding23Fusion):  # type: ignore[misc]
    """Matches x * cos + rotate_half(x) * sin, wherever cos and sin repeat their first half.

    The library's own rule requires the plain cosine and sine of repeated angles. They may also be
    scaled (YaRN, LongRoPE), or assembled from several positions and repeated afterwards (M-RoPE).
    """

    def pattern(  # type: ignore[no-untyped-def]
        self, op, x, cos, sin, start1, end1, start2, end2, one1, one2
    ):
        rotated_half = _fusion._rotate_half_pattern(op, x, start1, end1, start2, end2)
        return x * op.Unsqueeze(cos, one1) + rotated_half * op.Unsqueeze(sin, one2)

    def check(self, op: Any, cos: Any, sin: Any, **found: Any) -> Any:
        if not all(_repeats_first_half(value) for value in (cos, sin)):
            return MatchResult().fail("no repeated half")
        return super().check(op, **found)

    def rewrite(self, op: Any, x: Any, cos: Any, sin: Any, **_: Any) -> Any:
        halves = _half(op, cos), _half(op, sin)
        return op.RotaryEmbedding(x, *halves, interleaved=0, num_heads=x.shape[1])


class _TransposeFirst(_fusion.RotaryEmbedding23Fusion):  # type: ignore[misc]
    """Transposes heads to [B, H, N, D] before the rotation, as in other models. Gemma 3n and 4
    rotate them as the product returns them, [B, N, H, D]."""

    def pattern(  # type: ignore[no-untyped-def]
        self, op, x, cos, sin, start1, end1, start2, end2, two1, two2
    ):
        rotated_half = _fusion._rotate_half_pattern(op, x, start1, end1, start2, end2)
        rotated = x * op.Unsqueeze(cos, two1) + rotated_half * op.Unsqueeze(sin, two2)
        return op.Transpose(rotated, perm=[0, 2, 1, 3])

    def check(self, op: Any, x: Any, two1: Any, two2: Any, **found: Any) -> Any:
        axes = [ir.convenience.get_const_tensor(value) for value in (two1, two2)]
        if x.shape is None or any(axis is None or [*axis.numpy()] != [2] for axis in axes):
            return MatchResult().fail("not by one angle for all heads of a token")
        return MatchResult()

    def rewrite(self, op: Any, x: Any, cos: Any, sin: Any, **found: Any) -> Any:
        heads = op.Transpose(x, perm=[0, 2, 1, 3])
        heads.shape, heads.dtype = ir.Shape([x.shape[axis] for axis in (0, 2, 1, 3)]), x.dtype
        one, last = op.Constant(value_ints=[1]), op.Constant(value_ints=[3])
        first, second = (
            op.Slice(heads, found[f"start{half}"], found[f"end{half}"], last, one)
            for half in (1, 2)
        )
        rotated_half = op.Concat(op.Neg(second), first, axis=-1)
        cos, sin = op.Unsqueeze(cos, one), op.Unsqueeze(sin, one)
        return op.Add(op.Mul(heads, cos), op.Mul(rotated_half, sin))


def _repeats_first_half(value: Any) -> bool:
    """Whether the last axis holds the same values twice."""
    if value is None or (node := value.producer()) is None:
        return False
    if node.op_type == "Mul":  # by a number
        return _repeats_first_half(node.inputs[0]) and _is_number(node.inputs[1])
    if node.op_type in ("Cos", "Sin"):
        return _repeats_first_half(node.inputs[0])
    twice = node.op_type == "Concat" and len(node.inputs) == 2
    return twice and node.inputs[0] is node.inputs[1] and node.attributes["axis"].as_int() == -1


def _half(op: Any, value: Any) -> Any:
    """The repeated half of a value for which `_repeats_first_half` is true."""
    node = value.producer()
    if node.op_type == "Concat":
        return node.inputs[0]
    return getattr(op, node.op_type)(_half(op, node.inputs[0]), *node.inputs[1:])


def _is_number(value: ir.Value | None) -> bool:
    constant = ir.convenience.get_const_tensor(value) if value is not None else None
    return constant is not None and constant.size == 1
