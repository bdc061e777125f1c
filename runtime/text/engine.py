"""`TextEngine`: an open bundle that turns text into text (generate, stream, batch, stats)."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakSet

from ..audio.recording import Audio
from ..backends.bits import Bits
from ..backends.engine import Source
from ..decoder import Decoder
from ..files.errors import OutriderError, first_line
from ..files.manifest import Manifest
from ..sequence import ActiveSequence, Request
from ..slots import Slot
from ..stats import Stats
from .options import Options, Prompt, unknown_option
from .requests import make_request
from .results import Result
from .shared_rounds import RoundSharer
from .slot_queue import DEFAULT_QUEUE, DEFAULT_TIMEOUT, Caller, SlotQueue
from .speech import Transcription, WindowCallback, transcribe
from .stream import Batch, BatchStream, Stream
from .tokenizer import Tokenizer

logger = logging.getLogger("outrider")


class TextEngine:
    """Target, draft, their slots and the tokenizer. Create one with `load`, and `close` it or use
    it in a `with` block; its memory is also freed when nothing refers to it any more. It is closed
    at the latest when the interpreter exits.

    Thread-safe: requests of several threads share rounds. If all slots are taken, a call waits in
    a queue.
    queue: how many calls may wait for their first slot; 0 for none. timeout: most seconds that a
    call waits; None for no limit. A call raises OutriderError "busy" if the queue is full, if it
    waits too long, or if it waits for slots that only streams of its own thread hold.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        decoder: Decoder,
        memory: Mapping[str, int] | None = None,
        *,
        queue: int = DEFAULT_QUEUE,
        timeout: float | None = DEFAULT_TIMEOUT,
        bits: Bits | None = None,
    ):
        self.manifest, self.tokenizer = manifest, tokenizer
        self.bits = bits or Bits()  # what the output is promised not to depend on
        self.memory = dict(memory or {})  # bytes of weights and caches, by part
        self.slot_queue = SlotQueue(len(decoder.slots), queue, timeout)
        self._decoder: Decoder | None = decoder
        # Reentrant: a caller in `exclusive_access` may close the engine.
        self._decoder_lock = threading.RLock()
        self._round_sharer = RoundSharer()
        self.dropped: deque[ActiveSequence] = deque()
        self._total, self._total_lock = Stats(requests=0), threading.Lock()
        self._process = os.getpid()
        _open_engines.add(self)

    @property
    def decoder(self) -> Decoder:
        """Raises OutriderError "bundle" in a forked process, and once the engine is closed."""
        self._refuse_fork()
        if self._decoder is None:
            raise OutriderError("bundle", "the engine is closed", "Load the bundle again.")
        return self._decoder

    def close(self) -> None:
        """Free the memory, after the round that may be running. Open streams and calls that wait
        for a slot raise OutriderError "bundle"."""
        _open_engines.discard(self)
        if self._is_fork:
            self._decoder = None
            return
        self.slot_queue.close()
        with self._decoder_lock:
            self._decoder = None
            self.dropped.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine belongs to its process: load the bundle in the other one")

    def __enter__(self) -> TextEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What users call

    def generate(
        self, prompt: Prompt | None = None, options: Options | None = None, **more: Any
    ) -> Result:
        """Generate the whole text. prompt: text, token ids, or chat messages; may be None if there
        is a source. options: `Options`, None for the defaults. more: fields of `Options`, which
        override `options`."""
        with self.stream(prompt, options, **more) as stream:
            for event in stream:
                if event.result is not None:
                    return event.result
        raise AssertionError("a stream ends with a result")

    def stream(
        self, prompt: Prompt | None = None, options: Options | None = None, **more: Any
    ) -> Stream:
        """Generate the text round by round, as events; see `Stream`. Arguments as for
        `generate`."""
        return Stream(self, *make_request(self, prompt, _merge_options(options, more)))

    def batch(
        self,
        prompts: Iterable[Prompt | tuple[Prompt | None, Options] | None],
        options: Options | None = None,
        **more: Any,
    ) -> Batch:
        """Run requests in all slots at once, each starting when a slot is free.

        prompts: prompts, which use the options given here, or pairs (prompt, `Options`), whose
        options replace these. They are read one at a time, when a slot is free, so there may be any
        number of them; nothing runs while the next one is being read. Yields (index of the prompt,
        result) in the order in which requests finish. An error of one request is stored in its
        result's `error`, and the others continue; errors of the engines are raised.
        """
        return Batch(self, prompts, _merge_options(options, more))

    def stream_batch(
        self,
        prompts: Iterable[Prompt | tuple[Prompt | None, Options] | None],
        options: Options | None = None,
        **more: Any,
    ) -> BatchStream:
        """As `batch`, but yields (index of the prompt, event) round by round; the last event of
        each prompt has its result."""
        return BatchStream(self, prompts, _merge_options(options, more))

    def transcribe(
        self,
        audio: Audio,
        *,
        language: str | None = None,
        task: str | None = None,
        timestamps: bool = False,
        heard: WindowCallback | None = None,
        **options: Any,
    ) -> Transcription:
        """Transcribe a recording of any length with a Whisper model.

        audio: a file of any sampling rate and number of channels, or float samples [n] at the
        model's rate. language, task: None for those of the checkpoint's generation config, which
        are usually a language detected in the first window, and "transcribe". heard: called after
        each window. options: fields of `SpeechOptions`, the sampling and drafting fields of
        `Options`, and max_new_tokens, per window. Raises what `generate` raises, and "prompt" for
        audio that cannot be read.
        """
        options |= {"language": language, "task": task, "timestamps": timestamps}
        return transcribe(self, audio, heard, **options)

    def stats(self) -> dict[str, Any]:
        """Totals over all finished requests: the fields of a result's `stats.summary()`, and
        `requests`.

        Times are in milliseconds, latencies are means. A round shared by several requests counts in
        full for each of them, so times add up to more than the wall time; there is no
        tokens_per_second for that reason.
        """
        totals = self._total.summary()
        del totals["tokens_per_second"]
        return {"requests": self._total.requests, **totals}

    # The steps of a request, called by `Stream` and `Batch`

    def request(self, prompt: Prompt | None, options: Options) -> Request:
        """The request as it would be run: token ids, and options with their defaults filled in.
        Raises what `generate` raises."""
        return make_request(self, prompt, options)[0]

    def round(self, sequences: Collection[ActiveSequence]) -> None:
        """Run one round of these sequences, together with those that other threads are waiting to
        advance."""
        now = time.perf_counter()
        for sequence in sequences:
            sequence.asked_at = now
        self._round_sharer.round(sequences, self._run_round)

    def _run_round(self, wanted: Callable[[], list[ActiveSequence]]) -> None:
        with self._decoder_lock:
            self._release()
            if batch := wanted():
                self.decoder.round(batch)

    @property
    def _is_fork(self) -> bool:
        """Whether this is a forked process: threads that it does not have may hold the locks."""
        return os.getpid() != self._process

    def _refuse_fork(self) -> None:
        """Raise "bundle" in a forked process."""
        if self._is_fork:
            raise OutriderError(
                "bundle",
                "the engine belongs to the process that loaded it, of which this is a fork",
                "Load the bundle in this process.",
            )

    def refuse_reentry(self) -> None:
        """Raise "option" in code that a round of this thread called, or that interrupts its wait
        for one: it would wait for itself. Raise "bundle" in a forked process."""
        self._refuse_fork()
        is_held = self._decoder_lock._is_owned()  # type: ignore[attr-defined]
        if is_held or self._round_sharer.is_used_by(threading.get_ident()):
            raise OutriderError(
                "option",
                "a callback or signal handler used the engine within one of its own rounds",
                "Use it outside of processors, drafts and handlers.",
            )

    def leave(self, caller: Caller, sequence: ActiveSequence) -> None:
        """Free the slot of a sequence that is already in `dropped`; while a round runs, the next
        one does."""
        try:
            self._round_sharer.forget(sequence)
            if not self._round_sharer.is_running:
                with self._decoder_lock:
                    self._release(sequence)
        finally:
            self.slot_queue.release(caller)

    def drop(self, caller: Caller, sequences: Collection[ActiveSequence]) -> None:
        """Free the slots of a stream that nothing refers to any more, at the next opportunity.

        Waits for no lock: the garbage collector may run anywhere, in a round or in the queue.
        """
        self.dropped.extend(sequences)
        self.slot_queue.drop(caller)

    def count(self, result: Result) -> None:
        """Add a finished request to the totals."""
        with self._total_lock:
            self._total.add(result.stats)

    # Slots for other uses

    @contextmanager
    def exclusive_slot(self, prompt: Sequence[int] = (), source: Source = ()) -> Iterator[Slot]:
        """Hold a slot while no other call runs, to call the decoder's engines directly. It is the
        best slot for this prompt and source, see `SlotTable.acquire`."""
        with self.exclusive_access(1):
            slot = self.decoder.slots.acquire(prompt, source)
            try:
                yield slot
            finally:
                self.decoder.slots.release(slot)

    @contextmanager
    def exclusive_access(self, slots: int | None = None) -> Iterator[None]:
        """Hold slots while no other call runs. slots: how many must be free, None for all. Raises
        "busy"."""
        self.refuse_reentry()
        caller, slots = Caller(), len(self.decoder.slots) if slots is None else slots
        try:
            self.slot_queue.acquire(caller, slots)
            with self._decoder_lock:
                self._release()
                yield
        finally:
            self.slot_queue.release(caller, None)

    def _release(self, own: ActiveSequence | None = None) -> None:
        """Release the slots of dropped sequences. The caller must hold `_decoder_lock`. own: the
        caller's, whose error is raised. Others are logged: mostly nobody waits for them."""
        while self.dropped:
            sequence = self.dropped[0]
            try:
                if self._decoder is not None:
                    self._decoder.release(sequence)
            except Exception as error:  # of a draft of one's own, or of a device
                self.dropped.popleft()
                if sequence is own:
                    raise
                logger.warning("a stream was closed, but %s", first_line(error))
            else:
                self.dropped.popleft()  # last, so that an interrupt loses none


def _merge_options(options: Options | None, more: Mapping[str, Any]) -> Options:
    if not isinstance(options, Options | None):
        raise TypeError(f"options must be an Options, not {type(options).__name__}")
    if unknown := unknown_option(more):
        raise TypeError(". ".join(unknown))
    return replace(options or Options(), **more)


# The interpreter's exit ends a daemon thread in the middle of a round by unwinding its stack, which
# ONNX Runtime's C++ answers with abort().
_open_engines: WeakSet[TextEngine] = WeakSet()


@atexit.register
def _close_open_engines() -> None:
    for engine in list(_open_engines):
        engine.close()


def _keep_inherited_engines() -> None:
    """In a forked process, never free its parent's engines: the libraries would wait for threads
    that exist only in the parent."""
    for engine in _open_engines:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine._decoder))


os.register_at_fork(after_in_child=_keep_inherited_engines)
