// One model with its cache slots, whatever runs it: runtime/backends/engine.py in C++.
//
// A slot's length is the caller's: rows at or beyond the position of a call are overwritten by it or
// masked in it, so rolling back is calling with a lower position.
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

constexpr int64_t CHUNK = 256; // tokens of one prefill call; bounds the activations

// What an engine's rows were computed from: an account of its calls, slot by slot. states: of which
// the last rows alone are there; a text goes on where those that a call reads are among them.
class HeldRows {
public:
  HeldRows(int32_t slots, int32_t vocab_size, std::optional<StateFacts> states)
      : tokens_(slots), least_(slots), vocab_size_(vocab_size), states_(std::move(states)) {}
  int64_t length(int32_t slot) const { return static_cast<int64_t>(tokens_[slot].size()); }
  bool carries() const { return states_.has_value(); } // a recurrent state, in few rows
  int64_t common(int32_t slot, const Tokens& text) const; // tokens that both begin with
  // Where a text whose first rows these are goes on: there, or at its beginning.
  int64_t resumes(int32_t slot, int64_t length) const;
  void cut(int32_t slot, int64_t length);
  // A call of `width` tokens begins; one that fails leaves nothing of use there.
  void overwrites(int32_t slot, int64_t start, int64_t width);
  void wrote(int32_t slot, const int64_t* ids, int64_t count, int64_t start);

private:
  std::vector<Tokens> tokens_;
  std::vector<int64_t> least_; // the shortest text that goes on where it ends, but for an empty one
  int64_t vocab_size_;         // ids beyond are read as 0
  std::optional<StateFacts> states_;
};

// Logits [slots of the call, K, V] in an engine's memory, until its next call with that buffer.
struct LogitsView {
  float* data;
  int64_t outputs, vocab_size;
  float* row(int64_t slot, int64_t k = 0) const { return data + (slot * outputs + k) * vocab_size; }
};

// N = width consecutive tokens for each of B = batch slots from `first` on. ids [B, N]; position [B]:
// the row that the first of them goes to. Logits of tokens number `since` up to `outputs` + `since` - 1.
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

  // Rows start .. of `tokens` in chunks; the logits after the last one.
  LogitsView prefill(int32_t slot, const Tokens& tokens, int64_t start, int64_t end);

  // Empty a slot whose rows may hold NaN: masked rows are multiplied too.
  void clear(int32_t slot);

  // Tokens beyond its vocabulary are read as 0.
  Tokens readable(Tokens tokens) const;

  const int32_t slots, vocab_size, narrowest;
  const int64_t capacity, chunk;
  HeldRows held;
  double seconds = 0; // in calls

protected:
  // slots: that it has. narrowest: the least N of a call that gives a text's tokens.
  Engine(const ModelFacts& facts, int32_t slots, int32_t narrowest);

private:
  // Before a call, whose rows lie within the capacity. Throws Failure, and nothing has changed then.
  virtual void reserve(const Tokens&, int64_t) {}
  // Logits [B, K, V]. Throws Failure.
  virtual float* compute(const EngineCall& call) = 0;
  // Zeros in all rows of a slot. Throws Failure.
  virtual void wipe(int32_t slot) = 0;
};

} // namespace outrider
#endif
