"""Warping: the same distribution as the Transformers logits processors; draws; options; errors."""

import functools
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from samplers import ONE

from runtime.files.errors import OutriderError
from runtime.sampling.distribution import TILE, Distribution
from runtime.sampling.warp import SamplingParams, warp

# --- against Transformers ---------------------------------------------------------------------


def reference(logits, params, context, suppress):
    """(scores after all processors, scores before top-p), [V], computed by Transformers, which also
    determines the order of the processors.

    `TopPLogitsWarper` uses an unstable `torch.sort`, so which of equal scores at the nucleus' edge
    it keeps depends on the build; here the sort is made stable.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GenerationConfig(
        do_sample=params.temperature > 0,
        temperature=float(params.temperature) or 1.0,
        top_k=params.top_k,
        top_p=float(params.top_p),
        min_p=params.min_p or None,
        repetition_penalty=float(params.repetition_penalty),
        suppress_tokens=list(suppress) or None,
        sequence_bias={(token,): bias for token, bias in params.logit_bias} or None,
    )
    model = transformers.GenerationMixin()
    model.config = SimpleNamespace(is_encoder_decoder=False)
    processors = model._get_logits_processor(
        config, input_ids_seq_length=len(context), device="cpu"
    )
    ids = torch.tensor([list(context)], dtype=torch.long)
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    before_top_p = None
    for processor in processors:
        if type(processor).__name__ == "TopPLogitsWarper":
            before_top_p = scores[0].numpy().copy()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
            scores = processor(ids, scores)
    return scores[0].numpy(), before_top_p


def undecided(scores, top_p):
    """Tokens so near the nucleus' edge that a float32 cumulative sum may decide either way."""
    order = np.argsort(scores, kind="stable")
    weights = np.exp(np.float64(scores[order]) - scores.max())
    mass = np.cumsum(weights) / weights.sum()
    near = np.zeros(len(scores), bool)
    near[order] = np.abs(mass - (1 - top_p)) < 2e-6
    return near


def logit_rows(vocab_size, seed):
    rng = np.random.default_rng(seed)
    row = (3 * rng.normal(size=vocab_size)).astype(np.float32)
    yield "float32", row
    yield "ties", np.round(row)
    yield "bfloat16", (row.view(np.uint32) & 0xFFFF0000).view(np.float32)
    yield "offset", row + np.float32(1e4)
    masked = row.copy()
    masked[rng.random(vocab_size) < 0.3] = -np.inf
    masked[0] = 1.0
    yield "masked", masked


OPTIONS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0.6, 1.0, 1.7), (0, 1, 5), (0.05, 0.5, 0.9, 1.0), (0.0, 0.1))
]


@pytest.mark.parametrize("penalise", [False, True], ids=["plain", "bias-penalty-suppress"])
@pytest.mark.parametrize(
    ("vocab_size", "every"),
    [(8, 5), (111, 7), *(pytest.param(v, 1, marks=pytest.mark.slow) for v in (8, 111, 4096))],
)
def test_warp_is_what_transformers_samples_from(vocab_size, every, penalise):
    context = [1, 5, 5, 3, vocab_size - 1, vocab_size + 7] if penalise else []
    suppress = [2, 6] if penalise else []
    extra = {"repetition_penalty": 1.3, "logit_bias": {1: 2.0, 4: -3.5}} if penalise else {}
    compared = 0
    chosen = OPTIONS[::every]
    for seed, options in enumerate(chosen):
        params = SamplingParams(**options, **extra)
        for name, row in logit_rows(vocab_size, seed):
            before = row.copy()
            got = warp(row, params, np.array(context, np.int64), suppress).probs()
            assert np.array_equal(row, before)
            scores, unfiltered = reference(row, params, context, suppress)
            label = f"{name} {options}"
            # finite scores far below the best may underflow to 0
            differs = ((got > 0) != np.isfinite(scores)) & (scores > scores.max() - 80)
            differs |= (got > 0) & ~np.isfinite(scores)
            if differs.any():
                assert params.top_p < 1, label
                assert undecided(unfiltered, params.top_p)[differs].all(), label
                continue
            weights = np.exp(np.float64(scores) - np.float64(scores).max())
            np.testing.assert_allclose(
                got, weights / weights.sum(), rtol=5e-6, atol=1e-30, err_msg=label
            )
            compared += 1
    assert compared > 0.98 * 5 * len(chosen)


def test_temperature_0_is_the_lowest_argmax_after_penalty_and_suppression():
    logits = np.array([1.0, 4.0, 4.0, 3.5, -1.0], np.float32)
    plain, penalty = SamplingParams(), SamplingParams(repetition_penalty=1.5)
    assert warp(logits, plain).point_mass == 1
    assert warp(logits, plain, suppress=[1]).point_mass == 2
    assert warp(logits, plain, context=[1]).point_mass == 1  # no penalty asked for
    assert warp(logits, penalty, context=[1]).point_mass == 2
    assert warp(logits, penalty, context=[1, 2, 1, 99]).point_mass == 3
    assert warp(logits, plain, suppress=[1, 2, 3, 77, -1]).point_mass == 0
    assert warp(logits, SamplingParams(top_k=2, top_p=0.5, min_p=0.9)).point_mass == 1
    negative = np.array([-1.0, -1.2], np.float32)
    assert warp(negative, penalty, context=[0]).point_mass == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_are_converted(dtype):
    row = np.array([0.5, 2.0, -1.25], dtype)
    params = SamplingParams(temperature=1.0)
    assert np.array_equal(warp(row, params).probs(), warp(row.astype(np.float32), params).probs())


