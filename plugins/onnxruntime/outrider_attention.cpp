// The inner loops of attention. Compiled once per instruction set and type of the caches, with
// OUTRIDER_TABLE naming the table, and OUTRIDER_INT8 defined where rows are quantised. No standard
// headers but the compiler's own: see outrider_tiles.cpp.
#include "outrider_attention.h"
#include "outrider_vector.h"

namespace {
using Call = outrider_attention;

constexpr int MOST_ROWS = OUTRIDER_ATTENTION_ROWS, MOST_WIDTH = OUTRIDER_ATTENTION_WIDTH;
constexpr int TOGETHER = 4;                   // query rows that share the loads of a key or value
constexpr int COLUMNS = LANES == 16 ? 4 : 2;  // vectors of a value at a time: of TOGETHER x COLUMNS
constexpr int KEYS = OUTRIDER_ATTENTION_KEYS, PART = OUTRIDER_ATTENTION_PART;
constexpr float INF = __builtin_inff(), LEAST = -__FLT_MAX__, LOG2_E = 1.44269504f;

// exp2_of of outrider_sampling.h for a vector: 2^t for t <= 0, exactly 0 below -126.5.
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

// cap tanh(x / cap), off by a few ten-millionths of cap.
inline Vector capped(Vector x, float cap) {
  const Vector t = x * splat(1 / cap), one = splat(1.0f);
  const Vector e = exp2_of((t < Vector{} ? t : -t) * splat(2 * LOG2_E));
  const Vector tanh = (one - e) / (one + e);
  return splat(cap) * (t < Vector{} ? -tanh : tanh);
}

// --- lanes -------------------------------------------------------------------------------------

// Lane i: of a where bit H of i is 0, else of b, the sum of the lanes i and i ^ H.
template <int H, int... I> inline Vector merge(Vector a, Vector b, Lanes<I...>) {
  const Vector low = SHUFFLE(a, b, ((I & H ? LANES : 0) + (I & ~H))...);
  const Vector high = SHUFFLE(a, b, ((I & H ? LANES : 0) + (I | H))...);
  return low + high;
}

// --- blocks of keys and values -----------------------------------------------------------------
// Rows of a block and of queries are `width` floats apart: D, made up to whole vectors by zeros.
// What is mixed has the values' width.

// The width where it is known to the compiler: WIDTH, which is 0 where it is not.
#define WIDE(width) (WIDTH ? WIDTH : width)

template <int R> struct Rows {
  Vector of[R];
};

// Rows of the caches that are read soon, `bytes` each, or null: fetched into the second cache, one at
// a key, where no processor would fetch them by itself.
struct Soon {
  const char* rows;
  int64_t bytes;

