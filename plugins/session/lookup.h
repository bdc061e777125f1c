// Drafts without a model: what followed the last time that the text ended like this
// (runtime/drafts/lookup.py; prompt lookup, Saxena 2023).
#ifndef OUTRIDER_SESSION_LOOKUP_H
#define OUTRIDER_SESSION_LOOKUP_H

#include <stdint.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engines/engine.h"

namespace outrider {

constexpr size_t LONGEST = 4; // tokens that are compared; longer ones are found by the first of them

using Ngram = std::array<int64_t, LONGEST>; // shorter ones have -1 behind

inline uint64_t extended(uint64_t key, int64_t token) {
  const uint64_t mixed = (key + static_cast<uint64_t>(token) + 1) * 0x9E3779B97F4A7C15;
  return mixed ^ mixed >> 29;
}

struct NgramHash {
  size_t operator()(const Ngram& ngram) const {
    uint64_t key = 0;
    for (const int64_t token : ngram) key = extended(key, token);
    return key;
  }
};

// The last n of these tokens.
inline Ngram last_of(const Tokens& tokens, size_t n) {
  Ngram found;
  found.fill(-1);
  std::copy(tokens.end() - static_cast<int64_t>(n), tokens.end(), found.begin());
  return found;
}

// The n-grams of a text that does not change, for n = 1 .. 4: where it goes on after the last
// occurrence of each. 12 bytes an n-gram, found by bisection.
class Corpus {
public:
  explicit Corpus(Tokens tokens) : tokens_(std::move(tokens)) {
    std::vector<uint64_t> keys(tokens_.size());
    for (size_t n = 1; n <= LONGEST && n < tokens_.size(); ++n) {
      keys.resize(tokens_.size() - n); // the last n-gram of the text has no sequel
      std::vector<std::pair<uint64_t, int32_t>> found(keys.size());
      for (size_t i = 0; i < keys.size(); ++i) {
        keys[i] = extended(keys[i], tokens_[i + n - 1]);
        found[i] = {keys[i], static_cast<int32_t>(i + n)};
      }
      std::sort(found.begin(), found.end());
      Grams& grams = grams_[n - 1];
      for (size_t i = 0; i < found.size(); ++i)
        if (i + 1 == found.size() || found[i + 1].first != found[i].first) {
          grams.keys.push_back(found[i].first);
          grams.ends.push_back(found[i].second);
        }
    }
  }

  // At most `count` tokens after the last occurrence of the last n of these; none if it has none.
  Tokens after(const Tokens& end, size_t n, int64_t count) const {
    const Grams& grams = grams_[n - 1];
    uint64_t key = 0;
    for (size_t i = end.size() - n; i < end.size(); ++i) key = extended(key, end[i]);
    const auto found = std::lower_bound(grams.keys.begin(), grams.keys.end(), key);
    if (found == grams.keys.end() || *found != key) return {};
    const auto at = tokens_.begin() + grams.ends[static_cast<size_t>(found - grams.keys.begin())];
    if (!std::equal(at - static_cast<int64_t>(n), at, end.end() - static_cast<int64_t>(n)))
      return {}; // another n-gram of the same key
    return Tokens(at, at + std::min<int64_t>(count, tokens_.end() - at));
  }

private:
  struct Grams {
    std::vector<uint64_t> keys;
    std::vector<int32_t> ends;
  };
  Tokens tokens_;
  std::array<Grams, LONGEST> grams_;
};

// The n-grams of a text that grows; constant time for each token.
class Lookup {
public:
  // The first `count` tokens of a text, of which the beginning was read before.
  void read(const Tokens& tokens, size_t count) {
    while (own_.size() < count) {
      // What the text ends with is entered when it goes on.
      for (size_t n = 1; n <= std::min(LONGEST, own_.size()); ++n)
        next_[last_of(own_, n)] = static_cast<int64_t>(own_.size());
      own_.push_back(tokens[own_.size()]);
    }
  }

  // At most `count` tokens that may come next, after the longest n-gram that the text ends with and
  // had before. What reaches the end goes on with itself. after: tokens that follow what was read.
  Tokens propose(int64_t count, const Tokens& after, const Corpus* corpus) const {
    Tokens end(own_.end() - static_cast<int64_t>(std::min(LONGEST, own_.size())), own_.end());
    end.insert(end.end(), after.begin(), after.end());
    const auto length = static_cast<int64_t>(own_.size());
    for (size_t n = std::min(LONGEST, end.size()); n > 0; --n) {
      const auto found = next_.find(last_of(end, n));
      if (found != next_.end()) {
        const int64_t start = found->second;
        const auto from = own_.begin() + start;
        Tokens text(from, from + std::min(count, length - start));
        text.insert(text.end(), after.begin(), after.end());
        const int64_t back = length - start + static_cast<int64_t>(after.size());
        while (static_cast<int64_t>(text.size()) < count)
          text.push_back(text[text.size() - static_cast<size_t>(back)]);
        text.resize(static_cast<size_t>(count));
        return text;
      }
      if (corpus != nullptr) {
        Tokens text = corpus->after(end, n, count);
        if (!text.empty()) return text;
      }
    }
    return {};
  }

private:
  Tokens own_;
  std::unordered_map<Ngram, int64_t, NgramHash> next_; // where the text went on after each
};

} // namespace outrider
#endif
