"""The native kernel, case by case: warping, the edge table of the specification, the interface."""

from __future__ import annotations

import ctypes
import math
import subprocess

import numpy as np
import pytest
from proof import ONE
from test_kernel import BACKENDS, BLOCK, OPTIONS, SIGMOID, TOKEN, Case, open_backend
from test_philox import KNOWN_ANSWERS

from plugins.tools.build import BuildError, build, find_compiler, includes
from runtime.files.errors import OutriderError
from runtime.gpu import launch as cuda_kernel
from runtime.sampling import kernel
from runtime.sampling.kernel import RoundSampler, SlotSampling, warp_weights
from runtime.sampling.philox import Purpose, philox4x32, uniform
from runtime.sampling.rules import Verdict
from runtime.sampling.warp import SamplingParams, warp

RULES = pytest.mark.parametrize(
    "params", [TOKEN, BLOCK, SIGMOID], ids=["token", "block", "sigmoid"]
)
EXACT = pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])


@pytest.fixture(params=BACKENDS)
def library(request):
    return open_backend(request.param)


# --- warping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in OPTIONS if not n.startswith(("greedy", "block-gr"))])
@pytest.mark.parametrize("vocab_size", [8, 1025, 51_864])
def test_weights_are_those_of_the_reference(library, vocab_size, name):
    params = SamplingParams(**OPTIONS[name])
    case = Case(11, vocab_size, 1, 3)
    for place in case.places(params):
        row = case.p[place.index, 0]
        got, total = warp_weights(row, place, library=library)
        want = warp(row, params, place.context, place.suppress)
        different = (got > 0) != (want.weights > 0)
        assert not different[want.weights > 1e-30].any()
        np.testing.assert_allclose(got / total, want.probs(), rtol=5e-6, atol=1e-30)
        assert total == pytest.approx(got.sum(dtype=np.float64), rel=1e-6)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 9.0])
@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.999])
def test_nucleus_against_a_float64_sort(library, scale, top_p):
    rng = np.random.default_rng(12)
    for vocab_size in (111, 151_936):
        logits = (scale * rng.normal(size=vocab_size)).astype(np.float32)
        place = SlotSampling(SamplingParams(temperature=1.0, top_p=top_p), 0, 0)
        weights, _ = warp_weights(logits, place, library=library)
        order = np.argsort(logits, kind="stable")
        mass = np.cumsum(np.exp(np.float64(logits[order]) - logits.max()))
        kept = np.zeros(vocab_size, bool)
        kept[order] = mass > (1 - top_p) * mass[-1]
        # one token, where two sums round to two sides of the edge
        assert ((weights > 0) != kept).sum() <= 1


@pytest.mark.parametrize(
    ("row", "top_p", "kept"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], 0.5, [4, 5, 6, 7]),  # of equals the lower ids go first
        ([0, 0, 0, 0, 0, 0, 0, 0], 0.9, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 0, 0, 0, 0, 0, 0, 0], 0.01, [7]),
        ([5, 0, 0, 0, 0, 0, 0, 5], 0.5, [0, 7]),
        ([5, 0, 0, 0, 0, 0, 0, 5], 0.4, [7]),
    ],
)
def test_ties_at_the_edge_of_the_nucleus(library, row, top_p, kept):
    place = SlotSampling(SamplingParams(temperature=1.0, top_p=top_p), 0, 0)
    weights, _ = warp_weights(np.array(row, np.float32), place, library=library)
    assert np.flatnonzero(weights).tolist() == kept


@pytest.mark.parametrize("top_k", [1, 5, 150, 2000, 151_935])
def test_top_k_keeps_ties(library, top_k):
    rng = np.random.default_rng(13)
    for logits in (rng.normal(size=151_936), rng.integers(0, 9, 151_936), np.zeros(3000)):
        row = logits.astype(np.float32)
        place = SlotSampling(SamplingParams(temperature=1.0, top_k=top_k), 0, 0)
        weights, _ = warp_weights(row, place, library=library)
        edge = np.sort(row)[-min(top_k, len(row))]
        assert np.array_equal(weights > 0, row >= edge)


# --- the edge table of the specification ------------------------------------------------------


