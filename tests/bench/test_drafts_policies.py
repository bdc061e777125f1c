"""The benchmarks of drafts and policies on the bundled pair, with texts so short that their figures
mean nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_core import a_round, a_run

from bench.core import runs
from bench.core.clock import Clock
from bench.core.costs import acceptance
from bench.core.prompts import Prompts
from bench.core.runs import Way
from bench.suites import drafts
from bench.suites.policies import retold
from bench.suites.policies import suite as policies
from models.corpus import collect
from runtime.bundle import load
from runtime.theory.formulas import speedup

CHECKOUT = Path(__file__).parents[2]


def test_figures_of_a_group_are_of_its_undisturbed_texts():
    """alpha counts all texts, gains and the theorem's costs only those that nothing disturbed."""
    plain, ways = a_run(*[a_round(0, 0)] * 20), {"2": (2, 1), "4": (4, 3)}
    texts = [
        {drafts.PLAIN: plain, **{name: a_run(*[a_round(*x)] * 10) for name, x in ways.items()}}
        for _ in range(3)
    ]
    texts.append({name: replace(run, lost=0.9) for name, run in texts[0].items()})
    found = drafts.figures(texts, 4)
    assert found["texts"] == 3 and found["lost"] == 0.0 and found["best"] == "2"
    assert found["c"] == pytest.approx(0.2) and found["verify"][4] == pytest.approx(1.4)
    row = found["rows"]["4"]
    assert row["alpha"] == 0.75 and row["accepted_of_drafted"] == 0.75 and row["tau"] == 4
    assert row["speedup"]["total"] == pytest.approx(2 / 2.2, rel=1e-3)
    assert row["predicted"] == pytest.approx(speedup(0.75, 4, 0.2, 1.4), rel=1e-3)
    assert found["alpha"] == pytest.approx((1 + 3) / (2 + 4), rel=1e-3)
    group = {"section": drafts.TABLE_3, "name": "model", "temperature": 0.0, **found}
    (best,) = drafts.tables({"groups": [group, {**group, "temperature": 1.0, "lost": 0.5}]})
    assert best.rows[0][:4] == ["model *", "0.667", "2", "1.25"]


def test_training_text_comes_from_all_over_and_no_further():
    documents = [chr(97 + i) * 1000 for i in range(20)]
    part = drafts.training_part(documents, 3500)
    assert [len(x) for x in part] == [1000, 1000, 1000, 500]
    assert all(x in documents or x * 2 in documents for x in part)


# On the bundled pair

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus():
    return collect()


@pytest.fixture(scope="module")
def bundle(workshop):
    return str(workshop.bundle(CHECKOUT / "models" / "target", CHECKOUT / "models" / "draft"))


@pytest.fixture(scope="module")
def run_of(bundle, corpus):
    """A benchmark's JSON object."""

    def run(module, scale):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "collect", lambda: corpus)
            return module.run(bundle, scale, 1, Clock())

    return run


def check_line(found):
    """One line of JSON, that names no machine and no path."""
    text = json.dumps(found)
    assert json.loads(text) == found
    assert "NaN" not in text and "Infinity" not in text
    assert str(CHECKOUT) not in text and "workshop" not in text
    assert "/" not in json.dumps(found["machine"])


@slow
def test_drafts(run_of):
    scale = replace(drafts.QUICK, texts=2, tokens=12, gammas=(2, 4), prompt=100, characters=50_000)
    found = run_of(drafts, scale)
    check_line(found)
    every = found["groups"]
    assert len(every) == 2 * len(drafts.DRAFTS) + 3 * len(drafts.KINDS) + 1 + 2
    for group in every:
        rows = group["rows"]
        speeds = {name: row["speedup"]["total"] for name, row in rows.items()}
        assert speeds[group["best"]] == max(speeds.values())
        assert 0 <= group["alpha"] <= 1 and len(group["verify"]) == 9 and group["verify"][0] == 1
        alphas = [row["alpha"] for row in rows.values()]
        assert min(alphas) - 1e-3 <= group["alpha"] <= max(alphas) + 1e-3
        for row in rows.values():
            assert row["speedup"]["total"] > 0 and row["predicted"] > 0
            assert row["accepted_of_drafted"] <= row["alpha"] + 1e-3
            assert row["tau"] <= 1 + row["drafted_of_a_round"]
    alpha = {(g["section"], g["name"], g["temperature"]): g["alpha"] for g in every}
    assert alpha[drafts.TABLE_3, "random", 0] < 0.1 < alpha[drafts.TABLE_3, "model", 0]
    assert alpha[drafts.COPYING, "tables, copy", 0] > 0.5
    unsure = [g["rows"] for g in every if g["section"] == drafts.UNSURE]
    assert all(
        rows["0"]["drafted_of_a_round"] > rows["0.6"]["drafted_of_a_round"] for rows in unsure
    )
    best, *others = drafts.tables(found)
    assert len(best.rows) == len(drafts.DRAFTS) and len(best.head) == 11
    assert [len(table.rows) for table in others] == [9, 4, 8]


