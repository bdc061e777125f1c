// The algorithm of outrider_sampling.h on a GPU: four kernels a round, all of whose inputs that vary
// from round to round (logits, drafts, slots) are in device memory. No allocation, no host
// synchronisation, no atomics: a captured graph replays them. Compiled by NVRTC (no toolkit) or nvcc,
// with -fmad=false. Tile sums have the bits of the CPU library.
//
//   outrider_scan     grid (tiles, gamma + 1, B)   maximum and sum of each tile, for T = 0 the argmax
//   outrider_decide   grid (B)                     tiles combined in order, the accept tests
//   outrider_residual grid (tiles, B)              tile sums of max(0, p - q), for one row of each slot
//   outrider_choose   grid (B)                     the tile where the sum crosses u, scanned alone
//
// First version: token rule (with lenience), greedy and sigmoid; no filters, no penalties, no block
// rule: a slot that asks for them gets OUTRIDER_BAD_PARAMETER.
#include "outrider_sampling.h"

using namespace outrider;

constexpr int THREADS = 128;
constexpr int EACH = TILE / THREADS;

// What a launch is given: addresses, which a graph keeps, of memory whose contents vary.
struct outrider_device_round {
  outrider_logits target, draft;
  const outrider_slot* slots;     // [B]
  const int64_t* drafts;          // [B, width]
  const outrider_row* draft_rows; // [B, width], from the draft's draw
  outrider_verdict* verdicts;     // [B]
  double* ratios;                 // [B, width]
  outrider_row* rows;             // [B, width + 1]; scratch from here on
  float* tile_max;                // [B, width + 1, tiles]
  float* tile_sum;                // [B, width + 1, tiles], of exponentials below the tile's maximum
  int32_t* tile_token;            // [B, width + 1, tiles], the argmax
  double* mass;                   // [B, width + 1, tiles], of exponentials below the row's maximum
  double* rest;                   // [B, tiles], of the residual
  Decision* decisions;            // [B]
  int32_t width, tiles;
};

namespace {

using Call = outrider_device_round;

__device__ const unsigned char* row_of(const outrider_logits& logits, int slot, int row) {
  return static_cast<const unsigned char*>(logits.data) + slot * logits.slot_stride +
         row * logits.row_stride;
}

// Thread t holds elements t, t + 128, ... of a tile: neighbours read neighbours.
__device__ int id_of(int tile, int j) {
  return tile * TILE + j * THREADS + static_cast<int>(threadIdx.x);
}

__device__ void load_tile(const outrider_logits& logits, int slot, int row, int tile,
                          float z[EACH]) {
  const unsigned char* data = row_of(logits, slot, row);
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int id = id_of(tile, j);
    z[j] = id < logits.vocab_size ? load(data, logits.dtype, id) : -INF;
  }
}

struct Add {
  __device__ static float of(float a, float b) { return a + b; }
};
struct Larger {
  __device__ static float of(float a, float b) { return a > b ? a : b; }
};
struct Smaller {
  __device__ static int of(int a, int b) { return a < b ? a : b; }
};

// 512, 256, ... 1: the order in which the CPU halves a tile. The result is every thread's.
template <class Op, class T> __device__ T halve(const T v[EACH], T* shared) {
  const int t = static_cast<int>(threadIdx.x);
  const T a = Op::of(Op::of(v[0], v[4]), Op::of(v[2], v[6]));
  const T b = Op::of(Op::of(v[1], v[5]), Op::of(v[3], v[7]));
  shared[t] = Op::of(a, b);
  __syncthreads();
  if (t < 32) {
    T x = Op::of(Op::of(shared[t], shared[t + 64]), Op::of(shared[t + 32], shared[t + 96]));
    for (int h = 16; h > 0; h /= 2) x = Op::of(x, __shfl_down_sync(0xFFFFFFFFu, x, h));
    if (t == 0) shared[0] = x;
  }
  __syncthreads();
  const T result = shared[0];
  __syncthreads();
  return result;
}

__device__ bool supported(const outrider_slot& slot) {
  return slot.rule != OUTRIDER_BLOCK && slot.top_k == 0 && !(slot.top_p < 1) &&
         !(slot.min_p > 0) && slot.repetition_penalty == 1 && slot.suppress_rows == 0;
}

// At temperature 0 the sums only tell whether a row is broken: any rate but 0, for -inf * 0 is NaN.
__device__ float sum_rate(float rate) { return rate == 0 ? 1.0f : rate; }

__device__ outrider_row shape_of(const outrider_slot& slot) {
  const float rate = slot.temperature == 0
                         ? 0.0f
                         : static_cast<float>(LOG2_E / static_cast<double>(slot.temperature));
  return {1, -INF, rate, -INF, 0, 0, -1, 1, 0};
}

