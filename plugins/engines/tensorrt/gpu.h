// A GPU, used through the CUDA driver: runtime/backends/cuda.py in C++. The driver is loaded when a
// bundle is opened, so building needs no CUDA toolkit and loading this library needs no GPU.
#ifndef OUTRIDER_ENGINES_TENSORRT_GPU_H
#define OUTRIDER_ENGINES_TENSORRT_GPU_H

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <string>
#include <vector>

#include <cuda.h>

namespace outrider {

const char MEMORY_REMEDY[] =
    "Use fewer slots, build with a smaller MAX_LEN, or free the GPU's memory";

// Names as in cuda.h, which maps some of them to later versions of a function.
#define OUTRIDER_DRIVER(F)                                                                         \
  F(cuInit) F(cuDeviceGet) F(cuDeviceGetAttribute) F(cuDevicePrimaryCtxRetain)                     \
  F(cuDevicePrimaryCtxRelease) F(cuCtxPushCurrent) F(cuCtxPopCurrent) F(cuMemGetInfo)              \
  F(cuMemAlloc) F(cuMemFree) F(cuMemHostAlloc) F(cuMemFreeHost) F(cuMemsetD8Async)                 \
  F(cuMemcpyHtoDAsync) F(cuMemcpyDtoHAsync) F(cuStreamCreate) F(cuStreamDestroy)                   \
  F(cuStreamSynchronize) F(cuStreamBeginCapture) F(cuStreamEndCapture)                             \
  F(cuGraphInstantiateWithFlags) F(cuGraphDestroy) F(cuGraphExecDestroy) F(cuGraphLaunch)          \
  F(cuGetErrorName)

struct Driver {
#define OUTRIDER_DECLARE(name) decltype(&::name) name;
  OUTRIDER_DRIVER(OUTRIDER_DECLARE)
#undef OUTRIDER_DECLARE
};

// The first GPU visible to the process, with one stream. The destructor frees all allocations.
class Cuda {
public:
  Cuda(); // throws Failure, as do the other members
  ~Cuda();
  Cuda(const Cuda&) = delete;
  Cuda& operator=(const Cuda&) = delete;

  // Makes the context current in this thread for its lifetime, then restores the previous one.
  class Current {
  public:
    explicit Current(const Cuda& cuda);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

  private:
    const Cuda& cuda_;
  };

  std::string architecture() const { return architecture_; } // such as sm90
  CUstream stream() const { return stream_; }

  // With the context current:
  int64_t free_bytes() const;
  CUdeviceptr allocate(int64_t bytes); // zeroed, in stream order
  void* allocate_pinned(int64_t bytes); // page-locked host memory, as asynchronous copies require
  void zero(CUdeviceptr address, int64_t bytes) const;
  void upload(CUdeviceptr address, const void* from, int64_t bytes) const;
  void download(void* to, CUdeviceptr address, int64_t bytes) const;
  void wait() const;

  // Capture what `enqueue` puts on the stream as a graph, without running it. Returns null if a
  // graph cannot hold it; the stream is then unchanged. `enqueue` returns whether it succeeded.
  CUgraphExec capture(const std::function<bool()>& enqueue);
  void launch(CUgraphExec graph) const;
  void drop(CUgraphExec graph) const;

private:
  void check(CUresult result, const char* what, int64_t bytes = 0) const;

  Driver driver_{};
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  std::string architecture_;
  std::vector<CUdeviceptr> memory_;
  std::vector<void*> pinned_;
};

} // namespace outrider
#endif