@slow
def test_policies(run_of):
    scale = replace(policies.QUICK, texts=2, tokens=16, fallback=1, long=16)
    found = run_of(policies, scale)
    check_line(found)
    named = {*map(str, range(9)), "auto", "transformers"}
    *loads, whole = found["workloads"].values()
    assert len(loads) == 3 and "oracle" not in whole
    for x in (*loads, whole):
        assert set(x["speeds"]) == named and x["speeds"]["0"] == 1
        best = max(x["speeds"][f"{gamma}"] for gamma in range(9))
        assert x["speeds"][f"{x['best']}"] == best
        assert x["auto_of_best"] == pytest.approx(x["speeds"]["auto"] / best, rel=2e-3)
    assert [x["alpha"] for x in loads] == sorted((x["alpha"] for x in loads), reverse=True)
    assert all(x["oracle"] > 0 for x in loads)
    for by_way in found["fallback"].values():
        assert list(by_way) == [policies.WITHOUT, policies.FALLBACK, "auto", "plain again"]
        assert all(x["worst"] >= x["loss"] - 1e-3 for x in by_way.values())
    assert [goal["met"] for goal in found["goals"]] == [
        min(x["auto_of_best"] for x in loads) >= policies.NEAR,
        whole["auto_of_best"] > 1,
        found["goals"][2]["measured"] <= policies.LOSS,
    ]
    speeds, lost, goals = policies.tables(found)
    assert "auto/best" in speeds.head and len(speeds.rows) == 4
    assert len(lost.rows) == 12 and len(goals.rows) == 3


@slow
def test_fixed_gammas_teach_the_policies_nothing(bundle):
    """Nor do two policies teach each other: each has its own costs."""
    engine = load(bundle, threads=1, verify=False)
    prompt = engine.tokenizer.encode("def f(x):\n")
    code = policies.Load("code", [prompt], 1.0, 3.0)
    scale = replace(policies.QUICK, texts=1, tokens=12)
    (texts,) = policies.stream(engine, [code], scale, Clock()).values()
    assert not engine.decoder.costs["model"].timed
    taught = runs.fresh(engine)
    runs.decode(Way(taught, {"gamma": "auto"}), prompt, 12, 0)
    assert taught.decoder.costs["model"].timed and not engine.decoder.costs["model"].timed
    assert all(run.stats.round_tokens == 11 for run in texts[0].values())


# The same text for all


@slow
def test_at_temperature_0_a_text_is_told_as_it_happens(bundle):
    """Then nothing is left to luck: rounds are those of the engine itself."""
    engine = load(bundle, threads=1, verify=False)
    fixed, sampler = retold.retelling(engine)
    prompt, options = engine.tokenizer.encode("def f(x):\n"), {"draft": "model", "temperature": 0.0}
    sampler.story = retold.story(engine, prompt, 24, 0, options)
    for gamma in (1, 4):
        ours, told = (
            runs.decode(Way(x, {**options, "gamma": gamma}), prompt, 24, 0).rounds
            for x in (engine, fixed)
        )
        assert [x.accepted for x in told] == [x.accepted for x in ours]


@slow
def test_above_it_the_coins_are_the_same_for_every_gamma(bundle):
    engine = load(bundle, threads=1, verify=False)
    fixed, sampler = retold.retelling(engine)
    prompt, options = engine.tokenizer.encode("import "), {"draft": "model", "temperature": 1.0}
    sampler.story = story = retold.story(engine, prompt, 40, 3, options)
    assert len(story.ids) == len(story.stands) == len(prompt) + 40
    for gamma in (0, 1, 3, 8):
        options = {"temperature": 1.0, "max_new_tokens": 40, "seed": gamma, "ignore_eos": True}
        told = fixed.generate(prompt, gamma=gamma, **options)
        assert [token.id for token in told.tokens] == list(story.ids[len(prompt) :])
        begin = len(prompt) + 1  # the first token is the prefill's
        for x in runs.decode(
            Way(fixed, {"temperature": 1.0, "gamma": gamma}), prompt, 40, 1
        ).rounds:
            stands = [*story.stands[begin : begin + x.gamma], False]
            assert x.accepted == stands.index(False)
            begin += x.accepted + 1
        assert begin == len(story.ids)


@slow
def test_as_many_tokens_stand_as_in_decoding_that_is_left_to_luck(bundle, corpus):
    """In the mean of texts; the control is a draft of temperature 3, and the difference is seen."""
    engine = load(bundle, threads=1, verify=False)
    fixed, sampler = retold.retelling(engine)
    options = {"draft": "model", "temperature": 1.0}
    prompts = Prompts.of(engine.tokenizer, corpus.held_out).many("completion", 12, 32)

    def alpha(engine, hot, known=None):
        decoded = []
        for seed, prompt in enumerate(prompts):
            tempered = {**options, "draft_temperature": 3.0} if hot else options
            if known is not None:
                sampler.story = retold.story(known, prompt, 64, seed, tempered)
            decoded.append(runs.decode(Way(engine, {**tempered, "gamma": 3}), prompt, 64, seed))
        return acceptance(decoded)

    free, told, hot = alpha(engine, False), alpha(fixed, False, engine), alpha(fixed, True, engine)
    assert told == pytest.approx(free, abs=0.12) and hot < free - 0.2
