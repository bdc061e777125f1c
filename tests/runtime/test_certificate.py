"""The certificate passes exact decoding and fails everything else, the negative controls."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from fakes import EOS, VOCAB_SIZE, make_text_engine, near, random_model
from rounds import WRONG_RULES
from scipy import stats

import runtime.certificate as certificate_module
import runtime.certificate.replay as replay_module
from runtime.backends.bits import Bits
from runtime.certificate import SIGNIFICANCE_LEVEL, TEST_TOKENS, check, kolmogorov_smirnov
from runtime.sampling import philox, reference
from runtime.sampling.warp import warp
from runtime.slots import Slot
from runtime.text.options import Options

GREEDY = Options(max_new_tokens=100, gamma=4)
SAMPLED = Options(max_new_tokens=100, gamma=4, temperature=1.0, seed=5)
PROMPT = "a prompt that is longer than one chunk"


@pytest.fixture
def engine(tmp_path):
    target = random_model(1, never=[EOS])
    return make_text_engine(tmp_path, target, near(target, 2, 1.5), slots=2)


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.3, min_new_tokens=50),
        SAMPLED,
        replace(SAMPLED, gamma=0),
        replace(SAMPLED, gamma=8, verify="block"),
        replace(SAMPLED, verify="coupled"),
        replace(SAMPLED, temperature=0.6, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
        replace(SAMPLED, seed=2**64 - 1, stop="e", stop_token_ids=[9]),
    ],
)
def test_exact_decoding_passes(engine, options):
    certificate = check(engine, PROMPT, options)
    assert certificate.passed, certificate.lines()
    assert not certificate.near_ties
    assert certificate.rounding == 0
    assert engine.decoder.slots.free == 2


def test_texts_that_end_early_and_a_bundle_without_draft(tmp_path):
    engine = make_text_engine(tmp_path, random_model(3))
    messages: list[str] = []
    certificate = check(engine, PROMPT, replace(SAMPLED, gamma=None), messages.append)
    assert certificate.passed
    assert certificate.texts > 5
    assert messages[0] == "text 1, 0 tokens"
    assert messages[-1] == f"replaying text {certificate.texts} of {certificate.texts}"
    assert certificate.tokens == TEST_TOKENS


def test_a_draft_whose_context_ends_first(engine):
    engine.decoder.draft_max_len = len(PROMPT) + 20
    certificate = check(engine, PROMPT, SAMPLED)
    assert certificate.passed
    assert max(max(call.position) for call in engine.decoder.draft.calls) < len(PROMPT) + 20
    engine.decoder.draft_max_len = 10
    for options in (GREEDY, SAMPLED):
        nothing = check(engine, PROMPT, options)
        assert "nothing was drafted" in nothing.lines()[-1]
        assert not nothing.passed and not nothing.violations


def test_exact_decoding_fails_as_rarely_as_it_says(engine, monkeypatch):
    """An exact decoder has p-values below x no more often than x."""
    monkeypatch.setattr(certificate_module, "TEST_TOKENS", 48)
    few = replace(SAMPLED, max_new_tokens=48)
    p_values = [check(engine, "ab", replace(few, seed=1000 * i)).p_value for i in range(40)]
    assert stats.kstest(p_values, "uniform", alternative="greater").pvalue > 0.01


def test_its_random_numbers_are_its_own(engine, monkeypatch):
    drawn = {"generation": set(), "certificate": set()}

    def record(use):
        def uniform(*arguments):
            drawn[use].add((*arguments, 0)[:4])
            return philox.uniform(*arguments)

        return uniform

    monkeypatch.setattr(reference, "uniform", record("generation"))
    monkeypatch.setattr(replay_module, "uniform", record("certificate"))
    check(engine, PROMPT, replace(SAMPLED, verify="block"))
    assert len(drawn["certificate"]) == TEST_TOKENS
    assert not drawn["certificate"] & drawn["generation"]


# Rounding


def tied(gap):
    """A model with two leading tokens in every row, whose logits differ by `gap`."""
    model = random_model(4, never=[EOS])

    def row(context):
        logits = np.minimum(model(context), 3).copy()
        first = sum(context) % (VOCAB_SIZE - 2) + 2
        logits[first], logits[2 + (first - 1) % (VOCAB_SIZE - 2)] = 4 + gap, 4
        return logits

    return row


def test_near_ties_pass_and_are_named(tmp_path):
    target = tied(5e-5)
    engine = make_text_engine(tmp_path, target, near(target, 2, 0.1), rounding=1e-4)
    certificate = check(engine, "a", GREEDY)
    assert certificate.passed, certificate.lines()
    assert 0 < certificate.rounding < 1.01e-4
    assert certificate.bound == 2 * certificate.rounding
    assert certificate.near_ties
    for tie in certificate.near_ties:
        assert tie.margin == pytest.approx(5e-5, abs=1e-6)
    assert "near-ties " + str(len(certificate.near_ties)) in "\n".join(certificate.lines())


def test_flips_beyond_near_ties_fail(tmp_path):
    """Wide calls that are clearly wrong are not excused by the large rounding they cause."""
    target = tied(0.3)
    engine = make_text_engine(tmp_path, target, near(target, 2, 0.1), rounding=0.4)
    certificate = check(engine, "a", GREEDY)
    assert not certificate.passed
    assert certificate.rounding > 0.3
    assert certificate.bound < 0.01
    assert certificate.violations[0].margin == pytest.approx(0.3, abs=1e-6)
    # Half precision has a larger bound.
    pair = engine.manifest.pair
    pair = replace(pair, target=replace(pair.target, dtype="bfloat16"))
    engine.manifest = replace(engine.manifest, pair=pair)
    certificate = check(engine, "a", GREEDY)
    assert certificate.passed and certificate.bound == 0.5


def test_rounding_may_move_the_edge_of_a_filter_but_not_often(tmp_path):
    target = tied(2e-6)
    engine = make_text_engine(tmp_path, target, near(target, 2, 0.1), rounding=1e-5)
    certificate = check(engine, "a", replace(SAMPLED, top_k=1))
    # Every other row selects the wrong one of two tokens: each is a near-tie, but not so many.
    assert certificate.violations
    assert max(m.margin for m in certificate.violations) <= certificate.bound
    assert not certificate.passed


# Negative controls


@pytest.mark.parametrize(
    ("rule", "options"), [(WRONG_RULES[0], GREEDY), *((rule, SAMPLED) for rule in WRONG_RULES)]
)
def test_a_wrong_rule_fails(engine, monkeypatch, rule, options):
    assert check(engine, PROMPT, options).passed
    monkeypatch.setattr(reference, "verify", rule)
    certificate = check(engine, PROMPT, options)
    assert not certificate.passed
    assert "FAILED" in certificate.lines()[0]
    if options.temperature:
        assert certificate.p_value < SIGNIFICANCE_LEVEL
    else:
        assert certificate.violations


@pytest.mark.parametrize("options", [GREEDY, SAMPLED])
def test_a_cache_that_is_a_row_short_fails(engine, monkeypatch, options):
    commit = Slot.commit

    def short(self, tokens, gamma):
        commit(self, tokens, gamma)
        if gamma and len(tokens) > 1:
            self.target_len -= 1

    monkeypatch.setattr(Slot, "commit", short)
    assert not check(engine, PROMPT, options).passed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_suppressed_token_fails(tmp_path, monkeypatch, temperature):
    """min_new_tokens forbids end-of-text, and the round ignores that."""

    def forgetful(*arguments, suppress=(), **options):
        return warp(*arguments, **options)

    options = replace(SAMPLED, temperature=temperature, min_new_tokens=90, ignore_eos=True)
    model = random_model(6)

    def target(context):
        row = model(context).copy()
        row[EOS] = 4
        return row

    engine = make_text_engine(tmp_path, target, near(target, 2, 0.5))
    assert check(engine, PROMPT, options).passed
    monkeypatch.setattr(reference, "warp", forgetful)
    certificate = check(engine, PROMPT, options)
    assert not certificate.passed
    assert certificate.violations[0].token == EOS
    assert certificate.violations[0].margin == math.inf
    assert certificate.json_object()["violations"][0]["margin"] is None


def test_a_seed_that_does_not_mean_the_text_fails(engine, monkeypatch):
    """The guarantee is more than the right distribution, which other exact rules have as well."""
    monkeypatch.setattr(certificate_module, "TEST_TOKENS", 192)
    coupled = replace(SAMPLED, verify="coupled")
    certificate = check(engine, PROMPT, coupled)
    assert certificate.repeated == certificate.texts
    assert "plain decoding repeats 2 of 2 texts" in certificate.lines()
    real = engine.generate

    def another_seed(prompt, options):
        return real(prompt, options, seed=options.seed + (options.gamma > 0))

    monkeypatch.setattr(engine, "generate", another_seed)
    certificate = check(engine, PROMPT, coupled)
    assert not certificate.passed and certificate.repeated == 0
    assert certificate.p_value > SIGNIFICANCE_LEVEL


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, replace(SAMPLED, verify="coupled")])
def test_one_bit_fails_where_bitwise_equality_is_promised(tmp_path, monkeypatch, options):
    """The rounding is far below any near-tie, and the output is still the target's."""
    monkeypatch.setattr(certificate_module, "TEST_TOKENS", 96)
    target = random_model(1, never=[EOS])
    for rounding, passes in ((0, True), (1e-6, False)):
        engine = make_text_engine(tmp_path, target, near(target, 2, 1.5), rounding=rounding)
        assert check(engine, PROMPT, options).identical is None
        engine.bits = Bits(same=("gamma",))
        certificate = check(engine, PROMPT, options)
        assert certificate.passed == certificate.identical == passes
        assert not certificate.violations
        found = "identical" if passes else "NOT identical"
        assert f"logits of 5-token calls and of plain steps: {found}" in certificate.lines()[2][:70]


