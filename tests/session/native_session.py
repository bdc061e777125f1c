"""The C session of liboutrider, called through ctypes as a C program would call it, and its
step-by-step comparison with the Python runtime for requests of all kinds."""

from __future__ import annotations

import ctypes as c
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runtime.cmake import onnxruntime
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.library import find_library
from runtime.sampling.kernel import ABI_VERSION
from runtime.sequence import ActiveSequence, Token
from runtime.text.engine import TextEngine
from runtime.text.options import Options

MAX_GAMMA = 8  # of the bundles
DRAFTS = ("default", "model", "ngram", "copy", "chain", "random", "none")
RULES = ("token", "block", "sigmoid", "coupled")
ORIGINS = ("first", "accepted", "corrected", "bonus", "plain")
FINISHES = (None, "eos", "stop", "length", "context", "cancelled", "error")
KINDS = {status: kind for kind, status in EXIT_STATUS.items()}
I32, I64, U64, F64, P = c.c_int32, c.c_int64, c.c_uint64, c.c_double, c.c_void_p
Stop = c.CFUNCTYPE(I32, P, I64)


class Failure(c.Structure):
    _fields_ = (("status", I32), ("cause", c.c_char * 480), ("remedy", c.c_char * 256))


class Config(c.Structure):
    _fields_ = (
        ("abi_version", I32), ("plain_width", I32), ("folder", c.c_char_p),
        ("onnxruntime", c.c_char_p), ("corpus", c.POINTER(I64)), ("corpus_length", I64),
        *((name, I32) for name in ("slots", "threads", "unverified", "no_reuse")),
    )  # fmt: skip


class Facts(c.Structure):
    _fields_ = (
        *((name, I32) for name in ("vocab_size", "max_len", "max_gamma", "slots", "has_draft",
                                   "output_invariant", "end_count", "reserved")),
        ("ends", c.POINTER(I64)),
    )  # fmt: skip


class COptions(c.Structure):
    _fields_ = (
        ("seed", U64),
        *((name, F64) for name in (
            "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty",
            "presence_penalty", "lenience", "sigmoid_alpha", "sigmoid_beta", "draft_temperature",
            "draft_threshold")),
        ("bias_ids", c.POINTER(I64)), ("biases", c.POINTER(F64)), ("stops", c.POINTER(I64)),
        ("stop", Stop), ("stop_data", P),
        *((name, I32) for name in (
            "bias_length", "stop_length", "top_k", "rule", "draft", "gamma", "max_new_tokens",
            "min_new_tokens", "ignore_eos", "logprobs")),
    )  # fmt: skip


class CToken(c.Structure):
    _fields_ = (
        ("id", I64), ("logprob", F64), ("ids", c.POINTER(I64)), ("logprobs", c.POINTER(F64)),
        ("alternative_count", I32), ("origin", I32),
    )  # fmt: skip


class CStats(c.Structure):
    _fields_ = (
        *((name, I64) for name in ("prompt_tokens", "reused_tokens", "output_tokens", "rounds",
                                   "drafted", "accepted")),
        *((name, F64) for name in ("prefill_seconds", "round_seconds", "draft_seconds",
                                   "target_seconds")),
    )  # fmt: skip


@cache
def library() -> c.CDLL:
    path = find_library()
    assert path is not None
    return c.CDLL(str(path))


@dataclass(frozen=True)
class NativeToken:
    id: int
    origin: str
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


