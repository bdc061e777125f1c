"""The samplers under test, and rounds for them: NumPy, the CPU library, the CUDA kernels emulated
on the host, and a GPU, whose tests are skipped with a reason on machines without one.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cuda_standin import FakeDriver, make_device
from on_gpu import OnGpu, open_gpu

from plugins.tools.build import BuildError, build
from runtime.files.errors import OutriderError
from runtime.files.graphs import GAMMA_LIMIT
from runtime.sampling import kernel, native
from runtime.sampling.native import RoundSampler
from runtime.sampling.philox import Purpose
from runtime.sampling.reference import NumpySampler
from runtime.sampling.rules import Verdict
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams, warp

LIBRARIES = Path(__file__).parents[2] / "build" / "lib"
ONE = math.nextafter(1.0, 0.0)  # the largest uniform
BISECTIONS = 26  # locate a boundary to within 2^-26
NUMPY = "numpy"  # in place of a library
TOKEN = SamplingParams(temperature=1.0)
BLOCK = SamplingParams(temperature=1.0, verify="block")
SIGMOID = SamplingParams(temperature=1.0, verify="sigmoid")
OPTIONS = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "greedy": {},
    "greedy-penalty": {"repetition_penalty": 1.3},
    "greedy-lenient": {"lenience": 0.4},
    "top-k": {"temperature": 0.8, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.4, "min_p": 0.05},
    "all": {
        "temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2
    },
    "lenient": {"temperature": 1.0, "lenience": 0.3},
    "block": {"temperature": 1.0, "verify": "block"},
    "block-top-p": {
        "temperature": 0.7, "verify": "block", "top_p": 0.95, "repetition_penalty": 1.1
    },
    "block-greedy": {"verify": "block"},
    "coupled": {"temperature": 1.0, "verify": "coupled"},
    "coupled-all": {
        "temperature": 0.8, "verify": "coupled", "top_k": 60, "top_p": 0.95, "min_p": 0.01,
        "repetition_penalty": 1.2,
    },
    "sigmoid": {"temperature": 1.0, "verify": "sigmoid"},
    "sigmoid-narrow": {
        "temperature": 0.8, "verify": "sigmoid", "top_k": 40, "sigmoid_alpha": -2.0,
        "sigmoid_beta": 2.0,
    },
}  # fmt: skip
BIASES = {1: 3.0, 4: -2.5, 6: -100.0, 10_000_000: 1.0}
COUNTED = {  # CPU only
    "counts": {"temperature": 1.0, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "counts-greedy": {"frequency_penalty": -0.3, "presence_penalty": -1.0, "logit_bias": BIASES},
    "counts-all": {
        "temperature": 0.8, "frequency_penalty": 0.5, "presence_penalty": -0.2, "top_p": 0.9,
        "repetition_penalty": 1.2, "verify": "block", "logit_bias": BIASES,
    },
}  # fmt: skip


# --- samplers ---------------------------------------------------------------------------------


@cache
def cpu_library() -> ctypes.CDLL:
    try:
        return kernel.load_file(build(LIBRARIES))
    except BuildError as error:
        pytest.skip(f"liboutrider cannot be built here: {error}")


# Instruction sets, best first, and the processor flags that each needs.
SETS = {
    "avx512vnni": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avxvnni": {"avx2", "fma", "avx_vnni"},
    "avx2": {"avx2", "fma"},
    "dotprod": {"asimddp"},
    "neon": {"asimd"},
    "plain": set(),
}


@contextmanager
def instructions(name: str) -> Iterator[bool]:
    """Make the CPU library use this instruction set. Yields whether the processor has it."""
    library = cpu_library()
    best = library.outrider_instruction_set()
    try:
        yield bool(library.outrider_use(name.encode()))
    finally:
        library.outrider_use(best)


@cache
def emulated_library() -> OnGpu:
    """The CPU library with the draw and the verification of the emulated CUDA kernels."""
    return OnGpu(make_device(FakeDriver()), cpu_library())


def open_backend(name: str) -> ctypes.CDLL | OnGpu | str:
    if name == "cuda":
        try:
            return open_gpu()
        except OutriderError as error:
            if os.environ.get("OUTRIDER_TRACEBACK"):  # `make gpu-check` requires a GPU
                raise
            pytest.skip(f"no GPU: {error.cause}")
    openers = {"cpu": cpu_library, "emulated": emulated_library}
    return openers[name]() if name in openers else NUMPY


class NumpyRounds(NumpySampler):
    """The reference with the interface of `RoundSampler`: `drafts`, uniforms and a draft's
    vocabulary size. nudge: relative change of every uniform that is not given."""

    def __init__(self, vocab_size, width, slots=1, draft_vocab_size=None, nudge=0.0, **_):
        super().__init__(vocab_size)
        self.nudge = nudge
        self.drafts = np.zeros((slots, width), np.int64)
        self._draft_vocab_size, self._given_uniforms, self._drew = draft_vocab_size, None, False

    def begin(self, slots):
        super().begin(slots)
        self._drew = False

    def draw(self, logits, step, uniforms=None, first_slot=0):
        self._given_uniforms, self._drew = uniforms, True
        tokens = super().draw(logits, step, first_slot=first_slot)
        self.drafts[: len(tokens), step] = tokens
        return tokens

    def set_drafts(self, drafts, first_slot=0):
        for b, tokens in enumerate(drafts):
            self.drafts[b, : len(tokens)] = tokens

    def verify(self, logits, draft_logits=None, uniforms=None, first_slot=0):
        self._given_uniforms = uniforms
        if not self._drew:
            super().set_drafts(
                [self.drafts[b, : p.gamma].tolist() for b, p in enumerate(self._samplings)]
            )
        if isinstance(draft_logits, np.ndarray):
            draft_logits = list(draft_logits.swapaxes(0, 1))
        return super().verify(logits, draft_logits, first_slot=first_slot)

    def _warp(self, place, drafted, row, model):
        shared = self.vocab_size
        if model == "draft" and self._draft_vocab_size:
            self.vocab_size = self._draft_vocab_size
        try:
            return super()._warp(place, drafted, row, model)
        finally:
            self.vocab_size = shared

    def _uniform(self, place, step, purpose):
        if self._given_uniforms is None:
            return min(ONE, super()._uniform(place, step, purpose) * (1 + self.nudge))
        given = self._given_uniforms[next(b for b, p in enumerate(self._samplings) if p is place)]
        return float(given[-1 if purpose is Purpose.RESIDUAL else step])


def open_sampler(library, vocab_size, width, slots=1, **options):
    if library is NUMPY:
        return NumpyRounds(vocab_size, width, slots, **options)
    return RoundSampler(vocab_size, width, slots, library=library, **options)


def warp_weights(logits, place, library):
    """The warped weights [V] of one row from a library, and their total."""
    sampler = RoundSampler(logits.shape[-1], GAMMA_LIMIT, library=library)
    sampler.begin([place])
    weights, total = np.empty(logits.shape[-1], np.float32), ctypes.c_double()
    row = native._logits(logits[None, None], logits.shape[-1])
    status = library.outrider_warp(
        ctypes.addressof(row), sampler._at_slots, weights.ctypes.data, ctypes.addressof(total),
        *sampler._memory,
    )  # fmt: skip
    assert status == 0, kernel.status_text(library, status)
    return weights, total.value


def weights_of(library, logits, place):
    """The warped weights of one row, and their total."""
    if library is not NUMPY:
        return warp_weights(logits, place, library=library)
    suppress = place.suppress if place.suppress_rows and place.suppress is not None else ()
    context = () if place.context is None else place.context
    row = warp(logits, place.params, context, suppress, output_start=place.output_start)
    return (row.probs() if row.weights is None else row.weights), row.total


# --- a round, by the reference and by a library -----------------------------------------------


def as_dtype(logits, dtype):
    """float32 logits rounded to `dtype`: (what the library gets, the same values as float32)."""
    if dtype == "bfloat16":
        bits = (logits.view(np.uint32) + 0x8000) >> 16
        return bits.astype(np.uint16), (bits << 16).astype(np.uint32).view(np.float32)
    array = logits.astype(dtype)
    return array, array.astype(np.float32)


class Case:
    """Logits of a round for B slots: peaked as a language model's are, with q near p."""

    def __init__(self, seed, vocab_size, gamma, slots, dtype="float32", noise=0.7, offset=0.0):
        rng = np.random.default_rng([seed, vocab_size, gamma, slots])
        target = rng.normal(0, 2.5, (slots, gamma + 1, vocab_size)).astype(np.float32)
        draft = target[:, :gamma] + noise * rng.normal(size=(slots, gamma, vocab_size))
        self.vocab_size, self.gamma, self.slots = vocab_size, gamma, slots
        self.target, self.p = as_dtype(target + np.float32(offset), dtype)
        self.draft, self.q = as_dtype(draft.astype(np.float32) + np.float32(offset), dtype)
        self.context = rng.integers(0, vocab_size, (slots, 20))
        self.suppress = rng.integers(0, vocab_size, 3)

    def places(self, params, gammas=None):
        return [
            SlotSampling(
                replace(params, seed=1000 + b),
                gamma=self.gamma if gammas is None else gammas[b],
                position=20 + 7 * b,
                index=b,
                context=self.context[b],
                suppress=self.suppress,
                suppress_rows=2,
                output_start=11,
            )
            for b in range(self.slots)
        ]


