"""Output of encoder-decoders for the same sources, from Transformers and from our engines."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE
from originals import one_thread
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel
from workshop import MAX_LEN, Workshop

from runtime import Options, TextEngine
from runtime.certificate import check

NEW_TOKENS, PENALTY = 48, 3.0
SOURCES = [
    np.random.default_rng(length).integers(1, VOCAB_SIZE, length).tolist()
    for length in (1, 7, 40, MAX_LEN)
]
# AOTInductor takes a minute to compile a model of two layers.
COMPILED = pytest.param("aotinductor", marks=pytest.mark.slow)


@cache
def original(checkpoint: Path, kind: Any = AutoModelForSeq2SeqLM) -> PreTrainedModel:
    model: PreTrainedModel = kind.from_pretrained(checkpoint, attn_implementation="eager").eval()
    # No EOS, so that all tokens are compared.
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def expected(checkpoint: Path, source: list[int], prompt: list[int] | None = None) -> list[int]:
    """Transformers' greedy tokens after the start token, a forced token and the prompt."""
    ids, model = torch.tensor([source]), original(checkpoint)
    begun = {} if prompt is None else {"decoder_input_ids": torch.tensor([prompt])}
    forced = model.generation_config.forced_bos_token_id is not None and prompt is None
    first = 1 + forced + len(prompt or ())
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
        max_new_tokens=NEW_TOKENS + forced, repetition_penalty=PENALTY, **begun,
    )[0].tolist()  # fmt: skip
    assert len(set(output)) > NEW_TOKENS // 2, "degenerate output proves nothing"
    return output[first:]


def greedy(source: Any, gamma: int | None = None, draft: str | None = None) -> Options:
    return Options(
        source=source, gamma=gamma, draft=draft, max_new_tokens=NEW_TOKENS, ignore_eos=True,
        repetition_penalty=PENALTY,
    )  # fmt: skip


def texts(engine: TextEngine, requests: list[Options]) -> list[list[int]]:
    results = dict(engine.batch([(None, options) for options in requests]))
    return [results[index].token_ids for index in range(len(requests))]


def certify(bundle: Path, source: Any) -> None:
    """Certify sampling at temperature 1 with a draft that has also read the source."""
    options = Options(source=source, temperature=1.0, seed=5, max_new_tokens=100)
    found = check(one_thread(bundle, 1), None, options)
    assert found.passed and found.tokens == 512 and found.drafted


def same_for_every_gamma(engine: TextEngine, source: Any) -> None:
    """Check that with the coupled rule a seed's output does not depend on gamma."""
    first, *others = texts(
        engine,
        [
            Options(source=source, temperature=1.0, seed=5, gamma=gamma, verify="coupled")
            for gamma in (0, 1, 4, 8)
        ],
    )
    assert others == [first] * 3


def bundle_of(workshop: Workshop, name: str, **options: Any) -> tuple[Path, Path]:
    """A checkpoint, and its bundle with a draft that is sometimes right."""
    target = workshop.checkpoint(name)
    return target, workshop.bundle(target, workshop.checkpoint(name, blur=0.1), **options)
