// What liboutrider asks of a library of its own that runs a model on a GPU: liboutrider itself has
// nothing of TensorRT in it. Both sides are compiled from one checkout; `version` says so.
#ifndef OUTRIDER_ENGINES_TABLE_H
#define OUTRIDER_ENGINES_TABLE_H

#include "engine.h"

namespace outrider {

constexpr int32_t MODEL_TABLE = 1; // a change of what stands here is another number

// A model, and what it is to hold. Pointers are the caller's, until `open` returns.
struct ModelSpec {
  const char* file;
  const char* dtype;   // of activations and caches
  const char* targets; // GPU architectures that it was compiled for: " sm80 sm90 "; empty: any
  const SizeRange* profiles; // [profile_count][3] of B, N and K
  const CacheShape* caches;  // in the contract's order
  int32_t profile_count, cache_count;
  int32_t slots, vocab_size;
  int32_t widest;  // the largest K of a call, and N of those that come again and again
  int32_t buffers; // calls whose logits it holds
  int64_t capacity, chunk;
  int64_t activations; // bytes, as the builder said; 0: it did not
};

// Each returns OUTRIDER_OK or fills `failure`; none throws. One thread at a time.
struct ModelTable {
  int32_t version;
  int32_t (*open)(const ModelSpec* spec, void** model, outrider_failure* failure);
  // logits: float32 [B, K, V] in host memory, until the next call with that buffer.
  int32_t (*compute)(void* model, const EngineCall* call, float** logits, outrider_failure* failure);
  int32_t (*wipe)(void* model, int32_t slot, outrider_failure* failure);
  void (*close)(void* model);
};

// The one symbol of such a library.
using GetModelTable = const ModelTable*();
constexpr char GET_MODEL_TABLE[] = "outrider_model_table";

} // namespace outrider
#endif
