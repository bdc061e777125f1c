"""The formulas of the kernel suite compared with the rules themselves, and the suite on shapes too
small for meaningful figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from enumeration import Models, output_joint
from samplers import open_backend

from bench.core.fit import ratio_estimates
from bench.suites.kernel import sigmoid, suite, times
from bench.suites.kernel.rounds import RULES, Round, random_logits
from bench.suites.kernel.suite import points_of
from runtime.files.errors import OutriderError
from runtime.sampling.native import RoundSampler
from runtime.sampling.warp import SamplingParams

FROM_LOGITS = f"token: {times.FROM_LOGITS}"
DOCS = Path(__file__).parents[2] / "docs"


def logits_of(rows, seed, vocab_size):
    rng = np.random.default_rng([seed, rows, vocab_size])
    target = 3 * rng.standard_normal((rows, vocab_size), np.float32) - 2
    return target, target + rng.standard_normal((rows, vocab_size), np.float32)


def compared(library, seed, scale, other=None):
    """The distribution that a position emits and the acceptance rate, by enumeration of the rule
    and by formula. scale: None for the exact rule. other: another scale for the formula."""
    models = Models(seed, 1, scale=3.0)
    for row in (models.target[0], models.draft[0]):
        row[np.isinf(row)] = 0
    params = SamplingParams(temperature=1.0)
    z_p, z_q = models.target[0][None], models.draft[0][None]
    hats = p, q = sigmoid.softmax(z_p), sigmoid.softmax(z_q)
    if scale is not None:
        hats = tuple(sigmoid.squash(z, other or scale) for z in (z_p, z_q))
        params = replace(params, verify="sigmoid", sigmoid_alpha=-scale, sigmoid_beta=scale)
    joint, accepted = output_joint(library, models, params)
    (expected,), (rate,) = sigmoid.emitted_distribution(p, q, *hats)
    return (joint.sum(axis=1), accepted), (expected, rate)


@pytest.mark.parametrize("backend", ["numpy", "cpu"])
@pytest.mark.parametrize("scale", [None, 1.0, 10.0, 1e3])
def test_the_formula_is_what_a_verification_emits(backend, scale):
    for seed in range(3):
        (weights, accepted), (expected, rate) = compared(open_backend(backend), seed, scale)
        assert weights.sum() == pytest.approx(1, abs=2e-6)
        assert accepted == pytest.approx(rate, abs=1e-6)
        assert sigmoid.total_variation(weights, expected) < 2e-6


def test_the_comparison_notices_another_scale():
    (weights, accepted), (expected, rate) = compared(open_backend("numpy"), 0, 1.0, other=1.3)
    assert abs(accepted - rate) > 1e-3
    assert sigmoid.total_variation(weights, expected) > 1e-3


def test_at_the_published_scales_the_output_is_the_drafts():
    results = {found["scale"]: found for found in sigmoid.measure_scales([logits_of(40, 1, 500)])}
    exact = results[0.0]
    assert exact["to_target"] < 1e-14
    assert exact["accepted"] == pytest.approx(1 - exact["to_draft"])
    assert results[1.0]["accepted"] < results[10.0]["accepted"] < 0.999
    for scale in sigmoid.PUBLISHED:
        assert results[scale]["accepted"] > 0.999
        assert results[scale]["to_draft"] < 1e-3
        assert results[scale]["to_target"] == pytest.approx(exact["to_draft"], abs=1e-3)
    p = sigmoid.softmax(logits_of(40, 1, 500)[0])
    same, rate = sigmoid.emitted_distribution(p, p, p, p)  # an empty residual
    assert sigmoid.total_variation(same, p).max() < 1e-14 and rate == pytest.approx(1)


def test_standard_errors_are_over_documents():
    """Documents that agree within themselves count once each, however long they are."""
    sums, counts = np.array([[10.0], [0.0], [10.0], [0.0]]), np.array([10.0] * 4)
    means, errors = ratio_estimates(sums, counts)
    assert means == [0.5]
    assert errors[0] == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)


# The benchmark itself


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    """The kernel is given other logits than NumPy."""
    real = Round.verify

    def other(self, sampler):
        wrong = 5 * isinstance(sampler, RoundSampler)
        self.target[:, :, :3] += wrong
        verdicts = real(self, sampler)
        self.target[:, :, :3] -= wrong
        return verdicts

    rounds = {"token": [Round(random_logits(2_048, 3, 4, seed=0), RULES["token"])]}
    calls = ["token: verify"]
    assert times.measure(rounds, calls)["times"].keys() == {*calls}
    monkeypatch.setattr(Round, "verify", other)
    with pytest.raises(OutriderError, match=r"^numeric: .*token, V 2048: .*differ from NumPy"):
        times.measure(rounds, calls)


def test_points_have_the_bytes_of_their_outcome():
    gamma, row, calls = 3, 4 * 2_048, ["token: verify", FROM_LOGITS]
    logits = random_logits(2_048, gamma, 1, seed=0)
    found = times.measure({"token": [Round(logits, RULES["token"])]}, calls)
    (p,) = points_of({"points": [found], "bandwidth_gb_s": 2.0})
    accepted = found["accepted"]["token"]
    ours = found["times"]["token: verify"]["ms"]
    read = row * (accepted + 2 if accepted < gamma else gamma + 1)
    assert p["floor of token: verify"] == pytest.approx(read / 2e6)
    assert p["share of token: verify"] == pytest.approx(read / 2e6 / ours)
    more = p[f"floor of {FROM_LOGITS}"] - p["floor of token: verify"]
    assert more == pytest.approx(row * accepted / 2e6)


def test_the_ratios_of_a_point_s_times():
    times_of_calls = {
        suite.ROUND: 2.0, suite.NUMPY_ROUND: 10.0, suite.EXACT: 1.0, suite.TRANSFORMERS: 20.0,
        suite.FROM_LOGITS: 3.0, suite.FUNCTION_ONLY: 12.0, suite.SIGMOID: 4.0,
    }  # fmt: skip
    found = suite.ratios_of(times_of_calls, 50.0)
    assert (found["verify_share"], found["speedup"], found["sigmoid_ratio"]) == (0.04, 5, 4)
    assert (found["saved"], found["saved_function"]) == (0.95, 0.75)


def test_the_suite(monkeypatch, tmp_path, capsys):
    """Runs at small sizes, and has the tables of docs/paper.md."""
    for module, name, value in (
        (times, "READ_BYTES", 1 << 20), (times, "SAMPLES", 1), (times, "PATIENCE", 0),
        (times, "SLOTS_PER_SAMPLE", 2), (suite, "GOAL", (2_048, 2, 1)),
        (suite, "SIZES", [(2_048, 2, 1), (1_024, 2, 1)]), (suite, "BATCHES", [(1_024, 2, 4)]),
        (suite, "load_pair", lambda *_: None),
        (suite, "held_out_logits", lambda *_: iter([logits_of(4, 3, 100)])),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    assert suite.main(["--out", f"{tmp_path}"]) == 0
    output = capsys.readouterr().out
    for text in (
        "at most 5 %",
        "at least 5",
        "at least 94 %",
        "±1,000 (used in the paper for speech)",
        "\nexact: share of bandwidth ",
    ):
        assert text in output
    results = json.loads(output.splitlines()[-1])
    assert len(results["points"]) == 3
    page, document = (tmp_path / "kernel.md").read_text(), (DOCS / "paper.md").read_text()
    # Each has only one sample, so it is marked as disturbed.
    assert "| V = 2,048 * |" in page
    for table in suite.tables(results)[:3]:
        assert f"| {' | '.join(table.head)} |" in document
