"""The verification rules: exactness by enumeration, by statistics, and case by case.

Enumeration integrates the real `verify` over its uniforms. Its outcome is piecewise constant in
each of them, so bisection on a uniform finds where the outcome changes, to 2^-36, and the length
of each piece is the weight of its outcome. No rule is written down a second time here.
"""

import itertools
import math

import numpy as np
import pytest
from proof import ONE, change_point, chi_square, pieces

from runtime.files.errors import OutriderError
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.rules import Verdict, residual, verify
from runtime.sampling.warp import Distribution, SamplingParams, warp

TOKEN = SamplingParams(temperature=1.0)
BLOCK = SamplingParams(temperature=1.0, verify="block")
SIGMOID = SamplingParams(temperature=1.0, verify="sigmoid")
GREEDY = SamplingParams()


# --- enumeration ------------------------------------------------------------------------------


class Model:
    """A distribution for every prefix, drawn from a seed."""

    def __init__(self, seed, vocab_size, params, scale=1.5):
        self.seed, self.vocab_size, self.params, self.scale = seed, vocab_size, params, scale
        self.rows = {}

    def row(self, prefix):
        if prefix not in self.rows:
            rng = np.random.default_rng([self.seed, len(prefix), *prefix])
            logits = (self.scale * rng.normal(size=self.vocab_size)).astype(np.float32)
            self.rows[prefix] = warp(logits, self.params)
        return self.rows[prefix]

    def rows_along(self, drafts, count):
        return [self.row(drafts[:i]) for i in range(count)]


class Same:
    """The same distribution after every prefix."""

    def __init__(self, probs):
        self.distribution = Distribution.dense(np.array(probs, dtype=np.float32))
        self.vocab_size = len(probs)

    def row(self, prefix):
        return self.distribution

    def rows_along(self, drafts, count):
        return [self.distribution] * count


def enumerate_round(target, draft, gamma, params, accept=None, reported=None):
    """Yields (weight, emitted tokens, accepted) of one whole round through the real `verify`.

    accept: replaces the accept uniforms (a control). reported: rows handed to `verify` as q in
    place of those that the draft tokens are drawn from (another control).
    """
    finals = {}
    for drafts in itertools.product(range(draft.vocab_size), repeat=gamma):
        q = draft.rows_along(drafts, gamma)
        weight = math.prod(row.prob(x) for row, x in zip(q, drafts, strict=True))
        if weight == 0:
            continue
        p = target.rows_along(drafts, gamma + 1)
        q = reported.rows_along(drafts, gamma) if reported else q

        def outcome(u, final_u, p=p, q=q, drafts=drafts):
            return verify(p, q, drafts, accept or u, final_u, params)

        others = ONE if params.verify == "block" else 0.0
        points = []
        for i in range(gamma):
            uniforms = [others] * gamma

            def stands(u, i=i, uniforms=uniforms, outcome=outcome):
                uniforms[i] = u
                return outcome(uniforms, 0.0).accepted > i

            points.append(change_point(stands))
        for below in itertools.product((True, False), repeat=gamma):
            cell = math.prod(t if b else 1 - t for t, b in zip(points, below, strict=True))
            if cell == 0:
                continue
            u = [t / 2 if b else (t + 1) / 2 for t, b in zip(points, below, strict=True)]
            n = outcome(u, 0.0).accepted
            key = drafts[:n], n
            if key not in finals:
                finals[key] = pieces(lambda f, u=u, outcome=outcome: outcome(u, f).token)
            for token, length in finals[key].items():
                yield weight * cell * length, (*drafts[:n], token), n


