// The algorithm of outrider_sampling.h on a GPU: the kernels of the plans in outrider_device.h. All
// inputs that vary from round to round (logits, drafts, slots) are in device memory, and there is
// no allocation, no host synchronisation and no atomic operation whose order matters, so a captured
// graph can replay the launches. Compiled by NVRTC (no toolkit) or nvcc, with -fmad=false. The
// results are bitwise those of the CPU library.
#include "outrider_device_couple.cuh"
#include "outrider_device_filter.cuh"
#include "outrider_device_bookkeeping.cuh"

namespace {

constexpr int THREADS = outrider_device::WARPS * LANES;
constexpr int FILTER_THREADS = outrider_device::FILTER_WARPS * LANES;

DEVICE bool first_thread() {
  return blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
}

// Scans this block's tiles of a slot's rows.
template <bool DRAW, bool GENERAL>
DEVICE void scan_rows(const Call& call, const outrider_slot& slot, int b) {
  const float rate = shape_of(slot).rate;
  each_tile<DRAW>(call, slot, b, [&](const NeededRow& row, int k) {
    if (GENERAL && k == 0 && call.bins != nullptr) {
      outrider_device_bins& bins = *bins_at(call, b, row.r);
      for (int i = lane_id(); i < outrider_device::BINS; i += LANES) bins.sums[i] = 0;
      bins.finished_blocks = 0;
    }
    const outrider_device_tile tile = scan_tile<GENERAL>(row.row, k, rate);
    if (lane_id() == 0) call.tiles[tiles_at(call, b, row.r) + k] = tile;
  });
}

// Whether this is the slot's last block of a grid whose blocks all take part.
DEVICE bool last_block(const Call& call, int b) {
  return last_block(call.finished_blocks + b, static_cast<int>(gridDim.x));
}

// --- verification -----------------------------------------------------------------------------

// Whether the slot has work for a block. If not, its first block writes the verdict.
DEVICE bool takes_part(const Call& call, const outrider_slot& slot, int b) {
  const bool supported = is_supported(call, slot, true);
  if (supported && slot.gamma >= 0) return true;
  if (first_thread()) {
    call.states[b].draws = 0;
    call.verdicts[b] =
        supported ? no_verdict() : verdict_of(OUTRIDER_BAD_PARAMETER, OUTRIDER_TARGET, 0);
  }
  return false;
}

template <bool GENERAL> DEVICE void verify_scan(const Call& call) {
  const int b = block_z();
  const outrider_slot& slot = call.slots[b];
  if (!takes_part(call, slot, b)) return;
  scan_rows<false, GENERAL>(call, slot, b);
  if (!last_block(call, b)) return;
  for (int n = warp_id(); n < rows_of<false>(call, slot); n += warps()) {
    const NeededRow made = needed_row<false>(call, slot, b, n);
    const int64_t at = tiles_at(call, b, made.r);
    const outrider_row shape =
        combine_tiles(slot, call.tiles + at, tiles_of(made.row.width), call.mass + at);
    if (lane_id() == 0) *row_at(call, b, made.r) = shape;
  }
  constexpr int32_t LATER = GENERAL ? OUTRIDER_DEVICE_FILTERS | OUTRIDER_DEVICE_COUPLED
                                    : OUTRIDER_DEVICE_COUPLED;
  if ((call.flags & LATER) != 0) return;
  __syncthreads();
  decide(call, b);
}

// The accept tests of the block rule that need the residuals' masses, by one block.
DEVICE void find_tau(const Call& call, const outrider_slot& slot, int b, Decision* decision) {
  __shared__ double masses[OUTRIDER_MAX_WIDTH];
  __shared__ Position positions[MAX_ROWS]; // their uniforms
  const outrider_device_state& state = call.states[b];
  for (int y = warp_id(); y <= state.last - state.first; y += warps()) {
    const double mass = residual_mass_at(call, slot, b, y, state.prefix[state.first + y]);
    if (lane_id() == 0) masses[y] = mass;
  }
  for (int i = static_cast<int>(threadIdx.x); i < slot.gamma; i += static_cast<int>(blockDim.x))
    positions[i].u = uniform_of(call, slot, b, i, ACCEPT);
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceRound round = {positions, masses, state.first, positions[0], 0};
  block_tau(round, slot.gamma, state.prefix, decision);
  call.verdicts[b].accepted = decision->accepted;
  call.verdicts[b].examined = slot.gamma;
}

template <bool GENERAL> DEVICE void verify_rest(const Call& call) {
  __shared__ TileWeights weights;
  __shared__ TileSums held;
  __shared__ Decision decision;
  const int b = block_z(), y = block_y(), tiles = tiles_of(call.target.vocab_size);
  const outrider_slot& slot = call.slots[b];
  const outrider_device_state& state = call.states[b];
  if (!state.draws) return;
  const bool block_rule = slot.rule == OUTRIDER_BLOCK;
  const int first = state.first, rows = state.last - first + 1;
  bool from_residual = state.residual != 0;
  // Without a residual, one warp draws immediately from p.
  if (from_residual ? y >= rows : block_x() != 0 || y != 0 || warp_id() != 0) return;
  int i = first + y, k = block_x() * warps() + warp_id();
  double scale = block_rule ? state.prefix[i] : 1.0, fraction = 0;
  // First pass: the sum of tile k. Second pass, in the slot's last block: a token drawn from it.
#pragma unroll 1
  for (bool drawing = !from_residual;; drawing = true) {
    if (drawing) {
      const double u = uniform_of(call, slot, b, 0, RESIDUAL);
      const double* sums =
          from_residual ? residual_at(call, b, i - first) : call.mass + tiles_at(call, b, i);
      for (;;) {
        held.load(sums, tiles);
        k = held.choose(sums, tiles, u, &fraction);
        if (k >= 0 || !from_residual) break;
        from_residual = false; // an empty residual: p itself
        sums = call.mass + tiles_at(call, b, i);
      }
    }
    double sum = 0;
    if (!drawing && k < tiles && residual_is_p(call, slot, b, i, k)) {
      sum = call.mass[tiles_at(call, b, i) + k];
    } else if (k < tiles) {
      float w[PER_LANE];
      const int shift = next_tile<GENERAL>(call, slot, b, i, from_residual, scale, k, w);
      if (drawing) {
        const int e = weights.choose(w, shift, fraction);
        if (lane_id() == 0) call.verdicts[b].token = static_cast<int64_t>(k) * TILE + e;
        return;
      }
      sum = static_cast<double>(tile_sum(w, shift));
    }
    if (k < tiles && lane_id() == 0) residual_at(call, b, y)[k] = sum;
    if (!last_block(call.finished_blocks + b, static_cast<int>(gridDim.x) * rows)) return;
    if (block_rule) {
      find_tau(call, slot, b, &decision);
      __syncthreads();
      i = decision.accepted;
      scale = decision.scale;
    }
    if (warp_id() != 0) return;
  }
}

// --- the draft's draw -------------------------------------------------------------------------

DEVICE bool draws(const Call& call, const outrider_slot& slot, int b, int step) {
  const bool supported = is_supported(call, slot, false);
  if (supported && step < slot.gamma) return true;
  if (first_thread()) {
    if (!supported) call.drafts[static_cast<int64_t>(b) * call.width + step] = -1;
    if (call.verdicts != nullptr)
      call.verdicts[b] =
          supported ? no_verdict() : verdict_of(OUTRIDER_BAD_PARAMETER, OUTRIDER_DRAFT, step);
  }
  return false;
}

template <bool GENERAL> DEVICE void draw_scan(const Call& call) {
  __shared__ DrawMemory memory;
  const int b = block_z(), step = call.step;
  const outrider_slot& slot = call.slots[b];
  if (!draws(call, slot, b, step)) return;
  scan_rows<true, GENERAL>(call, slot, b);
  if (!last_block(call, b) || warp_id() != 0) return;
  const bool later =
      (GENERAL && (call.flags & OUTRIDER_DEVICE_FILTERS) != 0) || is_coupled(slot);
  const int64_t at = tiles_at(call, b, 0);
  const int tiles = tiles_of(call.draft.vocab_size);
  double* const mass = later || tiles > TileSums::MOST ? call.mass + at : memory.mass.held;
  const outrider_row shape = combine_tiles(slot, call.tiles + at, tiles, mass);
  __syncwarp();
  if (!later) draw_draft<GENERAL>(call, slot, b, step, shape, memory);
  else if (lane_id() == 0) *row_at(call, b, 0) = shape;
}

// --- filters and coupling ---------------------------------------------------------------------

template <bool DRAW> DEVICE void filter(const Call& call) {
  const int b = block_z();
  const outrider_slot& slot = call.slots[b];
  if (!is_supported(call, slot, !DRAW) || block_y() >= rows_of<DRAW>(call, slot)) return;
  const NeededRow row = needed_row<DRAW>(call, slot, b, block_y());
  filter_row(call, slot, row.row, b, row.r);
}

template <bool DRAW> DEVICE void sum_masses(const Call& call) {
  __shared__ DrawMemory memory;
  const int b = block_z();
  const outrider_slot& slot = call.slots[b];
  if (!is_supported(call, slot, !DRAW) || rows_of<DRAW>(call, slot) <= 0) return;
  const auto filtered = [&](const outrider_row& shape, const Row& row) {
    return shape.status == OUTRIDER_OK && has_filters(slot, row.width);
  };
  each_tile<DRAW>(call, slot, b, [&](const NeededRow& row, int k) {
    const int64_t at = tiles_at(call, b, row.r) + k;
    const float top = call.tiles[at].max; // not after the row's shape: it takes as long
    outrider_row shape = *row_at(call, b, row.r);
    if (!filtered(shape, row.row)) return;
    shape.min_weight = slot.min_p;
    double sum = 0;
    if (top >= shape.cut) {
      float w[PER_LANE];
      const int shift = shift_of(row.row, k);
      load_tile<true>(row.row, k, shift, w);
      weigh<true>(w, shift, k, shape);
      sum = static_cast<double>(tile_sum(w, shift));
    }
    if (lane_id() == 0) call.mass[at] = sum;
  });
  if (!last_block(call, b)) return;
  for (int n = warp_id(); n < rows_of<DRAW>(call, slot); n += warps()) {
    const NeededRow row = needed_row<DRAW>(call, slot, b, n);
    outrider_row shape = *row_at(call, b, row.r);
    const double* const mass = call.mass + tiles_at(call, b, row.r);
    const int tiles = tiles_of(row.row.width);
    if (DRAW) memory.mass.load(mass, tiles);
    if (filtered(shape, row.row)) {
      shape.min_weight = slot.min_p;
      shape.total = DRAW ? memory.mass.total(mass, tiles)
                         : total_of<Warp>([mass](int k) { return load_uncached(mass + k); }, tiles);
      if (lane_id() == 0) *row_at(call, b, row.r) = shape;
    }
    if (DRAW && !is_coupled(slot)) draw_draft<true>(call, slot, b, call.step, shape, memory);
  }
  if (DRAW || (call.flags & OUTRIDER_DEVICE_COUPLED) != 0) return;
  __syncthreads();
  decide(call, b);
}

template <bool DRAW> DEVICE void couple(const Call& call) {
  const int b = block_z();
  const outrider_slot& slot = call.slots[b];
  const int rows = rows_of<DRAW>(call, slot);
  if (!is_supported(call, slot, !DRAW) || rows <= 0) return;
  if (!is_coupled(slot)) {
    if (!DRAW && block_x() == 0) decide(call, b);
    return;
  }
  each_tile<DRAW>(call, slot, b, [&](const NeededRow& row, int k) {
    const outrider_row shape = *row_at(call, b, row.r);
    if (shape.status != OUTRIDER_OK) return;
    const int64_t at = tiles_at(call, b, row.r) + k;
    const auto index = static_cast<uint32_t>(DRAW ? call.step : row.r);
    const Least found =
        couple_tile(slot, slot.position + index, row.row, shape, k, call.tiles[at].max);
    if (lane_id() != 0) return;
    call.mass[at] = found.number;
    call.tiles[at].token = found.at;
  });
  if (!last_block(call, b)) return;
  for (int n = warp_id(); n < rows; n += warps()) {
    const NeededRow row = needed_row<DRAW>(call, slot, b, n);
    outrider_row shape = *row_at(call, b, row.r);
    const int64_t at = tiles_at(call, b, row.r);
    if (shape.status == OUTRIDER_OK)
      couple_row(row.row, call.tiles + at, call.mass + at, &shape);
    if (lane_id() != 0) continue;
    if (DRAW) put_draft(call, b, call.step, shape);
    else *row_at(call, b, row.r) = shape;
  }
  if (DRAW) return;
  __syncthreads();
  decide(call, b);
}

DEVICE void mark(const Call& call) {
  const int b = block_z();
  const outrider_slot& slot = call.slots[b];
  if (!is_valid(slot, call.width) || slot.gamma < 0) return;
  const int words = call.tile_count * LANES;
  for (int list = 0; list < 2; ++list) {
    if (!(list == 0 ? has_penalty(slot) : has_suppression(slot))) continue;
    uint32_t* const marks = call.marks + (static_cast<int64_t>(b) * 2 + list) * words;
    const int64_t* const ids = list == 0 ? slot.context : slot.suppress;
    const int count = list == 0 ? slot.context_length : slot.suppress_length;
    for (int i = static_cast<int>(threadIdx.x); i < words; i += static_cast<int>(blockDim.x))
      marks[i] = 0;
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += static_cast<int>(blockDim.x))
      if (ids[i] >= 0 && ids[i] / 32 < words) atomicOr(marks + ids[i] / 32, 1u << (ids[i] % 32));
  }
}

} // namespace

