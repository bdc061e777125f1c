"""A slot that still holds the beginning of a prompt: only the rest is computed, and the text and
its log-probabilities are those of an engine that holds nothing. The controls, accounts of rows that
miss what was overwritten, are in test_crowd.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import EOS, VOCAB_SIZE, make_text_engine, near, random_model
from rounds import ids, make_decoder, run

from runtime import load
from runtime.beam.text import beam_texts
from runtime.decoder import Decoder
from runtime.sampling.warp import SamplingParams
from runtime.sequence import ActiveSequence, Request
from runtime.slots import SlotTable

MODEL = random_model(1, never=[EOS])
STORY = np.random.default_rng(0).integers(2, VOCAB_SIZE, 40).tolist()
SAMPLED = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(autouse=True)
def _sampler(sampler: None) -> None:
    pass


def decoder(slots: int, **options: Any) -> Decoder:
    return make_decoder(MODEL, near(MODEL, 2, 1.0), slots=slots, max_len=96, **options)


def outcome(sequence: ActiveSequence) -> list[tuple[int, str, float | None]]:
    return [(token.id, token.origin, token.logprob) for token in sequence.output]


def requests(params: SamplingParams, **asked: Any) -> list[Request]:
    """Prompts with common beginnings: the same twice, longer, shorter, one that branches off."""
    prompts = [STORY[:30], STORY[:30], STORY, STORY[:12], [*STORY[:20], 5, 5, 5], [7, 7], STORY[:1]]
    return [
        Request(prompt, params, logprobs=0, max_new_tokens=12, **{"gamma": 3, **asked})
        for prompt in prompts
    ]


def one_after_the_other(slots: int, asked: Sequence[Request]) -> int:
    """Each as from a decoder of its own. Returns how many tokens were not computed again."""
    used, reused = decoder(slots), 0
    for request in asked:
        sequence = run(used, request)
        assert outcome(sequence) == outcome(run(decoder(1), request))
        reused += sequence.stats.reused_tokens
    return reused


@pytest.mark.parametrize("sampler", ["numpy", "kernel"], indirect=True)
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["0", "1"])
@pytest.mark.parametrize("slots", [1, 3])
def test_texts_are_those_of_a_fresh_decoder(slots: int, params: SamplingParams) -> None:
    for gamma in (0, 1, 8):
        assert one_after_the_other(slots, requests(params, gamma=gamma)) > 60
    assert one_after_the_other(slots, requests(params, draft="chain")) > 60


def test_the_rest_is_all_that_is_computed() -> None:
    used = decoder(1)
    first = run(used, Request(STORY[:30], gamma=2, max_new_tokens=6))
    talk = [*STORY[:30], *ids(first), 9, 9]
    used.target.calls.clear()  # type: ignore[attr-defined]
    used.draft.calls.clear()  # type: ignore[union-attr, attr-defined]
    second = run(used, Request(talk, gamma=2, max_new_tokens=6))
    # The last token of the first text was in no cache yet.
    assert second.stats.reused_tokens == 35
    prefill = used.target.calls[0]  # type: ignore[attr-defined]
    assert (prefill.position, prefill.width) == ((35,), 3)
    assert used.draft.calls[0].position[0] >= 30  # type: ignore[union-attr, attr-defined]
    assert first.stats.reused_tokens == 0
    again = run(used, Request(talk, gamma=2, max_new_tokens=6))
    assert outcome(again) == outcome(second)
    assert again.stats.reused_tokens == len(talk) - 2, "two are computed, for the same rounding"


def test_without_reuse_everything_is_computed() -> None:
    used = decoder(1)
    used.rounds.slots = used.slots = SlotTable(1)
    assert [run(used, request).stats.reused_tokens for request in requests(SAMPLED)] == [0] * 7


def test_rows_of_a_failed_sequence_are_not_used_again() -> None:
    nan = random_model(1, never=[EOS])

    def failing(context: tuple[int, ...]) -> np.ndarray:
        row = nan(context).copy()
        row[3] = np.nan if len(context) == 33 else row[3]
        return row

    used = make_decoder(failing, near(nan, 2, 1.0), max_len=96)
    sequence = used.admit(Request(STORY[:30], gamma=0, max_new_tokens=9))
    while sequence.finish_reason is None:
        used.round([sequence])
    used.release(sequence)
    assert sequence.error is not None
    assert used.admit(Request(STORY[:30], gamma=0)).stats.reused_tokens == 0


def test_beams_in_between(tmp_path: Path) -> None:
    """They use all slots, without asking the table."""
    draft = near(MODEL, 2, 1.0)
    engine = make_text_engine(tmp_path, MODEL, draft, slots=4, order=None)
    fresh = make_text_engine(tmp_path, MODEL, draft, slots=4, order=None)
    expected = fresh.generate("hello there", max_new_tokens=20).token_ids
    for _ in range(2):
        result = engine.generate("hello there", max_new_tokens=20)
        assert result.token_ids == expected
        engine.decoder.target.copy_rows = lambda *_: None  # type: ignore[attr-defined]
        beam_texts(engine, "hello", beams=1, max_new_tokens=3, gamma=0)


def test_of_a_real_engine(llama_bundle: Path) -> None:
    engine, fresh = (load(llama_bundle, slots=2, threads=1, reuse=x) for x in (True, False))
    story = "once upon a time there was a slot that remembered what it was told. "
    prompts = [story, story, story + "And then", story[:20] + "it forgot", story + "And then"]
    reused = 0
    for temperature in (0.0, 1.0):
        for number, prompt in enumerate(prompts):
            options = {"temperature": temperature, "seed": number, "max_new_tokens": 16}
            mine, other = (e.generate(prompt, logprobs=1, **options) for e in (engine, fresh))
            assert mine.token_ids == other.token_ids
            np.testing.assert_array_equal(mine.logprobs, other.logprobs)
            reused += mine.stats.reused_tokens
            assert other.stats.reused_tokens == 0
    assert reused > 200
