"""Rounds on random logits, with the kernel and with NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.sampling.native import RoundSampler
from runtime.sampling.philox import Purpose
from runtime.sampling.reference import NumpySampler
from runtime.sampling.rules import Verdict
from runtime.sampling.sampler import Sampler, SlotSampling
from runtime.sampling.warp import SamplingParams

Rows = npt.NDArray[np.float32]
Outcome = tuple[list[int], int, int]  # outcome of a slot: drafts, number accepted, token

MAX_UNIFORM = 1 - 2.0**-53  # the largest uniform
NUDGE = 4e-6  # relative change of a uniform: a few float32 roundings
CONTEXT = 500  # tokens before the round, for the penalty

TOKEN = SamplingParams(temperature=0.7)
RULES = {
    "token": TOKEN,
    "block": replace(TOKEN, verify="block"),
    "sigmoid": replace(TOKEN, verify="sigmoid"),
}
VARIANTS = {
    **RULES,
    "coupled": replace(TOKEN, verify="coupled"),
    "greedy": SamplingParams(),
    "top-k 50, top-p 0.9": replace(TOKEN, top_k=50, top_p=0.9),
    "top-p 0.9": replace(TOKEN, top_p=0.9),
    "min-p 0.05": replace(TOKEN, min_p=0.05),
    "penalty 1.1": replace(TOKEN, repetition_penalty=1.1),
}


def random_logits(vocab_size: int, gamma: int, batch: int, seed: int) -> tuple[Rows, Rows]:
    """Peaked target rows, float32 [B, gamma + 1, V], and draft rows near them, so that some draft
    tokens are accepted and some rejected."""
    rng = np.random.default_rng(seed)
    shape = (batch, gamma + 1, vocab_size)
    target = 2.5 * rng.standard_normal(shape, dtype=np.float32)
    noise = rng.standard_normal((batch, gamma, vocab_size), dtype=np.float32)
    return target, target[:, :gamma] + np.float32(0.7) * noise


class Round:
    """Logits of B slots, and the round on them with either sampler.

    The uniforms are counter-based, so every call does the same work.
    """

    def __init__(
        self,
        logits: tuple[Rows, Rows],
        params: SamplingParams,
        *,
        seed: int = 0,
        threads: int = 1,
        context: npt.NDArray[np.int64] | None = None,
    ):
        """logits: the target's [B, gamma + 1, V] and the draft's [B, gamma, V]. seed: seed of the
        first slot; each further slot adds one. context: tokens that the penalty counts (default:
        random ones)."""
        self.target, self.draft = logits
        self.batch, self.gamma, self.vocab_size = map(int, self.draft.shape)
        self.params, self.threads = params, threads
        if context is None:
            context = np.random.default_rng(seed).integers(0, self.vocab_size, CONTEXT)
        self.slots = [
            SlotSampling(replace(params, seed=seed + b), self.gamma, CONTEXT, b, context)
            for b in range(self.batch)
        ]
        self.native = RoundSampler(self.vocab_size, self.gamma, self.batch, threads)
        self.reference = NumpySampler(self.vocab_size)

    def draw(self, sampler: Sampler) -> list[list[int]]:
        """Draw gamma tokens for each slot."""
        sampler.begin(self.slots)
        steps = [sampler.draw(self.draft[:, step], step).copy() for step in range(self.gamma)]
        drafts: list[list[int]] = np.stack(steps, axis=1).tolist()
        return drafts

    def verify(self, sampler: Any) -> list[Verdict]:
        """Verify the tokens that the same sampler has drawn; the reference has kept its rows."""
        verdicts: list[Verdict] = sampler.verify(self.target, self.draft)
        return verdicts

    def outcomes(self, sampler: Sampler) -> list[Outcome]:
        drafts, verdicts = self.draw(sampler), self.verify(sampler)
        return [(d, v.accepted, v.token) for d, v in zip(drafts, verdicts, strict=True)]

    def bytes_read(self, verdicts: list[Verdict]) -> int:
        """Bytes that must be read for these outcomes: the target rows up to the first rejection
        and, if there is one, the draft's row. The block rule reads all rows."""
        rows, row = 0, self.vocab_size * self.target.itemsize
        for verdict in verdicts:
            rows += len(verdict.ratios) if verdict.accepted < self.gamma else self.gamma + 1
            rows += verdict.accepted < self.gamma
        return rows * row


class _NudgedSampler(NumpySampler):
    """The reference with every uniform slightly larger or smaller."""

    def __init__(self, vocab_size: int, nudge: float):
        super().__init__(vocab_size)
        self._nudge = nudge

    def _uniform(self, place: SlotSampling, step: int, purpose: Purpose) -> float:
        return min(super()._uniform(place, step, purpose) * (1 + self._nudge), MAX_UNIFORM)


def disagreements(round_: Round, outcomes: list[Outcome]) -> list[int]:
    """The slots in which any token of `outcomes` differs from the reference.

    For these, the reference is run again with its uniforms a few float32 roundings lower and
    higher. A slot whose outcome changes is a borderline case and does not count.
    """
    expected = round_.outcomes(round_.reference)
    differ = [b for b, (a, c) in enumerate(zip(outcomes, expected, strict=True)) if a != c]
    if differ:
        lower, higher = (
            round_.outcomes(_NudgedSampler(round_.vocab_size, nudge)) for nudge in (-NUDGE, NUDGE)
        )
        differ = [b for b in differ if lower[b] == higher[b]]
    return differ
