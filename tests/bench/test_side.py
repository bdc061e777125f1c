"""The side-by-side benchmark: what its figures are made of, and a run with made-up systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_core import CODE, PROSE

from bench.core.clock import Clock
from bench.core.costs import Traffic
from bench.core.pair import Pair
from bench.core.prompts import Prompts
from bench.suites.side import SUITE
from bench.suites.side.figures import Together, acceptance, of_batches, of_memory, summary, theory
from bench.suites.side.goals import BASE, DRAFT, OWN, best, first_tokens, goals, ratios
from bench.suites.side.run import Found, Place, System, systems
from bench.suites.side.suite import FULL, QUICK, jobs, run
from bench.systems import SYSTEMS
from bench.systems.protocol import Batch, Request, Steps, Text, Unavailable
from runtime.costs import RoundCosts
from runtime.theory.formulas import speedup

PLAIN, FAST = System("outrider", "plain"), System("outrider", "draft")
COUNTS = {
    "rounds": 4, "drafted": 16, "examined": 12, "accepted": 9, "output_tokens": 14,
    "time_draft": 1.6, "time_verify": 4.8, "time_sample": 0.6, "time_host": 0.6,
}  # fmt: skip


def sparse(text: str) -> list[int]:
    """A token for every 16 characters."""
    return [sum(text[i : i + 16].encode()) for i in range(0, len(text), 16)]


def text(step: float, tokens: int = 5, first: float = 0.5, **notes: float) -> Text:
    times = [first + step * i for i in range(tokens)]
    return Text(list(range(tokens)), times, [0.0] * tokens, notes=dict(notes))


def rounds(*counts: int, step: float = 1.0) -> Text:
    """A text whose rounds gave so many tokens."""
    times = [1.0 + step * i for i, count in enumerate(counts) for _ in range(count)]
    return Text(list(range(len(times))), times, [0.0] * len(times))


# Speeds and their ratios


def test_ratios_are_taken_prompt_by_prompt() -> None:
    rows = [{"a": text(1), "b": text(2)}, {"a": text(3), "b": text(3)}, {"a": text(1)}]
    assert ratios(rows, "a", "b") == [2, 1]
    assert ratios([{"a": text(1), "b": rounds(5)}], "a", "b") == []  # one round: no decoding


def test_the_best_of_systems_is_chosen_where_all_of_them_are() -> None:
    rows = [{"a": text(2), "b": text(1)}, {"a": text(0.1)}, {"a": text(2), "b": text(1)}]
    assert best(rows, ["a", "b", "absent"]) == "b"
    assert best(rows, ["absent"]) is None


def test_the_summary_of_a_workload() -> None:
    rows = [{OWN: text(0.1), BASE: text(0.3 + 0.1 * i, first=1), "c": text(1)} for i in range(3)]
    found = summary(rows, PLAIN)
    assert found is not None
    assert found["tokens_per_second"] == pytest.approx(10) and found["tau"] == 1
    assert found[f"over {BASE}"] == pytest.approx(4)
    theirs = summary(rows, System("transformers", "plain"))
    assert theirs is not None and theirs["ttft_ms"] == 1000 and theirs["texts"] == 3
    assert summary(rows, System("genai", "plain")) is None


def test_the_floor_of_a_token_is_its_share_of_a_round_s_bytes() -> None:
    traffic = Traffic(weights=900, row=1, rows=100, draft_weights=90)
    found = summary([{OWN: text(0.5)}], PLAIN, traffic, 5000)
    assert found is not None
    assert found["floor_ms"] == 200 and found["of_bandwidth"] == pytest.approx(0.4)
    drafted = {"transformers draft": rounds(1, 2, 2, step=0.5)}
    found = summary([drafted], System("transformers", "draft"), traffic, 5000)
    assert found is not None and found["tau"] == 2
    assert found["floor_ms"] == pytest.approx(1e3 * 1360 / 5000 / 2)
    unknown = {"transformers assistant": rounds(1, 2, 2)}  # nobody knows what it has drafted
    found = summary([unknown], System("transformers", "assistant"), traffic, 5000)
    assert found is not None and "floor_ms" not in found


# Acceptance and the prediction


def test_acceptance_follows_from_rounds_of_a_fixed_gamma() -> None:
    """Rounds of 1 (rejected at once), 3 and 5 (all of 4) tokens; the last one does not count."""
    found = acceptance([rounds(2, 1, 3, 5, 1)], System("transformers", "draft"))
    assert found["accepted_of_drafted"] == pytest.approx(6 / 12)
    assert found["accepted_of_examined"] == pytest.approx(6 / (1 + 3 + 4), abs=1e-4)
    assert acceptance([rounds(2, 1, 3)], System("transformers", "assistant")) == {}
    counted = acceptance([text(1, **COUNTS)] * 2, FAST)
    assert counted["accepted_of_examined"] == 0.75 and counted["drafted_a_round"] == 4


def test_the_prediction_is_theorem_3_8_with_costs_measured_apart() -> None:
    plain = {
        "rounds": 10, "output_tokens": 11, "time_draft": 0.0, "time_verify": 9.0,
        "time_sample": 0.5, "time_host": 0.5,
    }  # fmt: skip
    rows = [{OWN: text(1, **plain), DRAFT: text(1, **COUNTS)}] * 2
    found = theory(rows, [RoundCosts(2.0, 0.1, [1, 1.1, 1.2, 1.3, 1.5])] * 2)
    assert found is not None
    assert found["alpha"] == 0.75 and found["c"] == pytest.approx(0.1)
    assert found["verify"] == pytest.approx(1.5) and found["tau"] == 13 / 4
    assert found["predicted"] == pytest.approx(speedup(0.75, 4, 0.1, 1.5), abs=1e-3)
    assert found["measured"] == pytest.approx(13 / 7.6, abs=1e-3)  # tokens a plain step's time
    assert found["quotients"] == [found["measured_over_predicted"]] * 2
    dearer = theory(rows, [RoundCosts(2.0, 0.2, [1, 1.1, 1.2, 1.3, 1.5])] * 2)
    assert dearer is not None and dearer["measured"] == found["measured"]
    assert dearer["predicted"] < found["predicted"]  # the costs do not cancel
    assert theory([{OWN: text(1)}], [None]) is None


# Batches, goals, memory


def test_batches_are_timed_from_the_last_first_token() -> None:
    early = Text([0] * 4, [1.0, 3.0, 4.0, 5.0], [0.0] * 4)
    late = Text([0] * 4, [2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.5])
    assert Together.of([early, late]) == Together(2, decoding=6 / 3, whole=8 / 5, lost=0.0)
    with pytest.raises(ValueError, match="no token after"):
        Together.of([rounds(2), rounds(2)])


def test_the_table_of_batches() -> None:
    def some(size: int, rate: float) -> list[Text]:
        return [text(size / rate)] * size

    rows = {
        1: [{OWN: some(1, 10), BASE: some(1, 5)}, {OWN: some(1, 20), BASE: some(1, 5)}],
        4: [{OWN: some(4, 30), BASE: some(4, 15)}, {OWN: some(4, 20)}],
    }
    found = {(e["size"], e["system"]): e for e in of_batches(rows, [OWN, BASE, "absent"])}
    assert set(found) == {(1, OWN), (1, BASE), (4, OWN), (4, BASE)}
    assert found[4, OWN]["tokens_per_second"] == 25 and found[4, OWN]["each"] == 6.25
    assert found[4, OWN]["over_one"] == 2 and found[4, OWN]["over_transformers"] == 2


def test_goals_are_met_by_medians_or_not_told() -> None:
    rows = [
        {
            OWN: text(1, first=0.5), DRAFT: text(0.5), BASE: text(4, first=1),
            "transformers draft": text(3), "llama.cpp plain": text(1.1, first=0.6),
        },
    ] * 3  # fmt: skip
    held = {OWN: {"ratio": 1.3}, BASE: {"ratio": 9.0}}
    told = goals(rows, [0.9, 0.97, 0.99], held, [1.0, 3.0])
    assert [goal.met for goal in told] == [True] * 8 + [False]
    slow = [{**row, OWN: text(2, first=0.7)} for row in rows]
    assert [goal.met for goal in goals(slow, [0.9], {}, [])][:2] == [False, False]
    assert [g.met for g in goals([], [], {}, [])] == [None] * 9
    assert first_tokens(rows) == [pytest.approx(1.2)] * 3


def write_config(folder: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 1}
    (folder / "config.json").write_text(json.dumps(config))


def test_memory_is_held_against_weights_and_the_rows_of_the_text(tmp_path: Path) -> None:
    write_config(tmp_path)
    sizes = {"peak": 6000, "before": 1000, "weights": 900, "cache_element": 4}
    memory = {"a": {**sizes, "draft_weights": 0}, "b": {**sizes, "draft_weights": 28}}
    told = of_memory(Found(Clock(), memory=memory), tmp_path, tmp_path)
    assert told["a"]["cache"] == 192 * 8 and told["b"]["cache"] == 2 * 192 * 8
    assert told["b"]["ratio"] == pytest.approx(6000 / 4000)
    assert told["b"]["ratio_without_libraries"] == pytest.approx(5000 / 4000)


# The run


def test_who_gets_which_workload() -> None:
    every = systems(list(SYSTEMS))
    names = {system.name for system in every}
    assert {OWN, BASE, "llama.cpp plain", "llama.cpp q4_0 plain"} <= names
    assert "llama.cpp q4_0 draft" not in names
    work = jobs(FULL, Prompts([*CODE, *PROSE], sparse, [7], 0), every)
    assert {len(job.systems) for job in work[:8]} == {len(every)}
    assert {len(job.systems) for job in work[8:]} == {sum(s.among_few for s in every)}
    lengths = {len(prompt) for job in work for prompt in job.load.prompts}
    assert lengths == {16, 128, 1024, 1500}


class FakePeer:
    """Answers as fast as it is told, with facts of a model of 10 MB."""

    facts: ClassVar[dict[str, Any]] = {
        "load_seconds": 0.5, "weights": 10**7, "draft_weights": 10, "cache_element": 4,
        "before": 100, "dtype": "float32",
    }  # fmt: skip

    def __init__(self, system: System):
        self.peer = system.peer

    def __enter__(self) -> FakePeer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, request: Request) -> Text:
        if request.mode == "lookup":
            raise Unavailable("no such thing in /home/me/build/model.bin")
        step = {"outrider": 0.01, "transformers": 0.03}[self.peer]
        ours = {**COUNTS, "output_tokens": request.new_tokens} if request.mode == "draft" else {}
        plain = {"time_draft": 0.0, "time_verify": 1.0, "time_sample": 0.1, "time_host": 0.1}
        made = text(step, request.new_tokens, **{**plain, "output_tokens": 2, **ours})
        return Text(made.tokens, made.times, made.lost, {"peak": 2 * 10**7}, made.notes)

    def batch(self, request: Batch) -> list[Text]:
        if request.mode == "draft":
            raise Unavailable("one text at a time")
        return [text(0.01, request.new_tokens) for _ in request.prompts]

    def steps(self, request: Steps) -> tuple[dict[str, list[Any]], int]:
        raise Unavailable("no draft model")


def test_a_whole_run_with_systems_that_only_pretend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the whole: what is missing is noted once and costs no other figure; --out has it all."""

    def start(place: Place, system: System, **options: Any) -> FakePeer:
        return FakePeer(system)

    monkeypatch.setattr(Place, "start", start)
    write_config(tmp_path)
    place = Place(Pair(tmp_path, tmp_path, {"shape": "s", "alpha_wanted": 0.8}), 1, tmp_path)
    long = Prompts([*CODE, *PROSE], sparse, [7], 0)
    results = run(QUICK, place, long, systems(["outrider", "transformers"]), Clock())
    assert len(results["cells"]) == 4 and set(results["all"]) == {"0", "1"}
    assert results["missing"]["outrider lookup"] == "no such thing in model.bin"
    assert results["missing"]["outrider draft, 4 together"] == "one text at a time"
    assert results["missing"]["costs of outrider"] == "no draft model"
    assert {e["system"] for e in results["batches"]} == {OWN, BASE}
    assert results["cells"][0]["systems"][OWN][f"over {BASE}"] == pytest.approx(3)
    assert results["memory"][OWN]["ratio"] == pytest.approx(2, abs=1e-2)
    told = {goal["goal"]: goal["met"] for goal in results["goals"]}
    assert told["plain decoding, times Transformers' plain"] is True
    assert told["plain decoding, times llama.cpp's float32"] is None

    kept, out = tmp_path / "kept.json", tmp_path / "out"
    kept.write_text(json.dumps({"benchmark": "side", **results}))
    assert SUITE.main(["--show", str(kept), "--out", str(out)]) == 0
    said, page = capsys.readouterr().out, (out / "side.md").read_text()
    for part in ("outrider plain", "Texts decoded together", "not measured", "| yes |"):
        assert part in page
    assert str(tmp_path) not in page + said
    pytest.importorskip("matplotlib")
    assert {x.name for x in out.glob("*.png")} == {"speeds.png", "first.png", "batches.png"}
