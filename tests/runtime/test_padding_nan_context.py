"""What a round must not read, miss or overrun: padding, NaN, full contexts. Every test runs the
real round; every control runs the same check on a round with an injected fault.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fakes import Context, Model, near, random_model
from rounds import (
    all_samplers,
    broken,
    check_rows,
    ids,
    late_ends,
    make_decoder,
    oracle,
    run,
    run_all,
)

from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.sampling.warp import SamplingParams
from runtime.sequence import ActiveSequence, Request

pytestmark = pytest.mark.usefixtures("sampler")

GAMMA = 4


# --- padding ----------------------------------------------------------------------------------


def padded(model: Model, width: int, vocab_size: int) -> Model:
    """`model` with more columns, whose logits are larger than all others."""

    def wide(context: Context) -> np.ndarray:
        row = np.full(width, 80, np.float32)
        row[:vocab_size] = model(context)[:vocab_size]
        return row

    return wide


def odd_widths(temperature: float, draft_width: int, vocab_size: int = 16) -> None:
    """Logits with columns beyond the 16 tokens, or a draft that knows only ten of them."""
    model = random_model(4, 16)
    draft = padded(near(model, 5, 0.8), draft_width, min(16, draft_width))
    decoder = make_decoder(
        padded(model, 24, 16), draft, vocab_size=vocab_size, target_width=24,
        draft_width=draft_width,
    )  # fmt: skip
    params = SamplingParams(temperature=temperature, seed=3)
    for gamma in (0, GAMMA):
        request = Request([15, 2, 11], params, gamma=gamma, max_new_tokens=40, logprobs=16)
        sequence = run(decoder, request)
        assert max(ids(sequence)) in range(10, 16), "the draft reads tokens that it may not know"
        if temperature == 0:
            assert ids(sequence) == oracle(model, request, 16)
        for token in sequence.output:
            assert {i for i, _ in token.alternatives} == set(range(16))
            assert sum(np.exp(logprob) for _, logprob in token.alternatives) == pytest.approx(1)
        assert gamma == 0 or 0 < sequence.stats.accepted < sequence.stats.drafted


@all_samplers
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_width", [20, 10])
def test_padding_is_never_emitted(temperature: float, draft_width: int) -> None:
    odd_widths(temperature, draft_width)


def test_padding_that_is_read_and_ids_that_cannot_be() -> None:
    with pytest.raises(AssertionError):
        odd_widths(1.0, 20, vocab_size=24)
    unchanged = (
        "drafts.model.replace_unknown_ids",
        lambda engine, tokens: [*tokens],
    )
    with broken(*unchanged), pytest.raises(AssertionError):
        odd_widths(0.0, 10)


def test_a_draft_of_fewer_tokens_in_company() -> None:
    """Draft rows outside of an engine's buffer are as wide as the draft's, not the target's."""
    model = random_model(4, 16)
    for kinds in (["model", "ngram"], ["chain", "copy"]):
        draft = padded(near(model, 5, 0.8), 10, 10)
        decoder = make_decoder(model, draft, vocab_size=16, draft_width=10, slots=2)
        requests = [
            Request([15, 2, 11, 15, 2], gamma=GAMMA, max_new_tokens=40, draft=kind)
            for kind in kinds
        ]
        sequences = run_all(decoder, requests)
        for request, sequence in zip(requests, sequences, strict=True):
            assert ids(sequence) == oracle(model, request, 16)
        assert all(sequence.stats.drafted for sequence in sequences)


# --- NaN --------------------------------------------------------------------------------------


def failing(model: Model, at: int) -> Model:
    """`model`, but one logit of the row after `at` tokens is NaN."""

    def broken_model(context: Context) -> np.ndarray:
        row = model(context).copy()
        if len(context) == at:
            row[3] = np.nan
        return row

    return broken_model


@all_samplers
@pytest.mark.parametrize("name", ["target", "draft"])
@pytest.mark.parametrize("at", [4, 7])  # 4: the prefill
def test_numeric_failures_are_named(name: str, at: int) -> None:
    model = random_model(1)
    models = {"target": model, "draft": model, name: failing(model, at)}
    decoder = make_decoder(models["target"], models["draft"], slots=2)
    params = SamplingParams(temperature=0.7)
    neighbour = decoder.admit(Request([2], gamma=0))
    request = Request([2, 3, 4, 5], params, gamma=3, max_new_tokens=20)
    if name == "draft" and at == 4:
        at = 5  # the draft's first row follows the token that the prefill generated
        decoder.draft.model = failing(model, at)
    with pytest.raises(OutriderError) as error:
        run(decoder, request)
    assert error.value.kind == "numeric"
    assert f"{name}, slot 1, position {at}: NaN" in error.value.cause
    assert decoder.slots.free == 1
    decoder.round([neighbour])
    check_rows(decoder, neighbour)


