// The inner loops of products with quantised weights. Compiled once per instruction set, with
// OUTRIDER_TABLE as the table's name. No standard headers but the compiler's own: see
// outrider_tiles.cpp.
#include "outrider_product.h"
#include "outrider_sampling.h"
#include "outrider_vector.h"

namespace {
using Call = outrider_product;

constexpr int BLOCK = OUTRIDER_PRODUCT_BLOCK, PANEL = OUTRIDER_PRODUCT_PANEL;
constexpr int PREFETCH_BYTES = 4096; // prefetch distance in bytes of weights
// ROW_GROUP: maximum number of rows multiplied per reading of a weight; their sums fit into
// registers. HALF_GROUP: the same for weights of 16 bits, which have no integer sums. PANELS: panels
// multiplied together, so that a number of x is loaded once for two vectors of outputs or more;
// with one, loads take longer than the products. STEPS: unrolled steps of a block. With 1, GCC
// would copy all sums in each step on x86; with more, it would load all weights first on ARM, and
// spill them.
#if defined(__AVX512VNNI__)
constexpr int ROW_GROUP = 6, HALF_GROUP = 12, PANELS = 2, STEPS = 8;
#elif defined(__AVX2__)
constexpr int ROW_GROUP = 6, HALF_GROUP = 6, PANELS = 1, STEPS = 8;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int ROW_GROUP = 4, HALF_GROUP = 6, PANELS = 1, STEPS = 1;
#else
constexpr int ROW_GROUP = 6, HALF_GROUP = 2, PANELS = 1;
#endif
constexpr int OF_PANEL = PANEL / LANES, VECTORS = PANELS * OF_PANEL; // vectors of outputs

template <int BITS> constexpr int OFFSET = 1 << (BITS - 1); // added to a level to make it unsigned

int64_t blocks_of(const Call& c) { return (c.depth + BLOCK - 1) / BLOCK; }
int64_t panel_bytes(const Call& c) {
  return c.bits == 16 ? c.depth * PANEL * 2 : blocks_of(c) * 64 * c.bits;
}

void round_row(const Call& c, int64_t row) {
  const int64_t blocks = blocks_of(c);
  for (int64_t b = 0; b < blocks; ++b) {
    alignas(64) float rest[BLOCK];
    const float* from = c.x + row * c.depth + b * BLOCK;
    if (const int64_t available = c.depth - b * BLOCK; available < BLOCK) {
      for (int i = 0; i < BLOCK; ++i) rest[i] = i < available ? from[i] : 0.0f;
      from = rest;
    }
    // The largest magnitude, compared by its bits: NaN is the largest, so its block's scale is NaN.
    Integers sizes{};
    for (int i = 0; i < BLOCK; i += LANES) {
      const Integers size = reinterpret_cast<Integers>(load(from + i)) & 0x7FFFFFFF;
      sizes = larger(sizes, size);
    }
    const int32_t max_bits = fold(sizes, larger<Integers>);
    float max_magnitude;
    __builtin_memcpy(&max_magnitude, &max_bits, sizeof max_magnitude);
    // For a smaller maximum, 127 divided by it is not finite; such a block is rounded to 0.
    const float scale = max_magnitude / 127.0f;
    const float inverse = max_magnitude > 4e-37f ? 127.0f / max_magnitude : 0.0f;
    Integers sums{};
    alignas(64) int32_t wide[BLOCK];
    outrider_rounded& to = c.rounded[row * blocks + b];
    for (int i = 0; i < BLOCK; i += LANES) {
      // Rounded to the nearest whole number, in the low bits; 0 if it is not finite.
      const Vector shifted = load(from + i) * splat(inverse) + splat(12582912.0f);
      const Integers level = (reinterpret_cast<Integers>(shifted) - 0x4B400000) << 24 >> 24;
      __builtin_memcpy(wide + i, &level, sizeof level);
      sums += level;
    }
    for (int i = 0; i < BLOCK; ++i) to.levels[i] = static_cast<int8_t>(wide[i]);
    to.scale = scale;
    to.correction = -8 * fold(sums, sum_of<Integers>);
  }
}

void round(const Call* call, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) round_row(*call, row);
}

