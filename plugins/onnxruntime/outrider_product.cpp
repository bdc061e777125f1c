// The inner loops of products with few bits. Compiled once per instruction set, with OUTRIDER_TABLE
// naming the table. No standard headers but the compiler's own: see outrider_tiles.cpp.
#include "outrider_product.h"
#include "outrider_sampling.h"
#include "outrider_vector.h"

namespace {
using Call = outrider_product;

constexpr int BLOCK = OUTRIDER_PRODUCT_BLOCK, PANEL = OUTRIDER_PRODUCT_PANEL;
// Rows that share the reading of a weight, at most: each has two vectors in registers.
#if defined(__AVX512VNNI__)
constexpr int TOGETHER = 12;
#else
constexpr int TOGETHER = 6;
#endif

int64_t blocks_of(const Call& c) { return (c.depth + BLOCK - 1) / BLOCK; }

void round_row(const Call& c, int64_t row) {
  const int64_t blocks = blocks_of(c);
  for (int64_t b = 0; b < blocks; ++b) {
    alignas(64) float rest[BLOCK];
    const float* from = c.x + row * c.depth + b * BLOCK;
    if (const int64_t there = c.depth - b * BLOCK; there < BLOCK) {
      for (int i = 0; i < BLOCK; ++i) rest[i] = i < there ? from[i] : 0.0f;
      from = rest;
    }
    // The largest number by its bits: a NaN is larger than all, so the scale of its block is NaN.
    Integers sizes{};
    for (int i = 0; i < BLOCK; i += LANES) {
      const Integers size = reinterpret_cast<Integers>(load(from + i)) & 0x7FFFFFFF;
      sizes = larger(sizes, size);
    }
    const int32_t most_bits = fold(sizes, larger<Integers>);
    float most;
    __builtin_memcpy(&most, &most_bits, sizeof most);
    // Of what is smaller, 127 / most is no finite number; it counts for nothing.
    const float scale = most / 127.0f, inverse = most > 4e-37f ? 127.0f / most : 0.0f;
    Integers sums{};
    alignas(64) int32_t wide[BLOCK];
    int8_t* levels = c.x_levels + (row * blocks + b) * BLOCK;
    for (int i = 0; i < BLOCK; i += LANES) {
      // To the nearest whole number, in the last bits; of what is not finite that is 0.
      const Vector shifted = load(from + i) * splat(inverse) + splat(12582912.0f);
      const Integers level = (reinterpret_cast<Integers>(shifted) - 0x4B400000) << 24 >> 24;
      __builtin_memcpy(wide + i, &level, sizeof level);
      sums += level;
    }
    for (int i = 0; i < BLOCK; ++i) levels[i] = static_cast<int8_t>(wide[i]);
    const int32_t sum = fold(sums, sum_of<Integers>);
    c.x_scales[row * blocks + b] = scale;
    c.x_sums[row * blocks + b] = c.bits == 4 ? -8 * sum : -128 * sum;
  }
}

void round(const Call* call, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row) round_row(*call, row);
}

// R rows with one panel: what differs between instruction sets is how a block's whole numbers are
// multiplied.

#if defined(__AVX512VNNI__)

// With masks of all lanes, because GCC 12 warns of what its headers leave undefined without.
constexpr __mmask16 ALL = 0xFFFF;

template <int R, int BITS>
void panel_rows(const Call& c, int64_t panel, int64_t first) {
  const int64_t blocks = blocks_of(c);
  const uint8_t* levels = c.levels + panel * blocks * 64 * BITS;
  const uint16_t* scales = c.scales + panel * blocks * PANEL;
  const int8_t* x = c.x_levels + first * blocks * BLOCK;
  const float* x_scales = c.x_scales + first * blocks;
  const int32_t* x_sums = c.x_sums + first * blocks;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 total[R];
  for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    __m512i sum[R];
    for (int r = 0; r < R; ++r) sum[r] = _mm512_set1_epi32(x_sums[r * blocks + b]);
    auto add = [&](__m512i weight, int number) {
      for (int r = 0; r < R; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + (r * blocks + b) * BLOCK + number, sizeof four);
        sum[r] = _mm512_dpbusd_epi32(sum[r], weight, _mm512_set1_epi32(four));
      }
    };
