"""bench/drafts.py and bench/policies.py: their arithmetic on made-up rounds, and both commands on
the bundled pair with texts so short that the figures mean nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import code_text, drafts, policies, retold, ways
from bench.core.record import RoundRecord as Round
from bench.ways import Clock, Run, Way
from models.corpus import collect
from runtime.bundle import load
from runtime.costs import RoundCosts
from runtime.stats import Stats
from runtime.theory import formulas as theory

CHECKOUT = Path(__file__).parents[2]
STEP, DRAFT, WIDER = 0.01, 0.002, 0.001  # seconds: a plain step, a draft step, each further token


def a_round(gamma, accepted, catch_up=0.0, begin=0.0):
    draft = gamma * DRAFT
    return Round(
        drafts=(7,) * gamma, accepted=accepted, emitted=accepted + 1, begin=begin,
        end=begin + catch_up + draft + STEP + gamma * WIDER, catch_up=catch_up, draft=draft,
        verify=STEP, sample=0.0,
    )  # fmt: skip


def a_run(*rounds, lost=0.0):
    stats = Stats()
    for x in rounds:
        stats.count_round(x.gamma, x.accepted, min(x.gamma, x.accepted + 1), x.emitted)
        stats.time_draft += x.draft
    return Run(rounds, stats, lost)


# Arithmetic


def test_a_text_s_time_has_no_prompt_in_it_but_all_later_reading():
    plain = a_round(0, 0)
    run = a_run(plain, a_round(1, 0, catch_up=0.5), plain, a_round(1, 0, catch_up=0.25))
    assert run.seconds == pytest.approx(2 * STEP + 2 * (STEP + DRAFT + WIDER) + 0.25)


def test_costs_come_from_rounds():
    plain = a_run(*[a_round(0, 0)] * 20)
    drafting = a_run(*[a_round(4, 1)] * 20, *[a_round(2, 2)] * 20, a_round(3, 0, begin=1.0))
    slow = replace(drafting.rounds[-1], end=9.0)  # one round says nothing
    costs = ways.costs_of([plain], [replace(drafting, rounds=(*drafting.rounds, slow))], 6)
    assert costs.plain == pytest.approx(STEP)
    assert costs.draft == pytest.approx(DRAFT / STEP)
    assert costs.verify == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6])
    assert costs.round(4) == pytest.approx(1.4 + 4 * 0.2)


def test_what_is_predicted_is_the_theorem_where_all_rounds_are_alike():
    costs = RoundCosts(STEP, 0.2, [1 + 0.1 * k for k in range(9)])
    run = a_run(*[a_round(4, 2)] * 5)
    assert ways.predicted(0.7, [run], costs) == pytest.approx(theory.speedup(0.7, 4, 0.2, 1.4))
    fewer = a_run(*[a_round(4, 2)] * 5, *[a_round(0, 0)] * 5)
    both = (theory.expected_tokens(0.7, 4) + 1) / (4 * 0.2 + 1.4 + 1)
    assert ways.predicted(0.7, [fewer], costs) == pytest.approx(both)


def test_gains_and_quiet_texts():
    fast, slow = (a_run(*[a_round(0, 0)] * n) for n in (10, 15))
    texts = [
        {"plain": slow, "way": fast},
        {"plain": slow, "way": slow},
        {"plain": slow, "way": slow},
    ]
    gain = ways.gain(texts, "way", "plain")
    assert gain.total == pytest.approx(45 / 40) and gain.median == pytest.approx(1)
    assert (gain.low, gain.high) == pytest.approx((1, 1.5)) and gain.error > 0.05
    same = [{"plain": slow, "way": slow}] * 3
    assert ways.gain(same, "way", "plain").error == 0
    disturbed = [{"way": replace(fast, lost=lost)} for lost in (0.3, 0.0, 0.5, 0.4)]
    assert [text["way"].lost for text in ways.quiet(disturbed)] == [0.0, 0.3]
    assert len(ways.quiet([{"way": fast}] * 3)) == 3


@pytest.mark.parametrize(("patience", "passes"), [(0.0, 1), (9.0, 3)])
def test_disturbed_texts_are_decoded_again_while_there_is_patience(monkeypatch, patience, passes):
    losses = iter([0.5, 0.1, 0.3])
    monkeypatch.setattr(ways, "decode", lambda *_: replace(a_run(), lost=next(losses)))
    runs = ways.decode_all({"way": Way(None, {})}, [0], 8, 0, Clock(patience))
    assert len(list(losses)) == 3 - passes
    assert runs["way"].lost == (0.5 if passes == 1 else 0.1)


def test_the_draft_s_text_is_none_of_the_prompts_text(corpus):
    part = code_text.training_part(corpus.train, 100_000)
    assert sum(map(len, part)) == 100_000 and len(part) > 3
    assert not any(document in held for held in corpus.held_out for document in part)


# The commands


@pytest.fixture(scope="module")
def corpus():
    return collect()


@pytest.fixture(scope="module")
def bundle(workshop):
    return str(workshop.bundle(CHECKOUT / "models" / "target", CHECKOUT / "models" / "draft"))


@pytest.fixture(scope="module")
def run_of(bundle, corpus):
    """A benchmark's JSON object, and what it printed."""

    def run(module, scale, capsys):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "collect", lambda: corpus)
            found = module.run(bundle, scale, 1)
        return found, capsys.readouterr()

    return run


