// The operators outrider.QuantizedMatMul, QuantizedGather, QuantizedExperts, HalfMatMul and
// HalfGather for ONNX Runtime. See outrider_product.h for the layout of a matrix W [N, K].
//
// QuantizedMatMul   x W^T
//   inputs   x [.., K]; levels uint8 [panels, blocks, 64 bits]; scales float16 [panels, blocks, 16];
//            optionally a second pair of levels and scales, with 8 bits for 4 and 4 for 8, for the
//            remaining rows of W; the first pair's rows then fill whole panels
//   outputs  [.., N]
// QuantizedGather   rows of W
//   inputs   ids int64 [..], from 0 to N - 1; levels and scales
//   outputs  [.., K]
// QuantizedExperts  x W^T with, for each row, one of E matrices
//   inputs   x [k, T, K], or [1, T, K] for all k; levels and scales, [E panels, blocks, ..]; chosen
//            int64 [k, T], from 0 to E - 1
//   outputs  [k, T, N]
// attributes  bits (4 or 8); rows, columns: N and K; for experts also experts: E
//
// HalfMatMul, HalfGather   the same with weights of 16 bits, uint16 [panels, K, 16], in place of
//            levels and scales
// attributes  dtype (of the weights: 1 for float16, 2 for bfloat16); rows, columns: N and K
#include <algorithm>
#include <memory>
#include <new>
#include <string.h>

#include "outrider_operator.h"
#include "outrider_product.h"
#include "outrider_sampling.h"