// One warp combines the tiles of a row, summing in their order. NaN in the total: a broken row.
__device__ void combine(const Call& call, const outrider_slot& slot, int64_t row) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first = row * call.tiles;
  outrider_row shape = shape_of(slot);
  for (int k = lane; k < call.tiles; k += 32)
    shape.peak = Larger::of(shape.peak, call.tile_max[first + k]);
  for (int h = 16; h > 0; h /= 2)
    shape.peak = Larger::of(shape.peak, __shfl_xor_sync(0xFFFFFFFFu, shape.peak, h));
  const float base = shape.peak == -INF ? 0 : shape.peak, rate = sum_rate(shape.rate);
  for (int k = lane; k < call.tiles; k += 32)
    call.mass[first + k] = static_cast<double>(call.tile_sum[first + k]) *
                           static_cast<double>(exp2_of((call.tile_max[first + k] - base) * rate));
  __syncwarp();
  if (lane != 0) return;
  double total = 0;
#pragma unroll 1
  for (int k = 0; k < call.tiles; ++k) {
    if (slot.temperature == 0 && shape.token < 0 && call.tile_max[first + k] == shape.peak)
      shape.token = call.tile_token[first + k];
    total += call.mass[first + k];
  }
  shape.total = slot.temperature == 0 && !is_nan(total) ? 1 : total;
  call.rows[row] = shape;
}

// What decide_token asks for.
struct DeviceRound {
  const Call& call;
  const outrider_slot& slot;
  int b;
  int32_t status, row;

  __device__ bool shape(int i, outrider_row* shape) {
    *shape = call.rows[int64_t{b} * (call.width + 1) + i];
    row = i;
    if (is_nan(shape->total)) status = OUTRIDER_NAN; // or +inf: the host may look which
    else if (shape->peak == -INF) status = OUTRIDER_NO_TOKEN;
    return status == OUTRIDER_OK;
  }

  __device__ double accept_u(int i) const {
    return slot.temperature == 0 ? 0
                                 : uniform(slot.seed, slot.position + static_cast<uint32_t>(i),
                                           ACCEPT, lane_of(slot));
  }

  __device__ float logit(const outrider_logits& logits, int index, int i, int64_t id) const {
    return load(row_of(logits, index, i), logits.dtype, id);
  }

  __device__ bool probs(int i, double* p, double* q) {
    outrider_row p_row;
    if (!shape(i, &p_row)) return false;
    const int64_t at = int64_t{b} * call.width + i, token = call.drafts[at];
    const int id = static_cast<int>(token);
    const bool in_p = token >= 0 && token < call.target.vocab_size;
    const bool in_q = token >= 0 && token < call.draft.vocab_size;
    *p = 0;
    *q = 1;
    const float z = in_p ? logit(call.target, slot.index, i, token) : -INF;
    if (slot.temperature == 0) {
      *p = token == p_row.token ? 1 : 0;
      if (slot.lenience < 1 && in_p)
        *p = static_cast<double>(z) - static_cast<double>(p_row.peak) >= log(slot.lenience);
      return true;
    }
    const outrider_row& q_row = call.draft_rows[at];
    if (slot.rule == OUTRIDER_SIGMOID) {
      const Sigmoid s = sigmoid_of(slot);
      *p = in_p ? static_cast<double>(squash(z, id, p_row, s)) : 0;
      *q = in_q ? static_cast<double>(squash(logit(call.draft, b, i, token), id, q_row, s)) : 0;
      return true;
    }
    *p = in_p ? static_cast<double>(weight_of(z, id, p_row)) / p_row.total : 0;
    *q = static_cast<double>(q_row.weight) / q_row.total;
    return true;
  }
};

// max(0, p - q) of a tile, in units of q's weights.
__device__ void rest_tile(const Call& call, int b, int i, int tile, float w[EACH]) {
  const outrider_slot& slot = call.slots[b];
  const outrider_row p = call.rows[int64_t{b} * (call.width + 1) + i];
  const outrider_row q = call.draft_rows[int64_t{b} * call.width + i];
  const bool sigmoid = slot.rule == OUTRIDER_SIGMOID;
  const Sigmoid s = sigmoid_of(slot);
  const float factor = sigmoid ? 1.0f : static_cast<float>(q.total / p.total);
  float z[EACH], y[EACH];
  load_tile(call.target, slot.index, i, tile, z);
  load_tile(call.draft, b, i, tile, y); // -inf beyond a narrower draft: weight 0
#pragma unroll
  for (int j = 0; j < EACH; ++j) {
    const int id = id_of(tile, j);
    w[j] = sigmoid ? positive_part(squash(z[j], id, p, s), 1, squash(y[j], id, q, s))
                   : positive_part(weight_of(z[j], id, p), factor, weight_of(y[j], id, q));
  }
}

