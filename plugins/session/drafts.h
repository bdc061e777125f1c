// The draft tokens of a round, from each request's source: runtime/drafts/proposer.py in C++.
#ifndef OUTRIDER_SESSION_DRAFTS_H
#define OUTRIDER_SESSION_DRAFTS_H

#include <memory>
#include <vector>

#include "sampler.h"

namespace outrider {

// One sequence's part of a round.
struct Plan {
  Sequence* sequence;
  int64_t gamma; // maximum number of draft tokens; after drafting, their actual number
  Tokens drafts;

  bool uses_draft_model() const { return gamma > 0 && sequence->request.uses_draft_model(); }
};

// The smallest range of consecutive slots, first .. last - 1, that contains all parts.
struct Span {
  int32_t first, last;
};
template <class Part> const Sequence& sequence_of(const Part& part) { return *part.sequence; }
template <class Part> const Sequence& sequence_of(Part* const& part) { return *part->sequence; }
template <class Parts> Span span_of(const Parts& parts) {
  Span found{INT32_MAX, 0};
  for (const auto& part : parts) {
    const int32_t slot = sequence_of(part).slot;
    found = {std::min(found.first, slot), std::max(found.last, slot + 1)};
  }
  return found;
}

// The input of one slot in a call: the row of its first token, and its tokens.
struct SlotInput {
  const Sequence* sequence;
  int64_t start;
  Tokens tokens;
};

// One call for the slots of a span. Returns the logits after the tokens from number `since` on. For
// slots without input, the call writes rows from valid_rows[slot] on, after their valid rows.
LogitsView forward_slots(Engine& engine, const std::vector<int64_t>& valid_rows, Span span,
                         const std::vector<SlotInput>& inputs, int64_t since = 0,
                         int32_t buffer = 0);

class Proposer {
public:
  // engine: the draft model, or null. width: V that target and draft share. corpus: or null.
  Proposer(Engine* engine, int32_t width, int32_t max_gamma, int32_t slots, int threads,
           const Corpus* corpus);

  // Let the draft model read at most `most` of the tokens that it lacks of a sequence: those of the
  // prompt at first, of plain rounds later.
  void catch_up(Sequence& sequence, int64_t most);

  // Draft at most gamma tokens for each of these sequences, which the draft model has caught up
  // with, and begin the sampler's round. rows: the valid rows of all slots. Throws Failure, or
  // BrokenLogits for the logits of one sequence.
  DraftRows propose(std::vector<Plan>& plans, Sampler& sampler, const std::vector<SlotRows>& rows);

private:
  using Plans = std::vector<Plan*>;
  Tokens look_up(Sequence& sequence, const Tokens& drafts, int64_t count) const;
  void draft_all_at_once(std::vector<Plan>& plans, const std::vector<int64_t>& valid_rows);
  void draft_chain(const Plans& plans, const std::vector<int64_t>& valid_rows);
  DraftRows draft_steps(std::vector<Plan>& plans, Sampler& sampler,
                        const std::vector<int64_t>& valid_rows);
  void draw(std::vector<Plan>& plans, Sampler& sampler, const LogitsView& logits, int64_t number,
            int32_t first) const;
  LogitsView run_step(const Plans& drafting, const std::vector<int64_t>& valid_rows, int64_t number,
                      Span span);
  void fill_row(float* row, const Plan& plan, int64_t step) const;

  Engine* const engine_;
  const int32_t width_, slots_;
  const Corpus* const corpus_;
  // For chain's inner rounds: the draft model verifies lookups.
  std::unique_ptr<Sampler> inner_sampler_;
  std::vector<float> step_rows_;  // [gamma, slots, width] rows that are not in an engine's buffer
  std::vector<float> chain_rows_; // [gamma, slots, width] rows that chain's tokens were drawn from
};

} // namespace outrider
#endif
