// Top-k, top-p and min-p of one row, by one block: radix selection over 32-bit keys, 8 bits per
// pass, with counts or fixed-point masses in shared memory. These are integers, so the order in
// which the threads add them does not matter. The result is that of keep_top_k and keep_nucleus in
// outrider_row.h.
#ifndef OUTRIDER_DEVICE_FILTER_CUH
#define OUTRIDER_DEVICE_FILTER_CUH

#include "outrider_device_round.cuh"

namespace {

constexpr int DIGITS = 256;
constexpr int COPIES = 16; // of the histogram, so that lanes rarely collide

// 64-bit sums in two words, because shared memory adds at most 32 bits in one instruction.
struct Histogram {
  uint32_t low[DIGITS * COPIES], high[DIGITS * COPIES];
  unsigned long long sums[DIGITS];
  unsigned long long before, at;
  int digit;

  DEVICE void clear() {
    for (int i = static_cast<int>(threadIdx.x); i < DIGITS * COPIES;
         i += static_cast<int>(blockDim.x))
      low[i] = high[i] = 0;
  }
  DEVICE void add(uint32_t in, unsigned long long value) {
    const uint32_t cell = in * COPIES + static_cast<uint32_t>(lane_id()) % COPIES;
    const uint32_t addend = static_cast<uint32_t>(value);
    const uint32_t old = atomicAdd(low + cell, addend);
    const uint32_t carry = static_cast<uint32_t>(value >> 32) + (old > ~addend ? 1u : 0u);
    if (carry != 0) atomicAdd(high + cell, carry);
  }
  DEVICE void reduce() {
    for (int d = static_cast<int>(threadIdx.x); d < DIGITS; d += static_cast<int>(blockDim.x)) {
      unsigned long long sum = 0;
      for (int c = 0; c < COPIES; ++c) {
        const int cell = d * COPIES + (c + d) % COPIES; // neighbours in different banks
        sum += static_cast<unsigned long long>(high[cell]) << 32 | low[cell];
      }
      sums[d] = sum;
    }
  }
  // Each warp computes it for itself.
  DEVICE unsigned long long total() const {
    unsigned long long sum = 0;
#pragma unroll
    for (int d = 0; d < DIGITS; d += LANES) sum += sums[d + lane_id()];
#pragma unroll
    for (int h = LANES / 2; h > 0; h /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, h);
    return sum;
  }
  // By one warp: the digit at which the sum from the highest down reaches `target`; -1: none.
  DEVICE void find(unsigned long long target) {
    constexpr int RUN = DIGITS / LANES;
    const int top = DIGITS - 1 - lane_id() * RUN;
    unsigned long long run = 0;
#pragma unroll
    for (int d = 0; d < RUN; ++d) run += sums[top - d];
    unsigned long long upto = run;
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
      const unsigned long long below =
          __shfl_up_sync(ALL_LANES, upto, static_cast<unsigned>(distance));
      if (lane_id() >= distance) upto += below;
    }
    const uint32_t reached = __ballot_sync(ALL_LANES, upto >= target);
    if (reached == 0) {
      if (lane_id() == 0) digit = -1;
      return;
    }
    if (lane_id() != lowest_bit(reached)) return;
    before = upto - run;
    digit = top;
    while (before + sums[digit] < target) before += sums[digit--];
    at = sums[digit];
  }
};

struct Selection {
  bool found;
  uint32_t key;
  unsigned long long missing; // part of the target that the tokens with this key have to reach
  unsigned long long at;      // their sum
};

enum class By { COUNT, MASS, ID };

// Finds, among the tokens with z >= cut (by ID: == cut), the key at which the sum from the highest
// key down reaches the target. The key is that of the logit, or the id.
struct Selector {
  const Row& row;
  const outrider_device_tile* tiles;
  By by;
  outrider_row shape;
  float scale; // of fixed-point masses
  double top_p;
  unsigned long long count; // the target unless by MASS

  DEVICE unsigned long long target(unsigned long long sum) const {
    if (by != By::MASS) return count;
    const double total = shape.cut == -INF ? shape.total * static_cast<double>(scale)
                                           : static_cast<double>(static_cast<int64_t>(sum));
    return static_cast<unsigned long long>(nucleus_mass(top_p, total));
  }

