#include "host_engine.h"

#include <string.h>

namespace outrider {

namespace {

constexpr size_t MAX_CALLS = 1024; // kept calls: kilobytes each, more for a deep model

} // namespace

template <class T> HostEngine::Memory<T> HostEngine::zeros(int64_t count) {
  void* memory = calloc(std::max<size_t>(1, static_cast<size_t>(count)), sizeof(T));
  if (memory == nullptr)
    fail(OUTRIDER_FAILED_MEMORY, "not enough memory for caches and logits",
         "Free some memory, use fewer slots, or build with a smaller MAX_LEN");
  return Memory<T>(static_cast<T*>(memory));
}

HostEngine::HostEngine(const ort::Library& library, const std::string& folder,
                       const ModelFacts& facts, int32_t slot_count, int32_t widest, int32_t buffers,
                       int threads, int32_t min_call_width)
    : Engine(facts, slot_count, min_call_width),
      model_(library, folder + "/" + facts.file, facts.dtype, threads),
      widest_(widest) {
  const auto add_caches = [&](const char* name, const std::vector<CacheShape>& shapes, int type,
                              int64_t ring) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto& [heads, width] = shapes[i];
      caches_.push_back({name + std::to_string(i), heads, width, type, ring, {}});
    }
  };
  const int type = ort::type_of(facts.cache);
  add_caches("key_", facts.keys, type, 0);
  add_caches("value_", facts.values, type, 0);
  if (facts.states) add_caches("state_", facts.states->shapes, ort::FLOAT, facts.states->rows);
  for (Cache& cache : caches_)
    if (cache.ring > 0) cache.data = zeros<char>(slots * slot_bytes(cache));
  ids_ = zeros<int64_t>(slots * chunk);
  position_ = zeros<int64_t>(slots);
  index_ = zeros<int64_t>(widest);
  logits_ = zeros<float>(int64_t{buffers} * slots * widest * vocab_size);
}

double HostEngine::min_bytes(const ModelFacts& facts, int32_t slots, int32_t widest,
                             int32_t buffers) {
  double row = 0;
  for (const auto* side : {&facts.keys, &facts.values})
    for (const auto& [heads, width] : *side) row += static_cast<double>(heads * width);
  double states = 0;
  if (facts.states)
    for (const auto& [heads, width] : facts.states->shapes)
      states += 4.0 * static_cast<double>(heads * width * facts.states->rows);
  const double element = static_cast<double>(ort::bytes_of(ort::type_of(facts.cache)));
  const double rows = static_cast<double>(std::min(FIRST_ROWS, facts.capacity));
  const double logits = 4.0 * widest * buffers * facts.vocab_size;
  return slots * (row * element * rows + states + logits);
}

float* HostEngine::logits(int32_t buffer) const {
  return logits_.get() + int64_t{buffer} * slots * widest_ * vocab_size;
}

float* HostEngine::compute(const EngineCall& call) {
  std::copy(call.ids, call.ids + call.batch * call.width, ids_.get());
  std::copy(call.position, call.position + call.batch, position_.get());
  for (int64_t k = 0; k < call.outputs; ++k) index_[k] = call.since + k;
  const std::array<int64_t, 5> shape = {call.first, call.batch, call.width, call.outputs,
                                        call.buffer};
  if (call.width <= widest_) { // steps and verifications; prefill widths vary too much
    auto found = calls_.find(shape);
    if (found == calls_.end()) {
      if (calls_.size() >= MAX_CALLS) calls_.clear(); // there is one per span and width
      found = calls_.emplace(shape, prepare(call)).first;
    }
    model_.run(found->second);
  } else {
    model_.run(prepare(call));
  }
  return logits(call.buffer);
}

void HostEngine::wipe(int32_t slot) {
  for (Cache& cache : caches_) {
    const int64_t size = slot_bytes(cache);
    if (cache.data) memset(cache.data.get() + slot * size, 0, static_cast<size_t>(size));
  }
}

void HostEngine::copy(int32_t from, int32_t to, int64_t rows) {
  for (Cache& cache : caches_)
    for (int64_t head = 0; head < cache.heads; ++head) {
      char* const plane = cache.data.get() + head * rows_of(cache) * row_bytes(cache);
      memcpy(plane + to * slot_bytes(cache), plane + from * slot_bytes(cache),
             static_cast<size_t>(rows * row_bytes(cache)));
    }
}

int64_t HostEngine::row_bytes(const Cache& cache) {
  return cache.width * static_cast<int64_t>(ort::bytes_of(cache.type));
}

int64_t HostEngine::rows_of(const Cache& cache) const {
  return cache.ring > 0 ? cache.ring : rows_;
}

int64_t HostEngine::slot_bytes(const Cache& cache) const {
  return cache.heads * rows_of(cache) * row_bytes(cache);
}

ort::Call HostEngine::prepare(const EngineCall& call) {
  const std::vector<ort::NamedTensor> inputs = {
      {"input_ids", ids_.get(), {call.batch, call.width}, ort::INT64},
      {"position", position_.get(), {call.batch}, ort::INT64},
      {"logits_index", index_.get(), {call.outputs}, ort::INT64},
  };
  std::vector<ort::NamedTensor> caches;
  for (const Cache& cache : caches_) {
    caches.push_back({cache.name, cache.data.get() + call.first * slot_bytes(cache),
                      {call.batch, cache.heads, rows_of(cache), cache.width}, cache.type});
  }
  const std::vector<int64_t> sizes = {call.batch, call.outputs, vocab_size};
  return model_.bind(inputs, {"logits", logits(call.buffer), sizes, ort::FLOAT}, caches);
}

// Provide enough rows of keys and values for this call, but not many more: a graph may read all S
// rows, valid or not. S doubles from FIRST_ROWS up to the capacity. With one slot, a new sequence
// starts small again.
void HostEngine::reserve(const Tokens& position, int64_t width) {
  const int64_t need = *std::max_element(position.begin(), position.end()) + width;
  const int64_t start = position[0];
  // No round goes back this far, so it is a new sequence, some of whose first rows may be reused.
  const bool new_sequence =
      slots == 1 && (start == 0 || cached_rows.length(0) - start > 2 * OUTRIDER_MAX_WIDTH);
  if (need <= rows_ && !(new_sequence && need <= rows_ / 2 && rows_ / 2 >= FIRST_ROWS)) return;
  int64_t rows = FIRST_ROWS;
  while (rows < need) rows *= 2;
  rows = std::min(rows, capacity);
  const int64_t kept = new_sequence ? start : rows_;
  std::vector<Memory<char>> grown(caches_.size()); // allocated in full before anything changes
  for (size_t i = 0; i < caches_.size(); ++i) {
    const Cache& cache = caches_[i];
    if (cache.ring > 0) continue;
    const int64_t row = row_bytes(cache);
    grown[i] = zeros<char>(int64_t{slots} * cache.heads * rows * row);
    for (int64_t plane = 0; kept > 0 && plane < slots * cache.heads; ++plane)
      memcpy(grown[i].get() + plane * rows * row, cache.data.get() + plane * rows_ * row,
             static_cast<size_t>(kept * row));
  }
  if (new_sequence) cached_rows.truncate(0, kept);
  calls_.clear(); // they hold the old addresses
  for (size_t i = 0; i < caches_.size(); ++i)
    if (grown[i]) caches_[i].data = std::move(grown[i]);
  rows_ = rows;
}

} // namespace outrider
