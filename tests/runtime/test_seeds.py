"""Samples of the real round: they follow the target at every position of a block, and a request's
tokens depend on its seed alone, not on its slot, its neighbours or when it joined.
Log-probabilities are those of the target before any warping. Each with controls that must fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from fakes import EOS, VOCAB_SIZE, Context, make_text_engine, near, random_model
from proof import chi_square
from rounds import (
    accept_everything,
    broken,
    cases,
    check_rows,
    flattened_q,
    ids,
    make_decoder,
    run,
    without_loop,
)

from runtime.decoder import Decoder
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.reference import NumpySampler
from runtime.sampling.rules import Verdict
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams, VerifyRule, warp
from runtime.sequence import ActiveSequence, Request, Token
from runtime.text.options import Options

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


def p_values(
    temperature: float, gamma: int, tokens: int = 8_000, rule: VerifyRule = "token"
) -> dict[tuple[int, int], float]:
    """{(offset in the round, parity of the token before): p-value}, over the rounds of one long
    text that reach this offset. Cells with fewer than 200 tokens are left out."""
    target, draft = rows()
    decoder = make_decoder(
        lambda context: target[context[-1] % 2], lambda context: draft[context[-1] % 2],
        vocab_size=WIDE, max_len=tokens + 1, max_gamma=gamma, order=1,
    )  # fmt: skip
    params = SamplingParams(temperature=temperature, seed=100 + gamma, verify=rule)
    counts = np.zeros((gamma + 1, 2, WIDE))
    sequence = decoder.admit(Request([2], params, gamma=gamma, max_new_tokens=tokens))
    before = sequence.output[-1].id
    while sequence.finish_reason is None:
        for offset, token in enumerate(decoder.round([sequence])[sequence]):
            counts[offset, before % 2, token.id] += 1
            before = token.id
    expected = [warp(row, params).probs() for row in target]
    if rule == "block":
        # It decides on the whole block: what reaches an offset is no fair sample, the text is.
        counts = counts.sum(0, keepdims=True)
    return {
        (offset, parity): chi_square(counts[offset, parity], expected[parity])
        for offset, parity in np.ndindex(counts.shape[:2])
        if counts[offset, parity].sum() >= 200
    }


# A device draws bit for bit what the kernel draws on the host: test_device_rounds.py.
SAMPLERS = ("numpy", "kernel", "device")


@pytest.mark.parametrize(
    ("sampler", "temperature", "gamma"),
    cases([("numpy", 0.6, 5), ("kernel", 1.0, 3)], product(SAMPLERS, (0.6, 1.0), (1, 3, 5))),
    indirect=["sampler"],
)  # fmt: skip
def test_tokens_follow_the_target_at_every_offset(temperature: float, gamma: int) -> None:
    found = p_values(temperature, gamma)
    assert len(found) == 2 * (gamma + 1), "every offset is tested"
    assert min(found.values()) > 1e-3, found


@pytest.mark.parametrize("sampler", cases(["kernel"], SAMPLERS), indirect=True)
def test_the_block_rule_follows_the_target() -> None:
    assert min(p_values(1.0, 3, rule="block").values()) > 1e-3


@pytest.mark.parametrize("wrong", [accept_everything, flattened_q])
def test_wrong_rules_are_noticed(wrong: Callable[..., Verdict]) -> None:
    with broken("sampling.reference.verify", wrong):
        assert min(p_values(1.0, 3).values()) < 1e-6


def test_a_number_with_two_uses_is_noticed() -> None:
    """Accepting by the number that drew the token."""

    def shared(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
        return uniform(seed, position, min(purpose, Purpose.RESIDUAL) // 2, lane)  # type: ignore[arg-type]

    with broken("sampling.reference.uniform", shared):
        assert min(p_values(1.0, 3).values()) < 1e-6


def words_by_block(tokens: int = 9_000) -> float:
    """p-value of words of four tokens, under the block rule and two tokens in all."""
    third = np.array([1 / 3, 2 / 3])
    p, q = np.log(third).astype(np.float32), np.log(third[::-1]).astype(np.float32)
    decoder = make_decoder(
        lambda context: p, lambda context: q, vocab_size=2, max_len=tokens + 1, order=1
    )
    params = SamplingParams(temperature=1.0, seed=7, verify="block")
    text = ids_of_long(decoder, Request([1], params, gamma=2, max_new_tokens=tokens))
    words = np.reshape(text, (-1, 4)) @ [8, 4, 2, 1]
    expected = np.einsum("i,j,k,l->ijkl", *[third] * 4).ravel()
    return chi_square(np.bincount(words, minlength=16).astype(float), expected)


def ids_of_long(decoder: Decoder, request: Request) -> list[int]:
    sequence = decoder.admit(request)
    while sequence.finish_reason is None:
        decoder.round([sequence])
    return ids(sequence)


@pytest.mark.parametrize("sampler", cases(["numpy", "kernel"], SAMPLERS), indirect=True)
def test_the_block_rule_draws_new_numbers_every_round() -> None:
    """It looks at all numbers of its round to decide, the later ones included: they are spent."""
    assert words_by_block() > 1e-3


def test_numbers_that_the_block_rule_has_spent_are_noticed() -> None:
    def in_lane_0(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
        return uniform(seed, position, purpose)

    with broken("sampling.reference.uniform", in_lane_0):
        assert words_by_block() < 1e-6


# --- seeds ------------------------------------------------------------------------------------

TARGET = random_model(1)
DRAFT = near(TARGET, 2, 1.0)


def sampled(seed: int, rule: VerifyRule = "token") -> Request:
    """Requests of different lengths, temperatures and gammas."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(temperature=(1.0, 0.6, 1.3)[seed % 3], seed=seed, verify=rule)
    prompt = rng.integers(0, VOCAB_SIZE, 1 + 2 * seed).tolist()
    return Request(prompt, params, gamma=seed % 6, max_new_tokens=20 + seed, logprobs=0)