// Calls whole(total, y) for each vector of the outputs of R rows and PANELS panels, or
// one(total, y, i) for each number of those that are not whole.
template <int R, class Whole, class One>
INLINE void visit_panels(const Call& c, int64_t panel, int64_t apart, int64_t first,
                         Vector (&total)[VECTORS][R], Whole whole, One one) {
  float* y = c.y + first * c.stride + panel * PANEL;
  const auto place = [&](int v) { return v / OF_PANEL * apart * PANEL + v % OF_PANEL * LANES; };
  const int64_t available = c.columns - panel * PANEL;
  if (available >= place(VECTORS - 1) + LANES) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v) whole(total[v][r], y + r * c.stride + place(v));
    return;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < VECTORS; ++v)
      for (int64_t i = 0; i < LANES && place(v) + i < available; ++i)
        one(total[v][r], y + r * c.stride + place(v), i);
}

template <int R>
INLINE void store_panels(const Call& c, int64_t panel, int64_t apart, int64_t first,
                         Vector (&total)[VECTORS][R]) {
  visit_panels(c, panel, apart, first, total, [](Vector& from, float* y) { store(y, from); },
               [](Vector& from, float* y, int64_t i) { y[i] = from[i]; });
}

// Converts LANES numbers from float16.
INLINE Vector widened(const uint16_t* from) {
#if defined(__AVX512F__)
  // Masked with all lanes, because GCC 12 warns about an undefined value in its unmasked version.
  return _mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__ARM_FEATURE_DOTPROD)
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
  Vector wide;
  for (int i = 0; i < LANES; ++i) wide[i] = outrider::from_float16(from[i]);
  return wide;
#endif
}

// LANES numbers from the i-th on, as float32.
template <int DTYPE> INLINE Vector numbers(const void* from, int64_t i) {
  if constexpr (DTYPE == OUTRIDER_FLOAT32) return load(static_cast<const float*>(from) + i);
  const uint16_t* halves = static_cast<const uint16_t*>(from) + i;
  return DTYPE == OUTRIDER_FLOAT16 ? widened(halves) : from_bfloat16(halves);
}

// Weights without scales, from input `begin` to `end`, of PANELS panels. between: how many numbers
// the second panel is behind the first.
struct Piece {
  const void* weights;
  int64_t between, begin, end;
};

// R rows times a piece, which is added to what earlier pieces gave.
template <int R, int DTYPE>
void piece_rows(const Call& c, const Piece& piece, int64_t panel, int64_t apart, int64_t first) {
  constexpr int OF_POINTER = 3; // rows that x86 can address with one pointer and one stride
  const float* x[(R + OF_POINTER - 1) / OF_POINTER];
  for (int r = 0; r < R; r += OF_POINTER)
    x[r / OF_POINTER] = c.x + (first + r) * c.depth + piece.begin;
  Vector total[VECTORS][R];
  for (int v = 0; v < VECTORS; ++v)
    for (int r = 0; r < R; ++r) total[v][r] = Vector{};
  if (piece.begin > 0)
    visit_panels(c, panel, apart, first, total, [](Vector& to, float* y) { to = load(y); },
                 [](Vector& to, float* y, int64_t i) { to[i] = y[i]; });
  const int64_t count = piece.end - piece.begin;
  for (int64_t k = 0; k < count; ++k) {
    Vector weight[VECTORS];
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = v / OF_PANEL * piece.between + k * PANEL + v % OF_PANEL * LANES;
      weight[v] = numbers<DTYPE>(piece.weights, at);
      if (DTYPE != OUTRIDER_FLOAT32 && v % OF_PANEL == 0)
        __builtin_prefetch(static_cast<const uint16_t*>(piece.weights) + at + PREFETCH_BYTES / 2);
    }
    for (int r = 0; r < R; ++r) {
      const Vector one = splat(x[r / OF_POINTER][r % OF_POINTER * c.depth + k]);
      for (int v = 0; v < VECTORS; ++v) total[v][r] = fused(one, weight[v], total[v][r]);
    }
  }
  store_panels(c, panel, apart, first, total);
}