@all_samplers
@pytest.mark.parametrize(("name", "logprobs"), [("target", None), ("draft", None), ("target", 0)])
def test_a_failure_is_one_sequences_alone(name: str, logprobs: int | None) -> None:
    """The other sequences of its rounds get the same output as alone. On a GPU, this includes
    rounds that are launched ahead, which log-probabilities prevent."""
    model = random_model(1)
    models = {"target": model, "draft": near(model, 2, 1.0)}
    requests = [
        Request([first, 4], SamplingParams(temperature=temperature, seed=first), gamma=3,
                max_new_tokens=12, logprobs=logprobs)
        for first, temperature in ((2, 0.7), (3, 0.0), (5, 0.7))
    ]  # fmt: skip
    alone = [run(make_decoder(**models), request).output for request in requests]
    healthy = models[name]

    def fails_after_3(context: Context) -> np.ndarray:
        row = healthy(context).copy()
        row[3] = np.nan if context[0] == 3 and len(context) >= 8 else row[3]
        return row

    models[name] = fails_after_3
    decoder = make_decoder(**models, slots=3)
    sequences = [decoder.admit(request) for request in requests]
    while unfinished := [x for x in sequences if x.finish_reason is None]:
        before = {x: len(x.output) for x in unfinished}
        decoder.round(unfinished)
        assert all((len(x.output) > before[x]) != bool(x.error) for x in unfinished)
    assert sequences[0].output == alone[0] and sequences[2].output == alone[2]
    broken_one, error = sequences[1], sequences[1].error
    assert error is not None and f"{name}, slot 1, position " in error.cause
    assert broken_one.finish_reason == "error" and 0 < len(broken_one.output) < 12
    assert broken_one.output == alone[1][: len(broken_one.output)]


# --- contexts ---------------------------------------------------------------------------------


def short_draft(length: int, prompt: int, draft_max_len: int, gamma: int) -> ActiveSequence:
    target = random_model(2)
    decoder = make_decoder(
        target, near(target, 3, 0.8), max_len=length, draft_max_len=draft_max_len,
        draft_capacity=draft_max_len,  # one row too many is an error
    )  # fmt: skip
    request = Request(list(range(2, 2 + prompt)), gamma=gamma, max_new_tokens=length)
    sequence = run(decoder, request)
    assert (len(sequence.output), sequence.finish_reason) == (length - prompt, "context")
    want = replace(request, max_new_tokens=length - prompt)
    assert ids(sequence) == oracle(target, want)
    return sequence


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_the_draft_stops_where_its_context_ends(gamma: int) -> None:
    for draft_max_len in range(8, 24):
        sequence = short_draft(30, 5, draft_max_len, gamma)
        assert sequence.stats.drafted > 0
        assert sequence.output[-1].origin == "plain"


@pytest.mark.parametrize("prompt", [11, 12, 13, 29])
def test_a_prompt_longer_than_the_drafts_context(prompt: int) -> None:
    sequence = short_draft(30, prompt, 12, 4)
    assert sequence.stats.drafted == 0


def test_a_draft_that_runs_over_its_context() -> None:
    def heedless(self: Decoder, sequence: ActiveSequence) -> int:
        left = sequence.request.max_new_tokens - len(sequence.output) - 1
        return min(sequence.request.gamma, left, self.max_len - len(sequence.slot.tokens) - 1)

    with broken("decoder.Decoder._max_drafts", heedless), pytest.raises(AssertionError):
        short_draft(30, 5, 12, 4)


def fills_context(slots: int, max_gamma: int = 8, capacity: int | None = None) -> None:
    """Fill all slots to the last token of max_len; the fakes have exactly as many rows as bundles
    have."""
    target = random_model(2)
    decoder = make_decoder(
        target, near(target, 3, 0.5), slots=slots, max_len=40, max_gamma=max_gamma,
        capacity=capacity,
    )  # fmt: skip
    requests = [
        Request([2, 3, 4] * (1 + 5 * slot), gamma=max(0, max_gamma - slot), max_new_tokens=99)
        for slot in range(slots)
    ]
    for request, sequence in zip(requests, run_all(decoder, requests), strict=True):
        assert (len(sequence.slot.tokens), sequence.finish_reason) == (40, "context")
        full = replace(request, max_new_tokens=40 - len(request.prompt))
        assert ids(sequence) == oracle(target, full)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("max_gamma", [1, 3, 8])
def test_the_capacity_is_enough_to_the_last_token(slots: int, max_gamma: int) -> None:
    fills_context(slots, max_gamma)


def test_a_sequence_alone_writes_no_row_beyond_max_len() -> None:
    fills_context(1, capacity=40)


def test_rows_that_a_bundle_would_not_have() -> None:
    """Drafting past the context; and a slot that is almost full in a call that is wide because of
    another slot."""

    def heedless(self: Decoder, sequence: ActiveSequence) -> int:
        return sequence.request.gamma

    with broken("decoder.Decoder._max_drafts", heedless), pytest.raises(AssertionError, match="40"):
        fills_context(1, capacity=40)
    with pytest.raises(AssertionError, match="40"):
        fills_context(3, capacity=40)
    with late_ends(), pytest.raises(AssertionError):
        fills_context(3)


def test_no_more_is_drafted_than_can_become_text() -> None:
    """Every draft is accepted here, so every drafted token must become output, up to the last."""
    model = random_model(2)
    for left in range(1, 12):
        for max_len, count in ((64, left), (3 + left, 99)):
            decoder = make_decoder(model, model, max_len=max_len)
            stats = run(decoder, Request([2, 3, 4], gamma=4, max_new_tokens=count)).stats
            assert stats.output_tokens == left == 1 + stats.drafted + stats.rounds
