// A slot's round on a GPU after the scan of its rows: the accept tests by one block, the final draw
// by one warp. The rules themselves are in outrider_sampling.h.
#ifndef OUTRIDER_DEVICE_ROUND_CUH
#define OUTRIDER_DEVICE_ROUND_CUH

#include "outrider_device_row.cuh"

namespace {

constexpr int MAX_ROWS = OUTRIDER_MAX_WIDTH + 1;

// Adds 1. What the block's threads wrote before their last barrier is visible to whoever reads a
// later number, and the reverse. Two fences would be sequentially consistent, which takes longer.
DEVICE uint32_t add_finished(uint32_t* finished) {
#if defined(__CUDA_ARCH__)
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(finished) : "memory");
  return before;
#else
  return atomicAdd(finished, 1u);
#endif
}

// Whether this is the last of `blocks` to finish, which may read what the others wrote. finished: 0
// before and after.
DEVICE bool last_block(uint32_t* finished, int blocks) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_finished(finished) == static_cast<unsigned>(blocks) - 1;
    if (last) *finished = 0;
  }
  __syncthreads();
  return last;
}

// The flags that a slot needs. Without branches, as is_valid.
DEVICE int32_t needed_flags(const outrider_slot& slot, bool verifies) {
  const bool random = slot.temperature != 0;
  const bool filters = random & ((slot.top_k > 0) | (slot.top_p < 1) | (slot.min_p > 0));
  const bool penalties = has_penalty(slot) | has_suppression(slot);
  const bool blockwise = random & verifies & (slot.rule == OUTRIDER_BLOCK);
  const bool coupled = random & (slot.rule == OUTRIDER_COUPLED);
  return filters * OUTRIDER_DEVICE_FILTERS | penalties * OUTRIDER_DEVICE_PENALTIES |
         blockwise * OUTRIDER_DEVICE_BLOCK | coupled * OUTRIDER_DEVICE_COUPLED;
}

// Whether this plan supports the slot. Only the CPU library supports counts of ids and biases.
DEVICE bool is_supported(const Call& call, const outrider_slot& slot, bool verifies) {
  return is_valid(slot, call.width) & (slot.frequency_penalty == 0) &
         (slot.presence_penalty == 0) & (slot.bias_length == 0) &
         ((needed_flags(slot, verifies) & ~call.flags) == 0);
}

DEVICE outrider_row* row_at(const Call& call, int b, int r) {
  return call.rows + static_cast<int64_t>(b) * call.row_count + r;
}
DEVICE int64_t tiles_at(const Call& call, int b, int r) {
  return (static_cast<int64_t>(b) * call.row_count + r) * call.tile_count;
}
DEVICE outrider_device_bins* bins_at(const Call& call, int b, int r) {
  return call.bins + static_cast<int64_t>(b) * call.row_count + r;
}
DEVICE double* residual_at(const Call& call, int b, int y) {
  return call.residual + (static_cast<int64_t>(b) * call.residual_count + y) * call.tile_count;
}

// A verification without the rows of the draw shapes the draft's rows itself, after the target's.
DEVICE bool shapes_draft(const Call& call) {
  return call.draft_rows == nullptr && call.draft.data != nullptr;
}
DEVICE outrider_row draft_shape(const Call& call, int b, int i) {
  return shapes_draft(call) ? load_uncached(row_at(call, b, call.width + 1 + i))
                            : call.draft_rows[static_cast<int64_t>(b) * call.width + i];
}
DEVICE bool point_draft(const Call& call, const outrider_slot& slot) {
  return is_deterministic(slot) || call.draft.data == nullptr;
}

// The number of rows that a draw or a verification needs; 0 if the slot has no part in it.
template <bool DRAW> DEVICE int rows_of(const Call& call, const outrider_slot& slot) {
  if (DRAW) return call.step < slot.gamma ? 1 : 0;
  return slot.gamma + 1 + (shapes_draft(call) && !is_deterministic(slot) ? slot.gamma : 0);
}

// Number n of those rows: the target's, then the draft's. r: its index in the workspace.
struct NeededRow {
  int r;
  Row row;
};
template <bool DRAW>
DEVICE NeededRow needed_row(const Call& call, const outrider_slot& slot, int b, int n) {
  if (DRAW) return {0, drawn_row(call, slot, b, call.step)};
  if (n <= slot.gamma) return {n, target_row(call, slot, b, n)};
  const int i = n - slot.gamma - 1;
  return {call.width + 1 + i, draft_row(call, slot, b, i)};
}

