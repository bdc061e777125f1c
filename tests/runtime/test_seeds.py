"""Samples of the real round: they follow the target at every position of a block. Their
log-probabilities are those of the target before any warping. Each with a control that must fail.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from fakes import near, random_model
from proof import chi_square
from rounds import broken, cases, flattened_q, ids, make_decoder, run, without_loop

from runtime.decoder import Decoder
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.warp import SamplingParams, warp
from runtime.sequence import ActiveSequence, Request, Token

pytestmark = pytest.mark.usefixtures("sampler")

# --- the distribution -------------------------------------------------------------------------

WIDE = 4096
Logits = np.ndarray


@cache
def rows() -> tuple[Logits, Logits]:
    """Two rows for target and draft each, after even and odd tokens: [2, V], peaked like a
    language model's, the draft's near the target's."""
    rng = np.random.default_rng(5)
    target = rng.normal(-np.log(np.arange(1, WIDE + 1)), 0.5, (2, WIDE))
    target = rng.permuted(target, axis=1)
    draft = target + 0.4 * rng.normal(size=target.shape)
    return target.astype(np.float32), draft.astype(np.float32)


def p_values(temperature: float, gamma: int, tokens: int = 8_000) -> dict[tuple[int, int], float]:
    """{(offset in the round, parity of the token before): p-value}, over the rounds of one long
    text that reach this offset. Cells with fewer than 200 tokens are left out."""
    target, draft = rows()
    decoder = make_decoder(
        lambda context: target[context[-1] % 2], lambda context: draft[context[-1] % 2],
        vocab_size=WIDE, max_len=tokens + 1, max_gamma=gamma, order=1,
    )  # fmt: skip
    params = SamplingParams(temperature=temperature, seed=100 + gamma)
    counts = np.zeros((gamma + 1, 2, WIDE))
    sequence = decoder.admit(Request([2], params, gamma=gamma, max_new_tokens=tokens))
    before = sequence.output[-1].id
    while sequence.finish_reason is None:
        for offset, token in enumerate(decoder.round([sequence])[sequence]):
            counts[offset, before % 2, token.id] += 1
            before = token.id
    expected = [warp(row, params).probs() for row in target]
    return {
        (offset, parity): chi_square(counts[offset, parity], expected[parity])
        for offset, parity in np.ndindex(counts.shape[:2])
        if counts[offset, parity].sum() >= 200
    }


# A device draws bit for bit what the kernel draws on the host: test_device_rounds.py.
SAMPLERS = ("numpy", "kernel", "device")


@pytest.mark.parametrize(
    ("sampler", "temperature", "gamma"),
    cases([("numpy", 0.6, 3), ("kernel", 1.0, 5)], product(SAMPLERS, (0.6, 1.0), (1, 3, 5))),
    indirect=["sampler"],
)  # fmt: skip
def test_tokens_follow_the_target_at_every_offset(temperature: float, gamma: int) -> None:
    found = p_values(temperature, gamma)
    assert len(found) == 2 * (gamma + 1), "every offset is tested"
    assert min(found.values()) > 1e-3, found


def test_a_wrong_rule_is_noticed() -> None:
    """By little; the others, and numbers with two uses, are noticed in test_exact.py."""
    with broken("sampling.reference.verify", flattened_q):
        assert min(p_values(1.0, 3).values()) < 1e-6


def words_by_block() -> float:
    """p-value of words of four tokens, under the block rule and two tokens in all."""
    tokens = 9_000
    third = np.array([1 / 3, 2 / 3])
    p, q = np.log(third).astype(np.float32), np.log(third[::-1]).astype(np.float32)
    decoder = make_decoder(
        lambda context: p, lambda context: q, vocab_size=2, max_len=tokens + 1, order=1
    )
    params = SamplingParams(temperature=1.0, seed=7, verify="block")
    sequence = decoder.admit(Request([1], params, gamma=2, max_new_tokens=tokens))
    while sequence.finish_reason is None:
        decoder.round([sequence])
    words = np.reshape(ids(sequence), (-1, 4)) @ [8, 4, 2, 1]
    expected = np.einsum("i,j,k,l->ijkl", *[third] * 4).ravel()
    return chi_square(np.bincount(words, minlength=16).astype(float), expected)


@pytest.mark.parametrize("sampler", cases(["kernel"], SAMPLERS), indirect=True)
def test_the_block_rule_draws_new_numbers_every_round() -> None:
    """It looks at all numbers of its round to decide, the later ones included: they are spent."""
    assert words_by_block() > 1e-3


def test_numbers_that_the_block_rule_has_spent_are_noticed() -> None:
    def in_lane_0(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
        return uniform(seed, position, purpose)

    with broken("sampling.reference.uniform", in_lane_0):
        assert words_by_block() < 1e-6


# --- log-probabilities ------------------------------------------------------------------------

TARGET = random_model(1)
DRAFT = near(TARGET, 2, 1.0)


def log_softmax(row: Logits) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def logprobs_are_the_targets(sequence: ActiveSequence) -> None:
    text = list(sequence.request.prompt)
    for token in sequence.output:
        want = log_softmax(TARGET(tuple(text)))
        assert token.logprob == pytest.approx(want[token.id], abs=1e-9)
        assert len(token.alternatives) == sequence.request.logprobs
        assert [i for i, _ in token.alternatives] == np.argsort(-want, kind="stable")[:3].tolist()
        assert [p for _, p in token.alternatives] == pytest.approx(np.sort(want)[:-4:-1].tolist())
        text.append(token.id)


@without_loop
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

    def shifted(self: Decoder, request: Request, token: int, origin: str, row: Logits) -> Token:
        return real(self, request, token, origin, row if origin != "bonus" else row / 2)

    request = Request([2, 3], gamma=2, max_new_tokens=40, logprobs=3)
    with broken("decoder.Decoder._token", shifted):
        sequence = run(make_decoder(TARGET, DRAFT), request)
    with pytest.raises(AssertionError):
        logprobs_are_the_targets(sequence)
