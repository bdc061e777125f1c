"""Layers that carry a state: linear attention, state spaces, short convolutions.

Such a layer keeps its state in rows, like keys and values: row p is the state after token p, or for
a convolution the input of token p. The rows of a slot are a ring of R, with row p at p mod R: the
last R rows are present, and a sequence is rolled back over them by a call with a smaller position.

Each computation is a function in ONNX's own operators, or in torch's if nothing is being exported.
"""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import torch

from .own import DOMAIN, HEADER

CONVOLUTION, RECURRENCE, DELTA = "RingConvolution", "RingRecurrence", "RingDeltaRule"

# Write the last R of N `rows` [B, A, N, D] to `slot` [B, A, R, D].
_WRITE = """
  least = Neg (room)
  far = Constant <value_ints = [9223372036854775807]> ()
  along = Constant <value_ints = [2]> ()
  last = Slice (rows, least, far, along)
  count = Shape <start = 2, end = 3> (rows)
  too_many = Sub (count, room)
  skipped = Max (too_many, zero)
  begin = Add (position, skipped)
  where = Mod (begin, room)
  slot_out = TensorScatter <axis = 2, mode = "circular"> (slot, last, where)
"""

# From x [B, C, N], weight [C, K], bias [C] and slot [B, 1, R, C] to out [B, C, N].
_CONVOLUTION = """
{name} <channels> (x, weight, bias, slot, position) => (out, slot_out)
{{
  room = Shape <start = 2, end = 3> (slot)
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  middle = Constant <value_ints = [1, 3]> ()
  apart = Unsqueeze (position, one)
  taps = Shape <start = 1> (weight)
  before = Sub (taps, one)
  nothing = Constant <value_int = 0> ()
  each = Constant <value_int = 1> ()
  scalar = Squeeze (before)
  ages = Range (nothing, scalar, each)
  back = Sub (ages, before)
  index = Add (apart, back)
  there_flat = GreaterOrEqual (index, nothing)
  there = Unsqueeze (there_flat, middle)
  lying = Add (index, room)
  at_flat = Mod (lying, room)
  at = Unsqueeze (at_flat, middle)
  batch = Shape <end = 1> (slot)
  wide = Shape <start = 3> (slot)
  sizes = Concat <axis = 0> (batch, one, before, wide)
  all_at = Expand (at, sizes)
  found = GatherElements <axis = 2> (slot, all_at)
  none = Constant <value_float = 0.0> ()
  own = Where (there, found, none)
  rows_of_x = Transpose <perm = [0, 2, 1]> (x)
  rows = Unsqueeze (rows_of_x, one)
  all = Concat <axis = 2> (own, rows)
  flat = Squeeze (all, one)
  read = Transpose <perm = [0, 2, 1]> (flat)
  filters = Unsqueeze (weight, one)
  out = Conv <group: int = @channels> (read, filters, bias)
{write}
}}
"""

