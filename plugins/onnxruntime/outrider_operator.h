// What the operators for ONNX Runtime share.
#ifndef OUTRIDER_OPERATOR_H
#define OUTRIDER_OPERATOR_H

#include <initializer_list>
#include <stddef.h>
#include <string.h>

#include "outrider.h"
#include "outrider_ort_api.h"

namespace ort {

struct Tensor {
  const Value* value = nullptr; // null: an input that was left out
  void* data = nullptr;
  size_t dimensions = 0;
  int64_t sizes[8] = {};
};

Status* refuse(const Api* api, const char* why);
bool has_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes);
Status* input(const Api* api, const Context* context, size_t index, Tensor* found);
Status* output(const Api* api, Context* context, size_t index, const int64_t* sizes,
               size_t dimensions, void** data);

// work(data, 0 .. total - 1), by ONNX Runtime's threads; by this one where it is soon done.
template <class Data>
Status* share(const Api* api, const Context* context, void (*work)(void*, size_t), int64_t total,
              bool small, Data* data) {
  if (!small && total > 1)
    return call<ParallelFor>(api, context, work, static_cast<size_t>(total), size_t{0},
                             static_cast<void*>(data));
  for (int64_t i = 0; i < total; ++i) work(data, static_cast<size_t>(i));
  return nullptr;
}

// Tell a session to be of the operators below. The domain has to live as long as the session.
Status* add_operators(const Api* api, Options* options, Domain** made);

extern const Operator ATTENTION;           // "Attention"
extern const Operator QUANTISED_ATTENTION; // "QuantizedCacheAttention"
extern const Operator SOURCE_ATTENTION;    // "SourceAttention"
extern const Operator PRODUCT, ROWS;       // "QuantizedMatMul", "QuantizedGather"
extern const Operator EXPERTS;             // "QuantizedExperts"
extern const Operator RECURRENCE;          // "Recurrence"
extern const Operator CONVOLUTION;         // "ShortConvolution"

} // namespace ort
#endif
