"""The native kernel is exact: by enumeration at V = 8, and by statistics at real vocabularies.

Enumeration gives the uniforms to the library instead of Philox. The outcome is piecewise constant
in each of them; bisection finds the edges, for all drafts and outcomes at once, one slot each. The
truth is a float64 softmax, which shares nothing with the library.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from proof import ONE, chi_square
from test_kernel import BACKENDS, BLOCK, SIGMOID, TOKEN, open_backend

from runtime.sampling.kernel import RoundSampler, SlotSampling

V = 8
BISECTIONS = 36


# Emulated, these take minutes each, and test_kernel_cuda.py shows that the emulated kernels have
# the CPU library's bits: one enumeration of each rule is enough, and that in the slow run.
@pytest.fixture(params=[backend for backend in BACKENDS if backend != "emulated"])
def library(request):
    return open_backend(request.param)


emulated_too = pytest.mark.parametrize(
    "library",
    [pytest.param(b, marks=pytest.mark.slow) if b == "emulated" else b for b in BACKENDS],
    indirect=True,
)


def softmax(logits):
    weights = np.exp(np.float64(logits) - np.float64(logits).max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def bisect(accepted, count):
    """Length [count] of {u: accepted(u)}, for predicates that are true below some point."""
    low, high = np.zeros(count), np.ones(count)
    never, always = ~accepted(np.zeros(count)), accepted(np.full(count, ONE))
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        stands = accepted(middle)
        low, high = np.where(stands, middle, low), np.where(stands, high, middle)
    return np.where(never, 0.0, np.where(always, 1.0, low))


class Models:
    """Target and draft rows for every prefix over V tokens: float32 logits."""

    def __init__(self, seed, gamma, scale=1.5, dtype=np.float32):
        rng = np.random.default_rng([seed, gamma])
        self.gamma = gamma
        self.target = [
            scale * rng.normal(size=(V,) * (i + 1)).astype(dtype) for i in range(gamma + 1)
        ]
        self.draft = [scale * rng.normal(size=(V,) * (i + 1)).astype(dtype) for i in range(gamma)]
        for rows in (*self.target[:1], *self.draft[:1]):
            rows[..., rng.integers(1, V)] = -np.inf

    def joint(self):
        """The target's distribution over gamma + 1 tokens."""
        joint = np.ones(())
        for rows in self.target:
            joint = joint[..., None] * softmax(rows)
        return joint


def rounds(library, models, drafts, params):
    """A function of uniforms [N, gamma + 1]: (accepted, token) [N]; one slot a row of drafts."""
    count, gamma = len(drafts), models.gamma
    target = np.empty((count, gamma + 1, V), np.float32)
    draft = np.empty((count, gamma, V), np.float32)
    for i in range(gamma + 1):
        prefix = tuple(drafts[:, :i].T)
        target[:, i] = models.target[i][prefix]
        if i < gamma:
            draft[:, i] = models.draft[i][prefix]
    sampler = RoundSampler(V, gamma, count, library=library)
    sampler.begin([SlotSampling(params, gamma, 0, index=b) for b in range(count)])
    sampler.drafts[:] = drafts

    def run(u):
        got = sampler.verify(target, draft, np.ascontiguousarray(u))
        return np.array([(v.accepted, v.token) for v in got]).T

    return run