def by_library(library, case, places, threads=1, uniforms=(None, None)):
    """(drafts, verdicts) of one round."""
    sampler = open_sampler(library, case.vocab_size, case.gamma, len(places), threads=threads)
    sampler.begin(places)
    for step in range(case.gamma):
        sampler.draw(case.draft[:, step], step, uniforms[0])
    draft = case.draft if case.gamma else None
    verdicts = sampler.verify(case.target, draft, uniforms[1])
    return sampler.drafts[: len(places)].tolist(), verdicts


def by_reference(case, place, drafts=None, nudge=0.0):
    """(drafts, verdict) of one slot from NumPy. drafts: use these instead of drawing. nudge: see
    `NumpyRounds`."""
    sampler = NumpyRounds(case.vocab_size, case.gamma, nudge=nudge)
    sampler.begin([place])
    if drafts is None:
        drafts = [int(sampler.draw(case.q[:, i], i)[0]) for i in range(place.gamma)]
    sampler.drafts[0, : len(drafts)] = drafts
    return drafts, sampler.verify(case.p, case.q)[0]


def same(ours: Verdict, theirs: Verdict) -> bool:
    return (ours.accepted, ours.token) == (theirs.accepted, theirs.token) and ours.ratios == (
        pytest.approx(theirs.ratios, rel=2e-5, abs=1e-9)
    )


def disagreements(library, case, params):
    """Slots where library and reference differ although no uniform is near an edge."""
    places = case.places(params)
    drafts, verdicts = by_library(library, case, places)
    wrong = []
    for place, ids, verdict in zip(places, drafts, verdicts, strict=True):
        ids = ids[: place.gamma]
        drawn, _ = by_reference(case, place)
        if ids != drawn:
            nearby = {tuple(by_reference(case, place, nudge=e)[0]) for e in (-4e-6, 4e-6)}
            if tuple(drawn) in nearby and len(nearby) == 1:
                wrong.append((place, "draft", ids, drawn))
        theirs = [by_reference(case, place, ids, e)[1] for e in (0, -4e-6, 4e-6)]
        if not any(same(verdict, other) for other in theirs):
            wrong.append((place, "verify", verdict, theirs[0]))
    return wrong
