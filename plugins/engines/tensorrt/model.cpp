#include "model.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "files/failure.h"

namespace outrider {

namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;

static_assert(NV_TENSORRT_MAJOR >= 10, "these are the headers of TensorRT-RTX");

constexpr int64_t ALIGNMENT = 256; // bytes, of every tensor (NvInferRuntime.h, setTensorAddress)
constexpr size_t MAX_STEPS = 256; // maximum number of contexts and graphs to keep
const char REBUILD_REMEDY[] = "Build the bundle again, for this GPU and this TensorRT";

std::string version_of(int32_t number) { // as encoded by NV_TENSORRT_VERSION_INT
  return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100);
}

// Loads TensorRT in the headers' major version, and their minor version or a later one.
std::unique_ptr<nvinfer1::IRuntime> make_runtime(Log& log) {
  const char* const named = getenv("OUTRIDER_TENSORRT");
  const std::string default_name = "libnvinfer.so." + std::to_string(NV_TENSORRT_MAJOR);
  const std::string path = named != nullptr && *named != '\0' ? named : default_name;
  const std::string remedy = "Set OUTRIDER_TENSORRT to the path of " + default_name + ", " +
                             version_of(NV_TENSORRT_VERSION) + " or newer";
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, std::string("TensorRT cannot be loaded: ") + dlerror(), remedy);
  const auto version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  const auto create =
      reinterpret_cast<void* (*)(void*, int32_t)>(dlsym(library, "createInferRuntime_INTERNAL"));
  if (version == nullptr || create == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, path + " is not TensorRT", remedy);
  if (version() / 10000 != NV_TENSORRT_MAJOR || version() / 100 < NV_TENSORRT_VERSION / 100)
    fail(OUTRIDER_FAILED_BACKEND,
         "found TensorRT " + version_of(version()) + ", but this library was compiled for " +
             version_of(NV_TENSORRT_VERSION),
         remedy + ", or run make plugin with the headers of the installed version");
  std::unique_ptr<nvinfer1::IRuntime> made(
      static_cast<nvinfer1::IRuntime*>(create(&log, NV_TENSORRT_VERSION)));
  if (made == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, "TensorRT cannot start: " + log.take_error(),
         "Check the GPU with nvidia-smi");
  return made;
}

DataType type_of(const std::string& dtype) {
  if (dtype == "float32") return DataType::kFLOAT;
  if (dtype == "float16") return DataType::kHALF;
  if (dtype == "bfloat16") return DataType::kBF16;
  fail(OUTRIDER_FAILED_BUNDLE, "the type " + dtype + " is unknown",
       "Use the version of Outrider that built the bundle");
}

Dims dims(std::initializer_list<int64_t> sizes) {
  Dims made{};
  for (const int64_t size : sizes) made.d[made.nbDims++] = size;
  return made;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

} // namespace

void Log::log(Severity severity, const char* message) noexcept {
  if (severity != Severity::kERROR && severity != Severity::kINTERNAL_ERROR) return;
  try {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = message;
  } catch (...) { // out of memory: no exception may leave this callback
  }
}

std::string Log::take_error() {
  std::string found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    found.swap(error_);
  }
  found = found.substr(0, std::min<size_t>(found.find('\n'), 200));
  while (!found.empty() && (found.back() == '.' || found.back() == ' ')) found.pop_back();
  return found.empty() ? "no reason was given" : found;
}

