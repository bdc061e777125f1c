"""A bundle as an object that turns text into text: generate, stream, batch, stats."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from numbers import Integral
from operator import index
from typing import Any, Literal, cast, get_args

from ..decoder import Decoder
from ..drafts.registry import KINDS
from ..files.errors import OutriderError
from ..files.manifest import Manifest
from ..policy import Policy, make_policy
from ..sampling.warp import SamplingParams, VerifyRule
from ..sequence import ActiveSequence, Request, Token
from ..slots import Slot
from ..stats import Stats
from .tokenizer import Detokenizer, StopStrings, Tokenizer

# Options without effect where nothing is drafted.
OF_DRAFTS = ("verify", "lenience", "fallback", "draft_temperature", "draft_threshold")
GammaName = Literal["auto", "transformers"]
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class Options:
    """How to generate; the keyword arguments of `generate`, `stream` and `batch`.

    seed: None draws one, which the result reports. draft: who proposes tokens, the bundle's draft
    "model", an "ngram" lookup in prompt and output, or "none"; None is what the bundle was built
    with. "chain": the draft model with lookups as its own draft; "copy": lookups in the prompt
    alone; "unigram", "bigram", "skip": tables, of the file that the bundle was loaded with;
    "random": any token. gamma: draft tokens a round, 0 for plain decoding; None for 4 of a model, 8
    of the others;
    "auto" for what is fastest by measured costs and acceptance, "transformers" for the schedule of
    Transformers. draft_temperature: of what the draft is sampled with, None for the target's.
    draft_threshold: a round drafts no more after a token to which the draft gave a probability
    below this. fallback: "auto" goes without drafts while they lose. Where rounds go by the clock
    (gamma or fallback "auto") a seed repeats the distribution, not the text. stop: texts that end
    the output and are not part of it; stop_token_ids likewise. logprobs: alternatives reported for
    each token, None for no log-probabilities. chat: whether a plain-text prompt is a user's message
    for the chat template; None does so where the bundle has one. system: the system message in that
    case. The others are those of `SamplingParams`.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    gamma: int | GammaName | None = None
    fallback: Literal["auto", "off"] = "off"
    draft: str | None = None
    draft_temperature: float | None = None
    draft_threshold: float = 0.0
    verify: VerifyRule = "token"
    lenience: float = 1.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    chat: bool | None = None
    system: str | None = None

    def plain(self) -> Options:
        """The same in plain decoding."""
        usual = {name: getattr(Options, name) for name in OF_DRAFTS}
        return replace(self, gamma=0, draft=None, **usual)

    def check_plain(self) -> None:
        """Refuse what has no effect where nothing is drafted. Raises OutriderError "option"."""
        for name in OF_DRAFTS:
            if getattr(self, name) != getattr(Options, name):
                raise OutriderError(
                    "option",
                    f"{name}={getattr(self, name)} has no effect in plain decoding (gamma=0)",
                    f"Leave {name} out, or use a draft.",
                )


@dataclass(frozen=True)
class Result:
    """A finished text.

    finish_reason: "eos", "stop" (see stopped_by), "length" (max_new_tokens) or "context" (the
    bundle's max_len). tokens: ids with origin and log-probabilities. token_ids includes the
    token that ended the text (end-of-text, or the one that completed a stop string).
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    stopped_by: str | int | None
    seed: int
    stats: Stats

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[float | None]:
        return [token.logprob for token in self.tokens]


@dataclass(frozen=True)
class Event:
    """What one round added. text: sum of pieces, each (text, origin of its token); text that may
    still become a stop string or half a character comes with a later event. result: on the last."""

    pieces: tuple[tuple[str, str], ...]
    tokens: tuple[Token, ...]
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class _Stream:
    """The text side of one request: detokenization and stop strings, token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], seed: int, options: Options):
        stops = [options.stop] if isinstance(options.stop, str) else list(options.stop)
        # A special token has no text in which it could be found: it is a stop by its id.
        self._special = {i: t for t in stops if (i := tokenizer.special_id(t)) is not None}
        stops = [text for text in stops if text not in self._special.values()]
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(stops)
        self._stop_ids = frozenset(options.stop_token_ids)
        self._pieces: list[str] = []  # one for each token pushed since the last event
        self.seed, self.text = seed, ""
        self.stopped_by: str | int | None = None

    def push(self, token: int) -> str | None:
        """`Request.stop`: a finish reason when the text ends after this token."""
        if token in self._stop_ids or token in self._special:
            self.stopped_by = self._special.get(token, token)
            return "stop"
        piece, match = self._stops.push(self._detokenizer.push(token))
        self._pieces.append(piece)
        if match is None:
            return None
        self.stopped_by = match
        return "stop"

    def event(self, running: ActiveSequence, new: Sequence[Token]) -> Event:
        """The event of the tokens that a round emitted, with the result if they were the last."""
        # A token that ends the text unsaid (end-of-text, a stop id) comes last and has no piece.
        pieces = [(p, t.origin) for p, t in zip(self._pieces, new, strict=False) if p]
        self._pieces.clear()
        if running.finish_reason is None:
            self.text += "".join(piece for piece, _ in pieces)
            return Event(tuple(pieces), tuple(new))
        if tail := self._flush():
            pieces.append((tail, new[-1].origin))
        self.text += "".join(piece for piece, _ in pieces)
        result = Result(
            self.text,
            tuple(running.output),
            running.finish_reason,
            self.stopped_by,
            self.seed,
            running.stats,
        )
        return Event(tuple(pieces), tuple(new), result)

    def _flush(self) -> str:
        """What was held back, when the text ended otherwise than by a stop string in it."""
        if isinstance(self.stopped_by, str) and self.stopped_by not in self._special.values():
            return ""
        piece, match = self._stops.push(self._detokenizer.flush())
        return piece if match is not None else piece + self._stops.flush()


