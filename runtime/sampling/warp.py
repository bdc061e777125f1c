"""From logits to the distribution that is sampled: `SamplingParams` and `warp`.

Target and draft rows go through the same `warp`, in the order and with the semantics of the
Transformers logits processors, so that q in the acceptance test is the q that was drawn from.
This module knows nothing of engines, caches or rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ..files.errors import (
    INTEGER,
    NUMBER,
    OutriderError,
    ValueRule,
    check_value,
    is_number,
    is_whole,
    one_of,
    refuse_first,
)
from .distribution import Distribution, FloatRow

# A nucleus is complete when its mass is top_p less this share of the total: float32 weights are not
# more precise, and sums that are mathematically equal must not differ by rounding.
TOP_P_SLACK = 1e-6
NO_TOKEN = "every logit is -inf"  # the text of plugins/cpu

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]
VerifyRule = Literal["token", "block", "coupled", "sigmoid"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and verified. Raises OutriderError("option") on an illegal value.

    temperature: 0 is argmax, with the lowest index on ties; top_k, top_p and min_p have no effect
    then. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. repetition_penalty: 1 is off; it also
    counts the prompt, as in Transformers.
    frequency_penalty, presence_penalty: subtracted from an id's logit for each of its occurrences
    in the output so far, or once if there is any; the prompt does not count (OpenAI, vLLM). 0 is
    off.
    logit_bias: numbers to add to the logits of some ids; a mapping, kept as pairs in order of id.
    verify: "token" (speculative sampling), "block" (arXiv 2403.10444) and "coupled" (`coupled`:
    the seed alone decides the text) are exact; "sigmoid" is not: it is a published approximation
    whose output stays close to the draft's.
    lenience: not exact below 1 either: a token's probability is then at most p / lenience.
    sigmoid_alpha, sigmoid_beta: the scale of the sigmoid rule, in logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int = 0
    verify: VerifyRule = "token"
    lenience: float = 1.0
    sigmoid_alpha: float = -1e3
    sigmoid_beta: float = 1e3

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, check_value(name, getattr(self, name), *rule))
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        refuse_first([
            (self.lenience != 1 and self.verify != "token",
             f"lenience={self.lenience!r} is not defined for verify={self.verify}",
             "Use lenience with verify=token, or leave it at 1."),
            (self.verify == "sigmoid" and self.temperature == 0,
             "verify=sigmoid is not defined at temperature=0",
             "Use verify=token, or a positive temperature."),
            (self.verify != "sigmoid" and (self.sigmoid_alpha, self.sigmoid_beta) != (-1e3, 1e3),
             f"sigmoid_alpha and sigmoid_beta have no effect with verify={self.verify}",
             "Use verify=sigmoid, or leave them out."),
        ])  # fmt: skip

    @property
    def is_deterministic(self) -> bool:
        """Whether each row allows only one token, in any round, so that no uniform is used."""
        return self.temperature == 0 or self.verify == "coupled"

    @property
    def reads_context(self) -> bool:
        """Whether the distribution depends on which ids came before."""
        return any((self.repetition_penalty - 1, self.frequency_penalty, self.presence_penalty))


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    """Biases as pairs in order of id. Raises OutriderError "option"."""
    try:
        pairs = [*dict(given).items()]
        are_biases = len(pairs) == len(given) and all(  # two biases for one id are refused
            is_whole(token) and 0 <= token < 2**31 and is_number(bias) for token, bias in pairs
        )
    except (TypeError, ValueError):  # neither a mapping nor pairs
        pairs, are_biases = [], False
    check_value("logit_bias", given, (lambda _: are_biases, "token ids, each with a bias"),
                lambda _: all(abs(bias) <= 100 for _, bias in pairs),
                "biases from -100 to 100")  # fmt: skip
    return tuple(sorted((int(token), float(bias)) for token, bias in pairs))


# What the other fields must be.
_RULES: dict[str, ValueRule] = {
    # The lower bound keeps logits / temperature finite in float32.
    "temperature": (NUMBER, lambda x: x == 0 or 1e-6 <= x <= 1e6, "0, or from 1e-6 to 1e6"),
    "top_k": (INTEGER, lambda x: x >= 0, "0 (off) or more"),
    "top_p": (NUMBER, lambda x: 0 < x <= 1, "in (0, 1]"),
    "min_p": (NUMBER, lambda x: 0 <= x <= 1, "in [0, 1]"),
    "repetition_penalty": (NUMBER, lambda x: 1e-3 <= x <= 1e3, "from 0.001 to 1000; 1 is off"),
    "frequency_penalty": (NUMBER, lambda x: abs(x) <= 2, "from -2 to 2; 0 is off"),
    "presence_penalty": (NUMBER, lambda x: abs(x) <= 2, "from -2 to 2; 0 is off"),
    "seed": (INTEGER, lambda x: 0 <= x < 2**64, "in [0, 2^64)"),
    "verify": (one_of(*get_args(VerifyRule)),),
    "lenience": (NUMBER, lambda x: 0 < x <= 1, "in (0, 1]"),
    "sigmoid_alpha": (NUMBER, lambda x: -1e300 < x < 0, "negative"),
    "sigmoid_beta": (NUMBER, lambda x: 0 < x < 1e300, "positive"),
}


def warp(
    logits: npt.NDArray[np.floating[Any]],
    params: SamplingParams,
    context: TokenIds = (),
    suppress: TokenIds = (),
    where: str = "",
    output_start: int = 0,
) -> Distribution:
    """The distribution that Transformers' `generate` would sample from.

    Order: bias, repetition penalty, frequency and presence penalty, suppression, then at
    temperature > 0 temperature, top-k, top-p, min-p. At temperature 0 the result is a point mass
    at the argmax, with the lowest index on ties.

    logits: [V], float32 (other floats are converted), without padding; not modified.
    context: all token ids before this position, for the penalties; an integer array is much
        faster than a list. output_start: index in `context` at which the output begins. suppress:
        ids that get probability 0 (end-of-text before `min_new_tokens`). Ids beyond the row are
        ignored.
    where: name of the row in errors, such as "target, slot 0, position 17".
    Raises OutriderError("numeric") for a row with NaN or +inf, or with nothing but -inf.
    """
    scores: FloatRow = np.asarray(logits, dtype=np.float32)
    if scores.ndim != 1 or scores.size == 0:
        raise ValueError(f"logits must be one non-empty row, not of shape {scores.shape}")
    row = scores
    width = scores.shape[0]
    penalise = params.reads_context and len(context) > 0
    if penalise or params.logit_bias or len(suppress) > 0:
        check_row(float(scores.max()), where)  # before suppression could hide a NaN
        scores = edit_scores(scores.copy(), params, context, suppress, output_start)

    if params.temperature == 0:
        token = int(scores.argmax())  # the first NaN, if there is one
        check_row(scores.item(token), where)
        point = Distribution.point(token, width)
        if params.lenience != 1:
            point.processed = scores
        return point

    peak = scores.max()
    check_row(float(peak), where)
    if 0 < params.top_k < width:
        threshold = np.partition(scores, width - params.top_k)[width - params.top_k]
        scores = np.where(scores < threshold, np.float32(-np.inf), scores)
    # Another large temporary can cost more than the arithmetic: overwrite `scores` if it is a copy.
    may_overwrite = scores is not row and params.top_p == 1 and params.verify != "sigmoid"
    weights = _weights(scores, peak, params.temperature, scores if may_overwrite else None)
    if params.top_p < 1:
        _keep_nucleus(weights, scores, params)
    if params.min_p > 0:
        weights[weights < np.float32(params.min_p)] = 0  # the peak's weight is 1
    distribution = Distribution.dense(weights)
    if params.verify == "sigmoid":
        distribution.sigmoid = _sigmoid(scores, weights, params)
    return distribution


def edit_scores(
    scores: FloatRow,
    params: SamplingParams,
    context: TokenIds,
    suppress: TokenIds,
    output_start: int,
) -> FloatRow:
    """Apply to the row, in place, all that `warp` does before the temperature. Returns the row."""
    if params.logit_bias:
        tokens, biases = zip(*params.logit_bias, strict=True)
        inside = len(_ids_within(tokens, len(scores)))  # in order of id
        scores[list(tokens[:inside])] += np.array(biases[:inside], np.float32)
    if params.reads_context and len(context) > 0:
        _penalise(scores, params, context, output_start)
    forbid_ids(scores, suppress)
    return scores


def _penalise(
    scores: FloatRow, params: SamplingParams, context: TokenIds, output_start: int
) -> None:
    if params.repetition_penalty != 1:
        seen = _ids_within(context, len(scores))
        values = scores[seen]
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = np.where(values < 0, values * penalty, values / penalty)
    if params.frequency_penalty or params.presence_penalty:
        output = _ids_within(context[output_start:], len(scores))
        tokens, counts = np.unique(output, return_counts=True)
        frequency = np.float32(params.frequency_penalty) * counts.astype(np.float32)
        scores[tokens] -= frequency + np.float32(params.presence_penalty)


def _weights(
    scores: FloatRow, peak: np.float32, temperature: float, out: FloatRow | None = None
) -> FloatRow:
    """exp((scores - peak) / temperature). In this order a finite logit can overflow only to -inf,
    where its weight is 0 anyway."""
    with np.errstate(over="ignore"):
        weights: FloatRow = np.subtract(scores, peak, out=out)
        if temperature != 1:
            np.divide(weights, np.float32(temperature), out=weights)
    return np.exp(weights, out=weights)


def check_row(peak: float, where: str) -> None:
    """Raise OutriderError("numeric") if a row's largest logit is not finite."""
    if math.isfinite(peak):
        return
    what = "NaN in the logits"
    if not math.isnan(peak):
        what = "+inf in the logits" if peak > 0 else NO_TOKEN
    raise broken_row_error(where or "logits", what)


