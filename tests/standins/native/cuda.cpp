// A CUDA driver without a GPU, for a session: device memory is host memory, and a stream runs its
// work when the host waits for it, so code that reads too early reads garbage. A capture records
// work, and a graph repeats it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <cuda.h>

#define API extern "C" __attribute__((visibility("default")))

namespace {

using Work = std::function<void()>;
using Works = std::vector<Work>;

constexpr unsigned char GARBAGE = 0xa5;
int anything; // its address serves as the context

std::map<std::string, long long> counts; // of events and objects, by name
thread_local std::vector<CUcontext> current;
std::map<CUdeviceptr, size_t> device; // allocated bytes, by their first address
std::map<char*, size_t> pinned;
std::map<CUstream, Works> streams; // pending work of each; there is no order between streams
Works* recording = nullptr;
CUstream recorded = nullptr; // the stream that captures
size_t room = size_t{1} << 30;
long long until_failure = -1; // successful allocations before one fails; -1: none fails
bool breaks_captures = false;
bool broken = false; // whether the GPU has failed, as after an illegal address

[[noreturn]] void fail(const char* what) { // a fault of the caller
  std::fprintf(stderr, "driver stand-in: %s\n", what);
  std::abort();
}

void need(bool condition, const char* what) {
  if (!condition) fail(what);
}

void enqueue(CUstream stream, Work work) {
  need(!current.empty(), "no context is current");
  need(streams.count(stream) == 1, "no stream of ours");
  (recording != nullptr && stream == recorded ? *recording : streams[stream])
      .push_back(std::move(work));
}

// Checks that no capture is recording and that a context is current.
void need_no_capture(const char* what) { need(!current.empty() && recording == nullptr, what); }

void need_idle(const char* what) {
  for (const auto& [stream, works] : streams) need(works.empty() || broken, what);
}

// A copy reads page-locked memory when it runs; until then the memory must not change.
Work copied(CUdeviceptr to, const char* from, size_t size, bool now) {
  const std::string then = now ? std::string(from, size) : std::string();
  return [=] {
    need(!now || std::memcmp(from, then.data(), size) == 0, "a pending copy's source has changed");
    std::memcpy(reinterpret_cast<char*>(to), from, size);
  };
}

template <class Blocks, class Address> bool inside(const Blocks& blocks, Address at, size_t size) {
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return false;
  --next;
  return at + size <= next->first + next->second;
}

bool fails() { return until_failure >= 0 && until_failure-- == 0; }

char* bytes(CUdeviceptr address) { return reinterpret_cast<char*>(address); }

} // namespace

API void standin_enqueue(CUstream stream, void (*run)(void*), void (*drop)(void*), void* data) {
  const std::shared_ptr<void> owned(data, drop);
  enqueue(stream, [run, owned] { run(owned.get()); });
}
API bool standin_current() { return !current.empty(); }
API bool standin_capturing() { return recording != nullptr; }
API bool standin_holds(const void* address, size_t size) { // device memory
  return inside(device, reinterpret_cast<CUdeviceptr>(address), size);
}
API long long standin_count(const char* what) {
  counts["device"] = static_cast<long long>(device.size());
  counts["pinned"] = static_cast<long long>(pinned.size());
  counts["streams"] = static_cast<long long>(streams.size());
  counts["current"] = static_cast<long long>(current.size());
  return counts[what];
}
// Makes the allocation after `more` others fail, of device or page-locked memory.
API void standin_fail(long long more) { until_failure = more; }
API void standin_room(size_t size) { room = size; }
API void standin_break_captures(bool is) { breaks_captures = is; }
API void standin_break(bool is) { broken = is; }

