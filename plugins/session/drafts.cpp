#include "drafts.h"

#include <math.h>

namespace outrider {

namespace {

constexpr uint32_t CHAIN = 3; // Philox purpose of chain's rounds: runtime/sampling/philox.py

// The factor by which logits are multiplied so that dividing them by the target's temperature gives
// the draft's temperature.
double temperature_ratio(const Sequence& sequence) {
  const outrider_options& options = sequence.request.options;
  return options.draft_temperature == 0 ? 1 : options.temperature / options.draft_temperature;
}

void apply_temperature(float* row, int64_t count, const Sequence& sequence) {
  const auto factor = static_cast<float>(temperature_ratio(sequence));
  if (factor == 1) return;
  for (int64_t i = 0; i < count; ++i) row[i] *= factor;
}

} // namespace

LogitsView forward_slots(Engine& engine, const std::vector<int64_t>& valid_rows, Span span,
                         const std::vector<SlotInput>& inputs, int64_t since, int32_t buffer) {
  int64_t longest = 0;
  for (const SlotInput& one : inputs)
    longest = std::max(longest, static_cast<int64_t>(one.tokens.size()));
  const int64_t width = std::max<int64_t>(longest, engine.min_width);
  const int64_t batch = span.last - span.first;
  Tokens ids(static_cast<size_t>(batch * width)), position(static_cast<size_t>(batch));
  // A finished sequence of full length has more rows than the largest position a call may begin at.
  for (int64_t b = 0; b < batch; ++b)
    position[b] = std::min(valid_rows[span.first + b], engine.capacity - width);
  for (const SlotInput& one : inputs) {
    const int64_t b = one.sequence->slot - span.first;
    std::copy(one.tokens.begin(), one.tokens.end(), ids.begin() + b * width);
    position[b] = one.start;
  }
  return engine.forward(ids, position, since, longest - since, span.first, buffer);
}

Proposer::Proposer(Engine* engine, int32_t width, int32_t max_gamma, int32_t slots, int threads,
                   const Corpus* corpus)
    : engine_(engine), width_(width), slots_(slots), corpus_(corpus) {
  if (engine != nullptr)
    inner_sampler_ = std::make_unique<Sampler>(width, width, max_gamma, slots, threads);
}

void Proposer::catch_up(Sequence& sequence, int64_t most) {
  if (sequence.missing_draft_rows() == 0) return;
  const int64_t need = sequence.draft_len + sequence.missing_draft_rows();
  // A failed prefill may have overwritten the rows that this one would continue from.
  int64_t start = engine_->cached_rows.resume_position(sequence.slot, sequence.draft_len);
  sequence.draft_len = start; // in case that this one fails too
  start = engine_->copy_prefix(sequence.slot, sequence.tokens, need, start);
  const int64_t end = std::min(need, start + most);
  engine_->prefill(sequence.slot, sequence.tokens, start, end);
  sequence.draft_len = end;
}

DraftRows Proposer::propose(std::vector<Plan>& plans, Sampler& sampler,
                            const std::vector<SlotRows>& rows) {
  std::vector<int64_t> valid_rows;
  for (const SlotRows& slot : rows) valid_rows.push_back(slot.draft);
  draft_all_at_once(plans, valid_rows);
  std::vector<SlotSampling> places;
  bool any_rows = false, any_chain = false;
  for (const Plan& plan : plans) {
    const Request& request = plan.sequence->request;
    places.push_back({plan.sequence, plan.gamma, {}, request.options.seed, false});
    any_rows |= plan.gamma > 0 && !request.drafts_point_masses();
    any_chain |= plan.gamma > 0 && request.options.draft == OUTRIDER_DRAFT_CHAIN;
  }
  sampler.begin(std::move(places));
  const DraftRows found = any_rows ? draft_steps(plans, sampler, valid_rows) : DraftRows();
  if (!any_rows || any_chain)
    for (size_t b = 0; b < plans.size(); ++b) sampler.set_drafts(b, plans[b].drafts);
  return found;
}

// Draw x1..x(gamma) of each sequence from q; for tokens already drafted, only provide the rows.
DraftRows Proposer::draft_steps(std::vector<Plan>& plans, Sampler& sampler,
                                const std::vector<int64_t>& valid_rows) {
  // stepping: sequences that use the draft model, which its calls have to include or to avoid.
  Plans with_drafts, stepping;
  bool draws = false, other_sources = false; // draft sources other than the draft model
  for (Plan& plan : plans) {
    if (plan.gamma == 0) continue;
    const Request& request = plan.sequence->request;
    with_drafts.push_back(&plan);
    if (request.uses_draft_model()) stepping.push_back(&plan);
    other_sources |= request.options.draft != OUTRIDER_DRAFT_MODEL;
    draws |= !request.drafts_all_at_once();
  }
  const auto max_gamma = [&](bool of_model = false) {
    int64_t gamma = 0;
    for (const Plan* plan : with_drafts)
      if (!of_model || plan->sequence->request.options.draft == OUTRIDER_DRAFT_MODEL)
        gamma = std::max(gamma, plan->gamma);
    return gamma;
  };
  const Span span = span_of(with_drafts);
  // All rows of a round are in one buffer: the engine's, unless there are other draft sources.
  if (other_sources)
    step_rows_.resize(
        std::max(step_rows_.size(), static_cast<size_t>(max_gamma() * slots_ * width_)));
  float* const own = other_sources ? step_rows_.data() : nullptr;
  DraftRows found;
  found.first = span.first;
  for (int64_t number = 0; number < max_gamma(); ++number) {
    LogitsView logits{};
    if (own != nullptr) logits = {own + (number * slots_ + span.first) * width_, 1, width_};
    if (number < max_gamma(true)) {
      const LogitsView called = run_step(stepping, valid_rows, number, span);
      if (own == nullptr) logits = called;
      else
        for (int64_t b = 0; b < span.last - span.first; ++b)
          std::copy_n(called.row(b), width_, logits.row(b));
    }
    if (number == 0) {
      found.data = logits.data;
      found.slot_stride = logits.outputs * logits.vocab_size;
    } else {
      found.step_stride = (logits.data - found.data) / number;
    }
    for (const Plan* plan : with_drafts)
      if (number < plan->gamma)
        fill_row(logits.row(plan->sequence->slot - span.first), *plan, number);
    if (draws) draw(plans, sampler, logits, number, span.first);
  }
  return found;
}

// Draw one token for each sequence that draws, and stop drafting after a token below the threshold.
void Proposer::draw(std::vector<Plan>& plans, Sampler& sampler, const LogitsView& logits,
                    int64_t number, int32_t first) const {
  sampler.draw(logits, number, first);
  for (size_t b = 0; b < plans.size(); ++b) {
    Plan& plan = plans[b];
    const Sequence& sequence = *plan.sequence;
    if (number >= plan.gamma || sequence.request.drafts_all_at_once()) continue;
    const int64_t token = sampler.drawn_token(b, number);
    plan.drafts.push_back(token);
    const double threshold = sequence.request.options.draft_threshold;
    if (threshold > 0 && number + 1 < plan.gamma &&
        outrider_confidence(logits.row(sequence.slot - first), width_, token,
                            temperature_ratio(sequence)) < threshold) {
      plan.gamma = number + 1;
      sampler.shorten(b, plan.gamma);
    }
  }
}

// At most `count` tokens after the sequence and these drafts, by n-gram lookup.
Tokens Proposer::look_up(Sequence& sequence, const Tokens& drafts, int64_t count) const {
  const bool copies = sequence.request.options.draft == OUTRIDER_DRAFT_COPY;
  const auto known = copies ? static_cast<size_t>(sequence.request.prompt_length)
                            : sequence.tokens.size();
  sequence.lookup.read(sequence.tokens, known);
  Tokens after(sequence.tokens.begin() + static_cast<int64_t>(known), sequence.tokens.end());
  after.insert(after.end(), drafts.begin(), drafts.end());
  return sequence.lookup.propose(count, after, corpus_);
}

// Draft for the sources that give all tokens at once, and set gamma to their number.
void Proposer::draft_all_at_once(std::vector<Plan>& plans, const std::vector<int64_t>& valid_rows) {
  Plans chained;
  for (Plan& plan : plans) {
    const Request& request = plan.sequence->request;
    if (plan.gamma == 0 || !request.drafts_all_at_once()) continue;
    if (request.drafts_point_masses()) {
      plan.drafts = look_up(*plan.sequence, {}, plan.gamma);
    } else {
      chained.push_back(&plan);
    }
  }
  if (!chained.empty()) draft_chain(chained, valid_rows);
  for (Plan& plan : plans) {
    if (plan.gamma == 0 || !plan.sequence->request.drafts_all_at_once()) continue;
    plan.gamma = plan.sequence->first_forbidden(plan.drafts, width_);
    plan.drafts.resize(static_cast<size_t>(plan.gamma));
  }
}

// Generate the draft model's tokens by speculative decoding with lookups as its draft: the
// hierarchical version of Leviathan et al. 2023, section 5 (runtime/drafts/chain.py in C++).
void Proposer::draft_chain(const Plans& plans, const std::vector<int64_t>& valid_rows) {
  int64_t max_gamma = 0;
  for (const Plan* plan : plans) max_gamma = std::max(max_gamma, plan->gamma);
  chain_rows_.resize(
      std::max(chain_rows_.size(), static_cast<size_t>(max_gamma * slots_ * width_)));
  for (;;) {
    Plans active;
    for (Plan* plan : plans)
      if (static_cast<int64_t>(plan->drafts.size()) < plan->gamma) active.push_back(plan);
    if (active.empty()) return;
    // One sequence at a time with a recurrent state: it has few rows, none of them for the padding
    // of a call that another sequence's longer guess widens.
    if (engine_->cached_rows.has_state()) active.resize(1);
    // Draft with lookups, verify with the draft model, accept or correct or extend.
    std::vector<Tokens> guesses;
    std::vector<SlotInput> inputs;
    std::vector<SlotSampling> places;
    for (Plan* plan : active) {
      Sequence& sequence = *plan->sequence;
      const auto done = static_cast<int64_t>(plan->drafts.size());
      const int64_t count = plan->gamma - done - 1;
      Tokens tokens = count > 0 ? look_up(sequence, plan->drafts, count) : Tokens();
      tokens.resize(static_cast<size_t>(sequence.first_forbidden(tokens, width_, done)));
      Tokens known(sequence.tokens.end() - 2, sequence.tokens.end()); // two, as in `step`
      known.insert(known.end(), plan->drafts.begin(), plan->drafts.end());
      Tokens input(known.end() - 2, known.end());
      input.insert(input.end(), tokens.begin(), tokens.end());
      inputs.push_back(
          {&sequence, sequence.length() + done - 2, engine_->replace_unknown_ids(input)});
      const outrider_options& options = sequence.request.options;
      uint64_t seed = options.seed;
      if (options.rule != OUTRIDER_COUPLED) { // a separate random stream for each round
        const uint32_t counter[4] = {static_cast<uint32_t>(sequence.length()), CHAIN, 0, 0};
        uint32_t words[4];
        outrider_philox4x32(options.seed, counter, words);
        seed = static_cast<uint64_t>(words[1]) << 32 | words[0];
      }
      places.push_back({&sequence, static_cast<int64_t>(tokens.size()), plan->drafts, seed, true});
      guesses.push_back(std::move(tokens));
    }
    const Span span = span_of(inputs);
    // Sequences that are done get no input, and the call writes after the rows of their drafts.
    for (const Plan* plan : plans) {
      const auto done = static_cast<int64_t>(plan->drafts.size());
      const Sequence& sequence = *plan->sequence;
      if (done >= plan->gamma && sequence.slot >= span.first && sequence.slot < span.last)
        inputs.push_back({&sequence, sequence.length() - 1 + done, {}});
    }
    const LogitsView logits = forward_slots(*engine_, valid_rows, span, inputs, 1);
    for (Plan* plan : active)
      apply_temperature(logits.row(plan->sequence->slot - span.first),
                        logits.outputs * logits.vocab_size, *plan->sequence);
    inner_sampler_->begin(std::move(places));
    for (size_t b = 0; b < active.size(); ++b) inner_sampler_->set_drafts(b, guesses[b]);
    const std::vector<outrider_verdict>& verdicts = inner_sampler_->verify(logits, {}, span.first);
    for (size_t b = 0; b < active.size(); ++b) {
      Plan& plan = *active[b];
      const int32_t slot = plan.sequence->slot;
      const int64_t accepted = verdicts[b].accepted;
      Tokens drawn(guesses[b].begin(), guesses[b].begin() + accepted);
      drawn.push_back(verdicts[b].token);
      for (size_t k = 0; k < drawn.size(); ++k) {
        const float* row = logits.row(slot - span.first, static_cast<int64_t>(k));
        const auto at = static_cast<int64_t>(plan.drafts.size());
        std::copy(row, row + width_, chain_rows_.begin() + (at * slots_ + slot) * width_);
        plan.drafts.push_back(drawn[k]);
      }
    }
  }
}

// Logits [S, V] of one step of the draft model, in that step's buffer.
LogitsView Proposer::run_step(const Plans& drafting, const std::vector<int64_t>& valid_rows,
                              int64_t number, Span span) {
  std::vector<SlotInput> inputs;
  for (const Plan* plan : drafting) {
    const Sequence& sequence = *plan->sequence;
    const auto count = static_cast<int64_t>(plan->drafts.size());
    if (sequence.request.drafts_all_at_once()) { // chain has written its rows: write after them
      inputs.push_back({&sequence, sequence.length() - 1 + count, {}});
      continue;
    }
    // The first step takes two tokens, because after a fully accepted round the draft lacks a row.
    // Past its own gamma, a sequence repeats its last draft token; that row is never committed.
    const Tokens& text = sequence.tokens;
    if (number == 0)
      inputs.push_back({&sequence, sequence.length() - 2,
                        engine_->replace_unknown_ids(Tokens(text.end() - 2, text.end()))});
    else
      inputs.push_back(
          {&sequence, sequence.length() - 1 + count,
           engine_->replace_unknown_ids(Tokens(plan->drafts.end() - 1, plan->drafts.end()))});
  }
  return forward_slots(*engine_, valid_rows, span, inputs, number == 0 ? 1 : 0,
                       static_cast<int32_t>(number));
}

// Turn a row [V] into the logits that the sequence's token of this step is drawn from.
void Proposer::fill_row(float* row, const Plan& plan, int64_t step) const {
  const Sequence& sequence = *plan.sequence;
  if (sequence.request.drafts_point_masses()) { // all mass on the guessed token
    std::fill(row, row + width_, -INFINITY);
    row[plan.drafts[static_cast<size_t>(step)]] = 0;
  } else if (sequence.request.options.draft == OUTRIDER_DRAFT_CHAIN) {
    const auto from = chain_rows_.begin() + (step * slots_ + sequence.slot) * width_;
    std::copy(from, from + width_, row);
  } else {
    if (sequence.request.options.draft == OUTRIDER_DRAFT_RANDOM) std::fill(row, row + width_, 0.0f);
    apply_temperature(row, width_, sequence);
  }
}

} // namespace outrider
