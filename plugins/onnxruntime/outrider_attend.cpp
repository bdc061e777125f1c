// The operators outrider.Attention and outrider.QuantizedCacheAttention for ONNX Runtime.
//
// inputs   query [B, N, H D], or all three side by side; key [B, N, Hkv D], value [B, N, Hkv Dv],
//          or none; key cache, value cache [B, Hkv, S, D or Dv], of the second one int8
//          [B, Hkv, S, D + 4 or Dv + 4] (see outrider_attention.h); position int64 [B];
//          cosine, sine [>= rows in use, rotated / 2], or none;
//          bias [H, >= rows in use + KEYS], or none: of the farthest row first;
//          sinks [H], softcap [1], or none
// outputs  [B, N, H Dv]; the caches, in place where they are bound to the inputs' memory, or none:
//          another layer has written these tokens, and neither key nor value is there
// attributes  heads, key_heads, scale, window (0: none), interleaved
//
// And outrider.SourceAttention, to what an encoder left.
//
// inputs   query [B, N, H D]; keys, values [B, Hkv, E, D]; length int64 [B], of the E rows;
//          sinks [H], softcap [1], or none
// output   [B, N, H D]
// attributes  the same
//
// A graph whose sizes are others is refused.
#include <algorithm>
#include <cstring>
#include <new>

#include "outrider_attention.h"
#include "outrider_operator.h"

