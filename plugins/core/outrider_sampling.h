// The speculative-sampling algorithm in one source, compiled by the host compiler for the CPU
// library and by NVRTC or nvcc for the GPU. It uses raw pointers and only the C interface's header.
//
// The vocabulary is divided into tiles of 1024 tokens. For each row and tile, the maximum and the
// sum of exponentials are computed; for each slot, the tiles are combined in a fixed order, and the
// accept tests follow; for one row only, the tile is found in which the cumulative sum crosses u *
// total, and scanned.
//
// Every floating-point operation is a single IEEE operation, in an order fixed here; fused
// multiply-adds are explicit (`fused`). All targets therefore compute the same bits, provided that
// the compiler contracts nothing on its own (-ffp-contract=off; -fmad=false with NVRTC and nvcc)
// and -ffast-math is off. The only exception is x86 before AVX2, which has no fused multiply-add:
// see `fused`.
#ifndef OUTRIDER_SAMPLING_H
#define OUTRIDER_SAMPLING_H

#include "outrider.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define OUTRIDER_HD __host__ __device__ __forceinline__
#else
#define OUTRIDER_HD inline
#endif

// Internal linkage: the CPU library compiles this file once per instruction set, and the linker
// must not replace one unit's plain code by another's AVX-512.
namespace {
namespace outrider {

constexpr int TILE = 1024;

OUTRIDER_HD int tiles_of(int width) { return (width + TILE - 1) / TILE; }

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define INF __int_as_float(0x7F800000)
#else
constexpr float INF = __builtin_huge_valf();
#endif

// --- bits -------------------------------------------------------------------------------------

OUTRIDER_HD float as_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

OUTRIDER_HD uint32_t as_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

OUTRIDER_HD float from_bfloat16(uint16_t bits) { return as_float(static_cast<uint32_t>(bits) << 16); }

// Branchless, so that it vectorises. Denormals are produced by a subtraction rather than by
// denormal arithmetic, so that a caller's flush-to-zero mode has no effect.
OUTRIDER_HD float from_float16(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  const uint32_t exponent_mask = 0x7C00u << 13;
  const uint32_t magnitude = (bits & 0x7FFFu) << 13;
  const uint32_t exponent = magnitude & exponent_mask;
  const uint32_t normal = magnitude + (112u << 23);
  const uint32_t denormal = as_bits(as_float(magnitude + (113u << 23)) - as_float(113u << 23));
  const uint32_t finite = exponent == 0 ? denormal : normal;
  const uint32_t absolute = exponent == exponent_mask ? normal + (112u << 23) : finite;
  return as_float(absolute | (static_cast<uint32_t>(bits) & 0x8000u) << 16);
#endif
}

OUTRIDER_HD int element_size(int dtype) { return dtype == OUTRIDER_FLOAT32 ? 4 : 2; }

OUTRIDER_HD float load(const void* row, int dtype, int64_t i) {
  const unsigned char* at = static_cast<const unsigned char*>(row) + i * element_size(dtype);
#if defined(__CUDA_ARCH__) // device memory is aligned to the elements
  if (dtype == OUTRIDER_FLOAT32) return *reinterpret_cast<const float*>(at);
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(at);
#else
  if (dtype == OUTRIDER_FLOAT32) {
    float value;
    __builtin_memcpy(&value, at, sizeof value);
    return value;
  }
  uint16_t bits;
  __builtin_memcpy(&bits, at, sizeof bits);
#endif
  return dtype == OUTRIDER_FLOAT16 ? from_float16(bits) : from_bfloat16(bits);
}

// --- random numbers ---------------------------------------------------------------------------

// As in runtime/sampling/philox.py. 3 is for a draft's own rounds (CHAIN).
enum Purpose { DRAFT = 0, ACCEPT = 1, RESIDUAL = 2, COUPLED = 4 };

// Philox 4x32-10 (Salmon et al., SC 2011). key: low word first.
OUTRIDER_HD void philox4x32(uint64_t key, uint32_t c[4]) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product_0 = static_cast<uint64_t>(0xD2511F53u) * c[0];
    const uint64_t product_1 = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
    c[0] = static_cast<uint32_t>(product_1 >> 32) ^ c[1] ^ k0;
    c[1] = static_cast<uint32_t>(product_1);
    c[2] = static_cast<uint32_t>(product_0 >> 32) ^ c[3] ^ k1;
    c[3] = static_cast<uint32_t>(product_0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// In [0, 1) with 53 bits: the first word and the top 21 bits of the second.
OUTRIDER_HD double uniform(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t lane) {
  uint32_t c[4] = {position, purpose, lane, 0};
  philox4x32(seed, c);
  const uint64_t bits = (static_cast<uint64_t>(c[0]) << 32 | c[1]) >> 11;
  return static_cast<double>(bits) * (1.0 / 9007199254740992.0);
}

// Block verification reads all uniforms of its round, so no later round may reuse them.
OUTRIDER_HD uint32_t lane_of(const outrider_slot& slot) {
  return slot.rule == OUTRIDER_BLOCK ? slot.position : 0;
}

// --- coupling ---------------------------------------------------------------------------------

// Gumbel coupling (Daliri, Musco, Suresh 2024, arXiv 2408.07978): choose the token with the least
// e_x / w_x, where e_x is a standard exponential random number determined by (seed, position, x).
// This is an exact draw from the weights w, and equals argmax log w_x + g_x with the Gumbel noise
// g_x = -log e_x. Target and draft use the same e, so the target's token depends only on the seed
// and p.
//
// The numbers are generated top-down, so that few are needed. For a tile of 1024 tokens, the least
// number comes first (an exponential number / 1024), with its token, which is uniformly
// distributed; then the least of each of the tile's 32 groups of 32; then the number of each token
// of a group. Given the least of n exponential numbers, the excess of the others over it is
// exponential again. A tile is skipped if even its least number is too large.
constexpr int GROUP = 32;

// log v for v in (0, 1), relative error below 4e-16: 2 artanh((m - 1) / (m + 1)) + n log 2. In
// basic operations only, so that every compiler and NumPy compute the same bits.
OUTRIDER_HD double log_of(double v) {
#if defined(__CUDA_ARCH__)
  uint64_t bits = static_cast<uint64_t>(__double_as_longlong(v));
#else
  uint64_t bits;
  __builtin_memcpy(&bits, &v, sizeof bits);
#endif
  int n = static_cast<int>(bits >> 52) - 1022;
  bits = (bits & 0xFFFFFFFFFFFFFull) | 0x3FE0000000000000ull; // [1/2, 1)
#if defined(__CUDA_ARCH__)
  double m = __longlong_as_double(static_cast<long long>(bits));
#else
  double m;
  __builtin_memcpy(&m, &bits, sizeof m);
#endif
  if (m < 0.7071067811865476) {
    m = m + m;
    n = n - 1;
  }
  const double s = (m - 1.0) / (m + 1.0), t = s * s;
  double p = 1.0 / 19.0;
  p = p * t + 1.0 / 17.0;
  p = p * t + 1.0 / 15.0;
  p = p * t + 1.0 / 13.0;
  p = p * t + 1.0 / 11.0;
  p = p * t + 1.0 / 9.0;
  p = p * t + 1.0 / 7.0;
  p = p * t + 1.0 / 5.0;
  p = p * t + 1.0 / 3.0;
  return 2.0 * (s + s * (t * p)) + static_cast<double>(n) * 0.6931471805599453;
}

// A standard exponential number, from the midpoint of one of 2^32 intervals.
OUTRIDER_HD double exponential(uint32_t word) {
  return -log_of((static_cast<double>(word) + 0.5) * (1.0 / 4294967296.0));
}

// The least number of a tile or of a group in it.
struct Noise {
  double least;
  int at; // the token with that number, as an index into the tile or group
};

OUTRIDER_HD Noise tile_noise(uint64_t seed, uint32_t position, int tile) {
  uint32_t c[4] = {position, COUPLED, static_cast<uint32_t>(tile), 0};
  philox4x32(seed, c);
  // 52 bits, so that very improbable tokens can still be drawn.
  const uint64_t bits = (static_cast<uint64_t>(c[0]) << 32 | c[1]) >> 12;
  const double v = (static_cast<double>(bits) + 0.5) * (1.0 / 4503599627370496.0);
  return {-log_of(v) * (1.0 / TILE), static_cast<int>(c[2] >> 22)};
}

OUTRIDER_HD Noise group_noise(uint64_t seed, uint32_t position, int tile, const Noise& of, int group) {
  if (of.at / GROUP == group) return {of.least, of.at % GROUP};
  uint32_t c[4] = {position, COUPLED, static_cast<uint32_t>(tile),
                   1 + static_cast<uint32_t>(group) / 2};
  philox4x32(seed, c);
  const int word = group % 2 * 2;
  return {of.least + exponential(c[word]) * (1.0 / GROUP), static_cast<int>(c[word + 1] >> 27)};
}

// The random words of token i of a group, and of the three tokens that share them.
OUTRIDER_HD void token_words(uint64_t seed, uint32_t position, int tile, int group, int i,
                             uint32_t words[4]) {
  words[0] = position;
  words[1] = COUPLED;
  words[2] = static_cast<uint32_t>(tile);
  words[3] = 17 + static_cast<uint32_t>(group * GROUP + i) / 4;
  philox4x32(seed, words);
}

OUTRIDER_HD double token_noise(const Noise& group, int i, const uint32_t words[4]) {
  return i == group.at ? group.least : group.least + exponential(words[i % 4]);
}

// Whether a token with at least this number and at most this weight can beat the least quotient so
// far. The margin is for rounding: the weight of a maximum may be slightly below its neighbour's.
OUTRIDER_HD bool may_win(double number, double best, float weight) {
  return weight > 0 && number <= best * static_cast<double>(weight) * (1.0 + 1e-5);
}

// --- elementwise ------------------------------------------------------------------------------

// a * b + c, rounded once. Without an FMA instruction it is computed in float64, where the product
// is exact; the result differs only if float64 rounds to a tie of float32: in the last bit, in one
// of 2^29 cases.
OUTRIDER_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) +
                            static_cast<double>(c));
#endif
}

