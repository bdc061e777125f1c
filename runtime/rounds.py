"""A round as the decoder asks for it, and the one that the host drives, call by call.

`device_rounds.DeviceRounds` is the one that a GPU runs by itself. Both give the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .engine import Engine, Ids, Logits
from .lookup import Lookup
from .request import DraftKind, Running
from .sampler import Place, Sampler
from .sampling import Verdict
from .slots import SlotTable


@dataclass(frozen=True, slots=True)
class Turn:
    """One sequence's part of a round.

    gamma: draft tokens that are wanted. limit: how many can still become text or fit a context.
    left: tokens that the text can still have.
    """

    running: Running
    gamma: int
    limit: int
    left: int


@dataclass(frozen=True, slots=True)
class Part:
    """What a round made of one sequence. rows: the target's raw logits [K, V], K > len(drafts);
    valid until the next round."""

    drafts: list[int]
    verdict: Verdict
    rows: Callable[[], Logits]


@dataclass(slots=True)
class Outcome:
    """One part for each turn, and seconds: in the draft's steps, in rows that it lacked before
    them, in the target, in draws and verification. A GPU's draws count as drafting, and its
    verification as the target's."""

    parts: list[Part] = field(default_factory=list)
    time_draft: float = 0.0
    time_draft_prefill: float = 0.0
    time_verify: float = 0.0
    time_sample: float = 0.0


class Rounds(Protocol):
    """Two engines, their slots, and the sampling between them; one thread at a time."""

    @property
    def target(self) -> Engine: ...

    @property
    def draft(self) -> Engine | None: ...

    @property
    def slots(self) -> SlotTable: ...

    @property
    def kinds(self) -> frozenset[DraftKind]:
        """Who can propose here."""
        ...

    def start(self, running: Running) -> Part:
        """Prefill the target with the prompt and draw the first token. Raises "numeric"."""
        ...

    def run(self, turns: Sequence[Turn]) -> Outcome:
        """One round: draft, verify, accept or correct or extend. Nothing is committed to the slots,
        but `draft_len` where the draft was given rows that it lacked. One that was launched ahead
        keeps the gamma of its launch. Raises "numeric"; of a sequence that took part nothing can be
        said then, and it must be released."""
        ...

    def forget(self, running: Running) -> None:
        """The sequence leaves its slot."""
        ...


