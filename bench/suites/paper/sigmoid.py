"""What the sigmoid rule emits, by formula over the whole vocabulary: no draw, no noise.

Eq. 5 of "Optimized Speculative Sampling for GPU Hardware Accelerators" (arXiv 2406.11016) takes
p^ = s((z_p - alpha) / (beta - alpha)) for softmax(z_p), q^ likewise. Given both distributions of a
position, the token that a verification emits there has a distribution too, and its distance from
the target's is a number. Logits are those of a compiled pair on text that neither model has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.backends.engine import Engine
from runtime.text.engine import TextEngine

from ...core.fit import ratio_estimates

Rows = npt.NDArray[Any]  # [N, V]
Column = npt.NDArray[np.float64]  # [N]

SCALES = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5)  # beta = -alpha
PUBLISHED = {1e3: "speech", 1e4: "summaries"}  # what the paper uses (section 4.1)
FLOOR = 1e-5  # no token's weight is less in a redraw of the paper's program
UNLIKELY = 1e-4  # below this p a token counts as out of place
SHIFT = 5.0  # added to every logit of the draft: softmax does not see it


def softmax(logits: Rows) -> Rows:
    """float64 [N, V]."""
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    normalised: Rows = weights / weights.sum(-1, keepdims=True)
    return normalised


def squash(logits: Rows, scale: float) -> Rows:
    """Eq. 5 with beta = -alpha = scale, float64 [N, V]."""
    return _logistic((logits.astype(np.float64) + scale) / (2 * scale))


def squash_half(logits: Rows, scale: float) -> Rows:
    """Eq. 5 as the paper's program has it for half precision: float16 [N, V].

    speculative_sampling_half_sigmoid.cu of github.com/dwgnr/optimized-speculative-sampling:
    alpha and beta are converted to float16, where 1e5 is infinite; logits beyond them become 0 and
    1; the exponential is float32, its result is rounded.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        z = logits.astype(np.float16)
        alpha, span = np.array([-scale, 2 * scale]).astype(np.float16)
        squashed = _logistic(((z - alpha) / span).astype(np.float32)).astype(np.float16)
    squashed[z < np.float32(-scale)] = 0
    squashed[z > np.float32(scale)] = 1
    return squashed


def _logistic(x: Rows) -> Rows:
    result: Rows = 1 / (1 + np.exp(-x))
    return result


