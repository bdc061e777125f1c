"""Running requests: `Stream`, one text as it comes, and many that share the slots, as results
(`Batch`) or as they come (`BatchStream`)."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

from ..files.errors import PER_REQUEST_KINDS, OutriderError, first_line
from ..sequence import ActiveSequence, Request
from ..stats import Stats
from .options import Options
from .requests import make_request
from .results import Event, Result, Transcript
from .slot_queue import Caller, Cancelled

if TYPE_CHECKING:
    from .engine import TextEngine

logger = logging.getLogger("outrider")

Item = TypeVar("Item")


class RunningRequests(ABC, Generic[Item]):
    """An iterator that holds slots until it is exhausted.

    It frees them at its end, on `close`, on exit from a `with` block, or when nothing refers to it
    any more. Thread-safe: threads that iterate over it take turns.
    """

    _ended = True  # until __init__ is done

    def __init__(self, engine: TextEngine):
        self._engine, self._caller = engine, Caller()
        # In a pool a thread may advance this and then wait for a slot, while others go on here.
        self._caller.record_use()
        self._sequences: dict[ActiveSequence, tuple[int, Transcript]] = {}  # those that run
        self._advance_lock = threading.RLock()  # which knows its owner
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        self._engine.refuse_reentry()
        if self._is_advancing:
            raise OutriderError(
                "option",
                "a generator of prompts or a signal handler advanced the batch that it belongs to",
                "Let it do without.",
            )
        self._caller.record_use()
        try:
            with self._advance_lock:
                if self._ended or self._caller.cancelled:
                    raise StopIteration
                try:
                    return self._advance()
                except Cancelled:
                    self._end()
                    raise StopIteration from None
                except BaseException:
                    self._caller.cancelled = True  # whatever may interrupt `_end`
                    try:
                        self._end()
                    except Exception as second:  # noqa: BLE001 - the first one explains more
                        logger.warning("a stream was closed, but %s", first_line(second))
                    raise
        finally:
            if self._caller.cancelled:  # while the round ran, or it failed
                self.close()

    @property
    def _is_advancing(self) -> bool:
        """Whether this thread is in `__next__`."""
        return self._advance_lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def close(self) -> None:
        """End the iteration, from any thread, and free its slots. If another thread is in a round
        of it, the slots are freed when that round is over, and that thread's iteration ends."""
        self._engine.slot_queue.cancel(self._caller)
        if not self._is_advancing and self._advance_lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._advance_lock.release()

    def _end(self) -> None:
        if not self._ended:
            failed: Exception | None = None
            for sequence in list(self._sequences):
                try:
                    self._leave(sequence)
                except Exception as error:  # noqa: BLE001 - raised when all have left
                    failed = error
            self._engine.slot_queue.release(self._caller, None)  # the rest, after an interrupt
            self._ended = True
            if failed is not None:
                raise failed

    def _leave(self, sequence: ActiveSequence) -> None:
        del self._sequences[sequence]
        self._engine.dropped.append(sequence)  # first: after an interrupt, the next call frees it
        self._engine.leave(self._caller, sequence)

    @abstractmethod
    def _advance(self) -> Item:
        """The next item. Raises StopIteration at the end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} holds slots, and cannot be copied")

    def __del__(self) -> None:
        if not self._ended:
            self._engine.drop(self._caller, list(self._sequences))


class Stream(RunningRequests[Event]):
    """A text as it comes: an event for each round that adds tokens, the last with the result.

    The slot is taken with the first event. result: None until the last event, and if the stream was
    closed before it.
    """

    def __init__(self, engine: TextEngine, request: Request, transcript: Transcript):
        super().__init__(engine)
        self._request, self._transcript = request, transcript
        self.result: Result | None = None

    @property
    def text(self) -> str:
        """The text of all events so far."""
        return self._transcript.text

    def _advance(self) -> Event:
        if not self._sequences:
            self._engine.slot_queue.acquire(self._caller)
            self._sequences[ActiveSequence(self._request)] = (0, self._transcript)
        [sequence] = self._sequences
        known = len(sequence.output)
        while len(sequence.output) == known and sequence.finish_reason is None:
            if self._caller.cancelled:  # while the prompt was read
                raise Cancelled
            self._engine.round(self._sequences)
        if sequence.error is not None:
            raise sequence.error
        event = self._transcript.event(sequence)
        if event.result is not None:
            self.result = event.result
            self._engine.count(event.result)
            self._end()
        return event


class RunningBatch(RunningRequests[Item]):
    """Many prompts, as slots are free for them; `_item` makes the items of their events."""

    def __init__(self, engine: TextEngine, prompts: Iterable[Any], default_options: Options):
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise OutriderError(
                "prompt", "a batch got a single prompt", "Pass a list of prompts, or use generate."
            )
        super().__init__(engine)
        self._prompts, self._default_options = enumerate(prompts), default_options
        self._items: deque[Item] = deque()
        self._error: Exception | None = None  # of the engine; raised after `_items`
        self._all_read = False  # whether all prompts have been read

    @abstractmethod
    def _item(self, number: int, event: Event) -> Item | None:
        """The item for an event of the prompt of this number, if there is one."""

    def _advance(self) -> Item:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._caller.cancelled:  # during the previous round
                raise Cancelled
            while not (self._all_read or self._items) and self._take_slot():
                self._start_next()
            if self._sequences:
                try:
                    self._engine.round(self._sequences)
                except Exception as error:  # noqa: BLE001 - raised after the results
                    self._error = error
                for sequence in list(self._sequences):
                    self._collect(sequence)
            elif self._all_read and not self._items:
                raise StopIteration
        return self._items.popleft()

    def _take_slot(self) -> bool:
        """Whether a slot was taken for the next prompt. A batch that holds none waits for one."""
        queue = self._engine.slot_queue
        if self._sequences:
            return queue.try_acquire(self._caller)
        queue.acquire(self._caller)
        return True

    def _start_next(self) -> None:
        """Start the next prompt in the slot that has been taken for it."""
        sequence: ActiveSequence | None = None
        try:
            if (item := next(self._prompts, None)) is None:
                self._all_read = True
                return
            number, given = item
            prompt, options = given, self._default_options
            if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Options):
                prompt, options = given
            try:
                request, transcript = make_request(self._engine, prompt, options)
                # One statement, so that an interrupt frees the slot once.
                self._sequences[sequence := ActiveSequence(request)] = (number, transcript)
            except OutriderError as error:
                if error.kind not in PER_REQUEST_KINDS:
                    raise
                result = Result("", (), "error", None, options.seed or 0, Stats(), error)
                self._add(number, Event((), (), result))
                return
        finally:
            if sequence is None:
                self._engine.slot_queue.release(self._caller)

    def _collect(self, sequence: ActiveSequence) -> None:
        number, transcript = self._sequences[sequence]
        if (error := sequence.error) is not None:
            kinds = (*PER_REQUEST_KINDS, "busy")  # "busy" after an interrupt
            if not isinstance(error, OutriderError) or error.kind not in kinds:
                self._error = error
                return
            event = Event((), (), transcript.result(sequence, "error", error))
        else:
            event = transcript.event(sequence)
            if event.result is not None:
                self._engine.count(event.result)
        if event.result is not None:
            self._leave(sequence)
        self._add(number, event)

    def _add(self, number: int, event: Event) -> None:
        if (item := self._item(number, event)) is not None:
            self._items.append(item)


class Batch(RunningBatch[tuple[int, Result]]):
    """Results of many prompts: (index of the prompt, result) in the order in which they finish."""

    def _item(self, number: int, event: Event) -> tuple[int, Result] | None:
        return None if event.result is None else (number, event.result)


class BatchStream(RunningBatch[tuple[int, Event]]):
    """Texts of many prompts as they come: (index of the prompt, event), where the last event of
    each has its result."""

    def _item(self, number: int, event: Event) -> tuple[int, Event] | None:
        return (number, event) if event.tokens or event.result is not None else None
