// Layers that keep a state instead of keys and values: a recurrent state, which each token decays
// and adds to, or the last inputs of a short convolution. The computation of the operators for ONNX
// Runtime, in plain C++.
//
// The cache is a ring of R rows indexed by position: row p is stored at p mod R. A call at position
// L reads row L - 1 and earlier rows (zeros for negative numbers), and writes the last R of rows L
// to L + N - 1.
#ifndef OUTRIDER_RECURRENCE_H
#define OUTRIDER_RECURRENCE_H

#include <stdint.h>

enum {
  OUTRIDER_RECURRENCE_WIDTH = 512,   // maximum Dk, the elements of a key
  OUTRIDER_RECURRENCE_COLUMNS = 128, // maximum columns or channels per call of the functions below
  OUTRIDER_RECURRENCE_TAPS = 32      // maximum K, the taps of a convolution
};

// N new tokens for each of B slots. Each token decays the rows of a head's state S [Dk, Dv], adds k
// u to it and outputs q S. With beta, u = beta (v - k S): the gated delta rule (Yang et al. 2024,
// arXiv 2412.06464, eq. 10). Without beta, u = v: state space duality (Dao and Gu 2024, arXiv
// 2405.21060).
struct outrider_recurrence {
  int64_t tokens, heads, key_heads, key_width, width; // N, H, Hk, Dk, Dv
  int64_t decays; // per token and head: 1, or Dk
  int64_t rows;   // R
  const float *query, *key;  // [B, N, Hk, Dk]; head h uses those of key head h / (H / Hk)
  const float* value;        // [B, N, H, Dv]
  const float* decay;        // [B, N, H, decays], logarithms
  const float* beta;         // [B, N, H], or null
  const int64_t* position;   // [B]
  float* states;             // [B, H, R, Dk Dv]
  float* out;                // [B, N, H, Dv]
};

// y[c, n] = bias[c] + sum_j weight[c, j] x[c, n - K + 1 + j]. Inputs before the call are in `past`.
struct outrider_convolution {
  int64_t tokens, channels, taps, rows; // N, C, K, R
  const float* x;          // [B, C, N]
  const float* weight;     // [C, K]
  const float* bias;       // [C], or null
  const int64_t* position; // [B]
  float* past;             // [B, R, C]
  float* out;              // [B, C, N]
};

// The bits of a token's output and row depend only on its own inputs and the rows before it: calls
// of any width perform the same operations in the same order, and columns and channels are
// independent. A call takes at most OUTRIDER_RECURRENCE_COLUMNS of them.
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
