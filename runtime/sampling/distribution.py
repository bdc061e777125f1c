"""A distribution over the vocabulary: probabilities, and draws by the inverse CDF."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

TILE = 1024  # tokens per tile of the inverse CDF; fixed, so a draw depends on the row alone

FloatRow = npt.NDArray[np.float32]  # [V]
SumRow = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False, repr=False)
class Distribution:
    """A distribution over V tokens: weights, or a point mass that holds no row at all.

    Build one with `warp`, `Distribution.dense` or `Distribution.point` (the q of a draft that
    proposes without a distribution, such as n-gram lookup). Immutable by convention.

    vocab_size: V. Tokens outside [0, V) have probability 0.
    point_mass: the token, or None for a dense distribution.
    weights: float32 [V], unnormalised, owned; None for a point mass.
    total: float64 sum of the weights.
    processed: float32 [V], the processed logits; present only at temperature 0 with lenience
        below 1. It may be a *view* of the row given to `warp`: valid until the engine reuses
        that buffer, so within the round.
    sigmoid: float32 [V], the sigmoid of the warped logits, owned; only with verify="sigmoid".
    """

    vocab_size: int
    point_mass: int | None = None
    weights: FloatRow | None = None
    total: float = 1.0
    processed: FloatRow | None = None
    sigmoid: FloatRow | None = None
    _cumulative: SumRow = field(init=False)  # [tiles], over the tiles' sums; dense only

    @classmethod
    def dense(cls, weights: FloatRow) -> Distribution:
        """From non-negative float32 weights [V], which are kept, not copied. `total` may be 0."""
        self = cls(len(weights), weights=weights)
        tiles = np.add.reduceat(weights, _tile_starts(self.vocab_size), dtype=np.float64)
        self._cumulative = tiles.cumsum()
        self.total = float(self._cumulative[-1])
        return self

    @classmethod
    def point(cls, token: int, vocab_size: int) -> Distribution:
        """All mass on one token."""
        return cls(vocab_size, token)

    def prob(self, token: int) -> float:
        """p(token); 0 outside [0, V)."""
        if self.weights is None:
            return 1.0 if token == self.point_mass else 0.0
        if not 0 <= token < self.vocab_size:
            return 0.0
        return self.weights.item(token) / self.total

    def probs(self) -> SumRow:
        """p as float64 [V]: for tests and the certificate, too slow for rounds."""
        if self.weights is None:
            row = np.zeros(self.vocab_size)
            row[self.point_mass] = 1.0
            return row
        return self.weights / np.float64(self.total)

    def draw(self, u: float) -> int:
        """The token at u in [0, 1) of the inverse CDF; never one of weight 0.

        Finds the tile in which the cumulative float64 sum crosses u * total, and scans only that.
        """
        if self.weights is None:
            assert self.point_mass is not None
            return self.point_mass
        threshold = u * self.total
        # side="right" finds the first cumulative sum strictly above: a tile or token of weight 0
        # adds nothing and is never the first. Past the end (u close to 1) take the last that adds.
        tile = int(self._cumulative.searchsorted(threshold, side="right"))
        if tile == len(self._cumulative):
            tile = int(self._cumulative.searchsorted(self.total, side="left"))
        start = tile * TILE
        if tile:
            threshold -= float(self._cumulative[tile - 1])
        scan = self.weights[start : start + TILE].cumsum(dtype=np.float64)
        token = int(scan.searchsorted(threshold, side="right"))
        if token == len(scan):
            token = int(scan.searchsorted(scan[-1], side="left"))
        return start + token

    def margin(self, token: int) -> float:
        """z_token - max z of the processed logits, <= 0; -inf outside [0, V).

        Only if `processed` is present (temperature 0, lenience below 1).
        """
        if self.processed is None or self.point_mass is None:
            raise ValueError("no processed logits: warp at temperature 0 with lenience below 1")
        if not 0 <= token < self.vocab_size:
            return -math.inf
        return self.processed.item(token) - self.processed.item(self.point_mass)


@lru_cache(maxsize=16)
def _tile_starts(vocab_size: int) -> npt.NDArray[np.intp]:
    return np.arange(0, vocab_size, TILE)
