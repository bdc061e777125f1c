"""`make gpu-check` without a GPU: it completes, and a part that fails does not affect others."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from commands import error_line

import engines.command
import export.__main__
from bench.suites.gpu import engines as measuring
from bench.suites.gpu import parts as planned
from bench.suites.gpu import suite
from bench.suites.gpu.parts import Part, parts, preparing_parts
from bench.suites.gpu.suite import run_parts
from runtime.files.errors import EXIT_STATUS

PYTHON = [sys.executable, "-c"]


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(suite, "find_gpu", lambda: ("sm_90", None))


def outcomes(report):
    return {name: part["status"] for name, part in report["parts"].items()}


def test_every_gpu_part_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "find_gpu", lambda: ("", "there is no CUDA driver"))
    report, good = run_parts(tmp_path, 60, lambda out, sm: [p for p in parts(out, sm) if p.gpu])
    assert good and report["gpu"] is None
    assert {
        "smoke", "kernel, quick", "1b+small: times", "8b+1b: times", "bundled: check",
        "kernel tests", "sanitizer: memcheck", "kernel times",
    } < report["parts"].keys()  # fmt: skip
    assert set(outcomes(report).values()) == {"skipped"}
    assert {part["reason"] for part in report["parts"].values()} == {"there is no CUDA driver"}
    assert json.loads((tmp_path / "gpu-check.json").read_text()) == report


def test_what_breaks_breaks_nothing_else(tmp_path, a_gpu):
    """A part that fails, one that hangs with a child process, one that writes half a result, and
    one that leaves an earlier run's result in place."""
    child = "import time; time.sleep(60)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    result, half, old = (tmp_path / name for name in ("r.json", "h.json", "old.json"))
    old.write_text('{"us": 1}')
    chosen = [
        Part("fails", [*PYTHON, "print('why'); raise SystemExit(3)"], 20),
        Part("hangs", [*PYTHON, hangs], 1),
        Part("no tool", ["no-such-tool"], 20),
        Part("writes", [*PYTHON, f"open({str(result)!r}, 'w').write('{{\"us\": 5}}')"], 20,
             writes=result),
        Part("half a result", [*PYTHON, f"open({str(half)!r}, 'w').write('{{')"], 20, writes=half),
        Part("silent", [*PYTHON, ""], 20, writes=old),
        Part("rests on nothing", [*PYTHON, ""], 20, needs=tmp_path / "bundle"),
        Part("too little left", [*PYTHON, ""], 480, min_left=240),
        Part("fine", [*PYTHON, "print('fine')"], 20),
    ]  # fmt: skip
    report, good = run_parts(tmp_path, 60, lambda out, sm: chosen)
    assert not good
    assert outcomes(report) == {
        "fails": "failed", "hangs": "timed out", "no tool": "skipped", "writes": "ok",
        "half a result": "failed", "silent": "ok", "rests on nothing": "skipped",
        "too little left": "skipped", "fine": "ok",
    }  # fmt: skip
    found = report["parts"]
    assert found["fails"]["exit"] == 3 and found["writes"]["result"] == {"us": 5}
    assert "result" not in found["silent"]
    assert found["rests on nothing"]["reason"] == "there is no bundle"
    assert "too few to start" in found["too little left"]["reason"]
    log = (tmp_path / "gpu-check.log").read_text()
    assert "why" in log and "=== fine" in log


def test_the_log_says_what_led_to_a_failure(tmp_path, a_gpu):
    """A user reads one line; the log keeps the details, since the machine may be gone."""
    fails = """
from runtime.files.errors import OutriderError, run_command
def work():
    try:
        raise ValueError("what the compiler said:\\nall of it")
    except ValueError:
        raise OutriderError("backend", "it does not compile", "Report it") from None
raise SystemExit(run_command(work))
"""
    report, _ = run_parts(tmp_path, 60, lambda out, sm: [Part("fails", [*PYTHON, fails], 20)])
    assert report["parts"]["fails"]["exit"] == 8
    *_, last = (tmp_path / "gpu-check.log").read_text().partition("Traceback")
    assert "all of it" in last and last.endswith(
        "\nerror: backend: it does not compile. Report it.\n"
    )


def test_what_cannot_be_ended_is_left(tmp_path, a_gpu, monkeypatch):
    """A process whose kernel does not end stays in the driver even when it is killed."""
    left, end = [], os.killpg
    monkeypatch.setattr(suite.os, "killpg", lambda group, _: left.append(group))
    monkeypatch.setattr(suite, "KILL_SECONDS", 0.1)
    chosen = [
        Part("stuck", [*PYTHON, "import time; time.sleep(60)"], 0.5),
        Part("fine", [*PYTHON, ""], 20),
    ]
    report, _ = run_parts(tmp_path, 60, lambda out, sm: chosen)
    (group,) = left
    end(group, signal.SIGKILL)  # the process is still running
    assert outcomes(report) == {"stuck": "timed out", "fine": "ok"}


def test_the_time_of_all_is_kept(tmp_path, a_gpu):
    sleeper = Part("sleeps", [*PYTHON, "import time; time.sleep(30)"], 30, min_left=0)
    report, good = run_parts(tmp_path, 1, lambda out, sm: [sleeper])
    assert outcomes(report) == {"sleeps": "timed out"} and not good


