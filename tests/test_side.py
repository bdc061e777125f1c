"""The side-by-side benchmark: its prompts, and what its figures are made of."""

from __future__ import annotations

import pytest

from bench import side
from bench.peers import PEERS, Text, Unavailable
from bench.side import Run, System, ratios, summary, systems, table, theory
from bench.workloads import Prompts, workloads
from runtime.theory import speedup

FUNCTION = "def area(width, height):\n" + "".join(
    f"    total_{i} = width * height + {i}\n" for i in range(12)
)
CODE = [f"import os\n\nclass A{i}:\n    pass\n\n{FUNCTION}\nfrom a import b\n" for i in range(6)]
PROSE = [f"Line {i} of a text about nothing much.\n" * 40 for i in range(5)]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


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


def test_documents_without_prose() -> None:
    with pytest.raises(ValueError, match="code and prose"):
        Prompts(CODE, encode, [], 0)


def text(step: float, tokens: int = 5, first: float = 0.5, **notes: float) -> Text:
    times = [first + step * i for i in range(tokens)]
    return Text(list(range(tokens)), times, [0.0] * tokens, notes=dict(notes))


def test_ratios_are_taken_prompt_by_prompt() -> None:
    rows = [{"a": text(1), "b": text(2)}, {"a": text(3), "b": text(3)}, {"a": text(1)}]
    assert ratios(rows, "a", "b") == [2, 1]


def test_the_summary_of_a_workload() -> None:
    rows = [
        {side.OWN: text(0.1), side.BASE: text(0.3 + 0.1 * i, first=1), "c": text(1)}
        for i in range(3)
    ]
    found = summary(rows, [side.OWN, side.BASE, "absent"])
    assert list(found) == [side.OWN, side.BASE]
    assert found[side.OWN]["tokens_per_second"] == pytest.approx(10)
    assert found[side.OWN][f"over {side.BASE}"] == pytest.approx(4)
    assert found[side.BASE]["ttft_ms"] == 1000 and found[side.BASE]["prompts"] == 3
    assert "4.00" in table("some", found) and "absent" not in table("some", found)


def test_the_prediction_is_theorem_3_8_with_the_runs_own_costs() -> None:
    plain = {"rounds": 10, "time_verify": 9.0, "time_sample": 0.5, "time_host": 0.5}
    fast = {
        "rounds": 4, "drafted": 16, "examined": 12, "accepted": 9, "output_tokens": 14,
        "time_draft": 1.6, "time_verify": 4.8, "time_sample": 0.6, "time_host": 0.6,
    }  # fmt: skip
    rows = [{side.OWN: text(1, **plain), "outrider draft": text(1, **fast)}] * 2
    found = theory(rows)
    assert found is not None
    assert found["alpha"] == 0.75 and found["c"] == pytest.approx(0.1)
    assert found["verify"] == pytest.approx(1.5) and found["tau"] == 13 / 4
    assert found["predicted"] == pytest.approx(speedup(0.75, 4, 0.1, 1.5), abs=1e-3)
    assert found["measured"] == pytest.approx(13 / 7.6, abs=1e-3)  # tokens a plain step's time
    assert theory([{side.OWN: text(1)}]) is None


def test_the_systems_of_the_peers() -> None:
    names = [system.name for system in systems(list(PEERS))]
    assert {side.OWN, side.BASE, "llama.cpp plain", "llama.cpp q4_0 plain"} <= set(names)
    assert "llama.cpp q4_0 draft" not in names
    assert [s.peer for s in systems(["outrider"])] == ["outrider"] * 4


def test_a_mode_that_is_not_there_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    class Peer:
        def generate(self, request: object) -> Text:
            raise Unavailable("no such thing")

    run, system = Run(), System("genai", "draft")
    assert side._ask({("genai", "float32"): Peer()}, system, None, run) is None  # type: ignore[dict-item, arg-type]
    assert run.missing == {"genai draft": "no such thing"}
    assert "missing: genai draft" in capsys.readouterr().err
