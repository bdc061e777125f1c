// The sampling of a round by the kernel: `begin`, then `draw` for each step or `set_drafts`, then
// `verify` (runtime/sampling/native.py in C++).
#ifndef OUTRIDER_SESSION_SAMPLER_H
#define OUTRIDER_SESSION_SAMPLER_H

#include <string>
#include <vector>

#include "sequence.h"

namespace outrider {

// The logits of one sequence are broken; the others may continue without it.
struct BrokenLogits : Failure {};

// One sequence's part of a round. gamma: number of draft tokens. drafts: tokens of the same round
// that precede them, decided in earlier inner rounds.
struct SlotSampling {
  const Sequence* sequence;
  int64_t gamma;
  Tokens drafts;
  uint64_t seed;
  bool inner_round; // its rule is token, or coupled if the request's rule is
};

// Draft logits of a round, one row per step, evenly spaced in memory.
struct DraftRows {
  float* data = nullptr; // null: point masses
  int64_t slot_stride = 0, step_stride = 0; // in elements
  int32_t first = 0;                        // the slot that data points to
};

class Sampler {
public:
  Sampler(int32_t vocab_size, int32_t draft_vocab_size, int32_t width, int32_t slots, int threads)
      : vocab_size_(vocab_size), draft_vocab_size_(draft_vocab_size), width_(width),
        threads_(threads), slots_(slots), drafts_(slots * width), rows_(slots * width),
        verdicts_(slots), context_(slots),
        workspace_(outrider_workspace_size(std::max(vocab_size, draft_vocab_size), width, threads)) {
  }

  void begin(std::vector<SlotSampling> places) {
    places_ = std::move(places);
    has_drawn_rows_ = false;
    for (size_t b = 0; b < places_.size(); ++b) fill_slot(b);
  }

  // Draw the draft token of `step` for every place with step < gamma. logits: [S, V] of the draft.
  void draw(const LogitsView& logits, int64_t step, int32_t first) {
    has_drawn_rows_ = true;
    const int64_t stride = logits.outputs * logits.vocab_size;
    const outrider_logits rows = make_logits(logits.data, stride, stride, draft_vocab_size_, first);
    check(outrider_draw(&rows, slots_.data(), count(), width_, static_cast<int32_t>(step), nullptr,
                        drafts_.data(), rows_.data(), verdicts_.data(), workspace_.data(),
                        workspace_.size(), threads_));
  }
  int64_t drawn_token(size_t b, int64_t step) const { return drafts_[b * width_ + step]; }

  // Reduce the number of draft tokens of the b-th place to gamma.
  void shorten(size_t b, int64_t gamma) {
    places_[b].gamma = gamma;
    slots_[b].gamma = static_cast<int32_t>(gamma);
  }

  // Set all draft tokens of a place that were not drawn by `draw`.
  void set_drafts(size_t b, const Tokens& drafts) {
    has_drawn_rows_ = false;
    std::copy(drafts.begin(), drafts.end(), drafts_.begin() + static_cast<int64_t>(b) * width_);
  }

  // Accept, correct or extend. target: [S, K, V] of the slots from `first` on.
  const std::vector<outrider_verdict>& verify(const LogitsView& target, const DraftRows& draft,
                                              int32_t first) {
    const outrider_logits rows = make_logits(target.data, target.outputs * target.vocab_size,
                                             target.vocab_size, vocab_size_, first);
    const outrider_logits q = make_logits(draft.data, draft.slot_stride, draft.step_stride,
                                          draft_vocab_size_, draft.first); // null: point masses
    check(outrider_verify(&rows, &q, slots_.data(), count(), width_, nullptr, drafts_.data(),
                          has_drawn_rows_ ? rows_.data() : nullptr, verdicts_.data(), nullptr,
                          workspace_.data(), workspace_.size(), threads_));
    return verdicts_;
  }

private:
  int32_t count() const { return static_cast<int32_t>(places_.size()); }

  static outrider_logits make_logits(const float* data, int64_t slot_stride, int64_t row_stride,
                                     int32_t vocab_size, int32_t first) {
    constexpr int64_t BYTES = sizeof(float);
    return {reinterpret_cast<const char*>(data) - first * slot_stride * BYTES, slot_stride * BYTES,
            row_stride * BYTES, vocab_size, OUTRIDER_FLOAT32};
  }