namespace {
using ort::Api;

constexpr int64_t BLOCK = OUTRIDER_PRODUCT_BLOCK, PANEL = OUTRIDER_PRODUCT_PANEL;

enum Input { X, LEVELS, WEIGHTS = LEVELS, SCALES, INPUTS, CHOSEN = INPUTS, MORE = INPUTS };

struct Kernel {
  const Api* api;
  const outrider_product_tiles* tiles;
  int64_t bits, rows, columns, experts, dtype;
};

const outrider_product_tiles* tiles_in_use() {
  return ort::tiles_of({
#if defined(OUTRIDER_X86)
      &outrider_product_avx512vnni, &outrider_product_avxvnni, &outrider_product_avx2,
#elif defined(OUTRIDER_ARM)
      &outrider_product_dotprod,
#endif
      &outrider_product_plain});
}

ort::Status* create(const ort::Operator* of, const Api* api, const ort::KernelInfo* info,
                    void** made) {
  std::unique_ptr<Kernel> kernel(new (std::nothrow) Kernel{api, tiles_in_use(), 16, 0, 0, 1, 0});
  if (!kernel) return ort::make_error(api, "out of memory");
  const bool half = of == &ort::HALF_PRODUCT || of == &ort::HALF_ROWS;
  ort::Status* status = ort::integer_attributes(
      api, info, {{"rows", &kernel->rows}, {"columns", &kernel->columns},
                  half ? std::pair{"dtype", &kernel->dtype} : std::pair{"bits", &kernel->bits}});
  if (status == nullptr && of == &ort::EXPERTS)
    status = ort::integer_attributes(api, info, {{"experts", &kernel->experts}});
  if (status != nullptr) return status;
  if (half && kernel->dtype != OUTRIDER_FLOAT16 && kernel->dtype != OUTRIDER_BFLOAT16)
    return ort::make_error(api, "dtype is not 1 or 2");
  if (!half && kernel->bits != 4 && kernel->bits != 8)
    return ort::make_error(api, "bits is not 4 or 8");
  for (const int64_t size : {kernel->rows, kernel->columns, kernel->experts})
    if (size < 1 || size > INT32_MAX)
      return ort::make_error(api, "rows, columns or experts is out of range");
  *made = kernel.release();
  return nullptr;
}

int64_t panels_of(int64_t rows) { return (rows + PANEL - 1) / PANEL; }
int64_t blocks_of(const Kernel& kernel) { return (kernel.columns + BLOCK - 1) / BLOCK; }

// Whether these are the levels and scales of a matrix with this many rows.
bool sizes_match(const Kernel& kernel, const ort::Tensor& levels, const ort::Tensor& scales,
                 int64_t rows, int64_t bits) {
  const int64_t panels = kernel.experts * panels_of(rows), blocks = blocks_of(kernel);
  return ort::has_sizes(levels, {panels, blocks, 64 * bits}) &&
         ort::has_sizes(scales, {panels, blocks, PANEL});
}

// Reads the inputs, and rejects a matrix whose size does not match the attributes. first: if not
// null, a second pair of levels and scales may follow; receives the number of rows of the first.
ort::Status* inputs(const Kernel& kernel, const ort::Context* context, ort::Tensor* in,
                    int64_t* first = nullptr) {
  const size_t count = first != nullptr ? INPUTS + 2 : INPUTS;
  if (ort::Status* status = ort::inputs(kernel.api, context, count, in)) return status;
  int64_t rows = kernel.rows;
  bool match = true;
  if (first != nullptr && in[MORE].value != nullptr) {
    rows = PANEL * in[LEVELS].sizes[0];
    match = rows < kernel.rows &&
            sizes_match(kernel, in[MORE], in[MORE + 1], kernel.rows - rows, 12 - kernel.bits);
  }
  if (first != nullptr) *first = rows;
  if (!match || !sizes_match(kernel, in[LEVELS], in[SCALES], rows, kernel.bits))
    return ort::make_error(kernel.api, "the size of a matrix does not match the attributes");
  return nullptr;
}

void set_matrix(outrider_product* c, const ort::Tensor& levels, const ort::Tensor& scales) {
  c->levels = static_cast<const uint8_t*>(levels.data);
  c->scales = static_cast<const uint16_t*>(scales.data);
}

constexpr int64_t RUN = 8, SHARES = 8; // panels that a thread multiplies at a time; see tasks_of
constexpr int64_t ROWS = 16;           // rows that a thread rounds or copies at a time

using Rounded = std::unique_ptr<outrider_rounded[]>;

int64_t runs_of(const outrider_product& c) { return (c.rows + ROWS - 1) / ROWS; }

// A product is split into tasks of nearly equal size, whose number is a multiple of SHARES: ONNX
// Runtime divides it by the number of threads, and 2, 4 or 8 threads then get equal shares.
int64_t tasks_of(const outrider_product& c) {
  return (panels_of(c.columns) + SHARES * RUN - 1) / (SHARES * RUN) * SHARES;
}

void multiply_task(const Kernel& kernel, const outrider_product& c, int64_t task) {
  const int64_t size = kernel.tiles->panels, tasks = tasks_of(c);
  const int64_t groups = (panels_of(c.columns) + size - 1) / size;
  const int64_t first = groups * task / tasks, end = groups * (task + 1) / tasks;
  if (first < end) kernel.tiles->multiply(&c, first, end);
}

// Take a few microseconds, less than waking a thread.
bool rows_are_short(const outrider_product& c) { return c.rows * c.depth < 1 << 15; }
bool is_small(const outrider_product& c, int64_t blocks) {
  return panels_of(c.columns) * PANEL * blocks * BLOCK * (c.rows + 1) < 1 << 18;
}

ort::Status* round_rows(const Kernel& kernel, const ort::Context* context,
                        const outrider_product& c) {
  return ort::parallel_for(kernel.api, context, runs_of(c), rows_are_short(c), [&](int64_t i) {
    kernel.tiles->round(&c, i * ROWS, std::min((i + 1) * ROWS, c.rows));
  });
}

// Sets the sizes, x and y of a product. Rejects rows of another length.
ort::Status* set_rows(const Kernel& kernel, ort::Context* context, ort::Tensor* x,
                      outrider_product* c) {
  const size_t last = x->dimensions - 1;
  if (x->dimensions == 0 || x->sizes[last] != kernel.columns)
    return ort::make_error(kernel.api, "the length of a row does not match the matrix's columns");
  *c = {};
  c->rows = 1, c->depth = kernel.columns, c->columns = c->stride = kernel.rows;
  c->bits = kernel.bits, c->dtype = kernel.dtype;
  for (size_t i = 0; i < last; ++i) c->rows *= x->sizes[i];
  x->sizes[last] = kernel.rows;
  void* y = nullptr;
  if (ort::Status* status = ort::output(kernel.api, context, 0, x->sizes, last + 1, &y))
    return status;
  c->x = static_cast<const float*>(x->data), c->y = static_cast<float*>(y);
  return nullptr;
}

ort::Status* multiply(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS + 2];
  int64_t first_rows = 0;
  if (ort::Status* status = inputs(kernel, context, in, &first_rows)) return status;
  outrider_product c;
  if (ort::Status* status = set_rows(kernel, context, &in[X], &c)) return status;
  set_matrix(&c, in[LEVELS], in[SCALES]);
  const int64_t blocks = blocks_of(kernel);
  const size_t count = static_cast<size_t>(c.rows * blocks);
  const Rounded rounded(new (std::nothrow) outrider_rounded[count]);
  if (!rounded) return ort::make_error(api, "out of memory");
  c.rounded = rounded.get();

