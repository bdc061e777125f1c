// The operators outrider.QuantizedMatMul, QuantizedGather and QuantizedExperts for ONNX Runtime. A
// matrix W [N, K] lies as outrider_product.h says.
//
// QuantizedMatMul   x W^T
//   inputs   x [.., K]; levels uint8 [panels, blocks, 64 bits]; scales float16 [panels, blocks, 16]
//   outputs  [.., N]
// QuantizedGather   rows of W
//   inputs   ids int64 [..], from 0 to N - 1; levels and scales
//   outputs  [.., K]
// QuantizedExperts  x W^T, by the one of E matrices that is chosen for a row
//   inputs   x [k, T, K], or [1, T, K] for all k; levels and scales, [E panels, blocks, ..]; chosen
//            int64 [k, T], from 0 to E - 1
//   outputs  [k, T, N]
// attributes  bits (4 or 8); rows, columns: N and K; of experts also experts: E
#include <algorithm>
#include <memory>
#include <new>
#include <string.h>

#include "outrider_operator.h"
#include "outrider_product.h"

namespace {
using ort::Api;

constexpr int64_t BLOCK = OUTRIDER_PRODUCT_BLOCK, PANEL = OUTRIDER_PRODUCT_PANEL;

enum Input { X, LEVELS, SCALES, INPUTS, CHOSEN = INPUTS };

struct Kernel {
  const Api* api;
  const outrider_product_tiles* tiles;
  int64_t bits, rows, columns, experts;
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

ort::Status* create(const ort::Operator* of, const Api* api, const ort::KernelInfo* info,
                    void** made) {
  Kernel* kernel = new (std::nothrow) Kernel{api, tiles_in_use(), 0, 0, 0, 1};
  if (kernel == nullptr) return ort::refuse(api, "out of memory");
  struct { const char* name; int64_t* value; } integers[] = {
      {"bits", &kernel->bits}, {"rows", &kernel->rows}, {"columns", &kernel->columns}};
  ort::Status* status = nullptr;
  for (auto& wanted : integers)
    if (status == nullptr)
      status = ort::call<ort::IntegerAttribute>(api, info, wanted.name, wanted.value);
  if (status == nullptr && of == &ort::EXPERTS)
    status = ort::call<ort::IntegerAttribute>(api, info, "experts", &kernel->experts);
  if (status == nullptr && kernel->bits != 4 && kernel->bits != 8)
    status = ort::refuse(api, "a weight has 4 or 8 bits");
  for (const int64_t size : {kernel->rows, kernel->columns, kernel->experts})
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
  const int64_t panels = kernel.experts * ((kernel.rows + PANEL - 1) / PANEL);
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

constexpr int64_t ROWS = 16; // rounded at a time, or copied

constexpr size_t ROUNDED = BLOCK + 8; // bytes of a block of x

// Where rows of so many blocks have their rounded numbers.
void put_rounded(outrider_product* c, char* memory, size_t blocks) {
  c->x_scales = reinterpret_cast<float*>(memory);
  c->x_sums = reinterpret_cast<int32_t*>(c->x_scales + blocks);
  c->x_levels = reinterpret_cast<int8_t*>(c->x_sums + blocks);
}

int64_t runs_of(const outrider_product& c) { return (c.rows + ROWS - 1) / ROWS; }

// A few microseconds: less than waking a thread takes.
bool short_rows(const outrider_product& c) { return c.rows * c.depth < 1 << 15; }
bool small(const outrider_product& c, int64_t blocks) {
  const int64_t panels = (c.columns + PANEL - 1) / PANEL;
  return panels * PANEL * blocks * BLOCK * (c.rows + 1) < 1 << 18;
}

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
  const std::unique_ptr<char[]> rounded(new (std::nothrow) char[count * ROUNDED]);
  if (!rounded) return ort::refuse(api, "out of memory");
  put_rounded(&c, rounded.get(), count);

  const int64_t panels = (c.columns + PANEL - 1) / PANEL;
  Work work{c, kernel.tiles, panels, 8};
  if (ort::Status* status = ort::share(api, context, round_rows, runs_of(c), short_rows(c), &work))
    return status;
  return ort::share(api, context, multiply_panels, (panels + work.run - 1) / work.run,
                    small(c, blocks), &work);
}

// Rows of the same expert are multiplied together, so they are copied to where they are neighbours,
// and what comes out is copied back.
struct Experts {
  Work work; // of the rows as they came
  outrider_product sorted;
  const int64_t* place; // of each row [k, T] among the sorted
  const int64_t* begin; // of each expert's rows among them, [E + 1]
  const int64_t* asked; // the experts that have rows
  float* y;             // [k, T, N]
  int64_t rows, blocks, runs;
};

void sort_rows(void* data, size_t index) {
  const Experts& e = *static_cast<const Experts*>(data);
  const int64_t first = static_cast<int64_t>(index) * ROWS, given = e.work.call.rows;
  for (int64_t row = first; row < e.rows && row < first + ROWS; ++row) {
    const int64_t from = row % given * e.blocks, to = e.place[row] * e.blocks;
    const size_t size = static_cast<size_t>(e.blocks);
    memcpy(e.sorted.x_levels + to * BLOCK, e.work.call.x_levels + from * BLOCK, size * BLOCK);
    memcpy(e.sorted.x_scales + to, e.work.call.x_scales + from, size * sizeof(float));
    memcpy(e.sorted.x_sums + to, e.work.call.x_sums + from, size * sizeof(int32_t));
  }
}

void multiply_experts(void* data, size_t index) {
  const Experts& e = *static_cast<const Experts*>(data);
  const int64_t expert = e.asked[static_cast<int64_t>(index) / e.runs];
  const int64_t begin = e.begin[expert], panels = e.work.panels;
  outrider_product c = e.sorted;
  c.rows = e.begin[expert + 1] - begin;
  c.levels += expert * panels * e.blocks * 64 * c.bits;
  c.scales += expert * panels * e.blocks * PANEL;
  c.x_levels += begin * e.blocks * BLOCK;
  c.x_scales += begin * e.blocks;
  c.x_sums += begin * e.blocks;
  c.y += begin * c.columns;
  const int64_t first = static_cast<int64_t>(index) % e.runs * e.work.run;
  e.work.tiles->multiply(&c, first, first + e.work.run < panels ? first + e.work.run : panels);
}

void give_rows(void* data, size_t index) {
  const Experts& e = *static_cast<const Experts*>(data);
  const int64_t first = static_cast<int64_t>(index) * ROWS, columns = e.sorted.columns;
  for (int64_t row = first; row < e.rows && row < first + ROWS; ++row)
    memcpy(e.y + row * columns, e.sorted.y + e.place[row] * columns,
           static_cast<size_t>(columns) * sizeof(float));
}

ort::Status* ask_experts(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS], chosen;
  int64_t blocks = 0;
  if (ort::Status* status = inputs(kernel, context, in, &blocks)) return status;
  if (ort::Status* status = ort::input(api, context, CHOSEN, &chosen)) return status;
  const int64_t most = chosen.sizes[0], tokens = chosen.sizes[1], rows = most * tokens;
  const int64_t each = in[X].dimensions == 3 && in[X].sizes[0] == 1 ? 1 : most;
  if (chosen.dimensions != 2 || !ort::has_sizes(in[X], {each, tokens, kernel.columns}))
    return ort::refuse(api, "a row has another length than the experts' matrices have columns");
  const int64_t sizes[] = {most, tokens, kernel.rows};
  void* y = nullptr;
  if (ort::Status* status = ort::output(api, context, 0, sizes, 3, &y)) return status;
  const int64_t* ids = static_cast<const int64_t*>(chosen.data);
  for (int64_t row = 0; row < rows; ++row)
    if (ids[row] < 0 || ids[row] >= kernel.experts)
      return ort::refuse(api, "an expert is chosen that there is not");

