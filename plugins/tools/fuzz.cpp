// Random calls of the C interface, to run under sanitizers: shapes around the tile size, NaN,
// infinities, huge logits, ids out of range, misaligned memory of exactly the documented size,
// valid and invalid parameters. Fails if a result violates the documentation of outrider.h. usage:
// fuzz [rounds [seed]]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "outrider.h"

namespace {

std::mt19937_64 random_bits;

int below(int n) { return static_cast<int>(random_bits() % static_cast<uint64_t>(n)); }
bool chance(int percent) { return below(100) < percent; }

// Memory without spare bytes on either side, starting `shift` bytes into an allocation.
struct Bytes {
  std::unique_ptr<unsigned char[]> memory;
  unsigned char* data;

  Bytes(size_t size, int shift)
      : memory(new unsigned char[size + static_cast<size_t>(shift)]), data(memory.get() + shift) {}
};

struct Logits {
  Bytes bytes;
  outrider_logits view;
};

float random_logit(int damage) {
  static std::normal_distribution<float> normal(0, 4);
  if (damage == 0) return normal(random_bits);
  switch (below(60)) {
  case 0: return -INFINITY;
  case 1: return damage > 1 ? INFINITY : 0.0f;
  case 2: return damage > 1 ? NAN : -0.0f;
  case 3: return 3e38f;
  case 4: return -3e38f;
  case 5: return 1e-42f;
  default: return normal(random_bits);
  }
}

Logits random_logits(int slots, int rows, int vocab_size, int dtype) {
  const size_t item = dtype == OUTRIDER_FLOAT32 ? 4 : 2;
  const auto width = static_cast<size_t>(vocab_size);
  const size_t row = width * item + static_cast<size_t>(below(9));
  const auto count = static_cast<size_t>(rows), all = static_cast<size_t>(slots);
  const size_t slot = row * count + static_cast<size_t>(below(9));
  Logits logits{Bytes(slot * (all - 1) + row * (count - 1) + width * item, below(8)), {}};
  const int damage = chance(40) ? 1 + below(2) : 0;
  const bool all_infinite = chance(3), flat = chance(10);
  for (size_t s = 0; s < all; ++s)
    for (size_t r = 0; r < count; ++r)
      for (size_t i = 0; i < width; ++i) {
        const float z = all_infinite ? -INFINITY : flat ? 1.0f : random_logit(damage);
        uint32_t bits;
        std::memcpy(&bits, &z, 4);
        const auto half = static_cast<uint16_t>( // for both 16-bit types
            dtype == OUTRIDER_BFLOAT16 || damage ? bits >> 16 : random_bits() & 0xBBFF);
        unsigned char* at = logits.bytes.data + s * slot + r * row + i * item;
        if (dtype == OUTRIDER_FLOAT32) std::memcpy(at, &z, 4);
        else std::memcpy(at, &half, 2);
      }
  logits.view = {logits.bytes.data, static_cast<int64_t>(slot), static_cast<int64_t>(row),
                 vocab_size, dtype};
  return logits;
}

int64_t random_id(int vocab_size) {
  if (chance(5)) return chance(50) ? INT64_MIN : INT64_MAX;
  return below(vocab_size + 4) - 2;
}

outrider_slot random_slot(int width, int index, const std::vector<int64_t>& ids,
                          const std::vector<int64_t>& sorted, const std::vector<float>& biases) {
  outrider_slot slot{};
  slot.seed = random_bits();
  slot.position = static_cast<uint32_t>(random_bits());
  slot.index = index;
  const float temperatures[] = {0, 1, 0.7f, 1.7f, 1e-6f, 1e6f};
  slot.temperature = temperatures[below(6)];
  slot.top_k = chance(40) ? 1 + below(3000) : 0;
  slot.top_p = chance(40) ? (1 + below(1000)) / 1000.0 : 1;
  slot.min_p = chance(30) ? static_cast<float>(below(101)) / 100 : 0;
  slot.repetition_penalty = chance(30) ? 0.5f + static_cast<float>(below(10)) / 5 : 1;
  if (chance(30)) slot.frequency_penalty = static_cast<float>(below(5) - 2);
  if (chance(30)) slot.presence_penalty = static_cast<float>(below(5) - 2);
  slot.bias_ids = sorted.data();
  slot.biases = biases.data();
  slot.bias_length = chance(30) ? below(static_cast<int>(sorted.size()) + 1) : 0;
  slot.rule = below(4);
  if (slot.rule == OUTRIDER_SIGMOID && slot.temperature == 0) slot.rule = OUTRIDER_BLOCK;
  slot.lenience = slot.rule == OUTRIDER_TOKEN && chance(30) ? 0.3 : 1;
  slot.sigmoid_alpha = chance(50) ? -1e3 : -1;
  slot.sigmoid_beta = chance(50) ? 1e3 : 1;
  slot.context = ids.data();
  slot.context_length = below(static_cast<int>(ids.size()) + 1);
  slot.output_start = below(static_cast<int>(ids.size()) + 2);
  slot.suppress = ids.data();
  slot.suppress_length = chance(30) ? below(static_cast<int>(ids.size()) + 1) : 0;
  slot.suppress_rows = below(width + 2);
  slot.gamma = below(width + 2) - 1;
  return slot;
}

void require(bool holds, const char* text) {
  if (holds) return;
  std::fprintf(stderr, "broken promise: %s\n", text);
  std::exit(1);
}

void run_round(long* accepted, long* failed) {
  const int widths[] = {1, 2, 7, 111, 1023, 1024, 1025, 2048, 2500};
  const int vocab_size = chance(70) ? widths[below(9)] : 1 + below(4000);
  const int draft_size = chance(80) ? vocab_size : 1 + below(4000);
  const int width = 1 + below(8), slots = 1 + below(4), threads = 1 + below(3);
  const int dtype = below(3);
  const Logits target = random_logits(slots, width + 1, vocab_size, dtype);
  const Logits draft = random_logits(slots, width, draft_size, chance(80) ? dtype : below(3));
  std::vector<int64_t> ids;
  for (int i = below(50); i >= 0; --i) ids.push_back(random_id(vocab_size));
  std::vector<int64_t> sorted = ids;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  const std::vector<float> biases(sorted.size(), chance(50) ? -100.0f : 2.5f);
  const auto cells = static_cast<size_t>(slots) * static_cast<size_t>(width);
  std::vector<outrider_slot> slot;
  for (int b = 0; b < slots; ++b)
    slot.push_back(random_slot(width, slots - 1 - b, ids, sorted, biases));
  if (chance(3)) slot[0].top_p = NAN;
  std::vector<int64_t> drafts(cells);
  for (int64_t& id : drafts) id = random_id(vocab_size);
  std::vector<outrider_row> rows(cells);
  std::vector<outrider_verdict> verdicts(static_cast<size_t>(slots));
  std::vector<double> ratios(cells, -1);
  const int larger = vocab_size > draft_size ? vocab_size : draft_size;
  const size_t size = outrider_workspace_size(larger, width, threads);
  const Bytes workspace(size, below(64));

  const bool draws = chance(60);
  int32_t status = OUTRIDER_OK;
  for (int step = 0; draws && step < width && status == OUTRIDER_OK; ++step) {
    outrider_logits row = draft.view;
    row.data = draft.bytes.data + step * row.row_stride;
    status = outrider_draw(&row, slot.data(), slots, width, step, nullptr, drafts.data(),
                           rows.data(), verdicts.data(), workspace.data, size, threads);
    for (int b = 0; status == OUTRIDER_OK && b < slots; ++b) {
      const int64_t token = drafts[static_cast<size_t>(b * width + step)];
      require(step >= slot[static_cast<size_t>(b)].gamma || (token >= 0 && token < draft_size),
              "a drawn token is in the vocabulary");
    }
  }
  if (status != OUTRIDER_OK) {
    require(std::strlen(outrider_status_text(status)) > 0, "a status has a text");
    ++*failed;
    return;
  }
  const outrider_logits* q = chance(80) || draws ? &draft.view : nullptr;
  status = outrider_verify(&target.view, q, slot.data(), slots, width, nullptr, drafts.data(),
                           draws ? rows.data() : nullptr, verdicts.data(), ratios.data(),
                           workspace.data, size, threads);
  if (status != OUTRIDER_OK) ++*failed;
  if (status != OUTRIDER_OK && status != OUTRIDER_SLOT_FAILED) return;
  for (size_t b = 0; b < verdicts.size(); ++b) {
    const outrider_verdict& v = verdicts[b];
    if (v.status != OUTRIDER_OK || slot[b].gamma < 0) {
      require(v.token == -1, "no token without a verdict");
      continue;
    }
    require(v.token >= 0 && v.token < vocab_size, "a token is in the vocabulary");
    require(v.accepted >= 0 && v.accepted <= slot[b].gamma, "no more accepted than drafted");
    for (int i = 0; i < v.examined; ++i) {
      const double ratio = ratios[b * static_cast<size_t>(width) + static_cast<size_t>(i)];
      require(ratio >= 0 && ratio <= 1, "a ratio is in [0, 1]");
    }
    *accepted += v.accepted;
  }
}

} // namespace

int main(int argc, char** argv) {
  const long rounds = argc > 1 ? std::atol(argv[1]) : 1000;
  random_bits.seed(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  long accepted = 0, failed = 0;
  const char* sets[] = {"plain", "avx2", "avx512"};
  for (long i = 0; i < rounds; ++i) {
    outrider_use(sets[below(3)]);
    run_round(&accepted, &failed);
  }
  std::printf("%ld rounds: %ld drafts accepted, %ld calls refused\n", rounds, accepted, failed);
  return 0;
}
