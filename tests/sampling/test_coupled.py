"""Gumbel coupling: the noise is exponential, a draw is exact, and target and draft agree as often
as the formula predicts."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from samplers import cpu_library, emulated_library, open_sampler
from scipy import stats

from runtime.sampling.coupled import _words, noise, select_by_noise
from runtime.sampling.philox import Purpose, philox4x32
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams, warp

MIN_P_VALUE = 1e-3


@pytest.fixture(scope="module")
def drawn():
    """Noise of 700 positions over one and a partial tile: [700, 1100]."""
    return np.array([noise(7, position, 1100) for position in range(700)])


def test_many_counters_at_once_are_those_of_philox():
    words = _words(2**63 + 5, 9, np.arange(3)[:, None], 0, 4)
    for i, j in np.ndindex(3, 4):
        assert tuple(words[i, j]) == philox4x32(2**63 + 5, (9, Purpose.COUPLED, i, j))


def test_the_noise_is_exponential(drawn):
    for token in (0, 31, 32, 1023, 1024, 1099):
        assert stats.kstest(drawn[:, token], "expon").pvalue > MIN_P_VALUE
    assert stats.kstest(drawn[::50].ravel(), "expon").pvalue > MIN_P_VALUE
    # Control: a small shift.
    assert stats.kstest(drawn[:, 0] + 0.15, "expon").pvalue < 1e-9


@pytest.mark.parametrize("other", [1, 31, 33, 500, 1024])
def test_numbers_of_a_group_a_tile_and_a_row_are_independent(drawn, other):
    """If a pair is independent, its sum is gamma(2) and twice its minimum is exponential."""
    a, b = drawn[:, 0], drawn[:, other]
    assert stats.kstest(a + b, "gamma", args=(2,)).pvalue > MIN_P_VALUE
    assert stats.kstest(2 * np.minimum(a, b), "expon").pvalue > MIN_P_VALUE


def test_a_tiles_least_number_is_anywhere(drawn):
    counts = np.bincount(drawn[:, :1024].argmin(axis=1) // 32, minlength=32)
    assert stats.chisquare(counts).pvalue > MIN_P_VALUE


@cache
def opened(vocab_size, gamma):
    """A cached sampler, shared by thousands of rounds."""
    return open_sampler(cpu_library(), vocab_size, gamma)


def tokens_of(target, draft, params, position):
    """(drafts, verdict) of a round in slot 0. target: [gamma + 1, V]."""
    gamma, vocab_size = draft.shape
    sampler = opened(vocab_size, gamma)
    sampler.begin([SlotSampling(params, gamma, position)])
    drafts = [int(sampler.draw(draft[None, i], i)[0]) for i in range(gamma)]
    return drafts, sampler.verify(target[None], draft[None] if gamma else None)[0]


def test_a_draw_is_exact():
    """In plain decoding (gamma 0)."""
    rng = np.random.default_rng(3)
    logits = (3 * np.log(rng.exponential(size=(1, 40)))).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=11, verify="coupled")
    nothing = np.empty((0, 40), np.float32)
    counts = np.zeros(40)
    for position in range(10_000):
        counts[tokens_of(logits, nothing, params, position)[1].token] += 1
    expected = warp(logits[0], params).probs() * counts.sum()
    large = expected > 5
    fold = lambda x: [*x[large], x[~large].sum() + 1e-9]  # noqa: E731
    assert stats.chisquare(fold(counts), fold(expected)).pvalue > MIN_P_VALUE
    flatter = fold(expected**0.9 / (expected**0.9).sum() * counts.sum())
    assert stats.chisquare(fold(counts), flatter).pvalue < 1e-9  # the control


@pytest.mark.parametrize("distance", [0.2, 1.0])
def test_acceptance_is_that_of_the_formula(distance):
    """sum_x 1 / sum_y max(p_y / p_x, q_y / q_x), arXiv 2408.07978."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=30)
    logits = np.stack([logits, logits + distance * rng.normal(size=30)]).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=2, verify="coupled")
    p, q = (warp(row, params).probs() for row in logits)
    formula = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(30))
    tv = np.abs(p - q).sum() / 2
    assert (1 - tv) / (1 + tv) <= formula <= 1 - tv

    n = 5000
    target, draft = logits[[0, 0]], logits[[1]]
    rounds = [tokens_of(target, draft, params, 2 * i) for i in range(n)]
    acceptance = sum(verdict.accepted for _, verdict in rounds) / n
    assert abs(acceptance - formula) < 4 * math.sqrt(formula * (1 - formula) / n)
    # Control: with independent noise the draft would agree only by chance.
    independent = np.mean([a[0][0] == b[1].token for a, b in itertools.pairwise(rounds)])
    assert independent < formula - 0.2


@pytest.mark.parametrize("library", [cpu_library, emulated_library], ids=["cpu", "emulated"])
def test_the_drafts_decide_nothing(library):
    """Whatever drafts come before, the first wrong draft is replaced by the target's own token."""
    params = SamplingParams(temperature=1.0, seed=5, verify="coupled", top_p=0.95)
    target = np.random.default_rng(9).normal(0, 2, (5, 700)).astype(np.float32)
    rows = [warp(row, params) for row in target]
    own = [select_by_noise(row, 5, 50 + i).point_mass for i, row in enumerate(rows)]
    for wrong in range(5):
        drafts = [token if i != wrong else 699 - token for i, token in enumerate(own[:4])]
        sampler = open_sampler(library(), 700, 4)
        sampler.begin([SlotSampling(params, 4, 50)])
        sampler.set_drafts([drafts])
        (verdict,) = sampler.verify(target[None])
        assert (verdict.accepted, verdict.token) == (wrong, own[wrong])
        assert verdict.ratios == (1.0,) * wrong + (0.0,) * (wrong < 4)