def test_one_call_and_what_it_rests_on(tmp_path, a_gpu):
    chosen = [
        Part("library", ["true"], 20, gpu=False),
        *(Part(name, ["true"], 20, call=n) for n, name in enumerate("abc", 1)),
    ]
    for call, own in enumerate("abc", 1):
        report, _ = run_parts(tmp_path, 60, lambda out, sm: chosen, call=call)
        assert list(report["parts"]) == ["library", own]
    reports = [json.loads((tmp_path / f"gpu-check-{n}.json").read_text()) for n in (1, 2, 3)]
    assert [list(each["parts"])[1] for each in reports] == list("abc"), "one replaced another"


def test_the_plan(tmp_path):
    """Commands parse, calls take at most ten minutes, and a result that is read is also written.
    Bundles lie outside the report's folder, which is copied back."""
    parsers = {
        tuple(planned.ENGINES): measuring.parser(),
        (*planned.PYTHON, "export"): export.__main__.parser(),
        (*planned.PYTHON, "engines"): engines.command.parser(),
    }
    every = parts(tmp_path, "sm_90")
    for call in (1, 2, 3):
        assert sum(part.expected for part in every if part.call in (0, call)) <= 540
    # The first two calls fit into 15 minutes, including 90 seconds for the machine to start.
    assert sum(part.expected for part in every if part.call < 3) <= 15 * 60 - 90
    names = [part.name for part in every]
    assert names.index("1b+small: times") < names.index("8b+1b: build")
    assert all(part.expected and part.expected <= part.limit for part in every)
    lines = suite.describe_calls(tmp_path)
    assert all(any(name in line for line in lines) for name in names)
    commands = [line.partition("#")[0].split() for line in lines if line.startswith("make ")]
    assert commands == [["make", "gpu-check", f"CALL={call}"] for call in (1, 2, 3)]
    assert sum(part.limit for part in every if part.name.startswith("8b+1b: t")) < 300
    parsed = 0
    for part in every:
        words = [str(word) for word in part.command]
        assert part.min_left < 570 and (part.writes is None or str(part.writes) in words)
        for begin, parser in parsers.items():
            if tuple(words[: len(begin)]) == begin:
                given = parser.parse_args(words[len(begin) :])
                place = getattr(given, "folder", None) or Path(given.out)
                assert tmp_path not in place.parents
                parsed += 1
    assert parsed == 10


def test_pairs_that_were_compiled_before(tmp_path, monkeypatch):
    """They are unpacked instead of built, if they fit this GPU and this PyTorch. All calls then
    take a quarter of an hour."""
    monkeypatch.setattr(planned, "PREPARED", tmp_path)

    def names(architecture):
        return {part.name for part in parts(tmp_path, architecture)}

    usual = names("sm_90")
    made = preparing_parts("sm_90")
    archives = [part.command[3] for part in made if part.name.endswith(": pack")]
    for archive in archives:
        archive.touch()
    built = {part.name for part in made if "build" in part.name or "export" in part.name}
    pairs = "1b+small", "8b+1b", "bundled"
    assert not any(part.gpu for part in made) and built < usual
    assert names("sm_90") == usual - built - {"bundled: checkpoints"} | {
        f"{pair}: unpack" for pair in pairs
    }
    assert names("sm_120") == usual, "another GPU"
    assert sum(part.expected for part in parts(tmp_path, "sm_90")) <= 15 * 60 - 90
    with monkeypatch.context() as patched:
        patched.setattr(planned.metadata, "version", lambda name: "1.0")
        assert names("sm_90") == usual, "another PyTorch"
    monkeypatch.setattr(planned, "CHECKOUT", tmp_path)
    assert names("sm_90") == usual, "other sources"


def test_a_pair_is_packed_and_unpacked(tmp_path, monkeypatch):
    """The holes of its weights take no room in the archive. Half a pair is not left behind."""
    monkeypatch.setattr(planned, "PREPARED", tmp_path)
    monkeypatch.setattr(planned, "WORK_FOLDER", tmp_path / "work")
    pair = tmp_path / "work" / "8b+1b"
    for name in ("bundle", "target", "draft"):
        (pair / name).mkdir(parents=True)
    (pair / "bundle" / "manifest.json").write_text("{}")
    weights = pair / "bundle" / "weights.bin"
    weights.write_bytes(b"header")
    os.truncate(weights, 2**34)
    made = {part.name: part for part in preparing_parts("sm_90")}
    with (tmp_path / "log").open("w") as log:

        def status(part):
            return suite.run_part(part, 60, log)["status"]

        assert status(made["8b+1b: pack"]) == status(made["8b+1b: remove"]) == "ok"
        (archive,) = tmp_path.glob("*.tar.gz")
        assert not pair.exists() and archive.stat().st_size < 2**16
        (unpack,) = planned.pair_parts("8b+1b", "sm_90", 0)
        assert status(unpack) == "ok"
        assert weights.stat().st_size == 2**34 and weights.stat().st_blocks * 512 < 2**16
        os.truncate(archive, archive.stat().st_size // 2)
        assert status(unpack) == "failed" and not pair.exists()
        archive.unlink()
        (pair / "bundle").mkdir(parents=True)
        (pair / "bundle" / "manifest.json").write_text("{}")
        assert status(made["8b+1b: pack"]) == "failed" and not archive.exists(), "incomplete"


def test_what_prepare_does_not_heed(capsys):
    for option in ("--dry", "--call=1", "--out=x", "--seconds=5"):
        assert suite.main(["--prepare", "90", option]) == EXIT_STATUS["option"]
        error_line(capsys.readouterr().err, "option")
    assert suite.main(["--prepare", "75"]) == EXIT_STATUS["option"], "its pairs are bfloat16"
