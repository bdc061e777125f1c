#include "engine.h"

#include <string.h>

#include <algorithm>
#include <chrono>

namespace outrider {

int64_t HeldRows::common(int32_t slot, const Tokens& text) const {
  const Tokens& held = tokens_[slot];
  const size_t most = std::min(held.size(), text.size());
  size_t i = 0;
  while (i < most && held[i] == (text[i] < vocab_size_ ? text[i] : 0)) ++i;
  return static_cast<int64_t>(i);
}

void HeldRows::cut(int32_t slot, int64_t length) {
  if (length < this->length(slot)) tokens_[slot].resize(length);
}

void HeldRows::wrote(int32_t slot, const int64_t* ids, int64_t count, int64_t start) {
  cut(slot, start);
  if (length(slot) == start) // rows behind a gap are those of no text
    tokens_[slot].insert(tokens_[slot].end(), ids, ids + count);
}

template <class T> Engine::Memory<T> Engine::zeros(int64_t count) {
  void* memory = calloc(std::max<size_t>(1, static_cast<size_t>(count)), sizeof(T));
  if (memory == nullptr)
    fail(OUTRIDER_FAILED_MEMORY, "not enough memory for caches and logits",
         "Free some, use fewer slots, or build with a smaller MAX_LEN");
  return Memory<T>(static_cast<T*>(memory));
}

Engine::Engine(const ort::Library& library, const std::string& folder, const ModelFacts& facts,
               int32_t slot_count, int32_t widest, int32_t buffers, int threads,
               int32_t narrowest_call)
    : slots(slot_count), vocab_size(facts.vocab_size), narrowest(narrowest_call),
      capacity(facts.capacity), chunk(std::min(CHUNK, facts.capacity)),
      held(slot_count, facts.vocab_size),
      model_(library, folder + "/" + facts.file, facts.dtype, threads),
      cache_type_(ort::type_of(facts.cache)), widest_(widest) {
  const auto side = [&](const char* name, const std::vector<std::pair<int64_t, int64_t>>& shapes) {
    for (size_t layer = 0; layer < shapes.size(); ++layer)
      caches_.push_back({name + std::to_string(layer), shapes[layer].first, shapes[layer].second, {}});
  };
  side("key_", facts.keys);
  side("value_", facts.values);
  ids_ = zeros<int64_t>(slots * chunk);
  position_ = zeros<int64_t>(slots);
  index_ = zeros<int64_t>(widest);
  logits_ = zeros<float>(int64_t{buffers} * slots * widest * vocab_size);
}

LogitsView Engine::forward(const Tokens& ids, const Tokens& position, int64_t since,
                           int64_t outputs, int32_t first, int32_t buffer) {
  const auto batch = static_cast<int64_t>(position.size());
  const int64_t width = static_cast<int64_t>(ids.size()) / batch;
  reserve(position, width);
  std::copy(ids.begin(), ids.end(), ids_.get());
  std::copy(position.begin(), position.end(), position_.get());
  for (int64_t k = 0; k < outputs; ++k) index_[k] = since + k;
  const std::array<int64_t, 5> shape = {first, batch, width, outputs, buffer};
  for (int64_t b = 0; b < batch; ++b)
    held.cut(static_cast<int32_t>(first + b), position[b]); // a call that fails leaves nothing there
  if (width <= widest_) { // steps and verifications; prefill widths vary too much
    const auto found = calls_.find(shape);
    run(found != calls_.end()
            ? found->second
            : calls_.emplace(shape, prepare(first, batch, width, outputs, buffer)).first->second);
  } else {
    run(prepare(first, batch, width, outputs, buffer));
  }
  for (int64_t b = 0; b < batch; ++b)
    held.wrote(static_cast<int32_t>(first + b), ids.data() + b * width, width, position[b]);
  return {logits_.get() + int64_t{buffer} * slots * widest_ * vocab_size, outputs, vocab_size};
}

void Engine::run(const ort::Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  model_.run(call);
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

LogitsView Engine::prefill(int32_t slot, const Tokens& tokens, int64_t start, int64_t end) {
  LogitsView row{};
  for (int64_t at = start; at < end; at += chunk) {
    const int64_t count = std::min(chunk, end - at);
    Tokens ids(std::max<int64_t>(count, narrowest)); // zeros behind lie beyond the valid rows
    for (int64_t i = 0; i < count; ++i) ids[i] = readable(tokens[at + i]);
    row = forward(ids, {at}, count - 1, 1, slot);
  }
  return row;
}

void Engine::clear(int32_t slot) {
  for (Cache& cache : caches_) {
    const int64_t size = slot_bytes(cache);
    if (rows_ > 0) memset(cache.data.get() + slot * size, 0, static_cast<size_t>(size));
  }
  held.cut(slot, 0);
}

int64_t Engine::slot_bytes(const Cache& cache) const {
  return cache.heads * rows_ * cache.width * static_cast<int64_t>(ort::bytes_of(cache_type_));
}

ort::Call Engine::prepare(int32_t first, int64_t batch, int64_t width, int64_t outputs,
                          int32_t buffer) {
  const std::vector<ort::NamedTensor> inputs = {
      {"input_ids", ids_.get(), {batch, width}, ort::INT64},
      {"position", position_.get(), {batch}, ort::INT64},
      {"logits_index", index_.get(), {outputs}, ort::INT64},
  };
  std::vector<ort::NamedTensor> caches;
  for (const Cache& cache : caches_) {
    caches.push_back({cache.name, cache.data.get() + first * slot_bytes(cache),
                      {batch, cache.heads, rows_, cache.width}, cache_type_});
  }
  float* const logits = logits_.get() + int64_t{buffer} * slots * widest_ * vocab_size;
  return model_.bind(inputs, {"logits", logits, {batch, outputs, vocab_size}, ort::FLOAT}, caches);
}

// Enough rows for this call, and not many more: a graph may read all S, valid or not. S doubles from
// FIRST_ROWS to the capacity. With one slot, another text starts small again.
void Engine::reserve(const Tokens& position, int64_t width) {
  const int64_t need = *std::max_element(position.begin(), position.end()) + width;
  const int64_t start = position[0];
  // No round goes back this far: it is another text, of which the first rows may be known.
  const bool another =
      slots == 1 && (start == 0 || held.length(0) - start > 2 * OUTRIDER_MAX_WIDTH);
  if (need <= rows_ && !(another && need <= rows_ / 2 && rows_ / 2 >= FIRST_ROWS)) return;
  int64_t rows = FIRST_ROWS;
  while (rows < need) rows *= 2;
  rows = std::min(rows, capacity);
  const int64_t kept = another ? start : rows_;
  const auto element = static_cast<int64_t>(ort::bytes_of(cache_type_));
  std::vector<Memory<char>> other; // whole before it is used
  for (const Cache& cache : caches_) {
    other.push_back(zeros<char>(int64_t{slots} * cache.heads * rows * cache.width * element));
    const int64_t row = cache.width * element;
    for (int64_t plane = 0; kept > 0 && plane < slots * cache.heads; ++plane)
      memcpy(other.back().get() + plane * rows * row, cache.data.get() + plane * rows_ * row,
             static_cast<size_t>(kept * row));
  }
  if (another) held.cut(0, kept);
  calls_.clear(); // they have the addresses
  for (size_t i = 0; i < caches_.size(); ++i) caches_[i].data = std::move(other[i]);
  rows_ = rows;
}

} // namespace outrider
