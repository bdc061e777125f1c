"""Rounds on random logits: by the kernel, by NumPy and as Transformers verifies them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
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
RoundResult = tuple[list[int], int, int]  # drafts, accepted, token

ONE = 1 - 2.0**-53  # the largest uniform

TOKEN = SamplingParams(temperature=0.7)
VARIANTS = {
    "token": TOKEN,
    "greedy": SamplingParams(),
    "block": replace(TOKEN, verify="block"),
    "sigmoid": replace(TOKEN, verify="sigmoid"),
    "top-k 50, top-p 0.9": replace(TOKEN, top_k=50, top_p=0.9),
    "top-p 0.9": replace(TOKEN, top_p=0.9),
    "min-p 0.05": replace(TOKEN, min_p=0.05),
    "penalty 1.1": replace(TOKEN, repetition_penalty=1.1),
}

RULES = ("token", "block", "sigmoid")


def random_logits(
    vocab_size: int, gamma: int, batch: int, seed: int | None = None
) -> tuple[Rows, Rows]:
    """Peaked rows float32 [B, gamma + 1, V] with draft rows near them, so that some drafts stand
    and some fall. seed: None for fresh ones."""
    rng = np.random.default_rng(seed)
    shape = (batch, gamma + 1, vocab_size)
    target = 2.5 * rng.standard_normal(shape, dtype=np.float32)
    noise = rng.standard_normal((batch, gamma, vocab_size), dtype=np.float32)
    return target, target[:, :gamma] + np.float32(0.7) * noise


class Round:
    """Logits of B slots and the round on them.

    The uniforms are the counters': every call does the same work.
    """

    def __init__(
        self,
        vocab_size: int,
        gamma: int,
        batch: int,
        params: SamplingParams,
        threads: int = 1,
        logits: tuple[Rows, Rows] | None = None,
        library: ctypes.CDLL | None = None,
    ):
        """logits: the target's [B, gamma + 1, V] and the draft's [B, gamma, V], or fresh ones.
        library: another one than the runtime's, such as the GPU's."""
        rng = np.random.default_rng()
        self.target, self.draft = logits or random_logits(vocab_size, gamma, batch)
        self.vocab_size, self.gamma, self.batch, self.params = vocab_size, gamma, batch, params
        context = rng.integers(0, vocab_size, 500)
        self.places = [
            SlotSampling(replace(params, seed=b), gamma, 500, b, context, name=f"slot {b}")
            for b in range(batch)
        ]
        self.sampler = RoundSampler(vocab_size, gamma, batch, threads, library=library)
        self._numpy = _Nudged(vocab_size)

    def kernel_draw(self, keep: bool = True) -> list[list[int]]:
        return self._draw(self.sampler, keep)

    def kernel_verify(self) -> list[Verdict]:
        return self.sampler.verify(self.target, self.draft)

    def numpy_draw(self) -> list[list[int]]:
        return self._draw(self._numpy, True)

    def numpy_verify(self) -> list[Verdict]:
        """Of what `numpy_draw` has drawn."""
        return self._numpy.verify(self.target)

    def kernel_outcomes(self) -> list[RoundResult]:
        return _outcomes(self.kernel_draw(), self.kernel_verify())

    def numpy_outcomes(self, nudge: float = 0.0) -> list[RoundResult]:
        """nudge: relative, on every uniform."""
        self._numpy.nudge = nudge
        outcomes = _outcomes(self.numpy_draw(), self.numpy_verify())
        self._numpy.nudge = 0.0
        return outcomes

    def _draw(self, sampler: Sampler, keep: bool) -> list[list[int]]:
        sampler.begin(self.places)
        steps = [
            sampler.draw(self.draft[:, step], step, keep=keep).copy() for step in range(self.gamma)
        ]
        drafts: list[list[int]] = np.stack(steps, axis=1).tolist()
        return drafts

    def transformers_verify(self, drafts: list[list[int]]) -> Callable[[], None] | None:
        """See `transformers_call`. None where Transformers is missing."""
        try:
            import torch

            target, draft = torch.from_numpy(self.target), torch.from_numpy(self.draft)
            return transformers_call(target, draft, torch.tensor(drafts), self.params)
        except ImportError:
            return None

    def bytes_read(self, verdicts: list[Verdict]) -> int:
        """What this round has to read: the rows up to the first rejection and, where there was one,
        the draft's row. By the block rule all."""
        rows = 0
        for verdict in verdicts:
            rows += len(verdict.ratios) if verdict.accepted < self.gamma else self.gamma + 1
            rows += verdict.accepted < self.gamma
        return rows * self.vocab_size * self.target.itemsize


class _Nudged(NumpySampler):
    """The reference, with every uniform a little larger or smaller."""

    nudge = 0.0

    def _uniform(self, place: SlotSampling, step: int, purpose: Purpose) -> float:
        return min(super()._uniform(place, step, purpose) * (1 + self.nudge), ONE)


def _outcomes(drafts: list[list[int]], verdicts: list[Verdict]) -> list[RoundResult]:
    return [(d, v.accepted, v.token) for d, v in zip(drafts, verdicts, strict=True)]


def disagreements(round_: Round, ours: list[RoundResult]) -> list[int]:
    """The slots in which `ours` is not what the reference says, token for token.

    Where they differ, the reference decides again with its uniforms a few float32 roundings lower
    and higher: if that changes its own mind, the slot was on an edge, which says nothing.
    """
    theirs = round_.numpy_outcomes()
    differ = [b for b, (a, c) in enumerate(zip(ours, theirs, strict=True)) if a != c]
    if differ:
        lower, higher = round_.numpy_outcomes(-4e-6), round_.numpy_outcomes(4e-6)
        differ = [b for b in differ if lower[b] == higher[b]]
    return differ


def transformers_call(
    target: Any, draft: Any, drafts: Any, params: SamplingParams
) -> Callable[[], None]:
    """What assisted generation does with the logits of a round, on whatever device they are.

    target: float32 [B, gamma + 1, V], draft: [B, gamma, V], drafts: [B, gamma] torch tensors. Its
    processors on the target's rows, then `_speculative_sampling`; the draft's scores come processed
    out of its own generate.
    """
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as processes
    from transformers.generation.utils import _speculative_sampling

    gamma = drafts.shape[1]
    processors = LogitsProcessorList([processes.TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(processes.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(processes.TopPLogitsWarper(params.top_p))
    scores = draft / params.temperature
    if params.top_k or params.top_p < 1:
        flat = scores.reshape(-1, scores.shape[-1])
        for processor in list(processors)[1:]:
            flat = processor(drafts[:, :0], flat)
        scores = flat.reshape(draft.shape)

    def call() -> None:
        for b in range(len(drafts)):
            ids = drafts[b : b + 1]
            new_logits = target[b : b + 1].clone()  # assisted generation's own copy
            for i in range(gamma + 1):
                new_logits[:, i] = processors(ids[:, :i], new_logits[:, i])
            _speculative_sampling(ids, scores[b : b + 1], gamma, new_logits)

    return call
