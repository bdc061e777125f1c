// The interface between host and kernels: the kernels' parameter, the workspace and the launch
// plan. Plain C++17 without CUDA headers for the host; NVRTC compiles the structures too.
//
// Without filters and penalties, a verification is two launches and a draw one. All kernels:
//
//  outrider_mark          grid (1, 1, B)               bit masks of penalised and suppressed ids
//  outrider_*_scan        grid (tile groups, 1, B)     maximum and sum of each tile of all rows; the
//                                                      last block of a slot combines them, decides
//                                                      or draws
//  outrider_*_filter      grid (tile groups, rows, B)  top-k and top-p: a histogram of each row; the
//                                                      last block of a row finds the cut
//  outrider_*_mass        grid (tile groups, 1, B)     tile sums of filtered rows; the last block of
//                                                      a slot decides or draws instead of the scan
//  outrider_*_couple      grid (tile groups, 1, B)     the coupled rule's best token of each tile;
//                                                      the last block of a slot decides or draws
//                                                      instead of the others
//  outrider_verify_rest   grid (tile groups, 1, B)     tile sums of one row's residual (for the
//                                                      block rule, of up to `width` rows); the last
//                                                      block of a slot draws
#ifndef OUTRIDER_DEVICE_H
#define OUTRIDER_DEVICE_H

#include "outrider.h"

namespace outrider_device {
constexpr int32_t WARPS = 8, FILTER_WARPS = 16; // per block
constexpr int32_t BINS = 2048;                  // of the filters' histograms
constexpr int32_t FILTER_PARTS = 4;             // of a tile, for the histogram
}

// The scan's result for one tile. In a broken tile the maximum is NaN or +inf, whichever was found.
struct outrider_device_tile {
  float max;
  union {
    float sum;     // of exponentials, relative to the maximum
    int32_t token; // at temperature 0: the lowest argmax; coupled: that of the least quotient
  };
};

// A row's histogram for top-k and top-p, zeroed by the scan.
struct outrider_device_bins {
  unsigned long long sums[outrider_device::BINS];
  uint32_t finished_blocks, reserved;
};

// The state of a slot's round between two kernels.
struct outrider_device_state {
  double prefix[OUTRIDER_MAX_WIDTH + 1]; // P_0 .. P_gamma of the block rule
  int32_t draws;                         // 0: the verdict is complete
  int32_t residual;                      // 0: the next token is drawn from p of row `first`
  int32_t first, last;                   // rows whose residual is needed; the block rule: several
};

// The kernels' parameter. A captured graph keeps the addresses; the contents of the memory vary.
struct outrider_device_call {
  outrider_logits target, draft;  // a draw reads `draft`
  const outrider_slot* slots;     // [B]
  const double* uniforms;         // [B, width], for a verification [B, width + 1]; or null
  int64_t* drafts;                // [B, width]
  outrider_row* draft_rows;       // [B, width]; null: the verification shapes them itself
  outrider_verdict* verdicts;     // [B]; may be null for a draw
  double* ratios;                 // [B, width]
  uint32_t* finished_blocks;      // [B] 0 between kernels; workspace from here on
  outrider_row* rows;             // [B, row_count]: width + 1 of the target, width of the draft
  outrider_device_tile* tiles;    // [B, row_count, tile_count]
  double* mass;                   // [B, row_count, tile_count], relative to the row's maximum; of a
                                  // coupled slot in the end: the tiles' least quotients
  double* residual;               // [B, residual_count, tile_count]
  outrider_device_state* states;  // [B]
  outrider_device_bins* bins;     // [B, row_count]; or null
  uint32_t* marks;                // [B, 2, tile_count * 32] bits: penalised, suppressed; or null
  int32_t slot_count, width, row_count, residual_count, tile_count;
  int32_t flags, step;
};

#ifndef __CUDACC_RTC__
#include <cstring>

#include "outrider_carver.h"
#include "outrider_sampling.h"

