// The coupled rule's token of a row: couple_row of the CPU library, with the tiles in any order.
#ifndef OUTRIDER_DEVICE_COUPLE_CUH
#define OUTRIDER_DEVICE_COUPLE_CUH

#include "outrider_device_round.cuh"

namespace {

// A number that is not negative, or INF, and the index of what it belongs to.
struct Least {
  double number;
  int at;
};

// The least of the lanes' numbers, at the lowest index.
DEVICE Least least_of(double number, int at) {
  unsigned long long bits;
  memcpy(&bits, &number, sizeof bits);
  const unsigned high = static_cast<unsigned>(bits >> 32), low = static_cast<unsigned>(bits);
  const unsigned top = __reduce_min_sync(ALL_LANES, high);
  const unsigned rest = __reduce_min_sync(ALL_LANES, high == top ? low : 0xFFFFFFFFu);
  const bool wins = high == top && low == rest;
  const unsigned index =
      __reduce_min_sync(ALL_LANES, wins ? static_cast<unsigned>(at) : 0xFFFFFFFFu);
  const int winner = lowest_bit(__ballot_sync(ALL_LANES, wins));
  return {__shfl_sync(ALL_LANES, number, winner), static_cast<int>(index)};
}

// The least quotient of noise and weight in tile k, by one warp, with first the tile's groups and
// then a group's tokens in the lanes. top: the tile's maximum.
DEVICE Least couple_tile(const outrider_slot& slot, uint32_t position, const Row& row,
                         const outrider_row& shape, int k, float top) {
  const int lane = lane_id();
  Least found = {static_cast<double>(INF), -1};
  if (top < shape.cut) return found;
  float w[PER_LANE]; // w[q]: weight of the lane's token in group q
  load_tile<true>(row, k, 0, w);
  weigh<true>(w, 0, k, shape);
  float heaviest = 0; // largest weight of the lane's group
#pragma unroll
  for (int q = 0; q < PER_LANE; ++q) {
    const float largest = as_float(__reduce_max_sync(ALL_LANES, as_bits(w[q])));
    if (q == lane) heaviest = largest;
  }
  const Noise mine =
      group_noise(slot.seed, position, k, tile_noise(slot.seed, position, k), lane);
  const float bound = static_cast<float>(mine.least / static_cast<double>(heaviest));
  bool open = true;
#pragma unroll 1
  for (;;) { // next the group with the least bound
    const bool may = open && may_win(mine.least, found.number, heaviest);
    const unsigned key = may ? as_bits(bound) : 0xFFFFFFFFu;
    const unsigned least = __reduce_min_sync(ALL_LANES, key);
    if (least == 0xFFFFFFFFu) return found;
    const int g = lowest_bit(__ballot_sync(ALL_LANES, key == least));
    if (lane == g) open = false;
    const Noise group = {__shfl_sync(ALL_LANES, mine.least, g), __shfl_sync(ALL_LANES, mine.at, g)};
    float weight = 0;
#pragma unroll
    for (int q = 0; q < PER_LANE; ++q)
      if (q == g) weight = w[q];
    uint32_t words[4];
    token_words(slot.seed, position, k, g, lane, words);
    const Least next = least_of(weight > 0 ? token_noise(group, lane, words) /
                                                 static_cast<double>(weight)
                                           : static_cast<double>(INF),
                                k * TILE + g * GROUP + lane);
    if (next.number < found.number || (next.number == found.number && next.at < found.at))
      found = next;
  }
}

// Chooses the row's token among the best of its tiles, by one warp.
DEVICE void couple_row(const Row& row, const outrider_device_tile* tiles, const double* quotients,
                       outrider_row* shape) {
  double least = static_cast<double>(INF);
  int at = -1;
#pragma unroll 4
  for (int k = lane_id(); k < tiles_of(row.width); k += LANES)
    if (const double quotient = load_uncached(quotients + k); quotient < least)
      least = quotient, at = k;
  shape->token = load_uncached(tiles + least_of(least, at).at).token;
  shape->weight = weight_of(logit_at(row, shape->token), shape->token, *shape);
}

} // namespace
#endif
