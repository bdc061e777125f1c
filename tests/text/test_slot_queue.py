"""The queue for slots, with threads that stand in it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from runtime.files.errors import OutriderError
from runtime.text import slot_queue
from runtime.text.slot_queue import Caller, Cancelled, SlotQueue


class Crowd:
    """Threads that come to a queue one after the other."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.served: list[str] = []
        self._pool = pool

    def come(
        self, queue: SlotQueue, name: str, slots: int = 1, holds: Caller | None = None
    ) -> tuple[Caller, Future[None]]:
        """Returns once the caller waits. holds: what its thread holds already."""
        caller = Caller()

        def acquire() -> None:
            if holds is not None:
                holds.record_use()
            queue.acquire(caller, slots)
            self.served.append(name)

        future = self._pool.submit(acquire)
        while caller not in queue._waiting and not future.done():
            threading.Event().wait(0.001)
        return caller, future


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    with ThreadPoolExecutor(8) as pool:
        yield Crowd(pool)


def foreign(queue: SlotQueue, slots: int = 1) -> Caller:
    """Somebody holds slots whom nobody can suspect of waiting."""
    caller = Caller()
    queue.acquire(caller, slots)
    caller.threads = {-1}
    return caller


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_queue, "GRACE", 0.01)


def test_first_come_first_served(crowd: Crowd) -> None:
    """Fault: a free slot goes to whoever wakes up first; OverflowError in a wait without end."""
    queue = SlotQueue(1, timeout=float("inf"))
    held = foreign(queue)
    came = [crowd.come(queue, name) for name in "abcde"]
    queue.release(held)
    for caller, future in came:
        future.result(30)
        queue.release(caller)
    assert "".join(crowd.served) == "abcde"
    assert queue.free == 1


def test_what_only_refers_to_itself_is_given_back(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stream in a kept traceback. Fault: who waits does so for the whole timeout, for the
    collector comes with allocations, and nobody makes any. Not while somebody goes on."""

    class Kept:
        def __init__(self, queue: SlotQueue):
            self.queue, self.caller, self.itself = queue, foreign(queue), self

        def __del__(self) -> None:
            self.queue.drop(self.caller)

    gc.disable()
    try:
        queue = SlotQueue(1, timeout=10)
        Kept(queue)
        queue.acquire(Caller())
    finally:
        gc.enable()

    queue, collected = SlotQueue(1, timeout=0.1), list[int]()
    monkeypatch.setattr(slot_queue.gc, "collect", lambda: collected.append(1))
    held = foreign(queue)
    monkeypatch.setattr(SlotQueue, "_total_uses", lambda self: held.record_use() or held.uses)
    with pytest.raises(OutriderError, match="after a wait"):
        queue.acquire(Caller())
    assert not collected
    monkeypatch.undo()

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:  # once, by who is first
        patch.setattr(slot_queue, "GRACE", 0.01)
        patch.setattr(slot_queue.gc, "collect", lambda: collected.append(1))
        queue = SlotQueue(1)
        foreign(queue)
        late = [pool.submit(queue.acquire, Caller()) for _ in range(3)]
        while not collected:
            threading.Event().wait(0.001)
        threading.Event().wait(0.1)  # too little would let a fault pass, and no right one fail
        queue.close()
        assert all(isinstance(future.exception(30), OutriderError) for future in late)
    assert collected == [1]


def test_who_wants_all_slots_is_not_overtaken(crowd: Crowd) -> None:
    """Fault: beam search waits for ever while single texts come and go."""
    queue = SlotQueue(2)
    held = foreign(queue)
    everything, first = crowd.come(queue, "all", slots=2)
    one, second = crowd.come(queue, "one")
    assert not queue.try_acquire(Caller())  # a slot is free, and somebody waits for it
    queue.release(held)
    first.result(30)
    assert not second.done()
    queue.release(everything, 2)
    second.result(30)
    assert crowd.served == ["all", "one"]
    queue.release(one)


@pytest.mark.parametrize(
    ("queue", "words"),
    [
        (SlotQueue(1, queue=0), "the only slot is in use. Try again later"),
        (SlotQueue(1, timeout=0.0), "in use after a wait of 0 s"),
    ],
)
def test_who_may_not_wait_is_told_at_once(queue: SlotQueue, words: str) -> None:
    foreign(queue)
    with pytest.raises(OutriderError, match=words) as error:
        queue.acquire(Caller())
    assert error.value.kind == "busy"
    assert not queue._waiting


def test_a_full_line(crowd: Crowd) -> None:
    queue = SlotQueue(2, queue=1)
    held = foreign(queue, 2)
    waiting, future = crowd.come(queue, "a")
    cause = "all slots are in use, and 1 callers are already waiting"
    with pytest.raises(OutriderError, match=cause):
        queue.acquire(Caller())
    queue.release(held, 2)
    future.result(30)
    queue.release(waiting)


@pytest.mark.usefixtures("impatient")
def test_a_thread_does_not_wait_for_itself() -> None:
    """Fault: a stream that another thread made, and this one uses, is no suspect."""
    queue = SlotQueue(1)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(Caller).result(30)
    queue.acquire(made)
    with pytest.raises(OutriderError, match="by streams that this thread itself has started"):
        queue.acquire(Caller())


@pytest.mark.usefixtures("impatient")
def test_threads_do_not_wait_for_one_another(crowd: Crowd) -> None:
    """Fault: two threads, each with one of two slots and waiting for a second one, hang."""
    queue = SlotQueue(2)
    held = [foreign(queue), foreign(queue)]
    for caller in held:
        caller.threads.clear()
    runs = {crowd.come(queue, "x", holds=caller)[1]: caller for caller in held}
    done, waits = wait(runs, 30, FIRST_COMPLETED)
    (refused,), (other,) = done, waits
    with pytest.raises(OutriderError, match="this thread itself"):
        refused.result()
    queue.release(runs[refused])  # and the other one goes on
    other.result(30)


@pytest.mark.parametrize("touched", [False, True])
def test_a_stream_that_another_thread_may_finish(
    monkeypatch: pytest.MonkeyPatch, touched: bool
) -> None:
    """Fault: "busy" at once. It may be handed to a thread that has not begun; and one that threads
    share is no suspect, whoever waits."""
    queue, held = SlotQueue(1), Caller()
    queue.acquire(held)
    if touched:
        monkeypatch.setattr(slot_queue, "GRACE", 0.01)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (held.record_use(), held.record_use())).result(30)
    threading.Timer(0.05, queue.release, [held]).start()
    queue.acquire(Caller())


def test_what_is_dropped_is_free_for_who_waits(crowd: Crowd) -> None:
    queue = SlotQueue(1)
    held = foreign(queue)
    _, future = crowd.come(queue, "a")
    queue.drop(held)
    future.result(30)
    assert queue.free == 0


def test_who_waits_can_be_called_away(crowd: Crowd) -> None:
    queue = SlotQueue(1)
    held = foreign(queue)
    caller, future = crowd.come(queue, "a")
    queue.cancel(caller)
    with pytest.raises(Cancelled):
        future.result(30)
    _, future = crowd.come(queue, "b")
    queue.close()
    with pytest.raises(OutriderError, match="the engine is closed"):
        future.result(30)
    queue.release(held)
    assert queue.free == 1


@pytest.mark.parametrize(
    "wrong",
    [{"queue": -1}, {"queue": "x"}, {"timeout": -1}, {"timeout": float("nan")}, {"timeout": "x"}],
)
def test_what_is_no_line(wrong: dict[str, Any]) -> None:
    with pytest.raises(OutriderError, match="out of range"):
        SlotQueue(1, **wrong)
