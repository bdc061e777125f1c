// One model compiled by TensorRT, on a GPU: runtime/backends/tensorrt.py in C++. Works with the
// headers of TensorRT 10.15 and newer, and 11.
//
// Every call captured in a CUDA graph has its own execution context, because replays read the
// current state of their context. All contexts share one scratch memory: calls run one after
// another, on one stream.
#ifndef OUTRIDER_ENGINES_TENSORRT_MODEL_H
#define OUTRIDER_ENGINES_TENSORRT_MODEL_H

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

#include "gpu.h"
#include "engines/table.h"

namespace outrider {

// Collects TensorRT's error messages, which it reports only to its logger and from any of its
// threads (ILogger, NvInferRuntime.h).
class Log final : public nvinfer1::ILogger {
public:
  void log(Severity severity, const char* message) noexcept override;
  std::string take_error(); // the first error since the last call, as one line

private:
  std::mutex mutex_;
  std::string error_;
};

class TensorRtModel {
public:
  explicit TensorRtModel(const ModelSpec& spec); // throws Failure, as do the other members
  ~TensorRtModel();
  TensorRtModel(const TensorRtModel&) = delete;
  TensorRtModel& operator=(const TensorRtModel&) = delete;

  float* compute(const EngineCall& call);
  void wipe(int32_t slot);

private:
  using Context = std::unique_ptr<nvinfer1::IExecutionContext>;
  using Shape = std::array<int64_t, 4>; // first, B, N, K
  struct Cache {
    std::string name;
    CUdeviceptr data; // [slots, heads, capacity, width]
    int64_t heads, width, slot_bytes;
  };
  struct Step { // a kept call: a step or a verification
    Context context;
    CUgraphExec graph = nullptr;
    bool uncapturable = false; // it cannot be captured in a graph
  };
  struct Inputs { // int64: ids [slots * N], positions [slots], or indices of tokens with logits [K]
    int64_t* host; // page-locked
    CUdeviceptr device;
  };

  void open(const ModelSpec& spec, nvinfer1::DataType type);
  void load(const std::string& file);
  void check_free_memory(int64_t need) const;
  void check_tensors(const std::string& file, nvinfer1::DataType type) const;
  Inputs allocate_inputs(int64_t count);
  int32_t profile_of(const EngineCall& call) const;
  Context make_context(int32_t profile);
  void bind(nvinfer1::IExecutionContext& context, const EngineCall& call);
  bool enqueue(nvinfer1::IExecutionContext& context, const EngineCall& call);
  void run(nvinfer1::IExecutionContext& context, const EngineCall& call);
  void step(const EngineCall& call);
  void drop_steps();

  // Declared in order of dependency.
  Cuda cuda_;
  Log log_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  const int64_t slots_, vocab_size_, widest_, capacity_;
  std::vector<std::array<SizeRange, 3>> profiles_; // ranges of B, N and K
  std::vector<Cache> caches_;
  Inputs ids_{}, position_{}, index_{};
  CUdeviceptr scratch_ = 0, logits_ = 0; // logits: [slots * widest * V], of one call
  int64_t activations_ = 0;              // bytes of `scratch_`
  float* host_logits_ = nullptr;         // [buffers, slots * widest * V] on the host, page-locked
  std::map<int32_t, Context> contexts_;  // by profile, for calls that are not captured
  std::map<Shape, Step> steps_;
};

} // namespace outrider
#endif