constexpr double LOG2_E = 1.4426950408889634;

// 2^t for t <= 0, relative error below 2e-7; exactly 1 at 0, exactly 0 below -126.5 (no denormals,
// so flush-to-zero modes make no difference), NaN for NaN. p and q both use it: it *defines* their
// weights.
OUTRIDER_HD float exp2_of(float t) {
  const float magic = 12582912.0f; // 1.5 * 2^23: adding it rounds to an integer, in the low bits
#if defined(__CUDA_ARCH__) // one instruction; it propagates NaN, as the expression below does
  float y;
  asm("max.NaN.f32 %0, %1, 0fC2FE0000;" : "=f"(y) : "f"(t));
#else
  const float y = -127.0f > t ? -127.0f : t;
#endif
  const float shifted = y + magic;
  const float r = y - (shifted - magic);
  float e = 1.3264727e-3f; // minimax of the relative error on |r| <= 1/2, 1.1e-7
  e = fused(e, r, 9.671513e-3f);
  e = fused(e, r, 5.5507336e-2f);
  e = fused(e, r, 2.4022242e-1f);
  e = fused(e, r, 6.93147e-1f);
  e = fused(e, r, 1.0f);
  // The bits of 2^n; for n = -127, those of 0.
  const uint32_t n = as_bits(shifted) + 127u;
  return e * as_float(n << 23);
}

