// Products with weights of 4, 8 and 16 bits, for any number of rows: the computation of the
// operators for ONNX Runtime, in plain C++.
//
// An element of W [N, K] is an integer level times a scale that BLOCK neighbours along K share. W
// is stored in the order in which it is read: PANEL outputs form a panel, and a panel's blocks
// follow one another.
//
//   levels  uint8 [N / PANEL, K / BLOCK, 64 bits], unsigned: level + 2^(bits - 1). Byte 4 lane + i
//           of vector j (64 bytes) belongs to output `lane` of the panel: with 8 bits it is number
//           4 j + i of the block; with 4 bits its low half is number 8 j + i, its high half
//           8 j + 4 + i
//   scales  float16 [N / PANEL, K / BLOCK, PANEL]
//
// N and K are padded to whole panels and blocks; the padding has no effect.
//
// A row x [K] is rounded to 8 bits, block by block, as in llama.cpp (Q8_0), so that a block's
// product is one of integers: exact, in any order. It is then scaled and added to the sum of the
// previous blocks. The bits of an output therefore depend only on its row and its weights.
//
// Weights of 16 bits are float16 or bfloat16 numbers, uint16 [N / PANEL, K, PANEL], without scales.
// Rows are not rounded: a product is computed in float32, and added to the sum of the previous ones
// along K, so that here, too, the bits depend only on the row and the weights.
#ifndef OUTRIDER_PRODUCT_H
#define OUTRIDER_PRODUCT_H

#include <stdint.h>

enum {
  OUTRIDER_PRODUCT_BLOCK = 32, // numbers that share a scale
  OUTRIDER_PRODUCT_PANEL = 16  // outputs computed together
};

// A block of a rounded row.
struct outrider_rounded {
  int8_t levels[OUTRIDER_PRODUCT_BLOCK];
  float scale;
  int32_t correction; // for the offset of 4-bit levels of weights: -8 times the sum of `levels`
};

struct outrider_product {
  int64_t rows, depth, columns; // of x; K; N
  int64_t stride;               // from one row of y to the next: N, or more
  int64_t bits;                 // of a weight: 4, 8 or 16
  int64_t dtype;                // of a weight with 16 bits: OUTRIDER_FLOAT16 or OUTRIDER_BFLOAT16
  const float* x;               // [rows, K]
  const uint8_t* levels; // or the weights of 16 bits
  const uint16_t* scales;
  float* y; // [rows, N]
  struct outrider_rounded* rounded; // the rows of x: [rows, blocks]
};

struct outrider_product_tiles {
  const char* name;
  int64_t panels; // of a group, which are multiplied together
  void (*round)(const struct outrider_product* call, int64_t first_row, int64_t end_row);
  void (*multiply)(const struct outrider_product* call, int64_t first_group, int64_t end_group);
};

extern "C" {
extern const struct outrider_product_tiles outrider_product_plain;
extern const struct outrider_product_tiles outrider_product_avx2;
extern const struct outrider_product_tiles outrider_product_avxvnni;
extern const struct outrider_product_tiles outrider_product_avx512vnni;
extern const struct outrider_product_tiles outrider_product_dotprod;
}
#endif