def alone(request: Request) -> list[Token]:
    return run(make_decoder(TARGET, DRAFT), request).output


def repeats_alone(rule: VerifyRule) -> None:
    """Six requests in three slots, joining in an order of chance, each as it is alone."""
    rng = np.random.default_rng(3)
    for order in range(4):
        decoder = make_decoder(TARGET, DRAFT, slots=3)
        waiting = [sampled(int(seed), rule) for seed in rng.permutation(6)]
        slots, sequence = set(), []
        while waiting or sequence:
            if waiting and decoder.slots.free and rng.random() < 0.4 + 0.2 * order:
                sequence.append(decoder.admit(waiting.pop()))
            if sequence:
                decoder.round(sequence)
            for r in [r for r in sequence if r.finish_reason]:
                check_rows(decoder, r)
                assert [(t.id, t.logprob) for t in r.output] == [
                    (t.id, t.logprob) for t in alone(r.request)
                ]
                slots.add(r.slot.index)
                decoder.release(r)
                sequence.remove(r)
        assert len(slots) >= 2


@pytest.mark.parametrize(
    ("sampler", "rule"),
    cases(
        [("numpy", "token"), ("kernel", "block"), ("device", "token")],
        product(SAMPLERS, ("token", "block")),
    ),
    indirect=["sampler"],
)
def test_interleaved_requests_repeat_alone(rule: VerifyRule) -> None:
    repeats_alone(rule)


def test_other_seeds_give_other_texts() -> None:
    request = sampled(1)
    texts = {
        tuple(t.id for t in alone(replace(request, params=replace(request.params, seed=seed))))
        for seed in range(10)
    }
    assert len(texts) == 10


@pytest.mark.parametrize("what", ["slot", "time"])
def test_numbers_that_depend_on_the_company_are_noticed(what: str) -> None:
    calls = 0

    def companionable(
        self: NumpySampler, place: SlotSampling, step: int, purpose: Purpose
    ) -> float:
        nonlocal calls
        calls += 1
        lane = 1 + place.index if what == "slot" else calls
        return uniform(place.params.seed, place.position + step, purpose, lane)

    with (
        broken("sampling.reference.NumpySampler._uniform", companionable),
        pytest.raises(AssertionError),
    ):
        repeats_alone("token")


# --- log-probabilities ------------------------------------------------------------------------


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


def test_logprobs_of_another_row_are_noticed() -> None:
    real = Decoder._token

    def shifted(self: Decoder, request: Request, token: int, origin: str, row: Logits) -> Token:
        return real(self, request, token, origin, row if origin != "bonus" else row / 2)

    request = Request([2, 3], gamma=2, max_new_tokens=40, logprobs=3)
    with broken("decoder.Decoder._token", shifted):
        sequence = run(make_decoder(TARGET, DRAFT), request)
    with pytest.raises(AssertionError):
        logprobs_are_the_targets(sequence)


def test_logprobs_are_not_kept_when_not_asked_for() -> None:
    sequence = run(make_decoder(TARGET, DRAFT), Request([2, 3], max_new_tokens=5))
    assert {(t.logprob, t.alternatives) for t in sequence.output} == {(None, ())}
    assert len(ids(sequence)) == 5


# --- the text engine --------------------------------------------------------------------------


def test_a_batch_is_its_requests_alone(tmp_path: Path) -> None:
    target = random_model(1, never=[EOS])
    draft = near(target, 2, 1.0)
    requests = [
        ("ab" * n + "\n", Options(temperature=1.0, seed=n, max_new_tokens=5 + n % 4, gamma=n % 5))
        for n in range(9)
    ]
    engine = make_text_engine(tmp_path, target, draft, slots=3, order=None)
    single = make_text_engine(tmp_path, target, draft, order=None)
    results = dict(engine.batch(requests))
    assert sorted(results) == list(range(9))
    for index, (prompt, options) in enumerate(requests):
        assert results[index].token_ids == single.generate(prompt, **vars(options)).token_ids
    assert engine.decoder.slots.free == 3
    assert engine.stats()["requests"] == 9


def test_threads_take_turns(tmp_path: Path) -> None:
    target = random_model(1, never=[EOS])
    engine = make_text_engine(tmp_path, target, near(target, 2, 1.0), slots=3, order=None)
    options = {"temperature": 1.0, "max_new_tokens": 40}
    expected = {n: engine.generate("abc", seed=n, **options).token_ids for n in range(3)}
    found: dict[int, list[list[int]]] = {n: [] for n in range(3)}

    def work(n: int) -> None:
        for _ in range(5):
            found[n].append(engine.generate("abc", seed=n, **options).token_ids)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [expected[n]] * 5 for n in range(3)}
    assert engine.stats()["requests"] == 18
    assert engine.stats()["output_tokens"] == 18 * 40


def test_a_context_is_all_that_a_row_depends_on() -> None:
    """What the tests here rest on: a fake answers by its rows, so wrong rows give other numbers."""
    contexts: list[Context] = [(1, 2), (2, 1), (1,), (1, 2, 1)]
    assert len({TARGET(context).tobytes() for context in contexts}) == len(contexts)
    assert (TARGET((1, 2)) == random_model(1)((1, 2))).all()
