// The interface between liboutrider and a separate library that runs a model on a GPU, so that
// liboutrider itself does not depend on TensorRT. Both must be compiled from the same checkout,
// which `version` checks.
#ifndef OUTRIDER_ENGINES_TABLE_H
#define OUTRIDER_ENGINES_TABLE_H

#include "engine.h"

namespace outrider {

constexpr int32_t MODEL_TABLE = 1; // increase it when this file changes

// A model to open, and its sizes. The caller's pointers have to stay valid until `open` returns.
struct ModelSpec {
  const char* file;
  const char* dtype;   // of activations and caches
  const char* targets; // GPU architectures that it was compiled for: " sm80 sm90 "; empty: any
  const SizeRange* profiles; // [profile_count][3] of B, N and K
  const CacheShape* caches;  // in the contract's order
  int32_t profile_count, cache_count;
  int32_t slots, vocab_size;
  int32_t widest;  // the largest K of a call, and the largest N of steps and verifications
  int32_t buffers; // number of calls whose logits it keeps
  int64_t capacity, chunk;
  int64_t activations; // bytes, according to the builder; 0: unknown
};

// The functions return OUTRIDER_OK or fill `failure`; they do not throw. They may be called by one
// thread at a time.
struct ModelTable {
  int32_t version;
  int32_t (*open)(const ModelSpec* spec, void** model, outrider_failure* failure);
  // logits: float32 [B, K, V] in host memory, valid until the next call with that buffer.
  int32_t (*compute)(void* model, const EngineCall* call, float** logits, outrider_failure* failure);
  int32_t (*wipe)(void* model, int32_t slot, outrider_failure* failure);
  void (*close)(void* model);
};

// The only symbol that such a library exports.
using GetModelTable = const ModelTable*();
constexpr char GET_MODEL_TABLE[] = "outrider_model_table";

} // namespace outrider
#endif
