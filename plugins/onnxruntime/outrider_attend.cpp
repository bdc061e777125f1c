// The operators outrider.Attention and outrider.QuantizedCacheAttention for ONNX Runtime.
//
// inputs   query [B, N, H D]; key [B, N, Hkv D], value [B, N, Hkv Dv], or neither: then query holds
//          all three, concatenated; key cache, value cache [B, Hkv, S, D or Dv], for the second
//          operator int8 [B, Hkv, S, D + 4 or Dv + 4] (see outrider_attention.h);
//          position int64 [B]; cosine, sine [>= rows in use, rotated / 2], optional;
//          bias [H, >= rows in use + KEYS], optional, starting with the farthest row;
//          sinks [H], softcap [1], optional
// outputs  [B, N, H Dv]; the caches, updated in place if they are bound to the inputs' memory, or
//          neither: then another layer has written these tokens' rows, and key and value are absent
// attributes  heads, key_heads, scale, window (0: none), interleaved
//
// Also outrider.SourceAttention, the attention to an encoder's output.
//
// inputs   query [B, N, H D]; keys, values [B, Hkv, E, D]; length int64 [B], the valid rows of E;
//          sinks [H], softcap [1], optional
// output   [B, N, H D]
// attributes  the same
//
// Other sizes are rejected.
#include <algorithm>
#include <memory>
#include <new>

#include "outrider_attention.h"
#include "outrider_operator.h"

