"""All samplers, case by case: warping, the edge table of the specification, the C interface.

NumPy, the CPU library, the emulated CUDA kernels and a GPU agree, also on invalid calls.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from samplers import (
    BLOCK,
    COUNTED,
    NUMPY,
    ONE,
    SIGMOID,
    TOKEN,
    Case,
    by_library,
    emulated_library,
    open_backend,
    open_sampler,
    weights_of,
)

from runtime.files.errors import OutriderError
from runtime.sampling.rules import Verdict
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams

RULES = pytest.mark.parametrize(
    "params", [TOKEN, BLOCK, SIGMOID], ids=["token", "block", "sigmoid"]
)
EXACT = pytest.mark.parametrize("params", [TOKEN, BLOCK], ids=["token", "block"])


@pytest.fixture(params=[NUMPY, "cpu", "emulated", "cuda"])
def library(request):
    return open_backend(request.param)


@pytest.fixture(params=[NUMPY, "cpu", "cuda"])
def numpy_or_native(request):
    return open_backend(request.param)


# --- warping ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "top_p", "kept"),
    [
        ([0, 0, 0, 0, 0, 0, 0, 0], 0.5, [4, 5, 6, 7]),  # on ties the lower ids are dropped
        ([0, 0, 0, 0, 0, 0, 0, 0], 0.9, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([0, 0, 0, 0, 0, 0, 0, 0], 0.01, [7]),
        ([5, 0, 0, 0, 0, 0, 0, 5], 0.5, [0, 7]),
        ([5, 0, 0, 0, 0, 0, 0, 5], 0.4, [7]),
    ],
)
def test_ties_at_the_edge_of_the_nucleus(numpy_or_native, row, top_p, kept):
    place = SlotSampling(SamplingParams(temperature=1.0, top_p=top_p), 0, 0)
    weights, _ = weights_of(numpy_or_native, np.array(row, np.float32), place)
    assert np.flatnonzero(weights).tolist() == kept


@pytest.mark.parametrize("top_k", [1, 150, 151_935])
def test_top_k_keeps_ties(numpy_or_native, top_k):
    rng = np.random.default_rng(13)
    for logits in (rng.normal(size=151_936), rng.integers(0, 9, 151_936), np.zeros(3000)):
        row = logits.astype(np.float32)
        place = SlotSampling(SamplingParams(temperature=1.0, top_k=top_k), 0, 0)
        weights, _ = weights_of(numpy_or_native, row, place)
        edge = np.sort(row)[-min(top_k, len(row))]
        assert np.array_equal(weights > 0, row >= edge)


def test_a_prefix_that_is_top_p_exactly_is_the_nucleus(numpy_or_native):
    """A tolerance decides, not rounding: log([.3, .1, .1, .5]) at .8 keeps the .5 and the .3, as
    Transformers does."""
    wrong = 0
    for shares in itertools.product((1, 2, 3, 4), repeat=4):
        p = np.array(shares) / sum(shares)
        for top_p in np.cumsum(np.sort(p)[::-1])[:3]:
            edge = round(float(top_p), 12)
            place = SlotSampling(SamplingParams(temperature=1.0, top_p=edge), 0, 0)
            weights, _ = weights_of(numpy_or_native, np.log(p).astype(np.float32), place)
            kept = np.sort(p)[::-1].cumsum() < edge - 1e-9
            wrong += (weights > 0).sum() != kept.sum() + 1
    assert wrong == 0


def test_logits_at_the_end_of_the_range(library):
    """Logits that overflow when divided by the temperature."""
    params = SamplingParams(temperature=0.5, seed=3)
    sampler = open_sampler(library, 4, 1)
    row = np.array([3.4e38, -3.4e38, 3.4e38, 0], np.float32)
    drawn = set()
    for position in range(20):
        sampler.begin([SlotSampling(params, 1, position)])
        drawn.add(int(sampler.draw(row[None], 0)[0]))
        verdict = sampler.verify(np.stack([row, row])[None], [row[None]])
        assert verdict.pop().accepted == 1
    assert drawn == {0, 2}


def test_a_penalty_without_a_context_is_of_the_drafts_alone(library):
    rows = np.array([[[0.0, 2, 1.9], [0, 2, 1.9], [0, 2, 1.9]]], np.float32)
    sampler = open_sampler(library, 3, 2)
    sampler.begin([SlotSampling(SamplingParams(repetition_penalty=1.3), 2, 0)])
    sampler.set_drafts([[1, 1]])
    assert sampler.verify(rows) == [Verdict(1, 2, (1.0, 0.0))]


def test_a_given_draft_at_temperature_0_is_a_point_mass(library):
    """Whatever the draft's logits are, a draft is accepted if it is the target's argmax."""
    target, draft = np.array([[[0, 5.0, 1], [0, 5, 1]]], np.float32), np.array([[9.0, 0, 0]])
    sampler = open_sampler(library, 3, 1)
    sampler.begin([SlotSampling(SamplingParams(), 1, 0)])
    sampler.set_drafts([[1]])
    assert sampler.verify(target, [draft.astype(np.float32)]) == [Verdict(1, 1, (1.0,))]


@pytest.mark.parametrize("token", [-1, -2, 3, 2**40])
@EXACT
def test_a_draft_outside_of_the_vocabulary_is_rejected(library, params, token):
    """And the residual is p itself: a negative id does not index from the end."""
    row = np.log(np.array([0.25, 0.25, 0.5], np.float32))
    sampler = open_sampler(library, 3, 1)
    for u, correction in ((0.1, 0), (0.4, 1), (0.9, 2)):
        sampler.begin([SlotSampling(params, 1, 0)])
        sampler.drafts[0] = token
        verdict = sampler.verify(np.stack([row, row])[None], uniforms=np.array([[0.0, u]]))
        assert verdict == [Verdict(0, correction, (0.0,))]


@pytest.mark.parametrize(
    "numbers",
    [{"position": 2**32}, {"position": 2**32 - 2}, {"position": -1}, {"gamma": -2}, {"index": -1}],
)
def test_a_place_out_of_range_is_refused(numbers):
    with pytest.raises(ValueError, match=r"2\^32|out of range"):
        SlotSampling(TOKEN, **{"gamma": 2, "position": 0, **numbers})
    SlotSampling(TOKEN, 2, 2**32 - 3)


@pytest.mark.parametrize("name", COUNTED)
def test_a_gpu_refuses_counts_and_biases(name):
    """The slot's verdict is an error, not a wrong token; a decoder refuses them first, by name."""
    case = Case(12, 127, 1, slots=1)
    with pytest.raises(ValueError, match="parameter is out of range"):
        by_library(emulated_library(), case, case.places(SamplingParams(**COUNTED[name])))


