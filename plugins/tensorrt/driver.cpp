#include "driver.h"

#include <cstdio>
#include <cstring>
#include <mutex>

#include <dlfcn.h>

namespace outrider_tensorrt {
namespace {

// The kernels of the token rule without filters, by module (plan_verify in outrider_device.h).
struct KernelName {
  const char *module, *name;
};
constexpr KernelName KERNELS[] = {
    {"outrider_tensorrt", "outrider_tensorrt_pack"},
    {"outrider_tensorrt", "outrider_tensorrt_unpack"},
    {"outrider", "outrider_verify_scan"},
    {"outrider", "outrider_verify_rest"},
};

struct Driver {
  decltype(&::cuGetErrorString) error_string;
  decltype(&::cuCtxGetDevice) device;
  decltype(&::cuDeviceGetAttribute) attribute;
  decltype(&::cuLibraryLoadData) load;
  decltype(&::cuLibraryGetKernel) kernel;
  decltype(&::cuKernelGetFunction) function;
  decltype(&::cuLaunchKernel) launch;
};

template <class Function> bool find(void* library, const char* name, Function* function) {
  void* const address = dlsym(library, name);
  static_assert(sizeof address == sizeof *function, "POSIX: functions have object addresses");
  std::memcpy(function, &address, sizeof address);
  return address != nullptr;
}

// Null if there is no driver of CUDA 12 or newer.
const Driver* driver() noexcept {
  static Driver found;
  static const bool found_all = [] {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    return library != nullptr && find(library, "cuGetErrorString", &found.error_string) &&
           find(library, "cuCtxGetDevice", &found.device) &&
           find(library, "cuDeviceGetAttribute", &found.attribute) &&
           find(library, "cuLibraryLoadData", &found.load) &&
           find(library, "cuLibraryGetKernel", &found.kernel) &&
           find(library, "cuKernelGetFunction", &found.function) &&
           find(library, "cuLaunchKernel", &found.launch);
  }();
  return found_all ? &found : nullptr;
}

bool report_failure(const char* what, CUresult result, char* reason, std::size_t reason_size) {
  const char* text = nullptr;
  driver()->error_string(result, &text);
  std::snprintf(reason, reason_size, "%s: %s", what, text != nullptr ? text : "unknown error");
  return false;
}

// A cubin runs on its own major architecture from its minor version on; PTX on all later ones.
const Image* image_for(const char* module, int architecture) {
  const Image* best = nullptr;
  for (int i = 0; i < IMAGE_COUNT; ++i) {
    const Image& image = IMAGES[i];
    if (std::strcmp(image.module, module) != 0 || image.architecture > architecture ||
        (!image.ptx && image.architecture / 10 != architecture / 10))
      continue;
    const bool same = best != nullptr && best->ptx == image.ptx;
    if (best == nullptr || (same ? image.architecture > best->architecture : best->ptx))
      best = &image;
  }
  return best;
}

} // namespace

bool Kernels::fill(int architecture, char* reason, std::size_t reason_size) noexcept {
  const char* loaded = nullptr; // the module in `library`; KERNELS is grouped by module
  CUlibrary library = nullptr;
  for (const KernelName& kernel_name : KERNELS) {
    if (loaded == nullptr || std::strcmp(loaded, kernel_name.module) != 0) {
      const Image* const image = image_for(kernel_name.module, architecture);
      if (image == nullptr) {
        std::snprintf(reason, reason_size, "no kernels for sm_%d in this library", architecture);
        return false;
      }
      const CUresult result = driver()->load(&library, image->data, nullptr, nullptr, 0, nullptr,
                                             nullptr, 0);
      if (result != CUDA_SUCCESS)
        return report_failure("cuLibraryLoadData", result, reason, reason_size);
      loaded = kernel_name.module;
    }
    named_[count_].name = kernel_name.name;
    const CUresult result = driver()->kernel(&named_[count_].kernel, library, kernel_name.name);
    if (result != CUDA_SUCCESS)
      return report_failure(kernel_name.name, result, reason, reason_size);
    ++count_;
  }
  architecture_ = architecture;
  return true;
}

const Kernels* Kernels::load(char* reason, std::size_t reason_size) noexcept {
  static std::mutex mutex;
  static Kernels kernels[MAX_ENTRIES]; // by architecture
  if (driver() == nullptr) {
    std::snprintf(reason, reason_size, "no CUDA driver of version 12 or newer");
    return nullptr;
  }
  CUdevice device;
  int major = 0, minor = 0;
  CUresult result = driver()->device(&device);
  if (result == CUDA_SUCCESS)
    result = driver()->attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
  if (result == CUDA_SUCCESS)
    result = driver()->attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
  if (result != CUDA_SUCCESS) {
    report_failure("no current device", result, reason, reason_size);
    return nullptr;
  }
  const int architecture = 10 * major + minor;
  try {
    const std::lock_guard<std::mutex> lock(mutex);
    for (Kernels& some : kernels) {
      if (some.architecture_ == 0) {
        some.count_ = 0;
        if (!some.fill(architecture, reason, reason_size)) return nullptr;
      }
      if (some.architecture_ != architecture) continue;
      for (int i = 0; i < some.count_; ++i) {
        CUfunction function; // getting it loads the kernel into this context now rather than later
        result = driver()->function(&function, some.named_[i].kernel);
        if (result != CUDA_SUCCESS) {
          report_failure(some.named_[i].name, result, reason, reason_size);
          return nullptr;
        }
      }
      return &some;
    }
    std::snprintf(reason, reason_size, "too many kinds of GPU in one process");
  } catch (...) { // locking the mutex failed
    std::snprintf(reason, reason_size, "a lock failed");
  }
  return nullptr;
}

bool Kernels::launch(const outrider_device_launch& planned, void** parameters, CUstream stream,
                     char* reason, std::size_t reason_size) const noexcept {
  for (int i = 0; i < count_; ++i) {
    if (std::strcmp(named_[i].name, planned.kernel) != 0) continue;
    const CUresult result = driver()->launch(reinterpret_cast<CUfunction>(named_[i].kernel),
                                             planned.grid[0], planned.grid[1], planned.grid[2],
                                             planned.block, 1, 1, 0, stream, parameters, nullptr);
    return result == CUDA_SUCCESS || report_failure(planned.kernel, result, reason, reason_size);
  }
  std::snprintf(reason, reason_size, "%s is not among the kernels that were loaded",
                planned.kernel);
  return false;
}

} // namespace outrider_tensorrt
