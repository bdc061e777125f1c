"""The native kernel against the NumPy reference, and against itself: case by case.

Every backend runs the same tests: the CPU library, the CUDA kernels emulated on the host, and the
GPU, whose tests are skipped, with the reason, where there is none.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from on_gpu import OnGpu, open_gpu

from plugins.tools.build import BuildError, build, build_emulated
from runtime.files.errors import OutriderError
from runtime.sampling import kernel
from runtime.sampling.kernel import RoundSampler, SlotSampling, warp_weights
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.rules import Verdict, verify
from runtime.sampling.warp import Distribution, SamplingParams, warp

LIBRARIES = Path(__file__).parents[2] / "build" / "lib"
ONE = math.nextafter(1.0, 0.0)
BACKENDS = ["cpu", "emulated", "cuda"]
TOKEN = SamplingParams(temperature=1.0)
BLOCK = SamplingParams(temperature=1.0, verify="block")
SIGMOID = SamplingParams(temperature=1.0, verify="sigmoid")


@cache
def cpu_library() -> ctypes.CDLL:
    try:
        return kernel.load(build(LIBRARIES))
    except BuildError as error:
        pytest.skip(f"liboutrider cannot be built here: {error}")


@cache
def emulated_library() -> ctypes.CDLL:
    """The CPU library with the draw and the verification of the emulated CUDA kernels."""
    try:
        library = kernel.load(build_emulated(LIBRARIES))
    except BuildError as error:
        pytest.skip(f"the emulation cannot be built here: {error}")
    for name in ("draw", "verify"):
        function = getattr(library, f"outrider_emulate_{name}")
        function.restype, function.argtypes = kernel._SIGNATURES[f"outrider_{name}"]
        setattr(library, f"outrider_{name}", function)
    return library


def open_backend(name: str) -> ctypes.CDLL | OnGpu:
    if name == "cuda":
        try:
            return open_gpu()
        except OutriderError as error:
            pytest.skip(f"no GPU: {error.cause}")
    return emulated_library() if name == "emulated" else cpu_library()


@pytest.fixture(params=BACKENDS)
def library(request):
    return open_backend(request.param)


# --- a round, by the reference and by the library ---------------------------------------------


def as_dtype(logits, dtype):
    """float32 logits rounded to `dtype`: (what the library gets, the same values as float32)."""
    if dtype == "bfloat16":
        bits = (logits.view(np.uint32) + 0x8000) >> 16
        return bits.astype(np.uint16), (bits << 16).astype(np.uint32).view(np.float32)
    array = logits.astype(dtype)
    return array, array.astype(np.float32)


class Case:
    """Logits of a round for B slots: peaked like a language model's, q near p."""

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
                name=f"slot {b}",
            )
            for b in range(self.slots)
        ]


def by_library(library, case, places, keep=True, threads=1, uniforms=(None, None)):
    """(drafts, verdicts) of one round."""
    sampler = RoundSampler(
        case.vocab_size, case.gamma, len(places), threads=threads, library=library
    )
    sampler.begin(places)
    for step in range(case.gamma):
        sampler.draw(case.draft[:, step], step, uniforms[0], keep)
    draft = None if keep else case.draft
    verdicts = sampler.verify(case.target, draft, uniforms[1])
    return sampler.drafts[: len(places)].tolist(), verdicts


def by_reference(case, place, drafts=None, nudge=0.0):
    """The same of one slot by NumPy. nudge: relative, on every uniform. drafts: given."""
    params, b, start = place.params, place.index, place.position
    lane = start if params.verify == "block" else 0

    def u(step, purpose):
        if params.temperature == 0:
            return 0.0
        return min(ONE, uniform(params.seed, start + step, purpose, lane) * (1 + nudge))

    def warped(rows, i, drawn):
        context = [*place.context, *drawn[:i]]
        suppress = place.suppress if i < place.suppress_rows else ()
        return warp(rows[b, i], params, np.array(context), suppress)

    drawn, q = [], []
    for i in range(place.gamma):
        q.append(warped(case.q, i, drawn))
        drawn.append(q[i].draw(u(i, Purpose.DRAFT)) if drafts is None else drafts[i])
    p = [warped(case.p, i, drawn) for i in range(place.gamma + 1)]
    accept = [u(i, Purpose.ACCEPT) for i in range(place.gamma)]
    return drawn, verify(p, q, drawn, accept, u(0, Purpose.RESIDUAL), params)


