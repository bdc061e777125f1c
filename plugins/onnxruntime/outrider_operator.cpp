// Registers liboutrider's operators for ONNX Runtime, and functions that they share.
#include <algorithm>

#include "outrider_operator.h"

namespace ort {

Status* make_error(const Api* api, const char* why) { return call<CreateStatus>(api, FAIL, why); }

bool has_sizes(const Tensor& tensor, std::initializer_list<int64_t> sizes) {
  return tensor.dimensions == sizes.size() &&
         std::equal(sizes.begin(), sizes.end(), tensor.sizes);
}

Status* integer_attributes(const Api* api, const KernelInfo* info,
                           std::initializer_list<std::pair<const char*, int64_t*>> attributes) {
  for (const auto& [name, value] : attributes)
    if (Status* status = call<IntegerAttribute>(api, info, name, value)) return status;
  return nullptr;
}

Status* input(const Api* api, const Context* context, size_t index, Tensor* found) {
  Status* status = call<GetInput>(api, context, index, &found->value);
  if (status != nullptr || found->value == nullptr) return status;
  status = call<TensorData>(api, const_cast<Value*>(found->value), &found->data);
  if (status != nullptr) return status;
  Shape* shape = nullptr;
  status = call<GetShape>(api, found->value, &shape);
  if (status != nullptr) return status;
  status = call<CountDimensions>(api, shape, &found->dimensions);
  if (status == nullptr && found->dimensions > sizeof found->sizes / sizeof found->sizes[0])
    status = make_error(api, "an input has too many dimensions");
  if (status == nullptr)
    status = call<GetDimensions>(api, shape, found->sizes, found->dimensions);
  call<ReleaseShape>(api, shape);
  return status;
}

Status* inputs(const Api* api, const Context* context, size_t count, Tensor* found) {
  for (size_t i = 0; i < count; ++i)
    if (Status* status = input(api, context, i, &found[i])) return status;
  return nullptr;
}

Status* output(const Api* api, Context* context, size_t index, const int64_t* sizes,
               size_t dimensions, void** data) {
  Value* value = nullptr;
  Status* status = call<GetOutput>(api, context, index, sizes, dimensions, &value);
  return status == nullptr ? call<TensorData>(api, value, data) : status;
}

Status* output_in_place(const Api* api, Context* context, size_t index, const Tensor& source,
                        size_t element_bytes, void** data) {
  if (Status* status = output(api, context, index, source.sizes, source.dimensions, data))
    return status;
  size_t bytes = element_bytes;
  for (size_t i = 0; i < source.dimensions; ++i) bytes *= static_cast<size_t>(source.sizes[i]);
  if (*data != source.data && bytes > 0) memcpy(*data, source.data, bytes);
  return nullptr;
}

Status* add_operators(const Api* api, Options* options, Domain** made) {
  Status* status = call<CreateDomain>(api, "outrider", made);
  for (const Operator* one : {&ATTENTION, &QUANTISED_ATTENTION, &SOURCE_ATTENTION, &PRODUCT, &ROWS,
                              &EXPERTS, &HALF_PRODUCT, &HALF_ROWS, &RECURRENCE, &CONVOLUTION})
    if (status == nullptr) status = call<AddOperator>(api, *made, one);
  return status == nullptr ? call<AddDomain>(api, options, *made) : status;
}

} // namespace ort

// Called by ONNX Runtime for SessionOptions.register_custom_ops_library.
extern "C" OUTRIDER_API ort::Status* RegisterCustomOps(ort::Options* options,
                                                       const ort::ApiBase* base) {
  const ort::Api* api = base->get(ort::API_VERSION);
  if (api == nullptr) { // ONNX Runtime is too old, but any version can create a status
    api = base->get(1);
    return ort::make_error(api, "liboutrider's operators need ONNX Runtime 1.24 or newer");
  }
  ort::Domain* domain = nullptr; // never released, because the session keeps a pointer to it
  return ort::add_operators(api, options, &domain);
}