// Calls visit(row, k) with this warp's tiles of these rows. The blocks of a grid are as many as run
// at once, and each takes several tiles if there are more.
template <bool DRAW, class Visit>
DEVICE void each_tile(const Call& call, const outrider_slot& slot, int b, const Visit& visit) {
  const int tiles = DRAW                ? tiles_of(call.draft.vocab_size)
                    : shapes_draft(call) ? call.tile_count
                                         : tiles_of(call.target.vocab_size);
  const int all = rows_of<DRAW>(call, slot) * tiles, step = static_cast<int>(gridDim.x) * warps();
#pragma unroll 1
  for (int at = block_x() * warps() + warp_id(); at < all; at += step) {
    const int n = at / tiles, k = at - n * tiles;
    const NeededRow row = needed_row<DRAW>(call, slot, b, n);
    if (k * TILE < row.row.width) visit(row, k);
  }
}

DEVICE double uniform_of(const Call& call, const outrider_slot& slot, int b, int i,
                         uint32_t purpose) {
  if (is_deterministic(slot)) return 0;
  if (call.uniforms != nullptr)
    return call.uniforms[static_cast<int64_t>(b) * (call.width + 1) +
                         (purpose == RESIDUAL ? call.width : i)];
  return uniform(slot.seed, slot.position + static_cast<uint32_t>(i), purpose, lane_of(slot));
}

// --- the accept tests -------------------------------------------------------------------------

// The inputs of the accept test at one position. They are computed for all positions at once, one
// thread each: in sequence, they would wait for memory gamma times.
struct Position {
  double p, q, u;
  int32_t status, model;
};

DEVICE Position position_of(const Call& call, const outrider_slot& slot, int b, int i) {
  // All loads that do not depend on others come first.
  const bool drafted = i < slot.gamma;
  const bool shaped = shapes_draft(call) && !is_deterministic(slot);
  const bool has_row = drafted && (call.draft_rows != nullptr || shaped);
  const outrider_row p_row = load_uncached(row_at(call, b, i));
  const outrider_row q_row = has_row ? draft_shape(call, b, i) : p_row;
  const int64_t token = drafted ? call.drafts[static_cast<int64_t>(b) * call.width + i] : -1;
  Position at = {0, 1, 0, p_row.status, OUTRIDER_TARGET};
  if (at.status != OUTRIDER_OK || !drafted) return at;
  if (q_row.status != OUTRIDER_OK) { // without a row, the target's
    at.status = q_row.status, at.model = OUTRIDER_DRAFT;
    return at;
  }
  const int id = static_cast<int>(token);
  const Row target = target_row(call, slot, b, i);
  const bool in_p = token >= 0 && token < target.width;
  const float z = in_p ? logit_at(target, token) : -INF;
  if (is_deterministic(slot)) {
    at.p = token == p_row.token ? 1 : 0;
    // Accept if p(x) >= l max p, computed from the logits.
    if (slot.lenience < 1 && in_p)
      at.p = static_cast<double>(z) - static_cast<double>(p_row.peak) >= log(slot.lenience) ? 1 : 0;
    return at;
  }
  at.u = uniform_of(call, slot, b, i, ACCEPT);
  const bool sigmoid = slot.rule == OUTRIDER_SIGMOID;
  const Sigmoid s = sigmoid_of(slot);
  if (!sigmoid && in_p) at.p = static_cast<double>(weight_of(z, id, p_row)) / p_row.total;
  if (call.draft.data == nullptr) {
    if (sigmoid) at.status = OUTRIDER_NO_DRAFT_LOGITS, at.model = OUTRIDER_DRAFT;
    return at;
  }
  const Row draft = draft_row(call, slot, b, i);
  const bool in_q = token >= 0 && token < draft.width;
  if (!sigmoid && q_row.token == token) {
    at.q = static_cast<double>(q_row.weight) / q_row.total;
    return at;
  }
  const float y = in_q ? logit_at(draft, token) : -INF;
  if (sigmoid) {
    at.p = in_p ? static_cast<double>(sigmoid_value(z, id, p_row, s)) : 0;
    at.q = in_q ? static_cast<double>(sigmoid_value(y, id, q_row, s)) : 0;
  } else {
    at.q = in_q ? static_cast<double>(weight_of(y, id, q_row)) / q_row.total : 0;
  }
  return at;
}

