#include "decoder.h"

#include <math.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <iterator>
#include <numeric>

#include "engines/device_engine.h"
#include "engines/host_engine.h"
#include "outrider_threads.h"

namespace outrider {

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void mark_broken(Sequence& sequence, const Failure& failure) {
  sequence.failure = std::make_unique<Failure>(failure);
  sequence.finish = OUTRIDER_BROKEN;
}

// Runs `work`, whose failure ends only this sequence. Returns whether it succeeded.
template <class Work> bool run_for(Sequence& sequence, const Work& work) {
  try {
    work();
    return true;
  } catch (const Failure& failure) {
    mark_broken(sequence, failure);
    return false;
  }
}

} // namespace

Decoder::Decoder(const outrider_config& config)
    : bundle_(read_bundle(config)),
      library_(bundle_.on_gpu() ? nullptr : std::make_unique<ort::Library>(config.onnxruntime)),
      reuse_(!config.no_reuse), rows_(config.slots > 0 ? config.slots : bundle_.slots) {
  // Hash the weights concurrently with what follows: it takes as long as opening them.
  std::future<void> hashes;
  if (!config.unverified)
    hashes = std::async(std::launch::async, [this] { bundle_.verify(true); });
  const auto finish_hashing = [&] {
    if (hashes.valid()) hashes.get();
  };
  try {
    if (library_)
      guarantees_ = bundle_.guarantees_for(slots(), library_->version, config.plain_width);
    const int32_t gamma = bundle_.max_gamma;
    target_ = open_engine(bundle_.target, 1, config.threads, guarantees_.min_width);
    int32_t width = bundle_.vocab_size;
    if (bundle_.draft) { // its bits may depend on the width of a call: only the target's matter
      draft_ = open_engine(*bundle_.draft, gamma, config.threads, 1);
      width = std::min(width, draft_->vocab_size);
    }
    if (config.corpus_length > 0)
      corpus_ = std::make_unique<Corpus>(Tokens(config.corpus, config.corpus + config.corpus_length));
    const int threads = std::min(config.threads > 0 ? config.threads : cores(), MAX_THREADS);
    sampler_ = std::make_unique<Sampler>(bundle_.vocab_size, width, gamma, slots(), threads);
    proposer_ = std::make_unique<Proposer>(draft_.get(), width, gamma, slots(), threads,
                                           corpus_.get());
  } catch (...) {
    finish_hashing(); // damaged weights explain any other failure, so report them first
    throw;
  }
  finish_hashing();
}

std::unique_ptr<Engine> Decoder::open_engine(const ModelFacts& facts, int32_t buffers, int threads,
                                             int32_t min_width) const {
  const int32_t widest = bundle_.max_gamma + 1;
  if (!library_)
    return std::make_unique<DeviceEngine>(bundle_.backend, bundle_.folder, facts, slots(), widest,
                                          buffers);
  auto engine = std::make_unique<HostEngine>(*library_, bundle_.folder, facts, slots(), widest,
                                             buffers, threads, min_width);
  engine->copies_rows = reuse_ && !facts.states;
  return engine;
}

Sequence& Decoder::sequence(uint64_t request) {
  const auto found = sequences_.find(request);
  if (found == sequences_.end())
    fail(OUTRIDER_FAILED_OPTION, "there is no request " + std::to_string(request),
         "Use a number that outrider_admit or outrider_begin returned, until it is released");
  return *found->second;
}

// Number of a slot's rows that a prompt can reuse. At least two tokens are always computed: the
// last one for its logits, and a second because a call of one token may round differently from
// wider ones.
int64_t Decoder::reusable_rows(int32_t slot, const Tokens& prompt) const {
  const auto max_rows = std::max<int64_t>(0, static_cast<int64_t>(prompt.size()) - 2);
  return target_->cached_rows.resume_position(
      slot, std::min(target_->cached_rows.common_prefix(slot, prompt), max_rows));
}

