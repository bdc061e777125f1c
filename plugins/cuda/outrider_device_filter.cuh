// Top-k and top-p of one row. All blocks of a row fill a histogram of its logits by their distance
// from the maximum, with counts or fixed-point masses. The row's last block finds the bin in which
// the cut lies, lists the few tokens that it concerns, and finds the cut among them. All sums are of
// integers, so the order in which threads add does not matter. The result is that of keep_top_k and
// keep_nucleus in outrider_row.h.
#ifndef OUTRIDER_DEVICE_FILTER_CUH
#define OUTRIDER_DEVICE_FILTER_CUH

#include "outrider_device_round.cuh"

namespace {

using outrider_device::BINS;
using outrider_device::FILTER_PARTS;
using outrider_device::FILTER_WARPS;
using Integer = unsigned long long;

constexpr int DIGIT_BITS = 11;
static_assert(BINS == 1 << DIGIT_BITS);
constexpr float BINS_PER_UNIT = 32; // of logits; beyond 4, bfloat16 has at most one value in a bin
constexpr unsigned LISTED = 2048, RANKED = 256; // numbers of candidates

// 64-bit sums in two words, because shared memory adds at most 32 bits in one instruction.
struct Histogram {
  uint32_t low[BINS], high[BINS];
  Integer runs[FILTER_WARPS], before; // before: the sum of the bins before `bin`
  int bin;

  DEVICE void clear() {
    for (unsigned i = threadIdx.x; i < BINS; i += blockDim.x) low[i] = high[i] = 0;
  }
  DEVICE void add(int to, Integer value) {
    const uint32_t addend = static_cast<uint32_t>(value);
    const uint32_t old = atomicAdd(low + to, addend);
    const uint32_t carry = static_cast<uint32_t>(value >> 32) + (old > ~addend ? 1u : 0u);
    if (carry != 0) atomicAdd(high + to, carry);
  }
  DEVICE Integer at(int i) const { return static_cast<Integer>(high[i]) << 32 | low[i]; }

  DEVICE static Integer sum_below(Integer value) { // and the lane's own
#pragma unroll
    for (int distance = 1; distance < LANES; distance *= 2) {
      const Integer below = __shfl_up_sync(ALL_LANES, value, static_cast<unsigned>(distance));
      if (lane_id() >= distance) value += below;
    }
    return value;
  }

  // By the block: sets `bin` to the first at which the sum reaches the target; -1: none.
  DEVICE void find(Integer target) {
    constexpr int RUN = BINS / FILTER_WARPS, PART = RUN / LANES;
    Integer sum = 0;
#pragma unroll
    for (int i = 0; i < PART; ++i) sum += at(warp_id() * RUN + i * LANES + lane_id());
    sum = sum_below(sum);
    if (lane_id() == LANES - 1) runs[warp_id()] = sum;
    __syncthreads();
    if (warp_id() == 0) {
      sum = lane_id() < FILTER_WARPS ? runs[lane_id()] : 0;
      Integer upto = sum_below(sum);
      uint32_t reached = __ballot_sync(ALL_LANES, upto >= target);
      if (reached == 0) {
        if (lane_id() == 0) bin = -1;
      } else {
        const int run = lowest_bit(reached);
        const Integer start = __shfl_sync(ALL_LANES, upto - sum, run);
        int i = run * RUN + lane_id() * PART;
        sum = 0;
#pragma unroll
        for (int j = 0; j < PART; ++j) sum += at(i + j);
        upto = start + sum_below(sum);
        reached = __ballot_sync(ALL_LANES, upto >= target);
        if (lane_id() == lowest_bit(reached)) {
          upto -= sum;
          while (upto + at(i) < target) upto += at(i++);
          before = upto;
          bin = i;
        }
      }
    }
    __syncthreads();
  }
};

// The order in which the filters keep tokens: from the largest logit down, among equal ones from
// the highest id down.
DEVICE Integer place_of(float z, int id) {
  return static_cast<Integer>(~key_of(z)) << 32 | ~static_cast<uint32_t>(id);
}
DEVICE float logit_of(Integer place) { return from_key(~static_cast<uint32_t>(place >> 32)); }

struct FilterMemory {
  Histogram histogram;
  Integer places[LISTED], values[RANKED];
  Integer sum, edge;
  unsigned count; // of candidates, also of those beyond LISTED
  bool found, divided;
};

// The candidates for the last token that a filter keeps: those with a depth in [first, last], in
// units of bins. If they are too many for the list, `each` reads the whole row again, slowly.
struct Candidates {
  const Row& row;
  FilterMemory& memory;
  outrider_row shape;
  float scale; // of fixed-point masses
  float first, last;