  inline void fetch(int row) const {
    if (!rows) return;
    for (int64_t byte = 0; byte < bytes; byte += 64)
      __builtin_prefetch(rows + row * bytes + byte, 0, 2);
  }
};

// The products of R queries with LANES keys, for H = LANES: lane i has that with key first + i. From
// H = 1, the sums of one key that every LANES-th number adds to, each step up adds halves of two
// vectors: lane i then has what belongs to the key with i's bits below H. Keys are read as they lie:
// in another order memory gives half of what it can.
template <int R, int WIDTH, int H>
INLINE Rows<R> products(const float* q, const float* keys, const Soon* soon, int width, int first) {
  Rows<R> sums;
  if constexpr (H == 1) {
    for (int i = 0; i < 2; ++i) soon[i].fetch(first);
    const float* key = keys + first * WIDE(width);
    const Vector x = load(key);
    for (int r = 0; r < R; ++r) sums.of[r] = load(q + r * WIDE(width)) * x;
    for (int d = LANES; d < WIDE(width); d += LANES) {
      const Vector y = load(key + d);
      for (int r = 0; r < R; ++r)
        sums.of[r] = fused(load(q + r * WIDE(width) + d), y, sums.of[r]);
    }
  } else {
    const Rows<R> a = products<R, WIDTH, H / 2>(q, keys, soon, width, first);
    const Rows<R> b = products<R, WIDTH, H / 2>(q, keys, soon, width, first + H / 2);
    for (int r = 0; r < R; ++r)
      sums.of[r] = merge<H / 2>(a.of[r], b.of[r], typename Count<LANES>::type());
  }
  return sums;
}

constexpr Soon NO_MORE[2] = {};

// How far a query row is: `total` and what is mixed for it are sums of 2^(score - peak).
struct Row {
  int64_t from, end; // the rows of the cache that it sees
  const float* bias; // of row 0; null: none
  float peak;
  Vector total;
};

inline Integers indices() {
  Integers i{};
  for (int lane = 0; lane < LANES; ++lane) i[lane] = lane;
  return i;
}

// The weights [R, KEYS] of a block's keys for R queries. Where the peak rises, what was summed so far
// fades.
template <int R, int WIDTH>
void weigh(Row* rows, const float* q, float* mixed, float* weights, const float* keys,
           const Soon* soon, int width, int mixed_width, int64_t block, float cap) {
  const int64_t last = rows[R - 1].end - block; // ends rise from row to row
  const int count = static_cast<int>(last < KEYS ? last : KEYS);
  Vector most[R];
  for (int r = 0; r < R; ++r) most[r] = splat(-INF);
  for (int j = 0; j < count; j += LANES) {
    const Rows<R> z = products<R, WIDTH, LANES>(q, keys, soon, width, j);
    for (int r = 0; r < R; ++r) {
      const Integers at = indices() + j;
      const int64_t from = rows[r].from - block, end = rows[r].end - block;
      const Integers seen = (at >= static_cast<int>(from < 0 ? 0 : from)) &
                            (at < static_cast<int>(end < KEYS ? end : KEYS));
      Vector score = cap > 0 ? capped(z.of[r], cap) : z.of[r];
      if (rows[r].bias) score = fused(load(rows[r].bias + block + j), splat(LOG2_E), score);
      score = seen ? score : splat(-INF);
      store(weights + r * KEYS + j, score);
      most[r] = larger(most[r], score);
    }
  }
  for (int r = 0; r < R; ++r) {
    const float found = fold(most[r], larger<Vector>);
    const float peak = found > rows[r].peak ? found : rows[r].peak;
    const Vector fade = exp2_of(splat(rows[r].peak - peak));
    rows[r].peak = peak;
    rows[r].total *= fade;
    for (int d = 0; d < WIDE(mixed_width); d += LANES) {
      float* part = mixed + r * WIDE(mixed_width) + d;
      store(part, load(part) * fade);
    }
    for (int j = 0; j < count; j += LANES) {
      const Vector w = exp2_of(load(weights + r * KEYS + j) - splat(peak));
      rows[r].total += w;
      store(weights + r * KEYS + j, w);
    }
  }
}

// mixed += weights by values, of C vectors of each row, value after value.
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
  for (; d + COLUMNS * LANES <= WIDE(width); d += COLUMNS * LANES)
    mix_columns<R, COLUMNS>(mixed + d, weights, values + d, WIDE(width), from, end);
  for (; d < WIDE(width); d += LANES)
    mix_columns<R, 1>(mixed + d, weights, values + d, WIDE(width), from, end);
}

// A value that a row does not see is not read for it: it may be anything, NaN too.
template <int R, int WIDTH>
void mix(const Row* rows, float* mixed, const float* weights, const float* values, int width,
         int64_t block) {
  int from[R], end[R];
  for (int r = 0; r < R; ++r) {
    const int64_t a = rows[r].from - block, b = rows[r].end - block;
    from[r] = static_cast<int>(a < 0 ? 0 : a);
    end[r] = static_cast<int>(b < KEYS ? b : KEYS);
  }
  const int all = from[R - 1], none = end[0]; // both rise from row to row
  if (all >= none) {
    for (int r = 0; r < R; ++r)
      mix_range<1, WIDTH>(mixed + r * WIDE(width), weights + r * KEYS, values, width, from[r],
                          end[r]);
    return;
  }
  for (int r = 0; r < R; ++r)
    if (from[r] < all)
      mix_range<1, WIDTH>(mixed + r * WIDE(width), weights + r * KEYS, values, width, from[r], all);
  mix_range<R, WIDTH>(mixed, weights, values, width, all, none);
  for (int r = 0; r < R; ++r)
    if (none < end[r])
      mix_range<1, WIDTH>(mixed + r * WIDE(width), weights + r * KEYS, values, width, none, end[r]);
}

// A head's numbers of one token, rotated for its row of the cache.
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
using Cell = int8_t; // a row is its levels and, behind them, the float that they are multiples of
inline int64_t pitch(int64_t width) { return width + OUTRIDER_ATTENTION_SCALE; }

// `dequantise` reads a block's keys, then its values, at once: too short to be foreseen.
inline Soon soon_values(const int8_t* cache, int64_t width, int64_t first) {
  return {reinterpret_cast<const char*>(cache + first * pitch(width)), pitch(width)};
}
inline Soon soon_keys(const int8_t* cache, int64_t width, int64_t first) {
  return soon_values(cache, width, first);
}

