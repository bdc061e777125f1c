// A round of one slot on the CPU: rows, shaped when a rule first needs them, and the final draw.
// Rows after the first rejection are conditioned on rejected tokens and are not read.
#ifndef OUTRIDER_ROUND_H
#define OUTRIDER_ROUND_H

#include <cstdint>

#include "outrider_carver.h"
#include "outrider_row.h"

namespace {

// --- the workspace ----------------------------------------------------------------------------

struct Memory {
  Scratch scratch;
  float* adjusted[2]; // [V] each: the target's and the draft's processed row
  int32_t* counts;    // [V]
  double* tile_sum;   // [width + 1, tiles] of the p rows
  double* q_sum;      // [tiles] of the q row
  double* residual;   // [tiles]
};

using CacheLines = Carver<64>;

inline Memory carve(CacheLines& carver, int vocab_size, int width) {
  const auto vocab = static_cast<size_t>(vocab_size);
  const auto tiles = static_cast<size_t>(tiles_of(vocab_size));
  Memory m;
  m.scratch.tile_max = carver.take<float>(tiles);
  m.scratch.order = carver.take<float>(tiles);
  m.scratch.mass = carver.take<int64_t>(BINS + 1);
  m.scratch.candidates = carver.take<Candidate>(vocab);
  m.adjusted[0] = carver.take<float>(vocab);
  m.adjusted[1] = carver.take<float>(vocab);
  m.counts = carver.take<int32_t>(vocab);
  m.tile_sum = carver.take<double>(tiles * (static_cast<size_t>(width) + 1));
  m.q_sum = carver.take<double>(tiles);
  m.residual = carver.take<double>(tiles);
  return m;
}

// --- one slot's round -------------------------------------------------------------------------

// The rows of one model for one slot.
struct Model {
  const outrider_logits* logits;
  int64_t slot;

  Row row(int i) const {
    const auto* data = static_cast<const unsigned char*>(logits->data);
    return {data + slot * logits->slot_stride + i * logits->row_stride, logits->dtype,
            logits->vocab_size};
  }
};

class Round {
public:
  Round(const outrider_tiles& ops, const Memory& memory, const outrider_slot& slot, Model target,
        Model draft, const int64_t* drafts, const outrider_row* rows, const double* uniforms,
        int width)
      : ops_(ops), memory_(memory), slot_(slot), target_(target), draft_(draft), drafts_(drafts),
        rows_(rows), uniforms_(uniforms), width_(width) {}

  bool is_deterministic() const { return outrider::is_deterministic(slot_); }
  bool point_draft() const { return is_deterministic() || draft_.logits->data == nullptr; }
  const outrider_verdict& failure() const { return failure_; }

  double accept_u(int i) const {
    if (is_deterministic()) return 0;
    if (uniforms_ != nullptr) return uniforms_[i];
    return outrider::uniform(slot_.seed, slot_.position + static_cast<uint32_t>(i),
                             outrider::ACCEPT, outrider::lane_of(slot_));
  }

  // There is one final draw per round; it uses the position of the round's start wherever it lands.
  double final_u() const {
    if (uniforms_ != nullptr) return uniforms_[width_];
    return outrider::uniform(slot_.seed, slot_.position, outrider::RESIDUAL,
                             outrider::lane_of(slot_));
  }