  outrider_product c{};
  c.rows = each * tokens, c.depth = kernel.columns, c.columns = kernel.rows, c.bits = kernel.bits;
  c.x = static_cast<const float*>(in[X].data);
  c.levels = static_cast<const uint8_t*>(in[LEVELS].data);
  c.scales = static_cast<const uint16_t*>(in[SCALES].data);
  const size_t given = static_cast<size_t>(c.rows * blocks);
  const size_t sorted = static_cast<size_t>(rows * blocks);
  const size_t wide = static_cast<size_t>(rows * kernel.rows), all = static_cast<size_t>(rows);
  const size_t experts = static_cast<size_t>(kernel.experts);
  const std::unique_ptr<int64_t[]> order(new (std::nothrow) int64_t[all + 2 * experts + 1]);
  const std::unique_ptr<float[]> out(new (std::nothrow) float[wide]);
  const std::unique_ptr<char[]> rounded(new (std::nothrow) char[(given + sorted) * ROUNDED]);
  if (!order || !out || !rounded) return ort::refuse(api, "out of memory");
  put_rounded(&c, rounded.get(), given);
  outrider_product of_sorted = c;
  put_rounded(&of_sorted, rounded.get() + given * ROUNDED, sorted);
  of_sorted.rows = rows, of_sorted.y = out.get();

  int64_t *place = order.get(), *begin = place + rows, *asked = begin + kernel.experts + 1;
  std::fill(begin, begin + kernel.experts + 1, 0);
  for (int64_t row = 0; row < rows; ++row) ++begin[ids[row] + 1];
  int64_t count = 0;
  for (int64_t expert = 0; expert < kernel.experts; ++expert) {
    if (begin[expert + 1] > 0) asked[count++] = expert;
    begin[expert + 1] += begin[expert];
  }
  for (int64_t row = 0; row < rows; ++row) place[row] = begin[ids[row]]++;
  std::copy_backward(begin, begin + kernel.experts, begin + kernel.experts + 1);
  begin[0] = 0;

  const int64_t panels = (c.columns + PANEL - 1) / PANEL, run = 8, runs = (panels + run - 1) / run;
  Experts e{{c, kernel.tiles, panels, run}, of_sorted, place, begin, asked,
            static_cast<float*>(y), rows, blocks, runs};
  const bool few = short_rows(of_sorted);
  ort::Status* status = ort::share(api, context, round_rows, runs_of(c), short_rows(c), &e.work);
  if (status == nullptr)
    status = ort::share(api, context, sort_rows, runs_of(of_sorted), few, &e);
  if (status == nullptr)
    status = ort::share(api, context, multiply_experts, count * runs, small(of_sorted, blocks), &e);
  if (status == nullptr)
    status = ort::share(api, context, give_rows, runs_of(of_sorted), few, &e);
  return status;
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
const char* experts_name(const ort::Operator*) { return "QuantizedExperts"; }
const char* provider(const ort::Operator*) { return nullptr; }
size_t input_count(const ort::Operator* of) { return of == &ort::EXPERTS ? INPUTS + 1 : INPUTS; }
int matrix_type(size_t index) { return index == LEVELS ? ort::UINT8 : ort::FLOAT16; }
int product_type(const ort::Operator*, size_t index) {
  return index == X ? ort::FLOAT : index == CHOSEN ? ort::INT64 : matrix_type(index);
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

const ort::Operator ort::EXPERTS = {
    ort::API_VERSION, nullptr, experts_name, provider, product_type, input_count, output_type,
    output_count, nullptr, destroy, characteristic, characteristic, memory, {}, create, ask_experts,
    nullptr, version, version, {}};