  void fill_slot(size_t b) {
    const SlotSampling& place = places_[b];
    const Sequence& sequence = *place.sequence;
    const Request& request = sequence.request;
    const outrider_options& options = request.options;
    context_[b].clear();
    if (request.has_penalties()) {
      context_[b] = sequence.tokens;
      context_[b].insert(context_[b].end(), place.drafts.begin(), place.drafts.end());
    }
    const int64_t before = static_cast<int64_t>(place.drafts.size());
    const int64_t masked = sequence.min_tokens_left() - before;
    outrider_slot slot{};
    slot.seed = place.seed;
    slot.top_p = options.top_p;
    slot.lenience = place.inner_round ? 1 : options.lenience;
    slot.sigmoid_alpha = options.sigmoid_alpha, slot.sigmoid_beta = options.sigmoid_beta;
    slot.context = context_[b].empty() ? nullptr : context_[b].data();
    slot.context_length = static_cast<int32_t>(context_[b].size());
    slot.output_start = static_cast<int32_t>(request.prompt_length);
    if (masked > 0 && !request.eos_ids.empty()) {
      slot.suppress = request.eos_ids.data();
      slot.suppress_length = static_cast<int32_t>(request.eos_ids.size());
    }
    slot.suppress_rows =
        static_cast<int32_t>(std::max<int64_t>(0, std::min(masked, place.gamma + 1)));
    slot.bias_ids = request.bias_ids.empty() ? nullptr : request.bias_ids.data();
    slot.biases = request.biases.empty() ? nullptr : request.biases.data();
    slot.bias_length = static_cast<int32_t>(request.bias_ids.size());
    slot.temperature = static_cast<float>(options.temperature);
    slot.min_p = static_cast<float>(options.min_p);
    slot.repetition_penalty = static_cast<float>(options.repetition_penalty);
    slot.frequency_penalty = static_cast<float>(options.frequency_penalty);
    slot.presence_penalty = static_cast<float>(options.presence_penalty);
    slot.top_k = options.top_k;
    slot.rule =
        place.inner_round && options.rule != OUTRIDER_COUPLED ? OUTRIDER_TOKEN : options.rule;
    slot.gamma = static_cast<int32_t>(place.gamma);
    slot.position = static_cast<uint32_t>(sequence.length() + before);
    slot.index = sequence.slot;
    slots_[b] = slot;
  }

  void check(int32_t status) const {
    if (status == OUTRIDER_OK) return;
    if (status != OUTRIDER_SLOT_FAILED)
      fail(OUTRIDER_FAILED_OPTION, outrider_status_text(status), "Report this bug in Outrider");
    size_t b = 0;
    while (verdicts_[b].status == OUTRIDER_OK) ++b;
    const outrider_verdict& verdict = verdicts_[b];
    if (verdict.status == OUTRIDER_NO_DRAFT_LOGITS)
      throw BrokenLogits{{OUTRIDER_FAILED_OPTION,
                          "the sigmoid rule needs the draft's logits, and this draft has none",
                          "Use the token rule, or a draft model"}};
    const char* model = verdict.model == OUTRIDER_TARGET ? "target" : "draft";
    throw BrokenLogits{
        {OUTRIDER_FAILED_NUMERIC,
         std::string(model) + ", slot " + std::to_string(slots_[b].index) + ", position " +
             std::to_string(slots_[b].position + static_cast<uint32_t>(verdict.row)) + ": " +
             outrider_status_text(verdict.status),
         "Build the engines with DTYPE=float32, and check that the checkpoint is intact"}};
  }

  const int32_t vocab_size_, draft_vocab_size_, width_, threads_;
  std::vector<SlotSampling> places_;
  std::vector<outrider_slot> slots_;
  Tokens drafts_; // [slots, width]
  std::vector<outrider_row> rows_;
  std::vector<outrider_verdict> verdicts_;
  std::vector<Tokens> context_;
  std::vector<char> workspace_;
  bool has_drawn_rows_ = false;
};

} // namespace outrider
#endif