  bool probs(int i, double* p, double* q) {
    const int64_t token = drafts_[i];
    if (!shape_target(i)) return false;
    if (rows_ != nullptr && !fail(rows_[i].status, OUTRIDER_DRAFT, i)) return false;
    const outrider_row& shape = p_[i];
    *p = 0;
    *q = 1;
    if (is_deterministic()) {
      *p = token == shape.token ? 1 : 0;
      if (slot_.lenience < 1 && p_row_.has(token)) {
        // Accept if p(x) >= l max p, computed from the logits.
        const double margin =
            static_cast<double>(p_row_.at(token)) - static_cast<double>(shape.peak);
        *p = margin >= std::log(slot_.lenience) ? 1 : 0;
      }
      return true;
    }
    if (slot_.rule == OUTRIDER_SIGMOID) {
      if (point_draft()) return fail(OUTRIDER_NO_DRAFT_LOGITS, OUTRIDER_DRAFT, i);
      if (!shape_draft(i) || !process_draft(i)) return false;
      *p = sigmoid(p_row_, shape, token);
      *q = sigmoid(q_row_, q_, token);
      return true;
    }
    if (p_row_.has(token)) *p = weight(p_row_, shape, token) / shape.total;
    if (point_draft()) return true;
    if (!shape_draft(i)) return false;
    if (q_.token == token) {
      *q = static_cast<double>(q_.weight) / q_.total;
      return true;
    }
    if (!process_draft(i)) return false;
    *q = q_row_.has(token) ? weight(q_row_, q_, token) / q_.total : 0;
    return true;
  }

  // Computes the tile sums of max(0, scale p - q), and their mass in units of a normalised q.
  bool residual_mass(int i, double scale, double* mass) {
    if (!shape_target(i)) return false;
    residual_row_ = i;
    residual_scale_ = scale;
    if (is_deterministic()) {
      const double q = drafts_[i] == p_[i].token ? 1 : 0;
      *mass = scale > q ? scale - q : 0;
      return true;
    }
    double unit;
    if (point_draft()) {
      sum_without_point(i);
      unit = p_[i].total / scale; // scale p(x) <= 1 = q(x)
    } else {
      if (!shape_draft(i) || !process_draft(i)) return false;
      sum_residual_tiles(i);
      unit = q_.total;
    }
    const double sum = total_of(memory_.residual, p_row_.tiles());
    residual_empty_ = !(sum > 0);
    *mass = sum / unit;
    return true;
  }

  // Draws the next token, from row `accepted`.
  bool draw(const outrider::Decision& decision, int64_t* token) {
    const int i = decision.accepted;
    if (!shape_target(i)) return false;
    if (is_deterministic()) {
      *token = p_[i].token;
      return true;
    }
    if (decision.residual) {
      double mass;
      if ((residual_row_ != i || residual_scale_ != decision.scale) &&
          !residual_mass(i, decision.scale, &mass))
        return false;
      if (!residual_empty_) {
        *token = draw_residual(i);
        return true;
      }
    }
    outrider_row shape = p_[i];
    draw_row(ops_, p_row_, sums(i), final_u(), -1, &shape);
    *token = shape.token;
    return true;
  }

private:
  double* sums(int i) const {
    return memory_.tile_sum + static_cast<int64_t>(i) * tiles_of(target_.logits->vocab_size);
  }

  bool fail(int32_t status, int32_t model, int row) {
    if (status != OUTRIDER_OK) failure_ = outrider::verdict_of(status, model, row);
    return status == OUTRIDER_OK;
  }

  bool shape_target(int i) {
    int32_t status;
    if (p_current_ != i) {
      p_row_ = process_row(ops_, target_.row(i), slot_, drafts_, i, memory_.adjusted[0],
                           memory_.counts, &status);
      if (!fail(status, OUTRIDER_TARGET, i)) return false;
      p_current_ = i;
    }
    if (i < p_known_) return true;
    status = shape_row(ops_, p_row_, slot_, memory_.scratch, sums(i), &p_[i]);
    p_known_ = i + 1;
    if (status == OUTRIDER_OK && outrider::is_coupled(slot_))
      couple_row(ops_, p_row_, slot_, slot_.position + static_cast<uint32_t>(i),
                 memory_.scratch.tile_max, &p_[i]);
    return fail(status, OUTRIDER_TARGET, i);
  }

  bool process_draft(int i) {
    if (q_current_ == i) return true;
    int32_t status;
    q_row_ = process_row(ops_, draft_.row(i), slot_, drafts_, i, memory_.adjusted[1],
                         memory_.counts, &status);
    q_current_ = i;
    return fail(status, OUTRIDER_DRAFT, i);
  }

