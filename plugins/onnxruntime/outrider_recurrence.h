// What layers keep in place of keys and values: a state that each token decays and adds to, or the
// inputs of a short convolution. What the operators for ONNX Runtime compute, in plain C++.
//
// A cache of them is a ring of R rows by position: row p lies at p mod R. A call at position L
// reads rows L - 1 and before, those of a negative number being zeros, and writes rows L up to
// L + N - 1, the last R of them.
#ifndef OUTRIDER_RECURRENCE_H
#define OUTRIDER_RECURRENCE_H

#include <stdint.h>

enum {
  OUTRIDER_RECURRENCE_WIDTH = 512,   // most numbers of a key, Dk
  OUTRIDER_RECURRENCE_COLUMNS = 128, // most values or channels of one call of what is below
  OUTRIDER_RECURRENCE_TAPS = 32      // most tokens that a convolution sees, K
};

// N new tokens for each of B slots. Each lets the rows of a head's state S [Dk, Dv] decay, adds k u
// to it, and gives q S. With beta u is beta (v - k S): the gated delta rule (Yang et al. 2024,
// arXiv 2412.06464, eq. 10). Without it is v: state space duality (Dao and Gu 2024, arXiv
// 2405.21060).
struct outrider_recurrence {
  int64_t tokens, heads, key_heads, key_width, width; // N, H, Hk, Dk, Dv
  int64_t decays; // of a token and head: 1, or Dk
  int64_t rows;   // R
  const float *query, *key;  // [B, N, Hk, Dk]; head h has those of h / (H / Hk)
  const float* value;        // [B, N, H, Dv]
  const float* decay;        // [B, N, H, decays], logarithms
  const float* beta;         // [B, N, H], or null
  const int64_t* position;   // [B]
  float* states;             // [B, H, R, Dk Dv]
  float* out;                // [B, N, H, Dv]
};

// y[c, n] = bias[c] + sum_j weight[c, j] x[c, n - K + 1 + j]. What was before the call: in `past`.
struct outrider_convolution {
  int64_t tokens, channels, taps, rows; // N, C, K, R
  const float* x;          // [B, C, N]
  const float* weight;     // [C, K]
  const float* bias;       // [C], or null
  const int64_t* position; // [B]
  float* past;             // [B, R, C]
  float* out;              // [B, C, N]
};

// The bits of a token's output and row follow from its own inputs and the rows before it alone: in
// calls of any width they go through the same operations in the same order, and neither columns nor
// channels meet. At most OUTRIDER_RECURRENCE_COLUMNS of them at a time.
struct outrider_recurrence_tiles {
  const char* name;
  void (*recur)(const struct outrider_recurrence* call, int64_t slot, int64_t head,
                int64_t first_column, int64_t end_column);
  void (*convolve)(const struct outrider_convolution* call, int64_t slot, int64_t first_channel,
                   int64_t end_channel);
};

extern "C" {
extern const struct outrider_recurrence_tiles outrider_recurrence_plain;
extern const struct outrider_recurrence_tiles outrider_recurrence_avx2;
extern const struct outrider_recurrence_tiles outrider_recurrence_avx512;
}
#endif