TensorRtModel::TensorRtModel(const ModelSpec& spec)
    : slots_(spec.slots), vocab_size_(spec.vocab_size), widest_(spec.widest),
      capacity_(spec.capacity) {
  const std::string targets = spec.targets, here = cuda_.architecture();
  if (!targets.empty() && targets.find(" " + here + " ") == std::string::npos)
    fail(OUTRIDER_FAILED_BACKEND,
         std::string(spec.file) + " was compiled for" + targets + "and this GPU is " + here,
         "Build the bundle again, on this GPU");
  int64_t max_slots = 0;
  for (int32_t i = 0; i < spec.profile_count; ++i) {
    const SizeRange* const sizes = spec.profiles + 3 * i;
    profiles_.push_back({sizes[0], sizes[1], sizes[2]});
    max_slots = std::max(max_slots, sizes[0].max);
  }
  refuse_if(slots_ > max_slots,
            "slots=" + std::to_string(slots_) + " is over the " + std::to_string(max_slots) +
                " that the bundle was built for",
            "Use " + std::to_string(max_slots) +
                " or fewer, or build with SLOTS=" + std::to_string(slots_));
  const DataType type = type_of(spec.dtype);
  const int64_t item = type == DataType::kFLOAT ? 4 : 2, logits = slots_ * widest_ * vocab_size_;
  int64_t need = spec.activations + 4 * logits;
  for (int32_t i = 0; i < spec.cache_count; ++i) {
    const auto [heads, width] = spec.caches[i];
    const int32_t layers = spec.cache_count / 2;
    const std::string name = (i < layers ? "key_" : "value_") + std::to_string(i % layers);
    caches_.push_back({name, 0, heads, width, heads * capacity_ * width * item});
    if (slots_ > 1 && caches_.back().slot_bytes % ALIGNMENT != 0)
      fail(OUTRIDER_FAILED_BACKEND,
           "slots of " + std::to_string(caches_.back().slot_bytes) + " bytes in " + name +
               " are not a multiple of " + std::to_string(ALIGNMENT),
           "Use one slot, or BACKEND=onnxruntime");
    need += slots_ * caches_.back().slot_bytes;
  }
  const Cuda::Current current(cuda_);
  struct stat found{};
  if (stat(spec.file, &found) == 0) need += found.st_size; // the weights
  check_free_memory(need);
  try {
    open(spec, type);
  } catch (...) {
    engine_.reset(); // while the context is current, as TensorRT's objects require
    runtime_.reset();
    throw;
  }
}

void TensorRtModel::open(const ModelSpec& spec, DataType type) {
  const int64_t logits = slots_ * widest_ * vocab_size_;
  runtime_ = make_runtime(log_);
  load(spec.file);
  check_tensors(spec.file, type);
  for (int32_t i = 0; i < spec.profile_count; ++i)
    activations_ = std::max(activations_, engine_->getDeviceMemorySizeForProfileV2(i));
  scratch_ = cuda_.allocate(activations_);
  // Allocated memory is zeroed, because masked rows are multiplied too, and 0 times NaN is NaN.
  for (Cache& cache : caches_) cache.data = cuda_.allocate(slots_ * cache.slot_bytes);
  logits_ = cuda_.allocate(4 * logits);
  host_logits_ = static_cast<float*>(cuda_.allocate_pinned(4 * spec.buffers * logits));
  ids_ = allocate_inputs(slots_ * std::max(spec.chunk, widest_));
  position_ = allocate_inputs(slots_);
  index_ = allocate_inputs(widest_);
  cuda_.wait();
}

TensorRtModel::~TensorRtModel() {
  try {
    const Cuda::Current current(cuda_); // TensorRT's objects require it, even on a failed GPU
    try {
      cuda_.wait();
    } catch (const Failure&) { // a destructor cannot report it
    }
    drop_steps();
    contexts_.clear();
    engine_.reset();
    runtime_.reset();
  } catch (const Failure&) { // nor this
  }
}

void TensorRtModel::check_free_memory(int64_t need) const {
  const int64_t free = cuda_.free_bytes();
  if (need > free)
    fail(OUTRIDER_FAILED_MEMORY,
         "a model needs " + std::to_string(need >> 20) + " MiB of the GPU's memory, and " +
             std::to_string(free >> 20) + " are free",
         MEMORY_REMEDY);
}

TensorRtModel::Inputs TensorRtModel::allocate_inputs(int64_t count) {
  return {static_cast<int64_t*>(cuda_.allocate_pinned(8 * count)), cuda_.allocate(8 * count)};
}

