"""Gumbel coupling (Daliri, Musco, Suresh 2024, arXiv 2408.07978): the seed alone decides the text.

The noise g depends on (seed, position, token) and on nothing else. The target's token is argmax
log p + g, an exact draw from p. The draft proposes argmax log q + g with the same g. A draft token
is accepted if it equals the target's, so the output is what the target alone would have drawn; the
draft affects only the speed. The probability of acceptance is

    sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x)  >=  (1 - TV) / (1 + TV)
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .distribution import TILE, Distribution, SumRow
from .philox import Purpose, philox4x32

GROUP = 32  # tokens per group; a tile has 32 groups
Words = npt.NDArray[np.uint64]


def select_by_noise(distribution: Distribution, seed: int, position: int) -> Distribution:
    """A point mass on the token that the noise at this position selects from a distribution."""
    weights = distribution.weights
    if weights is None:
        return distribution
    with np.errstate(divide="ignore"):
        token = int(np.argmin(noise(seed, position, len(weights)) / weights))
    return Distribution.point(token, len(weights))


@lru_cache(maxsize=16)  # target and draft use the same noise
def noise(seed: int, position: int, vocab_size: int) -> SumRow:
    """Independent standard exponential numbers e = exp(-g), float64 [vocab_size].

    They are generated from the top down, so that the kernel can skip most of them: first the
    minimum of a tile of 1024, which is exponential / 1024, and its token; then the minimum of each
    group, which exceeds the tile's by exponential / 32 unless it is the same number; then each
    token's number, whose excess over the group's minimum is exponential again. The result is
    bitwise that of outrider_sampling.h.
    """
    tiles = np.arange(-(-vocab_size // TILE), dtype=np.uint64)[:, None]
    high, low, place, _ = np.moveaxis(_words(seed, position, tiles, 0, 1), -1, 0)
    bits = (high << np.uint64(32) | low) >> np.uint64(12)
    least = -_log((bits.astype(np.float64) + 0.5) * 2.0**-52) / TILE  # [tiles, 1]
    at = (place >> np.uint64(22)).astype(np.int64)

    pairs = _words(seed, position, tiles, 1, TILE // GROUP // 2).reshape(len(tiles), -1, 2)
    groups = np.arange(TILE // GROUP)
    own = at // GROUP == groups
    of_group = np.where(own, least, least + _exponential(pairs[..., 0]) / GROUP)
    at_group = np.where(own, at % GROUP, (pairs[..., 1] >> np.uint64(27)).astype(np.int64))

    words = _words(seed, position, tiles, 1 + len(groups) // 2, TILE // 4)
    rest = _exponential(words.reshape(len(tiles), len(groups), GROUP))
    of_group, at_group = of_group[..., None], at_group[..., None]
    found = np.where(at_group == np.arange(GROUP), of_group, of_group + rest)
    row: SumRow = found.reshape(-1)[:vocab_size]
    row.flags.writeable = False  # it is shared
    return row


def _words(seed: int, position: int, tiles: Words, first: int, count: int) -> Words:
    """Philox words [tiles, count, 4] of the counters (position, purpose, tile, first ...)."""
    counter = np.broadcast_arrays(position, Purpose.COUPLED, tiles, np.arange(first, first + count))
    return np.stack(philox4x32(seed, [np.asarray(word, np.uint64) for word in counter]), axis=-1)


def _exponential(words: Words) -> SumRow:
    """Exponential numbers; each word stands for the middle of one of 2^32 intervals of (0, 1)."""
    return -_log((words.astype(np.float64) + 0.5) * 2.0**-32)


def _log(v: SumRow) -> SumRow:
    """log v for v in (0, 1): 2 artanh((m - 1) / (m + 1)) + n log 2, bitwise as in the kernel."""
    m, n = np.frexp(v)
    small = m < 0.7071067811865476
    m, n = np.where(small, m + m, m), n - small
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    p = np.full_like(t, 1 / 19)
    for k in (17, 15, 13, 11, 9, 7, 5, 3):
        p = p * t + 1 / k
    log: SumRow = 2.0 * (s + s * (t * p)) + n * 0.6931471805599453
    return log
