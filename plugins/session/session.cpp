// The C interface of outrider_session.h: exceptions become a status with a cause and a remedy.
#include <algorithm>
#include <memory>
#include <string>

#include "decoder.h"
#include "files/guarded.h"

using outrider::Decoder;
using outrider::Failure;
using outrider::run_guarded;
using outrider::Sequence;

struct outrider_session {
  explicit outrider_session(const outrider_config& config) : decoder(config) {}
  Decoder decoder;
  std::vector<outrider::Token> taken; // owns what the results of `outrider_take` point to
};

namespace {

Decoder& decoder_of(outrider_session* session) {
  if (session == nullptr)
    outrider::fail(OUTRIDER_FAILED_OPTION, "the session is NULL", "Open one with outrider_open");
  return session->decoder;
}

void require_pointer(bool valid, const char* name) {
  if (!valid)
    outrider::fail(OUTRIDER_FAILED_OPTION, std::string(name) + " is NULL", "Pass a valid pointer");
}

// Refuses a bundle that another process rebuilds meanwhile: the files that were read may then belong
// to two builds.
std::unique_ptr<outrider_session> open_session(const outrider_config& config) {
  const std::string folder = config.folder == nullptr ? "" : config.folder;
  const auto before = outrider::Bundle::identity(folder);
  const auto refuse_replaced = [&] {
    if (outrider::Bundle::identity(folder) != before)
      outrider::fail(OUTRIDER_FAILED_BUNDLE, folder + " was replaced while it was being opened",
                     "Open it again");
  };
  std::unique_ptr<outrider_session> session;
  try {
    session = std::make_unique<outrider_session>(config);
  } catch (const Failure&) {
    refuse_replaced();
    throw;
  }
  refuse_replaced();
  return session;
}

} // namespace

extern "C" {

int32_t outrider_open(const outrider_config* config, outrider_session** session,
                      outrider_failure* failure) {
  return run_guarded(failure, [&] {
    require_pointer(config != nullptr, "config"), require_pointer(session != nullptr, "session");
    *session = nullptr;
    *session = open_session(*config).release();
  });
}

void outrider_close(outrider_session* session) { delete session; }

void outrider_get_facts(const outrider_session* session, outrider_facts* facts) {
  *facts = {};
  if (session == nullptr) return;
  const outrider::Bundle& bundle = session->decoder.bundle();
  *facts = {bundle.vocab_size, bundle.max_len, bundle.max_gamma, session->decoder.slots(),
            bundle.draft.has_value(), session->decoder.guarantees().output_invariant,
            static_cast<int32_t>(bundle.eos_ids.size()), 0, bundle.eos_ids.data()};
}

void outrider_default_options(outrider_options* options) {
  *options = {};
  options->top_p = options->repetition_penalty = options->lenience = 1;
  options->sigmoid_alpha = -1e3, options->sigmoid_beta = 1e3;
  options->gamma = OUTRIDER_DEFAULT_GAMMA;
  options->max_new_tokens = 256;
  options->logprobs = -1;
}

int32_t outrider_admit(outrider_session* session, const int64_t* prompt, int64_t length,
                       const outrider_options* options, uint64_t* request,
                       outrider_failure* failure) {
  return run_guarded(failure, [&] {
    require_pointer(options != nullptr, "options"), require_pointer(request != nullptr, "request");
    *request = decoder_of(session).admit(prompt, length, *options);
  });
}

int32_t outrider_begin(outrider_session* session, const int64_t* prompt, int64_t length,
                       const outrider_options* options, uint64_t* request,
                       outrider_failure* failure) {
  return run_guarded(failure, [&] {
    require_pointer(options != nullptr, "options"), require_pointer(request != nullptr, "request");
    *request = decoder_of(session).begin(prompt, length, *options);
  });
}

int32_t outrider_round(outrider_session* session, outrider_failure* failure) {
  return run_guarded(failure, [&] { decoder_of(session).round(); });
}

int32_t outrider_take(outrider_session* session, uint64_t request, outrider_token* tokens,
                      int32_t capacity, int32_t* count, int32_t* finish,
                      outrider_failure* failure) {
  return run_guarded(failure, [&] {
    require_pointer(tokens != nullptr || capacity == 0, "tokens");
    require_pointer(count != nullptr, "count");
    *count = 0;
    Sequence& sequence = decoder_of(session).sequence(request);
    const size_t max_count = capacity > 0 ? static_cast<size_t>(capacity) : 0;
    const size_t taken = std::min(max_count, sequence.new_tokens.size());
    session->taken.clear();
    session->taken.reserve(taken); // now, so that running out of memory loses no token
    for (size_t i = 0; i < taken; ++i) {
      session->taken.push_back(std::move(sequence.new_tokens.front()));
      sequence.new_tokens.pop_front();
    }
    for (size_t i = 0; i < taken; ++i) {
      const outrider::Token& token = session->taken[i];
      tokens[i] = {token.id, token.logprob, token.ids.data(), token.logprobs.data(),
                   static_cast<int32_t>(token.ids.size()), token.origin};
    }
    *count = static_cast<int32_t>(taken);
    const bool last = sequence.new_tokens.empty();
    if (finish != nullptr) *finish = last ? sequence.finish : OUTRIDER_RUNNING;
    if (last && sequence.failure != nullptr) throw Failure(*sequence.failure);
  });
}

void outrider_cancel(outrider_session* session, uint64_t request) {
  if (session == nullptr) return;
  run_guarded(nullptr, [&] { session->decoder.cancel(request); });
}

int32_t outrider_get_stats(const outrider_session* session, uint64_t request,
                           outrider_stats* stats, outrider_failure* failure) {
  return run_guarded(failure, [&] {
    require_pointer(stats != nullptr, "stats");
    *stats = decoder_of(const_cast<outrider_session*>(session)).sequence(request).stats;
  });
}

int32_t outrider_release(outrider_session* session, uint64_t request, outrider_failure* failure) {
  return run_guarded(failure, [&] { decoder_of(session).release(request); });
}

} // extern "C"
