// liboutrider on the CPU: the C interface of outrider.h for the algorithm of outrider_sampling.h.
//
// Each slot is processed by one thread.
#if defined(OUTRIDER_X86)
#include <cpuid.h>
#elif defined(OUTRIDER_ARM)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <atomic>
#include <iterator>

#include "outrider_device.h"
#include "outrider_round.h"
#include "outrider_threads.h"

namespace {

// --- instruction sets -------------------------------------------------------------------------

const outrider_set PLAIN{"plain", &outrider_tiles_plain, nullptr};

#if defined(OUTRIDER_X86)
const outrider_set AVX2{"avx2", &outrider_tiles_avx2, &PLAIN};
const outrider_set AVX_VNNI{"avxvnni", &outrider_tiles_avx2, &AVX2};
const outrider_set AVX512{"avx512", &outrider_tiles_avx512, &AVX2};
const outrider_set AVX512_VNNI{"avx512vnni", &outrider_tiles_avx512, &AVX512};

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx_vnni() { // unknown to __builtin_cpu_supports of some compilers
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#elif defined(OUTRIDER_ARM)
const outrider_set NEON{"neon", &outrider_tiles_plain, &PLAIN}; // the baseline on ARM64
const outrider_set DOTPROD{"dotprod", &outrider_tiles_plain, &NEON};

bool has_dotprod() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#endif

bool always_available() { return true; }

// Best first.
const struct {
  const outrider_set* set;
  bool (*is_available)();
} SETS[] = {
#if defined(OUTRIDER_X86)
    {&AVX512_VNNI, has_avx512_vnni},
    {&AVX512, has_avx512},
    {&AVX_VNNI, has_avx_vnni},
    {&AVX2, has_avx2},
#elif defined(OUTRIDER_ARM)
    {&DOTPROD, has_dotprod},
    {&NEON, always_available},
#endif
    {&PLAIN, always_available}};

std::atomic<const outrider_set*> selected_set{nullptr};

const outrider_tiles& tiles_in_use() { return *outrider_set_in_use()->tiles; }

// --- checks -----------------------------------------------------------------------------------

bool is_valid(const outrider_logits* logits) {
  return logits != nullptr && logits->vocab_size > 0 && logits->dtype >= OUTRIDER_FLOAT32 &&
         logits->dtype <= OUTRIDER_BFLOAT16;
}

int32_t check(const outrider_slot* slots, int32_t slot_count, int32_t width, int32_t vocab_size,
              const void* workspace, size_t workspace_size, int32_t threads) {
  if (slots == nullptr || slot_count < 0 || workspace == nullptr) return OUTRIDER_BAD_ARGUMENT;
  const size_t needed = outrider_workspace_size(vocab_size, width, threads);
  if (needed == 0) return OUTRIDER_BAD_ARGUMENT;
  if (workspace_size < needed) return OUTRIDER_SMALL_WORKSPACE;
  for (int b = 0; b < slot_count; ++b)
    if (!outrider::is_valid(slots[b], width)) return OUTRIDER_BAD_PARAMETER;
  return OUTRIDER_OK;
}

// --- threads ----------------------------------------------------------------------------------

// Starting a thread costs as much as processing half a row of 128k logits; with fewer logits than
// this per thread it does not pay.
#ifndef OUTRIDER_LOGITS_PER_THREAD
#define OUTRIDER_LOGITS_PER_THREAD 400'000
#endif

// Calls work(memory, b) for every slot, on as many threads as pay off. A slot's result does not
// depend on the thread that runs it. If no thread can be started, the caller does all the work.
template <class Work>
void for_each_slot(int slot_count, int64_t logits, int threads, int vocab_size, int width,
                   void* workspace, const Work& work) {
  std::atomic<int> next{0};
  const auto loop = [&](int thread) {
    const size_t size = outrider_workspace_size(vocab_size, width, 1);
    CacheLines carver{reinterpret_cast<std::uintptr_t>(workspace) +
                      static_cast<size_t>(thread) * size};
    const Memory memory = carve(carver, vocab_size, width);
    for (int b = next++; b < slot_count; b = next++) work(memory, b);
  };
  const int64_t paying = std::min<int64_t>(logits / OUTRIDER_LOGITS_PER_THREAD, slot_count);
  on_threads(static_cast<int>(std::min<int64_t>(threads, paying)), loop);
}

} // namespace

extern "C" {

const char* outrider_status_text(int32_t status) {
  switch (status) {
  case OUTRIDER_OK: return "ok";
  case OUTRIDER_BAD_ARGUMENT: return "a pointer is null, or a size is out of range";
  case OUTRIDER_BAD_PARAMETER: return "a slot's sampling parameter is out of range";
  case OUTRIDER_SMALL_WORKSPACE: return "the workspace is smaller than outrider_workspace_size";
  case OUTRIDER_NO_DRAFT_LOGITS: return "the sigmoid rule needs the draft's logits";
  case OUTRIDER_SLOT_FAILED: return "a slot failed; its verdict has the reason";
  case OUTRIDER_NAN: return "NaN in the logits";
  case OUTRIDER_INFINITE: return "+inf in the logits";
  case OUTRIDER_NO_TOKEN: return "every logit is -inf";
  default: return "unknown status";
  }
}

int32_t outrider_abi_version(void) { return OUTRIDER_ABI_VERSION; }

size_t outrider_workspace_size(int32_t vocab_size, int32_t width, int32_t threads) {
  if (vocab_size <= 0 || vocab_size > (1 << 30) || width < 0 || width > OUTRIDER_MAX_WIDTH ||
      threads < 1 || threads > MAX_THREADS)
    return 0;
  CacheLines carver{0};
  carve(carver, vocab_size, width);
  carver.align();
  // Whole cache lines, and one more in case the start is not aligned.
  return static_cast<size_t>(threads) * (carver.at + 64);
}

int32_t outrider_draw(const outrider_logits* logits, const outrider_slot* slots,
                      int32_t slot_count, int32_t width, int32_t step, const double* uniforms,
                      int64_t* drafts, outrider_row* rows, outrider_verdict* verdicts,
                      void* workspace, size_t workspace_size, int32_t threads) {
  if (!is_valid(logits) || logits->data == nullptr || drafts == nullptr || rows == nullptr ||
      step < 0 || step >= width)
    return OUTRIDER_BAD_ARGUMENT;
  const int32_t status = check(slots, slot_count, width, logits->vocab_size, workspace,
                               workspace_size, threads);
  if (status != OUTRIDER_OK) return status;
  std::atomic<int32_t> result{OUTRIDER_OK};
  const outrider_tiles& ops = tiles_in_use();
  const auto work = [&](const Memory& memory, int b) {
    const outrider_slot& slot = slots[b];
    if (verdicts != nullptr) verdicts[b] = outrider::no_verdict();
    if (step >= slot.gamma) return;
    const int64_t at = int64_t{b} * width + step;
    int32_t slot_status;
    const Row row = process_row(ops, Model{logits, slot.index}.row(0), slot, drafts + at - step,
                                step, memory.adjusted[1], memory.counts, &slot_status);
    outrider_row& shape = rows[at];
    if (slot_status == OUTRIDER_OK)
      slot_status = shape_row(ops, row, slot, memory.scratch, memory.q_sum, &shape);
    if (slot_status == OUTRIDER_OK) {
      const uint32_t position = slot.position + static_cast<uint32_t>(step);
      if (!outrider::is_deterministic(slot)) {
        const double u = uniforms != nullptr ? uniforms[at]
                                             : outrider::uniform(slot.seed, position, outrider::DRAFT,
                                                                 outrider::lane_of(slot));
        draw_row(ops, row, memory.q_sum, u, -1, &shape);
      } else if (outrider::is_coupled(slot)) {
        couple_row(ops, row, slot, position, memory.scratch.tile_max, &shape);
      }
      drafts[at] = shape.token;
      return;
    }
    shape = {};
    shape.status = slot_status;
    drafts[at] = -1;
    if (verdicts != nullptr)
      verdicts[b] = outrider::verdict_of(slot_status, OUTRIDER_DRAFT, step);
    result = OUTRIDER_SLOT_FAILED;
  };
  for_each_slot(slot_count, int64_t{slot_count} * logits->vocab_size, threads,
                logits->vocab_size, width, workspace, work);
  return result;
}

int32_t outrider_verify(const outrider_logits* target, const outrider_logits* draft,
                        const outrider_slot* slots, int32_t slot_count, int32_t width,
                        const double* uniforms, const int64_t* drafts, const outrider_row* rows,
                        outrider_verdict* verdicts, double* ratios, void* workspace,
                        size_t workspace_size, int32_t threads) {
  static const outrider_logits none = {nullptr, 0, 0, 1, OUTRIDER_FLOAT32};
  if (draft == nullptr) draft = &none;
  if (!is_valid(target) || target->data == nullptr || !is_valid(draft) || verdicts == nullptr ||
      (drafts == nullptr && width > 0))
    return OUTRIDER_BAD_ARGUMENT;
  const int32_t vocab_size = std::max(target->vocab_size, draft->vocab_size);
  const int32_t status =
      check(slots, slot_count, width, vocab_size, workspace, workspace_size, threads);
  if (status != OUTRIDER_OK) return status;
  std::atomic<int32_t> result{OUTRIDER_OK};
  const outrider_tiles& ops = tiles_in_use();
  const auto work = [&](const Memory& memory, int b) {
    const outrider_slot& slot = slots[b];
    outrider_verdict& verdict = verdicts[b] = outrider::no_verdict();
    if (slot.gamma < 0) return;
    const int64_t at = int64_t{b} * width;
    Round round(ops, memory, slot, {target, slot.index}, {draft, slot.index}, drafts + at,
                rows != nullptr ? rows + at : nullptr,
                uniforms != nullptr ? uniforms + int64_t{b} * (width + 1) : nullptr, width);
    double unused[OUTRIDER_MAX_WIDTH];
    double* slot_ratios = ratios != nullptr ? ratios + at : unused;
    outrider::Decision decision;
    const bool decided =
        slot.rule == OUTRIDER_BLOCK
            ? outrider::decide_block(round, slot.gamma, slot_ratios, &decision)
            : outrider::decide_token(round, slot.gamma, slot.lenience, slot_ratios, &decision);
    if (decided && round.draw(decision, &verdict.token)) {
      verdict.accepted = decision.accepted;
      verdict.examined = decision.examined;
      return;
    }
    verdict = round.failure();
    result = OUTRIDER_SLOT_FAILED;
  };
  // A round reads about half of its rows, those up to the first rejection.
  for_each_slot(slot_count, int64_t{slot_count} * vocab_size * (width + 2) / 2, threads,
                vocab_size, width, workspace, work);
  return result;
}

int32_t outrider_warp(const outrider_logits* logits, const outrider_slot* slot, float* weights,
                      double* total, void* workspace, size_t workspace_size) {
  if (!is_valid(logits) || logits->data == nullptr || weights == nullptr || total == nullptr)
    return OUTRIDER_BAD_ARGUMENT;
  const int32_t status = check(slot, 1, OUTRIDER_MAX_WIDTH, logits->vocab_size, workspace,
                               workspace_size, 1);
  if (status != OUTRIDER_OK) return status;
  const outrider_tiles& ops = tiles_in_use();
  CacheLines carver{reinterpret_cast<std::uintptr_t>(workspace)};
  const Memory memory = carve(carver, logits->vocab_size, 0);
  int32_t row_status;
  const Row row = process_row(ops, Model{logits, slot->index}.row(0), *slot, nullptr, 0,
                              memory.adjusted[0], memory.counts, &row_status);
  outrider_row shape;
  if (row_status == OUTRIDER_OK)
    row_status = shape_row(ops, row, *slot, memory.scratch, memory.tile_sum, &shape);
  if (row_status != OUTRIDER_OK) return row_status;
  *total = shape.total;
  for (int i = 0; i < row.width; ++i)
    weights[i] = shape.rate == 0 ? static_cast<float>(i == shape.token)
                                 : ops.weight(row.at(i), i, &shape);
  return OUTRIDER_OK;
}

size_t outrider_device_workspace_size(const outrider_device_sizes* sizes) {
  return sizes != nullptr ? outrider_device::workspace_size(*sizes) : 0;
}

int32_t outrider_device_plan_draw(const outrider_device_sizes* sizes,
                                  const outrider_logits* logits, const outrider_slot* slots,
                                  int32_t step, const double* uniforms, int64_t* drafts,
                                  outrider_row* rows, outrider_verdict* verdicts, void* workspace,
                                  size_t workspace_size, outrider_device_plan* plan) {
  return outrider_device::plan_draw(sizes, logits, slots, step, uniforms, drafts, rows, verdicts,
                                    workspace, workspace_size, plan);
}

int32_t outrider_device_plan_verify(const outrider_device_sizes* sizes,
                                    const outrider_logits* target, const outrider_logits* draft,
                                    const outrider_slot* slots, const double* uniforms,
                                    const int64_t* drafts, const outrider_row* rows,
                                    outrider_verdict* verdicts, double* ratios, void* workspace,
                                    size_t workspace_size, outrider_device_plan* plan) {
  return outrider_device::plan_verify(sizes, target, draft, slots, uniforms, drafts, rows,
                                      verdicts, ratios, workspace, workspace_size, plan);
}

void outrider_philox4x32(uint64_t key, const uint32_t counter[4], uint32_t answer[4]) {
  std::copy_n(counter, 4, answer);
  outrider::philox4x32(key, answer);
}

double outrider_uniform(uint64_t seed, uint32_t position, uint32_t purpose, uint32_t lane) {
  return outrider::uniform(seed, position, purpose, lane);
}

const outrider_set* outrider_set_in_use(void) {
  const outrider_set* set = selected_set.load(std::memory_order_relaxed);
  if (set != nullptr) return set;
  const auto best =
      std::find_if(SETS, std::end(SETS), [](const auto& one) { return one.is_available(); });
  return selected_set.compare_exchange_strong(set, best->set) ? best->set : set;
}

const char* outrider_instruction_set(void) { return outrider_set_in_use()->name; }

int32_t outrider_use(const char* instruction_set) {
  if (instruction_set == nullptr) return 0;
  for (const auto& [set, is_available] : SETS)
    if (std::strcmp(set->name, instruction_set) == 0 && is_available()) {
      selected_set = set;
      return 1;
    }
  return 0;
}

} // extern "C"
