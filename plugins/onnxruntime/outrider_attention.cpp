// The inner loops of attention. Compiled once per instruction set and type of the caches, with
// OUTRIDER_TABLE as the table's name and, for quantised caches, OUTRIDER_INT8 defined. No standard
// headers but the compiler's own: see outrider_tiles.cpp.
#include "outrider_attention.h"
#include "outrider_vector.h"

namespace {
using Call = outrider_attention;

constexpr int MAX_ROWS = OUTRIDER_ATTENTION_ROWS, MAX_WIDTH = OUTRIDER_ATTENTION_WIDTH;
constexpr int ROW_GROUP = 4; // query rows that share the loads of a key or value
// Vectors of a value that are processed at a time: ROW_GROUP x COLUMN_VECTORS sums.
constexpr int COLUMN_VECTORS = LANES == 16 ? 4 : 2;
constexpr int KEYS = OUTRIDER_ATTENTION_KEYS, PART = OUTRIDER_ATTENTION_PART;
constexpr float INF = __builtin_inff(), LOWEST = -__FLT_MAX__, LOG2_E = 1.44269504f;

// exp2_of of outrider_sampling.h for vectors: 2^t for t <= 0, exactly 0 below -126.5.
inline Vector exp2_of(Vector t) {
  const Vector magic = splat(12582912.0f), least = splat(-127.0f);
  const Vector y = t < least ? least : t;
  const Vector shifted = y + magic;
  const Vector r = y - (shifted - magic);
  Vector e = splat(1.3264727e-3f);
  e = fused(e, r, splat(9.671513e-3f));
  e = fused(e, r, splat(5.5507336e-2f));
  e = fused(e, r, splat(2.4022242e-1f));
  e = fused(e, r, splat(6.93147e-1f));
  e = fused(e, r, splat(1.0f));
  const Integers n = reinterpret_cast<Integers>(shifted) + 127;
  return e * reinterpret_cast<Vector>(n << 23);
}

// cap tanh(x / cap), with an error of a few ten-millionths of cap.
inline Vector soft_cap(Vector x, float cap) {
  const Vector t = x * splat(1 / cap), one = splat(1.0f);
  const Vector e = exp2_of((t < Vector{} ? t : -t) * splat(2 * LOG2_E));
  const Vector tanh = (one - e) / (one + e);
  return splat(cap) * (t < Vector{} ? -tanh : tanh);
}

// --- lanes -------------------------------------------------------------------------------------

// Lane i is the sum of lanes i and i ^ H: of a if bit H of i is 0, else of b.
template <int H, int... I> inline Vector merge(Vector a, Vector b, Lanes<I...>) {
  const Vector low = SHUFFLE(a, b, ((I & H ? LANES : 0) + (I & ~H))...);
  const Vector high = SHUFFLE(a, b, ((I & H ? LANES : 0) + (I | H))...);
  return low + high;
}

// --- blocks of keys and values -----------------------------------------------------------------
// Rows of a block and of the queries are `width` floats apart: D, padded to whole vectors with
// zeros. Weighted sums of values (`mixed`) have the values' width.

// The width as a compile-time constant if it is known: WIDTH, which is 0 otherwise.
#define FIXED(width) (WIDTH ? WIDTH : width)

template <int R> struct Rows {
  Vector v[R];
};

// Rows of the caches, `bytes` each, to prefetch into the level 2 cache, one per key, or null. They
// are read soon, and no processor prefetches them on its own.
struct Prefetch {
  const char* rows;
  int64_t bytes;

