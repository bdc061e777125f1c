// One row of logits on a GPU. A warp processes a tile, with 32 of its logits in each lane's
// registers. Sums have the order of the CPU library and so the same bits.
#ifndef OUTRIDER_DEVICE_ROW_CUH
#define OUTRIDER_DEVICE_ROW_CUH

#include "outrider_device.h"
#include "outrider_sampling.h"

#define DEVICE __device__ __forceinline__

namespace {
using namespace outrider;
using Call = outrider_device_call;

constexpr int PER_LANE = TILE / LANES;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu; // a bit each

DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % LANES; }
DEVICE int warp_id() { return static_cast<int>(threadIdx.x) / LANES; }
DEVICE int warps() { return static_cast<int>(blockDim.x) / LANES; }
DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
DEVICE int block_z() { return static_cast<int>(blockIdx.z); }

// Loads what another block wrote, bypassing the L1 cache. T: a multiple of 8 bytes.
template <class T> DEVICE T load_uncached(const T* from) {
  constexpr int WORDS = sizeof(T) / 8;
  unsigned long long words[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    words[i] = __ldcg(reinterpret_cast<const unsigned long long*>(from) + i);
  T value;
  memcpy(&value, words, sizeof value);
  return value;
}

// One number per lane: the `Sums` of outrider_sampling.h.
struct Warp {
  double v;

  template <class At> DEVICE static Warp of(const At& at, int first, int n, int length) {
    const int start = lane_id() * length, end = start + length < n ? start + length : n;
    double sum = 0;
#pragma unroll 4
    for (int k = start; k < end; ++k) sum += at(first + k);
    return {sum};
  }
  DEVICE void add_below(int distance) {
    const double below = __shfl_up_sync(ALL_LANES, v, static_cast<unsigned>(distance));
    if (lane_id() >= distance) v += below;
  }
  DEVICE double at(int i) const { return __shfl_sync(ALL_LANES, v, i); }
  DEVICE uint32_t above(double x) const { return __ballot_sync(ALL_LANES, v > x); }
};

// Maps floats to integers of the same order; -0 is +0.
DEVICE uint32_t key_of(float z) {
  const uint32_t bits = as_bits(z + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
DEVICE float from_key(uint32_t key) {
  return as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// --- a tile in registers ----------------------------------------------------------------------

// The index in the tile of a lane's z[q]. A lane's vectors hold 2^shift neighbouring elements (16
// bytes, or one element), and the vectors of a warp are adjacent.
DEVICE int element(int q, int shift) {
  return ((q >> shift) << (shift + 5)) + (lane_id() << shift) + (q & ((1 << shift) - 1));
}

struct Row {
  const unsigned char* data;
  int dtype, width;
  // Of a processed row, else null: bit masks of the context and of suppressed ids. The round's
  // first `drafted` draft tokens are context too.
  const uint32_t *penalised, *suppressed;
  const int64_t* drafts;
  int drafted;
  float penalty;
};

DEVICE const unsigned char* tile_at(const Row& row, int k) {
  return row.data + static_cast<int64_t>(k) * TILE * element_size(row.dtype);
}

// 16 bytes at a time if the tile is complete and aligned.
DEVICE int shift_of(const Row& row, int k) {
  const bool scalar = (k + 1) * TILE > row.width ||
                      (reinterpret_cast<unsigned long long>(tile_at(row, k)) & 15) != 0;
  return scalar ? 0 : row.dtype == OUTRIDER_FLOAT32 ? 2 : 3;
}

// Loads the logits of tile k, -inf beyond the row's end. shift: shift_of(row, k), or 0.
DEVICE void load_raw(const Row& row, int k, int shift, float z[PER_LANE]) {
  const unsigned char* at = tile_at(row, k);
  if (shift == 0) {
    const int count = row.width - k * TILE, lane = lane_id();
    if (row.dtype == OUTRIDER_FLOAT32) {
      const float* values = reinterpret_cast<const float*>(at);
#pragma unroll
      for (int q = 0; q < PER_LANE; ++q)
        z[q] = lane + q * LANES < count ? __ldg(values + lane + q * LANES) : -INF;
      return;
    }
    const uint16_t* values = reinterpret_cast<const uint16_t*>(at);
    const uint16_t nothing = row.dtype == OUTRIDER_FLOAT16 ? 0xFC00 : 0xFF80; // -inf
    uint16_t half[PER_LANE];
#pragma unroll
    for (int q = 0; q < PER_LANE; ++q)
      half[q] = lane + q * LANES < count ? __ldg(values + lane + q * LANES) : nothing;
#pragma unroll
    for (int q = 0; q < PER_LANE; ++q)
      z[q] = row.dtype == OUTRIDER_FLOAT16 ? from_float16(half[q]) : from_bfloat16(half[q]);
    return;
  }
  const uint4* vectors = reinterpret_cast<const uint4*>(at) + lane_id();
  if (shift == 2) {
    uint4 raw[PER_LANE / 4];
#pragma unroll
    for (int r = 0; r < PER_LANE / 4; ++r) raw[r] = __ldg(vectors + r * LANES);
#pragma unroll
    for (int r = 0; r < PER_LANE / 4; ++r) {
      z[4 * r] = as_float(raw[r].x);
      z[4 * r + 1] = as_float(raw[r].y);
      z[4 * r + 2] = as_float(raw[r].z);
      z[4 * r + 3] = as_float(raw[r].w);
    }
    return;
  }
  uint4 raw[PER_LANE / 8];
#pragma unroll
  for (int r = 0; r < PER_LANE / 8; ++r) raw[r] = __ldg(vectors + r * LANES);
#pragma unroll
  for (int r = 0; r < PER_LANE / 8; ++r) {
    const uint32_t words[4] = {raw[r].x, raw[r].y, raw[r].z, raw[r].w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const uint16_t low = static_cast<uint16_t>(words[w]);
      const uint16_t high = static_cast<uint16_t>(words[w] >> 16);
      const bool binary16 = row.dtype == OUTRIDER_FLOAT16;
      z[8 * r + 2 * w] = binary16 ? from_float16(low) : from_bfloat16(low);
      z[8 * r + 2 * w + 1] = binary16 ? from_float16(high) : from_bfloat16(high);
    }
  }
}

// From a tile's bit mask, with a word of 32 ids in each lane, the bits of the lane's own elements.
DEVICE uint32_t bits_of_elements(uint32_t word, int shift) {
  uint32_t bits = 0;
  for (int q = 0; q < PER_LANE; q += 1 << shift) { // neighbours are in the same word
    const int e = element(q, shift);
    const uint32_t found = __shfl_sync(ALL_LANES, word, e / 32) >> (e % 32);
    bits |= (found & ((1u << (1 << shift)) - 1)) << q;
  }
  return bits;
}

// Applies penalty and suppression to tile k. Returns whether this hid a NaN or +inf among the
// lane's logits.
DEVICE bool process_tile(const Row& row, int k, int shift, float z[PER_LANE]) {
  uint32_t penalise = 0, suppress = 0;
  const int word = k * LANES + lane_id();
  if (row.penalised != nullptr) {
    penalise = row.penalised[word];
    for (int c = 0; c < row.drafted; ++c) {
      const int64_t id = row.drafts[c];
      if (id >= 0 && id / 32 == word) penalise |= 1u << (id % 32);
    }
  }
  if (row.suppressed != nullptr) suppress = row.suppressed[word];
  if (!__any_sync(ALL_LANES, (penalise | suppress) != 0)) return false;
  penalise = bits_of_elements(penalise, shift);
  suppress = bits_of_elements(suppress, shift);
  // A loop over the few elements that change in any lane, to avoid 32 copies of a division; its
  // array is in local memory, which is acceptable here.
  float changed[PER_LANE];
#pragma unroll
  for (int q = 0; q < PER_LANE; ++q) changed[q] = z[q];
  bool hidden = false;
  uint32_t left = __reduce_or_sync(ALL_LANES, penalise | suppress);
#pragma unroll 1
  for (; left != 0; left &= left - 1) {
    const int q = lowest_bit(left);
    const bool changes = (penalise >> q & 1) != 0, hides = (suppress >> q & 1) != 0;
    hidden |= hides & !(changed[q] < INF);
    if (hides) changed[q] = -INF;
    else if (changes) changed[q] = penalised(changed[q], row.penalty);
  }
#pragma unroll
  for (int q = 0; q < PER_LANE; ++q) z[q] = changed[q];
  return hidden;
}

// GENERAL: the row may be a processed one. Returns the result of process_tile.
template <bool GENERAL> DEVICE bool load_tile(const Row& row, int k, int shift, float z[PER_LANE]) {
  load_raw(row, k, shift, z);
  return GENERAL && (row.penalised != nullptr || row.suppressed != nullptr) &&
         process_tile(row, k, shift, z);
}

// One processed logit, by one thread.
DEVICE float logit_at(const Row& row, int64_t id) {
  const float z = load(row.data, row.dtype, id);
  const uint32_t bit = 1u << (id % 32);
  if (row.suppressed != nullptr && (row.suppressed[id / 32] & bit) != 0) return -INF;
  if (row.penalised == nullptr) return z;
  bool changes = (row.penalised[id / 32] & bit) != 0;
  for (int c = 0; c < row.drafted; ++c) changes |= row.drafts[c] == id;
  return changes ? penalised(z, row.penalty) : z;
}

DEVICE bool has_penalty(const outrider_slot& slot) { return slot.repetition_penalty != 1; }
DEVICE bool has_suppression(const outrider_slot& slot) {
  return (slot.suppress_rows > 0) & (slot.suppress_length > 0);
}

// Row i of slot b's round: row `at` of its logits.
DEVICE Row row_of(const Call& call, const outrider_slot& slot, int b, const outrider_logits& logits,
                  int64_t index, int at, int i) {
  const uint32_t* marks = call.marks;
  const int64_t words = static_cast<int64_t>(call.tile_count) * LANES;
  const bool penalise = marks != nullptr && has_penalty(slot);
  const bool suppress = marks != nullptr && has_suppression(slot) && i < slot.suppress_rows;
  return {static_cast<const unsigned char*>(logits.data) + index * logits.slot_stride +
              at * logits.row_stride,
          logits.dtype,
          logits.vocab_size,
          penalise ? marks + 2 * b * words : nullptr,
          suppress ? marks + (2 * b + 1) * words : nullptr,
          call.drafts + static_cast<int64_t>(b) * call.width,
          i,
          slot.repetition_penalty};
}

DEVICE Row target_row(const Call& call, const outrider_slot& slot, int b, int i) {
  return row_of(call, slot, b, call.target, slot.index, i, i);
}
DEVICE Row draft_row(const Call& call, const outrider_slot& slot, int b, int i) {
  return row_of(call, slot, b, call.draft, slot.index, i, i);
}
// The logits of a draw contain only the row of its step.
DEVICE Row drawn_row(const Call& call, const outrider_slot& slot, int b, int step) {
  return row_of(call, slot, b, call.draft, slot.index, 0, step);
}

// --- sums over a tile -------------------------------------------------------------------------

// Sums 32 * J elements by halving, at distances 16 J, 8 J, ... J, then J / 2, ... 1; v[j] of lane l
// is element l * J + j. Lanes exchange halves, to transfer few numbers. Every lane gets the result.
template <int J, int H> DEVICE void halve_lanes(float* v) {
  if constexpr (J > 1) {
    const bool upper = (lane_id() & H) != 0;
#pragma unroll
    for (int j = 0; j < J / 2; ++j) {
      const float mine = upper ? v[j + J / 2] : v[j], theirs = upper ? v[j] : v[j + J / 2];
      v[j] = mine + __shfl_xor_sync(ALL_LANES, theirs, H);
    }
    halve_lanes<J / 2, H / 2>(v);
  } else {
    v[0] += __shfl_xor_sync(ALL_LANES, v[0], H);
    if constexpr (H > 1) halve_lanes<1, H / 2>(v);
  }
}
template <int J> DEVICE float halve_lanes(float* v) {
  halve_lanes<J, 16>(v);
#pragma unroll
  for (int n = J, h = 16; n > 1; n /= 2, h /= 2) v[0] += __shfl_xor_sync(ALL_LANES, v[0], h);
  return v[0];
}

// Sums 1024 elements by halving, starting at distance 512. Overwrites v.
DEVICE float tile_sum(float v[PER_LANE], int shift) {
#pragma unroll
  for (int q = 0; q < 16; ++q) v[q] += v[q + 16];
#pragma unroll
  for (int q = 0; q < 8; ++q) v[q] += v[q + 8];
  if (shift == 3) return halve_lanes<8>(v);
#pragma unroll
  for (int q = 0; q < 4; ++q) v[q] += v[q + 4];
  if (shift == 2) return halve_lanes<4>(v);
  v[0] += v[2];
  v[1] += v[3];
  v[0] += v[1];
  return halve_lanes<1>(v);
}

// Replaces the logits of tile k by their weights. GENERAL: the row may have been filtered.
template <bool GENERAL>
DEVICE void weigh(float z[PER_LANE], int shift, int k, const outrider_row& shape) {
#pragma unroll
  for (int q = 0; q < PER_LANE; ++q)
    z[q] = GENERAL ? weight_of(z[q], k * TILE + element(q, shift), shape)
                   : exp2_of((z[q] - shape.peak) * shape.rate);
}

// --- rows -------------------------------------------------------------------------------------

DEVICE float larger(float a, float b) { return fmaxf(a, b); } // ignores a NaN

template <bool GENERAL>
DEVICE outrider_device_tile scan_tile(const Row& row, int k, float rate) {
  float z[PER_LANE];
  const int shift = shift_of(row, k);
  bool broken = load_tile<GENERAL>(row, k, shift, z);
  float peak = z[0];
#pragma unroll
  for (int q = 1; q < PER_LANE; ++q) peak = larger(peak, z[q]);
  peak = from_key(__reduce_max_sync(ALL_LANES, key_of(peak)));
  outrider_device_tile tile;
  tile.max = peak;
  if (rate == 0) { // temperature 0
    unsigned token = 0xFFFFFFFFu;
#pragma unroll
    for (int q = 0; q < PER_LANE; ++q) {
      const unsigned id = static_cast<unsigned>(k * TILE + element(q, shift));
      broken |= !(z[q] < INF);
      if (z[q] == peak && id < token) token = id;
    }
    tile.token = static_cast<int32_t>(__reduce_min_sync(ALL_LANES, token));
    if (!__any_sync(ALL_LANES, broken)) return tile;
  } else {
    const float base = peak == -INF ? 0 : peak;
#pragma unroll
    for (int q = 0; q < PER_LANE; ++q) z[q] = exp2_of((z[q] - base) * rate);
    tile.sum = tile_sum(z, shift);
    broken |= is_nan(static_cast<double>(tile.sum));
    if (!__any_sync(ALL_LANES, broken)) return tile;
  }
  bool nan = false; // takes precedence over infinity, suppressed or not
#pragma unroll 1
  for (int id = k * TILE + lane_id(); id < row.width && id < (k + 1) * TILE; id += LANES)
    nan |= is_nan(static_cast<double>(load(row.data, row.dtype, id)));
  const float not_a_number = as_float(0x7FC00000u);
  tile.max = __any_sync(ALL_LANES, nan) ? not_a_number : INF;
  tile.sum = not_a_number;
  return tile;
}

// Computes a row's shape and its tiles' masses from the scanned tiles, by one warp. As many tiles
// as fit stay in registers between the passes.
DEVICE outrider_row combine_tiles(const outrider_slot& slot, const outrider_device_tile* tiles,
                                  int n, double* mass) {
  constexpr int KEPT_TILES = 8;
  const int length = run_length(n), start = lane_id() * length;
  const int end = start + length < n ? start + length : n;
  outrider_device_tile held[KEPT_TILES];
#pragma unroll
  for (int j = 0; j < KEPT_TILES; ++j)
    if (start + j < end) held[j] = load_uncached(tiles + start + j);
  const auto each = [&](const auto& visit) {
#pragma unroll
    for (int j = 0; j < KEPT_TILES; ++j)
      if (start + j < end) visit(start + j, held[j]);
#pragma unroll 1
    for (int k = start + KEPT_TILES; k < end; ++k) visit(k, load_uncached(tiles + k));
  };
  outrider_row shape = shape_of(slot);
  bool nan = false;
  each([&](int, outrider_device_tile tile) {
    nan |= is_nan(static_cast<double>(tile.max));
    shape.peak = larger(shape.peak, tile.max);
  });
  shape.peak = from_key(__reduce_max_sync(ALL_LANES, key_of(shape.peak)));
  if (__any_sync(ALL_LANES, nan)) shape.status = OUTRIDER_NAN;
  else if (shape.peak == INF) shape.status = OUTRIDER_INFINITE;
  else if (shape.peak == -INF) shape.status = OUTRIDER_NO_TOKEN;
  if (shape.status != OUTRIDER_OK) return shape;
  if (slot.temperature == 0) {
    unsigned token = 0xFFFFFFFFu;
    each([&](int, outrider_device_tile tile) {
      if (tile.max == shape.peak && static_cast<unsigned>(tile.token) < token)
        token = static_cast<unsigned>(tile.token);
    });
    shape.token = static_cast<int32_t>(__reduce_min_sync(ALL_LANES, token));
    return shape;
  }
  Warp sums = {0};
  each([&](int k, outrider_device_tile tile) {
    const float scale = exp2_of((tile.max - shape.peak) * shape.rate);
    mass[k] = static_cast<double>(tile.sum) * static_cast<double>(scale);
    sums.v += mass[k];
  });
  shape.total = prefix_sums(sums).at(LANES - 1);
  return shape;
}

// Chooses the token of a tile, by one warp. The weights are stored in order, padded so that 32
// lanes reading 32 neighbours each have no bank conflicts.
struct TileWeights {
  float w[TILE + LANES];

  DEVICE static int at(int e) { return e + e / LANES; }

  DEVICE int choose(const float weights[PER_LANE], int shift, double fraction) {
#pragma unroll
    for (int q = 0; q < PER_LANE; ++q) w[at(element(q, shift))] = weights[q];
    __syncwarp();
    double within;
    return outrider::choose<Warp>([&](int e) { return static_cast<double>(w[at(e)]); }, TILE,
                                  fraction, &within);
  }
};

// The sums of tiles, for one warp that reads them several times: in shared memory if they fit.
struct TileSums {
  static constexpr int MOST = 512;
  double held[MOST];

  DEVICE void load(const double* sums, int n) {
    for (int k = lane_id(); k < n && n <= MOST; k += LANES) held[k] = load_uncached(sums + k);
    __syncwarp();
  }
  DEVICE double at(const double* sums, int n, int k) const {
    return n <= MOST ? held[k] : load_uncached(sums + k);
  }
  DEVICE double total(const double* sums, int n) const {
    return total_of<Warp>([&](int k) { return at(sums, n, k); }, n);
  }
  DEVICE int choose(const double* sums, int n, double u, double* fraction) const {
    return outrider::choose<Warp>([&](int k) { return at(sums, n, k); }, n, u, fraction);
  }
};

} // namespace
#endif
