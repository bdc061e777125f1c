// Attention over the valid rows of a cache, for any number of slots: what the operator for ONNX
// Runtime computes, in plain C++.
#ifndef OUTRIDER_ATTENTION_H
#define OUTRIDER_ATTENTION_H

#include <stdint.h>

enum {
  OUTRIDER_ATTENTION_ROWS = 32,   // most query rows of one `attend`
  OUTRIDER_ATTENTION_WIDTH = 512, // most numbers of a head, D
  OUTRIDER_ATTENTION_KEYS = 64,   // of a block
  OUTRIDER_ATTENTION_PART = 128,  // rows of a part, whole blocks
  OUTRIDER_ATTENTION_SCALE = 4    // bytes of a quantised row's scale
};

// One call: N new tokens for each of B slots. A head's queries, keys and values are read at
// [slot * tokens + token] * stride + head * width, of values value_width. Nothing is rotated or
// written where the caches are those of a source (`length`).
struct outrider_attention {
  int64_t slots, tokens, heads, key_heads, width, value_width; // B, N, H, Hkv, D, Dv
  int64_t rows;                                   // S of the caches
  int64_t window;   // a query sees this many rows, its own among them; 0: all up to its own
  int64_t rotated;  // the first numbers of a head that are rotated, even; 0: none
  int64_t interleaved; // rotated are neighbours (2i, 2i + 1); otherwise (i, i + rotated / 2)
  float scale;
  const float *query, *key, *value;
  int64_t query_stride, key_stride, value_stride;
  const int64_t* position;  // [B], the row of a slot's first new token
  const int64_t* length;    // [B], how many rows all queries of a slot see; null: up to their own
  // [H, distances], added to the scores: that of a row r for a query of row q at `farthest` + r - q.
  // OUTRIDER_ATTENTION_KEYS of them lie behind that of r = q, for rows that nobody sees. Or null.
  const float* bias;
  int64_t distances, farthest;
  const float* sinks; // [H], scores of which only the weight counts; null: none
  float softcap;      // scores become softcap tanh(score / softcap), before the bias; 0: they stay
  const float *cosine, *sine; // [.., rotated / 2], by row
  // Caches: float [B, Hkv, S, D or Dv]; or quantised, int8 [.., OUTRIDER_ATTENTION_SCALE more], a
  // row being its levels and, behind them, the float that they are multiples of.
  void *keys, *values;
  float* out;                 // [B, N, H Dv]
};

// The first row of a cache that a query of row `own` sees.
static inline int64_t outrider_attention_from(const struct outrider_attention& call, int64_t own) {
  return call.window > 0 && own >= call.window ? own - call.window + 1 : 0;
}

// The query rows of a slot's key head.
static inline int64_t outrider_attention_rows(const struct outrider_attention& call) {
  return call.tokens * (call.heads / call.key_heads);
}

// Floats of a row's sums over a part: what is mixed, made up to whole vectors, its peak, its total.
static inline int64_t outrider_attention_stride(const struct outrider_attention& call) {
  return (call.value_width + 15) / 16 * 16 + 16;
}

struct outrider_attention_tiles {
  const char* name;
  // The new keys, rotated, and values of one slot and key head into its cache, for all N tokens.
  void (*write)(const struct outrider_attention* call, int64_t slot, int64_t key_head);
  // Query rows first .. end - 1 of one slot and key head, at most OUTRIDER_ATTENTION_ROWS. Row r is
  // query head key_head * H / Hkv + r mod H / Hkv of token r / (H / Hkv).
  //
  // The bits of a row follow from its query and its rows of the cache alone. In all calls it goes
  // through the same operations in the same order: keys come in blocks and parts that begin at
  // multiples of a fixed number of rows, each part is summed by itself and then added to those
  // before it, and what shares a load of a key or value with a row never meets it.
  void (*attend)(const struct outrider_attention* call, int64_t slot, int64_t key_head,
                 int64_t first, int64_t end);
  // The same of all query rows, where one `attend` would take them, in two steps, so that parts may be
  // of different threads: the sums of the parts first_part .. end_part - 1, [part, row,
  // outrider_attention_stride]; and what those of all parts that the rows see come to.
  void (*attend_parts)(const struct outrider_attention* call, int64_t slot, int64_t key_head,
                       int64_t first_part, int64_t end_part, float* sums);
  void (*join)(const struct outrider_attention* call, int64_t slot, int64_t key_head, int64_t parts,
               const float* sums);
};

extern "C" {
// Of caches of floats, and of quantised ones.
extern const struct outrider_attention_tiles outrider_attention_plain;
extern const struct outrider_attention_tiles outrider_attention_avx2;
extern const struct outrider_attention_tiles outrider_attention_avx512;
extern const struct outrider_attention_tiles outrider_attention_int8_plain;
extern const struct outrider_attention_tiles outrider_attention_int8_avx2;
extern const struct outrider_attention_tiles outrider_attention_int8_avx512;
}
#endif
