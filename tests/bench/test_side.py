"""The side-by-side benchmark: its prompts, and what its figures are made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import side_batch, side_plots, side_tables
from bench.peers import PEERS, Batch, Peer, Request, StepCosts, Text, Unavailable
from bench.side import FULL, QUICK, estimate, jobs, run, write
from bench.side_batch import Together
from bench.side_figures import (
    BASE,
    DRAFT,
    OWN,
    Sizes,
    Spread,
    acceptance,
    best,
    memory,
    ratios,
    row_bytes,
    summary,
    theory,
)
from bench.side_goals import first_tokens, goals
from bench.side_pair import Pair
from bench.side_run import Place, Run, System, ask, order, systems
from bench.workloads import Prompts, workloads
from runtime.theory.formulas import speedup

FUNCTION = "def area(width, height):\n" + "".join(
    f"    total_{i} = width * height + {i}\n" for i in range(12)
)
CODE = [f"import os\n\nclass A{i}:\n    pass\n\n{FUNCTION}\nfrom a import b\n" for i in range(6)]
PROSE = [f"Line {i} of a text about nothing much.\n" * 40 for i in range(5)]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def sparse(text: str) -> list[int]:
    """A token for every 16 characters."""
    return [sum(text[i : i + 16].encode()) for i in range(0, len(text), 16)]


def prompts(seed: int = 0) -> Prompts:
    return Prompts([*CODE, *PROSE], encode, [7], seed)


def test_prompts_have_the_length_that_was_asked_for() -> None:
    made = workloads(prompts(), 3, ((16, 8), (1500, 8)))
    assert {load.name for load in made} == {
        "completion 16+8", "continuation 16+8", "completion 1500+8", "editing 1500+8",
        "question 1500+8", "continuation 1500+8",
    }  # fmt: skip
    for load in made:
        length = int(load.name.split()[1].split("+")[0])
        assert all(len(prompt) == length for prompt in load.prompts), load.name
        assert len({tuple(prompt) for prompt in load.prompts}) == 3


def test_what_a_copying_prompt_ends_with() -> None:
    text = "".join(map(chr, prompts().editing(1500)))
    assert text.endswith("def area(width, height):\n")
    assert text.count(FUNCTION) >= 2


def test_prompts_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="no function fits"):
        prompts().editing(200)
    same = Prompts([CODE[0], PROSE[0]], lambda text: [1] * len(text), [7], 0)
    with pytest.raises(ValueError, match="3 different prompts: continuation 16"):
        workloads(same, 3, ((16, 8),), ("continuation",))


def test_documents_without_prose() -> None:
    with pytest.raises(ValueError, match="code and prose"):
        Prompts(CODE, encode, [], 0)


PLAIN, FAST = System("outrider", "plain"), System("outrider", "draft")
COUNTS = {
    "rounds": 4, "drafted": 16, "examined": 12, "accepted": 9, "output_tokens": 14,
    "time_draft": 1.6, "time_verify": 4.8, "time_sample": 0.6, "time_host": 0.6,
}  # fmt: skip


def text(step: float, tokens: int = 5, first: float = 0.5, **notes: float) -> Text:
    times = [first + step * i for i in range(tokens)]
    return Text(list(range(tokens)), times, [0.0] * tokens, notes=dict(notes))


def rounds(*counts: int, first: float = 1.0, step: float = 1.0) -> Text:
    """A text whose rounds gave so many tokens."""
    times = [first + step * i for i, count in enumerate(counts) for _ in range(count)]
    return Text(list(range(len(times))), times, [0.0] * len(times))


# Speeds and their ratios


def test_ratios_are_taken_prompt_by_prompt() -> None:
    rows = [{"a": text(1), "b": text(2)}, {"a": text(3), "b": text(3)}, {"a": text(1)}]
    assert ratios(rows, "a", "b") == [2, 1]
    assert ratios([{"a": text(1), "b": rounds(5)}], "a", "b") == []  # one round: no decoding


def test_a_spread_is_a_median_and_quartiles() -> None:
    assert Spread.of([1, 2, 3, 4, 10]) == Spread(3, 2, 4, 5)
    assert Spread.of([2]) == Spread(2, 2, 2, 1)
    assert Spread.of([]) is None


def test_the_best_of_systems_is_chosen_where_all_of_them_are() -> None:
    rows = [{"a": text(2), "b": text(1)}, {"a": text(0.1)}, {"a": text(2), "b": text(1)}]
    assert best(rows, ["a", "b", "absent"]) == "b"
    assert best(rows, ["absent"]) is None


def test_the_summary_of_a_workload() -> None:
    rows = [{OWN: text(0.1), BASE: text(0.3 + 0.1 * i, first=1), "c": text(1)} for i in range(3)]
    found = summary(rows, PLAIN, None)
    assert found is not None
    assert found["tokens_per_second"] == pytest.approx(10) and found["tau"] == 1
    assert found[f"over {BASE}"] == pytest.approx(4)
    theirs = summary(rows, System("transformers", "plain"), None)
    assert theirs is not None and theirs["ttft_ms"] == 1000 and theirs["prompts"] == 3
    assert summary(rows, System("genai", "plain"), None) is None


def test_the_bytes_of_a_round() -> None:
    sizes = Sizes(weights=900, row=1, draft_weights=90, draft_row=0, reads=100, bandwidth=5000)
    assert sizes.of_round(0) == 1000 and sizes.of_round(4) == 1360
    found = summary([{OWN: text(0.5)}], PLAIN, sizes)
    assert found is not None
    assert found["floor_ms"] == 200 and found["of_bandwidth"] == pytest.approx(0.4)
    drafted = {"transformers draft": rounds(1, 2, 2, step=0.5)}
    found = summary([drafted], System("transformers", "draft"), sizes)
    assert found is not None and found["tau"] == 2
    assert found["floor_ms"] == pytest.approx(1e3 * 1360 / 5000 / 2)
    lookup = {"transformers assistant": rounds(1, 2, 2)}  # nobody knows what it has drafted
    found = summary([lookup], System("transformers", "assistant"), sizes)
    assert found is not None and "floor_ms" not in found


def test_a_row_of_the_cache(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert row_bytes(tmp_path, 4) == 2 * 3 * 32 * 4
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 1}))
    assert row_bytes(tmp_path, 2) == 2 * 3 * 8 * 2


# Acceptance and the prediction


def test_acceptance_follows_from_rounds_of_a_fixed_gamma() -> None:
    """Rounds of 1 (rejected at once), 3 and 5 (all of 4) tokens; the last one does not count."""
    found = acceptance([rounds(2, 1, 3, 5, 1)], System("transformers", "draft"))
    assert found["accepted_of_drafted"] == pytest.approx(6 / 12)
    assert found["accepted_of_examined"] == pytest.approx(6 / (1 + 3 + 4), abs=1e-4)
    assert acceptance([rounds(2, 1, 3)], System("transformers", "assistant")) == {}
    assert acceptance([rounds(1, 1, 1)], System("transformers", "plain")) == {}


def test_acceptance_that_was_counted() -> None:
    found = acceptance([text(1, **COUNTS)] * 2, FAST)
    assert found["accepted_of_examined"] == 0.75 and found["accepted_of_drafted"] == 0.5625
    assert found["drafted_a_round"] == 4


def test_the_prediction_is_theorem_3_8_with_costs_measured_apart() -> None:
    plain = {
        "rounds": 10, "output_tokens": 11, "time_draft": 0.0, "time_verify": 9.0,
        "time_sample": 0.5, "time_host": 0.5,
    }  # fmt: skip
    rows = [{OWN: text(1, **plain), DRAFT: text(1, **COUNTS)}] * 2
    costs = [StepCosts(0.2, [2.0, 2.2, 2.4, 2.6, 3.0])] * 2
    found = theory(rows, costs)
    assert found is not None
    assert found["alpha"] == 0.75 and found["c"] == pytest.approx(0.1)
    assert found["verify"] == pytest.approx(1.5) and found["tau"] == 13 / 4
    assert found["predicted"] == pytest.approx(speedup(0.75, 4, 0.1, 1.5), abs=1e-3)
    assert found["measured"] == pytest.approx(13 / 7.6, abs=1e-3)  # tokens a plain step's time
    assert found["quotients"] == [found["measured_over_predicted"]] * 2
    dearer = theory(rows, [StepCosts(0.4, [2.0, 2.2, 2.4, 2.6, 3.0])] * 2)
    assert dearer is not None and dearer["measured"] == found["measured"]
    assert dearer["predicted"] < found["predicted"]  # the costs do not cancel
    assert theory([{OWN: text(1)}], costs) is None


# Texts together


def test_batches_are_timed_from_the_last_first_token() -> None:
    early = Text([0] * 4, [1.0, 3.0, 4.0, 5.0], [0.0] * 4)
    late = Text([0] * 4, [2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.5])
    found = Together.of([early, late])
    assert found == Together(2, decoding=6 / 3, whole=8 / 5, lost=0.0)
    with pytest.raises(ValueError, match="no token after"):
        Together.of([rounds(2), rounds(2)])


def test_the_table_of_batches() -> None:
    def one(size: int, rate: float) -> Together:
        return Together(size, rate, rate / 2, 0.0)

    rows = {
        1: [{OWN: one(1, 10), BASE: one(1, 5)}, {OWN: one(1, 20), BASE: one(1, 5)}],
        4: [{OWN: one(4, 30), BASE: one(4, 15)}, {OWN: one(4, 20)}],
    }
    found = {(e["size"], e["system"]): e for e in side_batch.summary(rows, [OWN, BASE, "absent"])}
    assert set(found) == {(1, OWN), (1, BASE), (4, OWN), (4, BASE)}
    assert found[4, OWN]["tokens_per_second"] == 25 and found[4, OWN]["each"] == 6.25
    assert found[4, OWN]["over_one"] == 2 and found[4, OWN]["over_transformers"] == 2


# Goals


def test_goals_are_met_by_medians_or_not_told() -> None:
    rows = [
        {
            OWN: text(1, first=0.5), DRAFT: text(0.5), BASE: text(4, first=1),
            "transformers draft": text(3), "llama.cpp plain": text(1.1, first=0.6),
        },
    ] * 3  # fmt: skip
    held = {OWN: {"ratio": 1.3}, BASE: {"ratio": 9.0}}
    told = goals(rows, [0.9, 0.97, 0.99], held, [1.0, 3.0])
    met = [goal.met for goal in told]
    assert met == [True, True, True, True, True, True, True, True, False]
    slow = [{**row, OWN: text(2, first=0.7)} for row in rows]
    assert [goal.met for goal in goals(slow, [0.9], {}, [])][:2] == [False, False]
    assert [g.met for g in goals([], [], {}, [])] == [None] * 9
    assert first_tokens(rows) == [pytest.approx(1.2)] * 3


def test_memory_is_held_against_weights_and_the_rows_of_the_text(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"peak": 6000, "before": 1000, "weights": 900, "cache_element": 4}
    found = Run(memory={"a": {**sizes, "draft_weights": 0}, "b": {**sizes, "draft_weights": 28}})
    told = memory(found, tmp_path, tmp_path)
    assert told["a"]["cache"] == 192 * 8 and told["b"]["cache"] == 2 * 192 * 8
    assert told["b"]["ratio"] == pytest.approx(6000 / 4000)
    assert told["b"]["ratio_without_libraries"] == pytest.approx(5000 / 4000)


# The run


def test_the_systems_of_the_peers() -> None:
    names = [system.name for system in systems(list(PEERS))]
    assert {OWN, BASE, "llama.cpp plain", "llama.cpp q4_0 plain"} <= set(names)
    assert "llama.cpp q4_0 draft" not in names
    assert [s.peer for s in systems(["outrider"])] == ["outrider"] * 4


def test_no_system_is_always_first_or_after_the_same_one() -> None:
    every = systems(list(PEERS))
    orders = [order(every, number, 3) for number in range(3)]
    assert all(sorted(x, key=every.index) == every for x in orders)
    assert len({x[0] for x in orders}) == 3
    before = {x[x.index(every[6]) - 1].name for x in orders}
    assert before == {every[5].name, every[7].name}


def test_lengths_and_durations_of_the_scales() -> None:
    every = systems(list(PEERS))
    shapes = {(cell.prompt, cell.new_tokens) for cell in FULL.cells}
    assert {p for p, _ in shapes} >= {16, 1500} and {n for _, n in shapes} >= {8, 512}
    assert FULL.count >= 3
    long = Prompts([*CODE, *PROSE], sparse, [7], 0)
    for scale, minutes in ((FULL, 30), (QUICK, 5)):
        work = jobs(scale, long, every)
        assert estimate(scale, work, every, 0.025) < 60 * minutes
        assert all(len(job.systems) == len(every) for job in work[:2])
    assert {s.name for s in work[-1].systems} == {s.name for s in every}


FACTS = {
    "load_seconds": 0.5, "weights": 10**7, "draft_weights": 10, "cache_element": 4,
    "before": 100, "dtype": "float32",
}  # fmt: skip


class FakePeer:
    """Answers as fast as it is told, with facts of a model of 10 MB."""

    def __init__(self, system: System):
        self.peer, self.facts = system.peer, FACTS

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

    def costs(self, position: int, gamma: int) -> StepCosts:
        return StepCosts(0.1, [1.0] * (gamma + 1))


def test_a_whole_run_with_peers_that_only_pretend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(place: Place, system: System, **options: Any) -> FakePeer:
        return FakePeer(system)

    monkeypatch.setattr(Place, "start", start)
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    place = Place(Pair(tmp_path, tmp_path, {"shape": "s", "alpha_wanted": 0.8}), 1, tmp_path)
    long = Prompts([*CODE, *PROSE], sparse, [7], 0)
    chosen = systems(["outrider", "transformers"])
    results = run(QUICK, place, long, chosen)
    assert len(results["cells"]) == 4 and set(results["all"]) == {"0", "1"}
    assert results["missing"]["outrider lookup"] == "no such thing in model.bin"
    assert results["missing"]["outrider draft, 4 together"] == "one text at a time"
    assert {e["system"] for e in results["batches"]} == {OWN, BASE}
    assert results["cells"][0]["systems"][OWN][f"over {BASE}"] == pytest.approx(3)
    assert results["memory"][OWN]["ratio"] == pytest.approx(2, abs=1e-2)
    told = {goal["goal"]: goal["met"] for goal in results["goals"]}
    assert told["plain decoding, times Transformers' plain"] is True
    assert told["plain decoding, times llama.cpp's float32"] is None

    assert write(results, tmp_path / "out")[:2] == ["side.json", "side.md"]
    page = (tmp_path / "out" / "side.md").read_text()
    for part in ("outrider plain", "Texts decoded together", "not measured", "| yes |"):
        assert part in page
    assert str(tmp_path) not in page + json.dumps(results)
    pytest.importorskip("matplotlib")
    drawn = side_plots.draw_or_explain(results, tmp_path / "out")
    assert drawn == ["speeds.png", "theory.png", "first.png", "batches.png"]


def test_tables_leave_out_what_no_system_has() -> None:
    found = {"systems": {"a": {"tokens_per_second": 10.0, "disturbed": 2, "prompts": 2}}}
    table = side_tables.speeds("some", found)
    assert table.heads == ["", "tok/s"] and table.rows == [["a *", "10.0"]]
    assert "| a * | 10.0 |" in table.markdown() and "a *   10.0" in table.text()


def test_a_mode_that_is_not_there_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Peer):
        def __init__(self) -> None:
            pass

        def generate(self, request: Request) -> Text:
            raise Unavailable("no such thing")

    found, system = Run(), System("genai", "draft")
    assert ask({system.worker: Failing()}, system, Request([1], 2), found) is None
    assert found.missing == {"genai draft": "no such thing"}
    assert "missing: genai draft" in capsys.readouterr().err
