// The inner loops of the CPU library, over one tile: one table of functions per instruction set.
#ifndef OUTRIDER_TILES_H
#define OUTRIDER_TILES_H

#include "outrider.h"

// A logit in the caller's memory, which may be unaligned.
typedef float outrider_logit __attribute__((aligned(1), may_alias));

struct outrider_tiles {
  // The scalar functions of outrider_sampling.h, bitwise equal to the loops below.
  float (*exp2)(float t);
  float (*weight)(float z, int id, const outrider_row* row);
  float (*sigmoid)(float z, int id, const outrider_row* row, const outrider_slot* slot);
  // Convert `count` logits of any dtype and alignment to floats, and pad to TILE with -inf.
  void (*load)(float* z, const void* logits, int dtype, int count);
  float (*max)(const outrider_logit* z);
  // The maximum, for a row that needs no sum: sets *broken if a logit is NaN or +inf.
  float (*peak)(const outrider_logit* z, const void* next, int* broken);
  // Sum of 2^((z - peak) rate); NaN if a logit is NaN or +inf. next: 4 KB to prefetch.
  float (*sum)(const outrider_logit* z, float peak, float rate, const void* next);
  // Compute the filtered weights w of the ids from `first` on; returns their sum.
  float (*weights)(float* w, const outrider_logit* z, const outrider_row* row, int first);
  // The same with sigmoids instead of weights, without the sum.
  void (*sigmoids)(float* w, const outrider_logit* z, const outrider_row* row, int first,
                   const outrider_slot* slot);
  // a = max(0, a * factor - b); returns the sum.
  float (*residual)(float* a, float factor, const float* b);
  // Each logit's distance below the peak as a bin, 64 per factor of 2, up to last_bin; the weights.
  void (*bins)(int* bin, float* w, const outrider_logit* z, const outrider_row* row, int last_bin);
};

// An instruction set. A table without loops for it uses those of the fallback set.
struct outrider_set {
  const char* name;
  const struct outrider_tiles* tiles;
  const struct outrider_set* fallback; // null for plain C++
};

extern "C" {
extern const struct outrider_tiles outrider_tiles_plain;
extern const struct outrider_tiles outrider_tiles_avx2;
extern const struct outrider_tiles outrider_tiles_avx512;

const struct outrider_set* outrider_set_in_use(void);
}
#endif