def check_line(found):
    """One line of JSON, that names no machine and no path."""
    text = json.dumps(found)
    assert json.loads(text) == found
    assert "NaN" not in text and "Infinity" not in text
    assert str(CHECKOUT) not in text and "workshop" not in text
    assert "/" not in json.dumps(found["machine"])


def test_drafts(run_of, capsys):
    scale = replace(drafts.QUICK, texts=2, tokens=12, gammas=(2, 4), characters=50_000)
    found, printed = run_of(drafts, scale, capsys)
    check_line(found)
    assert list(found["table_3"]) == list(drafts.DRAFTS)
    for draft, by_temperature in found["table_3"].items():
        assert list(by_temperature) == ["0", "1"]
        for x in by_temperature.values():
            rows = x["rows"]
            assert list(rows) == ["2", "4"] and f"{x['best']}" in rows, draft
            speeds = {g: row["speedup"]["total"] for g, row in rows.items()}
            assert speeds[f"{x['best']}"] == max(speeds.values())
            assert 0 <= x["alpha"] <= 1 and len(x["verify"]) == 9 and x["verify"][0] == 1
            low, high = sorted(row["alpha"] for row in rows.values())
            assert low - 1e-3 <= x["alpha"] <= high + 1e-3
    every = [*(x for t in found["table_3"].values() for x in t.values()),
             *(x for kind in found["copying"].values() for x in kind.values()),
             found["draft_temperature"], *found["threshold"].values()]  # fmt: skip
    assert len(every) == drafts.GROUPS
    for row in (row for x in every for row in x["rows"].values()):
        assert row["speedup"]["total"] > 0 and row["predicted"] > 0
        assert row["accepted_of_drafted"] <= row["alpha"] + 1e-3
        assert row["tau"] <= 1 + row["drafted_of_a_round"]
    assert found["table_3"]["random"]["0"]["alpha"] < 0.1 < found["table_3"]["model"]["0"]["alpha"]
    copying = found["copying"]
    assert copying["tables"]["copy"]["rows"]["copy"]["alpha"] > 0.5
    assert list(found["draft_temperature"]["rows"]) == ["0.5", "0.7", "1", "1.4"]
    lengths = [
        [row["drafted_of_a_round"] for row in found["threshold"][t]["rows"].values()] for t in "01"
    ]
    assert all(x[0] > x[-1] for x in lengths)
    assert len([x for x in printed.out.splitlines() if " | " in x]) == 1 + len(drafts.DRAFTS)
    assert "s to go" in printed.err