def one(library, p, q, drafts, params, uniforms, width=None, **options):
    """The verdict of one slot on rows given as lists of logits."""
    target, draft = np.array(p, np.float32)[None], np.array(q, np.float32)[None]
    gamma = len(drafts)
    sampler = RoundSampler(
        width or target.shape[2], gamma, draft_vocab_size=draft.shape[2], library=library, **options
    )
    sampler.begin([SlotSampling(params, gamma, 17, name="slot 3")])
    sampler.drafts[0] = drafts
    return sampler.verify(target, draft, np.array([uniforms], np.float64))[0]


NO = -math.inf


@RULES
def test_zero_target_or_draft_probability_is_rejected_at_u_0(library, params):
    p, q = [NO, 0, 0], [0, 0, 0]
    verdict = one(library, [p, p], [q], [0], params, [0, 0])
    assert verdict.accepted == 0 and verdict.ratios == (0.0,) and verdict.token != 0
    assert one(library, [p, p], [q], [1], params, [0, 0]).accepted == 1  # control
    assert one(library, [q, q], [p], [0], params, [0, 0.5]).ratios == (0.0,)


@EXACT
def test_the_test_is_strict(library, params):
    p, q = [math.log2(1), math.log2(1)], [0, math.log(3)]  # 1/2, 1/2 against 1/4, 3/4
    ratio = one(library, [p, p], [q], [1], params, [0.0, 0.0]).ratios[0]
    assert ratio == pytest.approx(2 / 3)
    edge = ratio if params is BLOCK else _edge(library, p, q, params)
    assert one(library, [p, p], [q], [1], params, [edge, 0.0]).accepted == 0
    below = math.nextafter(edge, 0.0)
    assert one(library, [p, p], [q], [1], params, [below, 0.0]).accepted == 1


def _edge(library, p, q, params):
    """The smallest uniform that is rejected, and that u * q == p there (else it proves nothing)."""
    weights = [warp_weights(np.array(r, np.float32), SlotSampling(params, 0, 0), library=library)
               for r in (p, q)]  # fmt: skip
    p_x, q_x = (float(w[1]) / t for w, t in weights)
    u = p_x / q_x
    while u * q_x > p_x:
        u = math.nextafter(u, 0)
    while u * q_x < p_x:
        u = math.nextafter(u, 1)
    if u * q_x != p_x:
        pytest.skip("no float64 uniform lands on the edge")
    return u


@RULES
def test_a_residual_of_nothing_is_the_target(library, params):
    row = [NO, 0, 1, 2]
    p = np.exp([0, 1, 2]) / np.exp([0, 1, 2]).sum()
    for u, token in ((0.0, 1), (p[0] + 1e-3, 2), (p[0] + p[1] + 1e-3, 3), (ONE, 3)):
        verdict = one(library, [row, row], [row], [0], params, [0.0, u])
        assert verdict == Verdict(0, token, (0.0,))


def test_temperature_0_is_the_lowest_argmax(library):
    p = [[0, 5, 5, 1], [9, 1, 9, 0], [0, 0, 1, 1]]  # argmax 1, 0, 2
    for rule in ("token", "block"):
        params = SamplingParams(verify=rule)
        for drafts, accepted, token in (([1, 0], 2, 2), ([1, 2], 1, 0), ([2, 0], 0, 1)):
            verdict = one(library, p, p[:2], drafts, params, [ONE] * 3)
            assert (verdict.accepted, verdict.token) == (accepted, token)


def test_lenience_at_temperature_0(library):
    params = SamplingParams(lenience=0.5)
    row = [0.0, 2.0, 2.0 - math.log(2) + 1e-3, 2.0 - math.log(2) - 1e-3]
    for draft, accepted in ((0, 0), (1, 1), (2, 1), (3, 0), (9, 0), (-1, 0)):
        verdict = one(library, [row, row], [row], [draft], params, [ONE, 0.5])
        assert verdict == Verdict(accepted, 1, (float(accepted),))