def joint_distance(target, draft, gamma, params, **control):
    """Total variation between the target's joint over gamma + 1 tokens and that of a round
    followed by the target; and the mean number of accepted tokens."""
    shape = (target.vocab_size,) * (gamma + 1)
    joint, mean = np.zeros(shape), 0.0
    completions = {}

    def completion(prefix):
        if prefix not in completions:
            rest = np.ones(())
            if len(prefix) <= gamma:
                probs = target.row(prefix).probs()
                rest = np.stack([probs[x] * completion((*prefix, x)) for x in range(len(probs))])
            completions[prefix] = rest
        return completions[prefix]

    for weight, tokens, n in enumerate_round(target, draft, gamma, params, **control):
        joint[tokens] += weight * completion(tokens)
        mean += weight * n
    assert joint.sum() == pytest.approx(1, abs=1e-6)
    return 0.5 * np.abs(joint - completion(())).sum(), mean


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize(("vocab_size", "gamma"), [(8, 1), (8, 2), (8, 3)])
def test_a_round_has_the_targets_joint_distribution(params, vocab_size, gamma):
    target, draft = Model(1, vocab_size, params), Model(2, vocab_size, params)
    distance, _ = joint_distance(target, draft, gamma, params)
    assert distance < 1e-6


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_a_round_of_three_drafts_over_eight_tokens_is_exact(params):
    # top-k makes rows with zeros, on different tokens in target and draft
    filtered = SamplingParams(temperature=0.8, top_k=5)
    distance, _ = joint_distance(Model(3, 8, filtered), Model(4, 8, filtered), 3, params)
    assert distance < 1e-6


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_enumeration_notices_a_rule_that_always_accepts(params):
    target, draft = Model(1, 8, params), Model(2, 8, params)
    distance, mean = joint_distance(target, draft, 2, params, accept=[0.0, 0.0])
    assert mean == pytest.approx(2) and distance > 0.05


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_enumeration_notices_a_q_that_was_not_drawn_from(params):
    target, draft = Model(1, 8, params), Model(2, 8, params)
    distance, _ = joint_distance(target, draft, 2, params, reported=Model(5, 8, params))
    assert distance > 0.05


@pytest.mark.parametrize(("params", "mean"), [(TOKEN, 10 / 9), (BLOCK, 11 / 9)])
def test_block_accepts_more_than_token(params, mean):
    distance, accepted = joint_distance(Same([1 / 3, 2 / 3]), Same([2 / 3, 1 / 3]), 2, params)
    assert accepted == pytest.approx(mean, abs=1e-6)
    assert distance < 1e-6


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_a_narrower_or_wider_draft_vocabulary_is_exact(params):
    narrow, wide = Same([0.5, 0.2, 0.3]), Same([0.1, 0.3, 0.2, 0.25, 0.15])
    for target, draft in ((narrow, wide), (wide, narrow)):
        distance, _ = joint_distance(target, draft, 2, params)
        assert distance < 1e-6


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_a_draft_without_a_distribution_is_exact(params):
    class Lookup(Same):
        def __init__(self):
            self.distribution, self.vocab_size = Distribution.point(2, 4), 4

    distance, mean = joint_distance(Same([0.1, 0.2, 0.4, 0.3]), Lookup(), 2, params)
    assert distance < 1e-6
    assert mean == pytest.approx(0.4 + 0.16, abs=1e-6)


# --- lenience, sigmoid: not exact, by how much ------------------------------------------------


def marginal(target, draft, params):
    """Output distribution of the first token at gamma = 1, and the acceptance rate."""
    out, accepted = np.zeros(target.vocab_size), 0.0
    for weight, tokens, n in enumerate_round(target, draft, 1, params):
        out[tokens[0]] += weight
        accepted += weight * n
    return out, accepted


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.3, 0.1])
def test_lenience_keeps_its_guarantee(lenience):
    params = SamplingParams(temperature=1.0, lenience=lenience)
    target, draft = Model(1, 8, params, 2.0), Model(2, 8, params, 2.0)
    p, q = target.row(()).probs(), draft.row(()).probs()
    out, accepted = marginal(target, draft, params)
    assert accepted == pytest.approx(np.minimum(p / lenience, q).sum(), abs=1e-6)  # A.5
    assert out.sum() == pytest.approx(1, abs=1e-6)
    assert (out <= p / lenience + 1e-6).all()
    # Tokens that the draft proposes too rarely never exceed p, so the distance is the smallest
    # that this acceptance leaves possible.
    assert (out[p > q] <= p[p > q] + 1e-6).all()
    least = np.maximum(np.minimum(q, p / lenience) - p, 0).sum()
    assert 0.5 * np.abs(out - p).sum() == pytest.approx(least, abs=1e-6)
    if lenience < 1:  # control: it does leave the target's distribution
        assert least > 0.02 and (out > p + 0.01).any()


