// A vector type for the instruction set that a file is compiled for. Everything has internal
// linkage; otherwise the linker might keep code for instructions that the processor does not have.
#ifndef OUTRIDER_VECTOR_H
#define OUTRIDER_VECTOR_H

#include <stdint.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef float Unaligned __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

// Forced, because GCC 11 does not inline into callers that have optimisation pragmas.
#define INLINE __attribute__((always_inline)) inline

INLINE Vector load(const float* p) { return *reinterpret_cast<const Unaligned*>(p); }
INLINE void store(float* p, Vector v) { *reinterpret_cast<Unaligned*>(p) = v; }
// x - 0 is x for every x, so compilers drop the subtraction. 0 + x is not for x = -0, so an
// addition would stay before each broadcast.
INLINE Vector splat(float x) { return x - Vector{}; }

INLINE Vector from_bfloat16(const uint16_t* p) { // LANES numbers
  // GCC 12 makes five instructions of a conversion of vectors, in place of one. About an undefined
  // value in AVX-512's it warns unless that has a mask.
#if defined(__AVX512F__)
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const Integers wide = reinterpret_cast<Integers>(_mm512_maskz_cvtepu16_epi32(0xFFFF, words));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const Integers wide = reinterpret_cast<Integers>(_mm256_cvtepu16_epi32(words));
#else
  typedef uint16_t Words __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
  const Integers wide = __builtin_convertvector(*reinterpret_cast<const Words*>(p), Integers);
#endif
  return reinterpret_cast<Vector>(wide << 16);
}

INLINE Vector fused(Vector a, Vector b, Vector c) { // a b + c
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Integers{__VA_ARGS__})
#endif

template <int... I> struct Lanes {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { using type = Lanes<I...>; };

template <int H, class V, int... I> inline V swapped(V v, Lanes<I...>) {
  return SHUFFLE(v, v, (I ^ H)...);
}

// Reduces all lanes with `of`, by halving.
template <int H = LANES / 2, class V, class Of> inline auto fold(V v, Of of) {
  v = of(v, swapped<H>(v, typename Count<LANES>::type()));
  if constexpr (H > 1) return fold<H / 2>(v, of);
  else return v[0];
}

template <class V> inline V larger(V a, V b) { return a > b ? a : b; }
template <class V> inline V sum_of(V a, V b) { return a + b; }

} // namespace
#endif
