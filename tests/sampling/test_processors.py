"""Logits processors in the round: each row of p and q with its prefix, by both samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import at, by_bisection
from fakes import EOS, make_text_engine, near, random_model
from rounds import broken, ids, make_decoder, on_host, plain, run, run_all
from transformers import LogitsProcessor as TransformersProcessor
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
)

from runtime import OutriderError
from runtime.certificate import check
from runtime.decoder import Decoder
from runtime.sampling import sampler as sampler_module
from runtime.sampling.processors import (
    BadWords,
    ForcedLastToken,
    Ids,
    LogitsProcessor,
    NoRepeatNgram,
    SuppressTokens,
)
from runtime.sampling.softmax import log_softmax
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request
from runtime.text.options import Options

pytestmark = pytest.mark.usefixtures("sampler")


def whimsical(scores: np.ndarray, text: Ids, output_start: int) -> None:
    """Forbid the previous token, token 0 at the start, and the lower half if the upper half is more
    likely than each of its tokens: like Whisper's timestamps, by context, position and logits."""
    scores[text[-1] % len(scores)] = -np.inf
    if len(text) == output_start:
        scores[0] = -np.inf
    half = len(scores) // 2
    if np.logaddexp.reduce(scores[half:]) > scores[:half].max():
        scores[:half] = -np.inf


SOURCE = [0, 1, 2, 0, 1, 3, 2, 2, 2, 2, 1]
WORDS = [[3], [1, 2], [2, 0], [1, 2, 1, 4], [5, 5, 5]]
RULES = NoRepeatNgram(2), BadWords(WORDS)


@contextmanager
def processing(change: Callable[..., Any]) -> Iterator[None]:
    """Call `apply_processors` with a changed text, or not at all."""
    real = sampler_module.apply_processors

    def apply_processors(processors, row, params, text, suppress=(), **more):
        if (text := change(text, more["of_draft"])) is not None:
            real(processors, row, params, text, suppress, **more)

    with broken("sampling.sampler.apply_processors", apply_processors):
        yield


@on_host
@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (at(), (whimsical,)),
        (at(verify="block"), (whimsical,)),
        (at(top_p=0.8, repetition_penalty=1.5, logit_bias={2: 1.5}), (whimsical,)),
        (at(), (ForcedLastToken(6, 2, RULES),)),
    ],
    ids=["token", "block", "edited", "rules"],
)
def test_the_round_has_the_processed_distribution(
    params: SamplingParams, processors: tuple[LogitsProcessor, ...]
) -> None:
    assert by_bisection(params, 2, 5, processors=processors) < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda text, of_draft: None if not of_draft else text,  # the target's rows as they are
        lambda text, of_draft: text[:4],  # without the drafts of the round
    ],
    ids=["target alone", "without drafts"],
)
@pytest.mark.parametrize("processor", [whimsical, *RULES])
def test_control_rows_that_are_not_processed_show(
    change: Callable[..., Any], processor: LogitsProcessor
) -> None:
    with processing(change):
        assert by_bisection(at(), 1, 6, processors=(processor,)) > 0.01


@on_host
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_all_kinds_share_a_round(temperature: float) -> None:
    """Even if a draft without a distribution is a forbidden token."""
    target = random_model(1)
    decoder = make_decoder(target, near(target, 2, 0.5), slots=4)
    params = SamplingParams(temperature=temperature, seed=3, verify="coupled")
    requests = [
        Request([2, 3, 3, 4, 3, 3], params, 4, draft, processors=(whimsical, SuppressTokens([29])),
                max_new_tokens=40)
        for draft in ("model", "ngram", "chain", "copy")
    ]  # fmt: skip
    texts = [ids(sequence) for sequence in run_all(decoder, requests)]
    assert texts == [plain(decoder, requests[0])] * 4
    assert 29 not in texts[0] and all(a != b for a, b in zip(texts[0], texts[0][1:], strict=False))
    assert 29 in plain(decoder, replace(requests[0], processors=()))


@on_host
@pytest.mark.parametrize("other", ["model", "random"])
def test_a_chain_beside_a_draft_that_is_drawn(other: str) -> None:
    """Its q is processed after its own tokens, and not after those that a draw of the shared round
    makes up for it: with the same seed, the text is that of the chain alone."""
    target = random_model(1)

    def decoder(slots: int) -> Decoder:
        return make_decoder(target, near(target, 2, 0.5), slots=slots)

    for seed in range(20):
        request = Request(
            [2, 3, 3, 4, 3, 3], at(seed=seed), 4, "chain", processors=(whimsical,),
            max_new_tokens=20,
        )  # fmt: skip
        beside, _ = run_all(decoder(2), [request, replace(request, draft=other)])
        assert ids(beside) == ids(run(decoder(1), request))


