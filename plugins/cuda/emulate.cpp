// Runs the CUDA kernels on the host, for tests without a GPU: blocks one after another in random
// order, their threads as coroutines that switch at barriers, warps in random order. This tests the
// logic and the completeness of the plan, but not speed or memory ordering. The hosts that launch
// them are stand-ins for the CUDA driver.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
Index threadIdx, blockIdx, blockDim, gridDim;

// --- threads ----------------------------------------------------------------------------------

enum class Waits { NOT, WARP, BLOCK, FOREVER };

// Started once with ucontext; after that, setjmp switches without a system call.
struct Thread {
  ucontext_t start;
  jmp_buf context;
  std::unique_ptr<char[]> stack;
  Waits waits;
};

constexpr unsigned MAX_THREADS = 512, WARP = 32;
constexpr size_t STACK = 64 * 1024;
Thread block[MAX_THREADS];
jmp_buf scheduler;
void (*kernel_body)();
uint64_t exchange[MAX_THREADS]; // values exchanged within a warp
std::mt19937 rng;

void wait(Waits waits) {
  const unsigned self = threadIdx.x;
  block[self].waits = waits;
  if (_setjmp(block[self].context) == 0) _longjmp(scheduler, 1);
  threadIdx.x = self;
}

void thread_main() {
  for (;;) {
    kernel_body();
    wait(Waits::FOREVER); // until the next block
  }
}

void resume(unsigned t) {
  threadIdx.x = t;
  if (_setjmp(scheduler) != 0) return;
  if (block[t].stack != nullptr) _longjmp(block[t].context, 1);
  block[t].stack = std::make_unique<char[]>(STACK);
  getcontext(&block[t].start);
  block[t].start.uc_stack.ss_sp = block[t].stack.get();
  block[t].start.uc_stack.ss_size = STACK;
  makecontext(&block[t].start, thread_main, 0);
  setcontext(&block[t].start);
}

bool release(unsigned first, unsigned last, Waits waits, bool with_exited) {
  bool any = false;
  for (unsigned t = first; t < last; ++t) {
    const bool exited = block[t].waits == Waits::FOREVER && with_exited;
    if (block[t].waits != waits && !exited) return false;
    any |= block[t].waits == waits;
  }
  for (unsigned t = first; t < last; ++t)
    if (block[t].waits == waits) block[t].waits = Waits::NOT;
  return any;
}

void run_block() {
  const unsigned count = blockDim.x;
  std::array<unsigned, MAX_THREADS / WARP> warps{};
  for (unsigned w = 0; w < count / WARP; ++w) warps[w] = w;
  for (unsigned t = 0; t < count; ++t) block[t].waits = Waits::NOT;
  for (;;) {
    std::shuffle(warps.begin(), warps.begin() + count / WARP, rng);
    for (unsigned i = 0; i < count / WARP; ++i) {
      do {
        for (unsigned t = warps[i] * WARP; t < (warps[i] + 1) * WARP; ++t)
          if (block[t].waits == Waits::NOT) resume(t);
      } while (release(warps[i] * WARP, (warps[i] + 1) * WARP, Waits::WARP, false));
    }
    if (release(0, count, Waits::BLOCK, true)) continue;
    for (unsigned t = 0; t < count; ++t) {
      if (block[t].waits == Waits::FOREVER) continue;
      std::fputs("emulated: threads of a block wait at different barriers\n", stderr);
      std::abort();
    }
    return;
  }
}

void __syncthreads() { wait(Waits::BLOCK); }
void __syncwarp() { wait(Waits::WARP); }

// --- warps ------------------------------------------------------------------------------------

template <class T> T exchanged_value(unsigned from) {
  T value;
  std::memcpy(&value, &exchange[from], sizeof value);
  return value;
}

