// A request, its sequence and the lengths of its caches (runtime/sequence.py, slots.py in C++).
#ifndef OUTRIDER_SESSION_SEQUENCE_H
#define OUTRIDER_SESSION_SEQUENCE_H

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "lookup.h"

namespace outrider {

// The validated options of one request, with copies of everything they point to.
struct Request {
  outrider_options options;
  int64_t prompt_length;
  Tokens bias_ids; // ascending
  std::vector<float> biases;
  Tokens stop_ids;
  Tokens eos_ids; // the bundle's

  bool has_penalties() const {
    return options.repetition_penalty != 1 || options.frequency_penalty != 0 ||
           options.presence_penalty != 0;
  }
  bool uses_draft_model() const {
    return options.draft == OUTRIDER_DRAFT_MODEL || options.draft == OUTRIDER_DRAFT_CHAIN;
  }
  bool drafts_point_masses() const {
    return options.draft == OUTRIDER_DRAFT_NGRAM || options.draft == OUTRIDER_DRAFT_COPY;
  }
  bool drafts_all_at_once() const {
    return drafts_point_masses() || options.draft == OUTRIDER_DRAFT_CHAIN;
  }
};

struct Token {
  int64_t id;
  int32_t origin;
  double logprob;
  Tokens ids;
  std::vector<double> logprobs;
};

// A request in its slot. Between rounds the last token is pending: emitted, but in neither cache.
struct Sequence {
  Request request;
  int32_t slot;
  Tokens tokens; // prompt and output so far
  int64_t target_len = 0, draft_len = 0; // committed rows
  int32_t finish = OUTRIDER_RUNNING;
  uint64_t turn = 0;                // those that read have their turns in this order
  bool cancelled = false;           // set by any thread, read before the next round
  std::unique_ptr<Failure> failure; // why it was broken off
  std::deque<Token> new_tokens;     // not taken yet
  Lookup lookup;
  outrider_stats stats{};

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }

  // Whether the target still reads the prompt: the last chunk gives the first token.
  bool reading() const { return stats.output_tokens == 0; }

  // Number of tokens that the draft model has to read before it drafts: the prompt, or tokens of
  // rounds without it. Its first step takes the last two.
  int64_t missing_draft_rows() const { return std::max<int64_t>(0, length() - 2 - draft_len); }

  // Append the accepted draft tokens and the token after them. gamma: draft tokens of the draft
  // model. It has read all but the last of them, so after a fully accepted round it is a row short.
  void commit(const Tokens& more, int64_t gamma) {
    const int64_t before = length(), accepted = static_cast<int64_t>(more.size()) - 1;
    tokens.insert(tokens.end(), more.begin(), more.end());
    target_len = before + accepted;
    if (gamma > 0) draft_len = before + std::min(accepted, gamma - 1);
  }

  // Keep the first `length` tokens; the last of them becomes pending again.
  void roll_back(int64_t length) {
    tokens.resize(static_cast<size_t>(length));
    target_len = std::min(target_len, length - 1);
    draft_len = std::min(draft_len, length - 1);
  }

  // Number of next tokens that must not end the sequence.
  int64_t min_tokens_left() const {
    return std::max<int64_t>(0, request.options.min_new_tokens - stats.output_tokens);
  }

  // Index of the first of these draft tokens that sampling cannot produce. after: number of drafts
  // before them.
  int64_t first_forbidden(const Tokens& drafts, int64_t vocab_size, int64_t after = 0) const {
    const int64_t masked = min_tokens_left() - after;
    for (int64_t i = 0; i < static_cast<int64_t>(drafts.size()); ++i) {
      const int64_t token = drafts[static_cast<size_t>(i)];
      const bool ends = std::binary_search(request.eos_ids.begin(), request.eos_ids.end(), token);
      if (token < 0 || token >= vocab_size || (i < masked && ends)) return i;
    }
    return static_cast<int64_t>(drafts.size());
  }
};

// Number of valid rows that a slot holds, of its current sequence or its last one.
struct SlotRows {
  int64_t target = 0, draft = 0;
  bool busy = false;
  bool broken = false; // the rows must be cleared before the next sequence
};

} // namespace outrider
#endif