def test_lenience_at_temperature_0_accepts_near_the_maximum():
    params = SamplingParams(lenience=0.5)
    logits = np.array([0.0, 2.0, 2.0 - math.log(2) + 1e-3, 2.0 - math.log(2) - 1e-3], np.float32)
    p = [warp(logits, params)] * 2
    for draft, accepted in ((0, 0), (1, 1), (2, 1), (3, 0), (9, 0)):
        verdict = verify(p, [Distribution.point(draft, 12)], [draft], [ONE], 0.5, params)
        assert verdict == Verdict(accepted, 1, (float(accepted),))
    # On the logits after penalty and suppression; and without lenience only the argmax.
    suppressed = [warp(logits, params, suppress=[2])] * 2
    assert verify(suppressed, [Distribution.point(2, 4)], [2], [0.0], 0.5, params).accepted == 0
    strict = [warp(logits, GREEDY)] * 2
    assert verify(strict, [Distribution.point(2, 4)], [2], [0.0], 0.5, GREEDY).accepted == 0


def test_sigmoid_is_close_to_the_draft_and_not_exact():
    target, draft = Model(1, 8, SIGMOID, 3.0), Model(2, 8, SIGMOID, 3.0)
    p, q = target.row(()).probs(), draft.row(()).probs()
    out, accepted = marginal(target, draft, SIGMOID)
    assert out.sum() == pytest.approx(1, abs=1e-6)
    assert accepted > 0.995
    assert 0.5 * np.abs(out - p).sum() > 0.2
    assert 0.5 * np.abs(out - q).sum() < 0.005
    exact, _ = marginal(target, draft, TOKEN)  # control, on the same rows
    assert 0.5 * np.abs(exact - p).sum() < 1e-6


def test_sigmoid_as_published():
    """arXiv 2406.11016, eq. 5, by hand at a scale that makes it visible."""
    params = SamplingParams(temperature=1.0, verify="sigmoid", sigmoid_alpha=-1.0, sigmoid_beta=1.0)
    z_p, z_q = np.array([0.0, 3.0, 1.0], np.float32), np.array([2.0, 1.0, 1.0], np.float32)
    p, q = [warp(z_p, params)] * 2, [warp(z_q, params)]
    p_hat, q_hat = (1 / (1 + np.exp(-(z + 1.0) / 2.0)) for z in (z_p, z_q))
    ratio = p_hat[0] / q_hat[0]
    assert verify(p, q, [0], [ratio - 1e-6], 0.5, params).accepted == 1
    verdict = verify(p, q, [0], [ratio + 1e-6], 0.5, params)
    assert (verdict.accepted, verdict.token) == (0, 1)  # max(0, p^ - q^) is positive at 1 alone
    assert verdict.ratios == pytest.approx((ratio,), abs=1e-6)
    # p^ = q^: nothing left to draw from but p
    assert verify(q * 2, q, [0], [0.999], 0.0, params).accepted == 1
    filtered = SamplingParams(temperature=1.0, verify="sigmoid", top_k=2)
    assert warp(z_p, filtered).sigmoid[0] == 0
    with pytest.raises(OutriderError, match="draft"):
        verify(p, [Distribution.point(0, 3)], [0], [0.5], 0.5, params)


# --- statistics -------------------------------------------------------------------------------


def rows(vocab_size, gamma, params, seed):
    """gamma + 1 rows p and gamma rows q: peaked like a language model's, q near p."""
    rng = np.random.default_rng(seed)
    target = rng.normal(-np.log(np.arange(1, vocab_size + 1)), 0.5, (gamma + 1, vocab_size))
    target = rng.permuted(target, axis=1)
    draft = target[:gamma] + 0.8 * rng.normal(size=(gamma, vocab_size))
    return (
        [warp(z, params) for z in target.astype(np.float32)],
        [warp(z, params) for z in draft.astype(np.float32)],
    )


