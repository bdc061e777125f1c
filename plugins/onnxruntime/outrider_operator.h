// Shared declarations of the operators for ONNX Runtime.
#ifndef OUTRIDER_OPERATOR_H
#define OUTRIDER_OPERATOR_H

#include <stddef.h>
#include <string.h>

#include <initializer_list>
#include <utility>
#include <vector>

#include "outrider.h"
#include "outrider_ort_api.h"
#include "outrider_tiles.h"

namespace ort {

struct Tensor {
  const Value* value = nullptr; // null for an omitted input
  void* data = nullptr;
  size_t dimensions = 0;
  int64_t sizes[8] = {};
};

Status* make_error(const Api* api, const char* why);
bool has_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes);
Status* integer_attributes(const Api* api, const KernelInfo* info,
                           std::initializer_list<std::pair<const char*, int64_t*>> attributes);
Status* input(const Api* api, const Context* context, size_t index, Tensor* found);
Status* inputs(const Api* api, const Context* context, size_t count, Tensor* found);
Status* output(const Api* api, Context* context, size_t index, const int64_t* sizes,
               size_t dimensions, void** data);
// An output that updates an input in place; a copy of it if the output is not bound to its memory.
Status* output_in_place(const Api* api, Context* context, size_t index, const Tensor& source,
                        size_t element_bytes, void** data);

// Calls work(0) .. work(total - 1) on ONNX Runtime's threads, or on this thread if `small`.
template <class Work>
Status* parallel_for(const Api* api, const Context* context, int64_t total, bool small, Work work) {
  const auto one = [](void* of, size_t i) { (*static_cast<Work*>(of))(static_cast<int64_t>(i)); };
  if (!small && total > 1)
    return call<ParallelFor>(api, context, one, static_cast<size_t>(total), size_t{0}, &work);
  for (int64_t i = 0; i < total; ++i) work(i);
  return nullptr;
}

// Adds the operators below to a session's options. The domain has to outlive the session.
Status* add_operators(const Api* api, Options* options, Domain** made);

// An operator with its name, inputs and outputs.
struct Port {
  int type, characteristic = REQUIRED;
};
struct NamedOperator : Operator {
  const char* operator_name;
  std::vector<Port> inputs, outputs;
};
inline const NamedOperator& named_operator(const Operator* one) {
  return *static_cast<const NamedOperator*>(one);
}

// The functions of an operator whose `create` makes kernels of type Kernel.
template <class Kernel>
Operator operator_of(decltype(Operator::create_or_fail) create,
                     decltype(Operator::compute_or_fail) compute) {
  Operator made{};
  made.version = API_VERSION;
  made.name = [](const Operator* one) { return named_operator(one).operator_name; };
  made.provider = [](const Operator*) -> const char* { return nullptr; };
  made.input_type = [](const Operator* one, size_t i) {
    return named_operator(one).inputs[i].type;
  };
  made.input_count = [](const Operator* one) { return named_operator(one).inputs.size(); };
  made.output_type = [](const Operator* one, size_t i) {
    return named_operator(one).outputs[i].type;
  };
  made.output_count = [](const Operator* one) { return named_operator(one).outputs.size(); };
  made.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  made.input_characteristic = [](const Operator* one, size_t i) {
    return named_operator(one).inputs[i].characteristic;
  };
  made.output_characteristic = [](const Operator* one, size_t i) {
    return named_operator(one).outputs[i].characteristic;
  };
  made.input_memory = [](const Operator*, size_t) { return 0; };
  made.create_or_fail = create, made.compute_or_fail = compute;
  made.first_version = made.last_version = [](const Operator*) { return 1; };
  return made;
}

// The table for the instruction set in use or, if there is none, for its fallback. The list
// must contain the plain table.
template <class Tiles> const Tiles* tiles_of(std::initializer_list<const Tiles*> known) {
  for (const outrider_set* set = outrider_set_in_use(); set != nullptr; set = set->fallback)
    for (const Tiles* tiles : known)
      if (strcmp(tiles->name, set->name) == 0) return tiles;
  return nullptr;
}

extern const NamedOperator ATTENTION, QUANTISED_ATTENTION, SOURCE_ATTENTION; // outrider_attend.cpp
extern const NamedOperator PRODUCT, ROWS, EXPERTS, HALF_PRODUCT, HALF_ROWS; // outrider_multiply.cpp
extern const NamedOperator RECURRENCE, CONVOLUTION;                         // outrider_recur.cpp

} // namespace ort
#endif