// TensorRT copies the engine to the GPU from a mapping of the file.
void TensorRtModel::load(const std::string& file) {
  const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat found{};
  const bool readable = descriptor >= 0 && fstat(descriptor, &found) == 0 && found.st_size > 0;
  const auto size = static_cast<size_t>(found.st_size);
  void* const mapped =
      readable ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0) : MAP_FAILED;
  if (descriptor >= 0) ::close(descriptor);
  if (mapped == MAP_FAILED)
    fail(OUTRIDER_FAILED_BUNDLE, file + " cannot be read",
         "Make it readable, or build the bundle again");
  engine_.reset(runtime_->deserializeCudaEngine(mapped, size));
  munmap(mapped, size);
  if (engine_ == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, "TensorRT cannot load " + file + ": " + log_.take_error(),
         REBUILD_REMEDY);
}

// Checks that the engine has the expected tensors and updates its caches in place.
void TensorRtModel::check_tensors(const std::string& file, DataType type) const {
  const auto refuse_file_if = [&](bool condition, const std::string& what) {
    if (condition)
      fail(OUTRIDER_FAILED_BACKEND, "TensorRT cannot use " + file + ": " + what, REBUILD_REMEDY);
  };
  std::set<std::string> missing_tensors = {"input_ids", "position", "logits_index", "logits"};
  for (const Cache& cache : caches_)
    missing_tensors.insert(cache.name), missing_tensors.insert(cache.name + "_out");
  for (int32_t i = 0; i < engine_->getNbIOTensors(); ++i) {
    const std::string name = engine_->getIOTensorName(i);
    refuse_file_if(missing_tensors.erase(name) == 0,
                   "it was built from another graph (tensor " + name + ")");
  }
  refuse_file_if(!missing_tensors.empty(),
                 "it was built from another graph (tensor " +
                     (missing_tensors.empty() ? "" : *missing_tensors.begin()) + ")");
  refuse_file_if(engine_->getTensorDataType("logits") != DataType::kFLOAT,
                 "its logits are not float32");
  for (const Cache& cache : caches_) {
    const char* const aliased = engine_->getAliasedInputTensor((cache.name + "_out").c_str());
    refuse_file_if(aliased == nullptr || cache.name != aliased,
                   "it does not update " + cache.name + " in place");
    refuse_file_if(engine_->getTensorDataType(cache.name.c_str()) != type,
                   cache.name + " has another type");
  }
}

// The first profile that allows the call's sizes.
int32_t TensorRtModel::profile_of(const EngineCall& call) const {
  const int64_t sizes[] = {call.batch, call.width, call.outputs};
  for (size_t i = 0; i < profiles_.size(); ++i) {
    bool fits = true;
    for (size_t k = 0; k < 3; ++k)
      fits &= profiles_[i][k].min <= sizes[k] && sizes[k] <= profiles_[i][k].max;
    if (fits) return static_cast<int32_t>(i);
  }
  fail(OUTRIDER_FAILED_BUNDLE,
       "no profile takes " + std::to_string(call.batch) + " slots x " + std::to_string(call.width) +
           " tokens with " + std::to_string(call.outputs) + " rows of logits",
       "Build the bundle again");
}

TensorRtModel::Context TensorRtModel::make_context(int32_t profile) {
  const auto create = [&] {
    return Context(engine_->createExecutionContext(
        nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED));
  };
  Context made = create();
  if (made == nullptr && !steps_.empty()) { // each has its own memory: free that of the kept ones
    drop_steps();
    log_.take_error();
    made = create();
  }
  if (made == nullptr)
    fail(OUTRIDER_FAILED_MEMORY, "TensorRT cannot make a context: " + log_.take_error(),
         MEMORY_REMEDY);
  made->setDeviceMemoryV2(pointer(scratch_), activations_);
  if (!made->setOptimizationProfileAsync(profile, cuda_.stream()))
    fail(OUTRIDER_FAILED_BACKEND,
         "TensorRT refuses profile " + std::to_string(profile) + ": " + log_.take_error(),
         "Build the bundle again");
  cuda_.wait(); // the switch may copy asynchronously, from memory that it owns
  return made;
}

