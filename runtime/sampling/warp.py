"""From logits to the distribution that is sampled: `SamplingParams`, `warp`, `Distribution`.

Target and draft rows go through the same `warp`, in the order and with the semantics of the
Transformers logits processors; that makes q in the accept test the q that was drawn from.
This module knows nothing of engines, caches or rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError

TILE = 1024  # tokens per tile of the inverse CDF; fixed, so a draw depends on the row alone

FloatRow = npt.NDArray[np.float32]  # [V]
SumRow = npt.NDArray[np.float64]
TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
VerifyRule = Literal["token", "block", "sigmoid"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and verified. Raises OutriderError("option") on an illegal value.

    temperature: 0 is argmax, lowest index on ties; there top_k, top_p and min_p change nothing.
    top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. repetition_penalty: 1 is off.
    verify: "token" (speculative sampling) and "block" (arXiv 2403.10444) are exact; "sigmoid"
    is not: it is a published approximation whose output stays close to the draft's.
    lenience: below 1 not exact either: no token is drawn with more than p / lenience.
    sigmoid_alpha, sigmoid_beta: the scale of the sigmoid rule, in logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    verify: VerifyRule = "token"
    lenience: float = 1.0
    sigmoid_alpha: float = -1e3
    sigmoid_beta: float = 1e3

    def __post_init__(self) -> None:
        if isinstance(self.seed, Integral):
            # A NumPy integer would wrap in Philox's products.
            object.__setattr__(self, "seed", int(self.seed))
        # The lower bound keeps logits / temperature finite in float32.
        self._require(
            _is_real(self.temperature)
            and (self.temperature == 0 or 1e-6 <= self.temperature <= 1e6),
            "temperature",
            "0, or from 1e-6 to 1e6",
        )
        self._require(_is_int(self.top_k) and self.top_k >= 0, "top_k", "0 (off) or more")
        self._require(_is_real(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]")
        self._require(_is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        self._require(
            _is_real(self.repetition_penalty) and 1e-3 <= self.repetition_penalty <= 1e3,
            "repetition_penalty",
            "from 0.001 to 1000; 1 is off",
        )
        self._require(_is_int(self.seed) and 0 <= self.seed < 2**64, "seed", "in [0, 2^64)")
        self._require(
            self.verify in ("token", "block", "sigmoid"), "verify", "token, block or sigmoid"
        )
        self._require(_is_real(self.lenience) and 0 < self.lenience <= 1, "lenience", "in (0, 1]")
        self._require(
            _is_real(self.sigmoid_alpha) and self.sigmoid_alpha < 0, "sigmoid_alpha", "negative"
        )
        self._require(
            _is_real(self.sigmoid_beta) and self.sigmoid_beta > 0, "sigmoid_beta", "positive"
        )
        if self.lenience != 1 and self.verify != "token":
            raise OutriderError(
                "option",
                f"lenience={self.lenience!r} is not defined for verify={self.verify}",
                "Use lenience with verify=token, or leave it at 1.",
            )
        if self.verify == "sigmoid" and self.temperature == 0:
            raise OutriderError(
                "option",
                "verify=sigmoid is not defined at temperature=0",
                "Use verify=token, or a positive temperature.",
            )
        if self.verify != "sigmoid" and (self.sigmoid_alpha, self.sigmoid_beta) != (-1e3, 1e3):
            raise OutriderError(
                "option",
                f"sigmoid_alpha and sigmoid_beta have no effect with verify={self.verify}",
                "Use verify=sigmoid, or leave them out.",
            )

    def _require(self, legal: bool, name: str, legal_range: str) -> None:
        if not legal:
            value = getattr(self, name)
            raise OutriderError(
                "option", f"{name}={value!r} is out of range", f"{name} must be {legal_range}."
            )


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


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

    __slots__ = (
        "_cumulative",
        "point_mass",
        "processed",
        "sigmoid",
        "total",
        "vocab_size",
        "weights",
    )

    vocab_size: int
    point_mass: int | None
    weights: FloatRow | None
    total: float
    processed: FloatRow | None
    sigmoid: FloatRow | None
    _cumulative: SumRow  # [tiles], over the tiles' sums; dense only

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.point_mass = None
        self.weights = None
        self.total = 1.0
        self.processed = None
        self.sigmoid = None

    @classmethod
    def dense(cls, weights: FloatRow) -> Distribution:
        """From non-negative float32 weights [V], which it keeps. `total` may come out as 0."""
        self = cls(len(weights))
        self.weights = weights
        tiles = np.add.reduceat(weights, _tile_starts(self.vocab_size), dtype=np.float64)
        self._cumulative = tiles.cumsum()
        self.total = float(self._cumulative[-1])
        return self

    @classmethod
    def point(cls, token: int, vocab_size: int) -> Distribution:
        """All mass on one token."""
        self = cls(vocab_size)
        self.point_mass = token
        return self

    def prob(self, token: int) -> float:
        """p(token); 0 outside [0, V)."""
        if self.weights is None:
            return 1.0 if token == self.point_mass else 0.0
        if not 0 <= token < self.vocab_size:
            return 0.0
        return self.weights.item(token) / self.total

    def probs(self) -> SumRow:
        """p as float64 [V]: for tests and the certificate, not for the loop."""
        if self.weights is None:
            row = np.zeros(self.vocab_size)
            row[self.point_mass] = 1.0
            return row
        return self.weights / np.float64(self.total)

    def draw(self, u: float) -> int:
        """The token at u in [0, 1) of the inverse CDF; never one of weight 0.

        Finds the tile in which the cumulative float64 sum crosses u * total, scans that alone.
        """
        if self.weights is None:
            assert self.point_mass is not None
            return self.point_mass
        threshold = u * self.total
        # side="right" is the first cumulative sum strictly above: a tile or token of weight 0
        # adds nothing and is never the first. Past the end (u close to 1): the last that adds.
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
        """z_token - max z of the processed logits, in logits, <= 0; -inf outside [0, V).

        Only where `processed` is present (temperature 0, lenience below 1).
        """
        if self.processed is None or self.point_mass is None:
            raise ValueError("no processed logits: warp at temperature 0 with lenience below 1")
        if not 0 <= token < self.vocab_size:
            return -math.inf
        return self.processed.item(token) - self.processed.item(self.point_mass)


@lru_cache(maxsize=16)
def _tile_starts(vocab_size: int) -> npt.NDArray[np.intp]:
    return np.arange(0, vocab_size, TILE)


def warp(
    logits: npt.NDArray[np.floating[Any]],
    params: SamplingParams,
    context: TokenIds = (),
    suppress: TokenIds = (),
    vocab_size: int | None = None,
    where: str = "",
) -> Distribution:
    """The distribution that Transformers' `generate` would sample from.

    Order: repetition penalty, suppression, then at temperature > 0 temperature, top-k, top-p,
    min-p. At temperature 0 a point mass at the argmax, lowest index on ties.

    logits: [V], float32 (other floats are converted); not modified.
    context: all token ids before this position, for the repetition penalty; an integer array is
        much faster than a list. suppress: ids that get probability 0 (end-of-text before
        `min_new_tokens`). Ids beyond the row are ignored.
    vocab_size: the width that target and draft share; columns beyond it are padding, not read.
    where: names the row in errors, such as "target, slot 0, position 17".
    Raises OutriderError("numeric") for a row with NaN or +inf, or with nothing but -inf.
    """
    scores: FloatRow = np.asarray(logits, dtype=np.float32)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"logits must be one non-empty row, not of shape {scores.shape}")
    scores = row = scores[:vocab_size]
    width = scores.shape[0]
    penalise = params.repetition_penalty != 1 and len(context) > 0
    if penalise or len(suppress) > 0:
        _check(float(scores.max()), where)  # before suppression could hide a NaN
        scores = scores.copy()
        if penalise:
            seen = _within(context, width)
            values = scores[seen]
            penalty = np.float32(params.repetition_penalty)
            scores[seen] = np.where(values < 0, values * penalty, values / penalty)
        scores[_within(suppress, width)] = -np.inf

    if params.temperature == 0:
        token = int(scores.argmax())  # the first NaN, where there is one
        _check(scores.item(token), where)
        point = Distribution.point(token, width)
        if params.lenience != 1:
            point.processed = scores
        return point

    if params.temperature != 1:
        scores = scores / np.float32(params.temperature)
    peak = scores.max()
    _check(float(peak), where)
    if 0 < params.top_k < width:
        threshold = np.partition(scores, width - params.top_k)[width - params.top_k]
        scores = np.where(scores < threshold, np.float32(-np.inf), scores)
    # Another large temporary can cost more than the arithmetic: use `scores` up where it is ours.
    spent = scores is not row and params.top_p == 1 and params.verify != "sigmoid"
    weights: FloatRow = np.subtract(scores, peak, out=scores if spent else None)
    np.exp(weights, out=weights)
    if params.top_p < 1:
        _keep_nucleus(weights, scores, params.top_p)
    if params.min_p > 0:
        weights[weights < np.float32(params.min_p)] = 0  # the peak's weight is 1
    distribution = Distribution.dense(weights)
    if params.verify == "sigmoid":
        distribution.sigmoid = _sigmoid(scores, weights, params)
    return distribution


def _check(peak: float, where: str) -> None:
    if math.isfinite(peak):
        return
    what = "NaN in the logits"
    if not math.isnan(peak):
        what = "+inf in the logits" if peak > 0 else "every logit is -inf"
    raise OutriderError(
        "numeric",
        f"{where or 'logits'}: {what}",
        "Build the engines with DTYPE=float32, and check that the checkpoint is intact.",
    )


def _within(ids: TokenIds, width: int) -> npt.NDArray[np.intp]:
    array = np.asarray(ids, dtype=np.intp)
    return array[(array >= 0) & (array < width)]


def _keep_nucleus(weights: FloatRow, scores: FloatRow, top_p: float) -> None:
    """Zeroes, in place, the longest ascending prefix that leaves a mass of at least top_p.

    As Transformers does, with its sort made stable (torch leaves the order of equal scores open):
    of equal scores at the boundary the lower ids go first. The best token stays. Only weights
    that could matter are sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    # All weights below (1 - top_p) total / V together can go: they do, unsorted. Half of it leaves
    # room for the rounding of the comparison.
    contenders = weights >= np.float32((1.0 - top_p) * total / (2 * len(weights)))
    values = np.sort(scores[contenders])
    mass = np.exp(values - values[-1]).cumsum(dtype=np.float64)
    mass += total - mass[-1]
    # What is left above each, not 1 - top_p: 1 - 0.9 is less than a tenth.
    removed = min(int(np.count_nonzero(total - mass >= top_p * total)), len(values) - 1)
    boundary = values[removed]
    weights[scores < boundary] = 0
    ties_removed = removed - int(values.searchsorted(boundary, side="left"))
    if ties_removed:
        weights[np.flatnonzero(scores == boundary)[:ties_removed]] = 0


def _sigmoid(scores: FloatRow, weights: FloatRow, params: SamplingParams) -> FloatRow:
    """1 / (1 + exp(-(z - alpha) / (beta - alpha))), 0 for tokens that a filter removed.

    Eq. 5 of "Optimized Speculative Sampling for GPU Hardware Accelerators" (arXiv 2406.11016),
    on the warped logits; -inf gives 0.
    """
    span = params.sigmoid_beta - params.sigmoid_alpha
    sigmoid: FloatRow = (scores - np.float32(params.sigmoid_alpha)) / np.float32(-span)
    with np.errstate(over="ignore"):
        np.exp(sigmoid, out=sigmoid)
    sigmoid += 1
    np.reciprocal(sigmoid, out=sigmoid)
    if 0 < params.top_k < len(weights) or params.top_p < 1 or params.min_p > 0:
        sigmoid[weights == 0] = 0
    return sigmoid
