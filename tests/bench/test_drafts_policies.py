"""The benchmarks of drafts, policies and clients: on made-up rounds, and on the bundled pair with
outputs too short for meaningful figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_core import a_round, a_run

from bench.core import runs
from bench.core.clock import Clock
from bench.core.prompts import Prompts
from bench.core.runs import Way
from bench.suites import clients, drafts
from bench.suites.policies import replay
from bench.suites.policies import suite as policies
from models.corpus import Corpus, collect
from runtime.bundle import load
from runtime.files.errors import OutriderError
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.formulas import speedup

CHECKOUT = Path(__file__).parents[2]
Make = Callable[..., dict[str, Any]]


def test_figures_of_a_group_are_of_its_undisturbed_texts() -> None:
    """alpha counts all requests; speed-ups and the theorem's costs only the undisturbed ones."""
    plain, ways = a_run(*[a_round(0, 0)] * 20), {"2": (2, 1), "4": (4, 3)}
    texts = [
        {drafts.PLAIN: plain, **{name: a_run(*[a_round(*x)] * 10) for name, x in ways.items()}}
        for _ in range(3)
    ]
    texts.append({name: replace(run, lost=0.9) for name, run in texts[0].items()})
    found = drafts.group_figures(texts, 4)
    assert found["texts"] == 3 and found["lost"] == 0.0 and found["best"] == "2"
    row = found["rows"]["4"]
    assert row["alpha"] == 0.75 and row["accepted_of_drafted"] == 0.75 and row["tau"] == 4
    assert row["speedup"]["total"] == pytest.approx(2 / 2.2, rel=1e-3)
    assert row["predicted"] == pytest.approx(speedup(0.75, 4, 0.2, 1.4), rel=1e-3)
    assert found["alpha"] == pytest.approx((1 + 3) / (2 + 4), rel=1e-3)
    groups = [
        {"section": s, "name": "model", **found} for s in (drafts.TABLE_3, drafts.DRAFT_TEMPERATURE)
    ]
    best, every = drafts.tables({"groups": [groups[0], {**groups[1], "lost": 0.5}]})
    # Table 3 shows only the best gamma, with the alpha of all gammas.
    assert [row[:2] for row in best.rows] == [["model, 2", "0.667"]]
    assert [row[:2] for row in every.rows] == [["model, 2 *", "0.500"], ["model, 4 *", "0.750"]]


def test_policies_are_held_against_the_best_gamma_and_their_goals() -> None:
    """Two drafts per round with one accepted beat plain decoding; four rejected ones do not."""
    good, bad, plain = ([a_round(*x)] * n for x, n in (((2, 1), 10), ((4, 0), 20), ((0, 0), 20)))
    ways = {
        "0": plain,
        "plain again": plain,
        "1": bad,
        "2": good,
        "auto": good,
        "transformers": bad,
    }
    texts = [{name: a_run(*rounds) for name, rounds in ways.items()}] * 2
    found = policies.summarise(texts, 2)
    assert found["best"] == 2 and found["speeds"]["2"] == found["speeds"]["auto"] > 1
    assert found["auto_of_best"] == 1 and found["noise"] == 0
    differing = [texts[0], {**texts[1], "auto": texts[1]["1"]}]
    near = runs.measured_speedup(differing, "auto", "2")
    error = policies.summarise(differing, 2)["auto_of_best_error"]  # absolute, for "a ± b"
    assert error == pytest.approx(near.total * near.error, rel=1e-3) and near.total < 0.8
    worse = policies.speed_loss(texts, "transformers")
    assert worse == pytest.approx(1 - found["speeds"]["1"], rel=1e-3)
    loads = {"some": {**found, "auto_of_best": 0.94, "noise": 0.03}, policies.ALL: found}
    lost = {"some": {"auto": worse, "fallback": 0.01}}
    speeds, _, goals = policies.tables({"workloads": loads, "fallback": lost, "long": 256})
    assert len(speeds.rows) == 2 and "quieter machine" in speeds.notes[0]
    assert [row[1] for row in goals.rows] == ["0.940", "1.000", f"{worse:.3f}"]
    assert {row[2] for row in goals.rows} == {"no"}


# On the bundled pair

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return collect()


@pytest.fixture(scope="module")
def bundle(workshop: Any) -> str:
    pair = CHECKOUT / "models" / "target", CHECKOUT / "models" / "draft"
    return str(workshop.bundle(*pair, max_len=1024))


