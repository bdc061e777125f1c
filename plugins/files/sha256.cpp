#include "sha256.h"

#include <string.h>

#include <algorithm>

#if defined(OUTRIDER_X86)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(OUTRIDER_ARM) && (!defined(__clang__) || __clang_major__ >= 16)
#define FAST_ARM // older clang enables these instructions for whole files only
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#include "outrider.h"

namespace outrider {

namespace {

// The first 32 fractional bits of the cube roots of the first 64 primes.
alignas(16) const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

void blocks_plain(uint32_t* state, const unsigned char* data, size_t count) {
  for (; count > 0; --count, data += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = static_cast<uint32_t>(data[4 * i]) << 24 | static_cast<uint32_t>(data[4 * i + 1]) << 16 |
             static_cast<uint32_t>(data[4 * i + 2]) << 8 | data[4 * i + 3];
    for (int i = 16; i < 64; ++i) {
      const uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
             (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    uint32_t v[8];
    memcpy(v, state, sizeof v);
    for (int i = 0; i < 64; ++i) {
      const uint32_t e = v[4], a = v[0];
      const uint32_t one = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                           ((e & v[5]) ^ (~e & v[6])) + K[i] + w[i];
      const uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +
                           ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
      memmove(v + 1, v, 7 * sizeof *v);
      v[4] += one;
      v[0] = one + two;
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
  }
}

#if defined(OUTRIDER_X86)
bool has_instructions() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b >> 29 & 1) != 0;
}

// The instruction for two rounds takes the state as (a b e f) and (c d g h); a step is four rounds.
__attribute__((target("sha,sse4.1"))) void blocks_sha(uint32_t* state, const unsigned char* data,
                                                      size_t count) {
  const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  const auto at = [](uint32_t* words) { return reinterpret_cast<__m128i*>(words); };
  const __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(at(state)), 0xB1);        // c d a b
  const __m128i high = _mm_shuffle_epi32(_mm_loadu_si128(at(state + 4)), 0x1B);   // e f g h
  __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xF0);
  for (; count > 0; --count, data += 64) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = _mm_shuffle_epi8(
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), order);
    for (int step = 0; step < 16; ++step) {
      if (step >= 4) { // compute the next four words from the previous sixteen
        __m128i next = _mm_sha256msg1_epu32(w[0], w[1]);
        next = _mm_add_epi32(next, _mm_alignr_epi8(w[3], w[2], 4));
        next = _mm_sha256msg2_epu32(next, w[3]);
        w[0] = w[1], w[1] = w[2], w[2] = w[3], w[3] = next;
      }
      const __m128i words = step < 4 ? w[step] : w[3];
      const __m128i sum = _mm_add_epi32(
          words, _mm_load_si128(reinterpret_cast<const __m128i*>(K + 4 * step)));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_before), cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(at(state), _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(at(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}
#elif defined(FAST_ARM)
bool has_instructions() { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }

__attribute__((target("+crypto"))) void blocks_sha(uint32_t* state, const unsigned char* data,
                                                   size_t count) {
  uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
  for (; count > 0; --count, data += 64) {
    const uint32x4_t abcd_before = abcd, efgh_before = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; ++i)
      w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
    for (int step = 0; step < 16; ++step) { // four rounds each
      uint32x4_t* words = w + step % 4;
      const uint32x4_t sum = vaddq_u32(*words, vld1q_u32(K + 4 * step)), before = abcd;
      if (step < 12)
        *words = vsha256su1q_u32(vsha256su0q_u32(*words, w[(step + 1) % 4]), w[(step + 2) % 4],
                                 w[(step + 3) % 4]);
      abcd = vsha256hq_u32(abcd, efgh, sum);
      efgh = vsha256h2q_u32(efgh, before, sum);
    }
    abcd = vaddq_u32(abcd, abcd_before), efgh = vaddq_u32(efgh, efgh_before);
  }
  vst1q_u32(state, abcd), vst1q_u32(state + 4, efgh);
}
#else
bool has_instructions() { return false; }
const auto blocks_sha = blocks_plain;
#endif

void blocks(uint32_t* state, const unsigned char* data, size_t count) {
  static const bool fast = has_instructions();
  const bool plain = !fast || strcmp(outrider_instruction_set(), "plain") == 0;
  (plain ? blocks_plain : blocks_sha)(state, data, count);
}

} // namespace

void Sha256::update(const void* data, size_t size) {
  auto at = static_cast<const unsigned char*>(data);
  const size_t held = size_ % 64;
  size_ += size;
  if (held > 0) {
    const size_t taken = std::min(size, 64 - held);
    memcpy(rest_ + held, at, taken);
    at += taken, size -= taken;
    if (held + taken < 64) return;
    blocks(state_, rest_, 1);
  }
  blocks(state_, at, size / 64);
  if (size % 64 > 0) memcpy(rest_, at + size / 64 * 64, size % 64);
}

std::string Sha256::hex() {
  const uint64_t bits = size_ * 8;
  const unsigned char one = 0x80, zero = 0;
  update(&one, 1);
  while (size_ % 64 != 56) update(&zero, 1);
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
  update(length, 8);
  std::string text;
  for (const uint32_t word : state_)
    for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
  return text;
}

std::string Sha256::of(const std::string& text) {
  Sha256 hash;
  hash.update(text.data(), text.size());
  return hash.hex();
}

} // namespace outrider
