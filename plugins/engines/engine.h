// One model with its cache slots, on any backend: runtime/backends/engine.py in C++.
//
// The caller keeps the length of each slot. A call overwrites or masks the rows at and beyond its
// position, so calling with a lower position rolls back.
#ifndef OUTRIDER_ENGINES_ENGINE_H
#define OUTRIDER_ENGINES_ENGINE_H

#include <stdint.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "files/bundle.h"

namespace outrider {

using Tokens = std::vector<int64_t>;

constexpr int64_t CHUNK = 256; // tokens per prefill call; bounds the activations' memory
constexpr int64_t MIN_COPIED_ROWS = 16; // copying fewer takes as long as computing them

// Records, for each slot, the tokens that its cache rows were computed from. states: of a recurrent
// state, only the last rows are kept, so a sequence can continue only where a call finds its rows
// among them.
class CachedRows {
public:
  CachedRows(int32_t slots, int32_t vocab_size, std::optional<StateFacts> states)
      : tokens_(slots), min_resume_(slots), vocab_size_(vocab_size), states_(std::move(states)) {}
  int64_t length(int32_t slot) const { return static_cast<int64_t>(tokens_[slot].size()); }
  bool has_state() const { return states_.has_value(); }
  int64_t common_prefix(int32_t slot, const Tokens& text) const; // its length
  // The row at which a sequence can continue whose first `length` rows are held: `length`, or 0.
  int64_t resume_position(int32_t slot, int64_t length) const;
  void truncate(int32_t slot, int64_t length);
  // A call of `width` tokens begins. Noted before it runs: if it fails, these rows are lost.
  void begin_call(int32_t slot, int64_t start, int64_t width);
  void end_call(int32_t slot, const int64_t* ids, int64_t count, int64_t start);
  // The first rows of a slot were copied to another one.
  void copy(int32_t from, int32_t to, int64_t length);

private:
  std::vector<Tokens> tokens_;
  std::vector<int64_t> min_resume_; // the shortest non-empty prefix that can be continued
  int64_t vocab_size_;              // ids from here on are read as 0
  std::optional<StateFacts> states_;
};

// Logits [slots of the call, K, V] in an engine's buffer, valid until its next call with that one.
struct LogitsView {
  float* data;
  int64_t outputs, vocab_size;
  float* row(int64_t slot, int64_t k = 0) const { return data + (slot * outputs + k) * vocab_size; }
};

// A call: N = width consecutive tokens for each of B = batch slots from `first` on. ids [B, N];
// position [B]: the row of the first token. Returns K = outputs rows of logits per slot, after the
// tokens from number `since` on.
struct EngineCall {
  const int64_t *ids, *position;
  int64_t batch, width, since, outputs;
  int32_t first, buffer;
};

class Engine {
public:
  virtual ~Engine() = default;

  LogitsView forward(const Tokens& ids, const Tokens& position, int64_t since, int64_t outputs,
                     int32_t first, int32_t buffer = 0);

  // Compute rows start .. end - 1 of `tokens` in chunks; returns the logits after the last one.
  LogitsView prefill(int32_t slot, const Tokens& tokens, int64_t start, int64_t end);

  // Copy rows of the first `count` tokens from the slot that holds most of them, if `slot` holds
  // fewer. held: how many it holds. Returns how many it then holds.
  int64_t copy_prefix(int32_t slot, const Tokens& tokens, int64_t count, int64_t held);

  // Zero a slot whose rows may hold NaN, because masked rows are multiplied (by 0) too.
  void clear(int32_t slot);

  // The tokens with 0 in place of those outside the vocabulary.
  Tokens replace_unknown_ids(Tokens tokens) const;

  const int32_t slots, vocab_size, min_width;
  const int64_t capacity, chunk;
  CachedRows cached_rows;
  bool copies_rows = false; // whether `copy_prefix` copies; needs an engine that overrides `copy`
  double seconds = 0; // total time of calls

protected:
  // min_width: the smallest N of a call that computes output tokens.
  Engine(const ModelFacts& facts, int32_t slots, int32_t min_width);

private:
  // Make room for a call, whose rows are within the capacity. On Failure, nothing has changed.
  virtual void reserve(const Tokens&, int64_t) {}
  // Returns logits [B, K, V]. Throws Failure.
  virtual float* compute(const EngineCall& call) = 0;
  // Zero all rows of a slot. Throws Failure.
  virtual void wipe(int32_t slot) = 0;
  // Copy the first rows of a slot, which a call has written, to another one.
  virtual void copy(int32_t, int32_t, int64_t) {}
};

} // namespace outrider
#endif