def output_joint(library, models, params):
    """Distribution of gamma + 1 tokens of a round that the target completes, and mean accepted."""
    gamma = models.gamma
    drafts = np.array(list(itertools.product(range(V), repeat=gamma)))
    q = np.ones(len(drafts))
    for i in range(gamma):
        q *= softmax(models.draft[i])[tuple(drafts[:, : i + 1].T)]
    drafts, q = drafts[q > 0], q[q > 0]
    run = rounds(library, models, drafts, params)
    others = ONE if params.verify == "block" else 0.0
    edges = np.empty((len(drafts), gamma))
    for i in range(gamma):

        def stands(u, i=i):
            uniforms = np.full((len(drafts), gamma + 1), others)
            uniforms[:, i], uniforms[:, gamma] = u, 0.0
            return run(uniforms)[0] > i

        edges[:, i] = bisect(stands, len(drafts))

    joint, mean = np.zeros((V,) * (gamma + 1)), 0.0
    for below in itertools.product((True, False), repeat=gamma):
        cell = np.prod(np.where(below, edges, 1 - edges), axis=1)
        uniforms = np.zeros((len(drafts), gamma + 1))
        uniforms[:, :gamma] = np.where(below, edges / 2, (edges + 1) / 2)
        accepted = run(uniforms)[0]
        mean += (q * cell * accepted).sum()
        previous = np.zeros(len(drafts))
        for token in range(V):  # the inverse CDF of the final draw is monotone in its uniform

            def at_most(u, token=token, uniforms=uniforms):
                uniforms[:, gamma] = u
                return run(uniforms)[1] <= token

            edge = bisect(at_most, len(drafts)) if token < V - 1 else np.ones(len(drafts))
            weight = q * cell * (edge - previous)
            previous = edge
            for n in range(gamma + 1):
                chosen = accepted == n
                head = (*drafts[chosen, :n].T, np.full(chosen.sum(), token))
                tail = completion(models, n + 1, head)
                np.add.at(joint, head, weight[chosen].reshape(-1, *[1] * (gamma - n)) * tail)
    assert joint.sum() == pytest.approx(1, abs=1e-6)
    return joint, mean


def completion(models, start, prefix):
    """The target's distribution of tokens start .. gamma after each of N prefixes."""
    rows = np.ones(len(prefix[0]))
    for i in range(start, models.gamma + 1):
        table = softmax(models.target[i])[prefix]  # [N, V, ...]: of all longer prefixes
        rows = rows[..., None] * table
    return rows


def distance(library, models, params):
    joint, mean = output_joint(library, models, params)
    return 0.5 * np.abs(joint - models.joint()).sum(), mean


@emulated_too
@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
@pytest.mark.parametrize("gamma", [1, 2])
def test_a_round_has_the_targets_joint_distribution(library, params, gamma):
    for seed in range(2):
        assert distance(library, Models(seed, gamma), params)[0] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_a_round_of_three_drafts_has_the_targets_joint_distribution(library, params):
    assert distance(library, Models(5, 3), params)[0] < 1e-6


def test_enumeration_notices_rules_that_are_not_exact(library):
    models = Models(0, 2)
    assert distance(library, models, replace(TOKEN, lenience=0.3))[0] > 0.02
    assert distance(library, models, SIGMOID)[0] > 0.05


def test_block_accepts_more_than_token(library):
    models = Models(0, 2)
    for rows, p in ((models.target, [1, 2]), (models.draft, [2, 1])):
        for table in rows:
            table[...] = -np.inf
            table[..., :2] = np.log(p)
    for params, mean in ((TOKEN, 10 / 9), (BLOCK, 11 / 9)):
        far, accepted = distance(library, models, params)
        assert accepted == pytest.approx(mean, abs=1e-6) and far < 1e-6


def test_the_drafts_own_draw_is_its_softmax(library):
    rows = Models(3, 1, scale=2.0).draft[0][None]
    sampler = RoundSampler(V, 1, 1, library=library)
    sampler.begin([SlotSampling(TOKEN, 1, 0)])
    edges = [
        bisect(lambda u, t=t: sampler.draw(rows, 0, u[:, None]).copy() <= t, 1)[0]
        for t in range(V - 1)
    ]
    np.testing.assert_allclose(np.diff([0, *edges, 1]), softmax(rows[0]), atol=3e-7)


# --- statistics, with Philox ------------------------------------------------------------------


