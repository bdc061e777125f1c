"""The line for slots, with threads that stand in it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from runtime.files.errors import OutriderError
from runtime.text import line as line_module
from runtime.text.line import Caller, Cancelled, Line


class Crowd:
    """Threads that come to a line one after the other."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.served: list[str] = []
        self._pool = pool

    def come(
        self, line: Line, name: str, slots: int = 1, holds: Caller | None = None
    ) -> tuple[Caller, Future[None]]:
        """Returns once the caller waits. holds: what its thread holds already."""
        caller = Caller()

        def take() -> None:
            if holds is not None:
                holds.touch()
            line.take(caller, slots)
            self.served.append(name)

        future = self._pool.submit(take)
        while caller not in line._waiting and not future.done():
            threading.Event().wait(0.001)
        return caller, future


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with ThreadPoolExecutor(8) as pool:
        yield Crowd(pool)


def foreign(line: Line, slots: int = 1) -> Caller:
    """Somebody holds slots whom nobody can suspect of waiting."""
    caller = Caller()
    line.take(caller, slots)
    caller.threads = {-1}
    return caller


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "GRACE", 0.01)


def test_first_come_first_served(crowd: Crowd) -> None:
    """Fault: a free slot goes to whoever wakes up first; OverflowError in a wait without end."""
    line = Line(1, timeout=float("inf"))
    held = foreign(line)
    came = [crowd.come(line, name) for name in "abcde"]
    line.give_back(held)
    for caller, future in came:
        future.result(30)
        line.give_back(caller)
    assert "".join(crowd.served) == "abcde"
    assert line.free == 1


def test_what_only_refers_to_itself_is_given_back(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stream in a kept traceback. Fault: who waits does so for the whole timeout, for the
    collector comes with allocations, and nobody makes any. Not while somebody goes on."""

    class Kept:
        def __init__(self, line: Line):
            self.line, self.caller, self.itself = line, foreign(line), self

        def __del__(self) -> None:
            self.line.drop(self.caller)

    gc.disable()
    try:
        line = Line(1, timeout=10)
        Kept(line)
        line.take(Caller())
    finally:
        gc.enable()

    line, collected = Line(1, timeout=0.1), list[int]()
    monkeypatch.setattr(line_module.gc, "collect", lambda: collected.append(1))
    held = foreign(line)
    monkeypatch.setattr(Line, "_touches", lambda self: held.touch() or held.touches)
    with pytest.raises(OutriderError, match="after a wait"):
        line.take(Caller())
    assert not collected
    monkeypatch.undo()

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:  # once, by who is first
        patch.setattr(line_module, "GRACE", 0.01)
        patch.setattr(line_module.gc, "collect", lambda: collected.append(1))
        line = Line(1)
        foreign(line)
        late = [pool.submit(line.take, Caller()) for _ in range(3)]
        while not collected:
            threading.Event().wait(0.001)
        threading.Event().wait(0.1)  # too little would let a fault pass, and no right one fail
        line.close()
        assert all(isinstance(future.exception(30), OutriderError) for future in late)
    assert collected == [1]


def test_who_wants_all_slots_is_not_overtaken(crowd: Crowd) -> None:
    """Fault: beam search waits for ever while single texts come and go."""
    line = Line(2)
    held = foreign(line)
    everything, first = crowd.come(line, "all", slots=2)
    one, second = crowd.come(line, "one")
    assert not line.take_if_free(Caller())  # a slot is free, and somebody waits for it
    line.give_back(held)
    first.result(30)
    assert not second.done()
    line.give_back(everything, 2)
    second.result(30)
    assert crowd.served == ["all", "one"]
    line.give_back(one)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (Line(1, queue=0), "the only slot is in use. Try again later"),
        (Line(1, timeout=0.0), "in use after a wait of 0 s"),
    ],
)
def test_who_may_not_wait_is_told_at_once(line: Line, words: str) -> None:
    foreign(line)
    with pytest.raises(OutriderError, match=words) as error:
        line.take(Caller())
    assert error.value.kind == "busy"
    assert not line._waiting


def test_a_full_line(crowd: Crowd) -> None:
    line = Line(2, queue=1)
    held = foreign(line, 2)
    waiting, future = crowd.come(line, "a")
    cause = "all slots are in use, and 1 callers are already waiting"
    with pytest.raises(OutriderError, match=cause):
        line.take(Caller())
    line.give_back(held, 2)
    future.result(30)
    line.give_back(waiting)


@pytest.mark.usefixtures("impatient")
def test_a_thread_does_not_wait_for_itself() -> None:
    """Fault: a stream that another thread made, and this one uses, is no suspect."""
    line = Line(1)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(Caller).result(30)
    line.take(made)
    with pytest.raises(OutriderError, match="by streams that this thread itself has started"):
        line.take(Caller())


@pytest.mark.usefixtures("impatient")
def test_threads_do_not_wait_for_one_another(crowd: Crowd) -> None:
    """Fault: two threads, each with one of two slots and waiting for a second one, hang."""
    line = Line(2)
    held = [foreign(line), foreign(line)]
    for caller in held:
        caller.threads.clear()
    runs = {crowd.come(line, "x", holds=caller)[1]: caller for caller in held}
    done, waits = wait(runs, 30, FIRST_COMPLETED)
    (refused,), (other,) = done, waits
    with pytest.raises(OutriderError, match="this thread itself"):
        refused.result()
    line.give_back(runs[refused])  # and the other one goes on
    other.result(30)


@pytest.mark.parametrize("touched", [False, True])
def test_a_stream_that_another_thread_may_finish(
    monkeypatch: pytest.MonkeyPatch, touched: bool
) -> None:
    """Fault: "busy" at once. It may be handed to a thread that has not begun; and one that threads
    share is no suspect, whoever waits."""
    line, held = Line(1), Caller()
    line.take(held)
    if touched:
        monkeypatch.setattr(line_module, "GRACE", 0.01)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (held.touch(), held.touch())).result(30)
    threading.Timer(0.05, line.give_back, [held]).start()
    line.take(Caller())


def test_what_is_dropped_is_free_for_who_waits(crowd: Crowd) -> None:
    line = Line(1)
    held = foreign(line)
    _, future = crowd.come(line, "a")
    line.drop(held)
    future.result(30)
    assert line.free == 0


def test_who_waits_can_be_called_away(crowd: Crowd) -> None:
    line = Line(1)
    held = foreign(line)
    caller, future = crowd.come(line, "a")
    line.cancel(caller)
    with pytest.raises(Cancelled):
        future.result(30)
    _, future = crowd.come(line, "b")
    line.close()
    with pytest.raises(OutriderError, match="the engine is closed"):
        future.result(30)
    line.give_back(held)
    assert line.free == 1


@pytest.mark.parametrize(
    "wrong",
    [{"queue": -1}, {"queue": "x"}, {"timeout": -1}, {"timeout": float("nan")}, {"timeout": "x"}],
)
def test_what_is_no_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(OutriderError, match="out of range"):
        Line(1, **wrong)