// The host looks for this name before it launches, because an image of another version would read
// other structures. (NVRTC does not export variables.)
#define OUTRIDER_NAME(version) outrider_interface_##version
#define OUTRIDER_INTERFACE(version) OUTRIDER_NAME(version)
static_assert(sizeof(outrider_device_call) == 208 && sizeof(outrider_bookkeeping) == 112 &&
                  sizeof(outrider_sequence) == 48 && sizeof(outrider_slot) == 136,
              "a new structure is a new OUTRIDER_ABI_VERSION");
extern "C" __global__ void OUTRIDER_INTERFACE(OUTRIDER_ABI_VERSION)() {}

// --- the kernels ------------------------------------------------------------------------------

// Name, launch bounds (threads and, for a number of registers, blocks), parameter, computation.
#define OUTRIDER_KERNELS(KERNEL)                                                                   \
  KERNEL(outrider_mark, (FILTER_THREADS), Call, mark)                                              \
  KERNEL(outrider_verify_scan, (THREADS, 4), Call, verify_scan<false>)                             \
  KERNEL(outrider_verify_scan_general, (THREADS), Call, verify_scan<true>)                         \
  KERNEL(outrider_verify_filter, (FILTER_THREADS), Call, filter<false>)                            \
  KERNEL(outrider_verify_mass, (THREADS, 3), Call, sum_masses<false>)                              \
  KERNEL(outrider_verify_couple, (THREADS), Call, couple<false>)                                   \
  KERNEL(outrider_verify_rest, (THREADS, 2), Call, verify_rest<false>)                             \
  KERNEL(outrider_verify_rest_general, (THREADS, 1), Call, verify_rest<true>)                      \
  KERNEL(outrider_draw_scan, (THREADS), Call, draw_scan<false>)                                    \
  KERNEL(outrider_draw_scan_general, (THREADS), Call, draw_scan<true>)                             \
  KERNEL(outrider_draw_filter, (FILTER_THREADS), Call, filter<true>)                               \
  KERNEL(outrider_draw_mass, (THREADS, 2), Call, sum_masses<true>)                                 \
  KERNEL(outrider_draw_couple, (THREADS), Call, couple<true>)                                      \
  KERNEL(outrider_begin, (1024), outrider_bookkeeping, begin_round)                                \
  KERNEL(outrider_feed, (1024), outrider_bookkeeping, feed_draft)                                  \
  KERNEL(outrider_commit, (1024), outrider_bookkeeping, commit_round)

#define OUTRIDER_DEFINE(name, bounds, Parameter, compute)                                          \
  extern "C" __global__ void __launch_bounds__ bounds name(                                        \
      const __grid_constant__ Parameter given) {                                                   \
    compute(given);                                                                                \
  }
OUTRIDER_KERNELS(OUTRIDER_DEFINE)
#undef OUTRIDER_DEFINE