#pragma GCC unroll 8 // else GCC copies all sums with each step where there are many
    for (int j = 0; j < BITS; ++j) {
      const __m512i bytes = _mm512_loadu_si512(levels + 64 * j);
      _mm_prefetch(reinterpret_cast<const char*>(levels) + 64 * j + 4096, _MM_HINT_T0);
      if constexpr (BITS == 4) {
        add(_mm512_and_si512(bytes, low), 8 * j);
        add(_mm512_and_si512(_mm512_maskz_srli_epi16(~__mmask32{0}, bytes, 4), low), 8 * j + 4);
      } else {
        add(bytes, 4 * j);
      }
    }
    levels += 64 * BITS;
    const __m512 scale = _mm512_maskz_cvtph_ps(
        ALL, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + b * PANEL)));
    for (int r = 0; r < R; ++r)
      total[r] = _mm512_fmadd_ps(_mm512_maskz_cvtepi32_ps(ALL, sum[r]),
                                 _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r * blocks + b])),
                                 total[r]);
  }
  const int64_t there = c.columns - panel * PANEL;
  const __mmask16 mask = there < PANEL ? static_cast<__mmask16>((1 << there) - 1) : ALL;
  for (int r = 0; r < R; ++r)
    _mm512_mask_storeu_ps(c.y + (first + r) * c.columns + panel * PANEL, mask, total[r]);
}

#elif defined(__AVX2__)

#if !defined(__clang__)
#pragma GCC push_options
// Else GCC puts all products of a block before their sums, in memory.
#pragma GCC optimize("no-tree-ter", "no-tree-reassoc")
#endif

// Sums of two neighbours, of 16 bits.
inline __m256i pairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

// Levels of 4 bits are unsigned, and all products of a block that a sum of 16 bits gets, two of each
// of 8 vectors, fit into it: 16 * 15 * 127 < 2^15. Those of 8 bits have a sign for this, so that the
// products of two numbers do: 2 * 128 * 127 < 2^15.
template <int BITS>
inline __m256i added(__m256i sum, __m256i weight, __m256i x) {
  if constexpr (BITS == 4) return _mm256_add_epi16(sum, _mm256_maddubs_epi16(weight, x));
  return _mm256_add_epi32(
      sum, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(x, weight))));
}

template <int R, int BITS>
void panel_rows(const Call& c, int64_t panel, int64_t first) {
  const int64_t blocks = blocks_of(c);
  const uint8_t* levels = c.levels + panel * blocks * 64 * BITS;
  const uint16_t* scales = c.scales + panel * blocks * PANEL;
  const int8_t* x = c.x_levels + first * blocks * BLOCK;
  const float* x_scales = c.x_scales + first * blocks;
  const int32_t* x_sums = c.x_sums + first * blocks;
  const __m256i low = _mm256_set1_epi8(15), sign = _mm256_set1_epi8(-128);
  __m256 total[2][R]; // of the panel's halves
  for (int r = 0; r < R; ++r) total[0][r] = total[1][r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < blocks; ++b) {
    __m256i sum[2][R];
    for (int r = 0; r < R; ++r) sum[0][r] = sum[1][r] = _mm256_setzero_si256();
    auto add = [&](__m256i one, __m256i other, int number) {
      for (int r = 0; r < R; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + (r * blocks + b) * BLOCK + number, sizeof four);
        const __m256i fours = _mm256_set1_epi32(four);
        sum[0][r] = added<BITS>(sum[0][r], one, fours);
        sum[1][r] = added<BITS>(sum[1][r], other, fours);
      }
    };
#pragma GCC unroll 8
    for (int j = 0; j < BITS; ++j) {
      const __m256i* bytes = reinterpret_cast<const __m256i*>(levels + 64 * j);
      const __m256i one = _mm256_loadu_si256(bytes), other = _mm256_loadu_si256(bytes + 1);
      _mm_prefetch(reinterpret_cast<const char*>(bytes) + 4096, _MM_HINT_T0);
      if constexpr (BITS == 4) {
        add(_mm256_and_si256(one, low), _mm256_and_si256(other, low), 8 * j);
        add(_mm256_and_si256(_mm256_srli_epi16(one, 4), low),
            _mm256_and_si256(_mm256_srli_epi16(other, 4), low), 8 * j + 4);
      } else {
        add(_mm256_xor_si256(one, sign), _mm256_xor_si256(other, sign), 4 * j);
      }
    }
    levels += 64 * BITS;
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = _mm256_cvtph_ps(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + b * PANEL + 8 * half)));
      for (int r = 0; r < R; ++r) {
        __m256i whole = sum[half][r];
        if constexpr (BITS == 4)
          whole = _mm256_add_epi32(pairs(whole), _mm256_set1_epi32(x_sums[r * blocks + b]));
        total[half][r] = _mm256_fmadd_ps(
            _mm256_cvtepi32_ps(whole),
            _mm256_mul_ps(scale, _mm256_set1_ps(x_scales[r * blocks + b])), total[half][r]);
      }
    }
  }
  alignas(32) float out[PANEL];
  const int64_t there = c.columns - panel * PANEL;
  for (int r = 0; r < R; ++r) {
    for (int half = 0; half < 2; ++half) _mm256_store_ps(out + 8 * half, total[half][r]);
    __builtin_memcpy(c.y + (first + r) * c.columns + panel * PANEL, out,
                     static_cast<unsigned long>(there < PANEL ? there : PANEL) * sizeof(float));
  }
}

