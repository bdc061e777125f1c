"""Where the time of a round goes: inside the two engines, in sampling, or in Python around them.

Only the backend's own run counts as engine time. `Stats` is kinder: it counts the filling of the
engines' input buffers as theirs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.backends.engine import Engine, Ids, Logits
from runtime.round import HostRounds
from runtime.sequence import ActiveSequence, Request
from runtime.text.engine import TextEngine

from .timing import DISTURBED, ENOUGH, Sample, enough, sample

GAMMA = 4


@dataclass(frozen=True)
class Share:
    """Milliseconds of a round, and the parts of it; tau and how many rounds were kept."""

    round_ms: float
    sample_ms: float
    host_ms: float
    tau: float
    kept: int
    taken: int

    @property
    def host(self) -> float:
        return self.host_ms / self.round_ms

    @property
    def sample(self) -> float:
        return self.sample_ms / self.round_ms

    def __str__(self) -> str:
        return (
            f"round {self.round_ms:.2f} ms | host {self.host:.1%} | sampling {self.sample:.1%} "
            f"| both {self.host + self.sample:.1%} | tau {self.tau:.2f}"
        )

    def json_object(self) -> dict[str, Any]:
        return {
            "round_ms": round(self.round_ms, 3),
            "host": round(self.host, 4),
            "sampling": round(self.sample, 4),
            "host_and_sampling": round(self.host + self.sample, 4),
            "tau": round(self.tau, 3),
            "kept": self.kept,
            "taken": self.taken,
        }


class _Clock:
    """Stands in for a session and adds up the seconds of its runs."""

    def __init__(self, session: Any):
        self.session, self.seconds = session, 0.0

    def run_with_iobinding(self, binding: object) -> None:
        begin = time.perf_counter()
        self.session.run_with_iobinding(binding)
        self.seconds += time.perf_counter() - begin

    def io_binding(self) -> object:
        return self.session.io_binding()


class _Agreeing:
    """An engine that does its work and then says what it is told: one row for every position.

    Target and draft that say the same accept every token: the round in which sampling has most
    to do, at the engines' own cost.
    """

    def __init__(self, engine: Engine, rows: Logits):
        self._engine, self._rows = engine, rows  # rows [K, V]
        self.slots, self.capacity = engine.slots, engine.capacity
        self.chunk, self.vocab_size = engine.chunk, engine.vocab_size
        self.buffers, self.held = engine.buffers, engine.held

    def forward(
        self,
        input_ids: Ids,
        position: Ids,
        logits_index: Ids,
        first_slot: int = 0,
        buffer: int = 0,
    ) -> Logits:
        self._engine.forward(input_ids, position, logits_index, first_slot, buffer)
        return self._rows[None, buffer : buffer + len(logits_index)]

    def clear(self, slot: int) -> None:
        self._engine.clear(slot)


@contextmanager
def agreeing(engine: TextEngine) -> Iterator[None]:
    """Every draft token is accepted while the block runs."""
    rounds = engine.decoder.rounds
    assert isinstance(rounds, HostRounds)
    target, draft = rounds.target, rounds.draft
    assert draft is not None
    row = np.random.default_rng(0).standard_normal(engine.decoder.vocab_size, np.float32)
    rows = np.tile(row, (engine.decoder.max_gamma + 1, 1))
    rounds.target, rounds.proposer.sources.engine = _Agreeing(target, rows), _Agreeing(draft, rows)
    try:
        yield
    finally:
        rounds.target, rounds.proposer.sources.engine = target, draft


def measure(
    engine: TextEngine, prompt: list[int], temperature: float, *, rounds: int, patience: float
) -> Share:
    """Medians of at least `rounds` rounds, undisturbed ones while `patience` (seconds) lasts.

    All that a caller waits for counts: detokenization and events too.
    """
    models = [engine.decoder.target, engine.decoder.draft]
    inner: list[Any] = [getattr(model, "_engine", model) for model in models]
    sessions = [model._session for model in inner]
    clocks = [_Clock(session) for session in sessions]
    taken: list[_Round] = []
    begin, seed = time.perf_counter(), 0
    try:
        for model, clock in zip(inner, clocks, strict=True):
            model._session = clock
        for _ in _rounds(engine, prompt, temperature, clocks, seed, rounds):
            pass  # binds buffers, warms caches
        while len(taken) < rounds or (
            time.perf_counter() - begin < patience
            and not enough([[r.sample for r in taken]], rounds)
        ):
            seed += 1
            taken += _rounds(engine, prompt, temperature, clocks, seed, rounds)
    finally:
        for model, session in zip(inner, sessions, strict=True):
            model._session = session
    quiet = [r for r in taken if r.sample.lost <= DISTURBED]
    used = quiet
    if len(quiet) < ENOUGH:
        used = sorted(taken, key=lambda r: r.sample.lost)[:ENOUGH]

    def median_ms(values: Iterable[float]) -> float:
        return 1e3 * statistics.median(values)

    return Share(
        round_ms=median_ms(r.sample.seconds for r in used),
        sample_ms=median_ms(r.sampling for r in used),
        host_ms=median_ms(r.sample.seconds - r.engines - r.sampling for r in used),
        tau=statistics.mean(r.tokens for r in taken),
        kept=len(quiet),
        taken=len(taken),
    )


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds of one round as a caller sees it, inside the engines, in sampling; its tokens."""

    sample: Sample
    engines: float
    sampling: float
    tokens: int


def _rounds(
    engine: TextEngine,
    prompt: list[int],
    temperature: float,
    clocks: list[_Clock],
    seed: int,
    count: int,
) -> Iterator[_Round]:
    """The rounds of one text, except the first, in which the draft reads the prompt."""
    sequence: list[ActiveSequence] = []
    decoder = engine.decoder
    admit = decoder.admit

    def noting(request: Request) -> ActiveSequence:
        sequence.append(admit(request))
        return sequence[-1]

    decoder.admit = noting  # type: ignore[method-assign]
    try:
        events = engine.stream(
            prompt,
            max_new_tokens=(count + 2) * (GAMMA + 1),  # enough for all of them to draft in full
            gamma=GAMMA,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
        )
        next(events)  # the prefill and its token
        next(events)
    finally:
        decoder.admit = admit  # type: ignore[method-assign]
    stats = sequence[0].stats
    for _ in range(count):
        in_engines, sampling = sum(clock.seconds for clock in clocks), stats.time_sample
        tokens = stats.round_tokens
        taken = sample(lambda: next(events))
        yield _Round(
            taken,
            sum(clock.seconds for clock in clocks) - in_engines,
            stats.time_sample - sampling,
            stats.round_tokens - tokens,
        )