// The level of each number is the nearest: the row's largest has 127 or -127. A row with NaN or
// infinity is all NaN when it is read.
void put(int8_t* row, const float* x, int64_t width) {
  float largest = 0, odd = 0; // NaN where a number is not finite
  for (int64_t d = 0; d < width; ++d) {
    const float size = __builtin_fabsf(x[d]);
    largest = size > largest ? size : largest;
    odd += x[d] * 0.0f;
  }
  const float scale = largest / 127 + odd, magic = 12582912.0f;
  const bool some = scale > 1e-30f; // not NaN, nor too small to divide by
  for (int64_t d = 0; d < width; ++d)
    row[d] = some ? static_cast<int8_t>(x[d] / scale + magic - magic) : int8_t{0};
  __builtin_memcpy(row + width, &scale, sizeof scale);
}

void put_rotated(int8_t* to, const float* x, const Call& c, int64_t row) {
  alignas(64) float y[MOST_WIDTH];
  rotate(y, x, c, row);
  put(to, y, c.width);
}

template <int WIDTH>
void dequantise(float* to, const int8_t* rows, int64_t count, int64_t of_row, int width) {
  const int own = static_cast<int>(WIDE(of_row));
  for (int64_t i = 0; i < count; ++i, to += width, rows += own + OUTRIDER_ATTENTION_SCALE) {
    float scale;
    __builtin_memcpy(&scale, rows + own, sizeof scale);
    for (int d = 0; d < own; ++d) to[d] = static_cast<float>(rows[d]) * scale;
    for (int d = own; d < width; ++d) to[d] = 0;
  }
}

// KEYS rows of a head's cache from `first` on, as floats, with zeros for what is not there. own: how
// many numbers a row has.
const float* rows_of(const int8_t* cache, int64_t rows, int64_t own, int64_t first, int width,
                     float* copy) {
  const int8_t* source = cache + first * pitch(own);
  const int64_t there = rows - first < KEYS ? rows - first : KEYS;
  switch (own) {
  case 64: dequantise<64>(copy, source, there, own, width); break;
  case 128: dequantise<128>(copy, source, there, own, width); break;
  default: dequantise<0>(copy, source, there, own, width);
  }
  for (int64_t i = there * width; i < KEYS * width; ++i) copy[i] = 0;
  return copy;
}
#else
using Cell = float;
inline int64_t pitch(int64_t width) { return width; }

// `mix` reads the values of a block by columns, unless one pass takes all.
inline Soon soon_values(const float* cache, int64_t width, int64_t first) {
  if (width == COLUMNS * LANES) return {};
  return {reinterpret_cast<const char*>(cache + first * width), width * 4};
}
inline Soon soon_keys(const float*, int64_t, int64_t) { return {}; }

inline void put(float* row, const float* x, int64_t width) {
  __builtin_memcpy(row, x, static_cast<unsigned long>(width) * sizeof(float));
}

inline void put_rotated(float* to, const float* x, const Call& c, int64_t row) {
  rotate(to, x, c, row);
}

// KEYS rows of a head's cache from `first` on: where they lie, or copied with zeros for what is not
// there. own: how many numbers a row has.
const float* rows_of(const float* cache, int64_t rows, int64_t own, int64_t first, int width,
                     float* copy) {
  const float* source = cache + first * own;
  if (width == own && first + KEYS <= rows) return source;
  const int64_t there = rows - first < KEYS ? rows - first : KEYS;
  for (int64_t row = 0; row < KEYS; ++row)
    for (int64_t d = 0; d < width; ++d)
      copy[row * width + d] = row < there && d < own ? source[row * own + d] : 0.0f;
  return copy;
}
#endif

void write(const Call* call, int64_t slot, int64_t key_head) {
  const Call& c = *call;
  const int64_t cache = (slot * c.key_heads + key_head) * c.rows;
  for (int64_t token = 0; token < c.tokens; ++token) {
    const int64_t row = c.position[slot] + token, source = slot * c.tokens + token;
    put_rotated(static_cast<Cell*>(c.keys) + (cache + row) * pitch(c.width),
                c.key + source * c.key_stride + key_head * c.width, c, row);
    put(static_cast<Cell*>(c.values) + (cache + row) * pitch(c.value_width),
        c.value + source * c.value_stride + key_head * c.value_width, c.value_width);
  }
}

// --- one head of one slot ----------------------------------------------------------------------

inline int whole_vectors(int64_t width) {
  return static_cast<int>((width + LANES - 1) / LANES * LANES);
}

