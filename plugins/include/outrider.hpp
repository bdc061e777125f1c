// A header-only C++17 wrapper of outrider_session.h: sessions, options and streams of tokens.
//
//   outrider::Session session({"build/demo"});
//   for (const outrider::Token& token : session.stream(prompt, options)) use(token.id);
//
// Errors are thrown as outrider::Error. A session and its streams may be used by one thread at a
// time; only `Stream::cancel` may be called by any thread, as long as the stream is not moved.
#ifndef OUTRIDER_HPP
#define OUTRIDER_HPP

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "outrider_session.h"

namespace outrider {

// A failure. status: OUTRIDER_FAILED_..., which is also the exit status of the command line.
class Error : public std::exception {
public:
  explicit Error(const outrider_failure& failure)
      : Error(failure.status, failure.cause, failure.remedy) {}
  Error(std::int32_t status, std::string cause, std::string remedy)
      : status_(status), cause_(std::move(cause)), remedy_(std::move(remedy)),
        text_(cause_ + ". " + remedy_ + ".") {}
  const char* what() const noexcept override { return text_.c_str(); }
  std::int32_t status() const noexcept { return status_; }
  const std::string& cause() const noexcept { return cause_; }
  const std::string& remedy() const noexcept { return remedy_; }

private:
  std::int32_t status_;
  std::string cause_, remedy_, text_;
};

// How to open a bundle: see outrider_config.
struct Config {
  std::string folder;
  std::string onnxruntime{}; // empty: $OUTRIDER_ONNXRUNTIME, else the system's library
  std::int32_t slots = 0;
  std::int32_t threads = 0;
  bool verify = true;
  bool reuse = true;
  std::int32_t plain_width = 0;
  std::vector<std::int64_t> corpus{};
};

enum class Rule { token, block, sigmoid, coupled };
enum class Draft { automatic, model, ngram, copy, chain, random, none };
enum class Origin { first, accepted, corrected, bonus, plain };
enum class Finish { running, eos, stop, length, context, cancelled, broken };

// How to generate: see outrider_options.
struct Options {
  std::int32_t max_new_tokens = 256;
  std::int32_t min_new_tokens = 0;
  double temperature = 0;
  std::int32_t top_k = 0;
  double top_p = 1;
  double min_p = 0;
  double repetition_penalty = 1;
  double frequency_penalty = 0;
  double presence_penalty = 0;
  std::vector<std::pair<std::int64_t, double>> logit_bias{};
  std::uint64_t seed = 0;
  std::optional<std::int32_t> gamma{}; // none: 4 with a draft model, 8 with the other drafts
  Draft draft = Draft::automatic;
  double draft_temperature = 0; // 0: the target's temperature
  double draft_threshold = 0;
  Rule rule = Rule::token;
  double lenience = 1;
  double sigmoid_alpha = -1e3;
  double sigmoid_beta = 1e3;
  std::vector<std::int64_t> stop_token_ids{};
  // Called with each new token; returns whether the sequence ends after it. An exception also ends
  // the sequence, and `Stream::next` rethrows it after the last token.
  std::function<bool(std::int64_t)> stop{};
  bool ignore_eos = false;
  std::optional<std::int32_t> logprobs{}; // number of alternatives; none: no log-probabilities
};

struct Token {
  std::int64_t id = 0;
  Origin origin = Origin::first;
  double logprob = NAN;
  // Ids and their log-probabilities, best first.
  std::vector<std::pair<std::int64_t, double>> alternatives{};
};

namespace detail {

template <class Function, class... Arguments>
void call_checked(Function function, Arguments... arguments) {
  outrider_failure failure{};
  if (function(arguments..., &failure) != OUTRIDER_OK) throw Error(failure);
}

struct SessionCloser {
  void operator()(outrider_session* session) const { outrider_close(session); }
};
using Handle = std::shared_ptr<outrider_session>;

} // namespace detail

// A request in its slot. The streams of a session advance together, and each keeps its new tokens
// until `next` is called on it. The destructor or `close` releases the slot; the end of the
// sequence does not. The session stays open as long as it has streams.
class Stream {
public:
  Stream(Stream&&) = default;
  Stream& operator=(Stream&& other) noexcept {
    if (this != &other) {
      close();
      session_ = std::move(other.session_), request_ = other.request_;
      stop_ = std::move(other.stop_), finish_ = other.finish_;
    }
    return *this;
  }
  ~Stream() { close(); }

  // Release the slot now. Call it before `stream = session.stream(...)`, which otherwise takes a
  // second slot before it releases the first.
  void close() noexcept {
    if (session_) outrider_release(session_.get(), request_, nullptr);
    session_.reset();
  }

  // The next token, or none if the sequence has ended. If it ended with an error, throws that after
  // the last token.
  std::optional<Token> next() {
    while (finish_ == Finish::running) {
      outrider_token token{};
      std::int32_t count = 0, finish = 0;
      outrider_failure failure{};
      const std::int32_t status =
          outrider_take(session(), request_, &token, 1, &count, &finish, &failure);
      if (count == 0 || status == OUTRIDER_OK) finish_ = static_cast<Finish>(finish);
      if (count > 0) {
        Token found{token.id, static_cast<Origin>(token.origin), token.logprob, {}};
        for (std::int32_t i = 0; i < token.alternative_count; ++i)
          found.alternatives.emplace_back(token.ids[i], token.logprobs[i]);
        return found;
      }
      if (status != OUTRIDER_OK) throw Error(failure);
      if (finish_ == Finish::running) detail::call_checked(outrider_round, session());
    }
    if (stop_ && stop_->thrown) std::rethrow_exception(std::exchange(stop_->thrown, nullptr));
    return std::nullopt;
  }

  Finish finish() const { return finish_; }

