"""Requests that a decoder refuses: one table of requests and of the limits they exceed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes import random_model
from rounds import broken, cases, finish, make_decoder, run

from runtime.checks import Limits, check_request
from runtime.drafts.draft import Draft
from runtime.drafts.registry import KINDS
from runtime.files.errors import OutriderError
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request


class Quoting(Draft):
    needs = ("corpus",)


HOST = Limits(100, 100, 64, 8, frozenset({"model", "chain", "ngram", "copy"}), True, True)
ALONE = replace(HOST, kinds=frozenset({"ngram", "copy"}), has_model=False)
DEVICE = replace(HOST, kinds=frozenset({"model"}), on_host=False)
WARM = SamplingParams(temperature=0.9)
COUNTED = {"params": SamplingParams(presence_penalty=0.5)}
SIGMOID = SamplingParams(temperature=1.0, verify="sigmoid")
LONG = {"prompt": [2] * 70, "gamma": 0, "max_new_tokens": 20}


@pytest.mark.parametrize(
    ("asked", "limits", "words"),
    [
        ({"prompt": []}, HOST, "prompt: the prompt is empty"),
        ({"prompt": [2] * 64}, HOST, "prompt: .* has 64 tokens, and the bundle's context is 64"),
        ({"prompt": [2, 100]}, HOST, "prompt: the prompt contains token id 100"),
        ({"prompt": [2, -1]}, HOST, "prompt: the prompt contains token id -1"),
        # The remedy once named a MAX_LEN beyond the model's own context, which the build refuses.
        (LONG, HOST, "Shorten it, or build the bundle with MAX_LEN=90"),
        (LONG, replace(HOST, context=90), "Shorten it, or build the bundle with MAX_LEN=90"),
        (LONG, replace(HOST, context=89), "MAX_LEN=89, the model's maximum"),
        (LONG, replace(HOST, context=64), "Shorten it: this is the model's maximum"),
        ({"gamma": 9}, HOST, "option: gamma=9 is over the 8"),
        ({"gamma": -1}, HOST, "option: gamma=-1 is negative"),
        ({"logprobs": 101}, HOST, "option: logprobs=101 is out of range"),
        ({}, ALONE, 'gamma=2 with draft=model needs a draft model.* draft="ngram", or build'),
        ({"draft": "chain"}, ALONE, "option: gamma=2 with draft=chain needs a draft"),
        ({"draft": "bigram"}, HOST, "option: draft=bigram needs a table"),
        # This was once refused on the CPU as being "for the CPU".
        ({"draft": "quoting"}, HOST, "option: draft=quoting needs a corpus.* --corpus"),
        ({"draft": "ngram"}, DEVICE, "option: draft=ngram is only for the CPU"),
        ({"draft": "ngram", "params": SIGMOID}, HOST, "option: .* a lookup has none"),
        ({"draft_temperature": 0.5}, HOST, "option: .* no effect at temperature=0"),
        ({"draft_temperature": 0.5, "params": WARM}, DEVICE, "option: .* for the CPU"),
        ({"draft_temperature": 0.0, "params": WARM}, HOST, "option: .* is out of range"),
        ({"draft_threshold": 1.0}, HOST, "option: .* is out of range"),
        ({"draft_threshold": 0.5}, DEVICE, "option: .* for the CPU"),
        ({"draft_threshold": 0.5, "draft": "chain"}, HOST, "option: .* always drafts gamma"),
        ({"draft_threshold": 0.5, "draft": "ngram"}, HOST, "option: .* has no probabilities"),
        # A GPU once acquired a slot before the refusal.
        ({"params": SamplingParams(frequency_penalty=0.5)}, DEVICE, "option: frequency_penalty is"),
        ({"params": SamplingParams(presence_penalty=0.5)}, DEVICE, "option: presence_penalty is"),
        ({"params": SamplingParams(logit_bias={5: 1.0})}, DEVICE,
         "option: logit_bias is not supported by the GPU sampling kernel"),
    ],
)  # fmt: skip
def test_what_is_refused(
    asked: dict[str, Any], limits: Limits, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "quoting", Quoting)
    with pytest.raises(OutriderError, match=words):
        check_request(Request(**{"prompt": [2], "gamma": 2, **asked}), limits)


def test_what_is_sound_is_taken() -> None:
    """The control: similar requests, where the limits allow them."""
    for asked, limits in (
        ({}, DEVICE), ({"gamma": 0}, ALONE), ({"draft": "ngram"}, ALONE),
        ({"draft": "chain"}, HOST),
        ({"prompt": [99] * 63, "gamma": 8, "logprobs": 100}, HOST),
        ({"draft_temperature": 0.5, "draft_threshold": 0.5, "params": WARM}, HOST),
        ({"params": SamplingParams(logit_bias={5: 1.0})}, HOST),
    ):  # fmt: skip
        check_request(Request(**{"prompt": [2], "gamma": 2, **asked}), limits)


@pytest.mark.usefixtures("sampler")
@pytest.mark.parametrize(
    ("sampler", "more"),
    cases([("numpy", {"draft": "bigram"}), ("device", COUNTED)], [("device", {"draft": "bigram"})]),
    indirect=["sampler"],
)
def test_a_refusal_takes_no_slot(more: dict[str, Any]) -> None:
    """Neither in `admit` nor in `check`, which a batch calls for each request first."""
    decoder = make_decoder(random_model(1), random_model(2))
    for asked in ({"prompt": []}, {"gamma": 9}, more):
        for call in (decoder.check, decoder.admit):
            with pytest.raises(OutriderError):
                call(Request(**{"prompt": [2], **asked}))
    assert decoder.slots.free == 1
    assert not decoder.target.calls


@pytest.mark.parametrize("at", ["decoder.ActiveSequence", "round.prefill"])
def test_an_interrupt_takes_no_slot(at: str) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    decoder = make_decoder(random_model(1), random_model(2))
    with broken(at, interrupted), pytest.raises(KeyboardInterrupt):
        decoder.admit(Request([2, 3]))
    assert decoder.slots.free == 1


@pytest.mark.parametrize(
    ("at", "whole"), [("slots.Slot.commit", False), ("stats.Stats.count_round", True)]
)
def test_an_interrupt_as_a_round_is_settled(at: str, whole: bool) -> None:
    """A sequence that is interrupted while its round is committed ends with an error; one whose
    round is not committed at all, or completely, continues. Fault: the next round continued from a
    half-committed one."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    request = Request([2, 3], max_new_tokens=20)
    alone = make_decoder(random_model(1), random_model(2))
    expected = run(alone, request).output
    decoder = make_decoder(random_model(1), random_model(2), slots=2)
    first, second = (decoder.admit(request) for _ in range(2))
    with broken(at, interrupted), pytest.raises(KeyboardInterrupt):
        decoder.round([first, second])
    assert (first.error is None) == whole
    assert first.error is None or (first.finish_reason, first.error.kind) == ("error", "busy")
    finish(decoder, first, second)
    for sequence in (first, second) if whole else (second,):
        assert sequence.output == expected