@EXACT
def test_vocabularies_of_different_width(library, params):
    narrow, wide = [0.0, 0.0], [0.0, 0.0, 5.0]
    assert one(library, [narrow] * 2, [wide], [2], params, [0, ONE]) == Verdict(0, 1, (0.0,))
    assert one(library, [wide] * 2, [narrow], [0], params, [ONE, 0.5]).token == 2
    # padding is not read
    padded = [[0.0, 1.0, math.nan, math.inf]] * 2
    assert one(library, padded, [[0.0, 1.0]], [1], params, [0, 0], width=2).accepted == 1
    with pytest.raises(OutriderError, match="NaN"):  # control
        one(library, padded, [[0.0, 1.0]], [1], params, [0, 0], width=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ([0.0, math.nan, 1.0], "NaN in the logits"),
        ([math.nan, math.inf, 1.0], "NaN in the logits"),
        ([0.0, math.inf, 1.0], r"\+inf in the logits"),
        ([NO, NO, NO], "every logit is -inf"),
    ],
)
def test_a_broken_row_names_model_slot_and_position(library, values, cause, temperature):
    params, good = SamplingParams(temperature=temperature), [0.0, 0.0, 0.0]
    with pytest.raises(OutriderError, match=f"target, slot 3, position 18: {cause}") as error:
        one(library, [good, values, good], [good] * 2, [0, 0], params, [0] * 3)
    assert error.value.kind == "numeric"
    sampler = RoundSampler(3, 2, library=library)
    for suppress in (None, np.array([1])):  # suppression must not hide it
        place = SlotSampling(params, 2, 17, suppress=suppress, suppress_rows=2, name="slot 3")
        sampler.begin([place])
        sampler.draw(np.zeros((1, 3), np.float32), 0)
        with pytest.raises(OutriderError, match=f"draft, slot 3, position 18: {cause}"):
            sampler.draw(np.array([values], np.float32), 1)
    if temperature:
        with pytest.raises(OutriderError, match=f"draft, slot 3, position 17: {cause}"):
            one(library, [good] * 2, [values], [0], params, [0, 0])
    # a row after the first rejection is not looked at
    rejects = [NO, 0.0, 0.0]
    assert one(library, [rejects, values], [good], [0], params, [0, 0]).accepted == 0


def test_suppressing_everything_is_an_error(library):
    for temperature in (0.0, 1.0):
        place = SlotSampling(
            SamplingParams(temperature=temperature), 0, 0, suppress=np.arange(2), suppress_rows=1
        )
        sampler = RoundSampler(2, 0, library=library)
        sampler.begin([place])
        with pytest.raises(OutriderError, match="every logit is -inf"):
            sampler.verify(np.zeros((1, 1, 2), np.float32))


def test_the_sigmoid_rule_wants_logits(library):
    sampler = RoundSampler(3, 1, library=library)
    sampler.begin([SlotSampling(SIGMOID, 1, 0)])
    with pytest.raises(OutriderError, match="draft"):
        sampler.verify(np.zeros((1, 2, 3), np.float32))


@pytest.mark.parametrize("token", [0, 5, 1023, 1024, 3071, 3072, 4095])
def test_a_token_of_weight_0_is_never_drawn(library, token):
    row = np.full((1, 1, 4096), NO, np.float32)
    row[..., token] = 3.0
    sampler = RoundSampler(4096, 0, library=library)
    sampler.begin([SlotSampling(TOKEN, 0, 0)])
    for u in (0.0, 0.25, 0.999, ONE, 1.0):  # also should rounding carry a sum to its very end
        assert sampler.verify(row, uniforms=np.array([[u]]))[0].token == token


# --- numbers and the interface ----------------------------------------------------------------


def test_philox_gives_the_known_answers(library):
    answer = np.zeros(4, np.uint32)
    for counter, key, want in KNOWN_ANSWERS:
        words = np.array(counter, np.uint32)
        library.outrider_philox4x32(key[1] << 32 | key[0], words.ctypes.data, answer.ctypes.data)
        assert tuple(answer.tolist()) == want == philox4x32(key[1] << 32 | key[0], counter)
    rng = np.random.default_rng(0)
    for seed in (0, 2**64 - 1, *rng.integers(0, 2**63, 50).tolist()):
        at = (seed, int(rng.integers(2**32)), Purpose(rng.integers(3)), int(rng.integers(2**32)))
        assert library.outrider_uniform(*at) == uniform(*at)


