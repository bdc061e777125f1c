"""The growth benchmark: its points, its tables, and a run whose processes are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from test_core import CODE, PROSE
from test_side import sparse

from bench.core import pair
from bench.core.clock import DISTURBED, Clock, Sample, figure
from bench.core.pair import Built
from bench.core.prompts import Prompts
from bench.core.timed import Timed
from bench.suites.growth import SUITE, curves
from bench.suites.growth.curves import SECTIONS, Answer, CurvePoint, Growing, Key
from bench.suites.growth.suite import QUICK, json_of, run, tables
from bench.systems.protocol import Batch, Request, Steps, Text

TINY = replace(
    QUICK, name="tiny", outputs=(2, 4, 8), contexts=(8, 16, 32), slots=(1, 2, 3), vocab=(600,),
    widths=(1, 2, 3), sizes={"tiny": {}}, rounds=1, loads=1, patience=0.0, read_bytes=1 << 22,
    prompt=12, tokens=4,
)  # fmt: skip


class FakePeer:
    """A process whose times and sizes are proportional to what is asked for."""

    facts: ClassVar[dict[str, Any]] = {
        "load_seconds": 0.5, "load_lost": 0.0, "weights": 10**6, "draft_weights": 10**5,
        "before": 10**6, "loaded": 3 * 10**6,
    }  # fmt: skip

    def __init__(self, slots: int):
        self.slots = slots

    def __enter__(self) -> FakePeer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def generate(self, request: Request) -> Text:
        times = [len(request.prompt) / 100 + i / 10 for i in range(request.new_tokens)]
        rounds = request.new_tokens - 1
        notes = {
            "rounds": rounds, "drafted": 4 * rounds if request.mode == "draft" else 0,
            "prompt_tokens": len(request.prompt), "time_draft": 0.0,
            "time_verify": 100.0 * rounds, "time_sample": 0.0, "time_host": 0.0,
        }  # fmt: skip
        tokens = [0] * request.new_tokens
        sizes = {"peak": 4 * 10**6, "anonymous": 10**6}
        return Text(tokens, times, [0.0] * len(times), sizes, notes)

    def batch(self, request: Batch) -> list[Text]:
        assert len(request.prompts) == self.slots
        return [self.generate(Request(p, request.new_tokens)) for p in request.prompts]

    def steps(self, request: Steps) -> tuple[dict[str, list[Sample]], int]:
        assert request.slots == self.slots
        return {str(n): [Sample(0.01 * n * request.slots)] * 5 for n in request.widths}, 5 * 10**6


def growing(tmp_path: Path, **changes: Any) -> Growing:
    prompts = Prompts([*CODE, *PROSE], sparse, [7], 0)
    scale = replace(TINY, **changes)
    return Growing(scale, 1, tmp_path, pair.TARGET, pair.DRAFT, prompts, Clock())


def points(*values: float, quiet: bool = True) -> list[CurvePoint]:
    return [CurvePoint(2.0**i, y, y, y, y / 2, quiet) for i, y in enumerate(values)]


def test_a_table_has_values_floors_marks_and_exponents() -> None:
    step = [*points(1e-3, 2e-3, 4e-3, 8e-3), *points(16e-3, quiet=False)]
    step[-1] = replace(step[-1], x=16.0)
    found = {"step": step, "peak memory": points(2**20, 2**21, 2**22, 2**23, 2**24)}
    content = {name: json_of(some) for name, some in found.items()}
    (table,) = tables({"sections": {"some": {"axis": "slots", "curves": content}}})
    assert table.head == ["", "1", "2", "4", "8", "16"]
    assert table.rows[0] == ["step, ms", "1", "2", "4", "8", "16*"]
    assert table.rows[1] == ["  floor", "0.5", "1", "2", "4", "8"]
    assert table.rows[2][:3] == ["peak memory, MiB", "1", "2"]
    assert "x^1.00 ±0.00 (1.00 to 1.00)" in table.notes[0]
    assert "beyond 0 ms: x^1.00" in table.notes[0]


def test_turns_alternate_and_disturbed_samples_are_put_aside(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def ask(name: str) -> curves.Asked:
        def asked(turn: int) -> dict[Key, Answer]:
            seen.append((name, turn))
            lost = 0.0 if turn != 1 else 2 * DISTURBED
            return {(name, 1): (Sample(9.0 if turn == 1 else 2.0, lost), 100.0)}

        return asked

    some = growing(tmp_path, rounds=6)
    some.reader()
    found = some.curves([ask("a"), ask("b")])
    assert seen[:4] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)] and len(seen) == 12
    (point,) = found["a"]
    assert point.high == 2.0 and point.quiet
    assert point.floor == pytest.approx(100 / some.reader.bandwidth)
    assert some.point(1, figure([Sample(1.0)] * 3), None).quiet  # no more were taken
    assert not some.point(1, figure([Sample(1.0, 1.0)] * 9), None).quiet


def test_all_sections_with_processes_that_only_pretend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Every curve is there, with what was asked of which process, and its figure drawn."""
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "weights.bin").write_bytes(bytes(4000))
    read = SimpleNamespace(pair=SimpleNamespace(target=SimpleNamespace(parameters=1000)))

    def made(*_: object, built: Any = lambda _: None, **options: object) -> Path:
        built(Built(Timed(9.0, 0.0, 10**8), Timed(1.0, 0.0, 10**7)))
        return bundle

    monkeypatch.setattr(pair, "bundle", made)
    monkeypatch.setattr(curves, "read_bundle", lambda *_, **__: read)
    monkeypatch.setattr(Growing, "peer", lambda self, *_, slots=1: FakePeer(slots))
    monkeypatch.setattr(Growing, "checkpoint", lambda self, *_: pair.TARGET)
    results = run(growing(tmp_path))
    found = {name: section["curves"] for name, section in results["sections"].items()}
    memory = {"peak memory", "anonymous memory"}
    stages = {"export", "build", "load", "step"}
    assert {name: set(some) for name, some in found.items()} == {
        "output length": {"plain", "gamma 4"}, "context": {"TTFT", "TPOT", *memory},
        "batch": {"step", *memory}, "vocabulary": {"step", "bundle"}, "gamma": {"verification"},
        "model size": stages | {f"{stage}, peak" for stage in stages},
    }  # fmt: skip
    assert list(found) == list(SECTIONS)
    for name, some in found.items():
        for curve, content in some.items():
            ys = [p["y"] for p in content["points"]]
            assert ys and min(ys) > 0, (name, curve)
            assert all(p["low"] <= p["y"] <= p["high"] for p in content["points"])
            assert (content["power"] is not None) == (len(ys) >= 3)
    # Ten milliseconds a slot, a tenth of a second a round, whose floors have the draft's bytes.
    assert found["batch"]["step"]["power"]["exponent"] == pytest.approx(1)
    plain, drafted = (found["output length"][name]["points"][-1] for name in ("plain", "gamma 4"))
    assert plain["y"] == pytest.approx(0.8) and drafted["floor"] > 1.3 * plain["floor"]
    assert found["context"]["TTFT"]["points"][-1]["y"] == pytest.approx(0.32)

    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"benchmark": "growth", **results}))
    assert SUITE.main(["--show", str(kept), "--out", str(tmp_path)]) == 0
    assert "model size: parameters" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    assert {x.name for x in tmp_path.glob("*.png")} == {"growth-time.png", "growth-memory.png"}