  DEVICE float depth_of(float z) const { return (shape.peak - z) * BINS_PER_UNIT; }
  DEVICE int bin_of(float z) const {
    const float depth = depth_of(z);
    return depth < BINS ? static_cast<int>(depth) : BINS - 1;
  }
  DEVICE bool contain(float z) const {
    const float depth = depth_of(z);
    return (first <= depth) & (depth <= last);
  }
  DEVICE Integer mass_of(float z) const {
    return static_cast<Integer>(fixed(exp2_of((z - shape.peak) * shape.rate), scale));
  }
  DEVICE Integer value_of(Integer place, bool counted) const {
    const float z = logit_of(place);
    return counted ? 1 : z < shape.cut ? 0 : mass_of(z);
  }

  // Fills the histogram from this block's parts of the row, with the logits from `floor` up. Parts of
  // tiles, because a token takes long, and there are more multiprocessors than a row has blocks.
  DEVICE void count_parts(const outrider_device_tile* tiles, float floor, bool counted) const {
#pragma unroll 1
    for (int at = block_x() * warps() + warp_id(); at / FILTER_PARTS * TILE < row.width;
         at += static_cast<int>(gridDim.x) * warps()) {
      const int k = at / FILTER_PARTS;
      if (tiles[k].max < floor) continue;
      float z[PER_LANE];
      load_tile<true>(row, k, shift_of(row, k), z);
#pragma unroll
      for (int q = 0; q < PER_LANE; ++q) {
        if (q / (PER_LANE / FILTER_PARTS) != at % FILTER_PARTS || !(z[q] >= floor && z[q] > -INF))
          continue;
        const int bin = bin_of(z[q]);
        if (counted) atomicAdd(memory.histogram.low + bin, 1u);
        else if (const Integer value = mass_of(z[q])) memory.histogram.add(bin, value);
      }
    }
  }

  // Adds the tile's candidates to the list, by one warp.
  DEVICE void list_tile(int k) const {
    float z[PER_LANE];
    const int shift = shift_of(row, k);
    load_tile<true>(row, k, shift, z);
#pragma unroll
    for (int part = 0; part < PER_LANE; part += 8) { // which seldom contains any
      bool any = false;
#pragma unroll
      for (int q = part; q < part + 8; ++q) any |= contain(z[q]);
      if (!any) continue;
#pragma unroll
      for (int q = part; q < part + 8; ++q) {
        if (!contain(z[q])) continue;
        const unsigned at = atomicAdd(&memory.count, 1u);
        if (at < LISTED) memory.places[at] = place_of(z[q], k * TILE + element(q, shift));
      }
    }
  }

  DEVICE void list(const outrider_device_tile* tiles) const {
    if (threadIdx.x == 0) memory.count = 0;
    __syncthreads();
    for (int from = warp_id(); from * TILE < row.width; from += LANES * warps()) {
      const int mine = from + lane_id() * warps();
      uint32_t visits =
          __ballot_sync(ALL_LANES, mine * TILE < row.width && depth_of(tiles[mine].max) <= last);
#pragma unroll 1
      for (; visits != 0; visits &= visits - 1) list_tile(from + lowest_bit(visits) * warps());
    }
    __syncthreads();
  }

  template <class Visit> DEVICE void each(const Visit& visit) const {
    if (memory.count <= LISTED) {
      for (unsigned i = threadIdx.x; i < memory.count; i += blockDim.x) visit(memory.places[i]);
      return;
    }
#pragma unroll 1
    for (int id = static_cast<int>(threadIdx.x); id < row.width;
         id += static_cast<int>(blockDim.x)) {
      const float z = logit_at(row, id);
      if (contain(z)) visit(place_of(z, id));
    }
  }

  DEVICE Integer mass() const {
    if (threadIdx.x == 0) memory.sum = 0;
    __syncthreads();
    Integer sum = 0;
    each([&](Integer place) { sum += value_of(place, false); });
    sum = Histogram::sum_below(sum);
    if (lane_id() == LANES - 1) atomicAdd(&memory.sum, sum);
    __syncthreads();
    return memory.sum;
  }

  // Finds memory.edge, the candidate at which the sum reaches the target; false: there is none.
  DEVICE bool find(Integer target, bool counted) const {
    return memory.count <= RANKED ? find_ranked(target, counted) : find_digits(target, counted);
  }

  // One thread compares a candidate with all others.
  DEVICE bool find_ranked(Integer target, bool counted) const {
    const unsigned i = threadIdx.x, count = memory.count;
    if (i == 0) memory.found = false;
    if (i < count) memory.values[i] = value_of(memory.places[i], counted);
    __syncthreads();
    if (i < count) {
      const Integer own = memory.places[i];
      Integer before = 0;
#pragma unroll 4
      for (unsigned c = 0; c < count; ++c)
        if (memory.places[c] < own) before += memory.values[c];
      if (before < target && target <= before + memory.values[i]) {
        memory.edge = own;
        memory.found = true;
      }
    }
    __syncthreads();
    return memory.found;
  }

