// A bundle's manifest, as runtime/files/manifest.py has it, and what it promises here.
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

using CacheShape = std::pair<int64_t, int64_t>; // heads, and bytes or numbers a row

struct SizeRange {
  int64_t least, most;
};

// What was compiled ahead of time of one model.
struct CompiledFacts {
  std::string targets;              // GPU architectures: " sm80 sm90 "
  std::vector<SizeRange> profiles;  // three of each: slots, tokens, outputs of a call
  int64_t activations = 0;          // bytes; 0: the builder did not say
};

// What recurrent layers carry from token to token: a slot's last rows of it. Row p lies at p modulo
// `rows`. reach: how many rows before its first token a call reads.
struct StateFacts {
  std::vector<CacheShape> shapes; // float32, whatever the rest is
  int64_t rows, reach;
};

// One model's graph, or what was compiled from it.
struct ModelFacts {
  std::string file, weights; // from the bundle's folder
  std::string dtype;         // of activations
  std::string cache;         // of a row of keys or values
  int32_t vocab_size, max_len;
  int64_t capacity;
  std::vector<CacheShape> keys, values; // [layer]
  std::optional<StateFacts> states;
  std::optional<CompiledFacts> compiled;
};

struct Bits {
  int32_t narrowest = 2; // tokens of the target's narrowest calls
  bool one_text = false; // for every gamma, draft, slot and neighbour
  bool forgone = false;  // by calls that are narrower than they need to be
};

struct Bundle {
  std::string folder, backend;
  std::map<std::string, std::string> versions;
  std::map<std::string, FileFacts> files;
  int32_t slots, vocab_size, max_len, max_gamma;
  bool lookup; // ngram proposes where nobody says otherwise, and there is no draft model
  std::vector<int64_t> ends;
  ModelFacts target;
  std::optional<ModelFacts> draft;

  bool on_gpu() const { return backend != "onnxruntime"; }

  // A manifest that is whole, of this version, and free of contradictions; and every file there,
  // with its size. Throws Failure.
  static Bundle read(const std::string& folder);

  // The hashes of the files that hold numbers alone, or of all others. Throws Failure.
  void verify(bool weights) const;

  // slots: of the session. version: of ONNX Runtime. plain_width: what was asked for, or 0.
  Bits promise(int32_t slots, const std::string& version, int32_t plain_width) const;

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
