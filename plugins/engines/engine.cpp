#include "engine.h"

#include <algorithm>
#include <chrono>

namespace outrider {

int64_t CachedRows::common_prefix(int32_t slot, const Tokens& text) const {
  const Tokens& held = tokens_[slot];
  const size_t limit = std::min(held.size(), text.size());
  size_t i = 0;
  while (i < limit && held[i] == (text[i] < vocab_size_ ? text[i] : 0)) ++i;
  return static_cast<int64_t>(i);
}

int64_t CachedRows::resume_position(int32_t slot, int64_t length) const {
  return length >= min_resume_[slot] ? length : 0;
}

void CachedRows::truncate(int32_t slot, int64_t length) {
  if (length < this->length(slot)) tokens_[slot].resize(length);
}

void CachedRows::begin_call(int32_t slot, int64_t start, int64_t width) {
  truncate(slot, start);
  if (states_)
    min_resume_[slot] =
        std::max(start > 0 ? min_resume_[slot] : 0, start + width - states_->rows + states_->reach);
}

void CachedRows::end_call(int32_t slot, const int64_t* ids, int64_t count, int64_t start) {
  if (length(slot) == start) // rows after a gap belong to no sequence
    tokens_[slot].insert(tokens_[slot].end(), ids, ids + count);
}

void CachedRows::copy(int32_t from, int32_t to, int64_t length) {
  tokens_[to].assign(tokens_[from].begin(), tokens_[from].begin() + length);
}

Engine::Engine(const ModelFacts& facts, int32_t slot_count, int32_t min_call_width)
    : slots(slot_count), vocab_size(facts.vocab_size), min_width(min_call_width),
      capacity(facts.capacity), chunk(std::min(CHUNK, facts.capacity)),
      cached_rows(slot_count, facts.vocab_size, facts.states) {}

LogitsView Engine::forward(const Tokens& ids, const Tokens& position, int64_t since,
                           int64_t outputs, int32_t first, int32_t buffer) {
  const auto batch = static_cast<int64_t>(position.size());
  const int64_t width = static_cast<int64_t>(ids.size()) / batch;
  reserve(position, width);
  for (int64_t b = 0; b < batch; ++b)
    cached_rows.begin_call(static_cast<int32_t>(first + b), position[b], width);
  const auto begin = std::chrono::steady_clock::now();
  float* const logits =
      compute({ids.data(), position.data(), batch, width, since, outputs, first, buffer});
  seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  for (int64_t b = 0; b < batch; ++b)
    cached_rows.end_call(static_cast<int32_t>(first + b), ids.data() + b * width, width,
                        position[b]);
  return {logits, outputs, vocab_size};
}

LogitsView Engine::prefill(int32_t slot, const Tokens& tokens, int64_t start, int64_t end) {
  LogitsView row{};
  for (int64_t at = start; at < end; at += chunk) {
    const int64_t count = std::min(chunk, end - at);
    Tokens ids = replace_unknown_ids(Tokens(tokens.begin() + at, tokens.begin() + at + count));
    ids.resize(std::max<int64_t>(count, min_width)); // padding goes to rows that are not valid
    row = forward(ids, {at}, count - 1, 1, slot);
  }
  return row;
}

int64_t Engine::copy_prefix(int32_t slot, const Tokens& tokens, int64_t count, int64_t held) {
  if (!copies_rows) return held;
  int32_t other = -1;
  int64_t most = held + MIN_COPIED_ROWS - 1;
  for (int32_t i = 0; i < slots; ++i) {
    const int64_t common = i == slot ? 0 : std::min(count, cached_rows.common_prefix(i, tokens));
    if (common > most) other = i, most = common;
  }
  if (other < 0) return held;
  if (most == count - 1) --most; // a call of one token may round differently from wider ones
  cached_rows.copy(other, slot, most); // first, as it may fail
  copy(other, slot, most);
  return most;
}

Tokens Engine::replace_unknown_ids(Tokens tokens) const {
  for (int64_t& token : tokens)
    if (token >= vocab_size) token = 0;
  return tokens;
}

void Engine::clear(int32_t slot) {
  cached_rows.truncate(slot, 0);
  wipe(slot);
}

} // namespace outrider