API CUresult cuInit(unsigned) {
  return std::getenv("STANDIN_NO_GPU") != nullptr ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice* found, int ordinal) {
  *found = ordinal;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  ++counts["contexts"];
  *context = reinterpret_cast<CUcontext>(&anything);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRelease(CUdevice) {
  --counts["contexts"];
  return CUDA_SUCCESS;
}
API CUresult cuCtxPushCurrent(CUcontext context) {
  current.push_back(context);
  return CUDA_SUCCESS;
}
API CUresult cuCtxPopCurrent(CUcontext* context) {
  need(!current.empty(), "a pop without a push");
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}
API CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == CUDA_ERROR_NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo(size_t* found, size_t* total) {
  size_t used = 0;
  for (const auto& [address, size] : device) used += size;
  *found = room - used, *total = room;
  return CUDA_SUCCESS;
}
API CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  need_no_capture("an allocation in a capture, or without a context");
  if (fails()) return CUDA_ERROR_OUT_OF_MEMORY;
  void* const found = std::aligned_alloc(256, (size + 255) / 256 * 256);
  std::memset(found, GARBAGE, size);
  *address = reinterpret_cast<CUdeviceptr>(found);
  device[*address] = size;
  return CUDA_SUCCESS;
}
API CUresult cuMemFree(CUdeviceptr address) {
  need_no_capture("memory given back in a capture, or without a context");
  need_idle("memory given back that work on a stream may use");
  need(device.erase(address) == 1, "freed what was not allocated");
  std::free(bytes(address));
  return CUDA_SUCCESS;
}
API CUresult cuMemHostAlloc(void** address, size_t size, unsigned) {
  need_no_capture("an allocation in a capture, or without a context");
  if (fails()) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = std::malloc(size);
  std::memset(*address, GARBAGE, size);
  pinned[static_cast<char*>(*address)] = size;
  return CUDA_SUCCESS;
}
API CUresult cuMemFreeHost(void* address) {
  need_no_capture("memory given back in a capture, or without a context");
  need_idle("memory given back that work on a stream may use");
  need(pinned.erase(static_cast<char*>(address)) == 1, "freed what was not allocated");
  std::free(address);
  return CUDA_SUCCESS;
}
API CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream stream) {
  need(inside(device, address, size), "a memset beyond device memory");
  enqueue(stream, [=] { std::memset(bytes(address), value, size); });
  return CUDA_SUCCESS;
}
API CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size, CUstream stream) {
  const auto source = static_cast<char*>(const_cast<void*>(from));
  need(inside(device, to, size) && inside(pinned, source, size), "a copy beyond what is allocated");
  enqueue(stream, copied(to, source, size, recording == nullptr)); // read when its turn comes
  return CUDA_SUCCESS;
}
API CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream stream) {
  const auto target = static_cast<char*>(to);
  need(inside(device, from, size) && inside(pinned, target, size), "a copy beyond what is allocated");
  enqueue(stream, [=] { std::memcpy(target, bytes(from), size); });
  return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  need(flags == CU_STREAM_NON_BLOCKING, "a stream that waits for the default one");
  need_no_capture("a stream made in a capture, or without a context");
  *stream = reinterpret_cast<CUstream>(new int);
  streams[*stream] = {};
  return CUDA_SUCCESS;
}
API CUresult cuStreamDestroy(CUstream stream) {
  need(streams.erase(stream) == 1, "no stream of ours");
  delete reinterpret_cast<int*>(stream);
  return CUDA_SUCCESS;
}
API CUresult cuStreamSynchronize(CUstream stream) {
  need(!current.empty() && streams.count(stream) == 1, "waited for no stream, or without a context");
  need(recording == nullptr, "waited in a capture");
  Works works;
  works.swap(streams[stream]);
  if (broken) return CUDA_ERROR_ILLEGAL_ADDRESS;
  for (const Work& work : works) work();
  return CUDA_SUCCESS;
}
API CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  need(recording == nullptr && mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, "a capture of its own");
  need(!current.empty() && streams.count(stream) == 1, "a capture of no stream of ours");
  recording = new Works;
  recorded = stream;
  ++counts["captures"];
  return CUDA_SUCCESS;
}
API CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  need(recording != nullptr && stream == recorded, "no capture to end");
  Works* const found = recording;
  recording = nullptr;
  if (breaks_captures) {
    delete found;
    *graph = nullptr;
    return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  }
  *graph = reinterpret_cast<CUgraph>(found);
  return CUDA_SUCCESS;
}
API CUresult cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long) {
  *made = reinterpret_cast<CUgraphExec>(new Works(*reinterpret_cast<Works*>(graph)));
  ++counts["graphs"];
  return CUDA_SUCCESS;
}
API CUresult cuGraphDestroy(CUgraph graph) {
  delete reinterpret_cast<Works*>(graph);
  return CUDA_SUCCESS;
}
API CUresult cuGraphExecDestroy(CUgraphExec graph) {
  delete reinterpret_cast<Works*>(graph);
  --counts["graphs"];
  return CUDA_SUCCESS;
}
API CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  ++counts["launches"];
  need(recording == nullptr, "a graph launched in a capture");
  for (const Work& work : *reinterpret_cast<Works*>(graph)) enqueue(stream, work);
  return CUDA_SUCCESS;
}