OUTRIDER_HD float penalised(float z, float penalty) { return z < 0 ? z * penalty : z / penalty; }

// The initial shape of a row: nothing known about its logits, no filters.
OUTRIDER_HD outrider_row shape_of(const outrider_slot& slot) {
  const float rate = slot.temperature == 0
                         ? 0.0f
                         : static_cast<float>(LOG2_E / static_cast<double>(slot.temperature));
  return {1, -INF, rate, -INF, 0, 0, -1, 1, OUTRIDER_OK};
}

// The weight of token `id` with logit z. All filters are monotone in z, so a cut represents them.
OUTRIDER_HD float weight_of(float z, int id, const outrider_row& row) {
  const float e = exp2_of((z - row.peak) * row.rate);
  const bool above = (z > row.cut) | ((z == row.cut) & (id >= row.tie_from));
  return (above & (e >= row.min_weight)) ? e : 0.0f;
}

// Eq. 5 of arXiv 2406.11016, applied to the warped logit; 0 for tokens removed by a filter.
struct Sigmoid {
  float temperature, alpha, rate; // rate: -log2(e) / (beta - alpha)
};

OUTRIDER_HD Sigmoid sigmoid_of(const outrider_slot& slot) {
  return {slot.temperature, static_cast<float>(slot.sigmoid_alpha),
          static_cast<float>(-LOG2_E / (slot.sigmoid_beta - slot.sigmoid_alpha))};
}