def test_a_matrix_is_refused():
    with pytest.raises(ValueError, match="one non-empty row"):
        warp(np.zeros((1, 4), np.float32), SamplingParams())


def test_processed_logits_are_kept_only_where_lenience_needs_them():
    row = np.array([1.0, 3.0, 2.5], np.float32)
    assert warp(row, SamplingParams()).processed is None
    lenient = warp(row, SamplingParams(lenience=0.5))
    assert np.shares_memory(lenient.processed, row)  # a view, as documented
    assert [lenient.margin(t) for t in (0, 1, 2, 3)] == [-2.0, 0.0, -0.5, -math.inf]
    with pytest.raises(ValueError, match="no processed logits"):
        warp(row, SamplingParams()).margin(0)


# --- draws ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [1, 2, 111, TILE, TILE + 1, 2500, 51_864])
def test_draw_inverts_the_cumulative_distribution(vocab_size):
    rng = np.random.default_rng(vocab_size)
    weights = rng.random(vocab_size).astype(np.float32)
    weights[rng.random(vocab_size) < 0.3] = 0
    weights[vocab_size // 2] = 1
    distribution = Distribution.dense(weights)
    cumulative = np.cumsum(weights, dtype=np.float64) / weights.sum(dtype=np.float64)
    for u in (*rng.random(300), 0.0, ONE):
        token = distribution.draw(u)
        assert weights[token] > 0
        assert cumulative[token] >= u - 1e-12
        assert token == 0 or cumulative[token - 1] <= u + 1e-12


def test_probabilities():
    distribution = Distribution.dense(np.array([1, 0, 3], np.float32))
    assert [distribution.prob(t) for t in range(-1, 4)] == [0, 0.25, 0, 0.75, 0]
    assert distribution.probs().dtype == np.float64
    point = Distribution.point(2, 4)
    assert [point.prob(t) for t in range(-1, 5)] == [0, 0, 0, 1, 0, 0]
    assert point.probs().tolist() == [0, 0, 1, 0] and point.draw(0.3) == 2


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 1e-9, 1e9, math.nan, math.inf, "1", True, 10**400]),
        ("top_k", [-1, 1.5, math.nan]),
        ("top_p", [0, -1, 1.01, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0, -1.0, math.inf, math.nan]),
        ("frequency_penalty", [-2.1, 3, math.nan, "1"]),
        ("presence_penalty", [2.5, -math.inf, True]),
        ("logit_bias", [{-1: 1.0}, {5: 101}, {5: math.nan}, {5: 10**400}, {"5": 1.0}, {1.5: 1.0},
                        ((1, 2, 3),), 7, ((5, 1.0), (5, 2.0))]),
        ("seed", [-1, 2**64, 0.5]),
        ("verify", ["greedy", ""]),
        ("lenience", [0, -0.5, 1.5, math.nan]),
        ("sigmoid_alpha", [0.0, 1.0, -math.inf]),
        ("sigmoid_beta", [0.0, -1.0, math.nan]),
    ],
)  # fmt: skip
def test_illegal_values_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(OutriderError) as error:
            SamplingParams(**{name: value})
        assert error.value.kind == "option"
        assert f"{name}={value!r}"[:80] in error.value.cause and name in error.value.remedy
        assert len(error.value.cause) < 150


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "verify": "block", "lenience": 0.5},
        {"temperature": 1.0, "verify": "sigmoid", "lenience": 0.5},
        {"verify": "sigmoid"},
        {"temperature": 1.0, "sigmoid_alpha": -10.0},
    ],
)
def test_contradictions_are_refused(options):
    with pytest.raises(OutriderError, match=r"^option: "):
        SamplingParams(**options)


def test_legal_values_are_taken():
    SamplingParams(top_k=5, top_p=0.5, min_p=0.1)  # harmless at temperature 0
    SamplingParams(temperature=1, top_k=np.int64(3), min_p=np.float32(0.5), seed=2**64 - 1)
    SamplingParams(verify="block")
    given = SamplingParams(frequency_penalty=-2, logit_bias={7: -100, np.int64(3): 5})
    again = SamplingParams(frequency_penalty=-2, logit_bias=given.logit_bias)
    assert given.logit_bias == ((3, 5.0), (7, -100.0)) and hash(given) == hash(again)
    assert given.reads_context and not SamplingParams(logit_bias={1: 1}).reads_context
    SamplingParams(lenience=0.1)
    SamplingParams(temperature=1e-6, verify="sigmoid", sigmoid_alpha=-1e4, sigmoid_beta=1e4)