def emitted(p: Rows, q: Rows, p_hat: Rows, q_hat: Rows, floor: float = 0.0) -> tuple[Rows, Column]:
    """The distribution of a position's token when its draft token is drawn from q: float64
    [N, V], and the probability [N] that the draft token stands.

    q(x) a(x) + (1 - sum q a) norm(max(0, p^ - q^)), with a = min(1, p^ / q^); p where nothing is
    left to redraw from. The exact rule has p^ = p and q^ = q. floor: the least weight of a token in
    the redraw, as the paper's program has it; then also where nothing is left. As in a comparison,
    a ratio of NaN rejects and an infinite one accepts.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = (p_hat / q_hat).astype(np.float64)
        rest = np.maximum(np.nan_to_num((p_hat - q_hat).astype(np.float64), nan=0), 0)
    accept = np.minimum(np.nan_to_num(ratio, nan=0), 1)
    mass = rest.sum(-1, keepdims=True)
    redraw = np.where(mass > 0, rest / np.where(mass > 0, mass, 1), 0 if floor else p)
    if floor:
        redraw = np.maximum(redraw, floor)
        redraw /= redraw.sum(-1, keepdims=True)
    stands = q * accept
    rate = stands.sum(-1)
    return stands + (1 - rate)[:, None] * redraw, rate


def distance(a: Rows, b: Rows) -> Column:
    """Total variation [N]."""
    result: Column = 0.5 * np.abs(a - b).sum(-1)
    return result


@dataclass(frozen=True)
class RuleEffect:
    """Means over positions; error: the largest standard error of the first three, over documents.

    scale: beta = -alpha; 0 for the exact rule. accepted: of draft tokens. to_target, to_draft:
    total variation of the emitted token's distribution from p and from q. unlikely: its mass on
    tokens with p < UNLIKELY. lowest, highest: of p^ over the vocabulary. shifted: accepted, when
    every logit of the draft is SHIFT higher.
    """

    name: str
    scale: float
    accepted: float
    to_target: float
    to_draft: float
    unlikely: float
    lowest: float
    highest: float
    shifted: float
    error: float

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> RuleEffect:
        """From a `json_object`."""
        values: Any = {key: math.nan if x is None else x for key, x in found.items()}
        return cls(**values)

    def json_object(self) -> dict[str, Any]:
        """JSON has no NaN."""
        return {
            name: value if isinstance(value, str) else None if math.isnan(value) else value
            for name, value in asdict(self).items()
        }


def effects(documents: Sequence[tuple[Rows, Rows]]) -> list[RuleEffect]:
    """The exact rule, then eq. 5 for all SCALES, then the same in float16, as published.

    documents: (target's logits, draft's logits) of consecutive positions, float32 [N, V] each.
    """
    plans: list[tuple[str, float, Callable[[Rows, float], Rows], float]] = [
        ("exact", 0.0, lambda z, _: softmax(z), 0.0),
        *(("eq. 5", scale, squash, 0.0) for scale in SCALES),
        *(("float16", scale, squash_half, FLOOR) for scale in SCALES),
    ]
    results = []
    for name, scale, hat, floor in plans:
        sums, counts = [], []
        for z_p, z_q in documents:
            p, q, p_hat, q_hat = softmax(z_p), softmax(z_q), hat(z_p, scale), hat(z_q, scale)
            token, rate = emitted(p, q, p_hat, q_hat, floor)
            shifted = emitted(p, q, p_hat, hat(z_q + np.float32(SHIFT), scale), floor)[1]
            ends = p_hat.min(-1).astype(np.float64), p_hat.max(-1).astype(np.float64)
            unlikely = (token * (p < UNLIKELY)).sum(-1)
            row = (rate, distance(token, p), distance(token, q), unlikely, *ends, shifted)
            sums.append([float(x.sum()) for x in row])
            counts.append(len(rate))
        means, errors = ratio_estimates(np.array(sums), np.array(counts))
        results.append(RuleEffect(name, scale, *[*means, max(errors[:3])]))
    return results


def released_bonus(documents: Sequence[tuple[Rows, Rows]]) -> float:
    """Mean total variation from p of a draw from max(z_p, FLOOR): what the paper's program draws
    the bonus token from, because its kernel is launched for the gamma draft rows only and the row
    after them still has its logits."""
    distances = []
    for z_p, _ in documents:
        weights = np.maximum(z_p.astype(np.float64), FLOOR)
        distances.append(distance(weights / weights.sum(-1, keepdims=True), softmax(z_p)))
    return float(np.concatenate(distances).mean())


# The logits


def held_out_logits(
    engine: TextEngine, *, context: int, count: int, limit: int
) -> Iterator[tuple[Rows, Rows]]:
    """Both models' logits, float32 [count, V], behind `context` and more tokens out of the middle
    of each held-out document that is long enough, up to `limit` documents."""
    from models.corpus import collect

    target, draft = engine.decoder.target, engine.decoder.draft
    assert draft is not None
    for text in collect().held_out:
        ids = np.array(engine.tokenizer.encode(text))
        wanted = context + count - 1
        if len(ids) >= wanted:
            begin = (len(ids) - wanted) // 2
            ids = np.append(ids[:1], ids[begin + 1 : begin + wanted])  # as in training: a separator
            yield _logits(target, ids, context), _logits(draft, ids, context)
            limit -= 1
        if limit == 0:
            return


def _logits(model: Engine, ids: npt.NDArray[np.int64], context: int) -> Rows:
    """The rows behind ids[:context], ids[:context + 1], ..., ids; a call keeps few rows, so one a
    step, as in decoding."""
    rows = []
    begin = 0
    for end in range(context, len(ids) + 1):
        logits = model.forward(ids[None, begin:end], np.array([begin]), np.array([end - begin - 1]))
        rows.append(logits[0, 0, : model.vocab_size].copy())
        begin = end
    return np.stack(rows)
