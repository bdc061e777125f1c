"""Decoders on the fake CUDA driver, and sequences that join and leave them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import device_standin
import pytest
import rounds
from cuda_standin import FakeDriver
from fakes import EOS, FakeEngine, near, random_model
from rounds import finish, ids, join_and_leave, make_decoder

from runtime.decoder import Decoder
from runtime.round import HostRounds
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request, Rounds

MODEL = random_model(1, never=[EOS])
DRAFT = near(MODEL, 2, 0.7)
WARM = SamplingParams(temperature=0.8, seed=5)
PARAMS = [
    SamplingParams(),
    WARM,
    replace(WARM, top_k=9, top_p=0.9, min_p=0.01),
    replace(WARM, repetition_penalty=1.3),
    replace(WARM, verify="block"),
    replace(WARM, top_k=9, top_p=0.95, repetition_penalty=1.2, verify="block"),
]


def host(monkeypatch: pytest.MonkeyPatch, **shape: int) -> Decoder:
    monkeypatch.setattr(rounds, "SAMPLER", "kernel")
    # On a device a draft reads a prompt within one round.
    monkeypatch.setattr(HostRounds, "read_ahead", Rounds.read_ahead)
    return make_decoder(MODEL, DRAFT, **shape)


def decoder_on(driver: FakeDriver, *, slots: int = 1, **options) -> Decoder:
    made = device_standin.make_rounds(
        FakeEngine(MODEL, slots=slots, capacity=73, order=None),
        FakeEngine(DRAFT, slots=slots, capacity=73, order=None),
        driver=driver, vocab_size=32, max_len=64, max_gamma=8, **options,
    )  # fmt: skip
    return Decoder(made, vocab_size=32, max_len=64, max_gamma=8)


def texts(decoder: Decoder, *requests: Request) -> list[list[int]]:
    """The output of all requests, decoded at once."""
    sequences = [decoder.admit(request) for request in requests]
    finish(decoder, *sequences)
    for sequence in sequences:
        decoder.release(sequence)
    return [ids(sequence) for sequence in sequences]


def text(decoder: Decoder, request: Request) -> list[int]:
    return texts(decoder, request)[0]


def steps(driver: FakeDriver, action: Callable[[], object]) -> list[str]:
    """The operations that the driver logs during `action`."""
    driver.log.clear()
    action()
    return list(driver.log)


def decode_randomly(decoder: Decoder, seed: int, changing: float = 0.0) -> list[object]:
    """The outputs of sequences at seeded random, see `join_and_leave`."""
    chance = random.Random(seed)
    waiting = [
        Request(
            [chance.randrange(2, 30) for _ in range(chance.randrange(1, 40))],
            replace(params, seed=number),
            gamma=chance.choice([0, 1, 3, 8]), max_new_tokens=chance.randrange(1, 24),
            logprobs=chance.choice([None, None, None, 2]),
            eos_token_ids=frozenset([7, 11]), min_new_tokens=chance.choice([0, 0, 5]),
        )
        for number, params in enumerate(PARAMS * 2)
    ]  # fmt: skip
    done = join_and_leave(decoder, waiting, chance, changing)
    # Include the top log-probabilities, which are read from the device's logits.
    return [[(token.id, token.alternatives) for token in sequence.output] for sequence in done]
