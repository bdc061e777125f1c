"""Where sequences end: end-of-text, stop strings and stop tokens at every position of a block,
exact token counts, minimum lengths. Every test runs the real round; every control runs the same
check on a round with an injected fault.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import EOS, VOCAB_SIZE, Context, encode, make_text_engine, near, random_model, script
from rounds import all_samplers, broken, check_rows, ids, late_ends, make_decoder, oracle, run

from runtime.decoder import Decoder
from runtime.sampling.warp import warp
from runtime.sequence import ActiveSequence, Request
from runtime.text.engine import TextEngine
from runtime.text.results import Result

pytestmark = pytest.mark.usefixtures("sampler")

GAMMA = 4


# --- end-of-text ------------------------------------------------------------------------------


def ending(at: int, *, drafted: bool) -> Decoder:
    """A target that generates end-of-text as output token `at` after a prompt of 3, and letters
    otherwise.

    drafted: whether the draft proposes the end-of-text; otherwise it comes as a correction.
    """

    def target(context: Context) -> np.ndarray:
        row = np.zeros(VOCAB_SIZE, np.float32)
        row[EOS if len(context) == 3 + at else 2 + len(context) % 30] = 9
        return row

    def draft(context: Context) -> np.ndarray:
        row = target(context).copy()
        row[EOS] = 9 * (drafted and len(context) == 3 + at)
        return row

    return make_decoder(target, draft)


def ends_at(at: int, *, drafted: bool, gamma: int = GAMMA) -> None:
    decoder = ending(at, drafted=drafted)
    request = Request([2, 3, 4], gamma=gamma, max_new_tokens=20, eos_token_ids=[EOS])
    sequence = run(decoder, request)
    assert ids(sequence) == oracle(decoder.target.model, request)
    assert (ids(sequence)[-1], len(sequence.output), sequence.finish_reason) == (EOS, at + 1, "eos")
    # With ignore_eos, it is a token like any other.
    ignored = run(decoder, replace(request, ignore_eos=True))
    assert (ids(ignored)[at], len(ignored.output), ignored.finish_reason) == (EOS, 20, "length")


# Output token 0 comes from the prefill; a block of 4 drafts is then 1 to 4, and its bonus is 5.
@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("at", range(2 * GAMMA + 3))
def test_end_of_text_at_each_place_of_a_block(at: int, drafted: bool) -> None:
    ends_at(at, drafted=drafted)
    ends_at(at, drafted=drafted, gamma=0)


# --- the number of tokens ---------------------------------------------------------------------


def has_exactly(count: int, gamma: int) -> None:
    target = random_model(5)
    for draft in (target, near(target, 6, 1.0)):
        decoder = make_decoder(target, draft)
        request = Request([2, 3], gamma=gamma, max_new_tokens=count)
        sequence = run(decoder, request)
        assert (len(sequence.output), sequence.finish_reason) == (count, "length")
        assert ids(sequence) == oracle(target, request)
        # The first token needs no draft, nor does the last token of a round.
        assert draft is not target or sequence.stats.drafted < count


@pytest.mark.parametrize("gamma", [0, 1, GAMMA, 8])
def test_max_new_tokens_exactly(gamma: int) -> None:
    for count in range(1, gamma + 3):
        has_exactly(count, gamma)


def eager(context: Context) -> np.ndarray:
    """Prefers end-of-text at every position; otherwise a random model."""
    row = random_model(7)(context).copy()
    row[EOS] = 50
    return row


def respects_minimum(minimum: int, gamma: int) -> None:
    decoder = make_decoder(eager, eager)
    request = Request(
        [2, 3], gamma=gamma, max_new_tokens=20, min_new_tokens=minimum, eos_token_ids=[EOS]
    )
    sequence = run(decoder, request)
    assert ids(sequence) == oracle(eager, request)
    assert ids(sequence).index(EOS) == minimum == len(sequence.output) - 1
    # The same tokens are masked for the draft, otherwise it would propose unacceptable ones.
    assert sequence.stats.accepted == sequence.stats.examined


@all_samplers
@pytest.mark.parametrize("gamma", [0, 1, GAMMA])
def test_min_new_tokens_masks_end_of_text(gamma: int) -> None:
    for minimum in range(gamma + 4):
        respects_minimum(minimum, gamma)


@pytest.mark.parametrize("model", ["target", "draft"])
def test_end_of_text_that_is_not_masked(model: str) -> None:
    """In the target, it would end the sequence early; in the draft, no draft would be accepted."""

    def unmasked(logits, params, context, suppress, where, output_start):
        kept = () if where.startswith(model) else suppress
        return warp(logits, params, context, kept, where=where, output_start=output_start)

    for minimum in range(2, GAMMA + 2):
        with broken("sampling.reference.warp", unmasked), pytest.raises(AssertionError):
            respects_minimum(minimum, GAMMA)


# --- stop strings and stop tokens -------------------------------------------------------------

SCRIPT = "the quick brown fox jumps over a lazy dog"


def scripted_engine(folder: Path, amount: float = 0.0) -> TextEngine:
    """An engine that generates SCRIPT. amount: noise in the draft's logits."""
    model = script(SCRIPT)
    return make_text_engine(folder, model, near(model, 1, amount), order=None)


