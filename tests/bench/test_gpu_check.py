"""make gpu-check without a GPU: it runs to its end, and a part that breaks breaks nothing else."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from bench import engines_gpu, gpu_check
from bench.gpu_check import Part, check, parts

PYTHON = [sys.executable, "-c"]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: ("", "there is no CUDA driver"))


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: ("sm_90", None))


def outcomes(report):
    return {name: part["status"] for name, part in report["parts"].items()}


def test_every_gpu_part_is_skipped_by_name(tmp_path, no_gpu):
    report, good = check(tmp_path, 60, lambda out, sm: [p for p in parts(out, sm) if p.gpu])
    assert good
    assert report["gpu"] is None
    assert {
        "kernel tests", "kernel times", "TensorRT-RTX", "bundled: build", "bundled: check",
        "bundled: loop",
        "1b+small: build", "1b+small: times", "8b+1b: build", "8b+1b: times",
    } < report["parts"].keys()  # fmt: skip
    assert set(outcomes(report).values()) == {"skipped"}
    assert {part["reason"] for part in report["parts"].values()} == {"there is no CUDA driver"}
    assert json.loads((tmp_path / "gpu-check.json").read_text()) == report


def test_what_breaks_breaks_nothing_else(tmp_path, a_gpu):
    """A failure, a part that hangs with a child of its own, and one that writes half a result."""
    child = "import time; time.sleep(60)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    writes = f"open({str(tmp_path / 'r.json')!r}, 'w').write('{{\"us\": 5}}')"
    chosen = [
        Part("fails", [*PYTHON, "print('why'); raise SystemExit(3)"], 20),
        Part("hangs", [*PYTHON, hangs], 1),
        Part("no tool", [*PYTHON, ""], 20, tool="no-such-tool"),
        Part("writes", [*PYTHON, writes], 20, reads="r.json"),
        Part("no program", ["/no/such/program"], 20),
        Part("half a result", [*PYTHON, f"open({str(tmp_path / 'h.json')!r}, 'w').write('{{')"],
             20, reads="h.json"),
        Part("fine", [*PYTHON, "print('fine')"], 20),
    ]  # fmt: skip
    begin = time.monotonic()
    report, good = check(tmp_path, 60, lambda out, sm: chosen)
    assert time.monotonic() - begin < 40
    assert not good
    assert outcomes(report) == {
        "fails": "failed", "hangs": "timed out", "no tool": "skipped", "writes": "ok",
        "no program": "failed", "half a result": "failed", "fine": "ok",
    }  # fmt: skip
    assert report["parts"]["fails"]["exit"] == 3
    assert report["parts"]["writes"]["result"] == {"us": 5}
    log = (tmp_path / "gpu-check.log").read_text()
    assert "why" in log and "=== fine" in log


def test_results_of_an_earlier_run_are_not_this_ones(tmp_path, a_gpu):
    (tmp_path / "r.json").write_text('{"us": 1}')
    report, _ = check(
        tmp_path, 60, lambda out, sm: [Part("silent", [*PYTHON, ""], 20, reads="r.json")]
    )
    assert "result" not in report["parts"]["silent"]


def test_the_time_is_kept(tmp_path, a_gpu):
    sleeper = Part("sleeps", [*PYTHON, "import time; time.sleep(30)"], 30)
    late = Part("late", [*PYTHON, ""], 30)
    report, _ = check(tmp_path, 6, lambda out, sm: [sleeper, late])
    assert outcomes(report) == {"sleeps": "timed out", "late": "skipped"}
    # Two calls of ten minutes do all of it.
    every = parts(tmp_path, "sm_90")
    large = [part for part in every if part.name.startswith("8b+1b")]
    assert sum(part.seconds for part in large) <= 700
    assert all(part.least < part.seconds for part in every)


def test_a_part_is_not_begun_with_too_little_left(tmp_path, a_gpu):
    large = Part("large", [*PYTHON, ""], 480, least=240)
    report, good = check(tmp_path, 60, lambda out, sm: [large])
    assert good and outcomes(report) == {"large": "skipped"}
    assert "too few to begin" in report["parts"]["large"]["reason"]


def test_only_some_and_what_they_rest_on(tmp_path, a_gpu):
    chosen = [
        Part("library", [*PYTHON, ""], 20, gpu=False),
        *(Part(name, [*PYTHON, ""], 20) for name in ("a: build", "a: times", "b: build", "c")),
    ]
    report, _ = check(tmp_path, 60, lambda out, sm: chosen, only=["a:", "c"])
    assert list(report["parts"]) == ["library", "a: build", "a: times", "c"]


def test_bundles_are_not_where_the_report_is(tmp_path):
    """What is there is copied back; and in names of letters, digits, dots and dashes alone."""
    for part in parts(tmp_path, "sm_90"):
        if "bench.engines_gpu" in part.command:
            folder = Path(part.command[part.command.index("--out") + 1])
            assert tmp_path not in folder.parents
        if part.reads and not Path(part.reads).is_absolute():
            assert re.fullmatch(r"[\w.-]+", part.reads)
        elif part.reads:
            assert part.reads in part.command


def test_the_commands_are_understood(tmp_path):
    for part in parts(tmp_path, "sm_90"):
        if "bench.engines_gpu" in part.command:
            engines_gpu.parser().parse_args(part.command[3:])