# From query, key [B, N, G, K], value [B, N, H, V], decay [B, N, H, 1 or K], beta [B, N, H] and slot
# [B, H, R, K V] to out [B, N, H, V]. Each query and key is shared by H / G heads.
_RECURRENCE = """
{name} (query, key, value, decay{beta_input}, slot, position) => (out, slot_out)
{{
  room = Shape <start = 2, end = 3> (slot)
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  same = Constant <value_ints = [0, 0]> ()
  rest = Constant <value_ints = [-1]> ()
  sides = Constant <value_ints = [1, 2, 3]> ()
  groups = Shape <start = 2, end = 3> (query)
  keys = Shape <start = 3> (query)
  values = Shape <start = 3> (value)
  decays = Shape <start = 3> (decay)
  batch = Shape <end = 1> (slot)
  heads = Shape <start = 1, end = 2> (slot)
  width = Shape <start = 3> (slot)
  earlier = Sub (position, one)
  lying = Add (earlier, room)
  at_flat = Mod (lying, room)
  at = Unsqueeze (at_flat, sides)
  one_row = Concat <axis = 0> (batch, heads, one, width)
  all_at = Expand (at, one_row)
  found = GatherElements <axis = 2> (slot, all_at)
  begun_flat = Greater (position, zero)
  begun = Unsqueeze (begun_flat, sides)
  none = Constant <value_float = 0.0> ()
  own = Where (begun, found, none)
  by_group = Concat <axis = 0> (batch, groups, rest, keys, values)
  first = Reshape (own, by_group)
  values_by_group = Concat <axis = 0> (same, groups, rest, values)
  v = Reshape (value, values_by_group)
  decays_by_group = Concat <axis = 0> (same, groups, rest, decays)
  g_log = Reshape (decay, decays_by_group)
  g = Exp (g_log)
  {beta_reshape}
  final, found_out, states = Scan <num_scan_inputs = {inputs},
      scan_input_axes = [{axes}], scan_output_axes = [1, 1],
      body = step (float[b, h, m, k, w] s, float[b, h, k] q_t, float[b, h, k] k_t,
                   float[b, h, m, w] v_t, float[b, h, m, d] g_t{beta_type})
          => (float[b, h, m, k, w] s_new, float[b, h, m, w] y_t, float[b, h, m, k, w] s_kept)
      {{
        tail = Constant <value_ints = [-1]> ()
        inner = Constant <value_ints = [-2]> ()
        around = Constant <value_ints = [2, 4]> ()
        fade = Unsqueeze (g_t, tail)
        faded = Mul (s, fade)
        k_wide = Unsqueeze (k_t, around)
        q_wide = Unsqueeze (q_t, around)
        {delta}
        u_wide = Unsqueeze (u, inner)
        more = Mul (k_wide, u_wide)
        s_new = Add (faded, more)
        asked = Mul (s_new, q_wide)
        y_t = ReduceSum <keepdims = 0> (asked, inner)
        s_kept = Identity (s_new)
      }}> (first, query, key, v, g{beta_given})
  out_shape = Shape (value)
  out = Reshape (found_out, out_shape)
  by_row = Concat <axis = 0> (same, heads, width)
  states_flat = Reshape (states, by_row)
  rows = Transpose <perm = [0, 2, 1, 3]> (states_flat)
{write}
}}
"""
_BETAS = """
  betas = Concat <axis = 0> (same, groups, rest)
  b = Reshape (beta, betas)
"""
_DELTA = """
        known = Mul (faded, k_wide)
        memory = ReduceSum <keepdims = 0> (known, inner)
        news = Sub (v_t, memory)
        rate = Unsqueeze (beta_t, tail)
        u = Mul (news, rate)
"""


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, slot: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Each channel's weighted sum of its last K inputs, [B, C, N], and the updated slot.

    x: [B, C, N]. weight: [C, K]. bias: [C]. slot: [B, 1, R, C], with R at least K - 1 plus the
    number of rows that may be rolled back. position: int64 [B], of the first token.
    """
    if torch.onnx.is_in_onnx_export():
        y, new_slot = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{CONVOLUTION}",
            [x, weight, bias, slot, position],
            {"channels": x.shape[1]},
            dtypes=[x.dtype, slot.dtype],
            shapes=[x.shape, slot.shape],
            version=1,
        )
        return y, new_slot
    taps, rows = weight.shape[1], slot.shape[2]
    index = position[:, None] + torch.arange(1 - taps, 0)
    batch = torch.arange(len(x))[:, None]
    before = slot[batch, 0, index % rows] * (index >= 0)[..., None]
    read = torch.cat([before.transpose(1, 2), x], dim=2)
    y = torch.nn.functional.conv1d(read, weight[:, None], bias, groups=len(weight))
    return y, _write_to_ring(slot, x.transpose(1, 2)[:, None], position)


def recur(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor,
    beta: torch.Tensor | None, slot: torch.Tensor, position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The outputs [B, N, H, V] of a recurrence with a matrix S as its state, and the updated slot.

    For each token: S = exp(g) S, S = S + k u', y = S' q, with u = v, as in Mamba 2 (Dao and Gu
    2024, arXiv 2405.21060, eq. 16), or if beta is given u = beta (v - S' k), the gated delta rule
    (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464, eq. 10). query, key: [B, N, G, K], each
    shared by H / G heads. value: [B, N, H, V]. decay: g, [B, N, H, 1 or K]. beta: [B, N, H]. slot:
    [B, H, R, K V]. position: as in `convolve`. All float32.
    """
    if torch.onnx.is_in_onnx_export():
        more = [] if beta is None else [beta]
        y, new_slot = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{RECURRENCE if beta is None else DELTA}",
            [query, key, value, decay, *more, slot, position],
            dtypes=[value.dtype, slot.dtype],
            shapes=[value.shape, slot.shape],
            version=1,
        )
        return y, new_slot
    (batch, tokens, heads, width), (groups, keys) = value.shape, query.shape[2:]
    before = slot[torch.arange(batch), :, (position - 1) % slot.shape[2]]
    state = before.reshape(batch, heads, keys, width) * (position > 0)[:, None, None, None]
    heads_per_group = heads // groups
    query, key = (x.repeat_interleave(heads_per_group, dim=2)[..., None] for x in (query, key))
    outputs, states = [], []
    for t in range(tokens):
        state = state * decay[:, t].exp()[..., None]
        update = value[:, t]
        if beta is not None:
            update = (update - (state * key[:, t]).sum(2)) * beta[:, t, :, None]
        state = state + key[:, t] * update[:, :, None]
        outputs.append((state * query[:, t]).sum(2))
        states.append(state.reshape(batch, heads, -1))
    return torch.stack(outputs, 1), _write_to_ring(slot, torch.stack(states, 2), position)


def _write_to_ring(slot: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """A copy of the slot [B, A, R, D] with the last R of the N rows [B, A, N, D] written to it."""
    room, count = slot.shape[2], rows.shape[2]
    kept_rows = torch.arange(max(0, count - room), count)
    batch = torch.arange(len(slot))[:, None]
    slot = slot.clone()
    slot[batch, :, (position[:, None] + kept_rows) % room] = rows[:, :, kept_rows].transpose(1, 2)
    return slot


def is_own(node: ir.Node) -> bool:
    """Whether the node calls one of these functions."""
    return node.domain == DOMAIN and node.op_type in (CONVOLUTION, RECURRENCE, DELTA)


def function(name: str) -> onnx.FunctionProto:
    body = _CONVOLUTION if name == CONVOLUTION else _RECURRENCE
    beta = name == DELTA
    text = body.format(
        name=name,
        write=_WRITE,
        beta_input=", beta" * beta,
        beta_reshape=_BETAS * beta,
        inputs=4 + beta,
        axes=", ".join("1" * (4 + beta)),
        beta_type=", float[b, h, m] beta_t" * beta,
        beta_given=", b" * beta,
        delta=_DELTA if beta else "u = Identity (v_t)",
    )
    return onnx.parser.parse_function(HEADER + text)
