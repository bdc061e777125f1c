// The inner loops of the CPU library, over one tile: a table of functions per instruction set.
#ifndef OUTRIDER_TILES_H
#define OUTRIDER_TILES_H

#include "outrider.h"

// A logit in the caller's memory, which need not be aligned.
typedef float outrider_logit __attribute__((aligned(1), may_alias));

struct outrider_tiles {
  // The scalar functions of outrider_sampling.h, to the bit what the loops below compute.
  float (*exp2)(float t);
  float (*weight)(float z, int id, const outrider_row* row);
  float (*sigmoid)(float z, int id, const outrider_row* row, const outrider_slot* slot);
  // TILE floats from `count` logits of any dtype and alignment; -inf beyond them.
  void (*load)(float* z, const void* logits, int dtype, int count);
  float (*max)(const outrider_logit* z);
  // The same for a row that needs no sum: sets *broken where there is a NaN or +inf.
  float (*peak)(const outrider_logit* z, const void* next, int* broken);
  // Sum of 2^((z - peak) rate); NaN where a logit is NaN or +inf. next: 4 KB to fetch meanwhile.
  float (*sum)(const outrider_logit* z, float peak, float rate, const void* next);
  // The filtered weights w of ids first .., and their sum.
  float (*weights)(float* w, const outrider_logit* z, const outrider_row* row, int first);
  // Sigmoids instead of weights.
  void (*sigmoids)(float* w, const outrider_logit* z, const outrider_row* row, int first,
                   const outrider_slot* slot);
  // a = max(0, a * factor - b); returns the sum.
  float (*residual)(float* a, float factor, const float* b);
  // How far below the peak, in steps of 1/64 of a factor 2, at most last_bin; and the weights.
  void (*bins)(int* bin, float* w, const outrider_logit* z, const outrider_row* row, int last_bin);
};

// An instruction set. Whoever has no loops of its own for it takes those of the next lesser one.
struct outrider_set {
  const char* name;
  const struct outrider_tiles* tiles;
  const struct outrider_set* lesser; // null: none, this is plain C++
};

extern "C" {
extern const struct outrider_tiles outrider_tiles_plain;
extern const struct outrider_tiles outrider_tiles_avx2;
extern const struct outrider_tiles outrider_tiles_avx512;

const struct outrider_set* outrider_set_in_use(void);
}
#endif
