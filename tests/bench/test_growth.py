"""The growth benchmark: its fits on curves that are known, and all of it on a tiny checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import MAX_LEN, Workshop
from commands import error_line
from test_side import CODE, PROSE

from bench import growth, growth_curves, growth_plot, growth_process
from bench.growth_curves import SECTIONS, Bench, Point
from bench.growth_fit import marginal, power
from bench.growth_process import ask
from bench.machine import resident
from bench.timing import DISTURBED, Sample, figure
from runtime.files.errors import EXIT_STATUS, OutriderError

X = [1.0, 2, 4, 8, 16, 32, 64]
TINY = replace(
    growth.QUICK, name="tiny", outputs=(2, 4, 8), contexts=(8, 16, 32), slots=(1, 2, 3),
    vocab=(600,), hidden=72, gammas=(0, 1, 2), sizes={"tiny": {}},
    rounds=1, loads=1, patience=0.0, read_bytes=1 << 22, max_len=MAX_LEN, prompt=12, tokens=4,
)  # fmt: skip


# The fits


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_a_power_law_is_recovered(exponent: float) -> None:
    fit = power(X, [3 * x**exponent for x in X])
    assert fit is not None
    assert fit.exponent == pytest.approx(exponent, abs=1e-9) and fit.scale == pytest.approx(3)
    assert fit.error == pytest.approx(0, abs=1e-9) and fit.worst == pytest.approx(0, abs=1e-9)
    assert (fit.first, fit.last) == (1, 64) and fit.at(100) == pytest.approx(3 * 100**exponent)


def intervals(trials: int, bend: float = 0.0) -> float:
    """The share of noisy curves x (1 + bend ln x) whose 95 % interval has the exponent 1."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(trials):
        noise = np.exp(0.1 * rng.standard_normal(len(X)))
        fit = power(X, [x * (1 + bend * np.log(x)) * n for x, n in zip(X, noise, strict=True)])
        assert fit is not None
        inside += fit.low <= 1 <= fit.high
    return inside / trials


def test_the_interval_covers_what_it_says() -> None:
    assert intervals(2000) == pytest.approx(0.95, abs=0.02)


def test_control_another_curve_is_not_covered() -> None:
    assert intervals(200, bend=1.0) < 0.2


@pytest.mark.parametrize(("constant", "exponent"), [(20.0, 1.0), (500.0, 2.0), (3.0, 0.5)])
def test_what_grows_beside_a_constant(constant: float, exponent: float) -> None:
    y = [constant + x**exponent for x in X]
    fit, line = marginal(X, y), power(X, y)
    assert fit is not None and line is not None
    assert fit.exponent == pytest.approx(exponent) and fit.constant == pytest.approx(constant)
    assert line.exponent < 0.7 * exponent and line.worst > 0.02  # control: no power law


@pytest.mark.parametrize(("constant", "most"), [(20.0, 1.0), (0.0, 0.3)])
def test_its_interval_under_noise(constant: float, most: float) -> None:
    rng, inside, trials = np.random.default_rng(1), 0, 100
    for _ in range(trials):
        noise = 1 + 0.02 * rng.standard_normal(len(X))
        fit = marginal(X, [(constant + x) * n for x, n in zip(X, noise, strict=True)])
        assert fit is not None and fit.low is not None and fit.high is not None
        assert fit.high - fit.low < most
        inside += fit.low <= 1 <= fit.high
    assert inside / trials > 0.9


def test_a_constant_has_no_exponent_beside_it() -> None:
    rng = np.random.default_rng(2)
    fit = marginal(X, [5 * (1 + 0.02 * n) for n in rng.standard_normal(len(X))])
    assert fit is not None and not fit.bounded


def test_too_few_points_or_none_above_zero() -> None:
    assert power([1, 2], [1, 2]) is None and marginal([1, 2, 3], [1, 2, 3]) is None
    assert power([1, 2, 3], [0, 1, 2]) is None and marginal([1, 2, 3, 4], [0, 1, 2, 3]) is None


# What is said of a curve


def points(*values: float, quiet: bool = True) -> list[Point]:
    return [Point(2.0**i, y, y, y, y / 2, quiet) for i, y in enumerate(values)]


def test_a_table_has_values_floors_and_exponents() -> None:
    curves = {"step": points(1e-3, 2e-3, 4e-3, 8e-3, 16e-3), "peak memory": points(2**20, 2**21)}
    lines = list(growth.table("some", curves))
    assert lines[0] == "some" and lines[1].split() == ["1", "2", "4", "8", "16"]
    assert lines[2].split() == ["step,", "ms", "1", "2", "4", "8", "16"]
    assert lines[3].split() == ["floor", "0.5", "1", "2", "4", "8"]
    assert "x^1.00 ±0.00 (1.00 to 1.00) from 1 to 16" in lines[4]
    assert "beyond no constant: x^1.00" in lines[4]
    assert lines[6].split() == ["peak", "memory,", "MiB", "1", "2"]
    assert "too few points" in lines[8]