template <int R, int DTYPE>
void multiply_piece(const Call& c, const Piece& piece, int64_t panel, int64_t apart, int64_t first,
                    int64_t count) {
  if constexpr (R > 1)
    if (count < R) return multiply_piece<R - 1, DTYPE>(c, piece, panel, apart, first, count);
  piece_rows<R, DTYPE>(c, piece, panel, apart, first);
}

// All rows times a piece.
template <int DTYPE>
void multiply_runs(const Call& c, const Piece& piece, int64_t panel, int64_t apart) {
  const int64_t runs = (c.rows + HALF_GROUP - 1) / HALF_GROUP;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t first = c.rows * run / runs, count = c.rows * (run + 1) / runs - first;
    multiply_piece<HALF_GROUP, DTYPE>(c, piece, panel, apart, first, count);
  }
}

// All rows times PANELS panels, with weights of 16 bits. For many rows these are converted once.
template <int DTYPE> void multiply_halves(const Call& c, int64_t panel, int64_t apart) {
  constexpr int64_t WIDE = 512; // inputs whose converted weights fit into the caches and the stack
  const int64_t size = c.depth * PANEL;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(c.levels) + panel * size;
  if (c.rows <= 2 * HALF_GROUP)
    return multiply_runs<DTYPE>(c, {weights, apart * size, 0, c.depth}, panel, apart);
  alignas(64) float wide[PANELS * PANEL * WIDE];
  for (int64_t begin = 0; begin < c.depth; begin += WIDE) {
    const int64_t end = begin + WIDE < c.depth ? begin + WIDE : c.depth;
    for (int p = 0; p < PANELS; ++p)
      for (int64_t i = 0; i < (end - begin) * PANEL; i += LANES)
        store(wide + p * PANEL * WIDE + i,
              numbers<DTYPE>(weights, p * apart * size + begin * PANEL + i));
    multiply_runs<OUTRIDER_FLOAT32>(c, {wide, PANEL * WIDE, begin, end}, panel, apart);
  }
}

#if defined(__AVX2__) || defined(__ARM_FEATURE_DOTPROD)
// R rows times PANELS panels. The instruction sets differ in how each lane multiplies four
// neighbours along K: of a weight, unsigned, and of x, the same four in all lanes.
typedef uint8_t Bytes __attribute__((vector_size(sizeof(Integers))));
typedef uint8_t Packed __attribute__((vector_size(sizeof(Integers)), aligned(1), may_alias));

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr bool SIGNED = false; // whether 8-bit weights are converted to signed first

template <int BITS> INLINE Integers first_sum(int32_t correction) {
  return (correction - Integers{}) * (OFFSET<BITS> / 8);
}
template <int> INLINE Integers last_sum(Integers sum, int32_t) { return sum; }

template <int> INLINE Integers added(Integers sum, Bytes weight, Bytes x) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Integers>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(weight),
                          reinterpret_cast<__m512i>(x)));
#else
  return reinterpret_cast<Integers>(
      _mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(weight),
                              reinterpret_cast<__m256i>(x)));
#endif
}

#elif defined(__AVX2__)

constexpr bool SIGNED = true;

// 4-bit levels are unsigned, and a 16-bit sum can hold all its products of a block, two from each
// of 8 vectors: 16 * 15 * 127 < 2^15. 8-bit levels are signed, so that the sum of two products
// fits: 2 * 128 * 127 < 2^15.
INLINE Integers pairs(__m256i sums) { // adds 16-bit neighbours
  return reinterpret_cast<Integers>(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}

template <int> INLINE Integers first_sum(int32_t) { return Integers{}; }

template <int BITS> INLINE Integers last_sum(Integers sum, int32_t correction) {
  return BITS == 4 ? pairs(reinterpret_cast<__m256i>(sum)) + correction : sum;
}

template <int BITS> INLINE Integers added(Integers sum, Bytes weight, Bytes x) {
  const __m256i w = reinterpret_cast<__m256i>(weight), v = reinterpret_cast<__m256i>(x);
  if constexpr (BITS == 8)
    return sum + pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w)));
  return reinterpret_cast<Integers>(
      _mm256_add_epi16(reinterpret_cast<__m256i>(sum), _mm256_maddubs_epi16(w, v)));
}