class TextEngine:
    """Two engines, their slots and the tokenizer. Make one with `bundle.load`.

    Thread-safe: calls take turns round by round. A call that finds every slot taken does not wait,
    for its own thread may hold them: it raises OutriderError "busy". `batch` queues.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        decoder: Decoder,
        memory: Mapping[str, int] | None = None,
    ):
        self.manifest, self.tokenizer, self.decoder = manifest, tokenizer, decoder
        self.memory = dict(memory or {})  # bytes of weights and caches, by part
        self._turn = threading.Lock()
        self._total = Stats()
        self._requests = 0

    # One request

    def generate(self, prompt: Prompt, **options: Any) -> Result:
        """The whole text. prompt: text, token ids, or chat messages. options: see `Options`."""
        for event in self.stream(prompt, **options):
            if event.result is not None:
                return event.result
        raise AssertionError("a stream ends with a result")

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Event]:
        """An event a round. Closing the iterator gives the slot back, whenever that is."""
        return self._stream(*self._prepare(prompt, Options(**options)))

    def _stream(self, request: Request, text: _Stream) -> Iterator[Event]:
        with self._turn:
            running = self.decoder.admit(request)
        try:
            new: Sequence[Token] = running.output[:]
            while True:
                event = self._event(running, text, new)
                yield event
                if event.result is not None:
                    return
                with self._turn:
                    new = self.decoder.round([running])[running]
        finally:
            self.decoder.release(running)

    # Many requests

    def batch(self, prompts: Iterable[tuple[Prompt, Options]]) -> Iterator[tuple[int, Result]]:
        """Run requests in all slots at once, each joining when a slot is free.

        Yields (index of the prompt, result) in the order in which they finish.
        """
        waiting = deque(
            (number, *self._prepare(prompt, options))
            for number, (prompt, options) in enumerate(prompts)
        )
        running: dict[ActiveSequence, tuple[int, _Stream]] = {}
        try:
            while waiting or running:
                new: dict[ActiveSequence, Sequence[Token]] = {}
                with self._turn:
                    if running:
                        new.update(self.decoder.round(running))
                    # With nothing running, slots that others hold are an error, as in `stream`.
                    while waiting and (self.decoder.slots.free or not running):
                        number, request, text = waiting.popleft()
                        joined = self.decoder.admit(request)
                        running[joined] = (number, text)
                        new[joined] = joined.output[:]
                for sequence, tokens in new.items():
                    number, text = running[sequence]
                    event = self._event(sequence, text, tokens)
                    if event.result is not None:
                        del running[sequence]
                        self.decoder.release(sequence)
                        yield number, event.result
        finally:
            for sequence in running:
                self.decoder.release(sequence)

    def stats(self) -> dict[str, Any]:
        """Totals over all finished requests: the fields of a result's stats, and `requests`.

        Latencies are means. A round that requests shared counts in full for each of them, so the
        times add up to more than the wall time; there is no tokens_per_second for that reason.
        """
        totals = self._total.summary(self._requests)
        del totals["tokens_per_second"]
        return {"requests": self._requests, **totals}

    # Without running

    def request(self, prompt: Prompt, options: Options) -> Request:
        """What would be run: token ids, and options with their defaults. Raises as `generate`."""
        return self._prepare(prompt, options)[0]

    @contextmanager
    def exclusive(self) -> Iterator[Slot]:
        """A slot while no other call runs, for calling the decoder's engines directly."""
        with self._turn:
            slot = self.decoder.slots.acquire()
            try:
                yield slot
            finally:
                self.decoder.slots.release(slot)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """All slots while no other call runs. Raises OutriderError "busy"."""
        with self._turn:
            if self.decoder.slots.free < len(self.decoder.slots):
                raise OutriderError(
                    "busy", "beam search takes all slots, and some are in use",
                    "Wait for the other requests to finish.",
                )  # fmt: skip
            yield

    # Inside

    def encode(self, prompt: Prompt, options: Options) -> list[int]:
        """Token ids of a prompt: text as it is or through the chat template, messages, or ids."""
        if isinstance(prompt, bytes):
            raise OutriderError("prompt", "the prompt is bytes", "Decode it to text first.")
        if isinstance(prompt, str):
            templated = self.manifest.pair.tokenizer.chat_template
            chat = templated if options.chat is None else options.chat
            if options.system is not None and not chat:
                raise OutriderError(
                    "option",
                    "a system message needs a chat template",
                    "Put it into the prompt itself, or use a checkpoint with a chat template.",
                )
            if not chat:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if len(prompt) and isinstance(prompt[0], Mapping):
            messages = cast(list[Message], list(prompt))
            if options.system is not None:
                messages.insert(0, {"role": "system", "content": options.system})
            rendered = self.tokenizer.render_chat(messages)
            return self.tokenizer.encode(rendered, add_special_tokens=False)
        if options.system is not None:
            raise OutriderError(
                "option",
                "a system message has no place before token ids",
                "Give the prompt as text or as messages.",
            )
        return [index(cast(int, token)) for token in prompt]  # TypeError for what is no integer

    def _prepare(self, prompt: Prompt, options: Options) -> tuple[Request, _Stream]:
        """Refuse what cannot be run, before anything is run."""
        for name in ("max_new_tokens", "min_new_tokens", "gamma", "logprobs", "seed"):
            value = getattr(options, name)
            if name == "gamma" and value in get_args(GammaName):
                continue
            if isinstance(value, bool) or not isinstance(value, Integral | None):
                raise OutriderError(
                    "option", f"{name}={value!r} is not a whole number", "Give a whole number."
                )
        seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
        draft, gamma = self._draft_of(options)
        if gamma == 0:
            options.check_plain()
        width = self.decoder.vocab_size
        odd = [token for token in options.stop_token_ids if not 0 <= token < width]
        if odd:
            raise OutriderError(
                "option", f"stop token id {odd[0]} does not exist", f"Choose from 0 to {width - 1}."
            )
        ids = self.encode(prompt, options)
        self.decoder.check_ids(ids)  # before the text side, which would look a stranger up
        text = _Stream(self.tokenizer, ids, seed, options)
        names = {f.name for f in fields(Options)} & {f.name for f in fields(SamplingParams)}
        sampling = {name: getattr(options, name) for name in names}
        params = SamplingParams(**{**sampling, "seed": seed})
        request = Request(
            prompt=ids,
            params=params,
            gamma=gamma,
            draft=draft,
            draft_temperature=options.draft_temperature,
            draft_threshold=options.draft_threshold,
            policy=self._policy(options, params, draft, gamma),
            max_new_tokens=options.max_new_tokens,
            min_new_tokens=options.min_new_tokens,
            eos_token_ids=frozenset(self.manifest.pair.tokenizer.eos_token_ids),
            ignore_eos=options.ignore_eos,
            logprobs=options.logprobs,
            stop=text.push,
        )
        self.decoder.check(request)
        return request, text

    def _policy(
        self, options: Options, params: SamplingParams, draft: str, gamma: int
    ) -> Policy | None:
        if options.fallback not in ("auto", "off"):
            raise OutriderError(
                "option", f"fallback={options.fallback!r} is unknown", 'Use "auto" or "off".'
            )
        named = options.gamma if isinstance(options.gamma, str) else gamma
        fallback = options.fallback == "auto"
        if gamma == 0 or not (isinstance(named, str) or fallback):
            return None
        most = self.decoder.max_gamma
        if not 0 <= gamma <= most:
            return None  # `Decoder.check` refuses it
        settings = (replace(params, seed=0), options.draft_temperature)
        return make_policy(
            named, self.decoder.costs[draft], most, fallback=fallback, settings=settings
        )

    def _draft_of(self, options: Options) -> tuple[str, int]:
        """Who proposes, and how many tokens a round. Raises "option"."""
        kind, gamma = options.draft, options.gamma
        if isinstance(gamma, str):
            gamma = self.decoder.max_gamma
        if kind not in (None, "none", *KINDS):
            raise OutriderError(
                "option", f"draft={kind!r} is unknown", f"Use {', '.join(KINDS)} or none."
            )
        if kind == "none" and gamma:
            raise OutriderError(
                "option", f"draft=none contradicts gamma={gamma}", "Leave one of them out."
            )
        reads_model = kind in KINDS and KINDS[kind].reads_model
        if reads_model and gamma != 0 and self.decoder.draft is None:
            raise OutriderError(
                "option",
                f"draft={kind}: the bundle was built without one",
                "Leave it out, or build the bundle with DRAFT=<draft>.",
            )
        if kind is None:
            kind = "model" if self.decoder.draft is not None else self.manifest.pair.lookup
        if kind is None or kind == "none":
            return "model", gamma or 0
        if gamma is None:
            gamma = min(KINDS[kind].usual_gamma, self.decoder.max_gamma)
        return kind, gamma

    def _event(self, running: ActiveSequence, text: _Stream, new: Sequence[Token]) -> Event:
        if running.error is not None:
            raise running.error
        event = text.event(running, new)
        if event.result is not None:
            with self._turn:
                self._requests += 1
                self._total.add(event.result.stats)
        return event