def counts_by_position(p, q, params, rounds, seed, reported=None, always=False, complete=False):
    """float64 [gamma + 1, V]: tokens at each position, over the rounds that reach it.

    complete: a round that stops early is continued by the target, so that all rounds count.
    """
    gamma = len(q)
    counts = np.zeros((gamma + 1, p[0].vocab_size))
    u = np.random.default_rng(seed).random((rounds, 3 * gamma + 2)).tolist()
    for draft_u, accept_u, rest_u in ((r[:gamma], r[gamma : 2 * gamma], r[2 * gamma :]) for r in u):
        drafts = [row.draw(f) for row, f in zip(q, draft_u, strict=True)]
        accept_u = [0.0] * gamma if always else accept_u
        verdict = verify(p, reported or q, drafts, accept_u, rest_u[-1], params)
        tokens = [*drafts[: verdict.accepted], verdict.token]
        if complete:
            tokens += [p[i].draw(rest_u[i]) for i in range(len(tokens), gamma + 1)]
        for i, token in enumerate(tokens):
            counts[i, token] += 1
    return counts


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_tokens_follow_the_target_at_every_position(rule, temperature, gamma):
    params = SamplingParams(temperature=temperature, verify=rule)
    p, q = rows(4096, gamma, params, seed=gamma)
    # The block rule decides on the whole block, so what reaches a position is not a fair sample
    # of it; the completed sequence is.
    counts = counts_by_position(p, q, params, 8_000, seed=100 + gamma, complete=rule == "block")
    for i, row in enumerate(p):
        if counts[i].sum() >= 500:
            assert chi_square(counts[i], row.probs()) > 1e-3, f"position {i}"
    assert counts[1].sum() >= 500


@pytest.mark.parametrize("rule", ["token", "block"])
def test_statistics_notice_broken_rules(rule):
    params = SamplingParams(temperature=1.0, verify=rule)
    p, q = rows(4096, 3, params, seed=3)
    _, other = rows(4096, 3, params, seed=33)
    complete = rule == "block"
    always = counts_by_position(p, q, params, 3_000, 103, always=True, complete=complete)
    assert chi_square(always[0], p[0].probs()) < 1e-6
    wrong = counts_by_position(p, q, params, 3_000, 103, reported=other, complete=complete)
    assert chi_square(wrong[0], p[0].probs()) < 1e-6


def test_a_large_vocabulary():
    params = SamplingParams(temperature=0.6)
    p, q = rows(151_936, 1, params, seed=7)
    counts = counts_by_position(p, q, params, 4_000, seed=8)
    assert chi_square(counts[0], p[0].probs()) > 1e-3
    assert chi_square(counts[1], p[1].probs()) > 1e-3
    always = counts_by_position(p, q, params, 4_000, seed=8, always=True)
    assert chi_square(always[0], p[0].probs()) < 1e-6


def generate(p, q, gamma, params, count, lane_of=lambda start: 0, seed=7):
    """Tokens of many rounds, with uniforms from the counter as a decoding loop takes them."""
    tokens = []
    while len(tokens) < count:
        start = len(tokens)
        places = [(seed, start + i) for i in range(gamma)]
        lane = lane_of(start)
        drafts = [q.draw(uniform(*at, Purpose.DRAFT, lane)) for at in places]
        accept_u = [uniform(*at, Purpose.ACCEPT, lane) for at in places]
        # The final draw may fall on any position; the round's start names it uniquely.
        final_u = uniform(seed, start, Purpose.RESIDUAL, lane)
        verdict = verify([p] * (gamma + 1), [q] * gamma, drafts, accept_u, final_u, params)
        tokens += [*drafts[: verdict.accepted], verdict.token]
    return np.array(tokens[:count])


@pytest.mark.parametrize(("params", "lane_of"), [(TOKEN, lambda s: 0), (BLOCK, lambda s: s)])
def test_a_reversed_draft_over_32768_tokens(params, lane_of):
    probs = np.array([0.35, 0.25, 0.2, 0.1, 0.05, 0.03, 0.015, 0.005], np.float32)
    p, q = Distribution.dense(probs), Distribution.dense(probs[::-1].copy())
    tokens = generate(p, q, 5, params, 32_768, lane_of)
    counts = np.bincount(tokens, minlength=8)
    assert 0.5 * np.abs(counts / counts.sum() - p.probs()).sum() < 0.02
    pairs = np.bincount(tokens[::2] * 8 + tokens[1::2], minlength=64).astype(float)
    assert chi_square(pairs, np.outer(p.probs(), p.probs()).ravel()) > 1e-3


