#include "gpu.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "files/failure.h"

namespace outrider {

namespace {

template <class Function> bool find(void* library, const char* name, Function* function) {
  void* const address = dlsym(library, name);
  static_assert(sizeof address == sizeof *function, "POSIX: functions have object addresses");
  std::memcpy(function, &address, sizeof address);
  return address != nullptr;
}

#define OUTRIDER_TEXT(name) #name

Driver find_driver() {
  Driver found{};
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    fail(OUTRIDER_FAILED_BACKEND, std::string("there is no CUDA driver: ") + dlerror(),
         "Install NVIDIA's driver, or use a bundle for the CPU");
  const char* missing = nullptr;
#define OUTRIDER_FIND(name)                                                                        \
  if (!find(library, OUTRIDER_TEXT(name), &found.name)) missing = OUTRIDER_TEXT(name);
  OUTRIDER_DRIVER(OUTRIDER_FIND)
#undef OUTRIDER_FIND
  if (missing != nullptr)
    fail(OUTRIDER_FAILED_BACKEND, std::string("the CUDA driver has no ") + missing,
         "Install NVIDIA's driver for CUDA 12 or newer");
  return found;
}

size_t bytes_of(int64_t bytes) { return static_cast<size_t>(std::max<int64_t>(bytes, 1)); }

} // namespace

Cuda::Cuda() : driver_(find_driver()) {
  check(driver_.cuInit(0), "cuInit");
  check(driver_.cuDeviceGet(&device_, 0), "cuDeviceGet");
  int major = 0, minor = 0;
  check(driver_.cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device_),
        "cuDeviceGetAttribute");
  check(driver_.cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device_),
        "cuDeviceGetAttribute");
  architecture_ = "sm" + std::to_string(major) + std::to_string(minor);
  check(driver_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    const Current current(*this);
    check(driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  } catch (...) {
    driver_.cuDevicePrimaryCtxRelease(device_);
    throw;
  }
}

// Errors are ignored, since a destructor cannot report them.
Cuda::~Cuda() {
  if (driver_.cuCtxPushCurrent(context_) == CUDA_SUCCESS) {
    driver_.cuStreamSynchronize(stream_);
    for (const CUdeviceptr address : memory_) driver_.cuMemFree(address);
    for (void* const address : pinned_) driver_.cuMemFreeHost(address);
    driver_.cuStreamDestroy(stream_);
    CUcontext popped = nullptr;
    driver_.cuCtxPopCurrent(&popped);
  }
  driver_.cuDevicePrimaryCtxRelease(device_);
}

Cuda::Current::Current(const Cuda& cuda) : cuda_(cuda) {
  cuda.check(cuda.driver_.cuCtxPushCurrent(cuda.context_), "cuCtxPushCurrent");
}

Cuda::Current::~Current() {
  CUcontext popped = nullptr;
  cuda_.driver_.cuCtxPopCurrent(&popped);
}

void Cuda::check(CUresult result, const char* what, int64_t bytes) const {
  if (result == CUDA_SUCCESS) return;
  if (result == CUDA_ERROR_OUT_OF_MEMORY)
    fail(OUTRIDER_FAILED_MEMORY,
         bytes > 0 ? "the GPU has no room for " + std::to_string(bytes) + " more bytes"
                   : std::string("the GPU is out of memory (") + what + ")",
         MEMORY_REMEDY);
  const char* name = nullptr;
  driver_.cuGetErrorName(result, &name);
  fail(OUTRIDER_FAILED_BACKEND,
       std::string(what) + " failed: " + (name != nullptr ? name : "an unknown error"),
       "Check the GPU with nvidia-smi");
}

int64_t Cuda::free_bytes() const {
  size_t found = 0, total = 0;
  check(driver_.cuMemGetInfo(&found, &total), "cuMemGetInfo");
  return static_cast<int64_t>(found);
}

CUdeviceptr Cuda::allocate(int64_t bytes) {
  CUdeviceptr address = 0;
  memory_.reserve(memory_.size() + 1); // so that the push_back below cannot fail and leak
  check(driver_.cuMemAlloc(&address, bytes_of(bytes)), "cuMemAlloc", bytes);
  memory_.push_back(address);
  zero(address, bytes);
  return address;
}

void* Cuda::allocate_pinned(int64_t bytes) {
  void* address = nullptr;
  pinned_.reserve(pinned_.size() + 1);
  check(driver_.cuMemHostAlloc(&address, bytes_of(bytes), 0), "cuMemHostAlloc");
  pinned_.push_back(address);
  return address;
}

void Cuda::zero(CUdeviceptr address, int64_t bytes) const {
  check(driver_.cuMemsetD8Async(address, 0, bytes_of(bytes), stream_), "cuMemsetD8Async");
}

void Cuda::upload(CUdeviceptr address, const void* from, int64_t bytes) const {
  check(driver_.cuMemcpyHtoDAsync(address, from, bytes_of(bytes), stream_), "cuMemcpyHtoDAsync");
}

void Cuda::download(void* to, CUdeviceptr address, int64_t bytes) const {
  check(driver_.cuMemcpyDtoHAsync(to, address, bytes_of(bytes), stream_), "cuMemcpyDtoHAsync");
}

void Cuda::wait() const { check(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize"); }

CUgraphExec Cuda::capture(const std::function<bool()>& enqueue) {
  const auto mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
  if (driver_.cuStreamBeginCapture(stream_, mode) != CUDA_SUCCESS) return nullptr;
  bool good = false;
  try {
    good = enqueue();
  } catch (...) { // the capture must be ended in any case
  }
  CUgraph graph = nullptr;
  CUgraphExec found = nullptr;
  good &= driver_.cuStreamEndCapture(stream_, &graph) == CUDA_SUCCESS && graph != nullptr;
  if (good && driver_.cuGraphInstantiateWithFlags(&found, graph, 0) != CUDA_SUCCESS) found = nullptr;
  if (graph != nullptr) driver_.cuGraphDestroy(graph);
  return found;
}

void Cuda::launch(CUgraphExec graph) const {
  check(driver_.cuGraphLaunch(graph, stream_), "cuGraphLaunch");
}

void Cuda::drop(CUgraphExec graph) const { driver_.cuGraphExecDestroy(graph); }

} // namespace outrider