namespace outrider_device {

using outrider::TILE;
using outrider::tiles_of;

constexpr int32_t ALL_FLAGS = OUTRIDER_DEVICE_FILTERS | OUTRIDER_DEVICE_PENALTIES |
                              OUTRIDER_DEVICE_BLOCK | OUTRIDER_DEVICE_SHAPES |
                              OUTRIDER_DEVICE_COUPLED;
// Blocks of a grid over tiles: as many as 132 multiprocessors run at once, so that with many tiles
// no block starts late and each waits for the others only once. The filter's use all registers.
constexpr int32_t MAX_BLOCKS = 4 * 132, MAX_FILTER_BLOCKS = 132;

static_assert(sizeof(outrider_device_call) <= sizeof(outrider_device_plan::call), "plan.call");

inline bool is_valid(const outrider_device_sizes& s) {
  constexpr int32_t max_vocab = 1 << 30;
  return s.slot_count >= 1 && s.slot_count <= 65535 && s.width >= 0 &&
         s.width <= OUTRIDER_MAX_WIDTH && s.vocab_size >= 0 && s.vocab_size <= max_vocab &&
         s.draft_vocab_size >= 0 && s.draft_vocab_size <= max_vocab &&
         s.vocab_size + s.draft_vocab_size > 0 && (s.flags & ~ALL_FLAGS) == 0;
}

// Sets sizes and workspace addresses; returns the workspace's end (its size if it starts at 0).
inline std::uintptr_t lay_out(const outrider_device_sizes& s, std::uintptr_t workspace,
                              outrider_device_call* call) {
  const bool shapes = (s.flags & OUTRIDER_DEVICE_SHAPES) != 0;
  call->slot_count = s.slot_count;
  call->width = s.width;
  call->flags = s.flags;
  call->tile_count = tiles_of(s.vocab_size > s.draft_vocab_size ? s.vocab_size : s.draft_vocab_size);
  call->row_count = s.width + 1 + (shapes ? s.width : 0);
  call->residual_count = (s.flags & OUTRIDER_DEVICE_BLOCK) != 0 && s.width > 0 ? s.width : 1;
  const auto slots = static_cast<size_t>(s.slot_count);
  const auto tiles = static_cast<size_t>(call->tile_count);
  const size_t rows = slots * static_cast<size_t>(call->row_count);
  Carver<256> carver{workspace};
  call->finished_blocks = carver.take<uint32_t>(slots);
  call->rows = carver.take<outrider_row>(rows);
  call->tiles = carver.take<outrider_device_tile>(rows * tiles);
  call->mass = carver.take<double>(rows * tiles);
  call->residual = carver.take<double>(slots * static_cast<size_t>(call->residual_count) * tiles);
  call->states = carver.take<outrider_device_state>(slots);
  call->ratios = carver.take<double>(slots * static_cast<size_t>(s.width)); // unless given
  const bool filters = (s.flags & OUTRIDER_DEVICE_FILTERS) != 0;
  call->bins = carver.take<outrider_device_bins>(filters ? rows : 0);
  if (!filters) call->bins = nullptr;
  const bool marks = (s.flags & OUTRIDER_DEVICE_PENALTIES) != 0;
  uint32_t* const bits = carver.take<uint32_t>(marks ? slots * 2 * tiles * (TILE / 32) : 0);
  call->marks = marks ? bits : nullptr;
  carver.align();
  return carver.at;
}

inline size_t workspace_size(const outrider_device_sizes& sizes) {
  outrider_device_call unused = {};
  return is_valid(sizes) ? lay_out(sizes, 0, &unused) : 0;
}

inline bool is_valid(const outrider_logits* logits, int32_t vocab_size) {
  if (logits == nullptr || logits->data == nullptr || logits->vocab_size != vocab_size ||
      vocab_size <= 0 || logits->dtype < OUTRIDER_FLOAT32 || logits->dtype > OUTRIDER_BFLOAT16)
    return false;
  const int64_t size = logits->dtype == OUTRIDER_FLOAT32 ? 4 : 2;
  return logits->slot_stride % size == 0 && logits->row_stride % size == 0 &&
         static_cast<int64_t>(reinterpret_cast<std::uintptr_t>(logits->data)) % size == 0;
}

inline int32_t begin_plan(const outrider_device_sizes* sizes, const outrider_slot* slots,
                          void* workspace, size_t workspace_size, outrider_device_plan* plan,
                          outrider_device_call* call) {
  if (sizes == nullptr || !is_valid(*sizes) || slots == nullptr || workspace == nullptr ||
      plan == nullptr || reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0)
    return OUTRIDER_BAD_ARGUMENT;
  if (workspace_size < outrider_device::workspace_size(*sizes)) return OUTRIDER_SMALL_WORKSPACE;
  lay_out(*sizes, reinterpret_cast<std::uintptr_t>(workspace), call);
  call->slots = slots;
  *plan = {};
  return OUTRIDER_OK;
}

inline outrider_device_launch launch_of(const char* kernel, int32_t x, int32_t y, int32_t z,
                                        int32_t warps) {
  return {kernel,
          {static_cast<uint32_t>(x), static_cast<uint32_t>(y), static_cast<uint32_t>(z)},
          static_cast<uint32_t>(warps * 32)};
}

inline void add_launch(outrider_device_plan* plan, const outrider_device_launch& launch) {
  plan->launches[plan->launch_count++] = launch;
}

// The names of the kernels up to a decision or a draw. general: the scan with penalties and filters.
struct Kernels {
  const char *scan, *general, *filter, *mass, *couple;
};

inline void add_kernels(outrider_device_plan* plan, outrider_device_call* call, int32_t tiles,
                        int32_t rows, int32_t coupled_rows, const Kernels& kernels) {
  const int32_t slots = call->slot_count;
  // Blocks for `count` tiles, one for each warp, or fewer blocks if `most` are shared by so many.
  const auto groups = [](int64_t count, int32_t warps, int64_t most, int32_t sharing) {
    const int64_t needed = (count + warps - 1) / warps, share = most / sharing;
    return static_cast<int32_t>(needed < share ? needed : share > 1 ? share : 1);
  };
  const int32_t blocks = groups(int64_t{tiles} * rows, WARPS, MAX_BLOCKS, slots);
  const bool filters = (call->flags & OUTRIDER_DEVICE_FILTERS) != 0;
  const bool penalties = (call->flags & OUTRIDER_DEVICE_PENALTIES) != 0;
  const char* scan = filters || penalties ? kernels.general : kernels.scan;
  if (penalties) add_launch(plan, launch_of("outrider_mark", 1, 1, slots, FILTER_WARPS));
  add_launch(plan, launch_of(scan, blocks, 1, slots, WARPS));
  if (filters) {
    const int32_t parts = groups(int64_t{tiles} * FILTER_PARTS, FILTER_WARPS, MAX_FILTER_BLOCKS,
                                 rows * slots);
    add_launch(plan, launch_of(kernels.filter, parts, rows, slots, FILTER_WARPS));
    add_launch(plan, launch_of(kernels.mass, blocks, 1, slots, WARPS));
  }
  if ((call->flags & OUTRIDER_DEVICE_COUPLED) != 0)
    add_launch(plan, launch_of(kernels.couple,
                               groups(int64_t{tiles} * coupled_rows, WARPS, MAX_BLOCKS, slots), 1,
                               slots, WARPS));
}

// See outrider.h.
inline int32_t plan_draw(const outrider_device_sizes* sizes, const outrider_logits* logits,
                         const outrider_slot* slots, int32_t step, const double* uniforms,
                         int64_t* drafts, outrider_row* rows, outrider_verdict* verdicts,
                         void* workspace, size_t workspace_size, outrider_device_plan* plan) {
  outrider_device_call call = {};
  const int32_t status = begin_plan(sizes, slots, workspace, workspace_size, plan, &call);
  if (status != OUTRIDER_OK) return status;
  if (!is_valid(logits, sizes->draft_vocab_size) || drafts == nullptr || rows == nullptr ||
      step < 0 || step >= sizes->width)
    return OUTRIDER_BAD_ARGUMENT;
  call.draft = *logits;
  call.uniforms = uniforms;
  call.drafts = drafts;
  call.draft_rows = rows;
  call.verdicts = verdicts;
  call.step = step;
  add_kernels(plan, &call, tiles_of(logits->vocab_size), 1, 1,
              {"outrider_draw_scan", "outrider_draw_scan_general", "outrider_draw_filter",
               "outrider_draw_mass", "outrider_draw_couple"});
  std::memcpy(plan->call, &call, sizeof call);
  return OUTRIDER_OK;
}

inline int32_t plan_verify(const outrider_device_sizes* sizes, const outrider_logits* target,
                           const outrider_logits* draft, const outrider_slot* slots,
                           const double* uniforms, const int64_t* drafts, const outrider_row* rows,
                           outrider_verdict* verdicts, double* ratios, void* workspace,
                           size_t workspace_size, outrider_device_plan* plan) {
  outrider_device_call call = {};
  const int32_t status = begin_plan(sizes, slots, workspace, workspace_size, plan, &call);
  if (status != OUTRIDER_OK) return status;
  const bool has_draft = draft != nullptr && draft->data != nullptr;
  const bool shapes = has_draft && rows == nullptr && sizes->width > 0;
  if (!is_valid(target, sizes->vocab_size) || verdicts == nullptr ||
      (has_draft && !is_valid(draft, sizes->draft_vocab_size)) ||
      (shapes && (sizes->flags & OUTRIDER_DEVICE_SHAPES) == 0) ||
      (drafts == nullptr && sizes->width > 0))
    return OUTRIDER_BAD_ARGUMENT;
  call.target = *target;
  if (has_draft) call.draft = *draft;
  call.uniforms = uniforms;
  call.drafts = const_cast<int64_t*>(drafts); // a verification only reads drafts and rows
  call.draft_rows = const_cast<outrider_row*>(rows);
  call.verdicts = verdicts;
  if (ratios != nullptr) call.ratios = ratios;
  const int32_t tiles = shapes ? call.tile_count : tiles_of(target->vocab_size);
  add_kernels(plan, &call, tiles, sizes->width + 1 + (shapes ? sizes->width : 0), sizes->width + 1,
              {"outrider_verify_scan", "outrider_verify_scan_general", "outrider_verify_filter",
               "outrider_verify_mass", "outrider_verify_couple"});
  const bool general = (call.flags & (OUTRIDER_DEVICE_FILTERS | OUTRIDER_DEVICE_PENALTIES)) != 0;
  const char* rest = general ? "outrider_verify_rest_general" : "outrider_verify_rest";
  const int32_t groups = (tiles_of(target->vocab_size) + WARPS - 1) / WARPS;
  add_launch(plan, launch_of(rest, groups, call.residual_count, call.slot_count, WARPS));
  std::memcpy(plan->call, &call, sizeof call);
  return OUTRIDER_OK;
}

} // namespace outrider_device
#endif
#endif
