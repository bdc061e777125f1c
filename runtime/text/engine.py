"""A bundle as an object that turns text into text: generate, stream, batch, stats."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..audio.recording import Audio
from ..backends.bits import Bits
from ..backends.engine import Source
from ..decoder import Decoder
from ..files.errors import OutriderError
from ..files.manifest import Manifest
from ..sequence import ActiveSequence, Request
from ..slots import Slot
from ..stats import Stats
from .line import QUEUE, TIMEOUT, Caller, Line
from .options import Options, Prompt
from .requests import make_request
from .results import Result, Transcript
from .speech import Heard, Transcription, transcribe
from .stream import Batch, Stream
from .together import Together
from .tokenizer import Tokenizer


class TextEngine:
    """Two engines, their slots and the tokenizer. Make one with `load`, and `close` it, or use it
    in a `with` block; its memory is also given back when nothing refers to it any more.

    Thread-safe: texts of several threads share rounds. A call that finds every slot taken waits in
    line.
    queue: how many calls may wait; 0 for none. timeout: seconds that one waits at most; None for as
    long as it takes. A call that finds the line full, waits too long, or waits for slots that only
    its own thread's streams hold, raises OutriderError "busy".
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        decoder: Decoder,
        memory: Mapping[str, int] | None = None,
        *,
        queue: int = QUEUE,
        timeout: float | None = TIMEOUT,
        bits: Bits | None = None,
    ):
        self.manifest, self.tokenizer = manifest, tokenizer
        self.bits = bits or Bits()  # what a text is promised not to depend on
        self.memory = dict(memory or {})  # bytes of weights and caches, by part
        self.line = Line(len(decoder.slots), queue, timeout)
        self._decoder: Decoder | None = decoder
        self._turn = threading.RLock()  # who has all slots may close it
        self._together = Together()
        self.dropped: deque[ActiveSequence] = deque()
        self._total = Stats(requests=0)

    @property
    def decoder(self) -> Decoder:
        """Raises OutriderError "bundle" once the engine is closed."""
        if self._decoder is None:
            raise OutriderError("bundle", "the engine is closed", "Load the bundle again.")
        return self._decoder

    def close(self) -> None:
        """Give the memory back, after the round that may be running. Whoever has a stream open or
        waits for a slot gets an OutriderError "bundle"."""
        self.line.close()
        with self._turn:
            self._decoder = None
            self.dropped.clear()

    def __enter__(self) -> TextEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What users call

    def generate(
        self, prompt: Prompt | None = None, options: Options | None = None, **more: Any
    ) -> Result:
        """The whole text. prompt: text, token ids, or chat messages; None beside a source that says
        it all. options: `Options`, None for the usual ones. more: fields of them, which win."""
        with self.stream(prompt, options, **more) as stream:
            for event in stream:
                if event.result is not None:
                    return event.result
        raise AssertionError("a stream ends with a result")

    def stream(
        self, prompt: Prompt | None = None, options: Options | None = None, **more: Any
    ) -> Stream:
        """The text as it comes, an event a round; see `Stream`. Takes what `generate` takes."""
        return Stream(self, *self.prepare(prompt, _asked(options, more)))

    def batch(
        self,
        prompts: Iterable[Prompt | tuple[Prompt | None, Options] | None],
        options: Options | None = None,
        **more: Any,
    ) -> Batch:
        """Run requests in all slots at once, each joining when a slot is free.

        prompts: with options of their own, whole, or without for those that are given here. They
        are read one by one, when there is a slot, so there may be any number of them; while the
        next one is awaited, nothing runs. Yields (index of the prompt, result) in the order in
        which they finish. What is wrong with one request is its result's `error`, and the others go
        on; what the engines themselves fail of is raised.
        """
        if isinstance(prompts, str | bytes | Mapping):
            raise OutriderError(
                "prompt", "batch was given one prompt", "Pass a list of prompts, or use generate."
            )
        return Batch(self, iter(prompts), _asked(options, more))

    def transcribe(
        self,
        audio: Audio,
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        heard: Heard | None = None,
        **options: Any,
    ) -> Transcription:
        """What is said in a recording of any length, with a Whisper.

        audio: a file, of any rate and channels, or float samples [n] at the model's rate. heard: is
        called after each window. options: those of `SpeechOptions`, and of `Options` those that
        sample and draft, and max_new_tokens, of a window. Raises as `generate`, and "prompt" where
        there is nothing to hear.
        """
        options |= {"language": language, "task": task, "timestamps": timestamps}
        return transcribe(self, audio, heard, **options)

    def stats(self) -> dict[str, Any]:
        """Totals over all finished requests: the fields of a result's stats, and `requests`.

        Latencies are means. A round that requests shared counts in full for each of them, so the
        times add up to more than the wall time; there is no tokens_per_second for that reason.
        """
        totals = self._total.summary()
        del totals["tokens_per_second"]
        return {"requests": self._total.requests, **totals}

    # What goes on in a request: `Stream` and `Batch` call these

    def prepare(self, prompt: Prompt | None, options: Options) -> tuple[Request, Transcript]:
        """Refuse what cannot be run, before anything is run. Raises as `generate`."""
        return make_request(self, prompt, options)

    def request(self, prompt: Prompt | None, options: Options) -> Request:
        """What would be run: token ids, and options with their defaults. Raises as `generate`."""
        return self.prepare(prompt, options)[0]

    def admit(self, caller: Caller, request: Request) -> ActiveSequence:
        """The request in a slot, once there is one. Raises "busy", and as `Decoder.admit`."""
        self.line.take(caller)
        try:
            return self.enter(request)
        except BaseException:
            self.line.give_back(caller)
            raise

    def enter(self, request: Request) -> ActiveSequence:
        """The request in a slot that the caller has taken."""
        sequence: ActiveSequence | None = None
        try:
            with self._turn:
                self._release()
                sequence = self.decoder.admit(request)
        except BaseException:
            if sequence is not None:  # an interrupt
                self.dropped.append(sequence)
            raise
        return sequence

    def round(self, sequences: Collection[ActiveSequence]) -> None:
        """One round of these, with those of other threads that want one."""
        self._together.round(sequences, self._rounded)

    def _rounded(self, wanted: Callable[[], list[ActiveSequence]]) -> None:
        with self._turn:
            self._release()
            if batch := wanted():
                self.decoder.round(batch)

    def leave(self, caller: Caller, sequence: ActiveSequence) -> None:
        """The slot of a sequence that has been dropped is free again."""
        try:
            self._together.forget(sequence)
            with self._turn:
                self._release()
        finally:
            self.line.give_back(caller)

    def drop(self, caller: Caller, sequences: Collection[ActiveSequence]) -> None:
        """Nobody refers to a stream any more: its slots are free for whoever comes next.

        Waits for no lock: the garbage collector runs anywhere, within a round or in the line.
        """
        self.dropped.extend(sequences)
        self.line.drop(caller)

    def count(self, result: Result) -> None:
        """A text is finished."""
        with self._turn:
            self._total.add(result.stats)

    # Slots for other uses

    @contextmanager
    def exclusive(self, prompt: Sequence[int] = (), source: Source = ()) -> Iterator[Slot]:
        """A slot while no other call runs, for calling the decoder's engines directly: the one that
        is best for this prompt and source, see `SlotTable.acquire`."""
        with self.undisturbed(1):
            slot = self.decoder.slots.acquire(prompt, source)
            try:
                yield slot
            finally:
                self.decoder.slots.release(slot)

    @contextmanager
    def undisturbed(self, slots: int | None = None) -> Iterator[None]:
        """While no other call runs. slots: that have to be free, None for all. Raises "busy"."""
        caller, slots = Caller(), len(self.decoder.slots) if slots is None else slots
        try:
            self.line.take(caller, slots)
            with self._turn:
                self._release()
                yield
        finally:
            self.line.give_back(caller, None)

    def _release(self) -> None:
        """Give back the slots of what was dropped; in turn alone."""
        while self.dropped:
            try:
                if self._decoder is not None:
                    self._decoder.release(self.dropped[0])
            except Exception:
                self.dropped.popleft()
                raise
            self.dropped.popleft()  # last: an interrupt leaves it there


def _asked(options: Options | None, more: Mapping[str, Any]) -> Options:
    if not isinstance(options, Options | None):
        raise TypeError(f"options must be an Options, not {type(options).__name__}")
    return Options(**more) if options is None else replace(options, **more)
