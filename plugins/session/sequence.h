// What is asked of one sequence, its text, and who owns which length (runtime/sequence.py, slots.py).
#ifndef OUTRIDER_SESSION_SEQUENCE_H
#define OUTRIDER_SESSION_SEQUENCE_H

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "lookup.h"

namespace outrider {

// Options of one request that passed its checks, with copies of all that they point to.
struct Request {
  outrider_options options;
  int64_t prompt_length;
  Tokens bias_ids; // ascending
  std::vector<float> biases;
  Tokens stops;
  Tokens ends; // the bundle's

  bool reads_context() const {
    return options.repetition_penalty != 1 || options.frequency_penalty != 0 ||
           options.presence_penalty != 0;
  }
  bool reads_model() const {
    return options.draft == OUTRIDER_DRAFT_MODEL || options.draft == OUTRIDER_DRAFT_CHAIN;
  }
  bool point_masses() const {
    return options.draft == OUTRIDER_DRAFT_NGRAM || options.draft == OUTRIDER_DRAFT_COPY;
  }
  bool at_once() const { return point_masses() || options.draft == OUTRIDER_DRAFT_CHAIN; }
};

struct Token {
  int64_t id;
  int32_t origin;
  double logprob;
  Tokens ids;
  std::vector<double> logprobs;
};

// A request in its slot. Between rounds the text's last token is pending: emitted, in neither cache.
struct Sequence {
  Request request;
  int32_t slot;
  Tokens tokens; // all text so far, prompt included
  int64_t target_len = 0, draft_len = 0; // committed rows
  int32_t finish = OUTRIDER_RUNNING;
  bool cancelled = false;           // by any thread, before the next round
  std::unique_ptr<Failure> failure; // what broke it
  std::deque<Token> fresh;          // not taken yet
  Lookup lookup;
  outrider_stats stats{};

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }

  // Tokens that the draft has to read before it drafts: of the prompt, or of rounds without it. The
  // last two it feeds itself, in its first step.
  int64_t draft_lacks() const { return std::max<int64_t>(0, length() - 2 - draft_len); }

  // Append n accepted drafts and the token after them. gamma: drafts of the model. It fed itself all
  // but the last of them, so after a fully accepted round it stays a row short.
  void commit(const Tokens& more, int64_t gamma) {
    const int64_t before = length(), accepted = static_cast<int64_t>(more.size()) - 1;
    tokens.insert(tokens.end(), more.begin(), more.end());
    target_len = before + accepted;
    if (gamma > 0) draft_len = before + std::min(accepted, gamma - 1);
  }

  // Keep the first tokens; the last of them becomes pending again.
  void roll_back(int64_t length) {
    tokens.resize(static_cast<size_t>(length));
    target_len = std::min(target_len, length - 1);
    draft_len = std::min(draft_len, length - 1);
  }

  // How many of the next tokens may not end the text.
  int64_t early() const {
    return std::max<int64_t>(0, request.options.min_new_tokens - stats.output_tokens);
  }

  // Where the first token stands that the sampling cannot give. after: drafts before them.
  int64_t first_forbidden(const Tokens& drafts, int64_t vocab_size, int64_t after = 0) const {
    const int64_t masked = early() - after;
    for (int64_t i = 0; i < static_cast<int64_t>(drafts.size()); ++i) {
      const int64_t token = drafts[static_cast<size_t>(i)];
      const bool ends = std::binary_search(request.ends.begin(), request.ends.end(), token);
      if (token < 0 || token >= vocab_size || (i < masked && ends)) return i;
    }
    return static_cast<int64_t>(drafts.size());
  }
};

// Lengths of the texts that slots hold or held: how many rows are worth keeping.
struct SlotRows {
  int64_t target = 0, draft = 0;
  bool busy = false;
  bool broken = false; // rows that are to be emptied before a text takes them
};

} // namespace outrider
#endif
