// Log-probabilities of a row of logits, for reports, and confidences, for draft thresholds.
// Computed in double precision, in the same order on every instruction set.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "outrider.h"

namespace {

constexpr int LANES = 8; // parallel sums

// exp(x) for x <= 0, relative error about 1e-15: 2^n exp(r) with |r| <= log(2) / 2. 0 below -700.
inline double exponential(double x) {
  const double shift = 6755399441055744.0; // 1.5 * 2^52: adding it rounds to a whole number
  const double floor = x < -700.0 ? -700.0 : x;
  const double shifted = floor * 1.4426950408889634 + shift;
  const double n = shifted - shift;
  const double r = (floor - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
  double p = 1.0 / 6227020800.0; // 1 / 13!
  for (const double k : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0,
                         120.0, 24.0, 6.0, 2.0, 1.0, 1.0})
    p = p * r + 1.0 / k;
  uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52; // the low bits of `shifted` are n
  double power;
  memcpy(&power, &bits, sizeof power);
  return x < -700.0 ? 0.0 : p * power;
}

float peak_of(const float* logits, int32_t count) {
  float peak[LANES];
  std::fill(peak, peak + LANES, -INFINITY);
  int32_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int lane = 0; lane < LANES; ++lane)
      peak[lane] = logits[i + lane] > peak[lane] ? logits[i + lane] : peak[lane];
  for (; i < count; ++i) peak[0] = logits[i] > peak[0] ? logits[i] : peak[0];
  return *std::max_element(peak, peak + LANES);
}

// The sum of exp((z - peak) * rate).
double sum_of(const float* logits, int32_t count, double peak, double rate) {
  double sum[LANES] = {};
  int32_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int lane = 0; lane < LANES; ++lane)
      sum[lane] += exponential((static_cast<double>(logits[i + lane]) - peak) * rate);
  for (int lane = 0; i < count; ++i, ++lane)
    sum[lane] += exponential((static_cast<double>(logits[i]) - peak) * rate);
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

} // namespace

extern "C" {

void outrider_log_softmax(const float* logits, int32_t vocab_size, double* logprobs) {
  const double peak = peak_of(logits, vocab_size);
  const double log_sum = log(sum_of(logits, vocab_size, peak, 1));
  for (int32_t i = 0; i < vocab_size; ++i)
    logprobs[i] = static_cast<double>(logits[i]) - peak - log_sum;
}

double outrider_confidence(const float* logits, int32_t vocab_size, int64_t id,
                           double temperature) {
  const double peak = peak_of(logits, vocab_size), rate = 1 / temperature;
  return exponential((static_cast<double>(logits[id]) - peak) * rate) /
         sum_of(logits, vocab_size, peak, rate);
}

} // extern "C"