// Exchanges the values of all lanes and returns take(first thread of the warp), which reads them
// with `exchanged_value`.
template <class T, class Take> auto exchange_lanes(T value, const Take& take) {
  static_assert(sizeof value <= sizeof exchange[0]);
  std::memcpy(&exchange[threadIdx.x], &value, sizeof value);
  wait(Waits::WARP);
  const auto taken = take(threadIdx.x / WARP * WARP);
  wait(Waits::WARP);
  return taken;
}

template <class T> T __shfl_sync(unsigned, T value, int from) {
  return exchange_lanes(value, [&](unsigned first) {
    return exchanged_value<T>(first + static_cast<unsigned>(from) % WARP);
  });
}
template <class T> T __shfl_up_sync(unsigned, T value, unsigned by) {
  const unsigned lane = threadIdx.x % WARP;
  return __shfl_sync(0, value, static_cast<int>(lane >= by ? lane - by : lane));
}
template <class T> T __shfl_xor_sync(unsigned, T value, int by) {
  return __shfl_sync(0, value, static_cast<int>(threadIdx.x % WARP) ^ by);
}
unsigned __ballot_sync(unsigned, bool predicate) {
  return exchange_lanes(predicate, [](unsigned first) {
    unsigned bits = 0;
    for (unsigned t = 0; t < WARP; ++t)
      bits |= static_cast<unsigned>(exchanged_value<bool>(first + t)) << t;
    return bits;
  });
}
bool __any_sync(unsigned mask, bool predicate) { return __ballot_sync(mask, predicate) != 0; }
template <class Better> unsigned reduce_lanes(unsigned value, const Better& better) {
  return exchange_lanes(value, [&](unsigned first) {
    unsigned found = exchanged_value<unsigned>(first);
    for (unsigned t = 1; t < WARP; ++t) found = better(found, exchanged_value<unsigned>(first + t));
    return found;
  });
}
unsigned __reduce_max_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
unsigned __reduce_min_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return std::min(a, b); });
}
unsigned __reduce_or_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return a | b; });
}

// --- memory -----------------------------------------------------------------------------------

struct uint4 {
  unsigned x, y, z, w;
};
template <class T> T __ldg(const T* from) { return *from; }
template <class T> T __ldcg(const T* from) { return *from; }
template <class T> T atomicAdd(T* at, T value) {
  const T old = *at;
  *at += value;
  return old;
}
template <class T> T atomicOr(T* at, T value) {
  const T old = *at;
  *at |= value;
  return old;
}

uint64_t global_timer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::nanoseconds(now).count());
}

using std::fmaxf;
using std::log;
using std::log2;
using std::memcpy;

} // namespace

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#include "outrider_cuda.cu"

namespace {

// --- launches ---------------------------------------------------------------------------------

// Sets what all threads run. Their parameter is copied, as by a launch.
template <class Parameter> void prepare(void (*kernel)(Parameter), const void* parameter) {
  static void (*current)(Parameter);
  static Parameter argument;
  current = kernel;
  std::memcpy(&argument, parameter, sizeof argument);
  kernel_body = [] { current(argument); };
}

#define KERNEL(name, ...) {#name, [](const void* parameter) { prepare(name, parameter); }},
const std::map<std::string, void (*)(const void*)> kernels = {OUTRIDER_KERNELS(KERNEL)};
#undef KERNEL

} // namespace

extern "C" {

// Sets the seed of the execution order.
OUTRIDER_API void outrider_emulate_seed(uint32_t seed) { rng.seed(seed); }

OUTRIDER_API int32_t outrider_emulate_has_kernel(const char* kernel) {
  return kernels.count(kernel) != 0;
}

OUTRIDER_API void outrider_emulate_launch(const char* kernel, const uint32_t grid[3],
                                          uint32_t threads, const void* parameter) {
  kernels.at(kernel)(parameter);
  blockDim = {threads, 1, 1};
  gridDim = {grid[0], grid[1], grid[2]};
  std::vector<Index> blocks;
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) blocks.push_back({x, y, z});
  std::shuffle(blocks.begin(), blocks.end(), rng);
  for (const Index& index : blocks) {
    blockIdx = index;
    run_block();
  }
}

} // extern "C"
