// A GPU through the CUDA driver: runtime/backends/cuda.py in C++. The driver is looked up when a bundle
// is opened: building wants no CUDA toolkit, and loading the library no GPU.
#ifndef OUTRIDER_ENGINES_TENSORRT_GPU_H
#define OUTRIDER_ENGINES_TENSORRT_GPU_H

#include <stddef.h>
#include <stdint.h>

#include <functional>
#include <string>
#include <vector>

#include <cuda.h>

namespace outrider {

const char ROOM[] = "Use fewer slots, build with a smaller MAX_LEN, or free the GPU's memory";

// Names as cuda.h has them, which maps some to later versions of a function.
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

// The first GPU that the process may see, with one stream. What it gives lives as long as it.
class Cuda {
public:
  Cuda(); // throws Failure, as all that follow
  ~Cuda();
  Cuda(const Cuda&) = delete;
  Cuda& operator=(const Cuda&) = delete;

  // The context is current in this thread as long as this lives; then the one before.
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
  CUdeviceptr allocate(int64_t bytes); // zeroed, in the stream's order
  void* pinned(int64_t bytes);         // page-locked host memory, which copies need in order not to wait
  void zero(CUdeviceptr address, int64_t bytes) const;
  void upload(CUdeviceptr address, const void* from, int64_t bytes) const;
  void download(void* to, CUdeviceptr address, int64_t bytes) const;
  void wait() const;

  // What `enqueue` puts on the stream, as a graph; nothing runs. Null where a graph cannot hold it, and
  // the stream is then as before. `enqueue` says whether it succeeded.
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
