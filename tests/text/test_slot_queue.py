"""The queue for slots, with threads that wait in it."""

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


class Waiters:
    """Threads that join a queue one after the other."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.served: list[str] = []
        self._pool = pool

    def join(
        self,
        queue: SlotQueue,
        name: str,
        slots: int = 1,
        holds: Caller | None = None,
        caller: Caller | None = None,
    ) -> tuple[Caller, Future[None]]:
        """Join the queue in a thread, and return once that thread waits or has its slots.

        holds: a caller whose slots the thread holds already. caller: a new one if None."""
        caller = caller or Caller()

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
def waiters() -> Iterator[Waiters]:
    with ThreadPoolExecutor(8) as pool:
        yield Waiters(pool)


def hold_elsewhere(queue: SlotQueue, slots: int = 1) -> Caller:
    """Acquire slots for a caller of another thread, which the queue cannot take for a waiting
    thread."""
    caller = Caller()
    queue.acquire(caller, slots)
    caller.threads = {-1}
    return caller


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_queue, "GRACE", 0.01)


def test_first_come_first_served(waiters: Waiters) -> None:
    """Faults: a free slot goes to the thread that wakes up first; timeout=inf raises an
    OverflowError."""
    queue = SlotQueue(1, timeout=float("inf"))
    held = hold_elsewhere(queue)
    joined = [waiters.join(queue, name) for name in "abcde"]
    queue.release(held)
    for caller, future in joined:
        future.result(30)
        queue.release(caller)
    assert "".join(waiters.served) == "abcde"
    assert queue.free == 1


def test_what_only_refers_to_itself_is_given_back(
    short_grace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference cycle, such as a stream in a stored traceback, is collected while a caller waits,
    but not while other callers make progress. Fault: the caller waited for the whole timeout,
    because allocations trigger the garbage collector, and a waiting process makes none."""

    class Kept:
        def __init__(self, queue: SlotQueue):
            self.queue, self.caller, self.itself = queue, hold_elsewhere(queue), self

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
    held = hold_elsewhere(queue)
    monkeypatch.setattr(SlotQueue, "_total_uses", lambda self: held.record_use() or held.uses)
    with pytest.raises(OutriderError, match="after a wait"):
        queue.acquire(Caller())
    assert not collected
    monkeypatch.undo()

    # Of several waiting callers, only the first collects, and only once.
    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(slot_queue, "GRACE", 0.01)
        patch.setattr(slot_queue.gc, "collect", lambda: collected.append(1))
        queue = SlotQueue(1)
        hold_elsewhere(queue)
        late = [pool.submit(queue.acquire, Caller()) for _ in range(3)]
        while not collected:
            threading.Event().wait(0.001)
        threading.Event().wait(0.1)  # if too short, a fault may go unnoticed; never a false alarm
        queue.close()
        assert all(isinstance(future.exception(30), OutriderError) for future in late)
    assert collected == [1]


def test_who_wants_all_slots_is_not_overtaken(waiters: Waiters) -> None:
    """Fault: beam search waits forever while single requests come and go."""
    queue = SlotQueue(2)
    held = hold_elsewhere(queue)
    everything, first = waiters.join(queue, "all", slots=2)
    one, second = waiters.join(queue, "one")
    assert not queue.try_acquire(Caller())  # a slot is free, but a caller waits for it
    queue.release(held)
    first.result(30)
    assert not second.done()
    queue.release(everything, 2)
    second.result(30)
    assert waiters.served == ["all", "one"]
    queue.release(one)


@pytest.mark.parametrize(
    ("queue", "words"),
    [
        (SlotQueue(1, queue=0), "the only slot is in use. Try again later"),
        (SlotQueue(1, timeout=0.0), "in use after a wait of 0 s"),
    ],
)
def test_who_may_not_wait_is_told_at_once(queue: SlotQueue, words: str) -> None:
    hold_elsewhere(queue)
    with pytest.raises(OutriderError, match=f"^busy: .*{words}"):
        queue.acquire(Caller())
    assert not queue._waiting


def test_a_full_queue(waiters: Waiters) -> None:
    queue = SlotQueue(2, queue=1)
    held = hold_elsewhere(queue, 2)
    waiting, future = waiters.join(queue, "a")
    cause = "all slots are in use, and 1 callers are already waiting"
    with pytest.raises(OutriderError, match=cause):
        queue.acquire(Caller())
    queue.release(held, 2)
    future.result(30)
    queue.release(waiting)


