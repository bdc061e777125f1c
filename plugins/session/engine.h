// One model with its cache slots: runtime/backends/host.py in C++.
//
// A slot's length is the caller's: rows at or beyond the position of a call are overwritten by it or
// masked in it, so rolling back is calling with a lower position.
#ifndef OUTRIDER_SESSION_ENGINE_H
#define OUTRIDER_SESSION_ENGINE_H

#include <stdlib.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "files/bundle.h"
#include "outrider_ort_model.h"

namespace outrider {

using Tokens = std::vector<int64_t>;

constexpr int64_t CHUNK = 256;      // tokens of one prefill call; bounds the activations
constexpr int64_t FIRST_ROWS = 256; // of a slot; they double as texts grow

// What an engine's rows were computed from: an account of its calls, slot by slot.
class HeldRows {
public:
  HeldRows(int32_t slots, int32_t vocab_size) : tokens_(slots), vocab_size_(vocab_size) {}
  int64_t length(int32_t slot) const { return static_cast<int64_t>(tokens_[slot].size()); }
  int64_t common(int32_t slot, const Tokens& text) const; // tokens that both begin with
  void cut(int32_t slot, int64_t length);
  void wrote(int32_t slot, const int64_t* ids, int64_t count, int64_t start);

private:
  std::vector<Tokens> tokens_;
  int64_t vocab_size_; // ids beyond are read as 0
};

// Logits [slots of the call, K, V] in an engine's memory, until its next call with that buffer.
struct LogitsView {
  float* data;
  int64_t outputs, vocab_size;
  float* row(int64_t slot, int64_t k = 0) const { return data + (slot * outputs + k) * vocab_size; }
};

class Engine {
public:
  // widest: the largest K of a call. buffers: calls whose logits it holds. narrowest: the least N of
  // a call that gives a text's tokens. Throws Failure.
  Engine(const ort::Library& library, const std::string& folder, const ModelFacts& facts,
         int32_t slots, int32_t widest, int32_t buffers, int threads, int32_t narrowest);

  // N consecutive tokens for each of B slots from `first` on. ids [B, N]; position [B]: the row that
  // the first of them goes to. Logits of tokens number `since` up to `outputs` + `since` - 1.
  LogitsView forward(const Tokens& ids, const Tokens& position, int64_t since, int64_t outputs,
                     int32_t first, int32_t buffer = 0);

  // Rows start .. of `tokens` in chunks; the logits after the last one.
  LogitsView prefill(int32_t slot, const Tokens& tokens, int64_t start, int64_t end);

  // Empty a slot whose rows may hold NaN: masked rows are multiplied too.
  void clear(int32_t slot);

  int64_t readable(int64_t token) const { return token < vocab_size ? token : 0; }

  const int32_t slots, vocab_size, narrowest;
  const int64_t capacity, chunk;
  HeldRows held;
  double seconds = 0; // in ONNX Runtime's calls

private:
  struct Freed {
    void operator()(void* memory) const { free(memory); }
  };
  template <class T> using Memory = std::unique_ptr<T[], Freed>;
  struct Cache {
    std::string name;
    int64_t heads, width; // width in elements
    Memory<char> data;    // [slots, heads, rows, width]
  };
  int64_t slot_bytes(const Cache& cache) const; // with the rows that there are now
  template <class T> static Memory<T> zeros(int64_t count);
  ort::Call prepare(int32_t first, int64_t batch, int64_t width, int64_t outputs, int32_t buffer);
  void run(const ort::Call& call);
  void reserve(const Tokens& position, int64_t width);

  ort::Model model_;
  const int cache_type_;
  const int64_t widest_;
  std::vector<Cache> caches_;
  int64_t rows_ = 0; // S, for now: it grows with the longest text
  Memory<int64_t> ids_, position_, index_;
  Memory<float> logits_; // [buffers, slots * widest * V]
  std::map<std::array<int64_t, 5>, ort::Call> calls_;
};

} // namespace outrider
#endif
