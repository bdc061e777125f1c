// Attention over the valid rows of a cache, for any number of slots: the computation of the
// operators for ONNX Runtime, in plain C++.
#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include <stdint.h>

enum {
  OUTRIDER_ATTENTION_ROWS = 32,   // maximum query rows per call of `attend`
  OUTRIDER_ATTENTION_WIDTH = 512, // maximum D, the elements of a head
  OUTRIDER_ATTENTION_KEYS = 64,   // keys per block
  OUTRIDER_ATTENTION_PART = 128,  // rows per part: whole blocks
  OUTRIDER_ATTENTION_SCALE = 4    // bytes of a quantised row's scale
};

// One call: N new tokens for each of B slots. A head's queries and keys are read at
// [slot * tokens + token] * stride + head * width, its values with value_width for width. With the
// caches of a source (`length`), nothing is rotated or written.
struct outrider_attention {
  int64_t slots, tokens, heads, key_heads, width, value_width; // B, N, H, Hkv, D, Dv
  int64_t rows;        // S of the caches
  int64_t window;      // rows that a query attends to, including its own; 0: all up to its own
  int64_t rotated;     // number of rotated elements, the first ones of a head; even; 0: none
  int64_t interleaved; // rotated pairs are (2i, 2i + 1); otherwise (i, i + rotated / 2)
  float scale;
  const float *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;
  const int64_t* position; // [B], the row of a slot's first new token
  const int64_t* length;   // [B], rows that a slot's queries attend to; null: all up to their own
  // [H, distances], added to the scores: for a query of row q and a key of row r, the element
  // `farthest` + r - q. After the element of r = q follow OUTRIDER_ATTENTION_KEYS more, for rows
  // that no query attends to. Or null.
  const float* bias;
  int64_t distances, farthest;
  const float* sinks; // [H], scores that only add to the sum of the weights; null: none
  float softcap;      // scores become softcap tanh(score / softcap), before the bias; 0: off
  const float *cosine, *sine; // [.., rotated / 2], by row
  // Caches: float [B, Hkv, S, D or Dv]; or quantised, int8 with OUTRIDER_ATTENTION_SCALE more
  // elements per row: a row is its levels, followed by their scale, a float.
  void *keys, *values;
  float* out; // [B, N, H Dv]
};

// The first cache row that a query of row `own` attends to.
static inline int64_t outrider_attention_first_row(const struct outrider_attention& call,
                                                   int64_t own) {
  return call.window > 0 && own >= call.window ? own - call.window + 1 : 0;
}

// Number of query rows per slot and key head.
static inline int64_t outrider_attention_rows(const struct outrider_attention& call) {
  return call.tokens * (call.heads / call.key_heads);
}

// Number of floats in a row's sums over a part: the mixed values, padded to whole vectors, the peak
// and the total.
static inline int64_t outrider_attention_stride(const struct outrider_attention& call) {
  return (call.value_width + 15) / 16 * 16 + 16;
}

struct outrider_attention_tiles {
  const char* name;
  // Write the new keys, rotated, and values of one slot and key head to its cache, for N tokens.
  void (*write)(const struct outrider_attention* call, int64_t slot, int64_t key_head);
  // Attention for query rows first .. end - 1 of one slot and key head, at most
  // OUTRIDER_ATTENTION_ROWS. Row r is query head key_head * H / Hkv + r mod H / Hkv of token
  // r / (H / Hkv).
  //
  // The bits of a row depend only on its query and its rows of the cache. In all calls, the same
  // operations are performed for it in the same order: keys are processed in blocks and parts that
  // begin at multiples of a fixed number of rows, and each part is summed separately, then added to
  // those before it. Rows that share the load of a key or value are never combined.
  void (*attend)(const struct outrider_attention* call, int64_t slot, int64_t key_head,
                 int64_t first, int64_t end);
  // The same for all query rows, if one call of `attend` could process them, in two steps, so that
  // threads can divide the parts: compute the sums of parts first_part .. end_part - 1, [part, row,
  // outrider_attention_stride]; then combine the sums of all parts that the rows attend to.
  void (*attend_parts)(const struct outrider_attention* call, int64_t slot, int64_t key_head,
                       int64_t first_part, int64_t end_part, float* sums);
  void (*combine)(const struct outrider_attention* call, int64_t slot, int64_t key_head,
                  int64_t parts, const float* sums);
};

extern "C" {
// For caches of floats, and for quantised ones.
extern const struct outrider_attention_tiles outrider_attention_plain;
extern const struct outrider_attention_tiles outrider_attention_avx2;
extern const struct outrider_attention_tiles outrider_attention_avx512;
extern const struct outrider_attention_tiles outrider_attention_int8_plain;
extern const struct outrider_attention_tiles outrider_attention_int8_avx2;
extern const struct outrider_attention_tiles outrider_attention_int8_avx512;
}
#endif