// Round for decide_token, block_prefixes and block_tau. masses: of residuals from row `first` on.
struct DeviceRound {
  const Position* positions;
  const double* masses;
  int first;
  Position failed;
  int row;

  DEVICE bool probs(int i, double* p, double* q) {
    failed = positions[i];
    row = i;
    *p = failed.p;
    *q = failed.q;
    return failed.status == OUTRIDER_OK;
  }
  DEVICE double accept_u(int i) const { return positions[i].u; }
  DEVICE bool residual_mass(int i, double, double* mass) const {
    *mass = masses != nullptr ? masses[i - first] : 0; // null at temperature 0, where P is 0 or 1
    return true;
  }
};

// The accept tests of a slot with shaped rows, by one block. The slot's state holds what remains.
__device__ __noinline__ void decide(const Call& call, int b) {
  __shared__ Position positions[MAX_ROWS];
  const outrider_slot& slot = call.slots[b];
  const int gamma = slot.gamma;
  for (int i = static_cast<int>(threadIdx.x); i <= gamma; i += static_cast<int>(blockDim.x))
    positions[i] = position_of(call, slot, b, i);
  __syncthreads();
  if (threadIdx.x != 0) return;

  outrider_device_state& state = call.states[b];
  outrider_verdict& verdict = call.verdicts[b];
  double* ratios = call.ratios + static_cast<int64_t>(b) * call.width;
  const bool block_rule = slot.rule == OUTRIDER_BLOCK, deterministic = is_deterministic(slot);
  DeviceRound round = {positions, nullptr, 0, positions[0], 0};
  Decision decision = {gamma, gamma, false, 1.0};
  bool all = true;
  bool valid = block_rule ? block_prefixes(round, gamma, state.prefix, ratios, &all)
                          : decide_token(round, gamma, slot.lenience, ratios, &decision);
  if (valid && block_rule && !all && deterministic)
    valid = block_tau(round, gamma, state.prefix, &decision);
  const bool pending = block_rule && !all && !deterministic;
  if (valid && !pending) {
    double p, q;
    valid = round.probs(decision.accepted, &p, &q); // the row that the next token comes from
  }
  state.draws = valid && !deterministic;
  if (!valid) {
    verdict = verdict_of(round.failed.status, round.failed.model, round.row);
    return;
  }
  verdict = no_verdict();
  if (deterministic) verdict.token = load_uncached(row_at(call, b, decision.accepted)).token;
  state.residual = pending || decision.residual;
  state.first = state.last = decision.accepted;
  if (pending) {
    // The rows at which the search for tau may end: back to the last one at which it must end.
    state.last = gamma - 1;
    while (block_fails(round, state.last, state.prefix[state.last])) --state.last;
    state.first = state.last;
    while (state.prefix[state.first] != 1) --state.first;
  } else {
    verdict.accepted = decision.accepted;
    verdict.examined = decision.examined;
  }
}

// --- residuals and draws ----------------------------------------------------------------------

// Not unrolled, to avoid 64 copies of two divisions; its arrays are in local memory.
DEVICE void sigmoid_residual(const outrider_slot& slot, const outrider_row& p,
                             const outrider_row& q, int shift, int k, float w[PER_LANE],
                             const float v[PER_LANE]) {
  const Sigmoid s = sigmoid_of(slot);
  float a[PER_LANE], c[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j) a[j] = w[j], c[j] = v[j];
#pragma unroll 1
  for (int j = 0; j < PER_LANE; ++j) {
    const int id = k * TILE + element(j, shift);
    a[j] = positive_part(sigmoid_value(a[j], id, p, s), 1, sigmoid_value(c[j], id, q, s));
  }
#pragma unroll
  for (int j = 0; j < PER_LANE; ++j) w[j] = a[j];
}