  inline void fetch(int row) const {
    if (!rows) return;
    for (int64_t byte = 0; byte < bytes; byte += 64)
      __builtin_prefetch(rows + row * bytes + byte, 0, 2);
  }
};

// The dot products of R queries with LANES keys, for H = LANES: lane i has that with key first + i.
// At H = 1, there is one key, and lane i has the sum of every LANES-th product from i on. Each
// level above adds halves of two vectors; lane i then belongs to the key whose number is i's bits
// below H. Keys are read in memory order, because another order halves the memory's throughput.
template <int R, int WIDTH, int H>
INLINE Rows<R> dot_products(const float* q, const float* keys, const Prefetch* prefetch, int width,
                            int first) {
  Rows<R> sums;
  if constexpr (H == 1) {
    for (int i = 0; i < 2; ++i) prefetch[i].fetch(first);
    const float* key = keys + first * FIXED(width);
    const Vector x = load(key);
    for (int r = 0; r < R; ++r) sums.v[r] = load(q + r * FIXED(width)) * x;
    for (int d = LANES; d < FIXED(width); d += LANES) {
      const Vector y = load(key + d);
      for (int r = 0; r < R; ++r) sums.v[r] = fused(load(q + r * FIXED(width) + d), y, sums.v[r]);
    }
  } else {
    const Rows<R> a = dot_products<R, WIDTH, H / 2>(q, keys, prefetch, width, first);
    const Rows<R> b = dot_products<R, WIDTH, H / 2>(q, keys, prefetch, width, first + H / 2);
    for (int r = 0; r < R; ++r)
      sums.v[r] = merge<H / 2>(a.v[r], b.v[r], typename Count<LANES>::type());
  }
  return sums;
}

constexpr Prefetch NO_PREFETCH[2] = {};

// The progress of a query row. `total` and its mixed values are sums with the weights
// 2^(score - peak).
struct Row {
  int64_t from, end; // the cache rows that it attends to
  const float* bias; // of cache row 0; null: none
  float peak;
  Vector total;
};

inline Integers indices() {
  Integers i{};
  for (int lane = 0; lane < LANES; ++lane) i[lane] = lane;
  return i;
}

// Computes the weights [R, KEYS] of a block's keys for R queries. If a peak rises, the sums so far
// are scaled down.
template <int R, int WIDTH>
void weigh_keys(Row* rows, const float* q, float* mixed, float* weights, const float* keys,
                const Prefetch* prefetch, int width, int mixed_width, int64_t block, float cap) {
  const int64_t last = rows[R - 1].end - block; // ends increase from row to row
  const int count = static_cast<int>(last < KEYS ? last : KEYS);
  Vector max_score[R];
  for (int r = 0; r < R; ++r) max_score[r] = splat(-INF);
  for (int j = 0; j < count; j += LANES) {
    const Rows<R> z = dot_products<R, WIDTH, LANES>(q, keys, prefetch, width, j);
    for (int r = 0; r < R; ++r) {
      const Integers at = indices() + j;
      const int64_t from = rows[r].from - block, end = rows[r].end - block;
      const Integers visible = (at >= static_cast<int>(from < 0 ? 0 : from)) &
                               (at < static_cast<int>(end < KEYS ? end : KEYS));
      Vector score = cap > 0 ? soft_cap(z.v[r], cap) : z.v[r];
      if (rows[r].bias) score = fused(load(rows[r].bias + block + j), splat(LOG2_E), score);
      score = visible ? score : splat(-INF);
      store(weights + r * KEYS + j, score);
      max_score[r] = larger(max_score[r], score);
    }
  }
  for (int r = 0; r < R; ++r) {
    const float block_peak = fold(max_score[r], larger<Vector>);
    const float peak = block_peak > rows[r].peak ? block_peak : rows[r].peak;
    const Vector decay = exp2_of(splat(rows[r].peak - peak));
    rows[r].peak = peak;
    rows[r].total *= decay;
    for (int d = 0; d < FIXED(mixed_width); d += LANES) {
      float* part = mixed + r * FIXED(mixed_width) + d;
      store(part, load(part) * decay);
    }
    for (int j = 0; j < count; j += LANES) {
      const Vector w = exp2_of(load(weights + r * KEYS + j) - splat(peak));
      rows[r].total += w;
      store(weights + r * KEYS + j, w);
    }
  }
}

// mixed += weights times values, for C vectors of each row, one value after another.
template <int R, int C>
inline void mix_columns(float* mixed, const float* weights, const float* values, int width,
                        int from, int end) {
  Vector sums[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sums[r][c] = load(mixed + r * width + c * LANES);
  for (int j = from; j < end; ++j) {
    Vector value[C];
    for (int c = 0; c < C; ++c) value[c] = load(values + j * width + c * LANES);
    for (int r = 0; r < R; ++r) {
      const Vector weight = splat(weights[r * KEYS + j]);
      for (int c = 0; c < C; ++c) sums[r][c] = fused(weight, value[c], sums[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(mixed + r * width + c * LANES, sums[r][c]);
}

template <int R, int WIDTH>
inline void mix_range(float* mixed, const float* weights, const float* values, int width, int from,
                      int end) {
  int d = 0;
  for (; d + COLUMN_VECTORS * LANES <= FIXED(width); d += COLUMN_VECTORS * LANES)
    mix_columns<R, COLUMN_VECTORS>(mixed + d, weights, values + d, FIXED(width), from, end);
  for (; d < FIXED(width); d += LANES)
    mix_columns<R, 1>(mixed + d, weights, values + d, FIXED(width), from, end);
}

// For each row, only the values that it attends to are read: the others may be anything, even NaN.
template <int R, int WIDTH>
void mix_values(const Row* rows, float* mixed, const float* weights, const float* values, int width,
                int64_t block) {
  int from[R], end[R];
  for (int r = 0; r < R; ++r) {
    const int64_t a = rows[r].from - block, b = rows[r].end - block;
    from[r] = static_cast<int>(a < 0 ? 0 : a);
    end[r] = static_cast<int>(b < KEYS ? b : KEYS);
  }
  const int all = from[R - 1], none = end[0]; // both increase from row to row
  if (all >= none) {
    for (int r = 0; r < R; ++r)
      mix_range<1, WIDTH>(mixed + r * FIXED(width), weights + r * KEYS, values, width, from[r],
                          end[r]);
    return;
  }
  for (int r = 0; r < R; ++r)
    if (from[r] < all)
      mix_range<1, WIDTH>(mixed + r * FIXED(width), weights + r * KEYS, values, width, from[r],
                          all);
  mix_range<R, WIDTH>(mixed, weights, values, width, all, none);
  for (int r = 0; r < R; ++r)
    if (none < end[r])
      mix_range<1, WIDTH>(mixed + r * FIXED(width), weights + r * KEYS, values, width, none,
                          end[r]);
}

// Rotates a head's elements of one token for its row of the cache.
void rotate(float* y, const float* x, const Call& c, int64_t row) {
  const int64_t half = c.rotated / 2, step = c.interleaved ? 2 : 1, other = c.interleaved ? 1 : half;
  const float *cosine = c.cosine + row * half, *sine = c.sine + row * half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i * step], b = x[i * step + other];
    y[i * step] = a * cosine[i] - b * sine[i];
    y[i * step + other] = b * cosine[i] + a * sine[i];
  }
  for (int64_t i = c.rotated; i < c.width; ++i) y[i] = x[i];
}

// --- rows of a cache ---------------------------------------------------------------------------

#if defined(OUTRIDER_INT8)
using Element = int8_t; // a row is its levels, followed by their scale, a float
inline int64_t row_size(int64_t width) { return width + OUTRIDER_ATTENTION_SCALE; }
// `dequantise` reads a block's keys, then its values, each in a run too short for the processor to
// predict.
constexpr bool SHORT_RUNS = true;

// Quantises a row: each element gets the nearest level, the one with the largest magnitude 127 or
// -127. A row with NaN or infinity is all NaN when it is read.
void store_row(int8_t* row, const float* x, int64_t width) {
  float largest = 0, not_finite = 0; // NaN if an element is not finite
  for (int64_t d = 0; d < width; ++d) {
    const float size = __builtin_fabsf(x[d]);
    largest = size > largest ? size : largest;
    not_finite += x[d] * 0.0f;
  }
  const float scale = largest / 127 + not_finite, magic = 12582912.0f;
  const bool divisible = scale > 1e-30f; // not NaN, nor too small to divide by
  for (int64_t d = 0; d < width; ++d)
    row[d] = divisible ? static_cast<int8_t>(x[d] / scale + magic - magic) : int8_t{0};
  __builtin_memcpy(row + width, &scale, sizeof scale);
}

void store_rotated(int8_t* to, const float* x, const Call& c, int64_t row) {
  alignas(64) float y[MAX_WIDTH];
  rotate(y, x, c, row);
  store_row(to, y, c.width);
}

template <int WIDTH>
void dequantise(float* to, const int8_t* rows, int64_t count, int64_t row_width, int width) {
  const int own = static_cast<int>(FIXED(row_width));
  for (int64_t i = 0; i < count; ++i, to += width, rows += own + OUTRIDER_ATTENTION_SCALE) {
    float scale;
    __builtin_memcpy(&scale, rows + own, sizeof scale);
    for (int d = 0; d < own; ++d) to[d] = static_cast<float>(rows[d]) * scale;
    for (int d = own; d < width; ++d) to[d] = 0;
  }
}

// KEYS rows of a head's cache from `first` on as floats, with zeros beyond its end. row_width: the
// number of elements in a row.
const float* rows_of(const int8_t* cache, int64_t rows, int64_t row_width, int64_t first, int width,
                     float* copy) {
  const int8_t* source = cache + first * row_size(row_width);
  const int64_t available = rows - first < KEYS ? rows - first : KEYS;
  switch (row_width) {
  case 64: dequantise<64>(copy, source, available, row_width, width); break;
  case 128: dequantise<128>(copy, source, available, row_width, width); break;
  default: dequantise<0>(copy, source, available, row_width, width);
  }
  for (int64_t i = available * width; i < KEYS * width; ++i) copy[i] = 0;
  return copy;
}
#else
using Element = float;
inline int64_t row_size(int64_t width) { return width; }
constexpr bool SHORT_RUNS = false;

inline void store_row(float* row, const float* x, int64_t width) {
  __builtin_memcpy(row, x, static_cast<unsigned long>(width) * sizeof(float));
}

inline void store_rotated(float* to, const float* x, const Call& c, int64_t row) {
  rotate(to, x, c, row);
}

// KEYS rows of a head's cache from `first` on: in place, or copied with zeros beyond its end.
// row_width: the number of elements in a row.
const float* rows_of(const float* cache, int64_t rows, int64_t row_width, int64_t first, int width,
                     float* copy) {
  const float* source = cache + first * row_width;
  if (width == row_width && first + KEYS <= rows) return source;
  const int64_t available = rows - first < KEYS ? rows - first : KEYS;
  for (int64_t row = 0; row < KEYS; ++row)
    for (int64_t d = 0; d < width; ++d)
      copy[row * width + d] = row < available && d < row_width ? source[row * row_width + d] : 0.0f;
  return copy;
}
#endif

inline Prefetch prefetch_rows(const Element* cache, int64_t width, int64_t first) {
  const Element* rows = cache + first * row_size(width);
  return {reinterpret_cast<const char*>(rows), row_size(width) * int64_t{sizeof(Element)}};
}

void write(const Call* call, int64_t slot, int64_t key_head) {
  const Call& c = *call;
  const int64_t cache = (slot * c.key_heads + key_head) * c.rows;
  for (int64_t token = 0; token < c.tokens; ++token) {
    const int64_t row = c.position[slot] + token, source = slot * c.tokens + token;
    store_rotated(static_cast<Element*>(c.keys) + (cache + row) * row_size(c.width),
                  c.key + source * c.key_stride + key_head * c.width, c, row);
    store_row(static_cast<Element*>(c.values) + (cache + row) * row_size(c.value_width),
              c.value + source * c.value_stride + key_head * c.value_width, c.value_width);
  }
}

// --- one head of one slot ----------------------------------------------------------------------

inline int whole_vectors(int64_t width) {
  return static_cast<int>((width + LANES - 1) / LANES * LANES);
}

// Query rows first .. first + count - 1 of a head: the cache rows that they attend to, and their
// elements, rotated, scaled and padded to whole vectors.
struct Queries {
  const Call& c;
  int64_t slot, key_head, first, group;
  int count, width, mixed_width;
  Row rows[MAX_ROWS];
  alignas(64) float q[MAX_ROWS * MAX_WIDTH];

  Queries(const Call& call, int64_t slot_, int64_t key_head_, int64_t first_, int64_t end)
      : c(call), slot(slot_), key_head(key_head_), first(first_), group(c.heads / c.key_heads),
        count(static_cast<int>(end - first)), width(whole_vectors(c.width)),
        mixed_width(whole_vectors(c.value_width)) {}

  int64_t token(int r) const { return (first + r) / group; }
  int64_t head(int r) const { return key_head * group + (first + r) % group; }

  void read() {
    for (int r = 0; r < count; ++r) {
      const int64_t own = c.length ? 0 : c.position[slot] + token(r);
      const int64_t from = outrider_attention_first_row(c, own);
      const float* bias = c.bias ? c.bias + head(r) * c.distances + c.farthest - own : nullptr;
      rows[r] = {from, c.length ? c.length[slot] : own + 1, bias, LOWEST, Vector{}};
      float* to = q + r * width;
      rotate(to, c.query + (slot * c.tokens + token(r)) * c.query_stride + head(r) * c.width, c, own);
      for (int64_t d = 0; d < c.width; ++d) to[d] *= c.scale * LOG2_E; // 2^x, not e^x
      for (int64_t d = c.width; d < width; ++d) to[d] = 0;
    }
  }
};

// Computes the sums over one part: the rows' peaks and totals, and the mixed values.
template <int WIDTH> void sum_part(Queries* queries, int64_t part, float* mixed) {
  const Call& c = queries->c;
  const int count = queries->count, width = queries->width, mixed_width = queries->mixed_width;
  const float cap = c.softcap * LOG2_E;
  Row* rows = queries->rows;
  alignas(64) float weights[MAX_ROWS * KEYS];
  alignas(64) float copy[KEYS * MAX_WIDTH]; // used only if rows cannot be read in place
  // Not -INF, because -INF - -INF is NaN, and all scores of a row in a part may be -INF.
  for (int r = 0; r < count; ++r) rows[r].peak = LOWEST, rows[r].total = Vector{};
  for (int i = 0; i < count * mixed_width; ++i) mixed[i] = 0;
  const int64_t cache = (queries->slot * c.key_heads + queries->key_head) * c.rows;
  const Element* all_keys = static_cast<Element*>(c.keys) + cache * row_size(c.width);
  const Element* all_values = static_cast<Element*>(c.values) + cache * row_size(c.value_width);
  const int64_t from = part * PART > rows[0].from ? part * PART : rows[0].from / KEYS * KEYS;
  const int64_t part_end = (part + 1) * PART, end = rows[count - 1].end;
  int row_begin = 0, row_end = 0; // the rows that attend to keys of a block; both bounds increase
  for (int64_t block = from; block < (part_end < end ? part_end : end); block += KEYS) {
    while (rows[row_begin].end <= block) ++row_begin;
    while (row_end < count && rows[row_end].from < block + KEYS) ++row_end;
    const float* keys = rows_of(all_keys, c.rows, c.width, block, width, copy);
    // The first group of rows waits for memory. If there are more, the second one computes from
    // the processor's caches, and the next rows can be fetched meanwhile. If not, fetching ahead
    // helps only where `mix_range` takes the values' columns in several passes, or runs are short.
    const bool several = row_end - row_begin > ROW_GROUP;
    const bool passes = mixed_width != COLUMN_VECTORS * LANES;
    Prefetch all[2]{};
    if (several || passes || SHORT_RUNS) all[0] = prefetch_rows(all_values, c.value_width, block);
    if (several || SHORT_RUNS) all[1] = prefetch_rows(all_keys, c.width, block + KEYS);
    const int fetching = row_begin + (several ? ROW_GROUP : 0);
    for (int r = row_begin; r < row_end; r += ROW_GROUP) {
      const Prefetch* prefetch = r == fetching ? all : NO_PREFETCH;
      float *q = queries->q + r * width, *own = mixed + r * mixed_width, *w = weights + r * KEYS;
      switch (row_end - r) {
      case 1:
        weigh_keys<1, WIDTH>(rows + r, q, own, w, keys, prefetch, width, mixed_width, block, cap);
        break;
      case 2:
        weigh_keys<2, WIDTH>(rows + r, q, own, w, keys, prefetch, width, mixed_width, block, cap);
        break;
      case 3:
        weigh_keys<3, WIDTH>(rows + r, q, own, w, keys, prefetch, width, mixed_width, block, cap);
        break;
      default:
        weigh_keys<ROW_GROUP, WIDTH>(rows + r, q, own, w, keys, prefetch, width, mixed_width, block,
                                     cap);
      }
    }
    const float* values = rows_of(all_values, c.rows, c.value_width, block, mixed_width, copy);
    for (int r = row_begin; r < row_end; r += ROW_GROUP) {
      float *own = mixed + r * mixed_width, *w = weights + r * KEYS;
      switch (row_end - r) {
      case 1: mix_values<1, WIDTH>(rows + r, own, w, values, mixed_width, block); break;
      case 2: mix_values<2, WIDTH>(rows + r, own, w, values, mixed_width, block); break;
      case 3: mix_values<3, WIDTH>(rows + r, own, w, values, mixed_width, block); break;
      default: mix_values<ROW_GROUP, WIDTH>(rows + r, own, w, values, mixed_width, block);
      }
    }
  }
}

// With the width as a compile-time constant for common widths.
void sum_part_of(Queries* queries, int64_t part, float* mixed) {
  const Call& c = queries->c;
  switch (c.width == c.value_width ? c.width : 0) {
  case 64: return sum_part<64>(queries, part, mixed);
  case 128: return sum_part<128>(queries, part, mixed);
  default: return sum_part<0>(queries, part, mixed);
  }
}

// The sums of a row over the parts added so far.
struct RowSum {
  float peak, total;

  // A part in which the row attends to nothing, or only to scores of -INF, has the total 0; a part
  // with a NaN does not.
  void add(float part_peak, float part_total, float* mixed, const float* part_mixed, int width) {
    if (part_total == 0) return;
    const float new_peak = part_peak > peak ? part_peak : peak;
    const Vector scale = exp2_of(splat(peak - new_peak)),
                 part_scale = exp2_of(splat(part_peak - new_peak));
    total = total * scale[0] + part_total * part_scale[0];
    peak = new_peak;
    for (int d = 0; d < width; d += LANES)
      store(mixed + d, load(mixed + d) * scale + load(part_mixed + d) * part_scale);
  }
};

RowSum initial_sum(const Queries& queries, int r) {
  const float* sinks = queries.c.sinks;
  return sinks ? RowSum{sinks[queries.head(r)] * LOG2_E, 1} : RowSum{-INF, 0};
}

void write_output(const Queries& queries, int r, const RowSum& sum, const float* mixed) {
  const Call& c = queries.c;
  const int64_t row = (queries.slot * c.tokens + queries.token(r)) * c.heads + queries.head(r);
  const float inverse_total = 1.0f / sum.total;
  for (int64_t d = 0; d < c.value_width; ++d)
    c.out[row * c.value_width + d] = mixed[d] * inverse_total;
}

void attend(const Call* call, int64_t slot, int64_t key_head, int64_t first, int64_t end) {
  Queries queries(*call, slot, key_head, first, end);
  queries.read();
  const int width = queries.mixed_width, all = queries.count * width;
  alignas(64) float part[MAX_ROWS * MAX_WIDTH], mixed[MAX_ROWS * MAX_WIDTH];
  for (int i = 0; i < all; ++i) mixed[i] = 0;
  RowSum sums[MAX_ROWS];
  for (int r = 0; r < queries.count; ++r) sums[r] = initial_sum(queries, r);
  const int64_t end_row = queries.rows[queries.count - 1].end;
  for (int64_t i = queries.rows[0].from / PART; i * PART < end_row; ++i) {
    sum_part_of(&queries, i, part);
    for (int r = 0; r < queries.count; ++r) {
      const Row& row = queries.rows[r];
      sums[r].add(row.peak, fold(row.total, sum_of<Vector>), mixed + r * width, part + r * width,
                  width);
    }
  }
  for (int r = 0; r < queries.count; ++r) write_output(queries, r, sums[r], mixed + r * width);
}

void attend_parts(const Call* call, int64_t slot, int64_t key_head, int64_t first_part,
                  int64_t end_part, float* sums) {
  Queries queries(*call, slot, key_head, 0, outrider_attention_rows(*call));
  queries.read();
  const int width = queries.mixed_width;
  const int64_t stride = outrider_attention_stride(*call);
  alignas(64) float part[MAX_ROWS * MAX_WIDTH];
  for (int64_t i = first_part; i < end_part; ++i) {
    sum_part_of(&queries, i, part);
    for (int r = 0; r < queries.count; ++r) {
      float* to = sums + ((i - first_part) * queries.count + r) * stride;
      for (int d = 0; d < width; ++d) to[d] = part[r * width + d];
      to[stride - 2] = queries.rows[r].peak;
      to[stride - 1] = fold(queries.rows[r].total, sum_of<Vector>);
    }
  }
}

void combine(const Call* call, int64_t slot, int64_t key_head, int64_t parts, const float* sums) {
  const Queries queries(*call, slot, key_head, 0, outrider_attention_rows(*call));
  const int64_t stride = outrider_attention_stride(*call);
  alignas(64) float mixed[MAX_WIDTH];
  for (int r = 0; r < queries.count; ++r) {
    RowSum sum = initial_sum(queries, r);
    for (int d = 0; d < queries.mixed_width; ++d) mixed[d] = 0;
    for (int64_t i = 0; i < parts; ++i) {
      const float* part = sums + (i * queries.count + r) * stride;
      sum.add(part[stride - 2], part[stride - 1], mixed, part, queries.mixed_width);
    }
    write_output(queries, r, sum, mixed);
  }
}

} // namespace

extern "C" const struct outrider_attention_tiles OUTRIDER_TABLE = {OUTRIDER_SET, write, attend,
                                                                   attend_parts, combine};
