"""The bodies of the graph's sampling functions, in ONNX's text format; see verify.py.

They use only standard operators with CPU kernels in ONNX Runtime: no Where on booleans, no product
that exceeds int64. int64 [B] and float32 [B] are per slot; there are K = gamma + 1 rows of p.
"""

from __future__ import annotations

import onnx
import onnx.parser

from .own import DOMAIN, OPSET

# The high and the low word of a * m, for words a and m < 2^32: in halves, so that no product
# exceeds int64.
_MULTIPLY = """
Multiply (a, m) => (high, low)
{
  half = Constant <value_int = 65536> ()
  word = Constant <value_int = 4294967296> ()
  m_low = Mod (m, half)
  m_high = Div (m, half)
  below = Mul (a, m_low)
  above = Mul (a, m_high)
  above_low = Mod (above, half)
  above_high = Div (above, half)
  shifted = Mul (above_low, half)
  sum = Add (below, shifted)
  carry = Div (sum, word)
  low = Mod (sum, word)
  high = Add (above_high, carry)
}
"""

# One of the ten rounds of Philox 4x32 (Salmon et al., SC 2011), and the next round's key.
_PHILOX = """
PhiloxRound (c0, c1, c2, c3, k0, k1) => (d0, d1, d2, d3, l0, l1)
{
  word = Constant <value_int = 4294967296> ()
  m0 = Constant <value_int = 3528531795> ()
  m1 = Constant <value_int = 3449720151> ()
  w0 = Constant <value_int = 2654435769> ()
  w1 = Constant <value_int = 3144134277> ()
  h0, d3 = outrider.Multiply (c0, m0)
  h1, d1 = outrider.Multiply (c2, m1)
  x0 = BitwiseXor (h1, c1)
  d0 = BitwiseXor (x0, k0)
  x2 = BitwiseXor (h0, c3)
  d2 = BitwiseXor (x2, k1)
  s0 = Add (k0, w0)
  l0 = Mod (s0, word)
  s1 = Add (k1, w1)
  l1 = Mod (s1, word)
}
"""


def _state(round_number: int) -> str:
    """The names of Philox's words and key after this round."""
    return ", ".join(f"r{round_number}_{j}" for j in range(6))


# The uniforms of a round as in runtime/sampling/philox.py, float64 [B, K]: those for the acceptance
# tests at positions position .. position + K - 2, then the one for the final draw. The counter is
# (position, purpose, 0, 0).
_UNIFORMS = """
Uniforms (seed, position, rows) => (uniforms)
{
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  two = Constant <value_int = 2> ()
  axis = Constant <value_ints = [1]> ()
  word = Constant <value_int = 4294967296> ()
  count = Squeeze (rows)
  i = Range (zero, count, one)
  final = Sub (count, one)
  is_final = Equal (i, final)
  offset = Where (is_final, zero, i)
  purpose = Where (is_final, two, one)
  start = Unsqueeze (position, axis)
  absolute = Add (start, offset)
  c0 = Mod (absolute, word)
  bits = Unsqueeze (seed, axis)
  k0 = Mod (bits, word)
  upper = Sub (bits, k0)
  signed = Div (upper, word)
  k1 = Mod (signed, word)
ROUNDS
  high_scale = Constant <value_int = 2097152> ()
  low_scale = Constant <value_int = 2048> ()
  high = Mul (r10_0, high_scale)
  low = Div (r10_1, low_scale)
  integer = Add (high, low)
  real = Cast <to = 11> (integer)
  whole = Constant <value_int = 9007199254740992> ()
  scale = Cast <to = 11> (whole)
  uniforms = Div (real, scale)
}
""".replace(
    "ROUNDS",
    "\n".join(
        f"  {_state(r)} = outrider.PhiloxRound "
        + ("(c0, purpose, zero, zero, k0, k1)" if r == 1 else f"({_state(r - 1)})")
        for r in range(1, 11)
    ),
)

