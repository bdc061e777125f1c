// The operators outrider.Recurrence and outrider.ShortConvolution for ONNX Runtime: see
// outrider_recurrence.h.
//
// Recurrence
//   inputs   query, key [B, N, Hk, Dk]; value [B, N, H, Dv]; decay [B, N, H, 1 or Dk], logarithms;
//            beta [B, N, H], optional; slot [B, H, R, Dk Dv]; position int64 [B]
//   outputs  [B, N, H, Dv]; the slot, updated in place if it is bound to the input's memory
// ShortConvolution
//   inputs   x [B, C, N]; weight [C, K]; bias [C], optional; slot [B, 1, R, C]; position int64 [B]
//   outputs  [B, C, N]; the slot
//
// Other sizes are rejected.
#include <algorithm>
#include <new>

#include "outrider_operator.h"
#include "outrider_recurrence.h"

namespace {
using ort::Api;

constexpr int64_t COLUMNS = OUTRIDER_RECURRENCE_COLUMNS;

namespace state {
enum Input { QUERY, KEY, VALUE, DECAY, BETA, SLOT, POSITION, INPUTS };
}
namespace past {
enum Input { X, WEIGHT, BIAS, SLOT, POSITION, INPUTS };
}

struct Kernel {
  const Api* api;
  const outrider_recurrence_tiles* tiles;
};

// The table for the instruction set in use.
const outrider_recurrence_tiles* tiles_in_use() {
#if defined(OUTRIDER_X86)
  return ort::tiles_of(
      {&outrider_recurrence_avx512, &outrider_recurrence_avx2, &outrider_recurrence_plain});
#else
  return &outrider_recurrence_plain;
#endif
}

ort::Status* create(const ort::Operator*, const Api* api, const ort::KernelInfo*, void** made) {
  *made = new (std::nothrow) Kernel{api, tiles_in_use()};
  return *made == nullptr ? ort::make_error(api, "out of memory") : nullptr;
}

// Whether no position is negative or overflows.
bool positions_are_valid(const int64_t* position, int64_t slots, int64_t tokens) {
  return std::all_of(position, position + slots,
                     [&](int64_t p) { return p >= 0 && p <= INT64_MAX - tokens; });
}

bool recurrence_sizes_match(const ort::Tensor* in) {
  using namespace state;
  if (in[QUERY].dimensions != 4 || in[VALUE].dimensions != 4 || in[SLOT].dimensions != 4 ||
      in[DECAY].dimensions != 4)
    return false;
  const int64_t slots = in[QUERY].sizes[0], tokens = in[QUERY].sizes[1];
  const int64_t key_heads = in[QUERY].sizes[2], depth = in[QUERY].sizes[3];
  const int64_t heads = in[VALUE].sizes[2], width = in[VALUE].sizes[3];
  const int64_t rows = in[SLOT].sizes[2], decays = in[DECAY].sizes[3];
  return key_heads >= 1 && heads >= 1 && heads % key_heads == 0 && width >= 1 && depth >= 1 &&
         depth <= OUTRIDER_RECURRENCE_WIDTH && rows >= 1 && (decays == 1 || decays == depth) &&
         ort::has_sizes(in[KEY], {slots, tokens, key_heads, depth}) &&
         ort::has_sizes(in[VALUE], {slots, tokens, heads, width}) &&
         ort::has_sizes(in[DECAY], {slots, tokens, heads, decays}) &&
         (in[BETA].value == nullptr || ort::has_sizes(in[BETA], {slots, tokens, heads})) &&
         ort::has_sizes(in[SLOT], {slots, heads, rows, depth * width}) &&
         ort::has_sizes(in[POSITION], {slots});
}

ort::Status* recur(void* made, ort::Context* context) {
  using namespace state;
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  if (ort::Status* status = ort::inputs(api, context, INPUTS, in)) return status;
  if (!recurrence_sizes_match(in))
    return ort::make_error(api, "the sizes of the inputs do not match");
  outrider_recurrence c{};
  const int64_t slots = in[QUERY].sizes[0];
  c.tokens = in[QUERY].sizes[1], c.key_heads = in[QUERY].sizes[2];
  c.key_width = in[QUERY].sizes[3];
  c.heads = in[VALUE].sizes[2], c.width = in[VALUE].sizes[3];
  c.decays = in[DECAY].sizes[3], c.rows = in[SLOT].sizes[2];
  c.query = static_cast<const float*>(in[QUERY].data);
  c.key = static_cast<const float*>(in[KEY].data);
  c.value = static_cast<const float*>(in[VALUE].data);
  c.decay = static_cast<const float*>(in[DECAY].data);
  c.beta = static_cast<const float*>(in[BETA].data);
  c.position = static_cast<const int64_t*>(in[POSITION].data);
  if (!positions_are_valid(c.position, slots, c.tokens))
    return ort::make_error(api, "a position is out of range");
  void *out = nullptr, *states = nullptr;
  if (ort::Status* status = ort::output(api, context, 0, in[VALUE].sizes, 4, &out)) return status;
  if (ort::Status* status = ort::output_in_place(api, context, 1, in[SLOT], sizeof(float), &states))
    return status;
  c.out = static_cast<float*>(out), c.states = static_cast<float*>(states);
  const int64_t heads = slots * c.heads, runs = (c.width + COLUMNS - 1) / COLUMNS;
  const bool small = heads * c.tokens * c.key_width * c.width < 1 << 15; // a few microseconds
  return ort::parallel_for(api, context, heads * runs, small, [&](int64_t i) {
    const int64_t head = i / runs, first = i % runs * COLUMNS;
    kernel.tiles->recur(&c, head / c.heads, head % c.heads, first,
                        std::min(first + COLUMNS, c.width));
  });
}

bool convolution_sizes_match(const ort::Tensor* in) {
  using namespace past;
  if (in[X].dimensions != 3 || in[WEIGHT].dimensions != 2 || in[SLOT].dimensions != 4) return false;
  const int64_t slots = in[X].sizes[0], channels = in[X].sizes[1];
  const int64_t taps = in[WEIGHT].sizes[1], rows = in[SLOT].sizes[2];
  return channels >= 1 && taps >= 1 && taps <= OUTRIDER_RECURRENCE_TAPS && rows >= taps &&
         ort::has_sizes(in[WEIGHT], {channels, taps}) &&
         (in[BIAS].value == nullptr || ort::has_sizes(in[BIAS], {channels})) &&
         ort::has_sizes(in[SLOT], {slots, 1, rows, channels}) &&
         ort::has_sizes(in[POSITION], {slots});
}

ort::Status* convolve(void* made, ort::Context* context) {
  using namespace past;
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  if (ort::Status* status = ort::inputs(api, context, INPUTS, in)) return status;
  if (!convolution_sizes_match(in))
    return ort::make_error(api, "the sizes of the inputs do not match");
  outrider_convolution c{};
  const int64_t slots = in[X].sizes[0];
  c.channels = in[X].sizes[1], c.tokens = in[X].sizes[2];
  c.taps = in[WEIGHT].sizes[1], c.rows = in[SLOT].sizes[2];
  c.x = static_cast<const float*>(in[X].data);
  c.weight = static_cast<const float*>(in[WEIGHT].data);
  c.bias = static_cast<const float*>(in[BIAS].data);
  c.position = static_cast<const int64_t*>(in[POSITION].data);
  if (!positions_are_valid(c.position, slots, c.tokens))
    return ort::make_error(api, "a position is out of range");
  void *out = nullptr, *past = nullptr;
  if (ort::Status* status = ort::output(api, context, 0, in[X].sizes, 3, &out)) return status;
  if (ort::Status* status = ort::output_in_place(api, context, 1, in[SLOT], sizeof(float), &past))
    return status;
  c.out = static_cast<float*>(out), c.past = static_cast<float*>(past);
  const int64_t runs = (c.channels + COLUMNS - 1) / COLUMNS;
  const bool small = slots * c.tokens * c.channels * c.taps < 1 << 16; // a few microseconds
  return ort::parallel_for(api, context, slots * runs, small, [&](int64_t i) {
    const int64_t first = i % runs * COLUMNS;
    kernel.tiles->convolve(&c, i / runs, first, std::min(first + COLUMNS, c.channels));
  });
}

constexpr ort::Port FLOATS{ort::FLOAT}, OPTIONAL_FLOATS{ort::FLOAT, ort::OPTIONAL}, IDS{ort::INT64};

} // namespace

const ort::NamedOperator ort::RECURRENCE = {
    operator_of<Kernel>(create, recur), "Recurrence",
    {FLOATS, FLOATS, FLOATS, FLOATS, OPTIONAL_FLOATS, FLOATS, IDS}, {FLOATS, FLOATS}};
const ort::NamedOperator ort::CONVOLUTION = {
    operator_of<Kernel>(create, convolve), "ShortConvolution",
    {FLOATS, FLOATS, OPTIONAL_FLOATS, FLOATS, IDS}, {FLOATS, FLOATS}};
