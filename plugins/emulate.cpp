// The CUDA kernels on the host, for machines without a GPU: one block after the other, its threads
// as coroutines that switch at barriers. It shows that the logic is right, not that it is fast.
// Compiled together with the CPU library, whose outrider_verify it has the signature of.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

namespace {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
Index threadIdx, blockIdx;

enum class Waits { NOT, WARP, BLOCK, FOREVER };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Waits waits;
};

constexpr unsigned COUNT = 128, WARP = 32;
constexpr size_t STACK = 64 * 1024;
Thread block[COUNT];
ucontext_t scheduler;
void (*body)();
double exchange[COUNT]; // what a shuffle passes on

void wait(Waits waits) {
  const unsigned self = threadIdx.x;
  block[self].waits = waits;
  swapcontext(&block[self].context, &scheduler);
  threadIdx.x = self;
}

void thread_main() {
  body();
  wait(Waits::FOREVER);
}

bool all_wait(unsigned first, unsigned last, Waits waits) {
  return std::all_of(block + first, block + last, [waits](const Thread& thread) {
    return thread.waits == waits || thread.waits == Waits::FOREVER;
  });
}

void release(unsigned first, unsigned last, Waits waits) {
  for (unsigned t = first; t < last; ++t)
    if (block[t].waits == waits) block[t].waits = Waits::NOT;
}

void run_block() {
  for (unsigned t = 0; t < COUNT; ++t) {
    if (block[t].stack == nullptr) block[t].stack = std::make_unique<char[]>(STACK);
    getcontext(&block[t].context);
    block[t].context.uc_stack.ss_sp = block[t].stack.get();
    block[t].context.uc_stack.ss_size = STACK;
    block[t].waits = Waits::NOT;
    makecontext(&block[t].context, thread_main, 0);
  }
  while (!all_wait(0, COUNT, Waits::FOREVER)) {
    for (unsigned t = 0; t < COUNT; ++t) {
      if (block[t].waits != Waits::NOT) continue;
      threadIdx.x = t;
      swapcontext(&scheduler, &block[t].context);
    }
    for (unsigned w = 0; w < COUNT; w += WARP)
      if (all_wait(w, w + WARP, Waits::WARP)) release(w, w + WARP, Waits::WARP);
    if (all_wait(0, COUNT, Waits::BLOCK)) release(0, COUNT, Waits::BLOCK);
  }
}

void __syncthreads() { wait(Waits::BLOCK); }
void __syncwarp() { wait(Waits::WARP); }

template <class T> T shuffle(T value, unsigned from) {
  exchange[threadIdx.x] = static_cast<double>(value);
  wait(Waits::WARP);
  const double got = exchange[from];
  wait(Waits::WARP);
  return static_cast<T>(got);
}
template <class T> T __shfl_down_sync(unsigned, T value, int by) {
  const unsigned lane = threadIdx.x % WARP + static_cast<unsigned>(by);
  return shuffle(value, lane < WARP ? threadIdx.x + static_cast<unsigned>(by) : threadIdx.x);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int by) {
  return shuffle(value, threadIdx.x ^ static_cast<unsigned>(by));
}

using std::log;

} // namespace

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(threads)
#include "outrider_cuda.cu"

namespace {

template <class Kernel>
void launch(Kernel kernel, const outrider_device_round& call, int x, int y, int z) {
  static Kernel current;
  static const outrider_device_round* argument;
  current = kernel;
  argument = &call;
  body = [] { current(*argument); };
  for (int k = 0; k < z; ++k)
    for (int j = 0; j < y; ++j)
      for (int i = 0; i < x; ++i) {
        blockIdx = {static_cast<unsigned>(i), static_cast<unsigned>(j), static_cast<unsigned>(k)};
        run_block();
      }
}

} // namespace

extern "C" OUTRIDER_API int32_t outrider_emulate_verify(
    const outrider_logits* target, const outrider_logits* draft, int32_t,
    const outrider_slot* slots, int32_t slot_count, int32_t width, const double*,
    const int64_t* drafts, const outrider_row* rows, outrider_verdict* verdicts, double* ratios,
    void*, size_t, int32_t) {
  const int tiles = (target->vocab_size + TILE - 1) / TILE;
  const auto count = static_cast<size_t>(slot_count) * static_cast<size_t>(width + 1);
  const auto all = count * static_cast<size_t>(tiles);
  std::vector<outrider_row> shapes(count);
  std::vector<float> tile_max(all), tile_sum(all);
  std::vector<int32_t> tile_token(all);
  std::vector<double> mass(all), rest(all);
  std::vector<Decision> decisions(count);
  const outrider_device_round call = {
      *target,          *draft,     slots,           drafts,      rows,
      verdicts,         ratios,     shapes.data(),   tile_max.data(), tile_sum.data(),
      tile_token.data(), mass.data(), rest.data(),   decisions.data(), width, tiles};
  launch(outrider_scan, call, tiles, width + 1, slot_count);
  launch(outrider_decide, call, slot_count, 1, 1);
  launch(outrider_residual, call, tiles, slot_count, 1);
  launch(outrider_choose, call, slot_count, 1, 1);
  for (int b = 0; b < slot_count; ++b)
    if (verdicts[b].status != OUTRIDER_OK) return OUTRIDER_SLOT_FAILED;
  return OUTRIDER_OK;
}
