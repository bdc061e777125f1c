// A model on the CPU, run by ONNX Runtime: runtime/backends/host.py in C++.
#ifndef OUTRIDER_ENGINES_HOST_ENGINE_H
#define OUTRIDER_ENGINES_HOST_ENGINE_H

#include <stdlib.h>

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "ort_model.h"

namespace outrider {

constexpr int64_t FIRST_ROWS = 256; // initial rows of a slot; they double as sequences grow

class HostEngine final : public Engine {
public:
  // widest: the largest K of a call. buffers: number of calls with kept logits. Throws Failure.
  HostEngine(const ort::Library& library, const std::string& folder, const ModelFacts& facts,
             int32_t slots, int32_t widest, int32_t buffers, int threads, int32_t min_width);

  // Bytes of memory for slots with short sequences: FIRST_ROWS of cache, states and logits.
  static double min_bytes(const ModelFacts& facts, int32_t slots, int32_t widest, int32_t buffers);

private:
  struct MemoryFreer {
    void operator()(void* memory) const { free(memory); }
  };
  template <class T> using Memory = std::unique_ptr<T[], MemoryFreer>;
  struct Cache {
    std::string name;
    int64_t heads, width; // width: elements per row
    int type;
    int64_t ring;      // fixed number of rows of a state; 0: keys or values, whose rows grow
    Memory<char> data; // [slots, heads, rows, width]
  };
  void reserve(const Tokens& position, int64_t width) override;
  float* compute(const EngineCall& call) override;
  void wipe(int32_t slot) override;
  void copy(int32_t from, int32_t to, int64_t rows) override;
  static int64_t row_bytes(const Cache& cache);
  int64_t rows_of(const Cache& cache) const; // the current number
  int64_t slot_bytes(const Cache& cache) const;
  template <class T> static Memory<T> zeros(int64_t count);
  float* logits(int32_t buffer) const;
  ort::Call prepare(const EngineCall& call);

  ort::Model model_;
  const int64_t widest_;
  std::vector<Cache> caches_;
  int64_t rows_ = 0; // current S of keys and values, which grows with the longest sequence
  Memory<int64_t> ids_, position_, index_;
  Memory<float> logits_; // [buffers, slots * widest * V]
  std::map<std::array<int64_t, 5>, ort::Call> calls_;
};

} // namespace outrider
#endif