// The free slot with the fewest rows to compute or overwrite, so that a continued sequence finds
// its rows again; those that any slot holds can be copied. A few lost rows, such as those of
// rejected drafts, are not worth a copy.
int32_t Decoder::acquire(const Tokens& prompt) {
  std::vector<int64_t> held(rows_.size());
  if (reuse_)
    for (int32_t slot = 0; slot < slots(); ++slot) held[slot] = reusable_rows(slot, prompt);
  const int64_t copyable = target_->copies_rows ? *std::max_element(held.begin(), held.end()) : 0;
  const int64_t few = target_->copies_rows ? MIN_COPIED_ROWS : 0;
  int32_t best = -1;
  std::array<int64_t, 3> lowest_cost{};
  for (int32_t slot = 0; slot < slots(); ++slot) {
    if (rows_[slot].busy) continue;
    const int64_t lost = reuse_ ? target_->cached_rows.length(slot) - held[slot] : 0;
    const std::array<int64_t, 3> cost = {
        std::max(few, lost) - std::max(held[slot], copyable), -held[slot], lost};
    if (best < 0 || cost < lowest_cost) best = slot, lowest_cost = cost;
  }
  if (best < 0)
    fail(OUTRIDER_FAILED_BUSY, "all " + std::to_string(slots()) + " slots are in use",
         "Wait for a request to finish and release it, or open the bundle with more slots");
  return best;
}

uint64_t Decoder::admit(const int64_t* prompt, int64_t length, const outrider_options& options) {
  const uint64_t request = begin(prompt, length, options);
  Sequence& made = sequence(request);
  try {
    while (made.reading()) {
      prepare_prompt(made);
      read_prompt(made);
    }
  } catch (const BrokenLogits&) {
    made.finish = OUTRIDER_BROKEN;
    release(request);
    throw;
  } catch (...) {
    release(request);
    throw;
  }
  return request;
}

uint64_t Decoder::begin(const int64_t* prompt, int64_t length, const outrider_options& options) {
  Request request = check_request(prompt, length, options, bundle_, guarantees_.invariance_lost);
  std::map<uint64_t, std::unique_ptr<Sequence>> made; // merged below, which allocates nothing
  Sequence& sequence = *(made[next_request_] = std::make_unique<Sequence>());
  sequence.request = std::move(request);
  // Room for the longest possible sequence: committing a token cannot fail.
  sequence.tokens.reserve(static_cast<size_t>(
      std::min<int64_t>(length + options.max_new_tokens, bundle_.max_len)));
  sequence.tokens.assign(prompt, prompt + length);
  sequence.slot = acquire(sequence.tokens);
  if (rows_[sequence.slot].broken) clear(sequence.slot);
  if (reuse_) {
    sequence.target_len = reusable_rows(sequence.slot, sequence.tokens);
    if (draft_ != nullptr) {
      const int64_t drafted = draft_->cached_rows.common_prefix(sequence.slot, sequence.tokens);
      const int64_t need = length - 1;
      const int64_t available =
          drafted >= need ? need : std::max<int64_t>(0, std::min(drafted, need - 2));
      sequence.draft_len = draft_->cached_rows.resume_position(sequence.slot, available);
    }
  }
  sequence.stats.prompt_tokens = length;
  sequence.stats.reused_tokens = sequence.target_len;
  sequence.turn = ++turns_;
  rows_[sequence.slot].busy = true;
  const std::lock_guard<std::mutex> lock(mutex_);
  sequences_.merge(made);
  return next_request_++;
}

// Copy what other slots hold of the prompt. Returns how many tokens are left to read.
int64_t Decoder::prepare_prompt(Sequence& sequence) {
  // A round that failed may have overwritten the rows that this one would continue from.
  const int64_t start =
      target_->cached_rows.resume_position(sequence.slot, sequence.target_len);
  const int64_t held = target_->copy_prefix( // all but two: see `reusable_rows`
      sequence.slot, sequence.tokens, sequence.length() - 2, start);
  sequence.stats.reused_tokens = std::min(sequence.stats.reused_tokens, start) + held - start;
  sequence.target_len = held;
  return sequence.length() - held;
}

