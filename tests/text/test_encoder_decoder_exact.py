"""An encoder-decoder's rounds have the original's distribution: a small vocabulary, exported
engines, by integration over all uniforms (`exact`). The truth is Transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import TOKENS
from exact import Probs, Round, blocks, distance
from originals import one_thread
from rounds import WRONG_RULES, broken, cases
from transformers import AutoModelForSeq2SeqLM, NoBadWordsLogitsProcessor
from transformers import NoRepeatNGramLogitsProcessor as NoRepeatNGram
from workshop import MAX_GAMMA, MAX_LEN, Workshop

from runtime import Options
from runtime.decoder import Decoder
from runtime.round import HostRounds
from runtime.sampling.reference import NumpySampler
from runtime.sampling.rules import Verdict
from runtime.sequence import Request

V, TEMPERATURE = 6, 0.2  # at 1 random models of this size all say the same
SOURCE = [3, 5, 2, 2, 4]
LAYERS = {
    "t5": {"num_layers": 1, "num_decoder_layers": 1},
    "bart": {"encoder_layers": 1, "decoder_layers": 1},
}
RULES = {"no_repeat_ngram_size": 2, "bad_words_ids": [[4], [1, 3], [5, 0]]}


class EngineRound(Round):
    """Of engines whose caches hold no tokens."""

    def __init__(self, decoder: Decoder, request: Request):
        run = decoder.rounds.run

        def kept(*arguments: Any) -> Any:
            self.last = run(*arguments)
            return self.last

        decoder.rounds.run = kept  # type: ignore[method-assign]
        super().__init__(decoder, request)

    def drafted(self) -> list[int]:
        return self.last.parts[0].drafts


def pair_of(workshop: Workshop, name: str) -> tuple[Path, Path]:
    """A checkpoint, and its bundle with a draft that disagrees."""
    options = {"vocab_size": V, "tokens": TOKENS[:V], **LAYERS[name]}
    target = workshop.checkpoint(name, **options)
    return target, workshop.bundle(target, workshop.checkpoint(name, seed=7, **options))


@pytest.fixture(scope="module")
def t5(workshop: Workshop) -> tuple[Path, Path]:
    return pair_of(workshop, "t5")


def truth(checkpoint: Path, source: list[int] = SOURCE, **rules: Any) -> Probs:
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
    processors = [
        NoRepeatNGram(rules["no_repeat_ngram_size"]),
        NoBadWordsLogitsProcessor(rules["bad_words_ids"]),
    ] if rules else []  # fmt: skip

    @cache
    def probs(context: tuple[int, ...]) -> np.ndarray:
        ids = torch.tensor([context])
        with torch.no_grad():
            row = model(torch.tensor([source]), decoder_input_ids=ids, use_cache=False).logits
        row = row[:, -1]
        for processor in processors:
            row = processor(ids, row)
        return torch.softmax(row[0].double() / TEMPERATURE, -1).numpy()

    return probs


def by_engines(bundle: Path, probs: Probs, gamma: int = 1, **options: Any) -> float:
    """Total variation between a round with what follows it and the truth."""
    engine = one_thread(bundle, 1)
    rounds = HostRounds(
        engine.decoder.target, engine.decoder.draft, NumpySampler(V), NumpySampler(V)
    )
    decoder = Decoder(rounds, vocab_size=V, max_len=MAX_LEN, max_gamma=MAX_GAMMA)
    asked = {"source": SOURCE, "temperature": TEMPERATURE, "seed": 1, "ignore_eos": True, **options}
    request = engine.request(None, Options(gamma=gamma, max_new_tokens=gamma + 2, **asked))
    round_ = EngineRound(decoder, request)
    outcomes = blocks(round_, request.params.verify, probs)
    return distance(outcomes, probs, tuple(round_.sequence.slot.tokens), gamma + 1)


@pytest.mark.parametrize(
    ("name", "gamma", "options"),
    cases(
        [("t5", 1, {}), ("t5", 1, RULES)],
        [("t5", 2, {}), ("t5", 2, {"verify": "block"}), ("t5", 2, RULES), ("bart", 2, {}),
         ("bart", 2, RULES)],
    ),
)  # fmt: skip
def test_a_round_has_the_distribution_of_transformers(
    workshop: Workshop, name: str, gamma: int, options: dict[str, Any]
) -> None:
    target, bundle = pair_of(workshop, name)
    rules = options if options is RULES else {}
    assert by_engines(bundle, truth(target, **rules), gamma, **options) < 1e-5


@pytest.mark.parametrize("wrong", WRONG_RULES)
def test_control_a_wrong_rule_shows(t5: tuple[Path, Path], wrong: Callable[..., Verdict]) -> None:
    with broken("sampling.reference.verify", wrong):
        assert by_engines(t5[1], truth(t5[0])) > 0.01


def test_control_another_source_shows(t5: tuple[Path, Path]) -> None:
    assert by_engines(t5[1], truth(t5[0]), source=SOURCE[1:]) > 1e-3  # the bound is 1e-5


def test_control_rows_without_the_rules_show(t5: tuple[Path, Path]) -> None:
    probs = truth(t5[0], **RULES)
    with broken("sampling.sampler.process", lambda *_, **__: None):
        assert by_engines(t5[1], probs, **RULES) > 0.01
