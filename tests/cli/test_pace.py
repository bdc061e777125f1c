"""Text at an even pace: all of it, in order, spread over the time between rounds.

No test depends on real time: the clock is simulated, and the tests wait for what is written.
"""

from __future__ import annotations

import threading

import pytest

from runtime.cli import pace
from runtime.cli.pace import SmoothWriter


class Screen:
    """Records the pieces written, and how long the writer had slept before each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.shown: list[str] = []
        self.time, self.slept = 100.0, 0.0
        self.changed = threading.Condition()
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.time + self.slept)
        monkeypatch.setattr(pace.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def write(self, piece: str) -> None:
        with self.changed:
            self.shown.append(f"{piece}@{self.slept:.2f}")
            self.changed.notify()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.shown) >= count, timeout=10)


def test_a_round_is_spread_over_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval is the duration of the first round, but at most MAX_SPREAD."""
    for took, pieces, pause in ((0.2, "abcd", 0.05), (60, "ab", pace.MAX_SPREAD / 2)):
        screen = Screen(monkeypatch)
        with SmoothWriter(screen.write) as smooth:
            screen.time += took
            smooth.show(["", *pieces])
            screen.wait(len(pieces))
            expected = [f"{piece}@{n * pause:.2f}" for n, piece in enumerate(pieces)]
            assert screen.shown == expected


def test_the_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    begun = threading.Event()
    monkeypatch.setattr(pace.time, "sleep", lambda seconds: begun.wait(10))
    with SmoothWriter(screen.write) as smooth:
        screen.time += 0.3
        smooth.show(list("abcdefgh"))
        screen.wait(1)
        smooth._ending = True  # as `__exit__` sets it
        begun.set()
    assert [shown[0] for shown in screen.shown] == list("abcdefgh")
    assert screen.slept == 0


def broken_pipe(piece: str) -> None:
    raise BrokenPipeError


def test_a_failure_to_write_reaches_the_reader() -> None:
    smooth = SmoothWriter(broken_pipe)
    with pytest.raises(BrokenPipeError), smooth:
        smooth.show(["a"])
    with pytest.raises(BrokenPipeError):
        smooth.show(["b"])


def test_the_readers_own_failure_comes_first() -> None:
    with pytest.raises(KeyboardInterrupt), SmoothWriter(broken_pipe) as smooth:  # noqa: PT012
        smooth.show(["a"])
        raise KeyboardInterrupt