def test_structures_have_the_layout_of_the_header(tmp_path):
    """Sizes and the last fields' offsets, by the compiler."""
    source = tmp_path / "layout.cpp"
    lines = [
        f'printf("%zu %zu\\n", sizeof({name}), offsetof({name}, {field}));'
        for name, field in (
            ("outrider_slot", "reserved"), ("outrider_row", "status"),
            ("outrider_verdict", "reserved"), ("outrider_logits", "dtype"),
            ("outrider_device_sizes", "reserved"), ("outrider_device_launch", "reserved"),
            ("outrider_device_plan", "call"),
        )
    ]  # fmt: skip
    source.write_text(
        '#include <cstdio>\n#include "outrider.h"\nint main() {' + "".join(lines) + "}"
    )
    program = tmp_path / "layout"
    subprocess.run([*find_compiler(), *includes(), source, "-o", program], check=True)
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    got = [n for t in (kernel.SLOT, kernel.ROW, kernel.VERDICT)
           for n in (t.itemsize, t.fields[t.names[-1]][1])]  # fmt: skip
    for structure, last in (
        (kernel.Logits, "dtype"), (cuda_kernel.Sizes, "reserved"),
        (cuda_kernel.Launch, "reserved"), (cuda_kernel.Plan, "call"),
    ):  # fmt: skip
        got += [ctypes.sizeof(structure), getattr(structure, last).offset]
    assert [int(n) for n in said] == got


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_draft_row_that_nobody_looked_at(library, temperature):
    """On a GPU the draws of a round follow one another unseen: the verification must find it."""
    good, broken = np.array([[0.0, 1, 2]], np.float32), np.array([[0.0, np.nan, 2]], np.float32)
    sampler = RoundSampler(3, 2, library=library)
    sampler.begin([SlotSampling(SamplingParams(temperature=temperature), 2, 17, name="slot 3")])
    with pytest.raises(OutriderError, match="NaN"):
        sampler.draw(broken, 0)
    sampler.draw(good, 1)
    with pytest.raises(OutriderError, match="draft, slot 3, position 17: NaN"):
        sampler.verify(np.stack([good[0]] * 3)[None])


def test_illegal_calls_are_refused_with_a_text(library):
    sampler = RoundSampler(4, 2, library=library)
    logits = np.zeros((1, 3, 4), np.float32)
    for field, value in (
        ("temperature", math.nan), ("temperature", -1), ("top_p", 0), ("top_p", math.nan),
        ("min_p", 2), ("lenience", 0), ("rule", 3), ("gamma", 3), ("top_k", -1), ("index", -1),
        ("repetition_penalty", 0), ("sigmoid_alpha", 1), ("context_length", 2),
    ):  # fmt: skip
        sampler.begin([SlotSampling(TOKEN, 2, 0)])
        sampler._slots[0][field] = value
        with pytest.raises(ValueError, match="parameter is out of range"):
            sampler.verify(logits, logits)
    sampler.begin([SlotSampling(TOKEN, 2, 0)])
    with pytest.raises(ValueError, match="too few"):
        sampler.verify(logits[:, :2])
    with pytest.raises(ValueError, match="narrower"):
        sampler.verify(logits[..., :3])
    with pytest.raises(ValueError, match="contiguous"):
        sampler.verify(np.zeros((1, 3, 8), np.float32)[..., ::2])
    with pytest.raises(ValueError, match="float64"):
        sampler.verify(logits.astype(np.float64))
    with pytest.raises(ValueError, match="workspace"):
        RoundSampler(0, 1, library=library)
    for status in range(10):
        assert kernel.status_text(library, status)


def test_a_missing_or_foreign_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel, "FOLDERS", (tmp_path,))
    kernel._default.cache_clear()
    try:
        assert kernel.unavailable().startswith("liboutrider.so is not there. Run make plugins")
        assert not kernel.available()
        (tmp_path / "liboutrider.so").write_bytes(b"not a library")
        with pytest.raises(OutriderError, match="cannot be loaded"):
            kernel.load()
    finally:
        kernel._default.cache_clear()


def test_a_missing_compiler_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"CXX=no-such-compiler is not there\. Set CXX"):
        build(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found. Install"):
        build(tmp_path)
