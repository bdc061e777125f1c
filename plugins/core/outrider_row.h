// One row of logits on the CPU: from logits to a distribution, and a draw from it. The semantics
// are those of runtime/sampling/warp.py, which explains the order of the filters.
#ifndef OUTRIDER_ROW_H
#define OUTRIDER_ROW_H

#include <algorithm>
#include <cmath>
#include <cstring>

#include "outrider_sampling.h"
#include "outrider_tiles.h"

namespace {

using outrider::TILE;
using outrider::tiles_of;

constexpr int BINS = 2048; // 64 per factor of 2, down to 2^-32 of the peak; one more for the rest

struct Candidate {
  float logit;
  int id;
};

// A processed row: logits, tile by tile. float32 in the workspace if penalties, biases or
// suppression changed it, else the caller's memory.
struct Row {
  const unsigned char* data;
  int dtype;
  int width;

  int tiles() const { return tiles_of(width); }
  bool has(int64_t id) const { return id >= 0 && id < width; }
  float at(int64_t id) const { return outrider::load(data, dtype, id); }
  int count(int k) const { return std::min(TILE, width - k * TILE); }
  const unsigned char* tile(int k) const {
    return data + int64_t{k} * TILE * outrider::element_size(dtype);
  }
  // TILE floats, -inf beyond the row's end: the row's own memory if possible, else `buffer`.
  const outrider_logit* load(const outrider_tiles& ops, int k, float* buffer) const {
    if (dtype == OUTRIDER_FLOAT32 && count(k) == TILE)
      return reinterpret_cast<const outrider_logit*>(tile(k));
    ops.load(buffer, tile(k), dtype, count(k));
    return buffer;
  }
};

// Scratch memory of one thread, carved out of the caller's workspace.
struct Scratch {
  float* tile_max;       // [tiles] of the row being filtered
  float* order;          // [tiles]
  int64_t* mass;         // [BINS + 1]
  Candidate* candidates; // [V]
};

// The error of a row that is known to be broken. NaN takes precedence over infinity.
inline int32_t diagnose(const Row& row) {
  int32_t status = OUTRIDER_NO_TOKEN;
  for (int i = 0; i < row.width; ++i) {
    const float z = row.at(i);
    if (outrider::is_nan(static_cast<double>(z))) return OUTRIDER_NAN;
    if (z == outrider::INF) status = OUTRIDER_INFINITE;
  }
  return status;
}

// The slot's logit bias for an id.
inline float bias_of(const outrider_slot& slot, int64_t id) {
  const int64_t* end = slot.bias_ids + slot.bias_length;
  const int64_t* at = std::lower_bound(slot.bias_ids, end, id);
  return at != end && *at == id ? slot.biases[at - slot.bias_ids] : 0.0f;
}

// Applies frequency and presence penalties to `buffer`, for the output including the round's first
// i drafts. counts [V] is scratch memory.
inline void apply_count_penalties(const Row& raw, const outrider_slot& slot, const int64_t* drafts,
                                  int i, float* buffer, int32_t* counts) {
  const auto each = [&](const auto& visit) {
    for (int c = slot.output_start; c < slot.context_length; ++c)
      if (raw.has(slot.context[c])) visit(slot.context[c]);
    for (int c = 0; c < i; ++c)
      if (raw.has(drafts[c])) visit(drafts[c]);
  };
  each([&](int64_t id) { counts[id] = 0; });
  each([&](int64_t id) { ++counts[id]; });
  each([&](int64_t id) {
    if (counts[id] == 0) return; // already applied
    const float frequency = slot.frequency_penalty * static_cast<float>(counts[id]);
    buffer[id] -= frequency + slot.presence_penalty;
    counts[id] = 0;
  });
}

// Applies biases, penalties, then suppression, to a copy; returns `raw` itself if none applies to
// this row. drafts: the round's tokens, of which those before row i are context too. Sets *status
// for a broken row, because suppression must not hide a NaN.
inline Row process_row(const outrider_tiles& ops, const Row& raw, const outrider_slot& slot,
                       const int64_t* drafts, int i, float* buffer, int32_t* counts,
                       int32_t* status) {
  const bool penalise = slot.repetition_penalty != 1 && slot.context_length + i > 0;
  const bool count = slot.frequency_penalty != 0 || slot.presence_penalty != 0;
  const bool suppress = i < slot.suppress_rows && slot.suppress_length > 0;
  const bool biased = slot.bias_length > 0;
  *status = OUTRIDER_OK;
  if (!penalise && !count && !suppress && !biased) return raw;
  alignas(64) float z[TILE];
  for (int k = 0; k < raw.tiles(); ++k)
    std::memcpy(buffer + k * TILE, raw.load(ops, k, z),
                static_cast<size_t>(raw.count(k)) * sizeof(float));
  const auto penalty = [&](int64_t id) {
    if (!raw.has(id)) return;
    // From the original logit, so that a repeated id is penalised once.
    const float logit = biased ? raw.at(id) + bias_of(slot, id) : raw.at(id);
    buffer[id] = outrider::penalised(logit, slot.repetition_penalty);
  };
  for (int c = 0; c < slot.bias_length; ++c)
    if (raw.has(slot.bias_ids[c])) buffer[slot.bias_ids[c]] += slot.biases[c];
  if (penalise) {
    for (int c = 0; c < slot.context_length; ++c) penalty(slot.context[c]);
    for (int c = 0; c < i; ++c) penalty(drafts[c]);
  }
  if (count) apply_count_penalties(raw, slot, drafts, i, buffer, counts);
  if (suppress)
    for (int c = 0; c < slot.suppress_length; ++c) {
      const int64_t id = slot.suppress[c];
      if (!raw.has(id)) continue;
      if (!(raw.at(id) < outrider::INF)) *status = diagnose(raw);
      buffer[id] = -outrider::INF;
    }
  return {reinterpret_cast<const unsigned char*>(buffer), OUTRIDER_FLOAT32, raw.width};
}

// Fills scratch.mass with the mass of each bin; returns the sum. Logits below `floor` and tiles
// whose maximum is below `negligible` are skipped. scale: of the fixed-point weights; 0: every
// token has mass 1.
inline int64_t fill_bins(const outrider_tiles& ops, const Row& row, const outrider_row& shape,
                        const Scratch& scratch, float floor, float negligible, float scale) {
  alignas(64) float buffer[TILE], w[TILE];
  alignas(64) int bin[TILE];
  std::fill_n(scratch.mass, BINS + 1, 0);
  for (int k = 0; k < row.tiles(); ++k) {
    if (scratch.tile_max[k] < floor || scratch.tile_max[k] < negligible) continue;
    const outrider_logit* z = row.load(ops, k, buffer);
    ops.bins(bin, w, z, &shape, BINS);
    for (int i = 0; i < row.count(k); ++i)
      if (z[i] >= floor) scratch.mass[bin[i]] += scale == 0 ? 1 : outrider::fixed(w[i], scale);
  }
  int64_t total = 0;
  for (int b = 0; b <= BINS; ++b) total += scratch.mass[b];
  return total;
}

// The bin in which the mass, summed from the largest logit down, reaches `target`. *before: the
// mass of the bins before it.
inline int crossing_bin(const int64_t* mass, int64_t target, int64_t* before) {
  *before = 0;
  for (int b = 0; b < BINS; ++b) {
    if (*before + mass[b] >= target) return b;
    *before += mass[b];
  }
  return BINS;
}

// Collects the tokens of a bin (-1: of all bins) in scratch.candidates; returns their number.
inline int gather(const outrider_tiles& ops, const Row& row, const outrider_row& shape,
                  const Scratch& scratch, float floor, float negligible, int target_bin) {
  alignas(64) float buffer[TILE], w[TILE];
  alignas(64) int bin[TILE];
  int found = 0;
  for (int k = 0; k < row.tiles(); ++k) {
    if (scratch.tile_max[k] < floor || scratch.tile_max[k] < negligible) continue;
    if (target_bin >= 0) {
      std::fill_n(buffer, TILE, scratch.tile_max[k]);
      ops.bins(bin, w, buffer, &shape, BINS);
      if (bin[0] > target_bin) continue; // even its largest logit is in a later bin
    }
    const outrider_logit* z = row.load(ops, k, buffer);
    if (target_bin >= 0) ops.bins(bin, w, z, &shape, BINS);
    for (int i = 0; i < row.count(k); ++i)
      if (z[i] >= floor && (target_bin < 0 || bin[i] == target_bin))
        scratch.candidates[found++] = {z[i], k * TILE + i};
  }
  return found;
}

// top-k: cuts at the k-th largest logit; all logits equal to it are kept.
inline void keep_top_k(const outrider_tiles& ops, const Row& row, int top_k, const Scratch& scratch,
                       outrider_row* shape) {
  float floor = -outrider::INF;
  int64_t before = 0;
  int bin = -1;
  if (top_k <= row.tiles()) {
    // The k-th largest tile maximum is at most the k-th largest logit, and few logits are above it.
    std::copy_n(scratch.tile_max, row.tiles(), scratch.order);
    std::nth_element(scratch.order, scratch.order + top_k - 1, scratch.order + row.tiles(),
                     [](float a, float b) { return a > b; });
    floor = scratch.order[top_k - 1];
  } else {
    fill_bins(ops, row, *shape, scratch, floor, floor, 0);
    bin = crossing_bin(scratch.mass, top_k, &before);
  }
  const int found = gather(ops, row, *shape, scratch, floor, floor, bin);
  const int rank = std::min(top_k - static_cast<int>(before), found) - 1;
  std::nth_element(scratch.candidates, scratch.candidates + rank, scratch.candidates + found,
                   [](Candidate a, Candidate b) { return a.logit > b.logit; });
  shape->cut = scratch.candidates[rank].logit;
}

// top-p: a token is kept while the mass of those before it, from the largest down, is below top_p
// of the total. Among equal logits, lower ids are removed first.
inline void keep_nucleus(const outrider_tiles& ops, const Row& row, double top_p,
                         const Scratch& scratch, outrider_row* shape) {
  const float scale = outrider::fixed_scale(row.width);
  // All weights below removable mass / V can be removed together. Half of that leaves room for
  // rounding, unless the removable mass is itself of the order of rounding errors.
  const double weight = (1 - top_p) * shape->total / (2.0 * row.width);
  float negligible = -outrider::INF;
  const bool all = shape->cut == -outrider::INF;
  if (all && 1 - top_p > 4e-6)
    negligible = shape->peak + static_cast<float>(std::log2(weight)) / shape->rate;
  const int64_t sum = fill_bins(ops, row, *shape, scratch, shape->cut, negligible, scale);
  const int64_t target = outrider::nucleus_mass(
      top_p, all ? shape->total * static_cast<double>(scale) : static_cast<double>(sum));
  if (sum < target) return; // top_p is 1 up to rounding
  int64_t before = 0;
  const int bin = crossing_bin(scratch.mass, target, &before);
  const int found = gather(ops, row, *shape, scratch, shape->cut, negligible, bin);
  std::sort(scratch.candidates, scratch.candidates + found, [](Candidate a, Candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id > b.id);
  });
  int c = 0;
  for (; c < found && before < target; ++c) {
    const Candidate& last = scratch.candidates[c];
    shape->cut = last.logit;
    shape->tie_from = last.id;
    before += outrider::fixed(ops.exp2((last.logit - shape->peak) * shape->rate), scale);
  }
  const bool divided = c < found && scratch.candidates[c].logit == shape->cut;
  if (!divided) shape->tie_from = 0;
}