#if !defined(__clang__)
#pragma GCC pop_options
#endif

#else

template <int R, int BITS>
void panel_rows(const Call& c, int64_t panel, int64_t first) {
  const int64_t blocks = blocks_of(c);
  float total[R][PANEL] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const uint8_t* levels = c.levels + (panel * blocks + b) * 64 * BITS;
    int32_t sum[R][PANEL];
    for (int r = 0; r < R; ++r)
      for (int lane = 0; lane < PANEL; ++lane) sum[r][lane] = c.x_sums[(first + r) * blocks + b];
    for (int j = 0; j < BITS; ++j)
      for (int r = 0; r < R; ++r) {
        const int8_t* x = c.x_levels + ((first + r) * blocks + b) * BLOCK + BLOCK / BITS * j;
        for (int lane = 0; lane < PANEL; ++lane)
          for (int i = 0; i < 4; ++i) {
            const int32_t byte = levels[64 * j + 4 * lane + i];
            sum[r][lane] += BITS == 4 ? (byte & 15) * x[i] + (byte >> 4) * x[4 + i] : byte * x[i];
          }
      }
    const uint16_t* scales = c.scales + (panel * blocks + b) * PANEL;
    for (int lane = 0; lane < PANEL; ++lane) {
      const float scale = outrider::from_float16(scales[lane]);
      for (int r = 0; r < R; ++r)
        total[r][lane] += static_cast<float>(sum[r][lane]) *
                          (scale * c.x_scales[(first + r) * blocks + b]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int64_t lane = 0; lane < PANEL && panel * PANEL + lane < c.columns; ++lane)
      c.y[(first + r) * c.columns + panel * PANEL + lane] = total[r][lane];
}

#endif

template <int R, int BITS>
void multiply_rows(const Call& c, int64_t panel, int64_t first, int64_t count) {
  if constexpr (R > 1)
    if (count < R) return multiply_rows<R - 1, BITS>(c, panel, first, count);
  panel_rows<R, BITS>(c, panel, first);
}

void multiply(const Call* call, int64_t first_panel, int64_t end_panel) {
  const Call& c = *call;
  const int64_t runs = (c.rows + TOGETHER - 1) / TOGETHER;
  for (int64_t panel = first_panel; panel < end_panel; ++panel)
    for (int64_t run = 0; run < runs; ++run) { // as even as can be
      const int64_t first = c.rows * run / runs, count = c.rows * (run + 1) / runs - first;
      if (c.bits == 4) multiply_rows<TOGETHER, 4>(c, panel, first, count);
      else multiply_rows<TOGETHER, 8>(c, panel, first, count);
    }
}

} // namespace

extern "C" const struct outrider_product_tiles OUTRIDER_TABLE = {OUTRIDER_SET, round, multiply};
