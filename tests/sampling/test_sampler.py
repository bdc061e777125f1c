"""The round's sampler: the native kernel if it is available, otherwise NumPy and a warning."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
import rounds
from commands import CHECKOUT
from fakes import near, random_model
from rounds import broken, ids, make_decoder, run

from runtime import load
from runtime.files.errors import OutriderError
from runtime.files.graphs import GAMMA_LIMIT
from runtime.sampling import kernel
from runtime.sampling.native import RoundSampler
from runtime.sampling.reference import NumpySampler
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.softmax import largest
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

needs_kernel = pytest.mark.skipif(not kernel.available(), reason=str(kernel.unavailable_reason()))


def no_library(path: Path | None = None) -> None:
    raise OutriderError("backend", "liboutrider.so was not found", "Run make plugins.")


@needs_kernel
def test_without_the_library_numpy_says_the_same_and_one_line_says_so(
    llama_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with caplog.at_level(logging.WARNING):
        native = load(llama_bundle)
        assert not caplog.records
        assert isinstance(native.decoder.rounds.sampler, RoundSampler)
        with broken("sampling.kernel.load", no_library):
            plain = load(llama_bundle)
    assert isinstance(plain.decoder.rounds.sampler, NumpySampler)
    (record,) = caplog.records
    assert "liboutrider.so was not found. Run make plugins." in record.message
    assert "\n" not in record.message
    for prompt in ([5, 6, 7], [9]):
        texts = [engine.generate(prompt, **options).token_ids for engine in (native, plain)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("sampler", ["numpy", pytest.param("kernel", marks=needs_kernel)])
def test_penalties_count_the_output_and_not_the_prompt(
    sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a round passes a context without the position where the output begins."""
    monkeypatch.setattr(rounds, "SAMPLER", sampler)
    target, prompt, text = random_model(1), [2, 3, 3, 4], list[int]()
    while len(text) < 30:
        row = target((*prompt, *text)).astype(np.float64)
        row[3] += 2
        for token in set(text):
            row[token] -= 1.5 * text.count(token) + 0.5
        text.append(int(row.argmax()))
    params = SamplingParams(frequency_penalty=1.5, presence_penalty=0.5, logit_bias={3: 2})
    request = Request(prompt, params, gamma=4, max_new_tokens=30)
    sequence = run(make_decoder(target, near(target, 2, 0.3)), request)
    assert ids(sequence) == text and sequence.stats.accepted > 3


@needs_kernel
def test_logits_in_an_engines_buffers_need_no_copy() -> None:
    """As a round passes them: step by step, with another first slot than the target's."""
    rng = np.random.default_rng(0)
    width, slots, vocab = 3, 4, 100
    params = SamplingParams(temperature=1.0)
    pool = rng.standard_normal((width, slots, vocab)).astype(np.float32)
    target = rng.standard_normal((2, width + 1, vocab)).astype(np.float32)
    places = [SlotSampling(params, width, 10, index=index) for index in (2, 3)]
    draft = [pool[step, 1:] for step in range(width)]
    sampler, verdicts = RoundSampler(vocab, width, slots), []
    for each in (sampler, NumpySampler(vocab)):
        each.begin(places)
        for step in range(width):
            each.draw(draft[step], step, first_slot=1)
        verdicts.append([(v.accepted, v.token) for v in each.verify(target, draft, first_slot=2)])
    assert verdicts[0] == verdicts[1]
    with pytest.raises(ValueError, match="that the drafts were drawn from"):
        sampler.verify(target, first_slot=2)
    with pytest.raises(ValueError, match="evenly"):
        sampler.verify(target, [pool[0], pool[2], pool[1]], first_slot=2)


def test_limits_are_those_of_the_library() -> None:
    header = (CHECKOUT / "plugins" / "include" / "outrider.h").read_text()
    assert re.search(rf"define OUTRIDER_MAX_WIDTH {GAMMA_LIMIT}\b", header)
    source = (CHECKOUT / "plugins" / "cpu" / "outrider_threads.h").read_text()
    assert f"MAX_THREADS = {kernel.MAX_THREADS};" in source


@pytest.mark.parametrize("count", [0, 1, 3, 7, 30])
def test_the_largest_are_those_of_a_stable_sort_of_all(count: int) -> None:
    rng = np.random.default_rng(count)
    for values in (rng.normal(size=20), rng.integers(0, 4, 20), np.full(20, -np.inf)):
        row = np.where(rng.random(20) < 0.3, -np.inf, values)
        expected = np.argsort(-row, kind="stable")[:count]
        assert largest(row, count).tolist() == expected.tolist()