// Whether the slot's next token comes from a residual.
__device__ bool corrects(const Call& call, int b) {
  return call.slots[b].gamma >= 0 && call.verdicts[b].status == OUTRIDER_OK &&
         call.slots[b].temperature > 0 && call.decisions[b].residual;
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS) outrider_scan(const Call call) {
  __shared__ float shared[THREADS];
  __shared__ int shared_ids[THREADS];
  const int k = static_cast<int>(blockIdx.x), i = static_cast<int>(blockIdx.y);
  const int b = static_cast<int>(blockIdx.z);
  const outrider_slot& slot = call.slots[b];
  if (i > slot.gamma || !supported(slot)) return;
  const float rate = sum_rate(shape_of(slot).rate);
  float z[EACH], e[EACH];
  load_tile(call.target, slot.index, i, k, z);
  const float peak = halve<Larger>(z, shared);
  const float base = peak == -INF ? 0 : peak;
#pragma unroll
  for (int j = 0; j < EACH; ++j) e[j] = exp2_of((z[j] - base) * rate);
  const float sum = halve<Add>(e, shared);
  int token = 0;
  if (slot.temperature == 0) {
    int ids[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j) ids[j] = z[j] == peak ? id_of(k, j) : 0x7FFFFFFF;
    token = halve<Smaller>(ids, shared_ids);
  }
  if (threadIdx.x != 0) return;
  const int64_t at = (int64_t{b} * (call.width + 1) + i) * call.tiles + k;
  call.tile_max[at] = peak;
  call.tile_sum[at] = sum;
  call.tile_token[at] = token;
}

extern "C" __global__ void __launch_bounds__(THREADS) outrider_decide(const Call call) {
  const int b = static_cast<int>(blockIdx.x);
  const outrider_slot& slot = call.slots[b];
  const bool legal = supported(slot);
  if (threadIdx.x == 0)
    call.verdicts[b] = {-1, 0, 0, legal ? OUTRIDER_OK : OUTRIDER_BAD_PARAMETER,
                        OUTRIDER_TARGET, 0, 0};
  if (slot.gamma < 0 || !legal) return;
  for (int i = static_cast<int>(threadIdx.x) / 32; i <= slot.gamma; i += THREADS / 32)
    combine(call, slot, int64_t{b} * (call.width + 1) + i);
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceRound round = {call, slot, b, OUTRIDER_OK, 0};
  outrider_row last;
  Decision decision;
  outrider_verdict& verdict = call.verdicts[b];
  if (decide_token(round, slot.gamma, slot.lenience, call.ratios + int64_t{b} * call.width,
                   &decision) &&
      round.shape(decision.accepted, &last)) {
    verdict.accepted = decision.accepted;
    verdict.examined = decision.examined;
    call.decisions[b] = decision;
  } else {
    verdict.status = round.status;
    verdict.row = round.row;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) outrider_residual(const Call call) {
  __shared__ float shared[THREADS];
  const int k = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.y);
  if (!corrects(call, b)) return;
  float w[EACH];
  rest_tile(call, b, call.decisions[b].accepted, k, w);
  const float sum = halve<Add>(w, shared);
  if (threadIdx.x == 0)
    call.rest[int64_t{b} * call.tiles + k] = static_cast<double>(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) outrider_choose(const Call call) {
  __shared__ float weights[TILE];
  __shared__ double sums[THREADS];
  __shared__ double fraction;
  __shared__ int chosen, from_rest;
  const int b = static_cast<int>(blockIdx.x), t = static_cast<int>(threadIdx.x);
  const outrider_slot& slot = call.slots[b];
  if (slot.gamma < 0 || call.verdicts[b].status != OUTRIDER_OK) return;
  const int i = call.decisions[b].accepted;
  const int64_t row = int64_t{b} * (call.width + 1) + i;
  if (slot.temperature == 0) {
    if (t == 0) call.verdicts[b].token = call.rows[row].token;
    return;
  }
  if (t == 0) {
    const double u = uniform(slot.seed, slot.position, RESIDUAL, lane_of(slot));
    chosen = -1;
    if (corrects(call, b))
      chosen = choose_tile(call.rest + int64_t{b} * call.tiles, call.tiles, u, &fraction);
    from_rest = chosen >= 0; // a residual of nothing: p itself
    if (chosen < 0) chosen = choose_tile(call.mass + row * call.tiles, call.tiles, u, &fraction);
  }
  __syncthreads();
  float w[EACH];
  if (from_rest) {
    rest_tile(call, b, i, chosen, w);
  } else {
    load_tile(call.target, slot.index, i, chosen, w);
#pragma unroll
    for (int j = 0; j < EACH; ++j) w[j] = weight_of(w[j], id_of(chosen, j), call.rows[row]);
  }
#pragma unroll
  for (int j = 0; j < EACH; ++j) weights[j * THREADS + t] = w[j];
  __syncthreads();
  // 128 runs of 8 tokens; one thread finds the run, then the token in it.
  double sum = 0;
  for (int j = 0; j < EACH; ++j) sum += static_cast<double>(weights[t * EACH + j]);
  sums[t] = sum;
  __syncthreads();
  if (t != 0) return;
  double within = 0;
  const int run = choose_tile(sums, THREADS, fraction, &within);
  call.verdicts[b].token =
      chosen * TILE + run * EACH + choose_token(weights + run * EACH, EACH, within);
}