class NativeSession:
    """See outrider_session.h. Failures raise OutriderError."""

    def __init__(self, folder: Path, *, corpus: Sequence[int] = (), **config: int):
        ids = (I64 * len(corpus))(*corpus)
        made = Config(
            **{"abi_version": ABI_VERSION, **config}, folder=os.fsencode(folder),
            onnxruntime=str(onnxruntime()).encode(), corpus=ids, corpus_length=len(corpus),
        )  # fmt: skip
        self._session, self._kept = P(), {}  # kept: each request's callback and arrays
        self._call("outrider_open", c.byref(made), c.byref(self._session))

    def close(self) -> None:
        library().outrider_close(self._session)
        self._session = P()

    def __enter__(self) -> NativeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> Facts:
        facts = Facts()
        library().outrider_get_facts(self._session, c.byref(facts))
        return facts

    def admit(self, prompt: Sequence[int], how: str = "admit", **options: Any) -> int:
        """how: "admit" or "begin"."""
        made, kept = c_options(**options)
        ids, number = (I64 * len(prompt))(*prompt), U64()
        self._call(f"outrider_{how}", self._session, ids, I64(len(prompt)), c.byref(made),
                   c.byref(number))  # fmt: skip
        self._kept[number.value] = kept
        return number.value

    def round(self) -> None:
        self._call("outrider_round", self._session)

    def take(self, request: int, most: int = 64) -> tuple[list[NativeToken], str | None]:
        tokens, count, finish = (CToken * most)(), I32(), I32()
        self._call("outrider_take", self._session, U64(request), tokens, I32(most), c.byref(count),
                   c.byref(finish))  # fmt: skip
        found = [
            NativeToken(
                token.id, ORIGINS[token.origin], token.logprob,
                tuple((token.ids[i], token.logprobs[i]) for i in range(token.alternative_count)),
            )
            for token in tokens[: count.value]
        ]  # fmt: skip
        return found, FINISHES[finish.value]

    def cancel(self, request: int) -> None:
        library().outrider_cancel(self._session, U64(request))

    def stats(self, request: int) -> CStats:
        stats = CStats()
        self._call("outrider_get_stats", self._session, U64(request), c.byref(stats))
        return stats

    def release(self, request: int) -> None:
        self._call("outrider_release", self._session, U64(request))
        self._kept.pop(request, None)

    def tokens(self, request: int) -> Iterator[NativeToken]:
        finish = None
        while finish is None:
            found, finish = self.take(request)
            yield from found
            if finish is None:
                self.round()

    def generate(self, prompt: Sequence[int], **options: Any) -> list[int]:
        request = self.admit(prompt, **options)
        try:
            return [token.id for token in self.tokens(request)]
        finally:
            with suppress(OutriderError):
                self.release(request)

    def _call(self, name: str, *arguments: Any) -> None:
        failure = Failure()
        if getattr(library(), name)(*arguments, c.byref(failure)):
            raise OutriderError(
                KINDS[failure.status], failure.cause.decode(), failure.remedy.decode()
            )


def c_options(
    *,
    draft: str | None = None,
    verify: str = "token",
    gamma: int | None = None,
    logit_bias: dict[int, float] | list[tuple[int, float]] | None = None,
    stop_token_ids: Sequence[int] = (),
    stop: Any = None,
    logprobs: int | None = None,
    draft_temperature: float | None = None,
    **rest: Any,
) -> tuple[COptions, list[Any]]:
    """Options by their Python names. Returns the C options and the objects that must live as long
    as the request."""
    options = COptions()
    library().outrider_default_options(c.byref(options))
    options.draft, options.rule = DRAFTS.index(draft or "default"), RULES.index(verify)
    options.gamma = -1 if gamma is None else gamma
    options.logprobs = -1 if logprobs is None else logprobs
    options.draft_temperature = draft_temperature or 0
    biases = [*logit_bias.items()] if isinstance(logit_bias, dict) else logit_bias or []
    ids = (I64 * len(biases))(*(token for token, _ in biases))
    numbers = (F64 * len(biases))(*(bias for _, bias in biases))
    stops = (I64 * len(stop_token_ids))(*stop_token_ids)
    options.bias_ids, options.biases, options.bias_length = ids, numbers, len(biases)
    options.stops, options.stop_length = stops, len(stop_token_ids)
    callback = Stop(stop) if stop is not None else Stop()
    options.stop = callback
    for name, value in rest.items():
        assert hasattr(options, name), name
        setattr(options, name, value)
    return options, [ids, numbers, stops, callback]


def refused(folder: Path, kind: str, words: str, remedy: str = "", **config: Any) -> None:
    """Check that no session opens, with an error of this kind and a remedy."""
    with pytest.raises(OutriderError, match=f"^{kind}: .*{words}.*{remedy}") as caught:
        NativeSession(folder, **config)
    assert caught.value.remedy


# Comparison with Python