# --- the edge table of the specification ------------------------------------------------------


def one(library, p, q, drafts, params, uniforms, width=None, **options):
    """The verdict of one slot on rows given as lists of logits."""
    target, draft = np.array(p, np.float32)[None], np.array(q, np.float32)[None]
    gamma = len(drafts)
    sampler = open_sampler(
        library, width or target.shape[2], gamma, draft_vocab_size=draft.shape[2], **options
    )
    sampler.begin([SlotSampling(params, gamma, 17)])
    sampler.drafts[0] = drafts
    with np.errstate(all="raise", under="ignore"):
        return sampler.verify(target, draft, np.array([uniforms], np.float64))[0]


NO = -math.inf


@RULES
def test_zero_target_or_draft_probability_is_rejected_at_u_0(library, params):
    p, q = [NO, 0, 0], [0, 0, 0]
    verdict = one(library, [p, p], [q], [0], params, [0, 0])
    assert verdict.accepted == 0 and verdict.ratios == (0.0,) and verdict.token != 0
    assert one(library, [p, p], [q], [1], params, [0, 0]).accepted == 1  # control
    verdict = one(library, [q, q], [p], [0], params, [0, 0.5])
    assert (verdict.accepted, verdict.ratios) == (0, (0.0,))


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
    weights = [weights_of(library, np.array(r, np.float32), SlotSampling(params, 0, 0))
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
    p = np.log([0.1, 0.7, 0.1, 0.1])  # residual: 0.2 of token 1, and tokens that the draft lacks
    for u, token in ((0.4, 1), (0.6, 2), (0.9, 3)):
        assert one(library, [p] * 2, [narrow], [0], params, [ONE, u]).token == token
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
    with pytest.raises(OutriderError, match=f"^numeric: .*target, slot 0, position 18: {cause}"):
        one(library, [good, values, good], [good] * 2, [0, 0], params, [0] * 3)
    sampler = open_sampler(library, 3, 2)
    for suppress in (None, np.array([1])):  # suppression must not hide it
        place = SlotSampling(params, 2, 17, suppress=suppress, suppress_rows=2)
        sampler.begin([place])
        sampler.draw(np.zeros((1, 3), np.float32), 0)
        with pytest.raises(OutriderError, match=f"draft, slot 0, position 18: {cause}"):
            sampler.draw(np.array([values], np.float32), 1)
    if temperature:
        with pytest.raises(OutriderError, match=f"draft, slot 0, position 17: {cause}"):
            one(library, [good] * 2, [values], [0], params, [0, 0])
    # a row after the first rejection is not looked at
    rejects = [NO, 0.0, 0.0]
    assert one(library, [rejects, values], [good], [0], params, [0, 0]).accepted == 0


def test_suppressing_everything_is_an_error(library):
    for temperature in (0.0, 1.0):
        place = SlotSampling(
            SamplingParams(temperature=temperature), 0, 0, suppress=np.arange(2), suppress_rows=1
        )
        sampler = open_sampler(library, 2, 0)
        sampler.begin([place])
        with pytest.raises(OutriderError, match="every logit is -inf"):
            sampler.verify(np.zeros((1, 1, 2), np.float32))


def test_the_sigmoid_rule_wants_logits(library):
    sampler = open_sampler(library, 3, 1)
    sampler.begin([SlotSampling(SIGMOID, 1, 0)])
    with pytest.raises(OutriderError, match="draft"):
        sampler.verify(np.zeros((1, 2, 3), np.float32))


@pytest.mark.parametrize("token", [0, 1023, 1024, 4095])
def test_a_token_of_weight_0_is_never_drawn(library, token):
    row = np.full((1, 1, 4096), NO, np.float32)
    row[..., token] = 3.0
    sampler = open_sampler(library, 4096, 0)
    sampler.begin([SlotSampling(TOKEN, 0, 0)])
    for u in (0.0, 0.25, 0.999, ONE, 1.0):  # even if rounding moves the sum to its end
        assert sampler.verify(row, uniforms=np.array([[u]]))[0].token == token