// Sums and choices in the order of a GPU's warp.
inline double total_of(const double* sums, int n) {
  return outrider::total_of([sums](int k) { return sums[k]; }, n);
}

inline int choose_tile(const double* sums, int tiles, double u, double* fraction) {
  return outrider::choose([sums](int k) { return sums[k]; }, tiles, u, fraction);
}

inline int choose_token(const float* weights, double fraction) {
  double within;
  return outrider::choose([weights](int i) { return static_cast<double>(weights[i]); }, TILE,
                          fraction, &within);
}

// Computes the distribution of a processed row: its shape and tile_sum [tiles]; at temperature 0, a
// point mass.
inline int32_t shape_row(const outrider_tiles& ops, const Row& row, const outrider_slot& slot,
                         const Scratch& scratch, double* tile_sum, outrider_row* shape) {
  alignas(64) float buffer[TILE], w[TILE];
  const bool greedy = slot.temperature == 0;
  const int tiles = row.tiles();
  *shape = outrider::shape_of(slot);
  const float rate = shape->rate;
  int best = 0;
  int broken = 0;
  for (int k = 0; k < tiles; ++k) {
    const outrider_logit* z = row.load(ops, k, buffer);
    const int next = k + 1 < tiles ? k + 1 : k;
    float peak;
    if (greedy) {
      peak = ops.peak(z, row.tile(next), &broken);
    } else {
      peak = ops.max(z);
      const float sum = ops.sum(z, peak == -outrider::INF ? 0 : peak, rate, row.tile(next));
      tile_sum[k] = static_cast<double>(sum);
      broken |= static_cast<int>(!(sum < outrider::INF));
    }
    scratch.tile_max[k] = peak;
    if (peak > shape->peak) {
      shape->peak = peak;
      best = k;
    }
  }
  if (broken != 0 || shape->peak == -outrider::INF) return diagnose(row);
  if (greedy) {
    int token = best * TILE;
    while (row.at(token) != shape->peak) ++token;
    shape->token = token;
    return OUTRIDER_OK;
  }

  for (int k = 0; k < tiles; ++k) {
    const float scale = ops.exp2((scratch.tile_max[k] - shape->peak) * rate);
    tile_sum[k] *= static_cast<double>(scale);
  }
  shape->total = total_of(tile_sum, tiles);
  if (!outrider::has_filters(slot, row.width)) return OUTRIDER_OK;
  if (outrider::has_top_k(slot, row.width)) keep_top_k(ops, row, slot.top_k, scratch, shape);
  if (slot.top_p < 1) keep_nucleus(ops, row, slot.top_p, scratch, shape);
  shape->min_weight = slot.min_p;
  for (int k = 0; k < tiles; ++k) {
    tile_sum[k] = 0;
    if (scratch.tile_max[k] < shape->cut) continue;
    const outrider_logit* z = row.load(ops, k, buffer);
    tile_sum[k] = static_cast<double>(ops.weights(w, z, shape, k * TILE));
  }
  shape->total = total_of(tile_sum, tiles);
  return OUTRIDER_OK;
}

