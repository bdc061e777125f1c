"""A bundle as an object that turns text into text: generate, stream, batch, stats."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import index
from typing import Any, cast

from ..audio.recording import Audio
from ..backends.bits import Bits
from ..backends.engine import Source
from ..decoder import Decoder
from ..drafts.registry import KINDS
from ..files.errors import OutriderError, refuse_first
from ..files.manifest import Manifest
from ..policy import Policy, make_policy
from ..sampling.warp import SamplingParams
from ..sequence import ActiveSequence, Request
from ..slots import Slot
from ..stats import Stats
from .line import QUEUE, TIMEOUT, Caller, Line
from .options import Message, Options, Prompt
from .results import Result, Transcript
from .sources import read_source, rules_of
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
        options.check()
        options = options.seeded()
        draft, gamma = self._draft_of(options)
        if gamma == 0:
            options.check_plain()
        width = self.decoder.vocab_size
        params = options.sampling()
        if params.verify == "coupled" and self.bits.forgone:
            raise OutriderError(
                "option",
                "verify=coupled promises a text of every gamma, and plain_width=1 ties it to one",
                "Leave one of them out.",
            )
        words = () if options.bad_words_ids is None else options.bad_words_ids  # or an array
        named = {
            "stop_token_ids": options.stop_token_ids,
            "logit_bias": [*dict(params.logit_bias)],
            "bad_words_ids": [token for word in words for token in word],
        }
        refuse_first(
            (not 0 <= token < width, f"{name}: the token id {token} does not exist",
             f"Choose from 0 to {width - 1}.")
            for name, tokens in named.items()
            for token in tokens
        )  # fmt: skip
        source = read_source(options, self.manifest.pair, self.tokenizer)
        ids = self.encode(prompt, options)
        self.decoder.check_ids(ids)  # before the text side, which would look a stranger up
        min_new_tokens, processors = rules_of(options, self.manifest.pair, ids, source)
        transcript = Transcript(self.tokenizer, ids, params.seed, options)
        request = Request(
            prompt=ids,
            params=params,
            gamma=gamma,
            draft=draft,
            draft_temperature=options.draft_temperature,
            draft_threshold=options.draft_threshold,
            policy=self._policy(options, params, draft, gamma),
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=min_new_tokens,
            eos_token_ids=frozenset(self.manifest.pair.tokenizer.eos_token_ids),
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            stop=transcript.push,
            source=source,
            second=self._second(prompt),
            processors=processors,
        )
        self.decoder.check(request)
        return request, transcript

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

    # Inside

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

    def encode(self, prompt: Prompt | None, options: Options) -> list[int]:
        """Token ids of a prompt: text as it is or through the chat template, messages, or ids. An
        encoder-decoder's begins with the decoder's start token, whatever it is, as in Transformers;
        that of a model that transcribes is taken as it is.

        Raises OutriderError "prompt" or "option".
        """
        start = self.manifest.pair.start_ids
        if start is None:
            if prompt is None:
                raise OutriderError("prompt", "there is no prompt", "Give one.")
            return self._encode(prompt, options)
        if prompt is None and isinstance(options.source, str):
            return list(start)
        ids = self._encode(() if prompt is None else prompt, options)
        if not ids:
            return list(start)
        return ids if self.manifest.pair.audio or ids[0] == start[0] else [start[0], *ids]

    def _second(self, prompt: Prompt | None) -> list[int]:
        """`Request.second`: the languages, where the model is to find out which."""
        audio = self.manifest.pair.audio
        if audio is None or not audio.language_detected or (prompt is not None and len(prompt)):
            return []
        return sorted(audio.lang_to_id.values())

    def _encode(self, prompt: Prompt, options: Options) -> list[int]:
        special, start = options.special_tokens, self.manifest.pair.start_ids
        if isinstance(prompt, str):
            templated = self.manifest.pair.tokenizer.chat_template and start is None
            chat = templated if options.chat is None else options.chat
            if options.system is not None and not chat:
                raise OutriderError(
                    "option",
                    "a system message needs a chat template",
                    "Put it into the prompt itself, or use a checkpoint with a chat template.",
                )
            if not chat:
                # What a tokenizer puts around a text is around a source; a prompt goes on.
                return self.tokenizer.encode(
                    prompt, add_special_tokens=start is None, special_tokens=special
                )
            prompt = [{"role": "user", "content": prompt}]
        items = _items(prompt)
        if items and isinstance(items[0], Mapping):
            messages = cast(list[Message], items)
            if options.system is not None:
                messages.insert(0, {"role": "system", "content": options.system})
            return self.tokenizer.encode_chat(messages, special_tokens=special)
        if not items and start is None:
            return []  # nobody knows of what: it is refused as empty, whatever else was asked
        refuse_first(
            (getattr(options, name) != getattr(Options, name),
             f"{name} has no meaning where the prompt is token ids",
             "Give the prompt as text or as messages.")
            for name in ("system", "special_tokens")
        )  # fmt: skip
        return cast(list[int], items)

    def _policy(
        self, options: Options, params: SamplingParams, draft: str, gamma: int
    ) -> Policy | None:
        chosen, most = isinstance(options.gamma, str), self.decoder.max_gamma
        fallback = options.fallback == "auto"
        if not (chosen or fallback) or not 0 < gamma <= most:  # `Decoder.check` refuses the others
            return None
        settings = (replace(params, seed=0), options.draft_temperature)
        return make_policy(
            options.gamma if isinstance(options.gamma, str) else gamma,
            self.decoder.costs[draft], most, fallback=fallback, settings=settings,
        )  # fmt: skip

    def _draft_of(self, options: Options) -> tuple[str, int]:
        """Who proposes, and how many tokens a round. Raises "option"."""
        kind, gamma = options.draft, options.gamma
        if isinstance(gamma, str):
            gamma = self.decoder.max_gamma
        unopened = self.decoder.draft is None and self.manifest.pair.draft is not None
        if unopened and (KINDS[kind].needs_model() if kind in KINDS else gamma and kind is None):
            raise OutriderError(
                "option",
                (f"draft={kind}" if kind else f"gamma={options.gamma}")
                + " needs the draft model, and the bundle was opened without it",
                "Leave that option out, or load the bundle with draft_model=True.",
            )
        reads_model = kind in KINDS and KINDS[kind].reads_model
        if reads_model and self.decoder.draft is None:
            raise OutriderError(
                "option",
                f"draft={kind}: the bundle was built without a draft",
                "Leave that option out, or build the bundle with DRAFT=<draft>.",
            )
        if kind is None:
            kind = "model" if self.decoder.draft is not None else self.manifest.pair.lookup
        if kind is None or kind == "none":
            return "model", gamma or 0
        if gamma is None:
            gamma = min(KINDS[kind].usual_gamma, self.decoder.max_gamma)
        return kind, gamma


def _items(prompt: Any) -> list[Any]:
    """Messages, or token ids. Raises OutriderError "prompt" for what is neither."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | Mapping):
        items = list(prompt)
        if all(isinstance(item, Mapping) for item in items):
            return items
        with suppress(TypeError):
            if bool not in {type(item) for item in items}:
                return [index(item) for item in items]
    raise OutriderError(
        "prompt",
        f"the prompt ({type(prompt).__name__}) is neither text, nor messages, nor token ids",
        "Pass a str, a list of dicts with role and content, or a list of ints.",
    )


def _asked(options: Options | None, more: Mapping[str, Any]) -> Options:
    if not isinstance(options, Options | None):
        raise TypeError(f"options must be an Options, not {type(options).__name__}")
    return Options(**more) if options is None else replace(options, **more)