// Let the target read the next chunk of a prompt that is prepared; with the last one, draw the first
// token.
void Decoder::read_prompt(Sequence& sequence) {
  const double begin = now();
  const int64_t start = sequence.target_len;
  const int64_t end = std::min(start + target_->chunk, sequence.length());
  const LogitsView row = target_->prefill(sequence.slot, sequence.tokens, start, end);
  sequence.stats.prefill_seconds += now() - begin;
  if (end < sequence.length()) {
    sequence.target_len = end;
    return;
  }
  sampler_->begin({{&sequence, 0, {}, sequence.request.options.seed, false}});
  const outrider_verdict verdict = sampler_->verify(row, {}, sequence.slot)[0];
  commit_output(sequence, {}, verdict, row, 0);
}

// Let the target read prompts in turns: a chunk of one, or several that are together no longer than
// a chunk. The rounds of other requests wait for no more than that. One that cannot be read ends.
void Decoder::read_prompts() {
  std::vector<Sequence*> readers;
  for (const auto& [number, sequence] : sequences_)
    if (sequence->reading() && sequence->finish == OUTRIDER_RUNNING)
      readers.push_back(sequence.get());
  std::sort(readers.begin(), readers.end(),
            [](const Sequence* a, const Sequence* b) { return a->turn < b->turn; });
  int64_t left = target_->chunk;
  for (Sequence* const reader : readers) {
    int64_t unread = 0;
    if (!run_for(*reader, [&] { unread = prepare_prompt(*reader); })) continue;
    if (unread > left && left < target_->chunk) break;
    left -= unread;
    reader->turn = ++turns_;
    run_for(*reader, [&] { read_prompt(*reader); });
  }
}

// Let the draft model read what it lacks of the sequences; where that is more than a chunk, only a
// chunk of the first such sequence, before the others. These wait, and one that cannot be read ends:
// their plans are removed.
void Decoder::catch_up(std::vector<Plan>& plans) {
  const auto read = [this](Sequence& sequence, int64_t most) {
    return run_for(sequence, [&] { proposer_->catch_up(sequence, most); });
  };
  const auto far = std::stable_partition(plans.begin(), plans.end(), [this](const Plan& plan) {
    return !plan.uses_draft_model() || plan.sequence->missing_draft_rows() <= draft_->chunk;
  });
  if (far != plans.end()) {
    outrider_stats& stats = far->sequence->stats;
    const double begin = now(), draft = draft_->seconds;
    read(*far->sequence, draft_->chunk);
    stats.round_seconds += now() - begin;
    stats.draft_seconds += draft_->seconds - draft;
  }
  std::vector<Plan> ready;
  for (auto plan = plans.begin(); plan != far; ++plan)
    if (!plan->uses_draft_model() || read(*plan->sequence, plan->sequence->length()))
      ready.push_back(*plan);
  plans = std::move(ready);
}

void Decoder::round() {
  drop_cancelled();
  std::vector<Plan> plans;
  for (const auto& [number, sequence] : sequences_)
    if (sequence->finish == OUTRIDER_RUNNING && !sequence->reading())
      plans.push_back({sequence.get(),
                       std::min<int64_t>(sequence->request.options.gamma, max_drafts(*sequence)),
                       {}});
  read_prompts();
  const double begin = now(), target = target_->seconds, draft = draft_ ? draft_->seconds : 0;
  catch_up(plans);
  if (plans.empty()) return;
  record_rows();
  try {
    std::vector<Plan> all = plans;
    speculate(all);
  } catch (const BrokenLogits& broken) {
    if (plans.size() == 1) {
      mark_broken(*plans[0].sequence, broken);
    } else {
      for (const Plan& plan : plans) { // each alone, so that only the broken ones fail
        std::vector<Plan> alone = {plan};
        record_rows();
        try {
          speculate(alone);
        } catch (const BrokenLogits& own) {
          mark_broken(*plan.sequence, own);
        }
      }
    }
  }
  for (const Plan& plan : plans) {
    outrider_stats& stats = plan.sequence->stats;
    stats.round_seconds += now() - begin;
    stats.target_seconds += target_->seconds - target;
    stats.draft_seconds += (draft_ ? draft_->seconds : 0) - draft;
  }
}