// Sets the shapes and addresses of a call.
void TensorRtModel::bind(nvinfer1::IExecutionContext& context, const EngineCall& call) {
  bool good = context.setTensorAddress("logits", pointer(logits_));
  const auto input = [&](const char* name, CUdeviceptr address, const Dims& shape) {
    good = good && context.setInputShape(name, shape) &&
           context.setTensorAddress(name, pointer(address));
  };
  input("input_ids", ids_.device, dims({call.batch, call.width}));
  input("position", position_.device, dims({call.batch}));
  input("logits_index", index_.device, dims({call.outputs}));
  for (const Cache& cache : caches_) {
    const CUdeviceptr at =
        cache.data + static_cast<CUdeviceptr>(call.first * cache.slot_bytes);
    input(cache.name.c_str(), at, dims({call.batch, cache.heads, capacity_, cache.width}));
    good = good && context.setTensorAddress((cache.name + "_out").c_str(), pointer(at)); // in place
  }
  if (!good)
    fail(OUTRIDER_FAILED_BACKEND, "TensorRT rejects the shapes of a call: " + log_.take_error(),
         "Build the bundle again");
}

// Uploads from page-locked memory, which a replay reads again. On failure, returns false, and
// `log_` has the reason.
bool TensorRtModel::enqueue(nvinfer1::IExecutionContext& context, const EngineCall& call) {
  cuda_.upload(ids_.device, ids_.host, 8 * call.batch * call.width);
  cuda_.upload(position_.device, position_.host, 8 * call.batch);
  cuda_.upload(index_.device, index_.host, 8 * call.outputs);
  return context.enqueueV3(cuda_.stream());
}

void TensorRtModel::run(nvinfer1::IExecutionContext& context, const EngineCall& call) {
  if (enqueue(context, call)) return;
  const std::string why = log_.take_error();
  cuda_.wait(); // enqueued work may read the context, and inputs that the next call overwrites
  fail(OUTRIDER_FAILED_BACKEND,
       "TensorRT failed on " + std::to_string(call.batch) + " slots x " +
           std::to_string(call.width) + " tokens: " + why,
       "Free some memory of the GPU, or build with a smaller MAX_LEN or fewer SLOTS");
}

// The first call of a shape runs uncaptured, since TensorRT then prepares what a graph cannot hold.
void TensorRtModel::step(const EngineCall& call) {
  const Shape shape = {call.first, call.batch, call.width, call.outputs};
  const auto known = steps_.find(shape);
  if (known == steps_.end()) {
    if (steps_.size() >= MAX_STEPS) drop_steps();
    Step made;
    made.context = make_context(profile_of(call));
    bind(*made.context, call);
    run(*made.context, call);
    steps_.emplace(shape, std::move(made));
    return;
  }
  Step& step = known->second;
  if (step.graph == nullptr && !step.uncapturable) {
    step.graph = cuda_.capture([&] { return enqueue(*step.context, call); });
    step.uncapturable = step.graph == nullptr;
    if (step.uncapturable) log_.take_error(); // clear the message: this is not a failure
  }
  if (step.graph != nullptr) cuda_.launch(step.graph);
  else run(*step.context, call);
}

void TensorRtModel::drop_steps() {
  for (auto& [shape, step] : steps_)
    if (step.graph != nullptr) cuda_.drop(step.graph);
  steps_.clear();
}

float* TensorRtModel::compute(const EngineCall& call) {
  const Cuda::Current current(cuda_);
  std::copy(call.ids, call.ids + call.batch * call.width, ids_.host);
  std::copy(call.position, call.position + call.batch, position_.host);
  for (int64_t k = 0; k < call.outputs; ++k) index_.host[k] = call.since + k;
  if (call.width <= widest_) {
    step(call);
  } else { // prefill widths vary too much for graphs
    Context& context = contexts_[profile_of(call)];
    if (context == nullptr) context = make_context(profile_of(call));
    bind(*context, call);
    run(*context, call);
  }
  float* const host_logits = host_logits_ + call.buffer * slots_ * widest_ * vocab_size_;
  cuda_.download(host_logits, logits_, 4 * call.batch * call.outputs * vocab_size_);
  cuda_.wait();
  return host_logits;
}

void TensorRtModel::wipe(int32_t slot) {
  const Cuda::Current current(cuda_);
  for (const Cache& cache : caches_)
    cuda_.zero(cache.data + static_cast<CUdeviceptr>(slot * cache.slot_bytes), cache.slot_bytes);
  cuda_.wait();
}

} // namespace outrider