// Query rows first .. first + count - 1 of a head: what they see, and their numbers, rotated, scaled
// and made up to whole vectors.
struct Queries {
  const Call& c;
  int64_t slot, key_head, first, group;
  int count, width, mixed_width;
  Row rows[MOST_ROWS];
  alignas(64) float q[MOST_ROWS * MOST_WIDTH];

  Queries(const Call& call, int64_t slot_, int64_t key_head_, int64_t first_, int64_t end)
      : c(call), slot(slot_), key_head(key_head_), first(first_), group(c.heads / c.key_heads),
        count(static_cast<int>(end - first)), width(whole_vectors(c.width)),
        mixed_width(whole_vectors(c.value_width)) {}

  int64_t token(int r) const { return (first + r) / group; }
  int64_t head(int r) const { return key_head * group + (first + r) % group; }

  void read() {
    for (int r = 0; r < count; ++r) {
      const int64_t own = c.length ? 0 : c.position[slot] + token(r);
      const int64_t from = outrider_attention_from(c, own);
      const float* bias = c.bias ? c.bias + head(r) * c.distances + c.farthest - own : nullptr;
      rows[r] = {from, c.length ? c.length[slot] : own + 1, bias, LEAST, Vector{}};
      float* to = q + r * width;
      rotate(to, c.query + (slot * c.tokens + token(r)) * c.query_stride + head(r) * c.width, c, own);
      for (int64_t d = 0; d < c.width; ++d) to[d] *= c.scale * LOG2_E; // 2^x, not e^x
      for (int64_t d = c.width; d < width; ++d) to[d] = 0;
    }
  }
};

// The sums over one part: rows' peaks and totals, and what is mixed.
template <int WIDTH> void sum_part(Queries* queries, int64_t part, float* mixed) {
  const Call& c = queries->c;
  const int count = queries->count, width = queries->width, mixed_width = queries->mixed_width;
  const float cap = c.softcap * LOG2_E;
  Row* rows = queries->rows;
  alignas(64) float weights[MOST_ROWS * KEYS];
  alignas(64) float copy[KEYS * MOST_WIDTH]; // touched where rows cannot be read as they lie
  // Not -INF, which less itself is NaN: a row may see nothing in a part but scores of -INF.
  for (int r = 0; r < count; ++r) rows[r].peak = LEAST, rows[r].total = Vector{};
  for (int i = 0; i < count * mixed_width; ++i) mixed[i] = 0;
  const int64_t cache = (queries->slot * c.key_heads + queries->key_head) * c.rows;
  const Cell* all_keys = static_cast<Cell*>(c.keys) + cache * pitch(c.width);
  const Cell* all_values = static_cast<Cell*>(c.values) + cache * pitch(c.value_width);
  const int64_t from = part * PART > rows[0].from ? part * PART : rows[0].from / KEYS * KEYS;
  const int64_t behind = (part + 1) * PART, end = rows[count - 1].end;
  int begin = 0, reach = 0; // the rows that see something of a block: both ends of them rise
  for (int64_t block = from; block < (behind < end ? behind : end); block += KEYS) {
    while (rows[begin].end <= block) ++begin;
    while (reach < count && rows[reach].from < block + KEYS) ++reach;
    const float* keys = rows_of(all_keys, c.rows, c.width, block, width, copy);
    const Soon all[2] = {soon_values(all_values, c.value_width, block),
                         soon_keys(all_keys, c.width, block + KEYS)};
    const Soon* soon = all;
    for (int r = begin; r < reach; r += TOGETHER, soon = NO_MORE) {
      float *q = queries->q + r * width, *own = mixed + r * mixed_width, *w = weights + r * KEYS;
      switch (reach - r) {
      case 1: weigh<1, WIDTH>(rows + r, q, own, w, keys, soon, width, mixed_width, block, cap); break;
      case 2: weigh<2, WIDTH>(rows + r, q, own, w, keys, soon, width, mixed_width, block, cap); break;
      case 3: weigh<3, WIDTH>(rows + r, q, own, w, keys, soon, width, mixed_width, block, cap); break;
      default: weigh<TOGETHER, WIDTH>(rows + r, q, own, w, keys, soon, width, mixed_width, block, cap);
      }
    }
    const float* values = rows_of(all_values, c.rows, c.value_width, block, mixed_width, copy);
    for (int r = begin; r < reach; r += TOGETHER) {
      float *own = mixed + r * mixed_width, *w = weights + r * KEYS;
      switch (reach - r) {
      case 1: mix<1, WIDTH>(rows + r, own, w, values, mixed_width, block); break;
      case 2: mix<2, WIDTH>(rows + r, own, w, values, mixed_width, block); break;
      case 3: mix<3, WIDTH>(rows + r, own, w, values, mixed_width, block); break;
      default: mix<TOGETHER, WIDTH>(rows + r, own, w, values, mixed_width, block);
      }
    }
  }
}