# The status of rows of logits [B, R, V] whose weights sum to `total`, int32 [B, R], as in
# plugins/include/outrider.h. A NaN or +inf, or nothing but -inf, makes the sum a NaN.
_STATUS = """
RowStatus (logits, total) => (status)
{
  axis = Constant <value_ints = [-1]> ()
  fine = Constant <value = int32 {0}> ()
  nan = Constant <value = int32 {6}> ()
  infinite = Constant <value = int32 {7}> ()
  nothing = Constant <value = int32 {8}> ()
  nans = IsNaN (logits)
  nan_flags = Cast <to = 6> (nans)
  nan_flag = ReduceMax <keepdims = 0> (nan_flags, axis)
  has_nan = Cast <to = 9> (nan_flag)
  infs = IsInf <detect_negative = 0> (logits)
  inf_flags = Cast <to = 6> (infs)
  inf_flag = ReduceMax <keepdims = 0> (inf_flags, axis)
  has_inf = Cast <to = 9> (inf_flag)
  broken = IsNaN (total)
  without_nan = Where (has_inf, infinite, nothing)
  cause = Where (has_nan, nan, without_nan)
  status = Where (broken, cause, fine)
}
"""

# float32 weights exp(z / T - max) [B, R, V] and their float64 sums [B, R].
_WEIGHTS = """
Weights (logits, temperature) => (scores, peak, weights, total)
{
  axes = Constant <value_ints = [1, 2]> ()
  axis = Constant <value_ints = [-1]> ()
  t = Unsqueeze (temperature, axes)
  scores = Div (logits, t)
  peak = ReduceMax <keepdims = 1> (scores, axis)
  below = Sub (scores, peak)
  weights = Exp (below)
  exact = Cast <to = 11> (weights)
  total = ReduceSum <keepdims = 0> (exact, axis)
}
"""

