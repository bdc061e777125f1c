"""The verification rules: which draft tokens are accepted, and the token that follows them.

Pure functions of warped distributions, draft tokens and uniforms. They know nothing of caches,
engines, tokenizers or where the uniforms come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..files.errors import OutriderError
from .distribution import Distribution
from .warp import SamplingParams

Rows = Sequence[Distribution]
Uniforms = Sequence[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one round for one slot.

    accepted: n, the number of accepted draft tokens, 0..gamma.
    token: the token after them: the correction, or if n = gamma the bonus token.
    ratios: min(1, p/q) of each examined position (p / (l q) with lenience, p^/q^ by sigmoid). The
        token and sigmoid rules examine up to the first rejection, the block rule all positions.
    """

    accepted: int
    token: int
    ratios: tuple[float, ...]


def verify(
    p: Rows,
    q: Rows,
    drafts: Sequence[int],
    accept_u: Uniforms,
    final_u: float,
    params: SamplingParams,
) -> Verdict:
    """Accept, correct or extend, by the rule `params.verify`.

    p: gamma + 1 target rows, may be lazy: the token and sigmoid rules index no row beyond the
    first rejection. q: gamma rows, each the distribution that its draft token was drawn from;
    may be narrower or wider than p. drafts: gamma ids. accept_u: gamma uniforms in [0, 1);
    final_u: one more. gamma = 0 is plain sampling from p[0]. Point masses ignore the uniforms.
    Raises ValueError if the lengths do not match.
    """
    gamma = len(drafts)
    if not len(q) == len(accept_u) == gamma == len(p) - 1:
        raise ValueError(
            f"gamma={gamma} needs {gamma + 1} rows p, {gamma} rows q and uniforms; "
            f"got {len(p)}, {len(q)}, {len(accept_u)}"
        )
    if params.verify == "block":
        return verify_block(p, q, drafts, accept_u, final_u)
    if params.verify == "sigmoid":
        return verify_sigmoid(p, q, drafts, accept_u, final_u)
    return verify_token(p, q, drafts, accept_u, final_u, params.lenience)


def verify_token(
    p: Rows, q: Rows, drafts: Sequence[int], accept_u: Uniforms, final_u: float, lenience: float
) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, Algorithm 1; lenience: appendix A.5).

    Accepts if u q < p, strictly, so that p = 0 is rejected at u = 0 too. With lenience l it accepts
    if u l q < p, while the residual stays norm(max(0, p - q)): the accepted mass min(q, p/l) plus
    (1 - alpha_l) / (1 - alpha_1) <= 1 times max(0, p - q) is at most p/l for every token, and at
    most p where p > q.
    """
    ratios: list[float] = []
    for i, token in enumerate(drafts):
        q_x = q[i].prob(token)
        p_x = _lenient_prob(p[i], token, q_x, lenience)
        ratios.append(min(1.0, p_x / (lenience * q_x)) if q_x > 0 else 0.0)
        if not (q_x > 0 and accept_u[i] * lenience * q_x < p_x):
            correction, _ = residual(p[i], q[i])
            return Verdict(i, correction.draw(final_u), tuple(ratios))
    return Verdict(len(drafts), p[len(drafts)].draw(final_u), tuple(ratios))


def _lenient_prob(p: Distribution, token: int, q_x: float, lenience: float) -> float:
    if lenience == 1 or p.processed is None:
        return p.prob(token)
    # Temperature 0: accept when p(x) >= l max p, in the logits before they became a point mass.
    return q_x if p.margin(token) >= math.log(lenience) else 0.0


def verify_block(
    p: Rows, q: Rows, drafts: Sequence[int], accept_u: Uniforms, final_u: float
) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, Algorithm 2): exact, never worse.

    P_0 = 1, P_i = min(P_{i-1} p_i(x_i) / q_i(x_i), 1); Z_i = sum max(P_i p_{i+1} - q_{i+1}, 0);
    h_i = Z_i / (Z_i + 1 - P_i), h_gamma = P_gamma; tau = the last i with u_i < h_i.
    The decision uses uniforms beyond tau: later rounds must not use them again.
    """
    gamma = len(drafts)
    prefix = [1.0]  # P_i
    ratios: list[float] = []
    for i, token in enumerate(drafts):
        p_x, q_x = p[i].prob(token), q[i].prob(token)
        ratio = p_x / q_x if q_x > 0 else 0.0
        prefix.append(min(prefix[i] * ratio, 1.0))
        ratios.append(min(ratio, 1.0))

    # Searching backwards, the first acceptance found is the last one: earlier Z are not needed.
    if gamma == 0 or accept_u[gamma - 1] < prefix[gamma]:
        return Verdict(gamma, p[gamma].draw(final_u), tuple(ratios))
    for tau in range(gamma - 1, -1, -1):
        scale = prefix[tau]
        if scale < 1 and accept_u[tau - 1] >= scale:
            continue  # Z <= P, so h <= P: the test fails whatever the residual is
        correction, mass = residual(p[tau], q[tau], scale)
        # At P = 1, h = 1 (where Z = 0 too: p = q, and the residual is p); so tau = 0 is the end.
        if scale == 1 or accept_u[tau - 1] < mass / (mass + 1 - scale):
            break
    return Verdict(tau, correction.draw(final_u), tuple(ratios))