// Algorithm 1 of Leviathan et al. 2023 for several sequences, each with its own slot and gamma.
void Decoder::speculate(std::vector<Plan>& plans) {
  // Sample x1..x(gamma) from the draft, with their distributions q.
  const DraftRows q = proposer_->propose(plans, *sampler_, rows_);

  // Run the target once: p1..p(gamma+1) after the text, after x1, ... after x(gamma).
  const Span span = span_of(plans);
  std::vector<int64_t> valid_rows;
  for (const SlotRows& slot : rows_) valid_rows.push_back(slot.target);
  std::vector<SlotInput> inputs;
  for (const Plan& plan : plans) {
    Tokens tokens = {plan.sequence->tokens.back()};
    tokens.insert(tokens.end(), plan.drafts.begin(), plan.drafts.end());
    inputs.push_back({plan.sequence, plan.sequence->target_len,
                      target_->replace_unknown_ids(std::move(tokens))});
  }
  const LogitsView p = forward_slots(*target_, valid_rows, span, inputs);

  // Accept each x with probability min(1, p/q); correct the first rejected one, or extend.
  const std::vector<outrider_verdict>& verdicts = sampler_->verify(p, q, span.first);
  for (size_t b = 0; b < plans.size(); ++b)
    commit_output(*plans[b].sequence, plans[b].drafts, verdicts[b], p,
                  plans[b].sequence->slot - span.first);
}

// Commit the output of a round, or nothing if memory runs out.
void Decoder::commit_output(Sequence& sequence, const Tokens& drafts,
                            const outrider_verdict& verdict, const LogitsView& rows,
                            int32_t row_of) {
  const Request& request = sequence.request;
  const auto gamma = static_cast<int64_t>(drafts.size());
  const bool first = sequence.reading();
  Tokens ids(drafts.begin(), drafts.begin() + verdict.accepted);
  ids.push_back(verdict.token);
  std::deque<Token> emitted;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool last = i + 1 == ids.size();
    int32_t origin = OUTRIDER_ACCEPTED;
    if (last && gamma == 0) origin = first ? OUTRIDER_FIRST : OUTRIDER_PLAIN;
    else if (last) origin = verdict.accepted == gamma ? OUTRIDER_BONUS : OUTRIDER_CORRECTED;
    emitted.push_back(
        make_token(request, ids[i], origin, rows.row(row_of, static_cast<int64_t>(i))));
  }
  sequence.new_tokens.insert(
      sequence.new_tokens.end(), std::make_move_iterator(emitted.begin()),
      std::make_move_iterator(emitted.end())); // the last step that allocates
  // From here on nothing fails, so that the stop callback is called once for each token.
  const auto size = static_cast<int64_t>(ids.size());
  int32_t finish = OUTRIDER_RUNNING;
  int64_t count = 0;
  while (count < size && finish == OUTRIDER_RUNNING) {
    const int64_t id = ids[static_cast<size_t>(count++)];
    finish = finish_of(sequence, id, sequence.stats.output_tokens + count);
  }
  sequence.new_tokens.erase(sequence.new_tokens.end() - (size - count), sequence.new_tokens.end());
  sequence.commit(ids, request.uses_draft_model() ? gamma : 0);
  sequence.roll_back(sequence.length() - (size - count));
  sequence.finish = finish;
  sequence.stats.output_tokens += count;
  if (!first) {
    ++sequence.stats.rounds;
    sequence.stats.drafted += gamma;
    sequence.stats.accepted += std::min<int64_t>(verdict.accepted, count);
  }
}