def same(ours: Verdict, theirs: Verdict) -> bool:
    return (ours.accepted, ours.token) == (theirs.accepted, theirs.token) and ours.ratios == (
        pytest.approx(theirs.ratios, rel=2e-5, abs=1e-9)
    )


def disagreements(library, case, params, gammas=None, keep=True):
    """Slots where library and reference differ, although no uniform is near an edge."""
    places = case.places(params, gammas)
    drafts, verdicts = by_library(library, case, places, keep)
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
    "sigmoid": {"temperature": 1.0, "verify": "sigmoid"},
    "sigmoid-narrow": {
        "temperature": 0.8, "verify": "sigmoid", "top_k": 40, "sigmoid_alpha": -2.0,
        "sigmoid_beta": 2.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab_size", [8, 111, 127, 1024, 2500])
def test_agrees_with_the_reference(library, vocab_size, options):
    params = SamplingParams(**options)
    for gamma in range(9):
        case = Case(1, vocab_size, gamma, slots=1 + gamma % 4)
        assert not disagreements(library, case, params)


@pytest.mark.parametrize("name", ["plain", "greedy", "all", "top-p", "block", "sigmoid-narrow"])
@pytest.mark.parametrize("vocab_size", [51_864, 128_256, 151_936])
def test_agrees_with_the_reference_on_large_vocabularies(library, vocab_size, name):
    case = Case(2, vocab_size, gamma=3, slots=2)
    assert not disagreements(library, case, SamplingParams(**OPTIONS[name]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "greedy", "top-k", "block"])
def test_agrees_on_half_precision(library, name, dtype):
    for vocab_size in (111, 2500):
        case = Case(3, vocab_size, gamma=4, slots=4, dtype=dtype)
        assert not disagreements(library, case, SamplingParams(**OPTIONS[name]))


@pytest.mark.parametrize("name", ["plain", "greedy", "block"])
def test_agrees_on_logits_far_from_zero(library, name):
    case = Case(4, 2500, gamma=4, slots=4, offset=1e4)
    assert not disagreements(library, case, SamplingParams(**OPTIONS[name]))


def test_slots_of_one_call_may_draft_differently_many_tokens(library):
    case = Case(5, 500, gamma=5, slots=4)
    places = case.places(TOKEN, gammas=[0, 5, -1, 2])
    drafts, verdicts = by_library(library, case, places)
    for b in (0, 1, 3):
        drawn, verdict = by_reference(case, places[b])
        assert drafts[b][: places[b].gamma] == drawn and same(verdicts[b], verdict)
    assert verdicts[2] == Verdict(0, -1, ())  # sat out


@pytest.mark.parametrize("name", ["plain", "all", "block-top-p", "sigmoid-narrow", "greedy"])
def test_the_draft_rows_may_come_from_the_draw_or_from_logits(library, name):
    """Kept by `draw`, read in place, or with nothing handed over: the same round."""
    case = Case(6, 2500, gamma=4, slots=4)
    places = case.places(SamplingParams(**OPTIONS[name]))
    drafts, verdicts = by_library(library, case, places)
    assert by_library(library, case, places, keep=False) == (drafts, verdicts)
    sampler = RoundSampler(2500, 4, 4, library=library)
    sampler.begin(places)
    sampler.drafts[:] = drafts
    assert sampler.verify(case.target, case.draft) == verdicts


def test_a_draft_without_a_distribution(library):
    options = (TOKEN, BLOCK, SamplingParams(temperature=1.0, top_k=3))
    for params, vocab_size in itertools.product(options, (300, 2500)):
        case = Case(7, vocab_size, gamma=4, slots=16)
        places = case.places(params)
        sampler = RoundSampler(vocab_size, 4, 16, library=library)
        sampler.begin(places)
        sampler.drafts[:] = case.p[:, :4].argmax(axis=2)
        for place, verdict in zip(places, sampler.verify(case.target), strict=True):
            b, ids = place.index, sampler.drafts[place.index].tolist()
            lane = place.position if params.verify == "block" else 0
            at = [(place.params.seed, place.position + i) for i in range(4)]
            p = [
                warp(case.p[b, i], params, (), place.suppress if i < place.suppress_rows else ())
                for i in range(5)
            ]
            accept = [uniform(*a, Purpose.ACCEPT, lane) for a in at]
            final = uniform(*at[0], Purpose.RESIDUAL, lane)
            q = [Distribution.point(x, vocab_size) for x in ids]
            assert same(verdict, verify(p, q, ids, accept, final, params))


# --- results depend on the slot alone ---------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "all", "block", "sigmoid", "greedy"])
def test_a_slot_does_not_depend_on_its_neighbours_or_on_threads(library, name):
    case = Case(8, 128_256, gamma=4, slots=6)
    places = case.places(SamplingParams(**OPTIONS[name]))
    drafts, verdicts = by_library(library, case, places)
    assert by_library(library, case, places, threads=4) == (drafts, verdicts)
    backwards = by_library(library, case, places[::-1], threads=3)
    assert backwards == (drafts[::-1], verdicts[::-1])
    case.target[:3] = np.nan  # others broken: this one does not care
    alone = by_library(library, case, places[4:5])
    assert alone == (drafts[4:5], verdicts[4:5])


def test_instruction_sets_give_the_same_bits():
    library = cpu_library()
    best = library.outrider_instruction_set()
    names = ["all", "block-top-p", "sigmoid-narrow", "cool", "greedy"]
    cases = [
        (case, case.places(SamplingParams(**OPTIONS[name])))
        for name in names
        for case in (Case(9, 2500, 4, 4), Case(9, 2500, 4, 4, "float16"))
    ]

    def everything():
        weights = [warp_weights(c.p[0, 0], s[0], library=library) for c, s in cases]
        return [by_library(library, *c) for c in cases], [(w.tobytes(), t) for w, t in weights]

    want, compared = everything(), 0
    try:
        for name in (b"avx512", b"avx2", b"plain"):
            if library.outrider_use(name):
                assert library.outrider_instruction_set() == name
                assert everything() == want
                compared += 1
    finally:
        library.outrider_use(best)
    assert compared >= 1 and not library.outrider_use(b"abacus")


@pytest.mark.parametrize("shift", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_misaligned_logits_with_odd_strides(library, dtype, shift):
    case = Case(10, 2500, gamma=3, slots=2, dtype=dtype)
    places = case.places(SamplingParams(**OPTIONS["all"]))
    want = by_library(library, case, places)

    def moved(array):
        slots, rows, width = array.shape
        row = width * array.itemsize + 13
        memory = np.full(slots * (rows * row + 5) + shift + 64, 0xFF, np.uint8)
        copy = np.ndarray(
            array.shape, array.dtype, memory, shift, (rows * row + 5, row, array.itemsize)
        )
        copy[:] = array
        return copy

    case.target, case.draft = moved(case.target), moved(case.draft)
    assert shift % 2 == 0 or case.target.ctypes.data % case.target.itemsize
    if library is emulated_library():  # a GPU cannot read these; OnGpu copies them in line
        with pytest.raises(ValueError, match="out of range"):
            by_library(library, case, places)
        return
    assert by_library(library, case, places) == want
    assert by_library(library, case, places, keep=False) == want