def test_a_full_queue_stops_no_batch_that_has_begun(waiters: Waiters) -> None:
    """Fault: a batch was refused between two of its texts, and the rest of it was lost."""
    queue, batch = SlotQueue(1, queue=1), Caller()
    queue.acquire(batch)
    waiting, future = waiters.join(queue, "a")
    queue.release(batch)
    future.result(30)
    other, last = waiters.join(queue, "b")
    _, again = waiters.join(queue, "batch", caller=batch)
    assert not again.done()
    queue.release(waiting)
    last.result(30)
    queue.release(other)
    again.result(30)
    assert waiters.served == ["a", "b", "batch"]


def test_a_full_queue_stops_no_recording_that_has_begun() -> None:
    """Fault: each window was a new call, and the text of the earlier ones was lost."""
    queue, first = SlotQueue(1, queue=0, timeout=0.01), Caller()
    at_once, after_a_wait = "the only slot is in use. Try", "after a wait of 0.01 s"
    hold = hold_elsewhere(queue)
    with queue.one_request():
        with pytest.raises(OutriderError, match=at_once):
            queue.acquire(first)
        queue.release(hold)
        queue.acquire(first)
        queue.release(first)
        hold = Caller()
        with ThreadPoolExecutor() as pool:
            pool.submit(queue.acquire, hold).result()
        with pytest.raises(OutriderError, match=after_a_wait):
            queue.acquire(Caller())
    with pytest.raises(OutriderError, match=at_once):
        queue.acquire(Caller())


@pytest.mark.usefixtures("short_grace")
def test_a_thread_does_not_wait_for_itself() -> None:
    """Fault: a stream that another thread created and this thread uses was not counted as this
    thread's."""
    queue = SlotQueue(1)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(Caller).result(30)
    queue.acquire(made)
    with pytest.raises(OutriderError, match="by streams that this thread itself has started"):
        queue.acquire(Caller())


@pytest.mark.usefixtures("short_grace")
def test_threads_do_not_wait_for_one_another(waiters: Waiters) -> None:
    """Fault: two threads, each with one of two slots and waiting for a second one, hang."""
    queue = SlotQueue(2)
    held = [hold_elsewhere(queue), hold_elsewhere(queue)]
    for caller in held:
        caller.threads.clear()
    runs = {waiters.join(queue, "x", holds=caller)[1]: caller for caller in held}
    done, waits = wait(runs, 30, FIRST_COMPLETED)
    (refused,), (other,) = done, waits
    with pytest.raises(OutriderError, match="this thread itself"):
        refused.result()
    queue.release(runs[refused])  # and the other one proceeds
    other.result(30)


@pytest.mark.parametrize("shared", [False, True])
def test_a_stream_that_another_thread_may_finish(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Fault: "busy" at once. The stream may be passed to a thread that has not used it yet; and a
    stream that threads share never makes a waiting caller fail."""
    queue, held = SlotQueue(1), Caller()
    queue.acquire(held)
    if shared:
        monkeypatch.setattr(slot_queue, "GRACE", 0.01)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: (held.record_use(), held.record_use())).result(30)
    threading.Timer(0.05, queue.release, [held]).start()
    queue.acquire(Caller())


def test_what_is_dropped_is_free_for_who_waits(waiters: Waiters) -> None:
    queue = SlotQueue(1)
    held = hold_elsewhere(queue)
    _, future = waiters.join(queue, "a")
    queue.drop(held)
    future.result(30)
    assert queue.free == 0


def test_a_waiting_caller_can_be_cancelled(waiters: Waiters) -> None:
    queue = SlotQueue(1)
    held = hold_elsewhere(queue)
    caller, future = waiters.join(queue, "a")
    queue.cancel(caller)
    with pytest.raises(Cancelled):
        future.result(30)
    _, future = waiters.join(queue, "b")
    queue.close()
    with pytest.raises(OutriderError, match="the engine is closed"):
        future.result(30)
    queue.release(held)
    assert queue.free == 1


@pytest.mark.parametrize(
    "wrong",
    [{"queue": -1}, {"queue": "x"}, {"timeout": -1}, {"timeout": float("nan")}, {"timeout": "x"}],
)
def test_invalid_queue_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(OutriderError, match=r"out of range|is not"):
        SlotQueue(1, **wrong)
