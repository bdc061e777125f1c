"""Attention with a soft cap, with sinks, or with values of another width than keys, which ONNX's
operator lacks or TensorRT-RTX's parser refuses."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import torch

from .own import DOMAIN, HEADER

# From query [B, H, N, D], key [B, Hkv, S, D], value [B, Hkv, S, Dv], mask bool [B, 1, N, S] and
# sinks [H] to out [B, H, N, Dv]. Queries are grouped by key head, so that no key is copied. lowest:
# the score of a masked key.
_BODY = """
{name} <scale, lowest{attributes}> (query, key, value, mask{inputs}) => (out)
{{
  all = Constant <value_ints = [-1]> ()
  batch = Shape <end = 1> (key)
  heads = Shape <start = 1, end = 2> (key)
  rows = Shape <start = 2, end = 3> (key)
  width = Shape <start = 3> (query)
  tokens = Shape <end = 3> (query)
  grouped = Concat <axis = 0> (batch, heads, all, width)
  scores_grouped = Concat <axis = 0> (batch, heads, all, rows)
  apart = Concat <axis = 0> (tokens, all)
  asking = Reshape (query, grouped)
  turned = Transpose <perm = [0, 1, 3, 2]> (key)
  products = MatMul (asking, turned)
  products_apart = Reshape (products, apart)
  factor = Constant <value_float: float = @scale> ()
  own_factor = CastLike (factor, query)
  scaled = Mul (products_apart, own_factor)
  {softcap}
  least = Constant <value_float: float = @lowest> ()
  own_least = CastLike (least, query)
  seen = Where (mask, bent, own_least)
  {sinks}
  shares_of_rows = Reshape (shares, scores_grouped)
  mixed = MatMul (shares_of_rows, value)
  out = Reshape (mixed, apart)
}}
"""
_SOFTCAP = """
  cap = Constant <value_float: float = @softcap> ()
  own_cap = CastLike (cap, query)
  small = Div (scaled, own_cap)
  round = Tanh (small)
  bent = Mul (round, own_cap)
"""
_SINKS = """
  one = Constant <value_ints = [1]> ()
  zero = Constant <value_ints = [0]> ()
  last = Constant <value_ints = [3]> ()
  by_head = Constant <value_ints = [1, -1, 1, 1]> ()
  sinks_by_head = Reshape (sinks, by_head)
  own_sinks = CastLike (sinks_by_head, query)
  a_score_more = Concat <axis = 0> (tokens, one)
  sunk = Expand (own_sinks, a_score_more)
  scores = Concat <axis = 3> (seen, sunk)
  wide = Cast <to = 1> (scores)
  weights = Softmax <axis = 3> (wide)
  all_shares = CastLike (weights, value)
  shares = Slice (all_shares, zero, all, last)
"""
_NO_SINKS = """
  wide = Cast <to = 1> (seen)
  weights = Softmax <axis = 3> (wide)
  shares = CastLike (weights, value)
"""
_NAMES = {  # by whether there is a soft cap, and whether there are sinks
    (False, False): "UnevenAttention",
    (True, False): "CappedAttention",
    (False, True): "SinkAttention",
    (True, True): "CappedSinkAttention",
}


def attention_node(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The node of this attention, during an export."""
    lowest = torch.finfo(query.dtype).min
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{_NAMES[bool(softcap), sinks is not None]}",
        [query, key, value, mask, *([] if sinks is None else [sinks])],
        {"scale": float(scale), "lowest": lowest, **({"softcap": softcap} if softcap else {})},
        dtype=query.dtype,
        shape=(*query.shape[:3], value.shape[3]),
        version=1,
    )


def is_own(node: ir.Node) -> bool:
    """Whether the node calls one of these functions."""
    return node.domain == DOMAIN and node.op_type in _NAMES.values()


def function(name: str) -> onnx.FunctionProto:
    softcap, sinks = "Capped" in name, "Sink" in name
    body = _BODY.format(
        name=name,
        attributes=", softcap" * softcap,
        inputs=", sinks" * sinks,
        softcap=_SOFTCAP if softcap else "bent = Identity (scaled)",
        sinks=_SINKS if sinks else _NO_SINKS,
    )
    return onnx.parser.parse_function(HEADER + body)
