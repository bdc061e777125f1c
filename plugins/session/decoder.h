// Admits requests into slots, advances them round by round and releases them (runtime/decoder.py,
// round.py in C++).
#ifndef OUTRIDER_SESSION_DECODER_H
#define OUTRIDER_SESSION_DECODER_H

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "drafts.h"
#include "engines/ort_model.h"

namespace outrider {

int cores(); // of this machine, at least 1

// Validate a configuration, and read the bundle that it names, without opening it. Throws Failure.
Bundle read_bundle(const outrider_config& config);

// Validate a request as far as possible without a slot; returns a copy of the options with defaults
// filled in. invariance_lost: of the bundle's Guarantees. Throws Failure.
Request check_request(const int64_t* prompt, int64_t length, const outrider_options& options,
                      const Bundle& bundle, bool invariance_lost);

class Decoder {
public:
  // Throws Failure.
  explicit Decoder(const outrider_config& config);

  uint64_t admit(const int64_t* prompt, int64_t length, const outrider_options& options);
  uint64_t begin(const int64_t* prompt, int64_t length, const outrider_options& options);
  void round();
  void cancel(uint64_t request); // may be called by any thread
  void release(uint64_t request);
  Sequence& sequence(uint64_t request);

  const Bundle& bundle() const { return bundle_; }
  const Guarantees& guarantees() const { return guarantees_; }
  int32_t slots() const { return static_cast<int32_t>(rows_.size()); }

private:
  std::unique_ptr<Engine> open_engine(const ModelFacts& facts, int32_t buffers, int threads,
                                      int32_t min_width) const;
  int64_t reusable_rows(int32_t slot, const Tokens& prompt) const;
  int32_t acquire(const Tokens& prompt);
  int64_t prepare_prompt(Sequence& sequence);
  void read_prompt(Sequence& sequence);
  void read_prompts();
  void catch_up(std::vector<Plan>& plans);
  void speculate(std::vector<Plan>& plans);
  void commit_output(Sequence& sequence, const Tokens& drafts, const outrider_verdict& verdict,
                     const LogitsView& rows, int32_t row_of);
  Token make_token(const Request& request, int64_t id, int32_t origin, const float* row) const;
  int32_t finish_of(const Sequence& sequence, int64_t token, int64_t count) const;
  int64_t max_drafts(const Sequence& sequence) const;
  void drop_cancelled();
  void record_rows();
  void free_slot(Sequence& sequence);
  void clear(int32_t slot);

  // Declared in order of dependency: ONNX Runtime outlives its models.
  Bundle bundle_;
  std::unique_ptr<ort::Library> library_; // null if the models run on a GPU
  Guarantees guarantees_;
  std::unique_ptr<Engine> target_, draft_;
  std::unique_ptr<Corpus> corpus_;
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<Proposer> proposer_;
  const bool reuse_;
  std::vector<SlotRows> rows_;
  std::map<uint64_t, std::unique_ptr<Sequence>> sequences_; // in order of admission
  uint64_t next_request_ = 1;
  uint64_t turns_ = 0; // of the requests whose prompts are read
  std::mutex mutex_; // guards the set of requests and their `cancelled`, for other threads
};

} // namespace outrider
#endif