  if (ort::Status* status = round_rows(kernel, context, c)) return status;
  outrider_product more = c;
  set_matrix(&more, in[MORE], in[MORE + 1]);
  c.columns = first_rows, more.columns = kernel.rows - first_rows;
  more.y += first_rows, more.bits = 12 - c.bits;
  const int64_t tasks = tasks_of(c);
  const bool few = is_small(c, blocks) && is_small(more, blocks);
  return ort::parallel_for(api, context, tasks + tasks_of(more), few, [&](int64_t i) {
    multiply_task(kernel, i < tasks ? c : more, i < tasks ? i : i - tasks);
  });
}

// Reads x, or ids, and weights of 16 bits; rejects a matrix whose size does not match.
ort::Status* half_inputs(const Kernel& kernel, const ort::Context* context, ort::Tensor* in) {
  if (ort::Status* status = ort::inputs(kernel.api, context, WEIGHTS + 1, in)) return status;
  if (!ort::has_sizes(in[WEIGHTS], {panels_of(kernel.rows), kernel.columns, PANEL}))
    return ort::make_error(kernel.api, "the size of a matrix does not match the attributes");
  return nullptr;
}

ort::Status* multiply_halves(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  ort::Tensor in[WEIGHTS + 1];
  outrider_product c;
  if (ort::Status* status = half_inputs(kernel, context, in)) return status;
  if (ort::Status* status = set_rows(kernel, context, &in[X], &c)) return status;
  c.levels = static_cast<const uint8_t*>(in[WEIGHTS].data);
  const bool few = is_small(c, blocks_of(kernel));
  return ort::parallel_for(kernel.api, context, tasks_of(c), few,
                           [&](int64_t i) { multiply_task(kernel, c, i); });
}