OUTRIDER_HD float sigmoid_value(float z, int id, const outrider_row& row, Sigmoid s) {
  const float t = (z / s.temperature - s.alpha) * s.rate;
  // Computed from e = 2^-|t|: 1 / (1 + e) for t <= 0, else e / (1 + e).
  const float e = exp2_of(t > 0 ? -t : t);
  const float value = (t > 0 ? e : 1.0f) / (1.0f + e);
  const bool filtered = (row.cut > -INF) | (row.min_weight > 0);
  return (z == -INF) | (filtered & (weight_of(z, id, row) == 0)) ? 0.0f : value;
}

OUTRIDER_HD float positive_part(float a, float factor, float b) {
  const float difference = a * factor - b;
  return difference > 0 ? difference : 0.0f;
}

OUTRIDER_HD bool is_nan(double x) { return x != x; }

// --- sums and draws ---------------------------------------------------------------------------

// n numbers are summed in at most 32 runs of neighbours: sequentially within a run, then over the
// runs in the order of a warp scan, each adding the one 1, 2, 4, 8 and 16 below it. On a GPU, each
// lane has one run, and `Sums` is a number per lane; here it is an array.
constexpr int LANES = 32;

struct Lanes {
  double v[LANES];

  // Sum at(first), at(first + 1), ... in runs of `length`.
  template <class At> static Lanes of(const At& at, int first, int n, int length) {
    Lanes sums = {};
    for (int k = 0; k < n; ++k) sums.v[k / length] += at(first + k);
    return sums;
  }
  void add_below(int distance) {
    for (int i = LANES - 1; i >= distance; --i) v[i] += v[i - distance];
  }
  double at(int i) const { return v[i]; }
  uint32_t above(double x) const { // one bit per lane
    uint32_t bits = 0;
    for (int i = 0; i < LANES; ++i) bits |= static_cast<uint32_t>(v[i] > x) << i;
    return bits;
  }
};

OUTRIDER_HD int run_length(int n) { return (n + LANES - 1) / LANES; }

template <class Sums> OUTRIDER_HD Sums prefix_sums(Sums sums) {
  for (int distance = 1; distance < LANES; distance *= 2) sums.add_below(distance);
  return sums;
}

template <class Sums = Lanes, class At> OUTRIDER_HD double total_of(const At& at, int n) {
  return prefix_sums(Sums::of(at, 0, n, run_length(n))).at(LANES - 1);
}

OUTRIDER_HD int lowest_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffs(static_cast<int>(bits)) - 1;
#else
  return __builtin_ctz(bits);
#endif
}

OUTRIDER_HD int highest_bit(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return 31 - __clz(static_cast<int>(bits));
#else
  return 31 - __builtin_clz(bits);
#endif
}

// The index at which the cumulative sum crosses fraction * total; *within: how far into that
// number, about [0, 1]. Numbers that are not positive are never chosen. Past the end (a fraction
// close to 1), the last positive one. -1 if the sum is 0.
template <class Sums>
OUTRIDER_HD int find_crossing(const Sums& sums, double fraction, double* within) {
  const Sums upto = prefix_sums(sums);
  const double total = upto.at(LANES - 1);
  const double threshold = fraction * total;
  const uint32_t adds = sums.above(0.0), crosses = adds & upto.above(threshold);
  *within = 1;
  if (adds == 0) return -1;
  if (crosses == 0) return highest_bit(adds);
  const int i = lowest_bit(crosses);
  *within = (threshold - (i > 0 ? upto.at(i - 1) : 0.0)) / sums.at(i);
  return i;
}

