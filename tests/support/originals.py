"""Transformers' own greedy output, with which engines must agree token for token."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

import numpy as np
import torch
from checkpoints import VOCAB_SIZE, decoder_kind
from transformers import AutoConfig, PreTrainedModel

from runtime import Options, Result, TextEngine, load

NEW_TOKENS = 64
LENGTHS = (1, 5, 30)  # of the prompts; the last exceeds the sliding window
NEAR_TIE = 1e-5


_rng = np.random.default_rng(3)
PROMPTS = [_rng.integers(1, VOCAB_SIZE, length).tolist() for length in LENGTHS]


class Original:
    """The original model with eager attention, and its greedy output by prompt."""

    def __init__(self, checkpoint: Path, **overrides: object):
        kind = decoder_kind(AutoConfig.from_pretrained(checkpoint))
        self.model: PreTrainedModel = kind.from_pretrained(
            checkpoint, attn_implementation="eager", **overrides
        ).eval()
        # No EOS, so that all tokens are compared.
        self.model.generation_config.eos_token_id = None
        self.texts: dict[tuple[int, ...], list[int]] = {}

    def text(self, prompt: list[int]) -> list[int]:
        if tuple(prompt) not in self.texts:
            ids = torch.tensor([prompt])
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )
            self.texts[tuple(prompt)] = output[0, len(prompt) :].tolist()
        return self.texts[tuple(prompt)]

    def margin(self, context: list[int], other: int) -> float:
        """By how much the best logit after `context` is above that of `other`."""
        with torch.no_grad():
            logits = self.model(torch.tensor([context]), use_cache=False).logits[0, -1]
        return float(logits.max() - logits[other])


def check_text(original: Original, prompt: list[int], result: Result, what: str) -> None:
    """Check that the output equals the original's, or first differs at a near-tie, which is issued
    as a warning."""
    expected, got = original.text(prompt), result.token_ids
    assert len(got) == len(expected) == NEW_TOKENS, what
    if got == expected:
        return
    first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
    margin = original.margin([*prompt, *expected[:first]], got[first])
    assert margin < NEAR_TIE, f"{what}: token {first} is {got[first]}, {margin:.1e} below the best"
    warnings.warn(f"{what}: near-tie at token {first}, margin {margin:.1e}", stacklevel=2)


@cache
def original_of(checkpoint: Path) -> Original:
    """The `Original` that all tests of a process share, with its output."""
    return Original(checkpoint)


def greedy(gamma: int) -> Options:
    return Options(max_new_tokens=NEW_TOKENS, gamma=gamma, ignore_eos=True)


def check_batch(engine: TextEngine, original: Original, gammas: tuple[int, ...]) -> list[Result]:
    """Generate for all prompts at once, in as many slots as the engine has, and check each."""
    requests = [(prompt, greedy(g)) for prompt, g in zip(PROMPTS, gammas, strict=True)]
    results = dict(engine.batch(requests))
    for index, result in results.items():
        slots = engine.decoder.target.slots
        what = f"prompt of {LENGTHS[index]}, gamma {gammas[index]}, {slots} slots"
        check_text(original, PROMPTS[index], result, what)
    return [results[index] for index in range(len(PROMPTS))]


def one_thread(bundle: Path, slots: int) -> TextEngine:
    return load(bundle, slots=slots, threads=1)
