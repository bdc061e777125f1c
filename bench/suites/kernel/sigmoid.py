"""The output distribution of the sigmoid rule, computed over the whole vocabulary without sampling.

Eq. 5 of "Optimized Speculative Sampling for GPU Hardware Accelerators" (arXiv 2406.11016) replaces
softmax(z_p) by p^ = s((z_p - alpha) / (beta - alpha)), and softmax(z_q) by q^ in the same way. From
both distributions at a position follows the distribution of the token that a verification emits
there, and its distance from the target's. The logits are those of a compiled pair on text that
neither model has seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.text.engine import TextEngine

from ...core.fit import ratio_estimates
from ...core.runs import text_logits

Rows = npt.NDArray[Any]  # [N, V]
Column = npt.NDArray[np.float64]  # [N]

SCALES = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5)  # beta = -alpha
PUBLISHED = {1e3: "speech", 1e4: "summaries"}  # scales used in the paper (section 4.1)
CONTEXT, POSITIONS = 64, 48  # tokens of a text before the first position, and positions per text


def softmax(logits: Rows) -> Rows:
    """float64 [N, V]."""
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    normalised: Rows = weights / weights.sum(-1, keepdims=True)
    return normalised


def squash(logits: Rows, scale: float) -> Rows:
    """Eq. 5 with beta = -alpha = scale, float64 [N, V]."""
    squashed: Rows = 1 / (1 + np.exp(-(logits.astype(np.float64) + scale) / (2 * scale)))
    return squashed


def emitted_distribution(p: Rows, q: Rows, p_hat: Rows, q_hat: Rows) -> tuple[Rows, Column]:
    """The distribution of the emitted token of each position if its draft token is drawn from q,
    float64 [N, V]; and the probability [N] that the draft token is accepted.

    q(x) a(x) + (1 - sum q a) norm(max(0, p^ - q^)), with a = min(1, p^ / q^). If nothing is left to
    redraw from, norm(...) is p. The exact rule has p^ = p and q^ = q.
    """
    rest = np.maximum(p_hat - q_hat, 0)
    mass = rest.sum(-1, keepdims=True)
    redraw = np.where(mass > 0, rest / np.where(mass > 0, mass, 1), p)
    accepted = q * np.minimum(p_hat / q_hat, 1)
    rate = accepted.sum(-1)
    return accepted + (1 - rate)[:, None] * redraw, rate


def total_variation(a: Rows, b: Rows) -> Column:
    """Total variation [N]."""
    result: Column = 0.5 * np.abs(a - b).sum(-1)
    return result


def measure_scales(documents: Sequence[tuple[Rows, Rows]]) -> list[dict[str, float]]:
    """Means over positions for the exact rule, then for eq. 5 with each of SCALES.

    documents: as `held_out_logits` yields them. In the result, scale: beta = -alpha, 0 for the
    exact rule; accepted: share of accepted draft tokens; to_target, to_draft: total variation of
    the emitted token's distribution from p and from q; error: the largest standard error of these,
    over documents.
    """
    results = []
    for scale in (0.0, *SCALES):
        sums = []
        for z_p, z_q in documents:
            p, q = softmax(z_p), softmax(z_q)
            hats = (squash(z_p, scale), squash(z_q, scale)) if scale else (p, q)
            token, rate = emitted_distribution(p, q, *hats)
            sums.append(
                [rate.sum(), total_variation(token, p).sum(), total_variation(token, q).sum()]
            )
        counts = np.array([len(z_p) for z_p, _ in documents])
        means, errors = ratio_estimates(np.array(sums), counts)
        found = dict(zip(("accepted", "to_target", "to_draft"), means, strict=True))
        results.append({"scale": scale, **found, "error": max(errors)})
    return results


def held_out_logits(engine: TextEngine, documents: int) -> Iterator[tuple[Rows, Rows]]:
    """The target's and the draft's logits at consecutive positions in the middle of each held-out
    document that is long enough, float32 [POSITIONS, V] each."""
    from models.corpus import collect

    target, draft = engine.decoder.target, engine.decoder.draft
    assert draft is not None
    wanted = CONTEXT + POSITIONS - 1
    encoded = (engine.tokenizer.encode(text) for text in collect().held_out)
    for ids in islice((ids for ids in encoded if len(ids) >= wanted), documents):
        begin = (len(ids) - wanted) // 2 + 1
        piece = [ids[0], *ids[begin : begin + wanted - 1]]  # as in training: a separator
        p, q = (np.stack([*text_logits(engine, model, piece)]) for model in (target, draft))
        yield p[CONTEXT - 1 :], q[CONTEXT - 1 :]
