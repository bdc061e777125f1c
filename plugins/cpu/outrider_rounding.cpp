// Rounds weights to 4 bits, in blocks that share a scale: outrider_round4 of outrider.h.
//
// For a given scale the nearest levels are optimal, so only the scale has to be chosen. A grid of
// scales is tried, as in the quantisation of llama.cpp's formats (`make_qx_quants`): with a scale
// fitted to the levels l, the squared error is |x|^2 - (l x)^2 / |l|^2, so the best levels have the
// largest (l x)^2 / |l|^2. The fitted scale, rounded to float16, is used only if it beats the scale
// that just fits the largest number into the range, so no block is worse than with that one.
#include <atomic>
#include <cmath>
#include <cstring>

#include "outrider.h"
#include "outrider_threads.h"

namespace {

constexpr int COLUMNS = 32;
constexpr int LANES = 16; // rows of the matrix processed together
constexpr int64_t ROWS = 512; // rows that a thread takes at a time; fewer are not worth a thread
constexpr float LOWEST = -8, HIGHEST = 7;
constexpr float LARGEST = 65504; // of float16
// The level that a scale would give a block's largest number in an unlimited range. Beyond -8 it is
// clipped, which may benefit the others. A positive largest number gets a negative scale, so that
// it is always on the longer side of the range.
constexpr float REACH[] = {-9.2f, -8.8f, -8.4f, -8.1f, -7.9f, -7.6f, -7.3f, -7.0f};

typedef float Row[LANES];

// The nearest level, ties to even: adding 1.5 * 2^23 rounds to a whole number. NaN, which `inverse`
// may produce from numbers that are not finite, becomes the lowest level.
inline float level_of(float x, float inverse_scale) {
  const float level = x * inverse_scale;
  const float in_range = level > LOWEST ? level < HIGHEST ? level : HIGHEST : LOWEST;
  return (in_range + 12'582'912.0f) - 12'582'912.0f;
}

// The nearest float16 number: adding 1.5 * 2^23 times the place value of its last bit rounds to it.
inline float to_float16(float x) {
  x = x > LARGEST ? LARGEST : x < -LARGEST ? -LARGEST : x;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0x7f80'0000u;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  const float digits = power * 12'288.0f, least = 0.75f;
  const float far = digits > least ? digits : least;
  return (x + far) - far;
}

// above / below, or 0 if `below` is 0 in float16: for a block of zeros or of tiny numbers.
inline float ratio(float above, float below) {
  return std::fabs(below) < 0x1p-25f ? 0.0f : above / below;
}

inline void squared_error(const Row* x, int columns, const Row& scale, Row& error) {
  Row inverse;
  for (int n = 0; n < LANES; ++n) inverse[n] = ratio(1, scale[n]), error[n] = 0;
  for (int i = 0; i < columns; ++i)
    for (int n = 0; n < LANES; ++n) {
      const float difference = level_of(x[i][n], inverse[n]) * scale[n] - x[i][n];
      error[n] += difference * difference;
    }
}

// The best scale of each row. Returns false for values that no scale reaches.
bool best_scales(const Row* x, int columns, Row& scale) {
  Row low{}, high{}, peak, full_scale, best_score{}, fitted_scale;
  int out_of_reach = 0;
  for (int i = 0; i < columns; ++i)
    for (int n = 0; n < LANES; ++n) {
      low[n] = x[i][n] < low[n] ? x[i][n] : low[n];
      high[n] = x[i][n] > high[n] ? x[i][n] : high[n];
      out_of_reach |= !(std::fabs(x[i][n]) <= LARGEST * HIGHEST); // NaN is
    }
  if (out_of_reach) return false;
  for (int n = 0; n < LANES; ++n) {
    peak[n] = -low[n] > high[n] ? low[n] : high[n];
    full_scale[n] = fitted_scale[n] = to_float16(std::fabs(peak[n]) / HIGHEST);
  }
  for (const float reach : REACH) {
    Row inverse, along{}, square{};
    for (int n = 0; n < LANES; ++n) inverse[n] = ratio(1, peak[n] / reach);
    for (int i = 0; i < columns; ++i)
      for (int n = 0; n < LANES; ++n) {
        const float level = level_of(x[i][n], inverse[n]);
        along[n] += level * x[i][n];
        square[n] += level * level;
      }
    for (int n = 0; n < LANES; ++n) {
      const float score = ratio(along[n] * along[n], square[n]);
      fitted_scale[n] =
          score > best_score[n] ? to_float16(ratio(along[n], square[n])) : fitted_scale[n];
      best_score[n] = score > best_score[n] ? score : best_score[n];
    }
  }
  Row error_full, error_fitted;
  squared_error(x, columns, full_scale, error_full);
  squared_error(x, columns, fitted_scale, error_fitted);
  for (int n = 0; n < LANES; ++n)
    scale[n] = error_fitted[n] > error_full[n] ? full_scale[n] : fitted_scale[n];
  return true;
}

// Rounds column by column into `level`. Errors of earlier columns are propagated into x.
void levels_of(Row* x, int columns, const float* inverse, const Row& scale, Row* level) {
  Row inverse_scale;
  for (int n = 0; n < LANES; ++n) inverse_scale[n] = ratio(1, scale[n]);
  for (int i = 0; i < columns; ++i) {
    Row error;
    for (int n = 0; n < LANES; ++n) {
      level[i][n] = level_of(x[i][n], inverse_scale[n]);
      error[n] = x[i][n] - level[i][n] * scale[n];
    }
    for (int j = i + 1; inverse && j < columns; ++j)
      for (int n = 0; n < LANES; ++n) x[j][n] -= inverse[i * columns + j] * error[n];
  }
}

} // namespace

extern "C" int32_t outrider_round4(const float* wanted, float* numbers, int64_t rows, int32_t columns,
                                   const float* inverse, int8_t* levels, int64_t level_stride,
                                   float* scales, int32_t threads) {
  if (!wanted || !numbers || !levels || !scales || rows < 1 || columns < 1 || columns > COLUMNS ||
      level_stride < columns || threads < 1)
    return OUTRIDER_BAD_ARGUMENT;
  std::atomic<int64_t> next{0};
  std::atomic<bool> all_reached{true};
  const auto loop = [&](int) {
    Row x[COLUMNS], level[COLUMNS], scale;
    for (int64_t from = next.fetch_add(ROWS); from < rows; from = next.fetch_add(ROWS))
      for (int64_t n = from; n < std::min(from + ROWS, rows); n += LANES) {
        const int lanes = static_cast<int>(std::min<int64_t>(LANES, rows - n));
        for (int i = 0; i < columns; ++i) {
          std::memset(x[i], 0, sizeof x[i]);
          std::memcpy(x[i], wanted + i * rows + n, lanes * sizeof(float));
        }
        if (!best_scales(x, columns, scale)) {
          all_reached = false;
          return;
        }
        levels_of(x, columns, inverse, scale, level);
        std::memcpy(scales + n, scale, lanes * sizeof(float));
        for (int i = 0; i < columns; ++i)
          for (int lane = 0; lane < lanes; ++lane) {
            numbers[i * rows + n + lane] -= level[i][lane] * scale[lane];
            levels[(n + lane) * level_stride + i] = static_cast<int8_t>(level[i][lane]);
          }
      }
  };
  on_threads(static_cast<int>(std::min<int64_t>(threads, rows / ROWS)), loop);
  return all_reached ? OUTRIDER_OK : OUTRIDER_BAD_PARAMETER;
}
