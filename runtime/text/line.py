"""Slots are few: callers wait for them in order. Knows nothing of engines."""

from __future__ import annotations

import threading
import time

from ..files.errors import OutriderError

QUEUE, TIMEOUT = 64, 600.0  # callers that wait, and seconds, unless a bundle is loaded with others


class Caller:
    """Who waits for slots and holds them.

    owner: the thread that alone has used it; None once a second one has.
    """

    __slots__ = ("cancelled", "owner")

    def __init__(self) -> None:
        self.owner: int | None = threading.get_ident()
        self.cancelled = False

    def touch(self) -> None:
        """The calling thread uses it."""
        if self.owner != threading.get_ident():
            self.owner = None


class Cancelled(Exception):
    """The caller gave up before it was its turn."""


class Line:
    """First come, first served. Thread-safe.

    slots: how many there are. queue: how many callers may wait; 0 for none. timeout: seconds that
    one waits at most; None for as long as it takes. Raises OutriderError "option".
    """

    def __init__(self, slots: int, queue: int = QUEUE, timeout: float | None = TIMEOUT):
        if queue < 0 or not (timeout is None or timeout >= 0):
            raise OutriderError(
                "option",
                f"queue={queue}, timeout={timeout}: one of them is out of range",
                "Use 0 or more callers and seconds; timeout=None waits as long as it takes.",
            )
        self._slots, self._queue, self._timeout = slots, queue, timeout
        self._held: dict[Caller, int] = {}
        self._waiting: dict[Caller, tuple[int, int]] = {}  # in order: slots wanted, thread
        self._changed = threading.Condition()  # reentrant: a stream may be collected anywhere
        self._closed = False

    @property
    def free(self) -> int:
        return self._slots - sum(list(self._held.values()))

    def take(self, caller: Caller, slots: int = 1) -> None:
        """Hold so many slots more, once all who came before have had theirs.

        Raises OutriderError "busy": when too many wait already, the slots are held by threads that
        wait themselves, or the time is over; "bundle" once the line is closed. Raises `Cancelled`
        where `cancel` came first.
        """
        with self._changed:
            if not self._waiting and self._granted(caller, slots):
                return
            if len(self._waiting) >= self._queue:
                many = f", and {self._queue} callers wait already" if self._queue else ""
                raise self._busy(slots, many, "Try again later")
            self._wait(caller, slots)

    def take_if_free(self, caller: Caller) -> bool:
        """Hold a slot more, if there is one that nobody waits for."""
        with self._changed:
            return not self._waiting and self._granted(caller, 1)

    def give_back(self, caller: Caller, slots: int = 1) -> None:
        with self._changed:
            self._held[caller] -= slots
            if not self._held[caller]:
                del self._held[caller]
            self._changed.notify_all()

    def cancel(self, caller: Caller) -> None:
        """From any thread: this caller waits no longer, now and later."""
        with self._changed:
            caller.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody gets a slot any more, and who waits is told so."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, caller: Caller, slots: int) -> None:
        until = None if self._timeout is None else time.monotonic() + self._timeout
        self._waiting[caller] = (slots, threading.get_ident())
        try:
            while next(iter(self._waiting)) is not caller or not self._granted(caller, slots):
                if self._stuck():
                    mine = ", by streams that this thread itself has begun"
                    raise self._busy(slots, mine, "Finish or close them first")
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    late = f" after a wait of {self._timeout:g} s"
                    raise self._busy(slots, late, "Try again later")
                self._changed.wait(left)
                self._refuse(caller)
        finally:
            del self._waiting[caller]
            self._changed.notify_all()  # another one is the first now

    def _granted(self, caller: Caller, slots: int) -> bool:
        self._refuse(caller)
        if self.free < slots:
            return False
        self._held[caller] = self._held.get(caller, 0) + slots
        return True

    def _refuse(self, caller: Caller) -> None:
        if self._closed:
            raise OutriderError("bundle", "the engine is closed", "Load the bundle again.")
        if caller.cancelled:
            raise Cancelled

    def _stuck(self) -> bool:
        """Whether this thread waits for itself: all who hold slots are waiting, and it is one."""
        wanted, _ = next(iter(self._waiting.values()))
        owners = {caller.owner for caller in list(self._held)}
        waiting = {thread for _, thread in self._waiting.values()}
        return wanted > self.free and threading.get_ident() in owners and owners <= waiting

    def _busy(self, slots: int, how: str, remedy: str) -> OutriderError:
        what = "all slots are" if self._slots > 1 else "the only slot is"
        if slots > 1 and self.free:
            what = f"all {slots} slots are needed, and {self._slots - self.free} are"
        more = "" if slots > 1 else ", or load the bundle with more slots"
        return OutriderError("busy", f"{what} in use{how}", f"{remedy}{more}.")