class HostRounds:
    """See `Rounds`. sampler: for as many slots as the engines have."""

    def __init__(self, target: Engine, draft: Engine | None, sampler: Sampler):
        self.target, self.draft, self.sampler = target, draft, sampler
        self.slots = SlotTable(target.slots)
        self.kinds: frozenset[DraftKind] = frozenset({"ngram", "model"} if draft else {"ngram"})
        self._lookups: dict[Running, Lookup] = {}

    def start(self, running: Running) -> Part:
        slot = running.slot
        begin = time.perf_counter()
        rows = self._prefill(self.target, slot.index, slot.tokens, 0)[None, None]
        running.stats.time_prefill = time.perf_counter() - begin
        self.sampler.begin([_place(running, 0)])
        (verdict,) = self.sampler.verify(rows, first_slot=slot.index)
        return Part([], verdict, lambda: rows[0])

    def forget(self, running: Running) -> None:
        self._lookups.pop(running, None)

    def run(self, turns: Sequence[Turn]) -> Outcome:
        gammas = {turn.running: min(turn.gamma, turn.limit) for turn in turns}
        outcome, drafted = Outcome(), _Drafted({running: [] for running in gammas})
        self._look_up(gammas, drafted, outcome)
        self.sampler.begin([_place(running, gamma) for running, gamma in gammas.items()])
        if any(gammas[running] for running in gammas if running not in drafted.given):
            self._draft(gammas, drafted, outcome)
        elif drafted.given:
            self.sampler.give(list(drafted.tokens.values()))
        begin = time.perf_counter()
        first, logits = self._verify(gammas, drafted.tokens)
        after_verify = time.perf_counter()
        verdicts = self.sampler.verify(logits, drafted.logits or None, first_slot=first)
        for running, verdict in zip(gammas, verdicts, strict=True):
            rows = logits[running.slot.index - first]
            outcome.parts.append(Part(drafted.tokens[running], verdict, lambda rows=rows: rows))  # type: ignore[misc]
        outcome.time_verify = after_verify - begin
        outcome.time_sample += time.perf_counter() - after_verify
        return outcome

    def _prefill(self, engine: Engine, slot: int, tokens: Sequence[int], start: int) -> Logits:
        """Compute rows start.. of `tokens` in chunks; the logits [V] after the last one."""
        for begin in range(start, len(tokens), engine.chunk):
            ids = self._ids(engine, tokens[begin : begin + engine.chunk])[None]
            last = np.array([ids.shape[1] - 1])
            logits = engine.forward(ids, np.array([begin]), last, first_slot=slot)
        row: Logits = logits[0, 0]
        return row

    def _look_up(self, gammas: dict[Running, int], drafted: _Drafted, outcome: Outcome) -> None:
        """Propose for the requests that want no model; their gamma becomes what was found."""
        begin = time.perf_counter()
        wanted = [running for running in gammas if running.request.draft == "ngram"]
        # Beside a model's drafts a lookup takes part in its steps, and has no others.
        others = [gamma for running, gamma in gammas.items() if running not in wanted]
        most = max(others, default=0) or max(gammas.values(), default=0)
        for running in wanted:
            lookup = self._lookups.setdefault(running, Lookup())
            lookup.read(running.slot.tokens)
            found = lookup.propose(min(gammas[running], most)) if gammas[running] else []
            found = found[: _first_forbidden(running, found, self.sampler.vocab_size)]
            gammas[running], drafted.tokens[running] = len(found), found
            drafted.given.add(running)
        if wanted:
            outcome.time_draft += time.perf_counter() - begin

    def _draft(self, gammas: dict[Running, int], drafted: _Drafted, outcome: Outcome) -> None:
        """Draw x1..x(gamma) of each sequence from q, one engine call a step for all of them."""
        taking_part = [running for running, gamma in gammas.items() if gamma]
        drafting = [running for running in taking_part if running not in drafted.given]
        engine = self.draft
        assert engine is not None
        for running in drafting:
            self._catch_up(engine, running, outcome)
        first, last = _span(taking_part)
        for step in range(max(gammas.values())):
            begin = time.perf_counter()
            # Two tokens first: after a fully accepted round the draft lacks a row (Slot.commit).
            width = 1 if step else 2
            ids = np.zeros((last - first, width), np.int64)
            position = self._idle_positions(first, last, "draft_len")
            for running in drafting:
                tokens, drafts = running.slot.tokens, drafted.tokens[running]
                row, length = running.slot.index - first, len(tokens)
                # Past its own gamma a sequence repeats its last draft: the row is never committed.
                ids[row] = self._ids(engine, drafts[-1:] if step else tokens[-2:])
                position[row] = length - 1 + len(drafts) if step else length - 2
            index = np.array([width - 1])
            logits = engine.forward(ids, position, index, first_slot=first, buffer=step)[:, 0]
            for running in drafted.given:  # what was looked up is what will be drawn
                if step < gammas[running]:
                    row = logits[running.slot.index - first]
                    row[:] = -np.inf
                    row[drafted.tokens[running][step]] = 0
            after = time.perf_counter()
            drafted.logits.append(logits)
            drawn = self.sampler.draw(logits, step, keep=False, first_slot=first).tolist()
            for (running, gamma), token in zip(gammas.items(), drawn, strict=True):
                if step < gamma and running not in drafted.given:
                    drafted.tokens[running].append(token)
            outcome.time_draft += after - begin
            outcome.time_sample += time.perf_counter() - after

    def _catch_up(self, engine: Engine, running: Running, outcome: Outcome) -> None:
        """Give the draft the rows it lacks: the prompt at first, plain rounds later."""
        slot = running.slot
        need = len(slot.tokens) - 2  # the first draft step feeds the last two itself
        if slot.draft_len < need:
            begin = time.perf_counter()
            self._prefill(engine, slot.index, slot.tokens[:need], slot.draft_len)
            slot.draft_len = need
            outcome.time_draft_prefill += time.perf_counter() - begin

    def _verify(
        self, gammas: dict[Running, int], drafts: dict[Running, list[int]]
    ) -> tuple[int, Logits]:
        """One target call over [pending, x1..x(gamma)]: logits [B, gamma+1, V] of slots first.."""
        first, last = _span(gammas)
        width = max(gammas.values()) + 1
        ids = np.zeros((last - first, width), np.int64)
        position = self._idle_positions(first, last, "target_len")
        for running in gammas:
            row = running.slot.index - first
            feed = [running.slot.pending, *drafts[running]]
            ids[row, : len(feed)] = feed
            position[row] = running.slot.target_len
        return first, self.target.forward(ids, position, np.arange(width), first_slot=first)

    def _idle_positions(self, first: int, last: int, length: str) -> Ids:
        """Where slots that sit out a call may be written: beyond their valid rows."""
        slots = (self.slots[index] for index in range(first, last))
        return np.array([getattr(slot, length) if slot else 0 for slot in slots], np.int64)

    def _ids(self, engine: Engine, tokens: Sequence[int]) -> Ids:
        """Ids that the engine can look up: a narrower draft reads the target's extra tokens as 0.

        That costs acceptance, never exactness: q is what the draft said, whatever it was fed.
        """
        ids = np.array(tokens, np.int64)
        ids[ids >= engine.vocab_size] = 0
        return ids


@dataclass(slots=True)
class _Drafted:
    """What a round drafted: tokens of each sequence; logits [S, V] of each step, in the engine's
    buffers. given: whose tokens come from no model."""

    tokens: dict[Running, list[int]]
    logits: list[Logits] = field(default_factory=list)
    given: set[Running] = field(default_factory=set)


def _early(running: Running) -> int:
    """How many of the next tokens may not end the text."""
    return max(0, running.request.min_new_tokens - len(running.output))


def _first_forbidden(running: Running, tokens: Sequence[int], vocab_size: int) -> int:
    """Where the first token stands that the sampling cannot give; how many there are if none."""
    early, ends = _early(running), running.request.eos_token_ids
    for i, token in enumerate(tokens):
        if token >= vocab_size or (i < early and token in ends):
            return i
    return len(tokens)


def _place(running: Running, gamma: int) -> Place:
    request, tokens = running.request, running.slot.tokens
    early = _early(running)
    penalised = request.params.repetition_penalty != 1
    return Place(
        request.params,
        gamma,
        position=len(tokens),
        index=running.slot.index,
        context=np.array(tokens, np.int64) if penalised else None,
        suppress=np.array(sorted(request.eos_token_ids), np.int64) if early else None,
        suppress_rows=min(early, gamma + 1),
        name=f"slot {running.slot.index}",
    )


def _span(batch: Iterable[Running]) -> tuple[int, int]:
    """The run of consecutive slots [first, last) that holds all of these sequences."""
    indices = [running.slot.index for running in batch]
    return min(indices), max(indices) + 1