namespace {
using ort::Api;

enum Input {
  QUERY, KEY, VALUE, KEYS, VALUES, POSITION, COSINE, SINE, BIAS, SINKS, SOFTCAP, INPUTS
};
// POSITION: the length.
constexpr Input SOURCE_INPUTS[] = {QUERY, KEYS, VALUES, POSITION, SINKS, SOFTCAP};

struct Kernel {
  const Api* api;
  const outrider_attention_tiles* tiles;
  int64_t heads, key_heads, window, interleaved;
  float scale;
  bool quantised; // the caches' rows
};

// The table for the instruction set in use.
const outrider_attention_tiles* tiles_in_use(bool quantised) {
#if defined(OUTRIDER_X86)
  if (quantised)
    return ort::tiles_of({&outrider_attention_int8_avx512, &outrider_attention_int8_avx2,
                          &outrider_attention_int8_plain});
  return ort::tiles_of(
      {&outrider_attention_avx512, &outrider_attention_avx2, &outrider_attention_plain});
#else
  return quantised ? &outrider_attention_int8_plain : &outrider_attention_plain;
#endif
}

ort::Status* create(const ort::Operator* made_of, const Api* api, const ort::KernelInfo* info,
                    void** made) {
  const bool int8 = made_of == &ort::QUANTISED_ATTENTION;
  std::unique_ptr<Kernel> kernel(
      new (std::nothrow) Kernel{api, tiles_in_use(int8), 0, 0, 0, 0, 0, int8});
  if (!kernel) return ort::make_error(api, "out of memory");
  ort::Status* status = ort::call<ort::FloatAttribute>(api, info, "scale", &kernel->scale);
  if (status == nullptr)
    status = ort::integer_attributes(
        api, info, {{"heads", &kernel->heads}, {"key_heads", &kernel->key_heads},
                    {"window", &kernel->window}, {"interleaved", &kernel->interleaved}});
  if (status != nullptr) return status;
  if (kernel->key_heads < 1 || kernel->heads < kernel->key_heads || kernel->heads > INT32_MAX ||
      kernel->heads % kernel->key_heads != 0)
    return ort::make_error(api, "heads is out of range, or not a multiple of key_heads");
  if (kernel->window < 0) return ort::make_error(api, "window is negative");
  *made = kernel.release();
  return nullptr;
}

int64_t width_of(const Kernel& kernel, const ort::Tensor& cache) {
  return cache.sizes[3] - (kernel.quantised ? OUTRIDER_ATTENTION_SCALE : 0);
}

// Whether sinks and softcap, if given, have the right sizes.
bool score_sizes_match(const Kernel& kernel, const ort::Tensor* in) {
  return (in[SINKS].value == nullptr || ort::has_sizes(in[SINKS], {kernel.heads})) &&
         (in[SOFTCAP].value == nullptr || ort::has_sizes(in[SOFTCAP], {1}));
}

// Whether the sizes of all inputs are consistent.
bool sizes_match(const Kernel& kernel, const ort::Tensor* in, bool reads_only) {
  if (in[QUERY].dimensions != 3 || in[KEYS].dimensions != 4 || in[VALUES].dimensions != 4)
    return false;
  const int64_t slots = in[QUERY].sizes[0], tokens = in[QUERY].sizes[1], rows = in[KEYS].sizes[2];
  bool match = ort::has_sizes(in[POSITION], {slots}) && score_sizes_match(kernel, in);
  int64_t own_sizes[2], count = 0; // elements of a token's key and value
  for (const Input cache : {KEYS, VALUES}) {
    const int64_t width = width_of(kernel, in[cache]);
    own_sizes[count++] = kernel.key_heads * width;
    match = match && width >= 1 && width <= OUTRIDER_ATTENTION_WIDTH &&
            ort::has_sizes(in[cache], {slots, kernel.key_heads, rows, in[cache].sizes[3]});
  }
  const int64_t width = width_of(kernel, in[KEYS]), query_size = kernel.heads * width;
  if (in[KEY].value == nullptr)
    match =
        match && in[VALUE].value == nullptr &&
        ort::has_sizes(in[QUERY], {slots, tokens,
                                   query_size + (reads_only ? 0 : own_sizes[0] + own_sizes[1])});
  else
    match = match && !reads_only && ort::has_sizes(in[QUERY], {slots, tokens, query_size}) &&
            ort::has_sizes(in[KEY], {slots, tokens, own_sizes[0]}) &&
            ort::has_sizes(in[VALUE], {slots, tokens, own_sizes[1]});
  if (in[BIAS].value != nullptr)
    match = match && in[BIAS].dimensions == 2 && in[BIAS].sizes[0] == kernel.heads &&
            in[BIAS].sizes[1] > OUTRIDER_ATTENTION_KEYS;
  if (in[COSINE].value == nullptr) return match && in[SINE].value == nullptr;
  const int64_t *table = in[COSINE].sizes, half = width / 2;
  return match && in[COSINE].dimensions == 2 && table[1] <= half &&
         ort::has_sizes(in[SINE], {table[0], table[1]});
}

bool source_sizes_match(const Kernel& kernel, const ort::Tensor* in) {
  if (in[QUERY].dimensions != 3 || in[KEYS].dimensions != 4) return false;
  const int64_t slots = in[QUERY].sizes[0], rows = in[KEYS].sizes[2], width = in[KEYS].sizes[3];
  bool match = width >= 1 && width <= OUTRIDER_ATTENTION_WIDTH && score_sizes_match(kernel, in) &&
               ort::has_sizes(in[POSITION], {slots}) &&
               ort::has_sizes(in[QUERY], {slots, in[QUERY].sizes[1], kernel.heads * width});
  for (const Input side : {KEYS, VALUES})
    match = match && ort::has_sizes(in[side], {slots, kernel.key_heads, rows, width});
  return match;
}

// The part of the call that all operators have in common.
outrider_attention call_of(const Kernel& kernel, const ort::Tensor* in) {
  outrider_attention c{};
  c.slots = in[QUERY].sizes[0], c.tokens = in[QUERY].sizes[1];
  c.heads = kernel.heads, c.key_heads = kernel.key_heads;
  c.rows = in[KEYS].sizes[2];
  c.width = width_of(kernel, in[KEYS]), c.value_width = width_of(kernel, in[VALUES]);
  c.window = kernel.window, c.interleaved = kernel.interleaved, c.scale = kernel.scale;
  c.query = static_cast<const float*>(in[QUERY].data);
  c.query_stride = in[QUERY].sizes[2];
  c.keys = in[KEYS].data, c.values = in[VALUES].data;
  c.sinks = static_cast<const float*>(in[SINKS].data);
  if (in[SOFTCAP].value != nullptr) c.softcap = *static_cast<const float*>(in[SOFTCAP].data);
  return c;
}

// The parts that a slot's queries attend to: first .. end - 1. New rows begin in part `own`.
struct Parts {
  int64_t first, own, end;
};
Parts parts_of(const outrider_attention& c, int64_t slot) {
  constexpr int64_t PART = OUTRIDER_ATTENTION_PART;
  const int64_t rows = c.length ? c.length[slot] : c.position[slot] + c.tokens;
  const int64_t end = (rows + PART - 1) / PART;
  if (c.length) return {0, end - 1, end};
  const int64_t own = c.position[slot];
  return {outrider_attention_first_row(c, own) / PART, own / PART, end};
}

constexpr int64_t SHARES = 12; // maximum for all heads together; divisible by many thread counts

// For few heads and long caches: the parts of a head are also divided among threads, each taking
// neighbouring ones. One thread takes all parts with new rows, and writes these rows first. The
// memory for sums is about an eighth of that of the call's keys and values. max_parts: of a slot.
ort::Status* attend_parts(const Kernel& kernel, const ort::Context* context,
                          const outrider_attention& c, int64_t max_parts, bool writes) {
  const int64_t heads = c.slots * c.key_heads;
  const int64_t part_size = outrider_attention_rows(c) * outrider_attention_stride(c);
  const int64_t head_size = max_parts * part_size;
  const int64_t shares = std::min(max_parts, SHARES / heads);
  const std::unique_ptr<float[]> sums(
      new (std::nothrow) float[static_cast<size_t>(heads * head_size)]);
  if (!sums) return ort::make_error(kernel.api, "out of memory");
  ort::Status* status =
      ort::parallel_for(kernel.api, context, heads * shares, false, [&](int64_t i) {
        const int64_t head = i / shares, slot = head / c.key_heads;
        const Parts parts = parts_of(c, slot);
        const int64_t count = parts.own + 1 - parts.first;
        const int64_t first = count * (i % shares) / shares,
                      end = count * (i % shares + 1) / shares;
        if (first == end) return;
        if (writes && end == count) kernel.tiles->write(&c, slot, head % c.key_heads);
        kernel.tiles->attend_parts(&c, slot, head % c.key_heads, parts.first + first,
                                   end == count ? parts.end : parts.first + end,
                                   sums.get() + head * head_size + first * part_size);
      });
  if (status != nullptr) return status;
  return ort::parallel_for(kernel.api, context, heads, heads * head_size < 1 << 16, [&](int64_t i) {
    const Parts parts = parts_of(c, i / c.key_heads);
    kernel.tiles->combine(&c, i / c.key_heads, i % c.key_heads, parts.end - parts.first,
                          sums.get() + i * head_size);
  });
}

// Attention for the query rows of all heads. max_seen: maximum number of rows that a query attends
// to. writes: the new keys and values are written to the caches first.
ort::Status* attend(const Kernel& kernel, const ort::Context* context, const outrider_attention& c,
                    int64_t max_seen, bool writes) {
  constexpr int64_t ROWS = OUTRIDER_ATTENTION_ROWS;
  const int64_t rows = outrider_attention_rows(c), runs = (rows + ROWS - 1) / ROWS;
  const int64_t heads = c.slots * c.key_heads;
  // Takes a few microseconds, less than waking a thread.
  const bool small = heads * rows * max_seen * c.width < 1 << 15;
  const auto write_head = [&](int64_t i) {
    kernel.tiles->write(&c, i / c.key_heads, i % c.key_heads);
  };
  const auto attend_run = [&](int64_t i) {
    const int64_t head = i / runs, first = i % runs * ROWS;
    kernel.tiles->attend(&c, head / c.key_heads, head % c.key_heads, first,
                         std::min(first + ROWS, rows));
  };
  if (runs == 1 && 2 * heads <= SHARES && !small) {
    int64_t max_parts = 0;
    for (int64_t slot = 0; slot < c.slots; ++slot) {
      const Parts parts = parts_of(c, slot);
      max_parts = std::max(max_parts, parts.end - parts.first);
    }
    if (max_parts > 1) return attend_parts(kernel, context, c, max_parts, writes);
  }
  if (writes && runs == 1)
    return ort::parallel_for(kernel.api, context, heads, small,
                             [&](int64_t i) { write_head(i), attend_run(i); });
  ort::Status* status = nullptr;
  if (writes) status = ort::parallel_for(kernel.api, context, heads, small, write_head);
  if (status == nullptr)
    status = ort::parallel_for(kernel.api, context, heads * runs, small, attend_run);
  return status;
}

ort::Status* compute(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  if (ort::Status* status = ort::inputs(api, context, INPUTS, in)) return status;
  size_t outputs;
  if (ort::Status* status = ort::call<ort::CountOutputs>(api, context, &outputs)) return status;
  const bool reads_only = outputs == 1;
  if (!sizes_match(kernel, in, reads_only))
    return ort::make_error(api, "the sizes of the inputs do not match");
  outrider_attention c = call_of(kernel, in);
  if (in[KEY].value != nullptr) {
    c.key = static_cast<const float*>(in[KEY].data), c.key_stride = in[KEY].sizes[2];
    c.value = static_cast<const float*>(in[VALUE].data), c.value_stride = in[VALUE].sizes[2];
  } else if (!reads_only) {
    c.key = c.query + c.heads * c.width, c.value = c.key + c.key_heads * c.width;
    c.key_stride = c.value_stride = c.query_stride;
  }
  c.position = static_cast<const int64_t*>(in[POSITION].data);
  c.cosine = static_cast<const float*>(in[COSINE].data);
  c.sine = static_cast<const float*>(in[SINE].data);
  c.rotated = in[COSINE].value != nullptr ? 2 * in[COSINE].sizes[1] : 0;
  int64_t max_rows = c.rows, max_seen = 0;
  if (in[COSINE].value != nullptr) max_rows = std::min(max_rows, in[COSINE].sizes[0]);
  if (in[BIAS].value != nullptr) {
    c.bias = static_cast<const float*>(in[BIAS].data), c.distances = in[BIAS].sizes[1];
    c.farthest = c.distances - OUTRIDER_ATTENTION_KEYS - 1;
    max_rows = std::min(max_rows, c.farthest + 1);
  }
  for (int64_t slot = 0; slot < c.slots; ++slot) {
    const int64_t first = c.position[slot];
    if (first < 0 || first > max_rows - c.tokens)
      return ort::make_error(api, "a row is beyond the cache");
    max_seen = std::max(max_seen, first + c.tokens);
  }
  const int64_t shape[] = {c.slots, c.tokens, c.heads * c.value_width};
  void *out, *caches[2] = {in[KEYS].data, in[VALUES].data};
  if (ort::Status* status = ort::output(api, context, 0, shape, 3, &out)) return status;
  const size_t element = kernel.quantised ? 1 : sizeof(float);
  for (size_t i = 0; i < 2 && !reads_only; ++i)
    if (ort::Status* status =
            ort::output_in_place(api, context, 1 + i, in[KEYS + i], element, &caches[i]))
      return status;
  c.out = static_cast<float*>(out);
  c.keys = caches[0], c.values = caches[1];
  return attend(kernel, context, c, max_seen, !reads_only);
}

ort::Status* compute_source(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  size_t index = 0;
  for (const Input i : SOURCE_INPUTS)
    if (ort::Status* status = ort::input(api, context, index++, &in[i])) return status;
  if (!source_sizes_match(kernel, in))
    return ort::make_error(api, "the sizes of the inputs do not match");
  outrider_attention c = call_of(kernel, in);
  c.length = static_cast<const int64_t*>(in[POSITION].data);
  int64_t longest = 0;
  for (int64_t slot = 0; slot < c.slots; ++slot) {
    if (c.length[slot] < 1 || c.length[slot] > c.rows)
      return ort::make_error(api, "a length is not from 1 to the number of rows");
    longest = std::max(longest, c.length[slot]);
  }
  const int64_t shape[] = {c.slots, c.tokens, c.heads * c.width};
  void* out;
  if (ort::Status* status = ort::output(api, context, 0, shape, 3, &out)) return status;
  c.out = static_cast<float*>(out);
  return attend(kernel, context, c, longest, false);
}

constexpr ort::Port FLOATS{ort::FLOAT}, OPTIONAL_FLOATS{ort::FLOAT, ort::OPTIONAL},
    LEVELS{ort::INT8}, OPTIONAL_LEVELS{ort::INT8, ort::OPTIONAL}, IDS{ort::INT64};

} // namespace

