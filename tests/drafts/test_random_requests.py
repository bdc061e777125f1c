"""Random requests in shared rounds, compared with the same requests alone.

The models are functions of the context, so that neighbours cannot change a bit of the logits.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fakes import VOCAB_SIZE, near, random_model
from rounds import broken, cases, join_and_leave, make_decoder, on_host, outcome, plain, run

from runtime.decoder import Decoder
from runtime.drafts.proposer import Proposer
from runtime.drafts.registry import KINDS
from runtime.drafts.tables import Tables
from runtime.sampling.processors import BadWords, Ids, NoRepeatNgram
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

MAX_LEN, MAX_GAMMA = 64, 8
KIND_NAMES = ("model", "ngram", "copy", "chain", "unigram", "bigram", "skip", "random")
SHOWS_ORDER = 34  # the first seed whose requests notice rows that are filled out of order
TARGET = random_model(1)
DRAFT = near(TARGET, 2, 0.7)
TABLES = Tables.count(np.arange(400, dtype=np.int32) ** 2 % VOCAB_SIZE, VOCAB_SIZE, 3)


def decoder(slots: int) -> Decoder:
    return make_decoder(
        TARGET, DRAFT, slots=slots, max_len=MAX_LEN, max_gamma=MAX_GAMMA, tables=TABLES
    )


def odd_after_even(scores: np.ndarray, text: Ids, output_start: int) -> None:
    scores[(text[-1] + len(text)) % 2 :: 2] = -np.inf


def random_request(chance: random.Random) -> Request:
    """A request with options at random that the decoder accepts."""

    def maybe(share: float, *values: Any) -> Any:
        return chance.choice(values[1:]) if chance.random() < share else values[0]

    tokens = range(VOCAB_SIZE)
    unit = chance.choices(tokens, k=chance.randint(1, 6))
    params = SamplingParams(
        temperature=maybe(0.8, 0.0, 0.7, 1.0, 1.6), seed=chance.getrandbits(64),
        verify=maybe(0.5, "token", "block", "coupled"),
        top_k=maybe(0.3, 0, 1, 5, 20), top_p=maybe(0.3, 1.0, 0.4, 0.9), min_p=maybe(0.2, 0.0, 0.1),
        repetition_penalty=maybe(0.2, 1.0, 0.8, 1.5), frequency_penalty=maybe(0.2, 0.0, -0.4, 0.6),
        presence_penalty=maybe(0.2, 0.0, -0.5, 1.0),
        logit_bias=maybe(0.2, {}, {3: -100.0, 4: 2.0}),
    )  # fmt: skip
    draft = chance.choice([*KIND_NAMES, "model", "chain", "chain"])
    steps = not KINDS[draft].point_masses
    return Request(
        (unit * MAX_LEN)[: chance.choice([1, chance.randrange(2, 40), MAX_LEN - 1])],
        params,
        gamma=chance.choice([0, 1, 2, 4, MAX_GAMMA]), draft=draft,
        draft_temperature=maybe(0.3, None, 0.5, 2.0) if steps and params.temperature else None,
        draft_threshold=maybe(0.3, 0, 0.1, 0.5) if steps and not KINDS[draft].at_once else 0,
        max_new_tokens=chance.randint(1, 40), min_new_tokens=maybe(0.3, 0, 4),
        eos_token_ids=frozenset(chance.sample(tokens, maybe(0.5, 0, 1, 3))),
        ignore_eos=maybe(0.3, False, True), logprobs=maybe(0.3, None, 0, 3),
        processors=tuple(maybe(0.8, [], [odd_after_even], [BadWords([[3], [4, 5]])],
                               [NoRepeatNgram(2), odd_after_even])),
    )  # fmt: skip


def compare(*seeds: int) -> None:
    """For each seed, compare the outputs of random requests that join and leave with those of each
    alone, and, where the draft does not decide them, with plain decoding."""
    for seed in seeds:
        chance = random.Random(seed)
        requests = [random_request(chance) for _ in range(12)]
        sequences = join_and_leave(decoder(4), requests, chance)
        assert len(sequences) == len(requests)
        for sequence in sequences:
            request, found = sequence.request, outcome(sequence)
            alone = outcome(run(decoder(1), request))
            assert found == alone[: len(found)], request
            if request.params.temperature == 0 or request.params.verify == "coupled":
                assert [token for token, _ in alone] == plain(decoder(1), request), request


@on_host
@pytest.mark.parametrize("seed", cases([*range(8), SHOWS_ORDER], range(300)))
def test_neighbours_and_drafts_change_nothing(sampler: None, seed: int) -> None:
    compare(seed)


@on_host
def test_control_rows_that_are_filled_before_the_draw_alone_show(sampler: None) -> None:
    """A draft whose tokens are known is then verified with rows that were processed after
    others."""
    real = Proposer._fill_rows

    def fill(self, logits, first, drafts, drafted, step):
        if all(sequence in drafts for sequence, gamma in drafted.gammas.items() if gamma):
            real(self, logits, first, drafts, drafted, step)

    with broken("drafts.proposer.Proposer._fill_rows", fill), pytest.raises(AssertionError):
        compare(SHOWS_ORDER)