namespace {
using ort::Api;

enum Input {
  QUERY, KEY, VALUE, KEYS, VALUES, POSITION, COSINE, SINE, BIAS, SINKS, SOFTCAP, INPUTS
};
constexpr Input OF_SOURCE[] = {QUERY, KEYS, VALUES, POSITION, SINKS, SOFTCAP}; // POSITION: length

struct Kernel {
  const Api* api;
  const outrider_attention_tiles* tiles;
  int64_t heads, key_heads, window, interleaved;
  float scale;
  bool quantised; // the caches' rows
};

bool quantised(const ort::Operator* made) { return made == &ort::QUANTISED_ATTENTION; }

// Those of the instruction set that the library uses.
const outrider_attention_tiles* tiles_in_use(bool quantised) {
  const outrider_attention_tiles* known[][2] = {
#if defined(OUTRIDER_X86)
      {&outrider_attention_avx512, &outrider_attention_int8_avx512},
      {&outrider_attention_avx2, &outrider_attention_int8_avx2},
#endif
      {&outrider_attention_plain, &outrider_attention_int8_plain}};
  for (const auto& tiles : known)
    if (std::strcmp(tiles[0]->name, outrider_instruction_set()) == 0) return tiles[quantised];
  return quantised ? &outrider_attention_int8_plain : &outrider_attention_plain;
}

ort::Status* create(const ort::Operator* made_of, const Api* api, const ort::KernelInfo* info,
                    void** made) {
  const bool int8 = quantised(made_of);
  Kernel* kernel = new (std::nothrow) Kernel{api, tiles_in_use(int8), 0, 0, 0, 0, 0, int8};
  if (kernel == nullptr) return ort::refuse(api, "out of memory");
  struct { const char* name; int64_t* value; } integers[] = {
      {"heads", &kernel->heads}, {"key_heads", &kernel->key_heads}, {"window", &kernel->window},
      {"interleaved", &kernel->interleaved}};
  ort::Status* status = ort::call<ort::FloatAttribute>(api, info, "scale", &kernel->scale);
  for (auto& wanted : integers)
    if (status == nullptr)
      status = ort::call<ort::IntegerAttribute>(api, info, wanted.name, wanted.value);
  if (status == nullptr && (kernel->key_heads < 1 || kernel->heads < kernel->key_heads ||
                            kernel->heads > INT32_MAX || kernel->heads % kernel->key_heads != 0))
    status = ort::refuse(api, "each key head has as many query heads as the others");
  if (status == nullptr && kernel->window < 0)
    status = ort::refuse(api, "a window is of 0 rows or more");
  if (status != nullptr) delete kernel;
  else *made = kernel;
  return status;
}

// What threads take from: heads to write to the cache, then runs of query rows.
struct Work {
  outrider_attention call;
  const outrider_attention_tiles* tiles;
  int64_t rows, run; // of queries for a slot and key head; of them at a time
  bool small;
};

void write_heads(void* data, size_t index) {
  const Work& work = *static_cast<const Work*>(data);
  const int64_t i = static_cast<int64_t>(index);
  work.tiles->write(&work.call, i / work.call.key_heads, i % work.call.key_heads);
}

void attend_runs(void* data, size_t index) {
  const Work& work = *static_cast<const Work*>(data);
  const int64_t runs = (work.rows + work.run - 1) / work.run, i = static_cast<int64_t>(index);
  const int64_t head = i / runs, first = i % runs * work.run;
  const int64_t end = first + work.run < work.rows ? first + work.run : work.rows;
  work.tiles->attend(&work.call, head / work.call.key_heads, head % work.call.key_heads, first,
                     end);
}

void write_and_attend(void* data, size_t index) {
  write_heads(data, index);
  attend_runs(data, index);
}

int64_t width_of(const Kernel& kernel, const ort::Tensor& cache) {
  return cache.sizes[3] - (kernel.quantised ? OUTRIDER_ATTENTION_SCALE : 0);
}

// Whether what changes scores is as large as it has to be, where it is there.
bool fit_scores(const Kernel& kernel, const ort::Tensor* in) {
  return (in[SINKS].value == nullptr || ort::has_sizes(in[SINKS], {kernel.heads})) &&
         (in[SOFTCAP].value == nullptr || ort::has_sizes(in[SOFTCAP], {1}));
}

// Whether the inputs are of one batch, and of heads of one width.
bool fit(const Kernel& kernel, const ort::Tensor* in, bool reads) {
  if (in[QUERY].dimensions != 3 || in[KEYS].dimensions != 4 || in[VALUES].dimensions != 4)
    return false;
  const int64_t slots = in[QUERY].sizes[0], tokens = in[QUERY].sizes[1], rows = in[KEYS].sizes[2];
  bool same = ort::has_sizes(in[POSITION], {slots}) && fit_scores(kernel, in);
  int64_t own[2], given = 0; // numbers of a token
  for (const Input cache : {KEYS, VALUES}) {
    const int64_t width = width_of(kernel, in[cache]);
    own[given++] = kernel.key_heads * width;
    same = same && width >= 1 && width <= OUTRIDER_ATTENTION_WIDTH &&
           ort::has_sizes(in[cache], {slots, kernel.key_heads, rows, in[cache].sizes[3]});
  }
  const int64_t width = width_of(kernel, in[KEYS]), asking = kernel.heads * width;
  if (in[KEY].value == nullptr)
    same = same && in[VALUE].value == nullptr &&
           ort::has_sizes(in[QUERY], {slots, tokens, asking + (reads ? 0 : own[0] + own[1])});
  else
    same = same && !reads && ort::has_sizes(in[QUERY], {slots, tokens, asking}) &&
           ort::has_sizes(in[KEY], {slots, tokens, own[0]}) &&
           ort::has_sizes(in[VALUE], {slots, tokens, own[1]});
  if (in[BIAS].value != nullptr)
    same = same && in[BIAS].dimensions == 2 && in[BIAS].sizes[0] == kernel.heads &&
           in[BIAS].sizes[1] > OUTRIDER_ATTENTION_KEYS;
  if (in[COSINE].value == nullptr) return same && in[SINE].value == nullptr;
  const int64_t *table = in[COSINE].sizes, half = width / 2;
  return same && in[COSINE].dimensions == 2 && table[1] <= half &&
         ort::has_sizes(in[SINE], {table[0], table[1]});
}

bool fits_source(const Kernel& kernel, const ort::Tensor* in) {
  if (in[QUERY].dimensions != 3 || in[KEYS].dimensions != 4) return false;
  const int64_t slots = in[QUERY].sizes[0], rows = in[KEYS].sizes[2], width = in[KEYS].sizes[3];
  bool same = width >= 1 && width <= OUTRIDER_ATTENTION_WIDTH && fit_scores(kernel, in) &&
              ort::has_sizes(in[POSITION], {slots}) &&
              ort::has_sizes(in[QUERY], {slots, in[QUERY].sizes[1], kernel.heads * width});
  for (const Input side : {KEYS, VALUES})
    same = same && ort::has_sizes(in[side], {slots, kernel.key_heads, rows, width});
  return same;
}

// What the operators have in common.
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

// furthest: the most rows that a query sees.
Work work_of(const Kernel& kernel, const outrider_attention& c, int64_t furthest) {
  Work work{c, kernel.tiles, c.tokens * (c.heads / c.key_heads), OUTRIDER_ATTENTION_ROWS, false};
  const int64_t products = c.slots * c.key_heads * work.rows * furthest * c.width;
  work.small = products < 1 << 17; // a few microseconds: less than waking a thread takes
  return work;
}

ort::Status* share_runs(const Api* api, const ort::Context* context, Work* work) {
  const int64_t runs = (work->rows + work->run - 1) / work->run;
  const int64_t heads = work->call.slots * work->call.key_heads;
  return ort::share(api, context, attend_runs, heads * runs, work->small, work);
}

ort::Status* compute(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  for (size_t i = 0; i < INPUTS; ++i)
    if (ort::Status* status = ort::input(api, context, i, &in[i])) return status;
  size_t outputs;
  if (ort::Status* status = ort::call<ort::CountOutputs>(api, context, &outputs)) return status;
  const bool reads = outputs == 1;
  if (!fit(kernel, in, reads))
    return ort::refuse(api, "an input has another size than the others say");
  outrider_attention c = call_of(kernel, in);
  if (in[KEY].value != nullptr) {
    c.key = static_cast<const float*>(in[KEY].data), c.key_stride = in[KEY].sizes[2];
    c.value = static_cast<const float*>(in[VALUE].data), c.value_stride = in[VALUE].sizes[2];
  } else if (!reads) {
    c.key = c.query + c.heads * c.width, c.value = c.key + c.key_heads * c.width;
    c.key_stride = c.value_stride = c.query_stride;
  }
  c.position = static_cast<const int64_t*>(in[POSITION].data);
  c.cosine = static_cast<const float*>(in[COSINE].data);
  c.sine = static_cast<const float*>(in[SINE].data);
  c.rotated = in[COSINE].value != nullptr ? 2 * in[COSINE].sizes[1] : 0;
  int64_t most = c.rows, furthest = 0;
  if (in[COSINE].value != nullptr) most = std::min(most, in[COSINE].sizes[0]);
  if (in[BIAS].value != nullptr) {
    c.bias = static_cast<const float*>(in[BIAS].data), c.distances = in[BIAS].sizes[1];
    c.farthest = c.distances - OUTRIDER_ATTENTION_KEYS - 1;
    most = std::min(most, c.farthest + 1);
  }
  for (int64_t slot = 0; slot < c.slots; ++slot) {
    const int64_t first = c.position[slot];
    if (first < 0 || first > most - c.tokens) return ort::refuse(api, "a row is beyond the cache");
    furthest = std::max(furthest, first + c.tokens);
  }
  const int64_t shape[] = {c.slots, c.tokens, c.heads * c.value_width};
  void *out, *caches[2] = {in[KEYS].data, in[VALUES].data};
  if (ort::Status* status = ort::output(api, context, 0, shape, 3, &out)) return status;
  for (size_t i = 0; i < 2 && !reads; ++i) {
    const ort::Tensor& given = in[KEYS + i];
    if (ort::Status* status = ort::output(api, context, 1 + i, given.sizes, 4, &caches[i]))
      return status;
    const size_t cells = static_cast<size_t>(c.slots * c.key_heads * c.rows * given.sizes[3]);
    if (caches[i] != given.data)
      std::memcpy(caches[i], given.data, cells * (kernel.quantised ? 1 : sizeof(float)));
  }
  c.out = static_cast<float*>(out);
  c.keys = caches[0], c.values = caches[1];
  Work work = work_of(kernel, c, furthest);
  if (reads) return share_runs(api, context, &work);
  const int64_t heads = c.slots * c.key_heads;
  if (work.rows <= work.run)
    return ort::share(api, context, write_and_attend, heads, work.small, &work);
  ort::Status* status = ort::share(api, context, write_heads, heads, work.small, &work);
  return status == nullptr ? share_runs(api, context, &work) : status;
}

ort::Status* compute_of_source(void* made, ort::Context* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(made);
  const Api* api = kernel.api;
  ort::Tensor in[INPUTS];
  size_t given = 0;
  for (const Input i : OF_SOURCE)
    if (ort::Status* status = ort::input(api, context, given++, &in[i])) return status;
  if (!fits_source(kernel, in))
    return ort::refuse(api, "an input has another size than the others say");
  outrider_attention c = call_of(kernel, in);
  c.length = static_cast<const int64_t*>(in[POSITION].data);
  int64_t longest = 0;
  for (int64_t slot = 0; slot < c.slots; ++slot) {
    if (c.length[slot] < 1 || c.length[slot] > c.rows)
      return ort::refuse(api, "a source has as many rows as there are, or fewer, and one at least");
    longest = std::max(longest, c.length[slot]);
  }
  const int64_t shape[] = {c.slots, c.tokens, c.heads * c.width};
  void* out;
  if (ort::Status* status = ort::output(api, context, 0, shape, 3, &out)) return status;
  c.out = static_cast<float*>(out);
  Work work = work_of(kernel, c, longest);
  return share_runs(api, context, &work);
}

const char* name(const ort::Operator* made) {
  return quantised(made) ? "QuantizedCacheAttention" : "Attention";
}
const char* name_of_source(const ort::Operator*) { return "SourceAttention"; }
const char* provider(const ort::Operator*) { return nullptr; }
size_t input_count(const ort::Operator*) { return INPUTS; }
size_t input_count_of_source(const ort::Operator*) { return sizeof OF_SOURCE / sizeof *OF_SOURCE; }
int cache_type(const ort::Operator* made) { return quantised(made) ? ort::INT8 : ort::FLOAT; }
int input_type(const ort::Operator* made, size_t index) {
  if (index == KEYS || index == VALUES) return cache_type(made);
  return index == POSITION ? ort::INT64 : ort::FLOAT;
}
int input_type_of_source(const ort::Operator* made, size_t index) {
  return input_type(made, OF_SOURCE[index]);
}
int input_characteristic_of_source(const ort::Operator*, size_t index) {
  return OF_SOURCE[index] >= SINKS ? ort::OPTIONAL : ort::REQUIRED;
}
int input_characteristic(const ort::Operator*, size_t index) {
  return index == KEY || index == VALUE || index >= COSINE ? ort::OPTIONAL : ort::REQUIRED;
}
size_t output_count(const ort::Operator*) { return 3; }
size_t one(const ort::Operator*) { return 1; }
int output_type(const ort::Operator* made, size_t index) {
  return index == 0 ? ort::FLOAT : cache_type(made);
}
int required(const ort::Operator*, size_t) { return ort::REQUIRED; }
int output_characteristic(const ort::Operator*, size_t index) {
  return index == 0 ? ort::REQUIRED : ort::OPTIONAL;
}
int memory(const ort::Operator*, size_t) { return 0; }
void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }
int version(const ort::Operator*) { return 1; }

} // namespace

const ort::Operator ort::ATTENTION = {
    ort::API_VERSION, nullptr, name, provider, input_type, input_count, output_type, output_count,
    nullptr, destroy, input_characteristic, output_characteristic, memory, {}, create, compute,
    nullptr, version, version, {}};

const ort::Operator ort::QUANTISED_ATTENTION = ort::ATTENTION; // told from it by its address

const ort::Operator ort::SOURCE_ATTENTION = {
    ort::API_VERSION, nullptr, name_of_source, provider, input_type_of_source,
    input_count_of_source, output_type, one, nullptr, destroy, input_characteristic_of_source,
    required, memory, {}, create, compute_of_source, nullptr, version, version, {}};