def test_the_block_rule_needs_a_lane_per_round():
    """It looks at later positions to decide on earlier ones: their uniforms are spent."""
    p, q = (Distribution.dense(np.array(w, np.float32)) for w in ([1, 2], [2, 1]))

    def p_value(lane_of):
        tokens = generate(p, q, 2, BLOCK, 30_000, lane_of)
        words = tokens[:-3] * 8 + tokens[1:-2] * 4 + tokens[2:-1] * 2 + tokens[3:]
        third = np.array([1 / 3, 2 / 3])
        probs = np.einsum("i,j,k,l->ijkl", *[third] * 4).ravel()
        return chi_square(np.bincount(words[::4], minlength=16).astype(float), probs)

    assert p_value(lambda start: start) > 1e-3
    assert p_value(lambda start: 0) < 1e-6


# --- case by case -----------------------------------------------------------------------------


def dense(*weights):
    return Distribution.dense(np.array(weights, np.float32))


class Rows:
    """A lazy sequence of rows that notes which of them are used."""

    def __init__(self, *distributions):
        self.distributions, self.touched = distributions, []

    def __len__(self):
        return len(self.distributions)

    def __getitem__(self, i):
        self.touched.append(i)
        return self.distributions[i]


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_gamma_0_is_plain_sampling(params):
    p = dense(0.25, 0.25, 0.5)
    for u, token in ((0.0, 0), (0.24, 0), (0.26, 1), (0.6, 2), (ONE, 2)):
        assert verify([p], [], [], [], u, params) == Verdict(0, token, ())


@pytest.mark.parametrize("params", [TOKEN, SIGMOID], ids=["token", "sigmoid"])
def test_rows_after_the_first_rejection_are_not_touched(params):
    z = np.array([0.0, 0.0, -np.inf], np.float32)
    p = Rows(*[warp(z, params)] * 4)
    q = [warp(z[::-1].copy(), params)] * 3
    verdict = verify(p, q, [1, 2, 1], [0.0] * 3, 0.5, params)
    assert verdict.accepted == 1 and len(verdict.ratios) == 2
    assert set(p.touched) == {0, 1}


@pytest.mark.parametrize("params", [TOKEN, BLOCK, SIGMOID], ids=["token", "block", "sigmoid"])
def test_zero_target_probability_is_rejected_at_u_0(params):
    p = warp(np.array([-np.inf, 0.0, 0.0], np.float32), params)
    q = warp(np.zeros(3, np.float32), params)
    verdict = verify([p, p], [q], [0], [0.0], 0.0, params)
    assert verdict.accepted == 0 and verdict.ratios == (0.0,) and verdict.token != 0
    assert verify([p, p], [q], [1], [0.0], 0.0, params).accepted == 1  # control


@pytest.mark.parametrize("params", [TOKEN, BLOCK, SIGMOID], ids=["token", "block", "sigmoid"])
def test_zero_draft_probability_is_rejected_at_u_0(params):
    q = warp(np.array([-np.inf, 0.0, 0.0], np.float32), params)
    p = warp(np.zeros(3, np.float32), params)
    verdict = verify([p, p], [q], [0], [0.0], 0.5, params)
    assert verdict.accepted == 0 and verdict.ratios == (0.0,)


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_the_test_is_strict(params):
    p, q = dense(0.25, 0.75), dense(0.5, 0.5)
    assert verify([p, p], [q], [0], [0.5], 0.0, params).accepted == 0
    below = math.nextafter(0.5, 0.0)
    assert verify([p, p], [q], [0], [below], 0.0, params).accepted == 1
    assert verify([p, p], [q], [0], [0.5], 0.0, params).token == 1


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_equal_rows_are_always_accepted(params):
    row = warp(np.random.default_rng(0).normal(size=3000).astype(np.float32), params)
    drafts = [row.draw(u) for u in (0.0, 0.3, ONE)]
    assert verify([row] * 4, [row] * 3, drafts, [ONE] * 3, 0.5, params).accepted == 3