// The same among the n numbers at(0), at(1), ...: first the run, then the number in it.
template <class Sums = Lanes, class At>
OUTRIDER_HD int choose(const At& at, int n, double fraction, double* within) {
  int first = 0;
  for (;;) {
    const int length = run_length(n);
    const int run = find_crossing(Sums::of(at, first, n, length), fraction, within);
    if (run < 0) return -1;
    first += run * length;
    if (length == 1) return first;
    n = n - run * length < length ? n - run * length : length;
    fraction = *within;
  }
}

// Top-p sums weights in fixed point, so that the order does not matter. The scale is a power of 2
// with which V times the largest weight, 1, does not overflow.
OUTRIDER_HD float fixed_scale(int vocab_size) {
  uint32_t bits = 62;
  for (int n = vocab_size - 1; n > 0; n /= 2) --bits;
  return as_float((127u + bits) << 23);
}

OUTRIDER_HD int64_t fixed(float weight, float scale) {
  return static_cast<int64_t>(weight * scale);
}

// The mass that the tokens, from the largest down, have to reach for top-p, less a slack for the
// rounding of float32 sums (TOP_P_SLACK of warp.py explains it). At least the first token is kept.
OUTRIDER_HD int64_t nucleus_mass(double top_p, double total) {
  const int64_t target = static_cast<int64_t>((top_p - 1e-6) * total);
  return target > 1 ? target : 1;
}

// --- a slot's parameters ----------------------------------------------------------------------

// The ranges of SamplingParams in runtime/sampling/warp.py. Each comparison is false for NaN.
// Without branches, since on a GPU each would wait for another load.
OUTRIDER_HD bool is_valid(const outrider_slot& s, int width) {
  const bool temperature =
      (s.temperature == 0) | ((s.temperature >= 1e-7f) & (s.temperature <= 1e7f));
  const bool ids = (s.context_length >= 0) & (s.output_start >= 0) & (s.suppress_length >= 0) &
                   (s.bias_length >= 0) & ((s.context != nullptr) | (s.context_length == 0)) &
                   ((s.suppress != nullptr) | (s.suppress_length == 0)) &
                   (((s.bias_ids != nullptr) & (s.biases != nullptr)) | (s.bias_length == 0));
  const bool rule = (s.rule >= OUTRIDER_TOKEN) & (s.rule <= OUTRIDER_COUPLED) &
                    ((s.rule == OUTRIDER_TOKEN) | (s.lenience == 1)) &
                    !((s.rule == OUTRIDER_SIGMOID) & (s.temperature == 0));
  const bool filters = (s.top_k >= 0) & (s.top_p > 0) & (s.top_p <= 1) & (s.min_p >= 0) &
                       (s.min_p <= 1);
  const bool penalties = (s.repetition_penalty > 0) & (s.repetition_penalty < INF) &
                         (s.frequency_penalty > -INF) & (s.frequency_penalty < INF) &
                         (s.presence_penalty > -INF) & (s.presence_penalty < INF);
  return temperature & ids & rule & filters & penalties & (s.lenience > 0) & (s.lenience <= 1) &
         (s.sigmoid_alpha < 0) & (s.sigmoid_beta > 0) & (s.gamma >= -1) & (s.gamma <= width) &
         (s.index >= 0);
}

// Whether top-k removes anything from a row of this width.
OUTRIDER_HD bool has_top_k(const outrider_slot& s, int width) {
  return s.top_k > 0 && s.top_k < width;
}

OUTRIDER_HD bool has_filters(const outrider_slot& s, int width) {
  return s.temperature > 0 && (has_top_k(s, width) || s.top_p < 1 || s.min_p > 0);
}

OUTRIDER_HD bool is_coupled(const outrider_slot& s) {
  return s.rule == OUTRIDER_COUPLED && s.temperature > 0;
}

// Whether each row of the slot determines one token, without random numbers of the round: p and q
// are then point masses, and a draft token is accepted if it is the target's token.
OUTRIDER_HD bool is_deterministic(const outrider_slot& s) {
  return s.temperature == 0 || s.rule == OUTRIDER_COUPLED;
}

// --- the rules --------------------------------------------------------------------------------