  // End the sequence before the next round. May be called by any thread.
  void cancel() const { outrider_cancel(session_.get(), request_); }

  outrider_stats stats() const {
    outrider_stats stats{};
    detail::call_checked(outrider_get_stats, session(), request_, &stats);
    return stats;
  }

  class iterator {
  public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Token;
    using difference_type = std::ptrdiff_t;
    using pointer = const Token*;
    using reference = const Token&;

    iterator() = default;
    explicit iterator(Stream* stream) : stream_(stream) { ++*this; }
    const Token& operator*() const { return *token_; }
    const Token* operator->() const { return &*token_; }
    iterator& operator++() {
      token_ = stream_->next();
      if (!token_) stream_ = nullptr;
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(const iterator& other) const { return stream_ == other.stream_; }
    bool operator!=(const iterator& other) const { return !(*this == other); }

  private:
    Stream* stream_ = nullptr;
    std::optional<Token> token_{};
  };

  iterator begin() { return iterator(this); }
  iterator end() { return {}; }

private:
  friend class Session;
  struct Stop {
    std::function<bool(std::int64_t)> callback;
    std::exception_ptr thrown; // kept here: no exception may cross the C interface
  };

  Stream(detail::Handle session, const std::vector<std::int64_t>& prompt, const Options& options)
      : session_(std::move(session)), stop_(new Stop{options.stop, nullptr}) {
    std::vector<std::int64_t> ids;
    std::vector<double> biases;
    for (const auto& [id, bias] : options.logit_bias) ids.push_back(id), biases.push_back(bias);
    outrider_options c_options{};
    outrider_default_options(&c_options);
    c_options.seed = options.seed;
    c_options.temperature = options.temperature;
    c_options.top_k = options.top_k;
    c_options.top_p = options.top_p;
    c_options.min_p = options.min_p;
    c_options.repetition_penalty = options.repetition_penalty;
    c_options.frequency_penalty = options.frequency_penalty;
    c_options.presence_penalty = options.presence_penalty;
    c_options.lenience = options.lenience;
    c_options.sigmoid_alpha = options.sigmoid_alpha;
    c_options.sigmoid_beta = options.sigmoid_beta;
    c_options.draft_temperature = options.draft_temperature;
    c_options.draft_threshold = options.draft_threshold;
    c_options.bias_ids = ids.data();
    c_options.biases = biases.data();
    c_options.bias_length = static_cast<std::int32_t>(ids.size());
    c_options.stops = options.stop_token_ids.data();
    c_options.stop_length = static_cast<std::int32_t>(options.stop_token_ids.size());
    if (stop_->callback) {
      c_options.stop = [](void* data, std::int64_t token) -> std::int32_t {
        Stop& stop = *static_cast<Stop*>(data);
        try {
          return stop.callback(token);
        } catch (...) {
          stop.thrown = std::current_exception();
          return 1;
        }
      };
      c_options.stop_data = stop_.get();
    }
    c_options.rule = static_cast<std::int32_t>(options.rule);
    c_options.draft = static_cast<std::int32_t>(options.draft);
    c_options.gamma = options.gamma.value_or(OUTRIDER_DEFAULT_GAMMA);
    c_options.max_new_tokens = options.max_new_tokens;
    c_options.min_new_tokens = options.min_new_tokens;
    c_options.ignore_eos = options.ignore_eos;
    c_options.logprobs = options.logprobs.value_or(-1);
    detail::call_checked(outrider_begin, session_.get(), prompt.data(),
                         static_cast<std::int64_t>(prompt.size()), &c_options, &request_);
  }

  outrider_session* session() const {
    if (session_) return session_.get();
    throw Error(OUTRIDER_FAILED_OPTION, "the stream was closed or moved from",
                "Take another one with Session::stream");
  }

  detail::Handle session_;
  std::uint64_t request_ = 0;
  std::unique_ptr<Stop> stop_; // on the heap: its address must not change when the stream is moved
  Finish finish_ = Finish::running;
};

class Session {
public:
  explicit Session(const Config& config) {
    if (outrider_abi_version() != OUTRIDER_ABI_VERSION)
      throw Error(OUTRIDER_FAILED_BACKEND, "liboutrider has another version than its headers",
                  "Use both from one wheel, and compile again");
    outrider_config c_config{};
    c_config.abi_version = OUTRIDER_ABI_VERSION;
    c_config.folder = config.folder.c_str();
    c_config.onnxruntime = config.onnxruntime.empty() ? nullptr : config.onnxruntime.c_str();
    c_config.corpus = config.corpus.data();
    c_config.corpus_length = static_cast<std::int64_t>(config.corpus.size());
    c_config.slots = config.slots;
    c_config.threads = config.threads;
    c_config.unverified = !config.verify;
    c_config.no_reuse = !config.reuse;
    c_config.plain_width = config.plain_width;
    outrider_session* session = nullptr;
    detail::call_checked(outrider_open, static_cast<const outrider_config*>(&c_config), &session);
    session_.reset(session, detail::SessionCloser());
  }

  // Take a slot. Rounds, which `next` of any stream runs, read the prompt, a chunk in each; the last
  // chunk gives the first token. Throws Error; its status is OUTRIDER_FAILED_BUSY if no slot is free.
  // If the prompt cannot be read, `next` throws.
  Stream stream(const std::vector<std::int64_t>& prompt, const Options& options = {}) {
    return Stream(session_, prompt, options);
  }

  // Run one round for all streams: see outrider_round.
  void round() { detail::call_checked(outrider_round, session_.get()); }

  outrider_facts facts() const {
    outrider_facts facts{};
    outrider_get_facts(session_.get(), &facts);
    return facts;
  }

private:
  detail::Handle session_;
};

} // namespace outrider
#endif