// A token with the requested log-probabilities of the target's unwarped distribution.
Token Decoder::make_token(const Request& request, int64_t id, int32_t origin,
                          const float* row) const {
  Token token{id, origin, NAN, {}, {}};
  if (request.options.logprobs < 0) return token;
  std::vector<double> logprobs(static_cast<size_t>(bundle_.vocab_size));
  outrider_log_softmax(row, bundle_.vocab_size, logprobs.data());
  token.logprob = logprobs[static_cast<size_t>(id)];
  Tokens order(logprobs.size());
  std::iota(order.begin(), order.end(), 0);
  const auto best = order.begin() + request.options.logprobs;
  std::partial_sort(order.begin(), best, order.end(), [&](int64_t a, int64_t b) {
    return logprobs[a] != logprobs[b] ? logprobs[a] > logprobs[b] : a < b;
  });
  token.ids.assign(order.begin(), best);
  for (const int64_t other : token.ids) token.logprobs.push_back(logprobs[other]);
  return token;
}

// Why the sequence ends with this token, the `count`-th of its output.
int32_t Decoder::finish_of(const Sequence& sequence, int64_t token, int64_t count) const {
  const Request& request = sequence.request;
  const auto token_in = [&](const Tokens& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  if (!request.options.ignore_eos && token_in(request.eos_ids)) return OUTRIDER_EOS;
  if (token_in(request.stop_ids)) return OUTRIDER_STOPPED;
  if (request.options.stop && request.options.stop(request.options.stop_data, token) != 0)
    return OUTRIDER_STOPPED;
  if (count == request.options.max_new_tokens) return OUTRIDER_LENGTH;
  // Prompt plus emitted tokens, since `tokens` grows only when the whole block is committed.
  if (request.prompt_length + count == bundle_.max_len)
    return OUTRIDER_CONTEXT;
  return OUTRIDER_RUNNING;
}

// Maximum number of tokens to draft: those that can still become output and fit the contexts.
int64_t Decoder::max_drafts(const Sequence& sequence) const {
  const Request& request = sequence.request;
  const int64_t left =
      std::min<int64_t>(request.options.max_new_tokens - sequence.stats.output_tokens,
                        bundle_.max_len - sequence.length());
  int64_t limit = left - 1;
  if (request.uses_draft_model())
    limit = draft_ ? std::min(limit, bundle_.draft->max_len - sequence.length()) : 0;
  return std::max<int64_t>(0, limit);
}

void Decoder::cancel(uint64_t request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sequences_.find(request);
  if (found != sequences_.end()) found->second->cancelled = true;
}

void Decoder::drop_cancelled() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [number, sequence] : sequences_)
    if (sequence->cancelled && sequence->finish == OUTRIDER_RUNNING)
      sequence->finish = OUTRIDER_CANCELLED;
}

// Record how many rows the busy slots hold; free slots keep their last record.
void Decoder::record_rows() {
  for (const auto& [number, sequence] : sequences_) {
    rows_[sequence->slot].target = sequence->target_len;
    rows_[sequence->slot].draft = sequence->draft_len;
  }
}

// Free the slot. If its logits were broken, the cause may be in its rows: they are cleared now or,
// if that fails, when the next request takes the slot.
void Decoder::free_slot(Sequence& sequence) {
  rows_[sequence.slot] = {sequence.target_len, sequence.draft_len, false};
  if (sequence.finish == OUTRIDER_BROKEN) clear(sequence.slot);
}

void Decoder::clear(int32_t slot) {
  rows_[slot].broken = true;
  target_->clear(slot);
  if (draft_) draft_->clear(slot);
  rows_[slot].broken = false;
}

void Decoder::release(uint64_t request) {
  sequence(request); // throws if there is no such request
  std::unique_lock<std::mutex> lock(mutex_);
  const auto released = sequences_.extract(request); // even if clearing its rows fails
  lock.unlock();
  free_slot(*released.mapped());
}

} // namespace outrider