  bool shape_draft(int i) {
    if (q_known_ == i) return true;
    q_known_ = i;
    if (rows_ != nullptr) {
      q_ = rows_[i];
      return true;
    }
    if (!process_draft(i)) return false;
    const int32_t status = shape_row(ops_, q_row_, slot_, memory_.scratch, memory_.q_sum, &q_);
    return fail(status, OUTRIDER_DRAFT, i);
  }

  double weight(const Row& row, const outrider_row& shape, int64_t id) const {
    return static_cast<double>(ops_.weight(row.at(id), static_cast<int>(id), &shape));
  }

  double sigmoid(const Row& row, const outrider_row& shape, int64_t id) const {
    if (!row.has(id)) return 0;
    return static_cast<double>(ops_.sigmoid(row.at(id), static_cast<int>(id), &shape, &slot_));
  }

  // Computes max(0, scale p - q) of tile k, in units of q's weights. If p and q are the same row,
  // the factor is exactly 1 and the residual exactly 0.
  float residual_tile(int i, int k, float* w) const {
    alignas(64) float buffer[TILE], v[TILE];
    const bool common = k < q_row_.tiles(); // beyond a narrower draft's vocabulary, q is 0
    const bool by_sigmoid = slot_.rule == OUTRIDER_SIGMOID;
    const auto weigh = [&](float* to, const Row& row, const outrider_row& shape) {
      const outrider_logit* z = row.load(ops_, k, buffer);
      if (by_sigmoid) ops_.sigmoids(to, z, &shape, k * TILE, &slot_);
      else ops_.weights(to, z, &shape, k * TILE);
    };
    weigh(w, p_row_, p_[i]);
    if (common) weigh(v, q_row_, q_);
    if (!common) std::fill_n(v, TILE, 0.0f);
    const double factor = by_sigmoid ? 1 : residual_scale_ * (q_.total / p_[i].total);
    return ops_.residual(w, static_cast<float>(factor), v);
  }

  void sum_residual_tiles(int i) {
    alignas(64) float w[TILE];
    for (int k = 0; k < p_row_.tiles(); ++k) {
      const bool nothing = slot_.rule != OUTRIDER_SIGMOID && !(sums(i)[k] > 0);
      memory_.residual[k] = nothing ? 0 : static_cast<double>(residual_tile(i, k, w));
    }
  }

  void sum_without_point(int i) {
    const int64_t token = drafts_[i];
    std::copy_n(sums(i), p_row_.tiles(), memory_.residual);
    if (!p_row_.has(token)) return;
    alignas(64) float buffer[TILE], w[TILE];
    const int k = static_cast<int>(token / TILE);
    ops_.weights(w, p_row_.load(ops_, k, buffer), &p_[i], k * TILE);
    w[token % TILE] = 0;
    std::fill_n(buffer, TILE, 0.0f);
    memory_.residual[k] = static_cast<double>(ops_.residual(w, 1, buffer)); // used as a sum
  }

  int64_t draw_residual(int i) {
    if (point_draft()) {
      outrider_row shape = p_[i];
      draw_row(ops_, p_row_, memory_.residual, final_u(), drafts_[i], &shape);
      return shape.token;
    }
    alignas(64) float w[TILE];
    double fraction = 0;
    const int k = choose_tile(memory_.residual, p_row_.tiles(), final_u(), &fraction);
    residual_tile(i, k, w);
    return int64_t{k} * TILE + choose_token(w, fraction);
  }

  const outrider_tiles& ops_;
  const Memory& memory_;
  const outrider_slot& slot_;
  Model target_, draft_;
  const int64_t* drafts_;
  const outrider_row* rows_;
  const double* uniforms_;
  int width_;

  outrider_row p_[OUTRIDER_MAX_WIDTH + 1]; // shapes of rows 0 .. p_known_ - 1
  outrider_row q_{};                       // shape of row q_known_
  Row p_row_{}, q_row_{};                  // processed rows p_current_ and q_current_
  int p_known_ = 0, q_known_ = -1, p_current_ = -1, q_current_ = -1;
  int residual_row_ = -1;
  double residual_scale_ = 1;
  bool residual_empty_ = true;
  outrider_verdict failure_ = outrider::no_verdict();
};

} // namespace
#endif