@on_host
def test_log_probabilities_are_of_what_processors_leave() -> None:
    target = random_model(1)
    request = Request([2, 3], gamma=3, max_new_tokens=12, logprobs=1, processors=(whimsical,))
    sequence = run(make_decoder(target, near(target, 2, 0.3)), request)
    text = [2, 3]
    for token in sequence.output:
        row = target(tuple(text)).copy()
        whimsical(row, np.array(text), 2)
        assert token.logprob == pytest.approx(float(log_softmax(row).max()), abs=1e-6)
        text.append(token.id)


def test_suppressed_tokens() -> None:
    row = np.zeros(6, np.float32)
    suppress = SuppressTokens([4, 9], at_begin=[1])
    suppress(row, np.array([1, 2]), 1)
    assert np.flatnonzero(np.isneginf(row)).tolist() == [4]
    suppress(row, np.array([1, 2]), 2)
    assert np.flatnonzero(np.isneginf(row)).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        *((NoRepeatNgram(n), NoRepeatNGramLogitsProcessor(n)) for n in (1, 2, 3)),
        *((NoRepeatNgram(n, SOURCE), EncoderNoRepeatNGramLogitsProcessor(n, torch.tensor([SOURCE])))
          for n in (1, 2, 4)),
        (BadWords(WORDS), NoBadWordsLogitsProcessor(WORDS)),
        (ForcedLastToken(7, 2), ForcedEOSTokenLogitsProcessor(8, 2)),
    ],
)  # fmt: skip
def test_rules_are_those_of_transformers(
    own: LogitsProcessor, theirs: TransformersProcessor
) -> None:
    """On random texts over five tokens, which repeat n-grams."""
    rng, forbidden = np.random.default_rng(0), 0
    for length in [*range(1, 10)] * 40:
        text, row = rng.integers(0, 6, length) % 5, np.zeros(6, np.float32)
        expected = theirs(torch.from_numpy(text)[None], torch.from_numpy(row.copy())[None])
        own(row, text, 1)
        np.testing.assert_array_equal(np.isneginf(row), np.isneginf(expected[0].numpy()))
        forbidden += np.isneginf(row).sum()
        narrow = np.zeros(3, np.float32)  # a draft with fewer tokens
        own(narrow, text, 1)
        np.testing.assert_array_equal(narrow, row[:3])
    assert forbidden > 0


@on_host
def test_a_processor_that_forbids_everything_is_told() -> None:
    def nothing(scores: np.ndarray, text: Ids, output_start: int) -> None:
        scores[:] = -np.inf

    target = random_model(1)
    with pytest.raises(OutriderError, match="every logit is -inf"):
        run(make_decoder(target), Request([2], gamma=0, processors=(nothing,)))


@on_host
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_processor_that_writes_what_is_no_score(value: float) -> None:
    """Fault: the checkpoint was blamed."""

    def odd(scores: np.ndarray, text: Ids, output_start: int) -> None:
        scores[1] = value

    with pytest.raises(OutriderError, match=rf"option: .*a logits processor \(odd\) wrote {value}"):
        run(make_decoder(random_model(1)), Request([2], gamma=0, processors=(odd,)))


@on_host
def test_a_processor_that_returns_its_scores() -> None:
    """Fault: what it returned, as those of Transformers do, was ignored, and nothing forbidden."""

    def odd(scores: np.ndarray, text: Ids, output_start: int) -> np.ndarray:
        return np.where(np.arange(len(scores)) % 2, scores, -np.inf)

    def own(scores: np.ndarray, text: Ids, output_start: int) -> np.ndarray:
        scores[::2] = -np.inf
        return scores

    decoder = make_decoder(random_model(1))
    with pytest.raises(OutriderError, match=r"option: .*a logits processor \(odd\) returned"):
        run(decoder, Request([2], gamma=0, processors=(odd,)))
    found = run(decoder, Request([2], gamma=0, processors=(own,), max_new_tokens=9))
    assert all(token % 2 for token in ids(found))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_certificate(temperature: float, tmp_path: Path) -> None:
    """Control: a round whose rows are not processed fails it."""
    target = random_model(1, never=[EOS])
    engine = make_text_engine(tmp_path, target, near(target, 2, 0.5))
    options = Options(
        temperature=temperature, seed=1, max_new_tokens=60, processors=[whimsical], chat=False
    )
    assert check(engine, "abc", options).passed
    with processing(lambda text, of_draft: None):
        assert not check(engine, "abc", options).passed


def test_refused() -> None:
    with pytest.raises(OutriderError, match="a list of functions"):
        Options(processors=["x"]).check()