  // Radix selection.
  DEVICE bool find_digits(Integer target, bool counted) const {
    Histogram& histogram = memory.histogram;
    Integer edge = 0;
#pragma unroll 1
    for (int known = 64, shift; known > 0; known = shift) { // the bits of the edge from here on
      shift = known > DIGIT_BITS ? known - DIGIT_BITS : 0;
      histogram.clear();
      __syncthreads();
      each([&](Integer place) {
        if ((place ^ edge) >> shift >> (known - shift) != 0) return;
        const Integer value = value_of(place, counted);
        if (value != 0) histogram.add(static_cast<int>((place ^ edge) >> shift), value);
      });
      __syncthreads();
      histogram.find(target);
      if (histogram.bin < 0) return false;
      edge |= static_cast<Integer>(histogram.bin) << shift;
      target -= histogram.before;
    }
    if (threadIdx.x == 0) memory.edge = edge;
    __syncthreads();
    return true;
  }

  // Whether there are tokens with the logit of the edge after it.
  DEVICE bool is_divided() const {
    if (threadIdx.x == 0) memory.divided = false;
    __syncthreads();
    const Integer edge = memory.edge;
    each([&](Integer place) {
      if (place > edge && place >> 32 == edge >> 32) memory.divided = true;
    });
    __syncthreads();
    return memory.divided;
  }
};

// Finds the cut of a row that the scan has shaped.
DEVICE void filter_row(const Call& call, const outrider_slot& slot, const Row& row, int b, int r) {
  __shared__ FilterMemory memory;
  Candidates candidates = {row, memory, *row_at(call, b, r), fixed_scale(row.width), 0, INF};
  outrider_row& shape = candidates.shape;
  const bool top_k = has_top_k(slot, row.width), top_p = slot.top_p < 1;
  if (shape.status != OUTRIDER_OK || slot.temperature == 0 || !(top_k || top_p)) return;
  const outrider_device_tile* tiles = call.tiles + tiles_at(call, b, r);
  outrider_device_bins& bins = *bins_at(call, b, r);
  Histogram& histogram = memory.histogram;

  // As in keep_nucleus: together, the tokens below `floor` can be removed.
  float floor = -INF;
  if (!top_k && 1 - slot.top_p > 4e-6)
    floor = shape.peak + log2(static_cast<float>((1 - slot.top_p) * shape.total /
                                                 (2.0 * row.width))) / shape.rate;
  histogram.clear();
  __syncthreads();
  candidates.count_parts(tiles, floor, top_k);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < BINS; i += static_cast<int>(blockDim.x))
    if (const Integer sum = histogram.at(i)) atomicAdd(bins.sums + i, sum);
  if (!last_block(&bins.finished_blocks, static_cast<int>(gridDim.x))) return;
  for (int i = static_cast<int>(threadIdx.x); i < BINS; i += static_cast<int>(blockDim.x)) {
    const Integer sum = __ldcg(bins.sums + i);
    histogram.low[i] = static_cast<uint32_t>(sum);
    histogram.high[i] = static_cast<uint32_t>(sum >> 32);
  }
  __syncthreads();

  const auto all = [&](double total) {
    return static_cast<Integer>(nucleus_mass(slot.top_p, total));
  };
  const auto scale = static_cast<double>(candidates.scale);
  Integer target = top_k ? static_cast<Integer>(slot.top_k) : all(shape.total * scale);
  histogram.find(target);
  const int bin = histogram.bin;
  if (bin >= 0) {
    target -= top_k ? 0 : histogram.before;
    candidates.first = static_cast<float>(top_k ? 0 : bin);
    if (bin + 1 < BINS) // the number before bin + 1
      candidates.last = as_float(as_bits(static_cast<float>(bin + 1)) - 1);
  } else if (!(top_k && top_p)) {
    return; // top_k is not below the number of tokens, or top_p is 1 up to rounding
  }
  candidates.list(tiles);
  if (top_k && bin >= 0 && candidates.find(target, true)) shape.cut = logit_of(memory.edge);
  if (top_k && top_p)
    target = all(shape.cut == -INF ? shape.total * scale
                                   : static_cast<double>(static_cast<int64_t>(candidates.mass())));
  if (top_p && candidates.find(target, false)) {
    shape.cut = logit_of(memory.edge);
    shape.tie_from = candidates.is_divided() ? static_cast<int>(~memory.edge) : 0;
  }
  if (threadIdx.x != 0) return;
  row_at(call, b, r)->cut = shape.cut;
  row_at(call, b, r)->tie_from = shape.tie_from;
}

} // namespace
#endif
