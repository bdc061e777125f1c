"""The native kernel compared with the NumPy reference, and with itself, case by case.

The CPU library is tested, and a GPU if there is one; test_kernel_cuda.py compares the emulated CUDA
kernels with the CPU library bitwise.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from samplers import (
    BLOCK,
    COUNTED,
    NUMPY,
    OPTIONS,
    SETS,
    TOKEN,
    Case,
    by_library,
    by_reference,
    cpu_library,
    disagreements,
    instructions,
    open_backend,
    open_sampler,
    same,
    warp_weights,
)

from runtime.sampling.native import RoundSampler
from runtime.sampling.rules import Verdict
from runtime.sampling.warp import SamplingParams

slow = pytest.mark.slow


@pytest.fixture(params=["cpu", "cuda"])
def library(request):
    return open_backend(request.param)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("vocab_size", [127, 2500])
def test_agrees_with_the_reference(library, vocab_size, options):
    params = SamplingParams(**options)
    for gamma in (0, 1, 3, 8):
        case = Case(1, vocab_size, gamma, slots=1 + gamma % 4)
        assert not disagreements(library, case, params)


@pytest.mark.parametrize("options", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("vocab_size", [8, 2500])
def test_counts_and_biases_agree_with_the_reference(vocab_size, options):
    """A small vocabulary repeats ids: in the context, among the drafts, with a bias."""
    params = SamplingParams(**options)
    for seed, gamma in enumerate((0, 1, 3, 8)):
        case = Case(seed, vocab_size, gamma, slots=4)
        assert not disagreements(cpu_library(), case, params)


LARGE = (51_864, 128_256, 151_936)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("plain", {"vocab_size": 128_256})]
    + [(name, {"vocab_size": 151_936}) for name in ("all", "top-p")]
    + [("block", {"vocab_size": 51_864}), ("coupled", {"vocab_size": 51_864})]
    + [(name, {"dtype": d}) for d in ("float16", "bfloat16") for name in ("top-k", "greedy")]
    + [("block", {"dtype": "float16"}), ("plain", {"offset": 1e4}), ("block", {"offset": 1e4})]
    + [
        pytest.param(name, {"vocab_size": vocab_size}, marks=slow)
        for vocab_size in LARGE
        for name in ("plain", "greedy", "all", "top-p", "block", "sigmoid-narrow")
    ],
)
def test_agrees_on_large_vocabularies_half_precision_and_far_from_zero(library, name, shape):
    shape = {"vocab_size": 2500, **shape}
    case = Case(2, gamma=3, slots=2 if shape["vocab_size"] in LARGE else 4, **shape)
    assert not disagreements(library, case, SamplingParams(**OPTIONS[name]))


def test_slots_of_one_call_may_draft_differently_many_tokens(library):
    case = Case(5, 500, gamma=5, slots=4)
    places = case.places(TOKEN, gammas=[0, 5, -1, 2])
    drafts, verdicts = by_library(library, case, places)
    for b in (0, 1, 3):
        drawn, verdict = by_reference(case, places[b])
        assert drafts[b][: places[b].gamma] == drawn and same(verdicts[b], verdict)
    assert verdicts[2] == Verdict(0, -1, ())  # took no part


@pytest.mark.parametrize(
    "name", ["plain", "all", "block-top-p", "coupled", "sigmoid-narrow", "greedy"]
)
def test_the_draft_rows_may_come_from_the_draw_or_from_logits(library, name):
    """The same round with the normalisers that `draw` passes to `verify`, or without them."""
    case = Case(6, 2500, gamma=4, slots=4)
    places = case.places(SamplingParams(**OPTIONS[name]))
    drafts, verdicts = by_library(library, case, places)
    sampler = RoundSampler(2500, 4, 4, library=library)
    sampler.begin(places)
    sampler.drafts[:] = drafts
    assert sampler.verify(case.target, case.draft) == verdicts


def test_a_draft_without_a_distribution(library):
    options = (TOKEN, BLOCK, SamplingParams(temperature=1.0, top_k=3))
    for params, vocab_size in itertools.product(options, (300, 2500)):
        case, found = Case(7, vocab_size, gamma=4, slots=16), []
        for each in (library, NUMPY):
            sampler = open_sampler(each, vocab_size, 4, 16)
            sampler.begin(case.places(params))
            sampler.drafts[:] = case.p[:, :4].argmax(axis=2)
            found.append(sampler.verify(case.target))
        assert all(map(same, *found)) and len({verdict.accepted for verdict in found[0]}) > 1


# --- results depend on the slot alone ---------------------------------------------------------


@pytest.mark.parametrize("name", ["all", "block", pytest.param("sigmoid", marks=slow), "greedy"])
def test_a_slot_does_not_depend_on_its_neighbours_or_on_threads(library, name):
    case = Case(8, 128_256, gamma=4, slots=6)
    places = case.places(SamplingParams(**OPTIONS[name]))
    drafts, verdicts = by_library(library, case, places)
    assert by_library(library, case, places, threads=4) == (drafts, verdicts)
    backwards = by_library(library, case, places[::-1], threads=3)
    assert backwards == (drafts[::-1], verdicts[::-1])
    case.target[:3] = np.nan  # broken logits of other slots have no effect
    alone = by_library(library, case, places[4:5])
    assert alone == (drafts[4:5], verdicts[4:5])


def test_instruction_sets_are_those_of_the_processor():
    text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    lines = dict(line.partition(":")[::2] for line in text.replace("\t", "").splitlines())
    has = lines.get("flags", lines.get("Features", "")).split()
    available = []
    for name, needed in SETS.items():
        with instructions(name) as can:
            assert can == needed.issubset(has)
            available += [name] * can
    assert cpu_library().outrider_instruction_set().decode() == available[0]


def test_instruction_sets_give_the_same_bits():
    library = cpu_library()
    options = [OPTIONS[n] for n in ("all", "block-top-p", "sigmoid-narrow", "cool", "greedy")]
    cases = [
        (case, case.places(SamplingParams(**chosen)))
        for chosen in (*options, *COUNTED.values())
        for case in (Case(9, 2500, 4, 4), Case(9, 2500, 4, 4, "float16"))
    ]

    def everything():
        weights = [warp_weights(c.p[0, 0], s[0], library=library) for c, s in cases]
        return [by_library(library, *c) for c in cases], [(w.tobytes(), t) for w, t in weights]

    want, compared = everything(), 0
    for name in SETS:
        with instructions(name) as there:
            if there:
                assert library.outrider_instruction_set() == name.encode()
                assert everything() == want
                compared += 1
    assert compared and not library.outrider_use(b"abacus")


@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_misaligned_logits_with_odd_strides(library, dtype, shift):
    """A GPU cannot read these: OnGpu copies them to aligned memory."""
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
    assert by_library(library, case, places) == want
