// The operators outrider.QuantizedMatMul and outrider.QuantizedGather for ONNX Runtime. A matrix W
// [N, K] lies as outrider_product.h says.
//
// QuantizedMatMul   x W^T
//   inputs   x [.., K]; levels uint8 [panels, blocks, 64 bits]; scales float16 [panels, blocks, 16]
//   outputs  [.., N]
// QuantizedGather   rows of W
//   inputs   ids int64 [..], from 0 to N - 1; levels and scales
//   outputs  [.., K]
// attributes  bits (4 or 8); rows, columns: N and K
#include <memory>
#include <new>
#include <string.h>

#include "outrider_operator.h"
#include "outrider_product.h"

namespace {
using ort::Api;

constexpr int64_t BLOCK = OUTRIDER_PRODUCT_BLOCK, PANEL = OUTRIDER_PRODUCT_PANEL;

enum Input { X, LEVELS, SCALES, INPUTS };

struct Kernel {
  const Api* api;
  const outrider_product_tiles* tiles;
  int64_t bits, rows, columns;
};

const outrider_product_tiles* tiles_in_use() {
#if defined(OUTRIDER_X86)
  const char* set = outrider_instruction_set();
  if (strcmp(set, "avx512") == 0 && __builtin_cpu_supports("avx512vnni"))
    return &outrider_product_vnni;
  if (strcmp(set, "plain") != 0) return &outrider_product_avx2;
#endif
  return &outrider_product_plain;
}

ort::Status* create(const ort::Operator*, const Api* api, const ort::KernelInfo* info,
                    void** made) {
  Kernel* kernel = new (std::nothrow) Kernel{api, tiles_in_use(), 0, 0, 0};
  if (kernel == nullptr) return ort::refuse(api, "out of memory");
  struct { const char* name; int64_t* value; } integers[] = {
      {"bits", &kernel->bits}, {"rows", &kernel->rows}, {"columns", &kernel->columns}};
  ort::Status* status = nullptr;
  for (auto& wanted : integers)
    if (status == nullptr)
      status = ort::call<ort::IntegerAttribute>(api, info, wanted.name, wanted.value);
  if (status == nullptr && kernel->bits != 4 && kernel->bits != 8)
    status = ort::refuse(api, "a weight has 4 or 8 bits");
  for (const int64_t size : {kernel->rows, kernel->columns})
    if (status == nullptr && (size < 1 || size > INT32_MAX))
      status = ort::refuse(api, "a matrix has rows and columns");
  if (status != nullptr) delete kernel;
  else *made = kernel;
  return status;
}

// Reads the inputs, and refuses a matrix that is smaller than it says.
ort::Status* inputs(const Kernel& kernel, const ort::Context* context, ort::Tensor* in,
                    int64_t* blocks) {
  for (size_t i = 0; i < INPUTS; ++i)
    if (ort::Status* status = ort::input(kernel.api, context, i, &in[i])) return status;
  const int64_t panels = (kernel.rows + PANEL - 1) / PANEL;
  *blocks = (kernel.columns + BLOCK - 1) / BLOCK;
  if (!ort::has_sizes(in[LEVELS], {panels, *blocks, 64 * kernel.bits}) ||
      !ort::has_sizes(in[SCALES], {panels, *blocks, PANEL}))
    return ort::refuse(kernel.api, "a matrix has other sizes than it says");
  return nullptr;
}

struct Work {
  outrider_product call;
  const outrider_product_tiles* tiles;
  int64_t panels, run; // of the matrix; of them at a time
};

constexpr int64_t ROWS = 16; // rounded at a time

void round_rows(void* data, size_t index) {
  const Work& work = *static_cast<const Work*>(data);
  const int64_t first = static_cast<int64_t>(index) * ROWS;
  const int64_t end = first + ROWS < work.call.rows ? first + ROWS : work.call.rows;
  work.tiles->round(&work.call, first, end);
}

void multiply_panels(void* data, size_t index) {
  const Work& work = *static_cast<const Work*>(data);
  const int64_t first = static_cast<int64_t>(index) * work.run;
  const int64_t end = first + work.run < work.panels ? first + work.run : work.panels;
  work.tiles->multiply(&work.call, first, end);
}

ort::Status* multiply(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  int64_t blocks = 0;
  if (ort::Status* status = inputs(kernel, context, in, &blocks)) return status;
  const size_t last = in[X].dimensions - 1;
  if (in[X].dimensions == 0 || in[X].sizes[last] != kernel.columns)
    return ort::refuse(api, "a row has another length than the matrix has columns");
  outrider_product c{};
  c.rows = 1, c.depth = kernel.columns, c.columns = kernel.rows, c.bits = kernel.bits;
  for (size_t i = 0; i < last; ++i) c.rows *= in[X].sizes[i];
  in[X].sizes[last] = kernel.rows;
  void* y = nullptr;
  if (ort::Status* status = ort::output(api, context, 0, in[X].sizes, last + 1, &y)) return status;
  c.x = static_cast<const float*>(in[X].data), c.y = static_cast<float*>(y);
  c.levels = static_cast<const uint8_t*>(in[LEVELS].data);
  c.scales = static_cast<const uint16_t*>(in[SCALES].data);
  const size_t count = static_cast<size_t>(c.rows * blocks);
  const std::unique_ptr<char[]> rounded(new (std::nothrow) char[count * (BLOCK + 8)]);
  if (!rounded) return ort::refuse(api, "out of memory");
  c.x_scales = reinterpret_cast<float*>(rounded.get());
  c.x_sums = reinterpret_cast<int32_t*>(c.x_scales + count);
  c.x_levels = reinterpret_cast<int8_t*>(c.x_sums + count);

  const int64_t panels = (c.columns + PANEL - 1) / PANEL;
  Work work{c, kernel.tiles, panels, 8};
  // A few microseconds: less than waking a thread takes.
  const bool short_rows = c.rows * c.depth < 1 << 15;
  const bool small = panels * PANEL * blocks * BLOCK * (c.rows + 1) < 1 << 18;
  const int64_t runs = (c.rows + ROWS - 1) / ROWS;
  if (ort::Status* status = ort::share(api, context, round_rows, runs, short_rows, &work))
    return status;
  return ort::share(api, context, multiply_panels, (panels + work.run - 1) / work.run, small,
                    &work);
}

ort::Status* gather(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  int64_t blocks = 0;
  if (ort::Status* status = inputs(kernel, context, in, &blocks)) return status;
  ort::Tensor& ids = in[X];
  if (ids.dimensions >= sizeof ids.sizes / sizeof ids.sizes[0])
    return ort::refuse(api, "ids have too many dimensions");
  int64_t count = 1;
  for (size_t i = 0; i < ids.dimensions; ++i) count *= ids.sizes[i];
  ids.sizes[ids.dimensions] = kernel.columns;
  void* out = nullptr;
  if (ort::Status* status = ort::output(api, context, 0, ids.sizes, ids.dimensions + 1, &out))
    return status;
  float* to = static_cast<float*>(out);
  const int64_t bits = kernel.bits, offset = bits == 4 ? 8 : 128;
  for (int64_t i = 0; i < count; ++i, to += kernel.columns) {
    const int64_t id = static_cast<const int64_t*>(ids.data)[i], lane = id % PANEL;
    if (id < 0 || id >= kernel.rows) return ort::refuse(api, "a token id is beyond the vocabulary");
    const int64_t panel = id / PANEL * blocks;
    const uint8_t* levels = static_cast<const uint8_t*>(in[LEVELS].data) + panel * 64 * bits;
    const uint16_t* scales = static_cast<const uint16_t*>(in[SCALES].data) + panel * PANEL;
    for (int64_t k = 0; k < kernel.columns; ++k) {
      const int64_t block = k / BLOCK, number = k % BLOCK, of_vector = BLOCK / bits;
      const uint8_t byte = levels[block * 64 * bits + number / of_vector * 64 + 4 * lane + k % 4];
      const int64_t level = bits == 8 ? byte : number % 8 < 4 ? byte & 15 : byte >> 4;
      to[k] = static_cast<float>(level - offset) * outrider_half(scales[block * PANEL + lane]);
    }
  }
  return nullptr;
}

const char* product_name(const ort::Operator*) { return "QuantizedMatMul"; }
const char* gather_name(const ort::Operator*) { return "QuantizedGather"; }
const char* provider(const ort::Operator*) { return nullptr; }
size_t input_count(const ort::Operator*) { return INPUTS; }
int matrix_type(size_t index) { return index == LEVELS ? ort::UINT8 : ort::FLOAT16; }
int product_type(const ort::Operator*, size_t index) {
  return index == X ? ort::FLOAT : matrix_type(index);
}
int gather_type(const ort::Operator*, size_t index) {
  return index == X ? ort::INT64 : matrix_type(index);
}
size_t output_count(const ort::Operator*) { return 1; }
int output_type(const ort::Operator*, size_t) { return ort::FLOAT; }
int characteristic(const ort::Operator*, size_t) { return ort::REQUIRED; }
int memory(const ort::Operator*, size_t) { return 0; }
void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }
int version(const ort::Operator*) { return 1; }

} // namespace

const ort::Operator ort::PRODUCT = {
    ort::API_VERSION, nullptr, product_name, provider, product_type, input_count, output_type,
    output_count, nullptr, destroy, characteristic, characteristic, memory, {}, create, multiply,
    nullptr, version, version, {}};

const ort::Operator ort::ROWS = {
    ort::API_VERSION, nullptr, gather_name, provider, gather_type, input_count, output_type,
    output_count, nullptr, destroy, characteristic, characteristic, memory, {}, create, gather,
    nullptr, version, version, {}};
