// A slot's tokens between the calls of the models: see outrider_bookkeeping in outrider.h. One thread
// per slot: there are few, and their work is short compared with the models'.
#ifndef OUTRIDER_DEVICE_BOOKKEEPING_CUH
#define OUTRIDER_DEVICE_BOOKKEEPING_CUH

#include "outrider_device_row.cuh"

namespace {

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
DEVICE uint64_t global_timer() { // nanoseconds, in steps of up to a microsecond
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
#endif

template <class Each> DEVICE void for_each_slot(const outrider_bookkeeping& data, const Each& each) {
  for (int b = static_cast<int>(threadIdx.x); b < data.slot_count;
       b += static_cast<int>(blockDim.x))
    each(b);
}

DEVICE void record_time(const outrider_bookkeeping& data, int i) {
  if (threadIdx.x == 0) data.clock[i] = global_timer();
}

DEVICE int min_of(int a, int b) { return a < b ? a : b; }

// Number of draft tokens: those wanted that can still become output and fit the draft's context.
DEVICE int gamma_of(const outrider_bookkeeping& data, const outrider_sequence& sequence, int b) {
  const int left = min_of(sequence.max_length - sequence.length - 1,
                          sequence.draft_max_length - sequence.length);
  const int gamma = min_of(min_of(data.turns[b], data.width), left);
  return gamma > 0 ? gamma : 0;
}

DEVICE void begin_round(const outrider_bookkeeping& data) {
  record_time(data, 0);
  if (data.width == 0) record_time(data, 1);
  for_each_slot(data, [&](int b) {
    const outrider_sequence& sequence = data.sequences[b];
    outrider_slot& slot = data.slots[b];
    const int length = sequence.length, gamma = gamma_of(data, sequence, b);
    slot.gamma = data.turns[b] >= 0 && sequence.ended == 0 ? gamma : -1;
    slot.position = static_cast<uint32_t>(length);
    slot.context_length = slot.context != nullptr ? length : 0;
    const int early = sequence.unsuppressed - length;
    slot.suppress_rows = early <= 0 ? 0 : min_of(early, gamma + 1);
    // Also correct for a slot without a turn: it gets the same tokens at the same rows as before.
    // Beyond the draft's context nothing is drafted any more, so its rows may be overwritten.
    const int before = length >= 2 && length <= sequence.draft_max_length ? length - 2 : 0;
    const int last = length >= 1 ? length - 1 : 0;
    const int64_t pending = length >= 1 ? sequence.tokens[last] : 0;
    if (data.width > 0) {
      data.draft_ids[2 * b] = length >= 2 ? sequence.draft_tokens[before] : 0;
      data.draft_ids[2 * b + 1] = length >= 2 ? sequence.draft_tokens[before + 1] : 0;
      data.draft_position[b] = before;
    }
    data.target_ids[static_cast<int64_t>(b) * (data.width + 1)] = pending;
    data.target_position[b] = last;
  });
}

DEVICE void feed_draft(const outrider_bookkeeping& data) {
  for_each_slot(data, [&](int b) {
    const bool drew = data.step < data.slots[b].gamma;
    // -1 marks a broken row, which the verification reports; the models get 0 instead.
    const int64_t drawn = drew ? data.drafts[static_cast<int64_t>(b) * data.width + data.step] : 0;
    const int64_t token = drawn < 0 ? 0 : drawn;
    data.target_ids[static_cast<int64_t>(b) * (data.width + 1) + 1 + data.step] = token;
    const int64_t position = data.step == 0 ? data.draft_position[b] : data.step_position[b];
    // Past its own gamma, a slot repeats its last draft token, and a slot without drafts gets 0
    // after its last token. These rows are never committed.
    if (drew || data.step == 0) data.step_ids[b] = token;
    data.step_position[b] = position + (data.step == 0 ? 2 : drew ? 1 : 0);
  });
  if (data.step == data.width - 1) record_time(data, 1);
}

DEVICE bool is_end_id(const outrider_sequence& sequence, int64_t token) {
  for (int i = 0; i < sequence.end_count; ++i)
    if (sequence.ends[i] == token) return true;
  return false;
}

DEVICE void commit_round(const outrider_bookkeeping& data) {
  for_each_slot(data, [&](int b) {
    outrider_sequence& sequence = data.sequences[b];
    const outrider_verdict& verdict = data.verdicts[b];
    if (data.slots[b].gamma < 0) return;
    if (verdict.status != OUTRIDER_OK) sequence.ended = 1;
    for (int i = 0; i <= verdict.accepted && sequence.ended == 0; ++i) {
      const int64_t token = i < verdict.accepted
                                ? data.drafts[static_cast<int64_t>(b) * data.width + i]
                                : verdict.token;
      // In this order: if the two are the same array, the target's token must win.
      sequence.draft_tokens[sequence.length] = token < data.draft_vocab_size ? token : 0;
      sequence.tokens[sequence.length] = token;
      sequence.length += 1;
      if (is_end_id(sequence, token) || sequence.length >= sequence.max_length) sequence.ended = 1;
    }
  });
  record_time(data, 2);
}

} // namespace
#endif