  DEVICE void scan(Histogram& histogram, uint32_t prefix, int bits) const {
#pragma unroll 1
    for (int k = warp_id(); k * TILE < row.width; k += warps()) {
      const float peak = tiles[k].max;
      if (peak < shape.cut || (by != By::ID && bits < 24 && key_of(peak) >> (bits + 8) < prefix))
        continue;
      float z[PER_LANE];
      const int shift = shift_of(row, k);
      load_tile<true>(row, k, shift, z);
#pragma unroll
      for (int q = 0; q < PER_LANE; ++q) {
        const uint32_t id = static_cast<uint32_t>(k * TILE + element(q, shift));
        const uint32_t key = by == By::ID ? id : key_of(z[q]);
        const bool in = by == By::ID ? z[q] == shape.cut : z[q] >= shape.cut;
        if (!in || (bits < 24 && key >> (bits + 8) != prefix)) continue;
        unsigned long long value = 1;
        if (by == By::MASS)
          value = static_cast<unsigned long long>(
              fixed(exp2_of((z[q] - shape.peak) * shape.rate), scale));
        if (value != 0) histogram.add(key >> bits & (DIGITS - 1), value);
      }
    }
  }

  DEVICE Selection select(Histogram& histogram) const {
    Selection chosen = {true, 0, 0, 0};
#pragma unroll 1
    for (int bits = 24; bits >= 0; bits -= 8) {
      histogram.clear();
      __syncthreads();
      scan(histogram, chosen.key, bits);
      __syncthreads();
      histogram.reduce();
      __syncthreads();
      if (bits == 24) chosen.missing = target(histogram.total());
      if (warp_id() == 0) histogram.find(chosen.missing);
      __syncthreads();
      if (histogram.digit < 0) return {false, 0, 0, 0};
      chosen.key = chosen.key << 8 | static_cast<uint32_t>(histogram.digit);
      chosen.missing -= histogram.before;
      chosen.at = histogram.at;
      __syncthreads(); // before the next pass clears it
    }
    return chosen;
  }
};

// Filters a row that the scan has shaped: updates its shape and its tiles' masses. By one block.
__device__ __noinline__ void filter_row(const outrider_slot& slot, const Row& row,
                                        const outrider_device_tile* tiles, double* mass,
                                        outrider_row* shape_at) {
  __shared__ Histogram histogram;
  outrider_row shape = *shape_at;
  if (shape.status != OUTRIDER_OK || !has_filters(slot, row.width)) return;
  const float scale = fixed_scale(row.width);
  const bool top_k = has_top_k(slot, row.width), top_p = slot.top_p < 1;
  unsigned long long ties = 0, kept = 0; // at the edge of the nucleus
#pragma unroll 1
  for (int step = 0; step < 3; ++step) {
    const By by = step == 0 ? By::COUNT : step == 1 ? By::MASS : By::ID;
    if (by == By::COUNT ? !top_k : by == By::MASS ? !top_p : kept >= ties) continue;
    const Selector selector = {row, tiles, by, shape, scale, slot.top_p,
                               by == By::COUNT ? static_cast<unsigned long long>(slot.top_k) : kept};
    const Selection edge = selector.select(histogram);
    if (!edge.found) continue; // top_p is 1 up to rounding
    if (by == By::ID) {
      shape.tie_from = static_cast<int32_t>(edge.key);
      continue;
    }
    shape.cut = from_key(edge.key);
    if (by == By::COUNT) continue;
    const auto each = static_cast<unsigned long long>(
        fixed(exp2_of((shape.cut - shape.peak) * shape.rate), scale));
    ties = edge.at / each;
    kept = (edge.missing + each - 1) / each;
  }
  shape.min_weight = slot.min_p;
  const int count = tiles_of(row.width);
  for (int k = warp_id(); k < count; k += warps()) {
    float w[PER_LANE];
    double sum = 0;
    if (tiles[k].max >= shape.cut) {
      const int shift = shift_of(row, k);
      load_tile<true>(row, k, shift, w);
      weigh<true>(w, shift, k, shape);
      sum = static_cast<double>(tile_sum(w, shift));
    }
    if (lane_id() == 0) mass[k] = sum;
  }
  __syncthreads();
  if (warp_id() != 0) return;
  shape.total = total_of<Warp>([mass](int k) { return load_uncached(mass + k); }, count);
  if (lane_id() == 0) *shape_at = shape;
}

} // namespace
#endif
