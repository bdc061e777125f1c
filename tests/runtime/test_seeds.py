"""Under the block rule, each of many rounds draws new random numbers (test_exact.py has a few
rounds of the standard rule). Log-probabilities are the target's before any warping. Each test has a
control that must fail.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import near, random_model
from rounds import all_samplers, broken, cases, finish, ids, make_decoder, run
from scipy import stats
from scipy.special import log_softmax

from runtime.decoder import Decoder
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.warp import SamplingParams
from runtime.sequence import ActiveSequence, Request, Token

pytestmark = pytest.mark.usefixtures("sampler")

# --- the numbers ------------------------------------------------------------------------------

# A device draws bitwise the same tokens as the kernel on the host: test_device_rounds.py.
SAMPLERS = ("numpy", "kernel", "device")


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of Pearson's test; bins with an expectation under 5 are merged into one."""
    expected = probs * counts.sum()
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
        if expected[-1] < 5:  # the merged bin is still small: add it to the smallest other
            smallest = expected[:-1].argmin()
            for row in (counts, expected):
                row[smallest] += row[-1]
            counts, expected = counts[:-1], expected[:-1]
    assert len(expected) > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))


def words_by_block() -> float:
    """p-value of words of four tokens over a vocabulary of two, under the block rule."""
    tokens = 9_000
    third = np.array([1 / 3, 2 / 3])
    p, q = np.log(third).astype(np.float32), np.log(third[::-1]).astype(np.float32)
    decoder = make_decoder(
        lambda context: p, lambda context: q, vocab_size=2, max_len=tokens + 1, order=1
    )
    params = SamplingParams(temperature=1.0, seed=7, verify="block")
    sequence = decoder.admit(Request([1], params, gamma=2, max_new_tokens=tokens))
    finish(decoder, sequence)
    words = np.reshape(ids(sequence), (-1, 4)) @ [8, 4, 2, 1]
    expected = np.einsum("i,j,k,l->ijkl", *[third] * 4).ravel()
    return chi_square(np.bincount(words, minlength=16).astype(float), expected)


@pytest.mark.parametrize("sampler", cases(["kernel"], SAMPLERS), indirect=True)
def test_the_block_rule_draws_new_numbers_every_round() -> None:
    """It reads all random numbers of a round to decide, including those of the positions after the
    rejection, so none may be used again."""
    assert words_by_block() > 1e-3


def test_numbers_that_the_block_rule_has_spent_are_noticed() -> None:
    def in_lane_0(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
        return uniform(seed, position, purpose)

    with broken("sampling.reference.uniform", in_lane_0):
        assert words_by_block() < 1e-6


# --- log-probabilities ------------------------------------------------------------------------

TARGET = random_model(1)
DRAFT = near(TARGET, 2, 1.0)


def logprobs_are_the_targets(sequence: ActiveSequence) -> None:
    text = list(sequence.request.prompt)
    for token in sequence.output:
        want = log_softmax(TARGET(tuple(text)).astype(np.float64))
        assert token.logprob == pytest.approx(want[token.id], abs=1e-9)
        assert len(token.alternatives) == sequence.request.logprobs
        assert [i for i, _ in token.alternatives] == np.argsort(-want, kind="stable")[:3].tolist()
        assert [p for _, p in token.alternatives] == pytest.approx(np.sort(want)[:-4:-1].tolist())
        text.append(token.id)


@all_samplers
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("gamma", [0, 4])
def test_logprobs_are_the_plain_targets(gamma: int, temperature: float) -> None:
    params = SamplingParams(temperature, top_k=9, repetition_penalty=1.3, seed=4)
    request = Request([2, 3], params, gamma=gamma, max_new_tokens=40, logprobs=3)
    sequence = run(make_decoder(TARGET, DRAFT), request)
    logprobs_are_the_targets(sequence)
    origins = {token.origin for token in sequence.output}
    assert origins == ({"first", "accepted", "corrected", "bonus"} if gamma else {"first", "plain"})
    silent = run(make_decoder(TARGET, DRAFT), replace(request, logprobs=None))
    assert ids(silent) == ids(sequence)
    assert {(t.logprob, t.alternatives) for t in silent.output} == {(None, ())}


def test_logprobs_of_another_row_are_noticed() -> None:
    real = Decoder._token

    def shifted(self: Decoder, request: Request, token: int, origin: str, row: np.ndarray) -> Token:
        return real(self, request, token, origin, row if origin != "bonus" else row / 2)

    request = Request([2, 3], gamma=2, max_new_tokens=40, logprobs=3)
    with broken("decoder.Decoder._token", shifted):
        sequence = run(make_decoder(TARGET, DRAFT), request)
    with pytest.raises(AssertionError):
        logprobs_are_the_targets(sequence)
