// The inner loops of recurrent states and short convolutions. Compiled once per instruction set,
// with OUTRIDER_TABLE as the table's name. No standard headers but the compiler's own: see
// outrider_tiles.cpp.
#include "outrider_recurrence.h"
#include "outrider_vector.h"

namespace {
using Call = outrider_recurrence;
using Convolution = outrider_convolution;

constexpr int MAX_WIDTH = OUTRIDER_RECURRENCE_WIDTH, MAX_TAPS = OUTRIDER_RECURRENCE_TAPS;
constexpr int COLUMNS = OUTRIDER_RECURRENCE_COLUMNS;
constexpr int STRIP = 8;          // maximum vectors of columns at a time: two sums for each
constexpr int FEW = 16, RUN = 32; // tokens of a convolution at a time

// e^x for any x, with an error of at most about one ulp: as in Cephes, the nearest power of 2 times
// a polynomial of the remainder. The power is two factors, because one may be out of range.
inline Vector exp_of(Vector x) {
  const Vector lowest = splat(-104.0f), highest = splat(89.0f), magic = splat(12582912.0f);
  Vector y = x < lowest ? lowest : x; // NaN is preserved
  y = y > highest ? highest : y;
  const Vector shifted = fused(y, splat(1.44269504f), magic), whole = shifted - magic;
  Vector r = fused(whole, splat(-0.693359375f), y); // an exact product: ln 2 in two parts
  r = fused(whole, splat(2.12194440e-4f), r);
  Vector e = splat(1.9875691500e-4f);
  e = fused(e, r, splat(1.3981999507e-3f));
  e = fused(e, r, splat(8.3334519073e-3f));
  e = fused(e, r, splat(4.1665795894e-2f));
  e = fused(e, r, splat(1.6666665459e-1f));
  e = fused(e, r, splat(5.0000001201e-1f));
  e = fused(e, r * r, r) + splat(1.0f);
  const Integers n = reinterpret_cast<Integers>(shifted) - 0x4B400000, half = n >> 1;
  const Integers rest = n - half;
  return e * reinterpret_cast<Vector>((half + 127) << 23) *
         reinterpret_cast<Vector>((rest + 127) << 23);
}

// Copies numbers to or from a row, whose end may be within a vector.
inline void copy(float* to, const float* from, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = from[i];
}

// The decay factors [Dk] of a token.
void decay(float* factors, const float* logarithms, const Call& c) {
  if (c.decays == 1) {
    const Vector factor = exp_of(splat(logarithms[0]));
    for (int64_t d = 0; d < c.key_width; d += LANES) store(factors + d, factor);
    return;
  }
  for (int64_t d = 0; d < c.key_width; d += LANES) {
    alignas(64) float few[LANES] = {};
    copy(few, logarithms + d, c.key_width - d < LANES ? c.key_width - d : LANES);
    store(factors + d, exp_of(load(few)));
  }
}

// Passes over a state of V vectors of columns, [depth, V LANES]. Reading and writing the rows of
// the cache takes longest, so they are merged into the passes.

// Decays the state, read from rows of `pitch`, and multiplies it by a key.
template <int V>
void recall(float* state, Vector* found, const float* from, int64_t pitch, const float* factors,
            const float* key, int64_t depth) {
  for (int v = 0; v < V; ++v) found[v] = Vector{};
  for (int64_t d = 0; d < depth; ++d, state += V * LANES, from += pitch)
    for (int v = 0; v < V; ++v) {
      const Vector s = load(from + v * LANES) * splat(factors[d]);
      store(state + v * LANES, s);
      found[v] = fused(splat(key[d]), s, found[v]);
    }
}

// Adds `more` to the state for a key, and multiplies it by a query. kept: if not null, also stores
// the state there, in rows of `pitch`.
template <int V>
void update(float* state, Vector* found, float* kept, int64_t pitch, const Vector* more,
            const float* key, const float* query, int64_t depth) {
  for (int v = 0; v < V; ++v) found[v] = Vector{};
  for (int64_t d = 0; d < depth; ++d, state += V * LANES)
    for (int v = 0; v < V; ++v) {
      const Vector s = fused(splat(key[d]), more[v], load(state + v * LANES));
      store(state + v * LANES, s);
      if (kept != nullptr) store(kept + d * pitch + v * LANES, s);
      found[v] = fused(splat(query[d]), s, found[v]);
    }
}

// Computes `count` columns from `first` on, V vectors or a part of one, for all tokens.
template <int V>
void recur_strip(const Call& c, int64_t slot, int64_t head, int64_t first, int64_t count) {
  alignas(64) float state[MAX_WIDTH * V * LANES];
  alignas(64) float factors[MAX_WIDTH + LANES], own[V * LANES] = {};
  const int64_t depth = c.key_width, position = c.position[slot];
  const int64_t key_head = head / (c.heads / c.key_heads);
  float* const ring = c.states + (slot * c.heads + head) * c.rows * depth * c.width + first;
  const auto row = [&](int64_t number) { return ring + number % c.rows * depth * c.width; };
  const bool whole = count == V * LANES; // otherwise rows are copied
  const float* from = state;
  if (position > 0 && whole) {
    from = row(position - 1);
  } else {
    for (int64_t i = 0; i < depth * V * LANES; i += LANES) store(state + i, Vector{});
    for (int64_t d = 0; d < depth && position > 0; ++d)
      copy(state + d * V * LANES, row(position - 1) + d * c.width, count);
  }
  for (int64_t t = 0; t < c.tokens; ++t, from = state) {
    const int64_t token = slot * c.tokens + t, place = token * c.heads + head;
    const int64_t key_place = (token * c.key_heads + key_head) * depth;
    const float *key = c.key + key_place, *query = c.query + key_place;
    float* const to = t >= c.tokens - c.rows ? row(position + t) : nullptr;
    decay(factors, c.decay + place * c.decays, c);
    copy(own, c.value + place * c.width + first, count);
    Vector more[V], found[V];
    recall<V>(state, found, from, from == state ? V * LANES : c.width, factors, key, depth);
    for (int v = 0; v < V; ++v) {
      more[v] = load(own + v * LANES);
      if (c.beta != nullptr) more[v] = splat(c.beta[place]) * (more[v] - found[v]);
    }
    update<V>(state, found, whole ? to : nullptr, c.width, more, key, query, depth);
    for (int v = 0; v < V; ++v) store(own + v * LANES, found[v]);
    copy(c.out + place * c.width + first, own, count);
    for (int64_t d = 0; d < depth && to != nullptr && !whole; ++d)
      copy(to + d * c.width, state + d * V * LANES, count);
  }
}

// Strips of V vectors as long as possible, then of half as many. Wide ones are preferred, because
// narrow ones read only a cache line of each row at a time.
template <int V>
void recur_strips(const Call& c, int64_t slot, int64_t head, int64_t at, int64_t end) {
  for (; at + V * LANES <= end; at += V * LANES) recur_strip<V>(c, slot, head, at, V * LANES);
  if (at == end) return;
  if constexpr (V > 1) recur_strips<V / 2>(c, slot, head, at, end);
  else recur_strip<1>(c, slot, head, at, end - at);
}

void recur(const Call* call, int64_t slot, int64_t head, int64_t first, int64_t end) {
  recur_strips<STRIP>(*call, slot, head, first, end);
}

// --- short convolutions ------------------------------------------------------------------------
// Vectorised by the compiler: over channels for few tokens, else over tokens. Either way, a sum
// starts with the bias and adds its products in order, each rounded.

// Transposes from [rows, columns] into to [columns, rows], with the given pitches.
void transpose(float* to, int64_t to_pitch, const float* from, int64_t pitch, int64_t rows,
               int64_t columns) {
  if (columns == 1 && pitch == 1) return copy(to, from, rows);
  if (rows == 1 && to_pitch == 1) return copy(to, from, columns);
  for (int64_t k = 0; k < columns; ++k)
    for (int64_t r = 0; r < rows; ++r) to[k * to_pitch + r] = from[r * pitch + k];
}

// TAPS: K if known at compile time, else 0.
template <int TAPS>
void convolve_channels(const Convolution& c, int64_t slot, int64_t first, int64_t count) {
  const int64_t taps = TAPS ? TAPS : c.taps, before = taps - 1, tokens = c.tokens;
  const int64_t position = c.position[slot];
  const float* const input = c.x + (slot * c.channels + first) * tokens;
  const float* const weight = c.weight + first * taps;
  float* const ring = c.past + slot * c.rows * c.channels + first;
  float* const out = c.out + (slot * c.channels + first) * tokens;
  alignas(64) float bias[COLUMNS] = {}, x[MAX_TAPS - 1 + FEW][COLUMNS], y[FEW][COLUMNS];
  if (c.bias != nullptr) copy(bias, c.bias + first, count);
  for (int64_t j = 0; j < before; ++j) {
    const int64_t row = position - before + j;
    for (int64_t i = 0; i < count; ++i) x[j][i] = 0;
    if (row >= 0) copy(x[j], ring + row % c.rows * c.channels, count);
  }
  if (tokens <= FEW) {
    transpose(x[before], COLUMNS, input, tokens, count, tokens);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t i = 0; i < count; ++i) {
        float sum = bias[i];
        for (int64_t j = 0; j < taps; ++j) sum += weight[i * taps + j] * x[t + j][i];
        y[t][i] = sum;
      }
    transpose(out, tokens, y[0], COLUMNS, tokens, count);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      float line[MAX_TAPS - 1 + RUN];
      for (int64_t j = 0; j < before; ++j) line[j] = x[j][i];
      for (int64_t start = i * tokens, end = start + tokens; start < end; start += RUN) {
        const int64_t run = end - start < RUN ? end - start : RUN;
        copy(line + before, input + start, run);
        for (int64_t t = 0; t < run; ++t) {
          float sum = bias[i];
          for (int64_t j = 0; j < taps; ++j) sum += weight[i * taps + j] * line[t + j];
          out[start + t] = sum;
        }
        for (int64_t j = 0; j < before; ++j) line[j] = line[run + j];
      }
    }
  }
  for (int64_t t = tokens > c.rows ? tokens - c.rows : 0; t < tokens; ++t) {
    float* const row = ring + (position + t) % c.rows * c.channels;
    if (tokens <= FEW) copy(row, x[before + t], count);
    else transpose(row, count, input + t, tokens, count, 1);
  }
}

void convolve(const Convolution* call, int64_t slot, int64_t first, int64_t end) {
  switch (call->taps) {
  case 3: return convolve_channels<3>(*call, slot, first, end - first);
  case 4: return convolve_channels<4>(*call, slot, first, end - first);
  default: return convolve_channels<0>(*call, slot, first, end - first);
  }
}

} // namespace

extern "C" const struct outrider_recurrence_tiles OUTRIDER_TABLE = {OUTRIDER_SET, recur, convolve};