#else

constexpr bool SIGNED = true;

template <int BITS> INLINE Integers first_sum(int32_t correction) {
  return (BITS == 4 ? correction : 0) - Integers{};
}
template <int> INLINE Integers last_sum(Integers sum, int32_t) { return sum; }

template <int> INLINE Integers added(Integers sum, Bytes weight, Bytes x) {
  return vdotq_s32(sum, reinterpret_cast<int8x16_t>(weight), reinterpret_cast<int8x16_t>(x));
}

#endif

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
#pragma GCC push_options
// Otherwise GCC computes all products of a block before their sums, and spills them.
#pragma GCC optimize("no-tree-ter", "no-tree-reassoc")
#endif

// apart: number of panels from the first one to the second one.
template <int R, int BITS>
void panel_rows(const Call& c, int64_t panel, int64_t apart, int64_t first) {
  const int64_t blocks = blocks_of(c), blocks_apart = apart * blocks;
  const uint8_t* levels = c.levels + panel * blocks * 64 * BITS;
  const uint16_t* scales = c.scales + panel * blocks * PANEL;
  const outrider_rounded* x = c.rounded + first * blocks;
  Vector total[VECTORS][R];
  for (int v = 0; v < VECTORS; ++v)
    for (int r = 0; r < R; ++r) total[v][r] = Vector{};
  for (int64_t b = 0; b < blocks; ++b) {
    Integers sum[VECTORS][R];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < VECTORS; ++v) sum[v][r] = first_sum<BITS>(x[r * blocks + b].correction);
    auto add = [&](const Bytes* weight, int number) {
      for (int r = 0; r < R; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x[r * blocks + b].levels + number, sizeof four);
        const Bytes fours = reinterpret_cast<Bytes>(four - Integers{});
        for (int v = 0; v < VECTORS; ++v) sum[v][r] = added<BITS>(sum[v][r], weight[v], fours);
      }
    };
#pragma GCC unroll STEPS
    for (int j = 0; j < BITS; ++j) {
      Bytes weight[VECTORS], high[VECTORS];
      for (int v = 0; v < VECTORS; ++v) {
        const uint8_t* from = levels + v / OF_PANEL * blocks_apart * 64 * BITS + 64 * j;
        weight[v] = *reinterpret_cast<const Packed*>(from + v % OF_PANEL * 4 * LANES);
        if (v % OF_PANEL == 0) __builtin_prefetch(from + PREFETCH_BYTES);
      }
      if constexpr (BITS == 4) {
        for (int v = 0; v < VECTORS; ++v) high[v] = weight[v] >> 4, weight[v] &= 15;
        add(weight, 8 * j);
        add(high, 8 * j + 4);
      } else {
        for (int v = 0; SIGNED && v < VECTORS; ++v) weight[v] ^= 128;
        add(weight, 4 * j);
      }
    }
    levels += 64 * BITS;
    for (int v = 0; v < VECTORS; ++v) {
      const uint16_t* from = scales + (v / OF_PANEL * blocks_apart + b) * PANEL;
      const Vector scale = widened(from + v % OF_PANEL * LANES);
      for (int r = 0; r < R; ++r) {
        const Integers whole = last_sum<BITS>(sum[v][r], x[r * blocks + b].correction);
        total[v][r] = fused(__builtin_convertvector(whole, Vector),
                            scale * splat(x[r * blocks + b].scale), total[v][r]);
      }
    }
  }
  store_panels(c, panel, apart, first, total);
}

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__clang__)
#pragma GCC pop_options
#endif

