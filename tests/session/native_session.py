"""The C session of liboutrider, called through ctypes as a C program would."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from runtime.cmake import onnxruntime
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.library import find_library
from runtime.sampling.kernel import ABI_VERSION

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
                                   "one_text", "end_count", "reserved")),
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
    """See outrider_session.h. Failures are OutriderErrors."""

    def __init__(self, folder: Path, *, corpus: Sequence[int] = (), **config: int):
        ids = (I64 * len(corpus))(*corpus)
        made = Config(
            **{"abi_version": ABI_VERSION, **config}, folder=str(folder).encode(),
            onnxruntime=str(onnxruntime()).encode(), corpus=ids, corpus_length=len(corpus),
        )  # fmt: skip
        self._session, self._kept = P(), {}  # callbacks, as long as they may be called
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

    def admit(self, prompt: Sequence[int], **options: Any) -> int:
        made, kept = c_options(**options)
        ids, number = (I64 * len(prompt))(*prompt), U64()
        self._call("outrider_admit", self._session, ids, I64(len(prompt)), c.byref(made),
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
    logit_bias: dict[int, float] | None = None,
    stop_token_ids: Sequence[int] = (),
    stop: Any = None,
    logprobs: int | None = None,
    draft_temperature: float | None = None,
    **rest: Any,
) -> tuple[COptions, list[Any]]:
    """Options with Python's names, and what has to live as long as the request."""
    options = COptions()
    library().outrider_default_options(c.byref(options))
    options.draft, options.rule = DRAFTS.index(draft or "default"), RULES.index(verify)
    options.gamma = -1 if gamma is None else gamma
    options.logprobs = -1 if logprobs is None else logprobs
    options.draft_temperature = draft_temperature or 0
    biases = logit_bias or {}
    ids, numbers = (I64 * len(biases))(*biases), (F64 * len(biases))(*biases.values())
    stops = (I64 * len(stop_token_ids))(*stop_token_ids)
    options.bias_ids, options.biases, options.bias_length = ids, numbers, len(biases)
    options.stops, options.stop_length = stops, len(stop_token_ids)
    callback = Stop(stop) if stop is not None else Stop()
    options.stop = callback
    for name, value in rest.items():
        assert hasattr(options, name), name
        setattr(options, name, value)
    return options, [ids, numbers, stops, callback]