@pytest.fixture
def run_suite(bundle: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that runs a benchmark and returns its JSON object, which names no path."""

    def make(suite: Any, scale: Any) -> dict[str, Any]:
        monkeypatch.setattr(suite, "collect", lambda: corpus)
        found: dict[str, Any] = suite.run(bundle, scale, 1, Clock())
        text = json.dumps(found)
        assert json.loads(text) == found and "NaN" not in text and "Infinity" not in text
        assert str(CHECKOUT) not in text and "workshop" not in text
        return found

    return make


@slow
def test_clients(run_suite: Make) -> None:
    found = run_suite(clients, clients.ClientScale(512, 1, 0))
    assert found["figures"].keys() == clients.ROWS.keys()
    assert all(figure["ms"] > 0 and figure["taken"] == 1 for figure in found["figures"].values())
    (table,) = clients.tables(found)
    bases = [name == base for name, (_, base) in clients.ROWS.items()]
    assert [row[2] for row, is_base in zip(table.rows, bases, strict=True) if is_base] == [
        "1.00"
    ] * 4
    with pytest.raises(OutriderError, match="--prompt=511 is not from 512 to 992"):
        run_suite(clients, clients.ClientScale(511, 1, 0))


@slow
def test_drafts(run_suite: Make) -> None:
    scale = replace(drafts.QUICK, texts=2, tokens=12, gammas=(2, 4), prompt=100, characters=50_000)
    found = run_suite(drafts, scale)
    rows = {(g["section"], g["name"]): g["rows"] for g in found["groups"]}
    for row in (row for some in rows.values() for row in some.values()):
        assert row["speedup"]["total"] > 0 and row["predicted"] > 0
        assert row["accepted_of_drafted"] <= row["alpha"] + 1e-3
    bad, good = (rows[drafts.TABLE_3, f"{x}, T=0"]["gamma 4"] for x in ("random", "model"))
    assert bad["alpha"] < 0.1 < good["alpha"]
    bold, careful = (rows[drafts.DRAFT_THRESHOLD, "T=0"][f"threshold {p}"] for p in ("0", "0.6"))
    assert bold["drafted_of_a_round"] > careful["drafted_of_a_round"]
    assert [len(table.rows) for table in drafts.tables(found)] == [18, 9, 4, 4]


@slow
def test_policies(run_suite: Make) -> None:
    found = run_suite(
        policies, replace(policies.QUICK, texts=2, tokens=16, fallback=1, fallback_tokens=16)
    )
    *loads, _ = found["workloads"].values()
    assert [x["alpha"] for x in loads] == sorted((x["alpha"] for x in loads), reverse=True)
    assert all(set(x["speeds"]) == {*map(str, range(9)), "auto", "transformers"} for x in loads)
    assert [len(table.rows) for table in policies.tables(found)] == [4, 12, 3]


@pytest.fixture
def engine(bundle: str) -> TextEngine:
    return load(bundle, threads=1, verify=False)


@slow
def test_fixed_gammas_teach_the_policies_nothing(engine: TextEngine) -> None:
    code = [engine.tokenizer.encode("def f(x):\n")], {"draft": "model", "temperature": 1.0}
    scale = replace(policies.QUICK, texts=1, tokens=12)
    (texts,) = policies.decode_workloads(engine, {"code": code}, scale, Clock()).values()
    assert all(run.stats.round_tokens == 11 for run in texts[0].values())
    taught = runs.fresh_engine(engine)
    runs.decode(Way(taught, {**code[1], "gamma": "auto"}), code[0][0], 12, 0)
    untaught, learned = (
        x.decoder.shared_gamma("model").costs.gamma_to_time(1) for x in (engine, taught)
    )
    assert untaught == 0 and learned != 0  # the gamma to be timed next


@slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_gamma_tells_the_same_text_with_the_same_coins(
    engine: TextEngine, temperature: float
) -> None:
    """At temperature 0 nothing is random, so the rounds are also those of the engine itself."""
    fixed, sampler = replay.replaying_engine(engine)
    prompt = engine.tokenizer.encode("import ")
    sampler.text = text = replay.sample_text(engine, prompt, 40, 3, {"temperature": temperature})
    for gamma in (0, 1, 3, 8):
        options: dict[str, Any] = {"temperature": temperature, "gamma": gamma}
        tokens = fixed.generate(
            prompt, **options, max_new_tokens=40, seed=gamma, ignore_eos=True
        ).tokens
        assert [token.id for token in tokens] == list(text.ids[len(prompt) :])
        run = runs.decode(Way(fixed, options), prompt, 40, 1)
        begin = len(prompt) + 1  # the first token is the prefill's
        for x in run.rounds:
            begin += [*text.accepted[begin : begin + x.gamma], False].index(False) + 1
        assert begin == len(text.ids)
        assert run.stats.accepted == begin - len(prompt) - 1 - len(run.rounds)
        if temperature == 0:
            own = runs.decode(Way(engine, options), prompt, 40, 0)
            assert [x.gamma for x in run.rounds] == [x.gamma for x in own.rounds]
            assert run.stats.accepted == own.stats.accepted


@slow
def test_as_many_tokens_stand_as_in_decoding_that_is_left_to_luck(
    engine: TextEngine, corpus: Corpus
) -> None:
    """Replayed acceptance agrees with free decoding on average. Control: a draft at temperature 3
    is accepted visibly less."""
    fixed, sampler = replay.replaying_engine(engine)
    prompts = Prompts(engine.tokenizer, corpus.held_out).many("completion", 12, 32)

    def alpha(decoder: TextEngine, **hot: float) -> float:
        options, decoded = {"draft": "model", "temperature": 1.0, **hot}, []
        for seed, prompt in enumerate(prompts):
            if decoder is fixed:
                sampler.text = replay.sample_text(engine, prompt, 64, seed, options)
            decoded.append(runs.decode(Way(decoder, {**options, "gamma": 3}), prompt, 64, seed))
        return Stats.total(run.stats for run in decoded).acceptance_rate

    free, replayed, hot = alpha(engine), alpha(fixed), alpha(fixed, draft_temperature=3.0)
    assert replayed == pytest.approx(free, abs=0.12) and hot < free - 0.2