const ort::NamedOperator ort::ATTENTION = {
    operator_of<Kernel>(create, compute), "Attention",
    {FLOATS, OPTIONAL_FLOATS, OPTIONAL_FLOATS, FLOATS, FLOATS, IDS, OPTIONAL_FLOATS,
     OPTIONAL_FLOATS, OPTIONAL_FLOATS, OPTIONAL_FLOATS, OPTIONAL_FLOATS},
    {FLOATS, OPTIONAL_FLOATS, OPTIONAL_FLOATS}};
const ort::NamedOperator ort::QUANTISED_ATTENTION = {
    operator_of<Kernel>(create, compute), "QuantizedCacheAttention",
    {FLOATS, OPTIONAL_FLOATS, OPTIONAL_FLOATS, LEVELS, LEVELS, IDS, OPTIONAL_FLOATS,
     OPTIONAL_FLOATS, OPTIONAL_FLOATS, OPTIONAL_FLOATS, OPTIONAL_FLOATS},
    {FLOATS, OPTIONAL_LEVELS, OPTIONAL_LEVELS}};
const ort::NamedOperator ort::SOURCE_ATTENTION = {
    operator_of<Kernel>(create, compute_source), "SourceAttention",
    {FLOATS, FLOATS, FLOATS, IDS, OPTIONAL_FLOATS, OPTIONAL_FLOATS}, {FLOATS}};