// Draws the token at u of the inverse CDF of a row that is not a point mass. excluded: a token
// whose weight is taken as 0, also in tile_sum; -1: none. Sets shape->token and shape->weight.
inline void draw_row(const outrider_tiles& ops, const Row& row, const double* tile_sum, double u,
                     int64_t excluded, outrider_row* shape) {
  alignas(64) float buffer[TILE], w[TILE];
  double fraction = 0;
  const int k = choose_tile(tile_sum, row.tiles(), u, &fraction);
  const outrider_logit* z = row.load(ops, k, buffer);
  ops.weights(w, z, shape, k * TILE);
  if (excluded >= k * TILE && excluded < (k + 1) * TILE) w[excluded - k * TILE] = 0;
  const int i = choose_token(w, fraction);
  shape->token = k * TILE + i;
  shape->weight = w[i];
}

// Chooses the token with the slot's noise at `position`: see tile_noise. tile_max [tiles]: of row.
inline void couple_row(const outrider_tiles& ops, const Row& row, const outrider_slot& slot,
                       uint32_t position, const float* tile_max, outrider_row* shape) {
  alignas(64) float buffer[TILE], w[TILE];
  double best = static_cast<double>(outrider::INF);
  const auto visit = [&](int k) {
    if (tile_max[k] < shape->cut) return;
    const float max_weight = ops.exp2((tile_max[k] - shape->peak) * shape->rate);
    const outrider::Noise tile = outrider::tile_noise(slot.seed, position, k);
    if (!outrider::may_win(tile.least, best, max_weight)) return;
    ops.weights(w, row.load(ops, k, buffer), shape, k * TILE);
    for (int g = 0; g < TILE / outrider::GROUP; ++g) {
      const float* weights = w + g * outrider::GROUP;
      float heaviest = weights[0];
      for (int i = 1; i < outrider::GROUP; ++i)
        heaviest = weights[i] > heaviest ? weights[i] : heaviest;
      if (!outrider::may_win(tile.least, best, heaviest)) continue; // tile.least bounds all
      const outrider::Noise group = outrider::group_noise(slot.seed, position, k, tile, g);
      if (!outrider::may_win(group.least, best, heaviest)) continue;
      uint32_t words[4];
      for (int i = 0; i < outrider::GROUP; ++i) {
        if (i % 4 == 0) outrider::token_words(slot.seed, position, k, g, i, words);
        if (!(weights[i] > 0)) continue;
        const double quotient =
            outrider::token_noise(group, i, words) / static_cast<double>(weights[i]);
        const int id = k * TILE + g * outrider::GROUP + i;
        if (quotient > best || (quotient == best && id > shape->token)) continue;
        best = quotient;
        shape->token = id;
        shape->weight = weights[i];
      }
    }
  };
  const int first = static_cast<int>(std::max_element(tile_max, tile_max + row.tiles()) - tile_max);
  visit(first); // it probably contains the winner, and then most others can be skipped
  for (int k = 0; k < row.tiles(); ++k)
    if (k != first) visit(k);
}

} // namespace
#endif
