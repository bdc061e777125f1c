"""The growth benchmark, with fake processes whose times and sizes grow in proportion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_core import CODE, PROSE, render_page
from test_side import SPARSE, FakeContext

from bench.core import pair
from bench.core.clock import LOST_LIMIT, Clock, Sample
from bench.core.machine import MemoryReader
from bench.core.prompts import Prompts
from bench.suites import growth
from bench.suites.growth import QUICK, SUITE, GrowthRun, make_point, run, tables
from bench.systems.protocol import Request, StepsRequest, Text

WEIGHTS = {"16m": 64 * 10**6, "46m": 184 * 10**6, "bundled": 22 * 10**6}
opened: list[int] = []  # slots of the processes that timed steps


class FakePeer(FakeContext):
    """10 ms per slot and position, a second per 100 prompt tokens, 0.1 s per new token."""

    def __init__(self, name: str, slots: int):
        weights = WEIGHTS[name]
        self.slots, self.facts = slots, {
            "load_seconds": weights / 1e8, "load_lost": 0.0, "weights": weights, "before": 10**6,
            "loaded": 2 * weights, "cache_element": 4, "parameters": weights // 4,
        }  # fmt: skip

    def generate(self, request: Request) -> list[Text]:
        times = [len(request.prompts[0]) / 100 + i / 10 for i in range(request.new_tokens)]
        return [Text([0] * request.new_tokens, times, [0.0] * len(times))]

    def time_steps(self, request: StepsRequest) -> dict[str, list[Sample]]:
        assert request.slots == self.slots
        opened.append(self.slots)
        return {str(n): [Sample(0.01 * n * request.slots)] * 5 for n in request.widths}


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrowthRun:
    monkeypatch.setattr(GrowthRun, "start_peer", lambda self, name, slots=1: FakePeer(name, slots))
    monkeypatch.setattr(GrowthRun, "checkpoint", lambda self, name: pair.TARGET)
    monkeypatch.setattr(MemoryReader, "bandwidth", 6.6e9)  # floors of 9.9: 4 digits resolve a row
    prompts, reader = Prompts(SPARSE, [*CODE, *PROSE]), MemoryReader(1, 1 << 22)
    scale = replace(QUICK, patience=0.0)
    return GrowthRun(scale, 1, tmp_path, prompts, reader, Clock())


def test_every_curve_and_what_is_told_of_it(growing: GrowthRun) -> None:
    opened.clear()
    results = run(growing)
    # The processes of all points take turns, every other pass in reverse order.
    assert opened == [1, 1, *growth.SLOTS, *reversed(growth.SLOTS), *[1] * 6]
    found = {name: section["curves"] for name, section in results["sections"].items()}
    assert {name: set(curves) for name, curves in found.items()} == {
        "prompt": {"first token", "a token"}, "positions": {"a call"}, "slots": {"step"},
        "model size": {"load", "peak of memory", "step"},
    }  # fmt: skip

    ends = {curve: points[-1] for curves in found.values() for curve, points in curves.items()}
    assert (ends["first token"]["x"], ends["first token"]["y"]) == (1500, 15e3)
    assert ends["a token"]["y"] == pytest.approx(100)
    assert (ends["a call"]["x"], ends["a call"]["y"]) == (9, 90)
    assert (found["slots"]["step"][-1]["x"], found["slots"]["step"][-1]["y"]) == (8, 80)
    # More rows are read for longer prompts, more positions and more slots.
    for section, curve in (("prompt", "a token"), ("positions", "a call"), ("slots", "step")):
        floors = [p["floor"] for p in found[section][curve]]
        assert floors == sorted(floors) and floors[-1] > floors[0] > 0
    assert (ends["load"]["x"], ends["load"]["y"]) == (46e6, 1840)
    peak = ends["peak of memory"]
    assert (peak["y"], peak["floor"]) == pytest.approx((368e6 / 2**20, 185e6 / 2**20), rel=1e-3)
    assert not growing.time_point(1, [Sample(1.0, 2 * LOST_LIMIT)] * 9, 1)["quiet"]
    assert "model size: parameters" in render_page(SUITE, results)


def test_a_table_has_values_floors_marks_and_exponents() -> None:
    def curve(scale: float) -> list[dict[str, Any]]:
        ys = [(2.0**i, scale * 2.0**i) for i in range(5)]
        return [make_point(x, y, y / 2, quiet=x < 16) for x, y in ys]

    curves = {"step": curve(1), "peak of memory": curve(1000)}
    (table,) = tables({"sections": {"some": {"axis": "slots", "curves": curves}}})
    assert table.head == ["", "1", "2", "4", "8", "16"]
    assert table.rows[0] == ["step, ms", "1", "2", "4", "8", "16*"]
    assert table.rows[1] == ["  floor", "0.5", "1", "2", "4", "8"]
    assert table.rows[2][:3] == ["peak of memory, MiB", "1,000", "2,000"]
    assert "x^1.00 (1.00 to 1.00)" in table.notes[0]
    assert "beyond 0 ms: x^1.00" in table.notes[0]