# Leviathan et al. 2023, Algorithm 1 (lenience: appendix A.5), with the conventions of
# runtime/sampling/rules.py. q gets an additional row, so that there is one even without drafts. It
# counts as 0: after the last draft token the residual max(0, p - q) is p itself.
_JUDGE = """
Judge <vocab_size: int = 2147483647>
  (target_logits, draft_logits, drafts, uniforms, gamma, temperature, lenience)
  => (accepted, token, status)
{
  i0 = Constant <value_ints = [0]> ()
  i1 = Constant <value_ints = [1]> ()
  i2 = Constant <value_ints = [2]> ()
  last = Constant <value_ints = [-1]> ()
  none = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  nothing = Constant <value_float = 0.0> ()
  unit = Constant <value_float = 1.0> ()
  nothing_64 = Cast <to = 11> (nothing)
  unit_64 = Cast <to = 11> (unit)

  vocab = Constant <value_int: int = @vocab_size> ()
  ends = Unsqueeze (vocab, i0)
  p_given = Slice (target_logits, i0, ends, i2)
  q_given = Slice (draft_logits, i0, ends, i2)
  p_logits = Cast <to = 1> (p_given)
  q_drafted = Cast <to = 1> (q_given)
  row_more = Constant <value_ints = [0, 0, 0, 0, 1, 0]> ()
  q_logits = Pad (q_drafted, row_more)
  p_width = Shape <start = 2> (p_logits)
  q_width = Shape <start = 2> (q_logits)

  greedy = Equal (temperature, nothing)
  t = Where (greedy, unit, temperature)
  p_scores, p_peak, p_weights, p_total = outrider.Weights (p_logits, t)
  q_scores, q_peak, q_weights, q_total = outrider.Weights (q_logits, t)

  one_more = Constant <value_ints = [0, 0, 0, 1]> ()
  x = Pad (drafts, one_more)
  x_legal = GreaterOrEqual (x, none)
  x_in_width = Less (x, p_width)
  x_in_p = And (x_legal, x_in_width)
  x_at = Where (x_in_p, x, none)
  x_index = Unsqueeze (x_at, i2)
  p_raw = GatherElements <axis = 2> (p_weights, x_index)
  p_weight = Squeeze (p_raw, i2)
  p_weight_64 = Cast <to = 11> (p_weight)
  p_prob = Div (p_weight_64, p_total)
  p_x = Where (x_in_p, p_prob, nothing_64)
  x_in_q_width = Less (x, q_width)
  x_in_q = And (x_legal, x_in_q_width)
  y_at = Where (x_in_q, x, none)
  y_index = Unsqueeze (y_at, i2)
  q_raw = GatherElements <axis = 2> (q_weights, y_index)
  q_weight = Squeeze (q_raw, i2)
  q_weight_64 = Cast <to = 11> (q_weight)
  q_prob = Div (q_weight_64, q_total)
  q_x = Where (x_in_q, q_prob, nothing_64)

  l_64 = Cast <to = 11> (lenience)
  l = Unsqueeze (l_64, i1)
  drawable = Greater (q_x, nothing_64)
  u_l = Mul (uniforms, l)
  left = Mul (u_l, q_x)
  below = Less (left, p_x)
  stands_sampled = And (drawable, below)

  best = ArgMax <axis = 2, keepdims = 0> (p_scores)
  z_raw = GatherElements <axis = 2> (p_scores, x_index)
  z = Squeeze (z_raw, i2)
  z_64 = Cast <to = 11> (z)
  peak = Squeeze (p_peak, i2)
  peak_64 = Cast <to = 11> (peak)
  margin = Sub (z_64, peak_64)
  bound = Log (l)
  near = GreaterOrEqual (margin, bound)
  same = Equal (x, best)
  lenient = Less (l, unit_64)
  near_enough = And (lenient, near)
  near_or_best = Or (near_enough, same)
  stands_greedy = And (x_in_p, near_or_best)

  greedy_rows = Unsqueeze (greedy, i1)
  sampled_rows = Not (greedy_rows)
  by_argmax = And (greedy_rows, stands_greedy)
  by_ratio = And (sampled_rows, stands_sampled)
  stands = Or (by_argmax, by_ratio)
  rows = Shape <start = 1, end = 2> (x)
  count = Squeeze (rows)
  i = Range (none, count, one)
  gammas = Unsqueeze (gamma, i1)
  drafted = Less (i, gammas)
  goes_on = And (drafted, stands)
  ends_here = Not (goes_on)
  p_broken = IsNaN (p_total)
  stops = Or (ends_here, p_broken)
  stop_flags = Cast <to = 6> (stops)
  n = ArgMax <axis = 1, keepdims = 0> (stop_flags)

  at = Unsqueeze (n, i1)
  p_row = GatherND <batch_dims = 1> (p_weights, at)
  p_sum = GatherND <batch_dims = 1> (p_total, at)
  q_fitting = Slice (q_weights, i0, p_width, i2)
  q_fitting_width = Shape <start = 2> (q_fitting)
  q_missing = Sub (p_width, q_fitting_width)
  pads_start = Constant <value_ints = [0, 0, 0, 0, 0]> ()
  pads = Concat <axis = 0> (pads_start, q_missing)
  q_padded = Pad (q_fitting, pads)
  q_found = GatherND <batch_dims = 1> (q_padded, at)
  q_sum = GatherND <batch_dims = 1> (q_total, at)
  corrects = Less (n, gamma)
  corrects_row = Unsqueeze (corrects, i1)
  q_row = Where (corrects_row, q_found, nothing)
  q_over_p = Div (q_sum, p_sum)
  factor_64 = Where (corrects, q_over_p, unit_64)
  factor_each = Cast <to = 1> (factor_64)
  factor = Unsqueeze (factor_each, i1)
  p_scaled = Mul (p_row, factor)
  difference = Sub (p_scaled, q_row)
  rest = Relu (difference)
  rest_64 = Cast <to = 11> (rest)
  rest_sum = ReduceSum <keepdims = 1> (rest_64, i1)
  has_rest = Greater (rest_sum, nothing_64)
  chosen = Where (has_rest, rest, p_row)
  chosen_64 = Cast <to = 11> (chosen)
  cumulative = CumSum (chosen_64, one)
  whole = Gather <axis = 1> (cumulative, last)
  u = Gather <axis = 1> (uniforms, last)
  threshold = Mul (u, whole)
  not_yet = LessOrEqual (cumulative, threshold)
  not_yet_64 = Cast <to = 7> (not_yet)
  crossing = ReduceSum <keepdims = 0> (not_yet_64, i1)
  adds_later = Less (cumulative, whole)
  adds_later_64 = Cast <to = 7> (adds_later)
  last_that_adds = ReduceSum <keepdims = 0> (adds_later_64, i1)
  drawn = Min (crossing, last_that_adds)
  best_token = GatherND <batch_dims = 1> (best, at)
  next = Where (greedy, best_token, drawn)

  p_statuses = outrider.RowStatus (p_logits, p_total)
  q_statuses = outrider.RowStatus (q_logits, q_total)
  p_status = GatherND <batch_dims = 1> (p_statuses, at)
  q_found_status = GatherND <batch_dims = 1> (q_statuses, at)
  ok = Constant <value = int32 {0}> ()
  bad_parameter = Constant <value = int32 {2}> ()
  samples = Not (greedy)
  reads_q = And (samples, corrects)
  q_status = Where (reads_q, q_found_status, ok)
  p_fine = Equal (p_status, ok)
  row_status = Where (p_fine, q_status, p_status)
  minus_one = Constant <value_int = -1> ()
  sits_out = Less (gamma, none)
  taken_status = Where (sits_out, ok, row_status)
  t_low = Constant <value_float = 1e-7> ()
  t_high = Constant <value_float = 1e7> ()
  t_above = GreaterOrEqual (temperature, t_low)
  t_below = LessOrEqual (temperature, t_high)
  t_between = And (t_above, t_below)
  t_legal = Or (greedy, t_between)
  l_above = Greater (lenience, nothing)
  l_below = LessOrEqual (lenience, unit)
  l_legal = And (l_above, l_below)
  gamma_above = GreaterOrEqual (gamma, minus_one)
  gamma_below = Less (gamma, rows)
  gamma_legal = And (gamma_above, gamma_below)
  both_legal = And (t_legal, l_legal)
  legal = And (both_legal, gamma_legal)
  status = Where (legal, taken_status, bad_parameter)
  fine = Equal (status, ok)
  takes_part = Not (sits_out)
  has_token = And (fine, takes_part)
  token = Where (has_token, next, minus_one)
  count_accepted = Where (has_token, n, none)
  accepted = Cast <to = 6> (count_accepted)
}
"""