// As wide as a head where the compiler is to know it.
void sum_part_of(Queries* queries, int64_t part, float* mixed) {
  const Call& c = queries->c;
  switch (c.width == c.value_width ? c.width : 0) {
  case 64: return sum_part<64>(queries, part, mixed);
  case 128: return sum_part<128>(queries, part, mixed);
  default: return sum_part<0>(queries, part, mixed);
  }
}

// What a row has come to, part after part.
struct Joined {
  float peak, total;

  // A part that the row saw nothing of, or no score above -INF, has the total 0; one with a NaN not.
  void add(float part_peak, float part_total, float* mixed, const float* part_mixed, int width) {
    if (part_total == 0) return;
    const float most = part_peak > peak ? part_peak : peak;
    const Vector fade = exp2_of(splat(peak - most)), own = exp2_of(splat(part_peak - most));
    total = total * fade[0] + part_total * own[0];
    peak = most;
    for (int d = 0; d < width; d += LANES)
      store(mixed + d, load(mixed + d) * fade + load(part_mixed + d) * own);
  }
};

Joined begin_join(const Queries& queries, int r) {
  const float* sinks = queries.c.sinks;
  return sinks ? Joined{sinks[queries.head(r)] * LOG2_E, 1} : Joined{-INF, 0};
}

void write_out(const Queries& queries, int r, const Joined& joined, const float* mixed) {
  const Call& c = queries.c;
  const int64_t row = (queries.slot * c.tokens + queries.token(r)) * c.heads + queries.head(r);
  const float share = 1.0f / joined.total;
  for (int64_t d = 0; d < c.value_width; ++d) c.out[row * c.value_width + d] = mixed[d] * share;
}

void attend(const Call* call, int64_t slot, int64_t key_head, int64_t first, int64_t end) {
  Queries queries(*call, slot, key_head, first, end);
  queries.read();
  const int width = queries.mixed_width, all = queries.count * width;
  alignas(64) float part[MOST_ROWS * MOST_WIDTH], mixed[MOST_ROWS * MOST_WIDTH];
  for (int i = 0; i < all; ++i) mixed[i] = 0;
  Joined joined[MOST_ROWS];
  for (int r = 0; r < queries.count; ++r) joined[r] = begin_join(queries, r);
  const int64_t seen = queries.rows[queries.count - 1].end;
  for (int64_t i = queries.rows[0].from / PART; i * PART < seen; ++i) {
    sum_part_of(&queries, i, part);
    for (int r = 0; r < queries.count; ++r) {
      const Row& row = queries.rows[r];
      joined[r].add(row.peak, fold(row.total, sum_of<Vector>), mixed + r * width, part + r * width,
                    width);
    }
  }
  for (int r = 0; r < queries.count; ++r) write_out(queries, r, joined[r], mixed + r * width);
}

void attend_parts(const Call* call, int64_t slot, int64_t key_head, int64_t first_part,
                  int64_t end_part, float* sums) {
  Queries queries(*call, slot, key_head, 0, outrider_attention_rows(*call));
  queries.read();
  const int width = queries.mixed_width;
  const int64_t stride = outrider_attention_stride(*call);
  alignas(64) float part[MOST_ROWS * MOST_WIDTH];
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

void join(const Call* call, int64_t slot, int64_t key_head, int64_t parts, const float* sums) {
  const Queries queries(*call, slot, key_head, 0, outrider_attention_rows(*call));
  const int64_t stride = outrider_attention_stride(*call);
  alignas(64) float mixed[MOST_WIDTH];
  for (int r = 0; r < queries.count; ++r) {
    Joined joined = begin_join(queries, r);
    for (int d = 0; d < queries.mixed_width; ++d) mixed[d] = 0;
    for (int64_t i = 0; i < parts; ++i) {
      const float* part = sums + (i * queries.count + r) * stride;
      joined.add(part[stride - 2], part[stride - 1], mixed, part, queries.mixed_width);
    }
    write_out(queries, r, joined, mixed);
  }
}

} // namespace

extern "C" const struct outrider_attention_tiles OUTRIDER_TABLE = {OUTRIDER_SET,
                                                                       write, attend,
                                                                       attend_parts, join};
