// A bundle's manifest (runtime/files/manifest.py in C++), and the bitwise guarantees that it gives.
#ifndef OUTRIDER_FILES_BUNDLE_H
#define OUTRIDER_FILES_BUNDLE_H

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "failure.h"

namespace outrider {

struct FileFacts {
  int64_t size;
  std::string sha256;
};

using CacheShape = std::pair<int64_t, int64_t>; // heads, and bytes or elements per row

struct SizeRange {
  int64_t min, max;
};

// The ahead-of-time compiled engine of one model.
struct CompiledFacts {
  std::string targets;              // GPU architectures: " sm80 sm90 "
  std::vector<SizeRange> profiles;  // three of each: slots, tokens, outputs of a call
  int64_t activations = 0;          // bytes; 0: unknown
};

// The state that recurrent layers carry from token to token. A slot keeps its last `rows` rows; row
// p is stored at p modulo `rows`. reach: number of rows before its first token that a call reads.
struct StateFacts {
  std::vector<CacheShape> shapes; // always float32
  int64_t rows, reach;
};

// One model's graph, or the engine compiled from it.
struct ModelFacts {
  std::string file, weights; // relative to the bundle's folder
  std::string dtype;         // of activations
  std::string cache;         // dtype of keys and values
  int32_t vocab_size, max_len;
  int64_t capacity;
  std::vector<CacheShape> keys, values; // [layer]
  std::optional<StateFacts> states;
  std::optional<CompiledFacts> compiled;
};

// Whether results are bitwise the same across the widths of calls.
struct Guarantees {
  int32_t min_width = 2; // minimum number of tokens in a call of the target
  // Whether the output is the same for every gamma, draft, slot and neighbour.
  bool output_invariant = false;
  bool invariance_lost = false; // lost because plain_width makes calls narrower than required
};

struct Bundle {
  std::string folder, backend;
  std::map<std::string, std::string> versions;
  std::map<std::string, FileFacts> files;
  int32_t slots, vocab_size, max_len, max_gamma;
  bool ngram_by_default; // without a draft model, the default draft is ngram
  std::vector<int64_t> eos_ids;
  ModelFacts target;
  std::optional<ModelFacts> draft;

  bool on_gpu() const { return backend != "onnxruntime"; }

  // Read a bundle. Checks that the manifest is intact, of this version and free of contradictions,
  // and that every file exists with the right size. Throws Failure.
  static Bundle read(const std::string& folder);

  // Identifies the build in a folder: another build writes another manifest. Empty if there is none.
  static std::optional<std::pair<uint64_t, int64_t>> identity(const std::string& folder);

  // Verify the hashes of the weights, or of all other files. Throws Failure.
  void verify(bool weights) const;

  // What is guaranteed for a session with this many slots. version: of ONNX Runtime. plain_width:
  // as requested, or 0.
  Guarantees guarantees_for(int32_t slots, const std::string& version, int32_t plain_width) const;

private:
  struct CallBits {
    std::vector<int64_t> widths, others;
    bool neighbours, rows;
  };
  struct Invariance {
    std::string processor;
    CallBits one, several;
  };
  std::optional<Invariance> invariance_;
};

} // namespace outrider
#endif