def broken_row_error(where: str, what: str) -> OutriderError:
    advice = "Forbid fewer tokens (min_new_tokens and other rules), or b"
    return OutriderError(
        "numeric",
        f"{where}: {what}",
        f"{advice if what == NO_TOKEN else 'B'}uild the engines with DTYPE=float32, and check "
        "that the checkpoint is intact.",
    )


def _ids_within(ids: TokenIds, width: int) -> npt.NDArray[np.intp]:
    """The ids that are inside a row of this width."""
    array = np.asarray(ids, dtype=np.intp)
    return array[(array >= 0) & (array < width)]


def forbid_ids(scores: FloatRow, ids: TokenIds) -> None:
    """Set the scores of these ids to -inf, in place. Ids beyond the row are ignored."""
    scores[_ids_within(ids, len(scores))] = -np.inf


def _keep_nucleus(weights: FloatRow, scores: FloatRow, params: SamplingParams) -> None:
    """Zero, in place, as many of the smallest weights as leave a mass of at least top_p, less
    `TOP_P_SLACK`.

    Same as Transformers with a stable sort (torch leaves the order of equal scores open): of equal
    scores at the boundary, those with lower ids are removed first. The best token stays. Only
    weights that could matter are sorted.
    """
    total, top_p = float(weights.sum(dtype=np.float64)), params.top_p
    # All weights below (1 - top_p) total / V together can be removed, without sorting. Half of that
    # bound leaves room for the rounding of the comparison.
    contenders = weights >= np.float32((1.0 - top_p) * total / (2 * len(weights)))
    values = np.sort(scores[contenders])
    mass = _weights(values, values[-1], params.temperature).cumsum(dtype=np.float64)
    mass += total - mass[-1]
    # Compare what is left above each, not the mass below with 1 - top_p: 1 - 0.9 is less than 0.1.
    enough = (top_p - TOP_P_SLACK) * total
    removed = min(int(np.count_nonzero(total - mass >= enough)), len(values) - 1)
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
    with np.errstate(over="ignore"):
        sigmoid: FloatRow = scores / np.float32(params.temperature)
        sigmoid -= np.float32(params.sigmoid_alpha)
        sigmoid /= np.float32(-span)
        np.exp(sigmoid, out=sigmoid)
    sigmoid += 1
    np.reciprocal(sigmoid, out=sigmoid)
    if 0 < params.top_k < len(weights) or params.top_p < 1 or params.min_p > 0:
        sigmoid[weights == 0] = 0
    return sigmoid