def verify_sigmoid(
    p: Rows, q: Rows, drafts: Sequence[int], accept_u: Uniforms, final_u: float
) -> Verdict:
    """The sigmoid rule of "Optimized Speculative Sampling for GPU Hardware Accelerators" (arXiv
    2406.11016, eq. 5), as published. It is *not* exact: at the published scale of 1e3 logits
    p^ and q^ sit near 0.62, nearly every draft token is accepted, and the output is close to the
    draft's; a rejected one is redrawn from max(0, p^ - q^). The bonus token is drawn from p.
    Raises OutriderError("option") for a draft that has no logits.
    """
    ratios: list[float] = []
    for i, token in enumerate(drafts):
        p_hat, q_hat = p[i].sigmoid, q[i].sigmoid
        if p_hat is None or q_hat is None:
            raise no_draft_logits_error()
        p_x = p_hat.item(token) if token < len(p_hat) else 0.0
        q_x = q_hat.item(token)
        ratios.append(min(1.0, p_x / q_x) if q_x > 0 else 0.0)
        if not (q_x > 0 and accept_u[i] * q_x < p_x):
            correction = _positive_part(p_hat, 1.0, q_hat)
            chosen = correction if correction.total > 0 else p[i]
            return Verdict(i, chosen.draw(final_u), tuple(ratios))
    return Verdict(len(drafts), p[len(drafts)].draw(final_u), tuple(ratios))


def no_draft_logits_error() -> OutriderError:
    cause = "verify=sigmoid needs the draft's logits, and this draft has none"
    return OutriderError("option", cause, "Use verify=token, or a draft model.")


def residual(p: Distribution, q: Distribution, scale: float = 1.0) -> tuple[Distribution, float]:
    """norm(max(0, scale p - q)) and its mass before normalisation; p itself if the mass is 0.

    scale: 1 for the token rule, P_i in (0, 1] for the block rule. Elementwise in float32, summed
    in float64.
    """
    if p.weights is None:
        assert p.point_mass is not None
        return p, max(0.0, scale - q.prob(p.point_mass))
    if q.weights is None:
        assert q.point_mass is not None
        weights = p.weights.copy()
        if 0 <= q.point_mass < p.vocab_size:
            weights[q.point_mass] = 0  # scale p(x) <= 1 = q(x)
        rest, unit = Distribution.dense(weights), p.total / scale
    else:
        # In units of q's weights; if p and q are the same row the factor is exactly 1.
        factor = scale * (q.total / p.total)
        rest, unit = _positive_part(p.weights, factor, q.weights), q.total
    return (rest, rest.total / unit) if rest.total > 0 else (p, 0.0)


def _positive_part(a: np.ndarray, factor: float, b: np.ndarray) -> Distribution:
    """max(0, factor a - b) over a's tokens; b counts as 0 beyond its end."""
    weights = a * np.float32(factor)
    common = min(len(a), len(b))
    weights[:common] -= b[:common]
    np.maximum(weights, 0, out=weights)
    return Distribution.dense(weights)