class LastReleased:
    """The sequence that an engine released last, with its slot as it was at that time."""

    def __init__(self, engine: TextEngine):
        self.engine, self.sequence = engine, None
        release = engine.decoder.release

        def watch(sequence: ActiveSequence) -> None:
            check_rows(engine.decoder, sequence)
            self.sequence = sequence
            release(sequence)

        engine.decoder.release = watch

    def agrees(self, result: Result) -> None:
        assert result.token_ids == ids(self.sequence)
        assert self.sequence.slot.tokens[-len(result.tokens) :] == result.token_ids
        assert None not in result.logprobs


def stops_at(folder: Path, end: int, width: int, amount: float = 0.0) -> None:
    """A stop string of `width` characters whose last one is SCRIPT[end - 1]."""
    engine = scripted_engine(folder, amount)
    last = LastReleased(engine)
    stop = SCRIPT[end - width : end]
    cut = SCRIPT.index(stop)
    options = {"stop": stop, "gamma": GAMMA, "logprobs": 2}
    events = list(engine.stream("go\n", **options))
    result = events[-1].result
    assert result is not None
    last.agrees(result)
    assert (result.text, result.finish_reason, result.stopped_by) == (SCRIPT[:cut], "stop", stop)
    assert result.token_ids == encode(SCRIPT[: cut + width])
    assert "".join(event.text for event in events) == result.text
    assert [t for event in events for t in event.token_ids] == result.token_ids
    alone = engine.generate("go\n", **{**options, "gamma": 0})
    last.agrees(alone)
    assert (alone.text, alone.token_ids) == (result.text, result.token_ids)
    assert alone.logprobs == result.logprobs


@pytest.mark.parametrize("width", [1, 3, 7])
@pytest.mark.parametrize("amount", [0.0, 6.0])
def test_a_stop_string_ending_at_each_offset_of_a_block(
    tmp_path: Path, width: int, amount: float
) -> None:
    for end in range(width, width + 2 * GAMMA + 3):
        stops_at(tmp_path, end, width, amount)


def test_a_slot_that_keeps_what_follows_a_stop_string(tmp_path: Path) -> None:
    """If the block continues after the stop string."""
    with broken("slots.Slot.roll_back", lambda self, length: None), pytest.raises(AssertionError):
        stops_at(tmp_path, 4, 3)


def test_stop_token_ids_at_each_offset(tmp_path: Path) -> None:
    engine = scripted_engine(tmp_path)
    last = LastReleased(engine)
    for end in range(2 * GAMMA):
        stop = encode(SCRIPT)[end]
        cut = SCRIPT.index(SCRIPT[end])
        for gamma in (0, GAMMA):
            result = engine.generate("go\n", stop_token_ids=[stop], gamma=gamma, logprobs=0)
            last.agrees(result)
            assert (result.text, result.stopped_by) == (SCRIPT[:cut], stop)
            assert result.token_ids == encode(SCRIPT[: cut + 1])
            assert result.finish_reason == "stop"


def test_half_a_stop_string_is_text_when_the_text_ends(tmp_path: Path) -> None:
    """Text held back for a stop string that is not completed belongs to the output."""
    engine = scripted_engine(tmp_path)
    whole = engine.generate("go\n", stop=["dogs", "dog!"], gamma=GAMMA)
    assert (whole.text, whole.finish_reason) == (SCRIPT, "eos")
    for count in range(1, 12):
        cut = engine.generate("go\n", stop="quick brown cat", max_new_tokens=count, gamma=GAMMA)
        assert (cut.text, cut.finish_reason) == (SCRIPT[:count], "length")


def test_an_end_that_is_noticed_late(tmp_path: Path) -> None:
    """The control of all tests above."""
    for at in range(GAMMA + 1):
        with late_ends(), pytest.raises(AssertionError):
            ends_at(at, drafted=True)
        with late_ends(), pytest.raises(AssertionError):
            has_exactly(1 + at, GAMMA)
        with late_ends(), pytest.raises(AssertionError):
            stops_at(tmp_path, 3 + at, 3)
