"""make gpu-check without a GPU: it runs to its end, and a part that breaks breaks nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from bench.suites.gpu import engines, suite
from bench.suites.gpu.suite import Part, check, parts

PYTHON = [sys.executable, "-c"]


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(suite, "find_gpu", lambda: ("sm_90", None))


def outcomes(report):
    return {name: part["status"] for name, part in report["parts"].items()}


def test_every_gpu_part_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "find_gpu", lambda: ("", "there is no CUDA driver"))
    report, good = check(tmp_path, 60, lambda out, sm: [p for p in parts(out, sm) if p.gpu])
    assert good
    assert report["gpu"] is None
    assert {
        "kernel tests", "kernel times", "bundled: build", "bundled: check", "bundled: loop",
        "1b+small: build", "1b+small: times", "8b+1b: build", "8b+1b: times",
        "sanitizer: memcheck",
    } < report["parts"].keys()  # fmt: skip
    assert set(outcomes(report).values()) == {"skipped"}
    assert {part["reason"] for part in report["parts"].values()} == {"there is no CUDA driver"}
    assert json.loads((tmp_path / "gpu-check.json").read_text()) == report


def test_what_breaks_breaks_nothing_else(tmp_path, a_gpu):
    """A failure, a part that hangs with a child of its own, one that writes half a result, and one
    that leaves an earlier run's."""
    child = "import time; time.sleep(60)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    writes = f"open({str(tmp_path / 'r.json')!r}, 'w').write('{{\"us\": 5}}')"
    half = f"open({str(tmp_path / 'h.json')!r}, 'w').write('{{')"
    (tmp_path / "old.json").write_text('{"us": 1}')
    chosen = [
        Part("fails", [*PYTHON, "print('why'); raise SystemExit(3)"], 20),
        Part("hangs", [*PYTHON, hangs], 1),
        Part("no tool", [*PYTHON, ""], 20, tool="no-such-tool"),
        Part("writes", [*PYTHON, writes], 20, reads="r.json"),
        Part("no program", ["/no/such/program"], 20),
        Part("half a result", [*PYTHON, half], 20, reads="h.json"),
        Part("silent", [*PYTHON, ""], 20, reads="old.json"),
        Part("too little left", [*PYTHON, ""], 480, least=240),
        Part("fine", [*PYTHON, "print('fine')"], 20),
    ]
    report, good = check(tmp_path, 60, lambda out, sm: chosen)
    assert not good
    assert outcomes(report) == {
        "fails": "failed", "hangs": "timed out", "no tool": "skipped", "writes": "ok",
        "no program": "failed", "half a result": "failed", "silent": "ok",
        "too little left": "skipped", "fine": "ok",
    }  # fmt: skip
    assert report["parts"]["fails"]["exit"] == 3
    assert report["parts"]["writes"]["result"] == {"us": 5}
    assert "result" not in report["parts"]["silent"]
    assert "too few to begin" in report["parts"]["too little left"]["reason"]
    log = (tmp_path / "gpu-check.log").read_text()
    assert "why" in log and "=== fine" in log


def test_the_time_of_all_is_kept(tmp_path, a_gpu):
    sleeper = Part("sleeps", [*PYTHON, "import time; time.sleep(30)"], 30, least=0)
    report, good = check(tmp_path, 1, lambda out, sm: [sleeper])
    assert outcomes(report) == {"sleeps": "timed out"} and not good


def test_only_some_and_what_they_rest_on(tmp_path, a_gpu):
    chosen = [
        Part("library", ["true"], 20, gpu=False),
        *(Part(name, ["true"], 20) for name in ("a: build", "a: times", "b: build", "c")),
    ]
    report, _ = check(tmp_path, 60, lambda out, sm: chosen, only=["a:", "c"])
    assert list(report["parts"]) == ["library", "a: build", "a: times", "c"]


def test_the_plan(tmp_path):
    """Commands that are understood, in two calls of ten minutes. Bundles lie outside the report's
    folder, which is copied back: names of letters, digits, dots and dashes alone."""
    every = parts(tmp_path, "sm_90")
    assert sum(part.seconds for part in every if part.name.startswith("8b+1b")) <= 700
    for part in every:
        assert part.least < part.seconds
        if part.command[:3] == suite.ENGINES:
            given = engines.parser().parse_args(part.command[3:])
            assert tmp_path not in given.out.parents
        if part.reads and Path(part.reads).is_absolute():
            assert part.reads in part.command
        elif part.reads:
            assert re.fullmatch(r"[\w.-]+", part.reads)
            assert str(tmp_path / part.reads) in part.command
