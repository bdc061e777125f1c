"""The verification rules as functions: the residual distribution and the reported ratios.

test_kernel_exact.py shows for every sampler that they are exact; test_kernel_edges.py has the edge
cases.
"""

import numpy as np
import pytest
from samplers import BLOCK, TOKEN

from runtime.files.errors import OutriderError
from runtime.sampling.distribution import Distribution
from runtime.sampling.rules import verify
from runtime.sampling.warp import SamplingParams, warp


def dense(*weights):
    return Distribution.dense(np.array(weights, np.float32))


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


def test_sigmoid_as_published():
    """arXiv 2406.11016, eq. 5, by hand at a scale that makes it visible."""
    params = SamplingParams(temperature=1.0, verify="sigmoid", sigmoid_alpha=-1.0, sigmoid_beta=1.0)
    z_p, z_q = np.array([0.0, 3.0, 1.0], np.float32), np.array([2.0, 1.0, 1.0], np.float32)
    p, q = [warp(z_p, params)] * 2, [warp(z_q, params)]
    p_hat, q_hat = (1 / (1 + np.exp(-(z + 1.0) / 2.0)) for z in (z_p, z_q))
    ratio = p_hat[0] / q_hat[0]
    assert verify(p, q, [0], [ratio - 1e-6], 0.5, params).accepted == 1
    verdict = verify(p, q, [0], [ratio + 1e-6], 0.5, params)
    assert (verdict.accepted, verdict.token) == (0, 1)  # max(0, p^ - q^) is positive only at 1
    assert verdict.ratios == pytest.approx((ratio,), abs=1e-6)
    # p^ = q^: the residual is empty, so p is drawn from
    assert verify(q * 2, q, [0], [0.999], 0.0, params).accepted == 1
    filtered = SamplingParams(temperature=1.0, verify="sigmoid", top_k=2)
    assert warp(z_p, filtered).sigmoid[0] == 0
    with pytest.raises(OutriderError, match="draft"):
        verify(p, [Distribution.point(0, 3)], [0], [0.5], 0.5, params)
