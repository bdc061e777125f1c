"""The formulas of bench/sigmoid.py against the rules themselves, and the benchmark on shapes so
small that its figures mean nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from kernels import cpu_library
from proof import ONE, change_point, pieces

from bench import (
    estimates,
    overhead,
    paper,
    paper_plot,
    paper_tables,
    plots,
    round_time,
    sigmoid,
)  # fmt: skip
from bench.machine import MemoryReader
from bench.rounds import TOKEN, random_logits
from runtime.files.errors import OutriderError
from runtime.sampling import kernel
from runtime.sampling.native import RoundSampler
from runtime.sampling.rules import verify
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams, warp

V = 8
EXACT = SamplingParams(temperature=1.0)


def sigmoid_params(scale):
    return replace(EXACT, verify="sigmoid", sigmoid_alpha=-scale, sigmoid_beta=scale)


def logits(rows, seed=0, vocab_size=V):
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
    params = EXACT if scale is None else sigmoid_params(scale)
    for seed in range(3):
        z_p, z_q = (rows[0] for rows in logits(1, seed))
        q = sigmoid.softmax(z_q[None])[0]
        weights, rate = enumerated(rule(z_p, z_q, params), q)
        expected, expected_rate = by_formula(z_p, z_q, scale)
        assert weights.sum() == pytest.approx(1, abs=1e-9)
        assert rate == pytest.approx(expected_rate, abs=1e-6)
        assert sigmoid.distance(weights, expected) < 2e-6


@pytest.mark.parametrize("rule", [reference, native])
def test_the_comparison_notices_another_scale_and_another_redraw(rule):
    z_p, z_q = (rows[0] for rows in logits(1))
    p, q = (sigmoid.softmax(z[None]) for z in (z_p, z_q))
    weights, rate = enumerated(rule(z_p, z_q, sigmoid_params(1.0)), q[0])
    other, other_rate = by_formula(z_p, z_q, 1.3)
    assert abs(rate - other_rate) > 1e-3
    assert sigmoid.distance(weights, other) > 1e-3
    stands = q * np.minimum(1, sigmoid.squash(z_p[None], 1.0) / sigmoid.squash(z_q[None], 1.0))
    from_target = stands + (1 - stands.sum()) * p  # the correction drawn from p
    assert sigmoid.distance(weights, from_target[0]) > 1e-3


def test_the_exact_rule_emits_the_target():
    z_p, z_q = logits(50, vocab_size=500)
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
    results = {(o.name, o.scale): o for o in sigmoid.outcomes([logits(40, 1, 500)])}
    exact = results["exact", 0.0]
    assert exact.to_target < 1e-14
    assert exact.accepted == pytest.approx(1 - exact.to_draft)
    # A token that falls is redrawn from nearly the whole vocabulary, not from where p is.
    assert results["eq. 5", 1.0].unlikely > results["eq. 5", 1e5].unlikely + 0.01
    for scale in sigmoid.PUBLISHED:
        published = results["eq. 5", scale]
        assert published.accepted > 0.999
        assert published.to_draft < 1e-3
        assert published.to_target == pytest.approx(exact.to_draft, abs=1e-3)
        assert 0.61 < published.lowest < published.highest < 0.63


def test_a_constant_on_the_drafts_logits_moves_the_sigmoid_rule_only():
    results = {(o.name, o.scale): o for o in sigmoid.outcomes([logits(40, 2, 500)])}
    exact, one = results["exact", 0.0], results["eq. 5", 1.0]
    assert exact.shifted == pytest.approx(exact.accepted, abs=1e-6)
    assert one.shifted < one.accepted - 0.01


def test_in_float16_a_scale_of_1e5_rejects_every_draft_token():
    z_p, z_q = logits(10, vocab_size=500)
    assert sigmoid.squash_half(np.zeros((1, 1), np.float32), 1e4).item() == np.float16(0.62246)
    p_hat, q_hat = (sigmoid.squash_half(z, 1e5) for z in (z_p, z_q))
    assert np.isnan(p_hat).all()
    p, q = sigmoid.softmax(z_p), sigmoid.softmax(z_q)
    rows, rate = sigmoid.emitted(p, q, p_hat, q_hat, floor=sigmoid.FLOOR)
    assert not rate.any()
    assert rows == pytest.approx(1 / 500)


def test_in_float16_a_clipped_draft_token_stands_where_the_target_is_not_clipped():
    z_p, z_q = np.array([[0, -5, -5.0]]), np.array([[-5, -5, -5.0]])
    p_hat, q_hat = (sigmoid.squash_half(z, 1.0) for z in (z_p, z_q))
    assert p_hat[0, 0] > 0 and not p_hat[0, 1:].any() and not q_hat.any()
    _, rate = sigmoid.emitted(sigmoid.softmax(z_p), sigmoid.softmax(z_q), p_hat, q_hat)
    assert rate == pytest.approx(1 / 3)  # x / 0 stands, 0 / 0 does not


def test_standard_errors_are_over_documents():
    """Documents that agree within themselves count once each, however long they are."""
    sums, counts = np.array([[10.0], [0.0], [10.0], [0.0]]), np.array([10.0] * 4)
    means, errors = estimates.ratio_estimates(sums, counts)
    assert means == [0.5]
    assert errors[0] == pytest.approx(np.std([1, 0, 1, 0], ddof=1) / 2)


# The benchmark itself


@pytest.fixture(scope="module")
def tiny():
    if (reason := kernel.unavailable()) is not None:
        pytest.skip(reason)
    scale = replace(
        paper.QUICK, name="tiny", vocabularies=(2_048,), gammas=(1, 3), base=(2_048, 2, 1),
        memory_vocabularies=(1_024, 2_048), memory_gammas=(2, 8), memory_batches=(1, 4),
    )  # fmt: skip
    reader = MemoryReader(1, 1 << 20)
    drawn = [random_logits(2_048, 3, 1) for _ in range(2)]
    points = [
        round_time.measure(drawn, gamma, 1, rounds=2, patience=0.05) for gamma in scale.gammas
    ]
    reader()
    return scale, reader.bandwidth, points, paper.memory(scale, 1)


def test_bytes_are_those_of_the_outcome(tiny):
    for point in tiny[2]:
        row = 2_048 * 4
        for rule in (round_time.EXACT, round_time.SIGMOID):
            assert 2 * row <= point.sizes[rule] <= (point.gamma + 1) * row
        more = point.sizes[round_time.RAW] - point.sizes[round_time.EXACT]
        assert more == pytest.approx(row * point.accepted[round_time.EXACT])
        assert point.accepted[round_time.SIGMOID] > point.gamma - 0.5
        assert all(figure.ms > 0 for figure in point.times.values())


def test_the_kernel_allocates_nothing_that_grows_with_the_round(tiny):
    found = {(o.name, o.vocab_size, o.gamma, o.batch): o for o in tiny[3]}
    small, wide, many = (
        found[overhead.KERNEL, 2_048, gamma, batch] for gamma, batch in ((2, 1), (8, 1), (2, 4))
    )
    row = 2_048 * 4
    for o in (small, wide, many):
        assert o.call < row  # the verdicts, which are Python's
        assert o.extra == pytest.approx(small.extra, abs=row)
    assert found[overhead.NUMPY, 2_048, 2, 1].call >= row  # and tracemalloc does see NumPy


def test_the_peak_of_pytorch_is_that_of_its_allocations():
    torch = pytest.importorskip("torch")
    size = 1 << 20

    def call():
        first = torch.empty(size, dtype=torch.uint8)
        del first
        second = torch.empty(2 * size, dtype=torch.uint8)
        third = torch.empty(size, dtype=torch.uint8)
        del second, third

    assert overhead._torch_peak(call) == pytest.approx(3 * size, abs=4096)


def test_tables_and_plots_of_a_run(tiny, tmp_path, monkeypatch):
    scale, bandwidth, points, overheads = tiny
    outcomes = sigmoid.outcomes([logits(4, 3, 100)])
    for table in (
        paper_tables.time_table(points, bandwidth),
        paper_tables.agreeing_table(points),
        paper_tables.bandwidth_table(points, bandwidth),
        paper_tables.memory_table(overheads),
        paper_tables.scaling_table(outcomes, 1, 4),
    ):
        lines = table.text(markdown=True).splitlines()[2:]
        document = f"before\n<!-- {table.name} -->\nold\n<!-- end -->\nafter\n"
        new = paper_tables.update(document, [table])
        assert "old" not in new and lines[-1] in new and new.endswith("-->\nafter\n")
        assert paper_tables.update(new, [table]) == new
        assert {line.count("|") for line in lines} == {len(table.head) + 1}
        assert len(lines) == len(table.rows) + 2
    report = paper.report_of(scale, 1, bandwidth, points, overheads, outcomes)
    text = json.dumps(report, allow_nan=False)
    assert "/" not in json.dumps(report["machine"])
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda _: None)
    assert paper_plot.draw_or_explain(json.loads(text), tmp_path) == [plots.MISSING]
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    written = paper_plot.draw_or_explain(json.loads(text), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    assert len(written) == 4


def test_the_document_has_a_place_for_each_table(tiny):
    document = (paper.ROOT / "docs" / "paper.md").read_text()
    table = paper_tables.agreeing_table(tiny[2])
    assert document.count("<!-- end -->") == 5
    assert paper_tables.update(document, [table]) != document
    with pytest.raises(OutriderError, match="places"):
        paper_tables.update(document, [replace(table, name="another")])


def test_the_rules_compared_are_the_published_ones():
    assert round_time.RULES[round_time.EXACT] == TOKEN
    assert round_time.RULES[round_time.SIGMOID].sigmoid_beta in sigmoid.PUBLISHED