// Computes the weights of tile k of p or, if `from_residual`, of max(0, scale p - q) in units of
// q's weights: if p and q are the same row, the factor is exactly 1 and the residual exactly 0.
// Without a draft's distribution, q is a point mass on its token. Returns the shift.
template <bool GENERAL>
DEVICE int next_tile(const Call& call, const outrider_slot& slot, int b, int i, bool from_residual,
                     double scale, int k, float w[PER_LANE]) {
  const outrider_row p = *row_at(call, b, i);
  const Row target = target_row(call, slot, b, i), draft = draft_row(call, slot, b, i);
  const bool subtracts = from_residual && !point_draft(call, slot);
  int shift = shift_of(target, k);
  if (subtracts && shift_of(draft, k) != shift) shift = 0;
  float v[PER_LANE];
  load_tile<GENERAL>(target, k, shift, w);
  if (subtracts) load_tile<GENERAL>(draft, k, shift, v); // -inf beyond a narrower draft: q = 0
  outrider_row q = p;
  if (subtracts) q = draft_shape(call, b, i);
  if (subtracts && slot.rule == OUTRIDER_SIGMOID) {
    sigmoid_residual(slot, p, q, shift, k, w, v);
    return shift;
  }
  weigh<GENERAL>(w, shift, k, p);
  if (subtracts) {
    const float factor = static_cast<float>(scale * (q.total / p.total));
    weigh<GENERAL>(v, shift, k, q);
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j) w[j] = positive_part(w[j], factor, v[j]);
  } else if (from_residual) {
    const int64_t token = call.drafts[static_cast<int64_t>(b) * call.width + i];
#pragma unroll
    for (int j = 0; j < PER_LANE; ++j)
      if (k * TILE + element(j, shift) == token) w[j] = 0; // scale p(x) <= 1 = q(x)
  }
  return shift;
}

// Whether tile k of the residual equals that of p, because q is a point mass in another tile.
DEVICE bool residual_is_p(const Call& call, const outrider_slot& slot, int b, int i, int k) {
  if (!point_draft(call, slot)) return false;
  const int64_t token = call.drafts[static_cast<int64_t>(b) * call.width + i];
  return token < 0 || token / TILE != k || token >= call.target.vocab_size;
}

// The residual's mass in units of a normalised q.
DEVICE double residual_mass_at(const Call& call, const outrider_slot& slot, int b, int y,
                               double scale) {
  const int i = call.states[b].first + y;
  const double* residual = residual_at(call, b, y);
  const double sum = total_of<Warp>([residual](int k) { return load_uncached(residual + k); },
                                    tiles_of(call.target.vocab_size));
  const double unit = point_draft(call, slot) ? row_at(call, b, i)->total / scale
                                              : draft_shape(call, b, i).total;
  return sum / unit;
}

// Writes the outputs of a draw, by one thread.
DEVICE void put_draft(const Call& call, int b, int step, const outrider_row& shape) {
  const int64_t at = static_cast<int64_t>(b) * call.width + step;
  const int32_t status = shape.status;
  call.draft_rows[at] = shape; // even if broken: on a GPU, the verification reports it
  call.drafts[at] = status == OUTRIDER_OK ? shape.token : -1;
  if (call.verdicts != nullptr)
    call.verdicts[b] =
        status == OUTRIDER_OK ? no_verdict() : verdict_of(status, OUTRIDER_DRAFT, step);
}

struct DrawMemory {
  TileWeights weights;
  TileSums mass;
};

// Draws the draft token, by one warp, from the row's shape and tile masses, into the outputs.
template <bool GENERAL>
DEVICE void draw_draft(const Call& call, const outrider_slot& slot, int b, int step,
                       outrider_row shape, DrawMemory& memory) {
  if (shape.status == OUTRIDER_OK && slot.temperature > 0) {
    const double u = call.uniforms != nullptr
                         ? call.uniforms[static_cast<int64_t>(b) * call.width + step]
                         : uniform(slot.seed, slot.position + static_cast<uint32_t>(step), DRAFT,
                                   lane_of(slot));
    const Row row = drawn_row(call, slot, b, step);
    double fraction = 0;
    const int k = memory.mass.choose(call.mass + tiles_at(call, b, 0), tiles_of(row.width), u,
                                     &fraction);
    const int shift = shift_of(row, k);
    float w[PER_LANE];
    load_tile<GENERAL>(row, k, shift, w);
    weigh<GENERAL>(w, shift, k, shape);
    const int e = memory.weights.choose(w, shift, fraction);
    shape.token = k * TILE + e;
    shape.weight = memory.weights.w[TileWeights::at(e)];
  }
  if (lane_id() == 0) put_draft(call, b, step, shape);
}

} // namespace
#endif