// Rows of the same expert are multiplied together: they are copied so that they are adjacent, and
// the results are copied back.
ort::Status* multiply_experts(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS], chosen;
  if (ort::Status* status = inputs(kernel, context, in)) return status;
  if (ort::Status* status = ort::input(api, context, CHOSEN, &chosen)) return status;
  const int64_t choices = chosen.sizes[0], tokens = chosen.sizes[1], rows = choices * tokens;
  const int64_t x_copies = in[X].dimensions == 3 && in[X].sizes[0] == 1 ? 1 : choices;
  if (chosen.dimensions != 2 || !ort::has_sizes(in[X], {x_copies, tokens, kernel.columns}))
    return ort::make_error(api, "the length of a row does not match the experts' columns");
  const int64_t sizes[] = {choices, tokens, kernel.rows};
  void* y = nullptr;
  if (ort::Status* status = ort::output(api, context, 0, sizes, 3, &y)) return status;
  const int64_t* ids = static_cast<const int64_t*>(chosen.data);
  for (int64_t row = 0; row < rows; ++row)
    if (ids[row] < 0 || ids[row] >= kernel.experts)
      return ort::make_error(api, "a chosen expert does not exist");

  outrider_product c{};
  c.rows = x_copies * tokens, c.depth = kernel.columns, c.bits = kernel.bits;
  c.columns = c.stride = kernel.rows;
  c.x = static_cast<const float*>(in[X].data);
  set_matrix(&c, in[LEVELS], in[SCALES]);
  const int64_t blocks = blocks_of(kernel);
  const size_t given_blocks = static_cast<size_t>(c.rows * blocks);
  const size_t sorted_blocks = static_cast<size_t>(rows * blocks);
  const size_t wide = static_cast<size_t>(rows * kernel.rows), all = static_cast<size_t>(rows);
  const size_t experts = static_cast<size_t>(kernel.experts);
  const std::unique_ptr<int64_t[]> order(new (std::nothrow) int64_t[all + 2 * experts + 1]);
  const std::unique_ptr<float[]> out(new (std::nothrow) float[wide]);
  const Rounded rounded(new (std::nothrow) outrider_rounded[given_blocks + sorted_blocks]);
  if (!order || !out || !rounded) return ort::make_error(api, "out of memory");
  c.rounded = rounded.get();
  outrider_product of_sorted = c;
  of_sorted.rows = rows, of_sorted.y = out.get(), of_sorted.rounded += given_blocks;

  int64_t *place = order.get(), *begin = place + rows, *used_experts = begin + kernel.experts + 1;
  std::fill(begin, begin + kernel.experts + 1, 0);
  for (int64_t row = 0; row < rows; ++row) ++begin[ids[row] + 1];
  int64_t count = 0;
  for (int64_t expert = 0; expert < kernel.experts; ++expert) {
    if (begin[expert + 1] > 0) used_experts[count++] = expert;
    begin[expert + 1] += begin[expert];
  }
  for (int64_t row = 0; row < rows; ++row) place[row] = begin[ids[row]]++;
  std::copy_backward(begin, begin + kernel.experts, begin + kernel.experts + 1);
  begin[0] = 0;

  const int64_t panels = panels_of(c.columns), tasks = tasks_of(c);
  const bool few = rows_are_short(of_sorted);
  ort::Status* status = round_rows(kernel, context, c);
  if (status == nullptr)
    status = ort::parallel_for(api, context, runs_of(of_sorted), few, [&](int64_t i) {
      for (int64_t row = i * ROWS; row < std::min(rows, (i + 1) * ROWS); ++row)
        std::copy_n(c.rounded + row % c.rows * blocks, blocks,
                    of_sorted.rounded + place[row] * blocks);
    });
  if (status == nullptr)
    status =
        ort::parallel_for(api, context, count * tasks, is_small(of_sorted, blocks), [&](int64_t i) {
          const int64_t expert = used_experts[i / tasks], first_row = begin[expert];
          outrider_product own = of_sorted;
          own.rows = begin[expert + 1] - first_row;
          own.levels += expert * panels * blocks * 64 * c.bits;
          own.scales += expert * panels * blocks * PANEL;
          own.rounded += first_row * blocks;
          own.y += first_row * c.columns;
          multiply_task(kernel, own, i % tasks);
        });
  if (status == nullptr)
    status = ort::parallel_for(api, context, runs_of(of_sorted), few, [&](int64_t i) {
      for (int64_t row = i * ROWS; row < std::min(rows, (i + 1) * ROWS); ++row)
        memcpy(static_cast<float*>(y) + row * c.columns, out.get() + place[row] * c.columns,
               static_cast<size_t>(c.columns) * sizeof(float));
    });
  return status;
}

