"""A stage prints one line; a long one also prints progress before it ends, in a log too."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from runtime.files import progress


def test_a_log_hears_of_a_long_stage_before_it_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval doubles after each line, so that even a long stage prints only a few."""
    monkeypatch.setattr(progress, "TICK", 0.001)
    monkeypatch.setattr(progress, "FIRST_LINE", 0.01)
    printed = ""
    with progress.stage("target", "trace") as stage:
        stage.phase = "1 of 2"
        while printed.count("\n") < 3:
            time.sleep(0.01)
            printed += capsys.readouterr().err
    for line in printed.splitlines()[1:]:
        assert line.startswith("target    trace ") and line.endswith(" s ... 1 of 2")
    rest = capsys.readouterr().err
    assert rest.startswith("target    trace ") and rest.endswith(" s\n")


def test_a_log_hears_once_of_time_that_passed_unseen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: after a suspension, a line for each doubling until then."""
    calls, ticked = 0, threading.Event()

    def clock() -> float:
        nonlocal calls
        calls += 1
        if calls == 10:
            ticked.set()
        return 100.0 * (calls > 1)

    monkeypatch.setattr(progress, "TICK", 0.001)
    monkeypatch.setattr(progress.time, "perf_counter", clock)
    with progress.stage("target", "trace"):
        assert ticked.wait(30)
    assert capsys.readouterr().err.count(" 100.0 s ...") == 1


def test_a_terminal_has_one_line_that_ticks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "TICK", 0.001)
    printed = ""
    with progress.stage("target", "compile") as stage:
        stage.phase = "Tactic selection"
        while "Tactic selection" not in printed:
            time.sleep(0.01)
            printed += capsys.readouterr().err
        stage.note = "5 M parameters"
    assert "\n" not in printed and printed.startswith("\rtarget    compile ")
    rest = capsys.readouterr().err
    assert rest.count("\n") == 1 and rest.endswith(" s  5 M parameters\n")


def test_a_stage_that_fails_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), progress.stage("target", "load"):
        raise ValueError
    assert capsys.readouterr().err == ""


def test_a_closed_stderr_hears_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress.stage("target", "trace"):
        progress.note("something")  # Fault: it went to stdout
    assert capsys.readouterr().out == ""