#else

template <int R, int BITS>
void panel_rows(const Call& c, int64_t panel, int64_t, int64_t first) {
  const int64_t blocks = blocks_of(c);
  float total[R][PANEL] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* levels = c.levels + (panel * blocks + b) * 64 * BITS;
    const outrider_rounded* x = c.rounded + first * blocks + b;
    int32_t sum[R][PANEL];
    for (int r = 0; r < R; ++r)
      for (int lane = 0; lane < PANEL; ++lane)
        sum[r][lane] = OFFSET<BITS> / 8 * x[r * blocks].correction;
    for (int j = 0; j < BITS; ++j)
      for (int r = 0; r < R; ++r) {
        const int8_t* xs = x[r * blocks].levels + BLOCK / BITS * j;
        for (int lane = 0; lane < PANEL; ++lane)
          for (int i = 0; i < 4; ++i) {
            const int32_t byte = levels[64 * j + 4 * lane + i];
            sum[r][lane] +=
                BITS == 4 ? (byte & 15) * xs[i] + (byte >> 4) * xs[4 + i] : byte * xs[i];
          }
      }
    const uint16_t* scales = c.scales + (panel * blocks + b) * PANEL;
    for (int lane = 0; lane < PANEL; ++lane) {
      const float scale = outrider::from_float16(scales[lane]);
      for (int r = 0; r < R; ++r)
        total[r][lane] += static_cast<float>(sum[r][lane]) * (scale * x[r * blocks].scale);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < c.columns; ++lane)
      c.y[(first + r) * c.stride + panel * PANEL + lane] = total[r][lane];
}

#endif

template <int R, int BITS>
void multiply_rows(const Call& c, int64_t panel, int64_t apart, int64_t first, int64_t count) {
  if constexpr (R > 1)
    if (count < R) return multiply_rows<R - 1, BITS>(c, panel, apart, first, count);
  panel_rows<R, BITS>(c, panel, apart, first);
}

void multiply(const Call* call, int64_t first_group, int64_t end_group) {
  const Call& c = *call;
  const int64_t runs = (c.rows + ROW_GROUP - 1) / ROW_GROUP;
  const int64_t panels = (c.columns + PANEL - 1) / PANEL, groups = (panels + PANELS - 1) / PANELS;
  // Panels of a group are far apart, because long pieces of weights are read fastest from memory.
  // With many rows they are near each other, because their results are then written faster.
  const int64_t span = c.rows > 12 ? 16 : groups;
  for (int64_t group = first_group; group < end_group; ++group) {
    const int64_t begin = group / span * span * PANELS, panel = begin + group % span;
    const int64_t rest = (panels - begin + PANELS - 1) / PANELS, apart = rest < span ? rest : span;
    for (int p = 0; p < PANELS && group == first_group; ++p) { // not prefetched by earlier groups
      const uint8_t* levels = c.levels + (panel + p * apart) * panel_bytes(c);
      for (int i = 0; i < PREFETCH_BYTES; i += 64) __builtin_prefetch(levels + i);
    }
    // Without a second panel, the first one is multiplied twice.
    const int64_t second = panel + apart < panels ? apart : 0;
    if (c.bits == 16) {
      if (c.dtype == OUTRIDER_FLOAT16) multiply_halves<OUTRIDER_FLOAT16>(c, panel, second);
      else multiply_halves<OUTRIDER_BFLOAT16>(c, panel, second);
      continue;
    }
    for (int64_t run = 0; run < runs; ++run) { // runs of nearly equal size
      const int64_t first = c.rows * run / runs, count = c.rows * (run + 1) / runs - first;
      if (c.bits == 4) multiply_rows<ROW_GROUP, 4>(c, panel, second, first, count);
      else multiply_rows<ROW_GROUP, 8>(c, panel, second, first, count);
    }
  }
}

} // namespace

extern "C" const struct outrider_product_tiles OUTRIDER_TABLE = {OUTRIDER_SET, PANELS, round,
                                                              multiply};