def test_a_disturbed_figure_is_marked() -> None:
    (line,) = [
        line
        for line in growth.table("some", {"step": points(1.0, quiet=False)})
        if line.startswith("step")
    ]
    assert line.endswith("*")


def test_turns_alternate_and_disturbed_samples_are_put_aside(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def call(name: str) -> growth_curves.Call:
        def timed(turn: int) -> dict[growth_curves.Key, growth_curves.Timed]:
            seen.append((name, turn))
            lost = 0.0 if turn != 1 else 2 * DISTURBED
            return {(name, 1): growth_curves.Timed(Sample(9.0 if turn == 1 else 2.0, lost), 100.0)}

        return timed

    bench = Bench(replace(TINY, rounds=6), 1, tmp_path, tmp_path, tmp_path, [])
    bench.reader()
    curves = bench.texts([call("a"), call("b")])
    assert seen[:4] == [("a", 0), ("b", 0), ("b", 1), ("a", 1)] and len(seen) == 12
    (point,) = curves["a"]
    assert point.high == 2.0 and point.quiet
    assert point.floor == pytest.approx(100 / bench.reader.bandwidth)
    few = figure([Sample(1.0)] * 3)
    assert bench.point(1, few, None).quiet  # no more were taken
    assert not bench.point(1, figure([Sample(1.0, 1.0)] * 9), None).quiet


# The whole of it


def test_a_process_of_its_own(workshop: Workshop) -> None:
    bundle = workshop.bundle(workshop.checkpoint("llama", head_dim=16))
    small, large = (ask("texts", bundle, 1, slots, 16) for slots in (1, 4))
    assert 0 < small["anonymous"] < small["rss"] <= small["peak"]
    assert 0 < small["least"] - small["before"] < large["least"] - large["before"]
    torch_and_all = resident()["peak"]
    assert small["peak"] < torch_and_all / 2  # control: it does not have this process's peak


def test_a_process_that_fails(tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="ended with status 1"):
        ask("texts", tmp_path, 1, 1, 16)


def test_an_option_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert growth.main(["--threads", "0"]) == EXIT_STATUS["option"]
    assert "threads" in error_line(capsys.readouterr().err, "option")


def test_all_sections_of_a_tiny_pair(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target = workshop.checkpoint("llama", head_dim=16)
    draft = workshop.checkpoint("llama", head_dim=16, blur=0.1)

    def made(target: Path, draft: Path | None, *_: object) -> Path:
        return workshop.bundle(target, draft)

    def here(task: str, *arguments: object) -> dict[str, Any]:
        return growth_process.TASKS[task](*map(str, arguments))

    # In this process, which has imported torch: its peaks mean nothing.
    monkeypatch.setattr(growth_curves, "ask", here)
    for module in (growth, growth_curves):
        monkeypatch.setattr(module, "build", made)
    results = growth.run(
        TINY, target, draft, target, [*CODE, *PROSE], threads=1, work=tmp_path,
        clock=growth.Clock(),
    )  # fmt: skip
    said = capsys.readouterr().out
    assert list(results["sections"]) == list(SECTIONS)
    for name, section in results["sections"].items():
        assert f"{name}: {section['axis']}" in said
        for curve, content in section["curves"].items():
            ys = [p["y"] for p in content["points"]]
            assert ys and min(ys) > 0, (name, curve)
            assert all(p["low"] <= p["y"] <= p["high"] for p in content["points"])
            assert (content["power"] is not None) == (len(ys) >= 3)
    curves = {name: set(section["curves"]) for name, section in results["sections"].items()}
    memory = {"peak memory", "anonymous memory"}
    assert curves["output length"] == {"plain", "gamma 4"}
    assert curves["context"] == {"TTFT", "TPOT", *memory}
    assert curves["batch"] == {"step", *memory}
    assert curves["vocabulary"] == {"step", "bundle"} and curves["gamma"] == {"verification"}
    stages = {"export", "build", "load", "step"}
    assert curves["model size"] == stages | {f"{stage}, peak" for stage in stages}
    (tmp_path / growth_plot.FILE).write_text(json.dumps(results))
    written = growth_plot.draw_or_explain(json.loads(json.dumps(results)), tmp_path)
    assert written == ["growth-time.png", "growth-memory.png"]
    assert all((tmp_path / name).stat().st_size > 10_000 for name in written)
