"""The queue in which callers wait for slots, in order. Independent of engines."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ..files.errors import INTEGER, NUMBER, OutriderError, check_value

DEFAULT_QUEUE, DEFAULT_TIMEOUT = 64, 600.0  # default number of callers that may wait, and seconds
GRACE = 1.0  # seconds without a change before a thread is considered to wait for itself


def check_queue_options(queue: int, timeout: float | None) -> tuple[int, float | None]:
    """The arguments of a `SlotQueue`, as Python's own numbers. Raises OutriderError "option"."""
    queue = check_value("queue", queue, INTEGER, lambda x: x >= 0, "0 or more callers")
    if timeout is not None:
        timeout = check_value("timeout", timeout, NUMBER, lambda x: x >= 0,
                              "0 or more seconds, or None to wait without limit")  # fmt: skip
    return queue, timeout


class Caller:
    """One that waits for slots and holds them, such as a stream.

    threads: those that have used it. uses: how often they have. served: whether it has had a slot.
    """

    __slots__ = ("cancelled", "served", "threads", "uses")

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.uses = 0
        self.cancelled = self.served = False

    def record_use(self) -> None:
        """Record that the calling thread uses it."""
        self.threads.add(threading.get_ident())
        self.uses += 1


class _Parts(threading.local):
    """Of a thread: whether its callers are parts of one request, and whether one has had a slot."""

    together = begun = False


class Cancelled(Exception):
    """The caller was cancelled while it waited."""


class SlotQueue:
    """A queue for slots: first come, first served. Thread-safe.

    slots: how many there are. queue: how many callers may wait; 0 for none. timeout: most seconds
    that a caller waits; None for no limit. Raises OutriderError "option".
    """

    def __init__(
        self, slots: int, queue: int = DEFAULT_QUEUE, timeout: float | None = DEFAULT_TIMEOUT
    ):
        self._slots = slots
        self._queue, self._timeout = check_queue_options(queue, timeout)
        self._held: dict[Caller, int] = {}
        self._waiting: dict[Caller, tuple[int, int]] = {}  # in order: slots wanted, thread
        self._dropped: deque[Caller] = deque()
        self._parts = _Parts()
        # Used instead of `with` on the condition, which an interrupt can break.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

    @property
    def free(self) -> int:
        with self._lock:
            while self._dropped:
                self._held.pop(self._dropped[0], None)
                self._dropped.popleft()  # last, so that an interrupt loses none
            return self._slots - sum(self._held.values())

    def acquire(self, caller: Caller, slots: int = 1) -> None:
        """Take `slots` more slots, after all earlier callers have theirs.

        A caller that has had a slot, such as a batch between two of its texts, may wait even in a
        full queue. Raises OutriderError "busy" if the queue is full, if the slots are held by
        threads that are waiting themselves, or after the timeout; "bundle" once the queue is
        closed. Raises `Cancelled` if `cancel` is called first.
        """
        caller.record_use()
        with self._lock:
            if self._waiting or not self._try_grant(caller, slots):
                has_begun = caller.served or self._parts.begun
                if len(self._waiting) >= self._queue and not has_begun:
                    many = f", and {self._queue} callers are already waiting" if self._queue else ""
                    raise self._busy_error(slots, many, "Try again later")
                self._wait(caller, slots)
        self._parts.begun = self._parts.together

    @contextmanager
    def one_request(self) -> Iterator[None]:
        """This thread's callers are parts of one request, such as the windows of a recording: once
        one has had a slot, the others may wait even in a full queue."""
        before = self._parts.together, self._parts.begun
        self._parts.together = True
        try:
            yield
        finally:
            self._parts.together, self._parts.begun = before

    def try_acquire(self, caller: Caller) -> bool:
        """Take one more slot if one is free and no caller is waiting."""
        with self._lock:
            return not self._waiting and self._try_grant(caller, 1)

    def release(self, caller: Caller, slots: int | None = 1) -> None:
        """Free slots of this caller. slots: how many; None for all that it holds, if any."""
        with self._lock:
            left = 0 if slots is None else self._held[caller] - slots
            if left:
                self._held[caller] = left
            else:
                self._held.pop(caller, None)
            self._changed.notify_all()

    def drop(self, caller: Caller) -> None:
        """Free all slots of a caller that nothing refers to any more. Waits for no lock."""
        self._dropped.append(caller)
        if self._lock.acquire(blocking=False):
            try:
                self._changed.notify_all()  # otherwise waiting callers notice within GRACE
            finally:
                self._lock.release()

    def cancel(self, caller: Caller) -> None:
        """Make this caller stop waiting, now and in future calls. From any thread."""
        with self._lock:
            caller.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """Grant no more slots, and make waiting callers raise "bundle"."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, caller: Caller, slots: int) -> None:
        until = None if self._timeout is None else time.monotonic() + self._timeout
        self._waiting[caller] = (slots, threading.get_ident())
        changed, collected, uses = True, False, 0
        try:
            while True:
                first = self._first() is caller
                if first and self._try_grant(caller, slots):
                    return
                if first and not changed and not collected and uses == self._total_uses():
                    # A caller that is kept alive only by a reference cycle, such as that of a
                    # stored traceback, would hold its slots until the next garbage collection.
                    gc.collect()
                    collected = True
                    continue
                if not changed and self._is_deadlocked():
                    own_streams = ", by streams that this thread itself has started"
                    raise self._busy_error(slots, own_streams, "Finish or close them first")
                left = GRACE if until is None else until - time.monotonic()
                if left <= 0:
                    timed_out = f" after a wait of {self._timeout:g} s"
                    raise self._busy_error(slots, timed_out, "Try again later")
                uses = self._total_uses()
                changed = self._changed.wait(min(left, GRACE))
                self._check_usable(caller)
        finally:
            del self._waiting[caller]
            self._changed.notify_all()  # another caller is first now

    def _first(self) -> Caller:
        return next(iter(self._waiting))

    def _try_grant(self, caller: Caller, slots: int) -> bool:
        self._check_usable(caller)
        if self.free < slots:
            return False
        self._held[caller] = self._held.get(caller, 0) + slots
        caller.served = True
        return True

    def _check_usable(self, caller: Caller) -> None:
        if self._closed:
            raise OutriderError("bundle", "the engine is closed", "Load the bundle again.")
        if caller.cancelled:
            raise Cancelled

    def _total_uses(self) -> int:
        return sum(caller.uses for caller in self._held)

    def _is_deadlocked(self) -> bool:
        """Whether this thread waits for itself: every thread that holds slots is waiting, and this
        is one of them."""
        wanted, _ = self._waiting[self._first()]
        waiting = {thread for _, thread in self._waiting.values()}
        holders = [caller.threads for caller in self._held]
        return (
            wanted > self.free
            and {threading.get_ident()} in holders
            and all(len(threads) == 1 and threads <= waiting for threads in holders)
        )

    def _busy_error(self, slots: int, how: str, remedy: str) -> OutriderError:
        what = "all slots are" if self._slots > 1 else "the only slot is"
        if slots > 1 and self.free:
            what = f"all {slots} slots are needed, and {self._slots - self.free} are"
        more = "" if slots > 1 else ", or load the bundle with more slots"
        return OutriderError("busy", f"{what} in use{how}", f"{remedy}{more}.")