// The verdict of a slot without a token: the error and its row, or none yet.
OUTRIDER_HD outrider_verdict verdict_of(int32_t status, int32_t model, int32_t row) {
  return {-1, 0, 0, status, model, row, 0};
}
OUTRIDER_HD outrider_verdict no_verdict() { return verdict_of(OUTRIDER_OK, OUTRIDER_TARGET, 0); }

// The outcome of the accept tests. The next token is drawn from row `accepted`: from p, or from the
// residual max(0, scale p - q).
struct Decision {
  int accepted;
  int examined;
  bool residual;
  double scale;
};

// The template parameter Round provides: bool probs(i, &p, &q), which gives p_i(x_i) and q_i(x_i)
// (p^ and q^ for the sigmoid rule); bool residual_mass(i, scale, &mass), the sum of max(0, scale p
// - q); double accept_u(i). The first two return false if a row is broken.

// Speculative sampling (Leviathan et al. 2023; lenience: appendix A.5), and the sigmoid rule, which
// differs only in p and q. The test u q < p is strict, so that p = 0 is rejected even at u = 0.
template <class Round>
OUTRIDER_HD bool decide_token(Round& round, int gamma, double lenience, double* ratios,
                              Decision* decision) {
  *decision = {gamma, gamma, false, 1.0};
  for (int i = 0; i < gamma; ++i) {
    double p, q;
    if (!round.probs(i, &p, &q)) return false;
    const double ratio = q > 0 ? p / (lenience * q) : 0.0;
    ratios[i] = ratio < 1 ? ratio : 1.0;
    if (!(q > 0 && round.accept_u(i) * lenience * q < p)) {
      *decision = {i, i + 1, true, 1.0};
      break;
    }
  }
  return true;
}

// Block verification (arXiv 2403.10444, Algorithm 2): P_i = min(P_{i-1} p_i / q_i, 1); Z_i = sum
// max(P_i p_{i+1} - q_{i+1}, 0); h_i = Z_i / (Z_i + 1 - P_i), h_gamma = P_gamma; tau = the *last* i
// with u_i < h_i. In two steps, because on a GPU the masses of all rows are computed in between.

// Computes P_0 .. P_gamma into prefix [gamma + 1]. *all: whether all draft tokens are accepted.
template <class Round>
OUTRIDER_HD bool block_prefixes(Round& round, int gamma, double* prefix, double* ratios, bool* all) {
  prefix[0] = 1;
  for (int i = 0; i < gamma; ++i) {
    double p, q;
    if (!round.probs(i, &p, &q)) return false;
    const double ratio = q > 0 ? p / q : 0.0;
    const double product = prefix[i] * ratio;
    prefix[i + 1] = product < 1 ? product : 1.0;
    ratios[i] = ratio < 1 ? ratio : 1.0;
  }
  *all = gamma == 0 || round.accept_u(gamma - 1) < prefix[gamma];
  return true;
}

// Whether the test at tau fails without computing Z: Z <= P implies h <= P.
template <class Round>
OUTRIDER_HD bool block_fails(const Round& round, int tau, double scale) {
  return scale < 1 && round.accept_u(tau - 1) >= scale;
}

// Finds tau when not all draft tokens are accepted, searching backwards for the last i that passes.
template <class Round>
OUTRIDER_HD bool block_tau(Round& round, int gamma, const double* prefix, Decision* decision) {
  for (int tau = gamma - 1; tau >= 0; --tau) {
    const double scale = prefix[tau];
    if (block_fails(round, tau, scale)) continue;
    double mass;
    if (!round.residual_mass(tau, scale, &mass)) return false;
    *decision = {tau, gamma, true, scale};
    // P = 1 implies h = 1 (even for Z = 0: then p = q, and the residual is p), so the search ends
    // at tau = 0 at the latest.
    if (scale == 1 || round.accept_u(tau - 1) < mass / (mass + 1 - scale)) break;
  }
  return true;
}

template <class Round>
OUTRIDER_HD bool decide_block(Round& round, int gamma, double* ratios, Decision* decision) {
  double prefix[OUTRIDER_MAX_WIDTH + 1];
  bool all = true;
  if (!block_prefixes(round, gamma, prefix, ratios, &all)) return false;
  *decision = {gamma, gamma, false, 1.0};
  return all || block_tau(round, gamma, prefix, decision);
}

} // namespace outrider
} // namespace
#endif