def counts_by_position(library, target, draft, params, count, misreport=None):
    """float64 [gamma + 1, V] over the rounds that reach a position; by the block rule only the
    first, whose tokens alone are a fair sample. All slots read the same logits."""
    gamma, vocab_size = draft.shape
    sampler = RoundSampler(vocab_size, gamma, count, library=library, threads=2)
    sampler.begin([SlotSampling(replace(params, seed=b), gamma, 11 * b) for b in range(count)])
    for step in range(gamma):
        sampler.draw(draft[None, step], step, keep=False)
    if misreport is not None:
        sampler._drew = False
    got = sampler.verify(target[None], (draft if misreport is None else misreport)[None])
    counts = np.zeros((gamma + 1, vocab_size))
    for ids, verdict in zip(sampler.drafts.tolist(), got, strict=True):
        for i, token in enumerate([*ids[: verdict.accepted], verdict.token]):
            counts[i, token] += 1
    return counts[:1] if params.verify == "block" else counts


def rows(vocab_size, gamma, seed):
    """Peaked like a language model's, q near p."""
    rng = np.random.default_rng(seed)
    target = rng.normal(-np.log(np.arange(1, vocab_size + 1)), 0.5, (gamma + 1, vocab_size))
    target = rng.permuted(target, axis=1)
    draft = target[:gamma] + 0.8 * rng.normal(size=(gamma, vocab_size))
    return target.astype(np.float32), draft.astype(np.float32)


@pytest.mark.parametrize("gamma", [1, 3, 5])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_tokens_follow_the_target_at_every_position(library, rule, temperature, gamma):
    params = replace(TOKEN, temperature=temperature, verify=rule)
    target, draft = rows(4096, gamma, gamma)
    counts = counts_by_position(library, target, draft, params, 8_000)
    for i, counted in enumerate(counts):
        if counted.sum() >= 500:
            assert chi_square(counted, softmax(target[i] / temperature)) > 1e-3, f"position {i}"


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_large_vocabulary(library, temperature):
    params = replace(TOKEN, temperature=temperature)
    target, draft = rows(151_936, 1, 7)
    counts = counts_by_position(library, target, draft, params, 3_000)
    assert chi_square(counts[0], softmax(target[0] / temperature)) > 1e-3
    assert chi_square(counts[1], softmax(target[1] / temperature)) > 1e-3


@pytest.mark.parametrize("rule", ["token", "block"])
def test_statistics_notice_a_misreported_q(library, rule):
    target, draft = rows(4096, 3, 3)
    _, other = rows(4096, 3, 33)
    counts = counts_by_position(
        library, target, draft, replace(TOKEN, verify=rule), 3_000, misreport=other
    )
    assert chi_square(counts[0], softmax(target[0])) < 1e-6


@pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])
def test_a_reversed_draft_over_32768_tokens(library, params):
    """One text, round after round, with the counters that a decoding loop uses."""
    p = np.array([0.35, 0.25, 0.2, 0.1, 0.05, 0.03, 0.015, 0.005])
    target = np.tile(np.log(p).astype(np.float32), (1, 6, 1))
    draft = np.log(p[::-1]).astype(np.float32)[None]
    sampler, tokens = RoundSampler(8, 5, library=library), []
    while len(tokens) < 32_768:
        sampler.begin([SlotSampling(replace(params, seed=7), 5, len(tokens))])
        for step in range(5):
            sampler.draw(draft, step)
        verdict = sampler.verify(target)[0]
        tokens += [*sampler.drafts[0, : verdict.accepted].tolist(), verdict.token]
    tokens = np.array(tokens[:32_768])
    counts = np.bincount(tokens, minlength=8)
    assert 0.5 * np.abs(counts / counts.sum() - p).sum() < 0.02
    pairs = np.bincount(tokens[::2] * 8 + tokens[1::2], minlength=64).astype(float)
    assert chi_square(pairs, np.outer(p, p).ravel()) > 1e-3
