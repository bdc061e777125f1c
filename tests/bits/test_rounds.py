"""Bitwise the same tokens and log-probabilities for all drafts, gammas, slots and neighbours, on
fake engines whose calls of one token round differently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from fakes import CopyingFake, near, random_model
from rounds import make_decoder, outcome, run

from runtime.beam.search import beam_search
from runtime.decoder import Decoder
from runtime.sampling.warp import SamplingParams
from runtime.sequence import ActiveSequence, Request

MODEL = random_model(1)
DRAFT = near(MODEL, 2, 1.0)
GREEDY = SamplingParams()
COUPLED = SamplingParams(
    temperature=0.7, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2, seed=5,
    verify="coupled",
)  # fmt: skip
# A prompt of 17 tokens, in chunks of 16, ends with a call of one token, like a prompt of 1.
PROMPTS = [[3], [3, 4], list(range(2, 19)), list(range(2, 31))]

Output = list[tuple[int, float | None]]


def request(prompt: Iterable[int], params: SamplingParams, gamma: int, **more: Any) -> Request:
    return Request(list(prompt), params, gamma, max_new_tokens=24, logprobs=0, **more)


def texts(params: SamplingParams, gammas: Iterable[int], **options: Any) -> list[list[Output]]:
    """The output for each gamma and prompt. Slots are reused with their cached rows."""
    decoder = make_decoder(MODEL, DRAFT, order=3, alone=1e-3, **options)
    return [
        [outcome(run(decoder, request(prompt, params, gamma))) for prompt in PROMPTS]
        for gamma in gammas
    ]


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_the_same_for_every_gamma(params: SamplingParams) -> None:
    plain, *drafted = texts(params, range(9), min_width=2)
    assert all(one == plain for one in drafted)
    # It is the output of wider calls: that of an engine without the rounding.
    exact = make_decoder(MODEL, DRAFT, order=3)
    assert plain == [outcome(run(exact, request(prompt, params, 0))) for prompt in PROMPTS]
    # Control: calls of one token.
    plain, drafted_once = texts(params, (0, 4), min_width=1)
    assert plain != drafted_once


def run_batched(decoder: Decoder, params: SamplingParams) -> list[Output]:
    """Run requests of several gammas, which join and leave two slots one after the other."""
    waiting = [request(prompt, params, gamma) for gamma in (0, 3, 8) for prompt in PROMPTS]
    active: dict[ActiveSequence, int] = {}
    found: list[Output] = [[] for _ in waiting]
    pending = iter(enumerate(waiting))
    while True:
        while decoder.slots.free and (following := next(pending, None)):
            active[decoder.admit(following[1])] = following[0]
        if not active:
            return found
        decoder.round(list(active))
        for sequence in [one for one in active if one.finish_reason is not None]:
            found[active.pop(sequence)] = outcome(sequence)
            decoder.release(sequence)


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_the_same_in_any_company(params: SamplingParams) -> None:
    alone = texts(params, [0], min_width=2)[0]
    options: dict[str, Any] = {"slots": 2, "order": 3, "alone": 1e-3}
    assert run_batched(make_decoder(MODEL, DRAFT, min_width=2, **options), params) == alone * 3
    assert run_batched(make_decoder(MODEL, DRAFT, min_width=1, **options), params) != alone * 3


def test_no_token_comes_from_a_call_of_one() -> None:
    """Even if padding would exceed the context: the last text ends where the context ends."""
    decoder = make_decoder(MODEL, DRAFT, min_width=2, max_len=40)
    for prompt in (*PROMPTS, list(range(2, 32)) + list(range(2, 11))):
        run(decoder, request(prompt, GREEDY, 0))
    target, draft = decoder.target, decoder.draft
    assert min(call.width for call in target.calls) == 2
    assert {call.outputs for call in target.calls} == {1}, "padding gets no logits"
    run(decoder, request([3], GREEDY, 2))
    assert min(call.width for call in draft.calls) == 1, "a draft does not affect the output"


def test_beams_are_those_of_wider_calls() -> None:
    def found(min_width: int, gamma: int) -> list[tuple[tuple[int, ...], float]]:
        target, draft = (
            CopyingFake(model, slots=8, order=3, alone=1e-3, min_width=min_width)
            for model in (MODEL, DRAFT)
        )
        result = beam_search(
            target, draft, PROMPTS[2], width=2, gamma=gamma, max_new_tokens=8, max_len=64
        )
        return [(one.tokens, one.score) for one in result.hypotheses]

    assert found(2, 0) == found(2, 3)
    assert found(1, 0) != found(1, 3)
