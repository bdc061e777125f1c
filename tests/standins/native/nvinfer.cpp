// TensorRT without a GPU, compiled against its own headers: contexts that check their inputs, and
// in place of kernels a toy model, which tests/session/toy_model.py implements too.
//
// A cache row holds the token that was written there, and a row's logits depend on all tokens up to
// it: a stale row, a wrong position or another slot's row gives different logits, and a row that
// was never written gives NaN. stubs.h, generated from NvInferImpl.h, aborts in every function of
// apiv that is not implemented here.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <dlfcn.h>

#include <NvInferRuntime.h>

#include "stubs.h"

#define API extern "C" __attribute__((visibility("default")))

API void standin_enqueue(cudaStream_t, void (*)(void*), void (*)(void*), void*);
API bool standin_current();
API bool standin_capturing();
API bool standin_holds(const void*, size_t);

namespace {

using namespace nvinfer1;

constexpr uint16_t POISON = 0xffff; // NaN in a cache, as is every value that is not a token's

void want_context() { // checked by destructors
  if (!standin_current()) missing("a current context");
  if (standin_capturing()) missing("an end of the capture");
}

uint64_t mix(uint64_t x) { // splitmix64's finaliser
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// A plan file: "name value" pairs.
struct Plan {
  std::map<std::string, std::string> texts;
  int64_t number(const std::string& name) const { return std::stoll(texts.at(name)); }
  bool has(const std::string& name) const { return texts.count(name) == 1; }
};

struct Range {
  int64_t minimum, maximum;
};

class Engine;

class Context final : public StubExecutionContext, public IExecutionContext {
public:
  explicit Context(const Engine& engine);
  ~Context() noexcept override;

  bool setOptimizationProfileAsync(int32_t index, cudaStream_t) noexcept override;
  void setDeviceMemoryV2(void* memory, int64_t size) noexcept override;
  bool setInputShape(char const* name, Dims const& dims) noexcept override;
  bool setTensorAddress(char const* name, void* data) noexcept override;
  bool enqueueV3(cudaStream_t stream) noexcept override;

private:
  struct Bindings {
    std::map<std::string, std::vector<int64_t>> shapes;
    std::map<std::string, char*> addresses;
    bool operator==(const Bindings& other) const {
      return shapes == other.shapes && addresses == other.addresses;
    }
  };
  struct Job {
    const Engine* engine;
    Bindings bindings;
    std::weak_ptr<int> context; // a replay still uses resources that the context owns
  };
  static void run(const Job& job);

  const Engine& engine_;
  int32_t profile_ = -1;
  int64_t memory_ = -1;
  Bindings bindings_, last_run_;
  const std::shared_ptr<int> own_ = std::make_shared<int>();
  bool has_run_ = false, was_captured_ = false;
};

class Engine final : public StubCudaEngine, public ICudaEngine {
public:
  Engine(Plan read, ILogger& log) : plan(std::move(read)), logger(log) {
    mImpl = this;
    names = {"input_ids", "position", "logits_index", "logits"};
    for (int64_t layer = 0; layer < plan.number("layers"); ++layer)
      for (const char* side : {"key_", "value_"})
        for (const char* end : {"", "_out"}) names.push_back(side + std::to_string(layer) + end);
    if (plan.has("odd_tensor")) names.push_back("odd");
    std::istringstream sizes(plan.texts.at("profiles"));
    for (Range range; sizes >> range.minimum && sizes.get() && sizes >> range.maximum; sizes.get())
      profiles.push_back(range);
  }

  ~Engine() noexcept override { want_context(); }

  void log_error(const std::string& what) const {
    logger.log(ILogger::Severity::kWARNING, "nothing to worry about");
    logger.log(ILogger::Severity::kERROR, (what + ".\nmore of it").c_str());
  }

  int32_t getNbIOTensors() const noexcept override { return static_cast<int32_t>(names.size()); }
  char const* getIOTensorName(int32_t index) const noexcept override {
    return names[static_cast<size_t>(index)].c_str();
  }
  DataType getTensorDataType(char const* name) const noexcept override {
    if (std::strcmp(name, "logits") == 0)
      return plan.has("half_logits") ? DataType::kHALF : DataType::kFLOAT;
    return plan.has("float_caches") ? DataType::kFLOAT : DataType::kHALF;
  }
  char const* getAliasedInputTensor(char const* name) const noexcept override {
    aliased = std::string(name).substr(0, std::strlen(name) - 4);
    return plan.has("copies") ? nullptr : aliased.c_str();
  }
  int64_t getDeviceMemorySizeForProfileV2(int32_t index) const noexcept override {
    return index == 0 ? 1000 : 3000;
  }
  IExecutionContext* createExecutionContext(
      ExecutionContextAllocationStrategy strategy) noexcept override {
    if (strategy != ExecutionContextAllocationStrategy::kUSER_MANAGED) missing("another strategy");
    if (standin_capturing()) missing("an end of the capture");
    if (plan.has("no_context")) return log_error("no context today"), nullptr;
    if (plan.has("contexts") && contexts == plan.number("contexts"))
      return log_error("no memory for a context"), nullptr;
    return new Context(*this);
  }

  const Plan plan;
  ILogger& logger;
  std::vector<std::string> names;
  std::vector<Range> profiles; // three of each: B, N and K
  mutable int64_t contexts = 0; // live ones

private:
  mutable std::string aliased;
};

Context::Context(const Engine& engine) : engine_(engine) {
  mImpl = this;
  ++engine.contexts;
}

Context::~Context() noexcept {
  want_context();
  --engine_.contexts;
}

bool Context::setOptimizationProfileAsync(int32_t index, cudaStream_t) noexcept {
  if (standin_capturing()) missing("an end of the capture");
  profile_ = index;
  return !engine_.plan.has("no_profile") || (engine_.log_error("no such profile"), false);
}

void Context::setDeviceMemoryV2(void* memory, int64_t size) noexcept {
  if (!standin_holds(memory, static_cast<size_t>(size))) missing("scratch that is device memory");
  memory_ = size;
}

bool Context::setInputShape(char const* name, Dims const& dims) noexcept {
  if (profile_ < 0) missing("a profile");
  const std::string tensor = name;
  const std::vector<int64_t> shape(dims.d, dims.d + dims.nbDims);
  const Plan& plan = engine_.plan;
  const Range* const ranges = engine_.profiles.data() + 3 * profile_;
  const auto within = [](int64_t size, const Range& range) {
    return range.minimum <= size && size <= range.maximum;
  };
  bool valid = false;
  if (tensor == "input_ids")
    valid = shape.size() == 2 && within(shape[0], ranges[0]) && within(shape[1], ranges[1]);
  else if (tensor == "position")
    valid = shape.size() == 1 && within(shape[0], ranges[0]);
  else if (tensor == "logits_index")
    valid = shape.size() == 1 && within(shape[0], ranges[2]);
  else
    valid = shape.size() == 4 && within(shape[0], ranges[0]) && shape[1] == plan.number("heads") &&
           shape[2] == plan.number("capacity") && shape[3] == plan.number("width");
  if (!valid) {
    engine_.log_error(tensor + " is out of profile " + std::to_string(profile_));
    return false;
  }
  bindings_.shapes[tensor] = shape;
  return true;
}

bool Context::setTensorAddress(char const* name, void* data) noexcept {
  if (reinterpret_cast<uintptr_t>(data) % 256 != 0) return engine_.log_error("not aligned"), false;
  bindings_.addresses[name] = static_cast<char*>(data);
  return true;
}

bool Context::enqueueV3(cudaStream_t stream) noexcept {
  if (bindings_.addresses.size() != engine_.names.size()) missing("the address of a tensor");
  if (memory_ < engine_.getDeviceMemorySizeForProfileV2(profile_)) missing("scratch enough");
  if (engine_.plan.has("broken")) return engine_.log_error("broken today"), false;
  for (const auto& [name, address] : bindings_.addresses)
    if (name.size() > 4 && name.substr(name.size() - 4) == "_out" &&
        bindings_.addresses.at(name.substr(0, name.size() - 4)) != address)
      missing("caches in place");
  const bool captured = standin_capturing();
  if (captured && !(has_run_ && last_run_ == bindings_)) missing("a run before the capture");
  if (was_captured_ && !(last_run_ == bindings_)) missing("a context used only by its graph");
  last_run_ = bindings_, has_run_ = true, was_captured_ |= captured;
  standin_enqueue(
      stream, [](void* job) { run(*static_cast<Job*>(job)); },
      [](void* job) { delete static_cast<Job*>(job); }, new Job{&engine_, bindings_, own_});
  return true;
}

// Writes the rows, then computes each row's logits from the tokens up to it, in the last layer.
void Context::run(const Job& job) {
  if (job.context.expired()) missing("a context that lives until its work is done");
  const Plan& plan = job.engine->plan;
  const auto& shapes = job.bindings.shapes;
  const auto numbers = [&](const char* name) {
    const auto* const data = reinterpret_cast<const int64_t*>(job.bindings.addresses.at(name));
    size_t count = 1;
    for (const int64_t size : shapes.at(name)) count *= static_cast<size_t>(size);
    if (!standin_holds(data, 8 * count)) missing("ids in device memory");
    return data;
  };
  const int64_t *const ids = numbers("input_ids"), *const position = numbers("position"),
                *const index = numbers("logits_index");
  const int64_t batch = shapes.at("input_ids")[0], tokens = shapes.at("input_ids")[1];
  const int64_t outputs = shapes.at("logits_index")[0], vocab = plan.number("vocab");
  const int64_t capacity = plan.number("capacity"), width = plan.number("width");
  const int64_t heads = plan.number("heads"), layers = plan.number("layers");
  auto* const logits = reinterpret_cast<float*>(job.bindings.addresses.at("logits"));
  if (!standin_holds(logits, 4 * static_cast<size_t>(batch * outputs * vocab)))
    missing("logits in device memory");
  // The cached value of a token: 0 means unwritten, and keys and values differ.
  const auto cell = [&](int side, int64_t layer, int64_t b, int64_t row) -> uint16_t& {
    const std::string name = (side == 0 ? "key_" : "value_") + std::to_string(layer);
    auto* const data = reinterpret_cast<uint16_t*>(job.bindings.addresses.at(name));
    const int64_t at = ((b * heads + heads - 1) * capacity + row) * width + width - 1;
    if (!standin_holds(data + at, 2)) missing("caches in device memory");
    return data[at];
  };
  const auto seed = static_cast<uint64_t>(plan.number("seed"));
  const int64_t nan_from = plan.has("nan_after") ? plan.number("nan_after") : capacity + 1;
  const float noise = static_cast<float>(plan.number("noise")) / 256;
  for (int64_t b = 0; b < batch; ++b) {
    if (position[b] < 0 || position[b] + tokens > capacity) missing("rows within the capacity");
    for (int64_t n = 0; n < tokens; ++n)
      for (int64_t layer = 0; layer < layers; ++layer)
        for (const int side : {0, 1})
          cell(side, layer, b, position[b] + n) =
              static_cast<uint16_t>(2 * ids[b * tokens + n] + 1 + side);
    for (int64_t k = 0; k < outputs; ++k) {
      uint64_t hash = seed;
      bool written = true;
      const int64_t end = position[b] + index[k] + 1;
      if (end >= nan_from) cell(0, layers - 1, b, end - 1) = POISON;
      const uint16_t* const rows = &cell(0, layers - 1, b, 0);
      for (int64_t row = 0; row < capacity; ++row) // masked rows are multiplied too
        written &= rows[row * width] <= 2 * vocab;
      for (int64_t row = 0; row < end; ++row) {
        const uint16_t key = cell(0, layers - 1, b, row), value = cell(1, 0, b, row);
        written &= key != 0 && value == key + 1;
        hash = mix(hash ^ static_cast<uint64_t>(key / 2));
      }
      for (int64_t v = 0; v < vocab; ++v) {
        const auto part = [&](uint64_t of) {
          const auto bits = static_cast<int64_t>(mix(of + static_cast<uint64_t>(v)) >> 40);
          return static_cast<float>(bits - (1 << 23)) * 0x1p-21f; // -4 to 4, exactly
        };
        logits[(b * outputs + k) * vocab + v] =
            written ? part(hash) + noise * part(mix(hash)) : std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
}

class Runtime final : public StubRuntime, public IRuntime {
public:
  explicit Runtime(ILogger& logger) : logger_(logger) { mImpl = this; }
  ~Runtime() noexcept override { want_context(); }

  ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override {
    std::istringstream text(std::string(static_cast<const char*>(blob), size));
    Plan plan;
    for (std::string name, value; text >> name && std::getline(text >> std::ws, value);)
      plan.texts[name] = value;
    if (plan.has("error")) {
      logger_.log(ILogger::Severity::kERROR, plan.texts["error"].c_str());
      return nullptr;
    }
    return new Engine(std::move(plan), logger_);
  }

private:
  ILogger& logger_;
};

} // namespace

API int32_t getInferLibVersion() noexcept {
  const char* const other = std::getenv("STANDIN_VERSION");
  return other != nullptr ? std::atoi(other) : static_cast<int32_t>(NV_TENSORRT_VERSION);
}

API void* createInferRuntime_INTERNAL(void* logger, int32_t version) noexcept {
  auto* const log = static_cast<ILogger*>(logger);
  if (version == NV_TENSORRT_VERSION && std::getenv("STANDIN_NO_RUNTIME") == nullptr)
    return static_cast<IRuntime*>(new Runtime(*log));
  log->log(ILogger::Severity::kINTERNAL_ERROR, "CUDA initialization failure");
  return nullptr;
}
