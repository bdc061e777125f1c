// Drafts without a model: the tokens that followed the last occurrence of the sequence's last
// n-gram (prompt lookup, Saxena 2023), no more than match before it: runtime/drafts/lookup.py in
// C++.
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

constexpr size_t MAX_NGRAM = 4; // tokens in the longest n-gram

using Ngram = std::array<int64_t, MAX_NGRAM>; // shorter ones are padded with -1

inline uint64_t extend_key(uint64_t key, int64_t token) {
  const uint64_t mixed = (key + static_cast<uint64_t>(token) + 1) * 0x9E3779B97F4A7C15;
  return mixed ^ mixed >> 29;
}

struct NgramHash {
  size_t operator()(const Ngram& ngram) const {
    uint64_t key = 0;
    for (const int64_t token : ngram) key = extend_key(key, token);
    return key;
  }
};

// The last n of these tokens.
inline Ngram last_ngram(const Tokens& tokens, size_t n) {
  Ngram found;
  found.fill(-1);
  std::copy(tokens.end() - static_cast<int64_t>(n), tokens.end(), found.begin());
  return found;
}

// How many of the last tokens of `ending` stand in `text` before `position`; the last n do.
inline int64_t match_length(const Tokens& text, int64_t position, const Tokens& ending, size_t n) {
  auto length = static_cast<int64_t>(n);
  const int64_t limit = std::min(position, static_cast<int64_t>(ending.size()));
  while (length < limit && text[static_cast<size_t>(position - 1 - length)] ==
                               ending[ending.size() - 1 - static_cast<size_t>(length)])
    ++length;
  return length;
}

// The n-grams of a fixed text, for n = 1 .. 4, with the position after the last occurrence of each.
// 12 bytes per n-gram, found by binary search.
class Corpus {
public:
  explicit Corpus(Tokens tokens) : tokens_(std::move(tokens)) {
    std::vector<uint64_t> keys(tokens_.size());
    for (size_t n = 1; n <= MAX_NGRAM && n < tokens_.size(); ++n) {
      keys.resize(tokens_.size() - n); // no token follows the last n-gram of the text
      std::vector<std::pair<uint64_t, int32_t>> found(keys.size());
      for (size_t i = 0; i < keys.size(); ++i) {
        keys[i] = extend_key(keys[i], tokens_[i + n - 1]);
        found[i] = {keys[i], static_cast<int32_t>(i + n)};
      }
      std::sort(found.begin(), found.end());
      Ngrams& ngrams = ngrams_[n - 1];
      for (size_t i = 0; i < found.size(); ++i)
        if (i + 1 == found.size() || found[i + 1].first != found[i].first) {
          ngrams.keys.push_back(found[i].first);
          ngrams.ends.push_back(found[i].second);
        }
    }
  }

  // At most `count` tokens after the last occurrence of the last n of these tokens, no more than
  // match before it; none if they do not occur.
  Tokens continuation(const Tokens& end, size_t n, int64_t count) const {
    const Ngrams& ngrams = ngrams_[n - 1];
    uint64_t key = 0;
    for (size_t i = end.size() - n; i < end.size(); ++i) key = extend_key(key, end[i]);
    const auto found = std::lower_bound(ngrams.keys.begin(), ngrams.keys.end(), key);
    if (found == ngrams.keys.end() || *found != key) return {};
    const int64_t start = ngrams.ends[static_cast<size_t>(found - ngrams.keys.begin())];
    const auto at = tokens_.begin() + start;
    if (!std::equal(at - static_cast<int64_t>(n), at, end.end() - static_cast<int64_t>(n)))
      return {}; // another n-gram with the same key
    count = std::min(count, match_length(tokens_, start, end, n));
    return Tokens(at, at + std::min<int64_t>(count, tokens_.end() - at));
  }

private:
  struct Ngrams {
    std::vector<uint64_t> keys;
    std::vector<int32_t> ends;
  };
  Tokens tokens_;
  std::array<Ngrams, MAX_NGRAM> ngrams_;
};

// The n-grams of a growing text, in constant time per token.
class Lookup {
public:
  // Extend to the first `count` tokens of a text whose beginning was read before.
  void read(const Tokens& tokens, size_t count) {
    while (tokens_.size() < count) {
      // The n-grams at the end of the text are entered when the next token arrives.
      for (size_t n = 1; n <= std::min(MAX_NGRAM, tokens_.size()); ++n)
        next_[last_ngram(tokens_, n)] = static_cast<int64_t>(tokens_.size());
      tokens_.push_back(tokens[tokens_.size()]);
    }
  }

  // At most `count` tokens that may come next: those after the previous occurrence of the longest
  // n-gram at the end of the text, no more than match before it. If they reach the end of the text,
  // they continue with themselves. after: tokens that follow those read.
  Tokens propose(int64_t count, const Tokens& after, const Corpus* corpus) const {
    const auto length = static_cast<int64_t>(tokens_.size());
    const int64_t reach = std::max(static_cast<int64_t>(MAX_NGRAM), count);
    Tokens end(tokens_.end() - std::min(reach, length), tokens_.end());
    end.insert(end.end(), after.begin(), after.end());
    for (size_t n = std::min(MAX_NGRAM, end.size()); n > 0; --n) {
      const auto found = next_.find(last_ngram(end, n));
      if (found != next_.end()) {
        const int64_t start = found->second;
        const auto from = tokens_.begin() + start;
        count = std::min(count, match_length(tokens_, start, end, n));
        Tokens text(from, from + std::min(count, length - start));
        text.insert(text.end(), after.begin(), after.end());
        const int64_t back = length - start + static_cast<int64_t>(after.size());
        while (static_cast<int64_t>(text.size()) < count)
          text.push_back(text[text.size() - static_cast<size_t>(back)]);
        text.resize(static_cast<size_t>(count));
        return text;
      }
      if (corpus != nullptr) {
        Tokens text = corpus->continuation(end, n, count);
        if (!text.empty()) return text;
      }
    }
    return {};
  }

private:
  Tokens tokens_;
  std::unordered_map<Ngram, int64_t, NgramHash> next_; // position after the last occurrence of each
};

} // namespace outrider
#endif
