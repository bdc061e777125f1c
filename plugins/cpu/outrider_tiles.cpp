// The inner loops, written for the compiler to vectorise. Compiled once per instruction set, with
// OUTRIDER_TABLE as the table's name. Standard headers must not be included: the linker could keep
// the AVX-512 copy of one of their inline functions for all units.
#include "outrider_tiles.h"

#include "outrider_sampling.h"

namespace {
using namespace outrider;

// Sums and maxima repeatedly halve the tile (512, 256, ... 1). Every step is elementwise, so the
// order does not depend on the vector width, and the rounding error is that of pairwise summation.
template <int H> float halve_sum(float* v) {
  for (int i = 0; i < H; ++i) v[i] += v[i + H];
  if constexpr (H > 1) return halve_sum<H / 2>(v);
  return v[0];
}

template <int H> float halve_max(float* v) {
  for (int i = 0; i < H; ++i) v[i] = v[i] > v[i + H] ? v[i] : v[i + H];
  if constexpr (H > 1) return halve_max<H / 2>(v);
  return v[0];
}

void load_tile(float* z, const void* logits, int dtype, int count) {
  if (dtype == OUTRIDER_FLOAT32) {
    __builtin_memcpy(z, logits, static_cast<size_t>(count) * sizeof(float));
  } else {
    alignas(64) uint16_t half[TILE];
    __builtin_memcpy(half, logits, static_cast<size_t>(count) * sizeof(uint16_t));
    for (int i = count; i < TILE; ++i) half[i] = 0;
    if (dtype == OUTRIDER_FLOAT16)
      for (int i = 0; i < TILE; ++i) z[i] = from_float16(half[i]);
    else
      for (int i = 0; i < TILE; ++i) z[i] = from_bfloat16(half[i]);
  }
  for (int i = count; i < TILE; ++i) z[i] = -INF;
}

// Undefined for a tile with a NaN, which `sum` and `peak` detect.
float max_tile(const outrider_logit* z) {
  alignas(64) float v[TILE / 2];
  for (int i = 0; i < TILE / 2; ++i) v[i] = z[i] > z[i + TILE / 2] ? z[i] : z[i + TILE / 2];
  return halve_max<TILE / 4>(v);
}

float peak_tile(const outrider_logit* z, const void* next, int* broken) {
  constexpr int STEP = 64;
  alignas(64) float v[TILE / 2];
  alignas(64) int bad[STEP] = {};
  const char* read = static_cast<const char*>(next);
  for (int i = 0; i < TILE / 2; i += STEP) {
    for (int j = i * 8; j < (i + STEP) * 8; j += 64) __builtin_prefetch(read + j);
    for (int j = i; j < i + STEP; ++j) {
      const float a = z[j], b = z[j + TILE / 2];
      v[j] = a > b ? a : b;
      bad[j - i] |= static_cast<int>(!(a < INF)) | static_cast<int>(!(b < INF));
    }
  }
  int any = 0;
  for (int i = 0; i < STEP; ++i) any |= bad[i];
  *broken |= any;
  return halve_max<TILE / 4>(v);
}

// Prefetches the next tile, because hardware prefetching stops at every 4 KB page.
float sum_tile(const outrider_logit* z, float peak, float rate, const void* next) {
  constexpr int STEP = 32;
  alignas(64) float v[TILE / 2];
  const char* read = static_cast<const char*>(next);
  for (int i = 0; i < TILE / 2; i += STEP) {
    for (int j = i * 8; j < (i + STEP) * 8; j += 64) __builtin_prefetch(read + j);
    for (int j = i; j < i + STEP; ++j)
      v[j] = exp2_of((z[j] - peak) * rate) + exp2_of((z[j + TILE / 2] - peak) * rate);
  }
  return halve_sum<TILE / 4>(v);
}

float halves(const float* w) {
  alignas(64) float v[TILE / 2];
  for (int i = 0; i < TILE / 2; ++i) v[i] = w[i] + w[i + TILE / 2];
  return halve_sum<TILE / 4>(v);
}

float weigh_tile(float* w, const outrider_logit* z, const outrider_row* row, int first) {
  const outrider_row r = *row;
  if (r.cut == -INF && r.min_weight == 0)
    for (int i = 0; i < TILE; ++i) w[i] = exp2_of((z[i] - r.peak) * r.rate);
  else
    for (int i = 0; i < TILE; ++i) w[i] = weight_of(z[i], first + i, r);
  return halves(w);
}

void sigmoid_tile(float* w, const outrider_logit* z, const outrider_row* row, int first,
                  const outrider_slot* slot) {
  const outrider_row r = *row;
  const Sigmoid s = sigmoid_of(*slot);
  for (int i = 0; i < TILE; ++i) w[i] = sigmoid_value(z[i], first + i, r, s);
}

float residual_tile(float* a, float factor, const float* b) {
  for (int i = 0; i < TILE; ++i) a[i] = positive_part(a[i], factor, b[i]);
  return halves(a);
}

void bin_tile(int* bin, float* w, const outrider_logit* z, const outrider_row* row, int last_bin) {
  const outrider_row r = *row;
  const float last = static_cast<float>(last_bin);
  for (int i = 0; i < TILE; ++i) {
    const float t = (z[i] - r.peak) * r.rate;
    const float scaled = t * -64.0f;
    bin[i] = static_cast<int>(scaled < last ? scaled : last);
    w[i] = exp2_of(t);
  }
}

float exp2_one(float t) { return exp2_of(t); }

float weigh_one(float z, int id, const outrider_row* row) { return weight_of(z, id, *row); }

float sigmoid_one(float z, int id, const outrider_row* row, const outrider_slot* slot) {
  return sigmoid_value(z, id, *row, sigmoid_of(*slot));
}

} // namespace

extern "C" const struct outrider_tiles OUTRIDER_TABLE = {
    exp2_one, weigh_one,  sigmoid_one,  load_tile,     max_tile, peak_tile,
    sum_tile, weigh_tile, sigmoid_tile, residual_tile, bin_tile};
