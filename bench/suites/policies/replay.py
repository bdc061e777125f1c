"""Replays a fixed text, with a fixed acceptance decision for each token, in any way of decoding.

Above temperature 0, two ways of decoding generate two texts, one of which may be easier to draft,
and that difference is larger than those to be measured. But given that a text x was drawn from p, a
draft token whose predecessors were all accepted is accepted with probability min(1, q(x) / p(x)),
whatever gamma is: in Algorithm 1 (Leviathan et al. 2023) a token is x by acceptance with
probability min(p, q), and x with probability p in total. So a text is decoded plainly, one random
number is drawn for each position, and then every way replays the text: the models and the sampler
do all their work, in the same time, and their results are discarded. The rounds of each way have
the distribution that they would have had, given this text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from runtime.round import HostRounds
from runtime.sampling.rules import Verdict
from runtime.sampling.sampler import Array, Ids, Sampler, SlotSampling
from runtime.sampling.warp import SamplingParams, warp
from runtime.text.engine import TextEngine

from ...core.runs import fresh_engine, plain_options, text_logits


@dataclass(frozen=True)
class ReplayText:
    """A text to replay. ids: prompt and text. accepted: for each position, whether a draft token
    would be accepted there."""

    ids: Sequence[int]
    accepted: Sequence[bool]


def sample_text(
    engine: TextEngine, prompt: Sequence[int], tokens: int, seed: int, options: Mapping[str, Any]
) -> ReplayText:
    """Generate a text, and the acceptance decisions for the draft model. options: "temperature",
    and optionally "draft_temperature"."""
    plain = {**plain_options(options), "max_new_tokens": tokens, "ignore_eos": True}
    text = engine.generate(prompt, seed=seed, **plain).tokens
    ids = [*prompt, *(token.id for token in text)]
    draft, temperature = engine.decoder.draft, options["temperature"]
    assert draft is not None
    params = SamplingParams(temperature=temperature)
    draft_params = SamplingParams(temperature=options.get("draft_temperature", temperature))
    p = (warp(row, params) for row in text_logits(engine, engine.decoder.target, ids))
    q = (warp(row, draft_params) for row in text_logits(engine, draft, ids))
    uniforms = np.random.default_rng(seed).random(len(ids))
    accepted = [False] + [
        bool(q_next.prob(token) > uniform * p_next.prob(token))
        for p_next, q_next, token, uniform in zip(p, q, ids[1:], uniforms, strict=False)
    ]
    return ReplayText(ids, accepted)


class ReplaySampler:
    """A sampler that does the work of `inner`, for one slot with drawn drafts, but returns the
    tokens of `text`."""

    def __init__(self, inner: Sampler):
        self.inner, self.vocab_size = inner, inner.vocab_size
        self.text = ReplayText([], [])
        self._slot: SlotSampling

    def begin(self, slots: Sequence[SlotSampling]) -> None:
        (self._slot,) = slots
        self.inner.begin(slots)

    def draw(self, logits: Array, step: int, *, first_slot: int = 0) -> Ids:
        drawn = self.inner.draw(logits, step, first_slot=first_slot)
        position = self._slot.position + step
        token = self.text.ids[position]
        if not self.text.accepted[position]:
            token = int(drawn[0]) if drawn[0] != token else (token + 1) % self.vocab_size
        return np.array([token])

    def reduce_gamma(self, b: int, gamma: int) -> None:
        self._slot = replace(self._slot, gamma=gamma)
        self.inner.reduce_gamma(b, gamma)

    def set_drafts(self, drafts: Sequence[Sequence[int]], first_slot: int = 0) -> None:
        if any(drafts):
            raise NotImplementedError("drafts whose tokens are not drawn one by one")
        self.inner.set_drafts(drafts, first_slot)

    def verify(
        self, logits: Array, draft_logits: Sequence[Array] | None = None, *, first_slot: int = 0
    ) -> list[Verdict]:
        (verdict,) = self.inner.verify(logits, draft_logits, first_slot=first_slot)
        begin, gamma = self._slot.position, self._slot.gamma
        accepted = [*self.text.accepted[begin : begin + gamma], False].index(False)
        ratios = (verdict.ratios + (1.0,) * gamma)[: min(gamma, accepted + 1)]
        return [Verdict(accepted, self.text.ids[begin + accepted], ratios)]


def replaying_engine(engine: TextEngine) -> tuple[TextEngine, ReplaySampler]:
    """An engine with the same models, on the CPU, that replays texts, one at a time; and the
    sampler to set the text on."""
    rounds = engine.decoder.rounds
    assert isinstance(rounds, HostRounds)
    sampler = ReplaySampler(rounds.sampler)
    return fresh_engine(engine, HostRounds(rounds.target, rounds.draft, sampler)), sampler