def random_options(random: Random, vocab_size: int) -> dict[str, Any]:
    """A random valid combination of options."""
    chosen: dict[str, Any] = {
        "max_new_tokens": random.randint(1, 40),
        "seed": random.getrandbits(63),
        "ignore_eos": random.random() < 0.7,
        "logprobs": random.choice([None, 0, 3]),
        "temperature": random.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
        "min_new_tokens": random.choice([0, 0, 1]),
    }
    if random.random() < 0.4:
        chosen |= {"top_k": random.choice([0, 20]), "top_p": random.choice([1.0, 0.9]),
                   "min_p": random.choice([0.0, 0.05])}  # fmt: skip
    if random.random() < 0.3:
        chosen |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    if random.random() < 0.2:
        chosen |= {"logit_bias": {random.randrange(vocab_size): 2.5, 0: -3.0},
                   "stop_token_ids": [random.randrange(vocab_size) for _ in range(3)]}  # fmt: skip
    draft = random.choice(["model", "model", "ngram", "copy", "chain", "random", None])
    chosen["gamma"] = random.randint(1, MAX_GAMMA) if draft else 0
    rules = ["token", "coupled", *(["block"] if draft else [])]
    if draft:
        chosen["draft"] = draft
    if draft in ("model", "chain", "random") and chosen["temperature"]:
        rules.append("sigmoid")
        if random.random() < 0.3:
            chosen["draft_temperature"] = random.choice([0.5, 1.5])
    if draft in ("model", "random") and random.random() < 0.3:
        chosen["draft_threshold"] = random.choice([0.1, 0.5])
    return chosen | {"verify": random.choice(rules)}


def tokens_match(python: Token, native: NativeToken) -> bool:
    logprob = native.logprob if native.logprob == native.logprob else None
    values = (native.id, native.origin, logprob, native.alternatives)
    return (python.id, python.origin, python.logprob, python.alternatives) == values


def compare_runtimes(
    engine: TextEngine,
    session: NativeSession,
    jobs: Sequence[tuple[list[int], Mapping[str, Any]]],
    random: Random,
) -> int:
    """Run the requests in both runtimes, joining, advancing and leaving in step, half of them with
    prompts that rounds read. Returns the number of tokens compared."""
    decoder, waiting, compared = engine.decoder, list(jobs)[::-1], 0
    active: dict[int, tuple[ActiveSequence, Mapping[str, Any]]] = {}

    def compare(number: int, expected: Sequence[Token]) -> None:
        nonlocal compared
        sequence, options = active[number]
        found, finish = session.take(number)
        assert len(found) == len(expected), (options, found)
        assert all(map(tokens_match, expected, found)), (options, found)
        compared += len(found)
        stats, own = session.stats(number), sequence.stats
        assert finish == sequence.finish_reason, options
        assert (stats.reused_tokens, stats.rounds, stats.drafted, stats.accepted) == (
            own.reused_tokens, own.rounds, own.drafted, own.accepted
        ), options  # fmt: skip
        if finish is not None or random.random() < 0.02:  # finished, or the client disconnects
            decoder.release(sequence)
            session.cancel(number)
            session.release(number)
            del active[number]

    while waiting or active:
        if waiting and decoder.slots.free and random.random() < 0.6:
            prompt, options = waiting.pop()
            stops, how = options.get("stop_token_ids", ()), random.choice(["admit", "begin"])
            sequence = getattr(decoder, how)(engine.request(prompt, Options(**options)))
            number = session.admit(prompt, how, **{**options, "stop_token_ids": stops})
            active[number] = sequence, options
            compare(number, sequence.output)
            continue
        if not active:
            continue
        before = {number: len(sequence.output) for number, (sequence, _) in active.items()}
        decoder.round([sequence for sequence, _ in active.values()])
        session.round()
        for number, length in before.items():
            compare(number, active[number][0].output[length:])
    return compared


def requests(
    engine: TextEngine, count: int, random: Random
) -> list[tuple[list[int], dict[str, Any]]]:
    """Random requests. Some prompts share a prefix, so that slots hold reusable rows, and some
    sequences reach the end of the context."""
    vocab_size, max_len = engine.decoder.vocab_size, engine.decoder.max_len
    stems = [[random.randrange(vocab_size) for _ in range(max_len)] for _ in range(3)]
    longest = [*range(1, 61)] * 2 + [*range(max_len - 30, max_len - 4)]
    return [
        (
            random.choice(stems)[: random.choice(longest)]
            + [random.randrange(vocab_size) for _ in range(random.randint(1, 4))],
            random_options(random, vocab_size),
        )
        for _ in range(count)
    ]