// Calls copy(id, to) for the row of each id. Rejects ids that do not exist.
template <class Copy>
ort::Status* gather_rows(const Kernel& kernel, ort::Context* context, ort::Tensor* ids, Copy copy) {
  const Api* api = kernel.api;
  if (ids->dimensions >= sizeof ids->sizes / sizeof ids->sizes[0])
    return ort::make_error(api, "ids have too many dimensions");
  int64_t count = 1;
  for (size_t i = 0; i < ids->dimensions; ++i) count *= ids->sizes[i];
  ids->sizes[ids->dimensions] = kernel.columns;
  void* out = nullptr;
  if (ort::Status* status = ort::output(api, context, 0, ids->sizes, ids->dimensions + 1, &out))
    return status;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = static_cast<const int64_t*>(ids->data)[i];
    if (id < 0 || id >= kernel.rows)
      return ort::make_error(api, "a token id is beyond the vocabulary");
    copy(id, static_cast<float*>(out) + i * kernel.columns);
  }
  return nullptr;
}

ort::Status* gather(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  ort::Tensor in[INPUTS];
  if (ort::Status* status = inputs(kernel, context, in)) return status;
  const int64_t blocks = blocks_of(kernel);
  const int64_t bits = kernel.bits, offset = bits == 4 ? 8 : 128;
  return gather_rows(kernel, context, &in[X], [&](int64_t id, float* to) {
    const int64_t lane = id % PANEL;
    const int64_t panel = id / PANEL * blocks;
    const uint8_t* levels = static_cast<const uint8_t*>(in[LEVELS].data) + panel * 64 * bits;
    const uint16_t* scales = static_cast<const uint16_t*>(in[SCALES].data) + panel * PANEL;
    for (int64_t block = 0; block < blocks; ++block) {
      const float scale = outrider::from_float16(scales[block * PANEL + lane]);
      const int64_t end = std::min((block + 1) * BLOCK, kernel.columns);
      for (int64_t k = block * BLOCK; k < end; ++k) {
        const int64_t number = k % BLOCK, of_vector = BLOCK / bits;
        const uint8_t byte = levels[block * 64 * bits + number / of_vector * 64 + 4 * lane + k % 4];
        const int64_t level = bits == 8 ? byte : number % 8 < 4 ? byte & 15 : byte >> 4;
        to[k] = static_cast<float>(level - offset) * scale;
      }
    }
  });
}

ort::Status* gather_halves(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  ort::Tensor in[WEIGHTS + 1];
  if (ort::Status* status = half_inputs(kernel, context, in)) return status;
  return gather_rows(kernel, context, &in[X], [&](int64_t id, float* to) {
    const int64_t first = id / PANEL * PANEL * kernel.columns + id % PANEL;
    for (int64_t k = 0; k < kernel.columns; ++k)
      to[k] = outrider::load(in[WEIGHTS].data, static_cast<int>(kernel.dtype), first + k * PANEL);
  });
}

constexpr ort::Port FLOATS{ort::FLOAT}, BYTES{ort::UINT8}, HALVES{ort::FLOAT16}, IDS{ort::INT64},
    MORE_BYTES{ort::UINT8, ort::OPTIONAL}, MORE_HALVES{ort::FLOAT16, ort::OPTIONAL},
    WORDS{ort::UINT16};

} // namespace

const ort::NamedOperator ort::PRODUCT = {
    operator_of<Kernel>(create, multiply), "QuantizedMatMul",
    {FLOATS, BYTES, HALVES, MORE_BYTES, MORE_HALVES}, {FLOATS}};
const ort::NamedOperator ort::ROWS = {
    operator_of<Kernel>(create, gather), "QuantizedGather", {IDS, BYTES, HALVES}, {FLOATS}};
const ort::NamedOperator ort::EXPERTS = {
    operator_of<Kernel>(create, multiply_experts), "QuantizedExperts",
    {FLOATS, BYTES, HALVES, IDS}, {FLOATS}};
const ort::NamedOperator ort::HALF_PRODUCT = {
    operator_of<Kernel>(create, multiply_halves), "HalfMatMul", {FLOATS, WORDS}, {FLOATS}};
const ort::NamedOperator ort::HALF_ROWS = {
    operator_of<Kernel>(create, gather_halves), "HalfGather", {IDS, WORDS}, {FLOATS}};