# TensorRT's parser looks the plugin up by plugin_namespace and plugin_version; without the
# namespace on the node, parsers from 10.15 on would use this body even if the plugin is present.
_VERIFY = """
Verify <plugin_namespace: string = "outrider", plugin_version: string = "1",
        rule: string = "token", vocab_size: int = 2147483647>
  (target_logits, draft_logits, drafts, seed, position, gamma, temperature, lenience)
  => (accepted, token, status)
{
  rows = Shape <start = 1, end = 2> (target_logits)
  uniforms = outrider.Uniforms (seed, position, rows)
  accepted, token, status = outrider.Judge <vocab_size: int = @vocab_size>
    (target_logits, draft_logits, drafts, uniforms, gamma, temperature, lenience)
}
"""

_BODIES = (_MULTIPLY, _PHILOX, _UNIFORMS, _STATUS, _WEIGHTS, _JUDGE, _VERIFY)


def functions() -> list[onnx.FunctionProto]:
    """The model-local functions, each after those that it calls; `Verify` is the last.

    Verify(target_logits [B, K, V], draft_logits [B, K - 1, V'] of the same type (float32, float16
    or bfloat16), drafts int64 [B, K - 1], seed int64 [B] (the bits of an unsigned one), position
    int64 [B] (absolute index of the round's first token), gamma int64 [B] (0 .. K - 1; -1: the
    slot does not take part), temperature float32 [B], lenience float32 [B]) returns accepted int32
    [B], token int64 [B] and status int32 [B]: the verdict of plugins/include/outrider.h.
    vocab_size: columns beyond it are not read. A slot with a status other than 0 gets token -1.
    """
    header = f'<domain: "{DOMAIN}", opset_import: ["": {OPSET}, "{DOMAIN}": 1]>'
    return [onnx.parser.parse_function(header + body) for body in _BODIES]