def test_a_filter_that_was_not_applied_fails(engine, monkeypatch):
    def unfiltered(row, params, *arguments, **options):
        return warp(row, replace(params, top_k=0), *arguments, **options)

    monkeypatch.setattr(reference, "warp", unfiltered)
    certificate = check(engine, PROMPT, replace(SAMPLED, top_k=3))
    assert not certificate.passed
    assert len(certificate.violations) > 20


def test_rules_that_are_not_exact_never_pass(engine):
    sigmoid = check(engine, PROMPT, replace(SAMPLED, verify="sigmoid"))
    assert sigmoid.p_value < SIGNIFICANCE_LEVEL
    assert "sigmoid is not exact" in sigmoid.lines()[-1]
    assert not check(engine, PROMPT, replace(GREEDY, lenience=0.2)).passed
    slight = check(engine, PROMPT, replace(SAMPLED, lenience=0.999))
    assert slight.p_value > SIGNIFICANCE_LEVEL
    assert not slight.passed


# The statistic


@pytest.mark.parametrize("n", [20, 192, 512])
def test_kolmogorov_smirnov_against_scipy(n):
    rng = np.random.default_rng(n)
    for power in (0.7, 0.8, 0.9, 1.0, 1.1, 1.3):
        sample = rng.random(n) ** power
        expected = stats.kstest(sample, "uniform")
        statistic, p_value = kolmogorov_smirnov(sample.tolist())
        assert statistic == pytest.approx(expected.statistic, abs=1e-12)
        assert p_value == pytest.approx(expected.pvalue, rel=0.1, abs=0.005)