def test_policies(run_of, capsys):
    scale = replace(policies.QUICK, texts=2, tokens=16, fallback=1, long=16)
    found, printed = run_of(policies, scale, capsys)
    check_line(found)
    named = {*map(str, range(9)), "auto", "transformers"}
    *loads, whole = found["workloads"].values()
    assert len(loads) == 3
    for x in (*loads, whole):
        assert set(x["speeds"]) == named and x["speeds"]["0"] == 1
        best = max(x["speeds"][f"{gamma}"] for gamma in range(9))
        assert x["speeds"][f"{x['best']}"] == best
        assert x["auto_of_best"] == pytest.approx(x["speeds"]["auto"] / best, rel=2e-3)
    assert [x["alpha"] for x in loads] == sorted((x["alpha"] for x in loads), reverse=True)
    for by_way in found["fallback"].values():
        assert list(by_way) == [policies.WITHOUT, policies.FALLBACK, "auto", "plain again"]
        assert all(x["worst"] >= x["loss"] - 1e-3 for x in by_way.values())
    assert [goal["met"] for goal in found["goals"]] == [
        min(x["auto_of_best"] for x in loads) >= policies.NEAR,
        whole["auto_of_best"] > 1,
        found["goals"][2]["measured"] <= policies.LOSS,
    ]
    assert "auto/best" in printed.out


def test_fixed_gammas_teach_the_policies_nothing(bundle):
    """Nor do two policies teach each other: each has its own costs."""
    engine = load(bundle, threads=1, verify=False)
    prompt = engine.tokenizer.encode("def f(x):\n")
    code = policies.Workload(
        "code", [prompt], {"draft": "model", "temperature": 1.0, "draft_temperature": 3.0}
    )
    scale = replace(policies.QUICK, texts=1, tokens=12)
    (texts,) = policies.stream(engine, [code], scale, Clock()).values()
    assert engine.decoder.costs["model"].lacking(1) == 0
    taught = ways.fresh(engine)
    ways.decode(Way(taught, {"gamma": "auto"}), prompt, 12, 0)
    assert taught.decoder.costs["model"].lacking(1) is None
    assert engine.decoder.costs["model"].lacking(1) == 0
    assert all(run.stats.round_tokens == 11 for run in texts[0].values())


# The same text for all


def test_at_temperature_0_a_text_is_told_as_it_happens(bundle):
    """Then nothing is left to luck: rounds are those of the engine itself."""
    engine = load(bundle, threads=1, verify=False)
    fixed, sampler = retold.retelling(engine)
    prompt, options = engine.tokenizer.encode("def f(x):\n"), {"draft": "model", "temperature": 0.0}
    sampler.story = retold.story(engine, prompt, 24, 0, options)
    for gamma in (1, 4):
        ours, told = (
            ways.decode(Way(x, {**options, "gamma": gamma}), prompt, 24, 0).rounds
            for x in (engine, fixed)
        )
        assert [x.accepted for x in told] == [x.accepted for x in ours]


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
        for x in ways.decode(
            Way(fixed, {"temperature": 1.0, "gamma": gamma}), prompt, 40, 1
        ).rounds:
            stands = [*story.stands[begin : begin + x.gamma], False]
            assert x.accepted == stands.index(False)
            begin += x.accepted + 1
        assert begin == len(story.ids)


def test_as_many_tokens_stand_as_in_decoding_that_is_left_to_luck(bundle, corpus):
    """In the mean of texts; the control is a draft of temperature 3, and the difference is seen."""
    engine = load(bundle, threads=1, verify=False)
    fixed, sampler = retold.retelling(engine)
    options = {"draft": "model", "temperature": 1.0}
    prompts = code_text.held_out(engine.tokenizer, corpus.held_out, 12, 32)

    def alpha(engine, hot, known=None):
        runs = []
        for seed, prompt in enumerate(prompts):
            tempered = {**options, "draft_temperature": 3.0} if hot else options
            if known is not None:
                sampler.story = retold.story(known, prompt, 64, seed, tempered)
            runs.append(ways.decode(Way(engine, {**tempered, "gamma": 3}), prompt, 64, seed))
        return ways.acceptance(runs)

    free, told, hot = alpha(engine, False), alpha(fixed, False, engine), alpha(fixed, True, engine)
    assert told == pytest.approx(free, abs=0.12) and hot < free - 0.2
