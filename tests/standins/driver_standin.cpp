// A CUDA driver without a GPU, for the TensorRT plugin: device memory is host memory; launches are
// recorded and run at once. A separate library, plugins/cuda/emulate.cpp, runs the sampling
// kernels; the two small kernels around them run here, thread by thread.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <dlfcn.h>

#include <cuda.h>

#include "outrider.h"


namespace {

struct Dim {
  unsigned x, y, z;
};
Dim blockIdx, blockDim, threadIdx;

} // namespace

#define __global__
#include "tensorrt/pack.cu"

namespace {

int32_t (*emulated_has)(const char*);
void (*emulated_launch)(const char*, const uint32_t[3], uint32_t, const void*);

std::string events; // one per line
std::vector<std::string> kernels; // a CUkernel is an index + 1

template <class T> T at(void** parameters, int i) {
  T value;
  std::memcpy(&value, parameters[i], sizeof value);
  return value;
}

void run(const std::string& name, void** p) {
  if (name == "outrider_tensorrt_pack")
    return outrider_tensorrt_pack(
        at<const int64_t*>(p, 0), at<const int64_t*>(p, 1), at<const int64_t*>(p, 2),
        at<const float*>(p, 3), at<const float*>(p, 4), at<outrider_slot*>(p, 5),
        at<uint32_t*>(p, 6), at<int32_t>(p, 7));
  if (name == "outrider_tensorrt_unpack")
    return outrider_tensorrt_unpack(at<const outrider_verdict*>(p, 0), at<int32_t*>(p, 1),
                                    at<int64_t*>(p, 2), at<int32_t*>(p, 3), at<int32_t>(p, 4));
}

} // namespace

#define API extern "C" __attribute__((visibility("default")))

// Loads the emulated kernels from this library. Returns 0 on failure.
API int fake_kernels(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 0;
  emulated_has =
      reinterpret_cast<decltype(emulated_has)>(dlsym(library, "outrider_emulate_has_kernel"));
  emulated_launch =
      reinterpret_cast<decltype(emulated_launch)>(dlsym(library, "outrider_emulate_launch"));
  return emulated_has != nullptr && emulated_launch != nullptr ? 1 : 0;
}

// Returns all events since the last call.
API const char* fake_told() {
  static std::string text;
  text.swap(events);
  events.clear();
  return text.c_str();
}

API CUresult cuGetErrorString(CUresult result, const char** text) {
  *text = result == CUDA_ERROR_NOT_FOUND ? "named symbol not found" : "an error";
  return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}

API CUresult cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**,
                               unsigned, CUlibraryOption*, void**, unsigned) {
  if (std::memcmp(code, "\177ELF", 4) != 0) return CUDA_ERROR_INVALID_IMAGE;
  events += "load\n";
  *library = reinterpret_cast<CUlibrary>(const_cast<void*>(code));
  return CUDA_SUCCESS;
}

API CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) {
  kernels.emplace_back(name);
  *kernel = reinterpret_cast<CUkernel>(kernels.size());
  return CUDA_SUCCESS;
}

API CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  *function = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction function, unsigned x, unsigned y, unsigned z, unsigned block,
                            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream,
                            void** parameters, void** extra) {
  const std::string& name = kernels[reinterpret_cast<std::uintptr_t>(function) - 1];
  char line[256];
  std::snprintf(line, sizeof line, "%s %u %u %u %u\n", name.c_str(), x, y, z, block);
  events += line;
  if (block_y != 1 || block_z != 1 || shared != 0 || extra != nullptr || stream == nullptr)
    events += "odd launch\n";
  const uint32_t grid[] = {x, y, z};
  if (emulated_has(name.c_str()) != 0) {
    emulated_launch(name.c_str(), grid, block, parameters[0]);
    return CUDA_SUCCESS;
  }
  blockDim = {block, 1, 1};
  for (blockIdx.x = 0; blockIdx.x < x; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) run(name, parameters);
  return CUDA_SUCCESS;
}