def test_a_residual_of_nothing_is_the_target():
    rows_ = [
        dense(0.1, 0.2, 0.7),
        dense(0.0, 1.0, 0.0),
        Distribution.point(1, 3),
        warp(np.array([-np.inf, 5.0, -np.inf], np.float32), TOKEN),
    ]
    for row in rows_:
        rest, mass = residual(row, row)
        assert rest is row and mass == 0
        assert np.isfinite(rest.probs()).all()
    # the same mass on the same token, held in two ways
    assert residual(rows_[1], rows_[2]) == (rows_[1], 0.0)
    assert residual(rows_[2], rows_[1]) == (rows_[2], 0.0)
    # one weight of 1 and one of 4: equal after normalisation
    assert residual(dense(1, 2, 1), dense(4, 8, 4))[1] == 0


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("width", [100, 2500, 3000])
def test_residual_is_the_positive_part(scale, width):
    rng = np.random.default_rng(width)
    p, q = (warp(2 * rng.normal(size=n).astype(np.float32), TOKEN) for n in (2500, width))
    want = np.zeros(3000)
    want[:2500] += scale * p.probs()
    want[:width] -= q.probs()
    want = np.maximum(want, 0)[:2500]
    rest, mass = residual(p, q, scale)
    assert mass == pytest.approx(want.sum(), abs=1e-6)
    np.testing.assert_allclose(rest.probs() * mass, want, atol=1e-8)
    kept = p.probs().copy()
    kept[17] = 0
    rest, mass = residual(p, Distribution.point(17, width), scale)
    assert mass == pytest.approx(scale * kept.sum(), abs=1e-6)
    np.testing.assert_allclose(rest.probs(), kept / kept.sum(), atol=1e-8)
    assert residual(Distribution.point(17, 2500), q, scale)[1] == pytest.approx(
        max(0.0, scale - q.prob(17))
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_temperature_0_accepts_the_argmax_alone(rule):
    params = SamplingParams(verify=rule)
    logits = np.array([[0, 5, 5, 1], [9, 1, 9, 0], [0, 0, 1, 1]], np.float32)
    p = [warp(z, params) for z in logits]  # argmax 1, 0, 2: the lowest of the ties
    for drafts, accepted, token in (([1, 0], 2, 2), ([1, 2], 1, 0), ([2, 0], 0, 1)):
        q = [Distribution.point(x, 4) for x in drafts]
        for u in (0.0, ONE):
            verdict = verify(p, q, drafts, [u, u], u, params)
            assert (verdict.accepted, verdict.token) == (accepted, token)


def test_padding_of_a_wider_draft_is_rejected():
    p, q = dense(0.5, 0.5), dense(0.2, 0.2, 0.6)
    for params in (TOKEN, BLOCK):
        verdict = verify([p, p], [q], [2], [0.0], ONE, params)
        assert verdict == Verdict(0, 1, (0.0,))


def test_lengths_must_agree():
    p, q = dense(0.5, 0.5), dense(0.5, 0.5)
    for args in (([p], [q], [0], [0.5]), ([p, p], [], [0], [0.5]), ([p, p], [q], [0], [])):
        with pytest.raises(ValueError, match="gamma=1 needs"):
            verify(*args, 0.5, TOKEN)


def test_ratios_are_those_of_the_examined_positions():
    p, q = [dense(0.2, 0.8)] * 3, [dense(0.5, 0.5)] * 2
    assert verify(p, q, [1, 0], [0.9, 0.9], 0.5, TOKEN).ratios == pytest.approx((1.0, 0.4))
    assert verify(p, q, [0, 1], [0.9, 0.9], 0.5, TOKEN).ratios == pytest.approx((0.4,))
    assert verify(p, q, [0, 1], [0.9, 0.9], 0.5, BLOCK).ratios == pytest.approx((0.4, 1.0))
    lenient = SamplingParams(temperature=1.0, lenience=0.5)
    assert verify(p, q, [0, 1], [0.7, 0.9], 0.5, lenient).ratios == pytest.approx((0.8, 1.0))
