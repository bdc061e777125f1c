"""The formulas of the paper suite against the rules themselves, and both suites of the sampling on
shapes so small that their figures mean nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kernels import cpu_library
from proof import ONE, change_point, pieces

from bench.core.command import Suite
from bench.core.fit import ratio_estimates
from bench.core.machine import MemoryReader
from bench.core.plot import draw_or_explain
from bench.core.table import update
from bench.suites.kernel import suite as kernel_suite
from bench.suites.kernel import times
from bench.suites.kernel.rounds import RULES, Round, random_logits
from bench.suites.paper import memory, sigmoid, suite
from bench.suites.paper.tables import EXACT, FROM_LOGITS, SIGMOID, PaperRun, tables
from runtime.files.errors import OutriderError
from runtime.sampling import kernel
from runtime.sampling.native import RoundSampler
from runtime.sampling.rules import verify
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams, warp

V = 8
AT_1 = SamplingParams(temperature=1.0)


def sigmoid_params(scale):
    return replace(AT_1, verify="sigmoid", sigmoid_alpha=-scale, sigmoid_beta=scale)


def logits_of(rows, seed=0, vocab_size=V):
    rng = np.random.default_rng([seed, rows, vocab_size])
    target = 3 * rng.standard_normal((rows, vocab_size), np.float32) - 2
    return target, target + rng.standard_normal((rows, vocab_size), np.float32)


def reference(z_p, z_q, params):
    """(accepted, token) of a round with one draft token, as a function of it and two uniforms."""
    p, q = [warp(z_p, params), warp(z_p, params)], [warp(z_q, params)]

    def run(token, u, final_u):
        verdict = verify(p, q, [token], [u], final_u, params)
        return verdict.accepted, verdict.token

    return run


def native(z_p, z_q, params):
    sampler = RoundSampler(V, 1, library=cpu_library())
    sampler.begin([SlotSampling(params, 1, 0)])

    def run(token, u, final_u):
        sampler.drafts[0, 0] = token
        verdict = sampler.verify(
            np.stack([z_p, z_p])[None], z_q[None, None], np.array([[u, final_u]])
        )[0]
        return verdict.accepted, verdict.token

    return run


def enumerated(run, q):
    """What a position emits: every draft token, and the measure of the uniforms of each outcome."""
    token_weights, accepted = np.zeros(V), 0.0
    for x in range(V):
        stands = change_point(lambda u, x=x: run(x, u, 0.0)[0] == 1)
        token_weights[x] += q[x] * stands
        accepted += q[x] * stands
        if stands < 1:
            for token, length in pieces(lambda f, x=x: run(x, ONE, f)[1]).items():
                token_weights[token] += q[x] * (1 - stands) * length
    return token_weights, accepted


def by_formula(z_p, z_q, scale):
    p, q = sigmoid.softmax(z_p[None]), sigmoid.softmax(z_q[None])
    if scale is None:
        rows, rate = sigmoid.emitted(p, q, p, q)
    else:
        hats = sigmoid.squash(z_p[None], scale), sigmoid.squash(z_q[None], scale)
        rows, rate = sigmoid.emitted(p, q, *hats)
    return rows[0], rate[0]


@pytest.mark.parametrize("rule", [reference, native])
@pytest.mark.parametrize("scale", [None, 1.0, 10.0, 1e3])
def test_the_formula_is_what_a_verification_emits(rule, scale):
    params = AT_1 if scale is None else sigmoid_params(scale)
    for seed in range(3):
        z_p, z_q = (rows[0] for rows in logits_of(1, seed))
        q = sigmoid.softmax(z_q[None])[0]
        weights, rate = enumerated(rule(z_p, z_q, params), q)
        expected, expected_rate = by_formula(z_p, z_q, scale)
        assert weights.sum() == pytest.approx(1, abs=1e-9)
        assert rate == pytest.approx(expected_rate, abs=1e-6)
        assert sigmoid.distance(weights, expected) < 2e-6


@pytest.mark.parametrize("rule", [reference, native])
def test_the_comparison_notices_another_scale_and_another_redraw(rule):
    z_p, z_q = (rows[0] for rows in logits_of(1))
    p, q = (sigmoid.softmax(z[None]) for z in (z_p, z_q))
    weights, rate = enumerated(rule(z_p, z_q, sigmoid_params(1.0)), q[0])
    other, other_rate = by_formula(z_p, z_q, 1.3)
    assert abs(rate - other_rate) > 1e-3
    assert sigmoid.distance(weights, other) > 1e-3
    stands = q * np.minimum(1, sigmoid.squash(z_p[None], 1.0) / sigmoid.squash(z_q[None], 1.0))
    from_target = stands + (1 - stands.sum()) * p  # the correction drawn from p
    assert sigmoid.distance(weights, from_target[0]) > 1e-3


def test_the_exact_rule_emits_the_target():
    z_p, z_q = logits_of(50, vocab_size=500)
    p, q = sigmoid.softmax(z_p), sigmoid.softmax(z_q)
    rows, rate = sigmoid.emitted(p, q, p, q)
    assert sigmoid.distance(rows, p).max() < 1e-14
    assert rate == pytest.approx(np.minimum(p, q).sum(-1))
    same, rate = sigmoid.emitted(p, p, p, p)  # nothing is left to redraw from
    assert sigmoid.distance(same, p).max() < 1e-14
    assert rate == pytest.approx(1)
    wrong, _ = sigmoid.emitted(p, q, p, 1.1 * q)
    assert sigmoid.distance(wrong, p).min() > 1e-3


def test_at_the_published_scales_the_output_is_the_drafts():
    results = {(o.name, o.scale): o for o in sigmoid.effects([logits_of(40, 1, 500)])}
    exact = results["exact", 0.0]
    assert exact.to_target < 1e-14
    assert exact.accepted == pytest.approx(1 - exact.to_draft)
    # A constant on the draft's logits moves the sigmoid rule only.
    assert exact.shifted == pytest.approx(exact.accepted, abs=1e-6)
    assert results["eq. 5", 1.0].shifted < results["eq. 5", 1.0].accepted - 0.01
    # A token that falls is redrawn from nearly the whole vocabulary, not from where p is.
    assert results["eq. 5", 1.0].unlikely > results["eq. 5", 1e5].unlikely + 0.01
    for scale in sigmoid.PUBLISHED:
        published = results["eq. 5", scale]
        assert published.accepted > 0.999
        assert published.to_draft < 1e-3
        assert published.to_target == pytest.approx(exact.to_draft, abs=1e-3)
        assert 0.61 < published.lowest < published.highest < 0.63


def test_in_float16_a_scale_of_1e5_rejects_every_draft_token_and_clipping_decides():
    z_p, z_q = logits_of(10, vocab_size=500)
    assert sigmoid.squash_half(np.zeros((1, 1), np.float32), 1e4).item() == np.float16(0.62246)
    p_hat, q_hat = (sigmoid.squash_half(z, 1e5) for z in (z_p, z_q))
    assert np.isnan(p_hat).all()
    p, q = sigmoid.softmax(z_p), sigmoid.softmax(z_q)
    rows, rate = sigmoid.emitted(p, q, p_hat, q_hat, floor=sigmoid.FLOOR)
    assert not rate.any()
    assert rows == pytest.approx(1 / 500)
    # A clipped draft token stands where the target is not clipped.
    z_p, z_q = np.array([[0, -5, -5.0]]), np.array([[-5, -5, -5.0]])
    p_hat, q_hat = (sigmoid.squash_half(z, 1.0) for z in (z_p, z_q))
    assert p_hat[0, 0] > 0 and not p_hat[0, 1:].any() and not q_hat.any()
    _, rate = sigmoid.emitted(sigmoid.softmax(z_p), sigmoid.softmax(z_q), p_hat, q_hat)
    assert rate == pytest.approx(1 / 3)  # x / 0 stands, 0 / 0 does not


def test_standard_errors_are_over_documents():
    """Documents that agree within themselves count once each, however long they are."""
    sums, counts = np.array([[10.0], [0.0], [10.0], [0.0]]), np.array([10.0] * 4)
    means, errors = ratio_estimates(sums, counts)
    assert means == [0.5]
    assert errors[0] == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)


# The benchmark itself


@pytest.fixture(scope="module")
def run():
    if (reason := kernel.unavailable()) is not None:
        pytest.skip(reason)
    size = replace(
        suite.QUICK, base=(2_048, 2, 1), varied=((1_024, 2_048), (2, 8), (1, 4)),
    )  # fmt: skip
    reader = MemoryReader(1, 1 << 20)
    reader()
    logits = [random_logits(2_048, 3, 1) for _ in range(2)]
    points = [suite.point(logits, gamma, size, 0.01, 1) for gamma in (1, 3)]
    documents = [logits_of(4, 3, 100)]
    return PaperRun(
        reader.bandwidth, points, points, size.base, suite.overheads(size, 1),
        sigmoid.effects(documents), 0.5, 1, 4,
    )  # fmt: skip


def test_bytes_are_those_of_the_outcome(run):
    row = 2_048 * 4
    for point in run.points:
        for name in (EXACT, SIGMOID):
            assert 2 * row <= point.bytes[name] <= (point.gamma + 1) * row
        more = point.bytes[FROM_LOGITS] - point.bytes[EXACT]
        assert more == pytest.approx(row * point.accepted["token"])
        assert point.accepted["sigmoid"] > point.gamma - 0.5
        assert all(figure.ms > 0 for figure in point.times.values())


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch):
    """The logits are other ones when the kernel sees them."""
    real = Round.verify

    def other(self):
        self.target[:, :, :3] += 5
        verdicts = real(self)
        self.target[:, :, :3] -= 5
        return verdicts

    logits = random_logits(2_048, 3, 4, seed=0)
    rounds = {"token": [Round(logits, RULES["token"])]}
    ways = [("token", times.VERIFY)]
    assert times.measure(rounds, ways, samples=1, patience=0).times
    monkeypatch.setattr(Round, "verify", other)
    with pytest.raises(OutriderError, match=r"token, V 2048: .*not as by NumPy") as caught:
        times.measure(rounds, ways, samples=1, patience=0)
    assert caught.value.kind == "numeric"


def test_the_kernel_allocates_nothing_that_grows_with_the_round(run):
    found = {(o.name, o.size): o for o in run.overheads}
    sizes = [(2_048, 2, 1), (2_048, 8, 1), (2_048, 2, 4)]
    small, *_ = ours = [found[memory.KERNEL, size] for size in sizes]
    row = 2_048 * 4
    for o in ours:
        assert o.call < row  # the verdicts, which are Python's
        assert o.extra == pytest.approx(small.extra, abs=row)
    assert found[memory.NUMPY, sizes[0]].call >= row  # and tracemalloc does see NumPy


def test_the_peak_of_pytorch_is_that_of_its_allocations():
    torch = pytest.importorskip("torch")
    size = 1 << 20

    def call():
        first = torch.empty(size, dtype=torch.uint8)
        del first
        second = torch.empty(2 * size, dtype=torch.uint8)
        third = torch.empty(size, dtype=torch.uint8)
        del second, third

    assert memory.torch_peak(call) == pytest.approx(3 * size, abs=4096)


def test_a_run_is_told_from_its_json(run, tmp_path):
    """Every table has its place in the document, every plot is drawn; NaN is no JSON."""
    results = json.loads(json.dumps(run.json_object(), allow_nan=False))
    document = (Path(suite.__file__).parents[3] / "docs" / "paper.md").read_text()
    made = [table for table in tables(results) if table.name]
    assert len(made) == document.count("<!-- end -->") == 5
    new = update(document, made)
    assert new != document and update(new, made) == new
    pytest.importorskip("matplotlib")
    written = draw_or_explain(suite.PLOTS, results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    assert len(written) == 4


def test_the_kernel_suite(monkeypatch, tmp_path, capsys):
    """A run at small sizes, told again from its file, and its table's place in the document."""
    if (reason := kernel.unavailable()) is not None:
        pytest.skip(reason)
    for name, value in {
        "GOAL": (2_048, 2, 1), "SIZES": [(1_024, 2, 2)], "READ_BYTES": 1 << 20, "SAMPLES": 1,
        "TABLED": [(2_048, 2, 1), (1_024, 2, 2)],
    }.items():  # fmt: skip
        monkeypatch.setattr(kernel_suite, name, value)
    made: Suite = kernel_suite.SUITE
    assert made.main(["--patience", "0", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    results = json.loads(said.splitlines()[-1])
    assert len(results["points"]) == 8 + 3
    assert {"token: Transformers", "token: round"} < results["points"][0]["times"].keys()
    page = tmp_path / "page.md"
    page.write_text("<!-- kernel -->\nold\n<!-- end -->\n")
    file = str(tmp_path / "kernel.json")
    assert made.main(["--show", file, "--update", str(page)]) == 0
    assert capsys.readouterr().out == said
    assert "| 2,048 | 2 | 1 |" in page.read_text() and "old" not in page.read_text()
    performance = Path(suite.__file__).parents[3] / "docs" / "performance.md"
    update(performance.read_text(), [kernel_suite.kernel_table(results)])
