"""The draft tokens of a round on the host, from whom each request wants them.

"model": the draft model, one call a step for all who want it. "chain": the draft model too, with
lookups as its own draft: the hierarchical version of Leviathan et al. 2023 (section 5). "ngram" and
"copy": lookups, without a distribution. "unigram", "bigram", "skip", "random": tables. Whoever
proposes, q is what the tokens were drawn from, so what comes out has the target's distribution.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..backends.engine import Engine, Logits
from ..sampling.philox import Purpose, philox4x32
from ..sampling.sampler import Sampler
from ..sequence import LOOKUPS, TABLES, ActiveSequence, DraftKind
from ..slots import SlotTable
from .calls import first_forbidden, idle_positions, place, prefill, readable, span
from .lookup import Corpus, Lookup
from .tables import Tables

Gammas = dict[ActiveSequence, int]


@dataclass(slots=True)
class Drafted:
    """What a round drafted: tokens of each sequence; the logits [S, V] that they were drawn from,
    of each step; seconds as in `rounds.Outcome`."""

    tokens: dict[ActiveSequence, list[int]]
    logits: list[Logits] = field(default_factory=list)
    time_draft: float = 0.0
    time_prefill: float = 0.0
    time_sample: float = 0.0


class HostDraft:
    """Who proposes. `propose` begins the sampler's round.

    sampler: of the target's rounds. inner: of the rounds between lookups and the draft model, as
    wide as the draft's rows; None where there is no draft. kinds: what a request may ask for.
    """

    def __init__(
        self,
        engine: Engine | None,
        sampler: Sampler,
        slots: SlotTable,
        inner: Sampler | None = None,
        tables: Tables | None = None,
        corpus: Corpus | None = None,
    ):
        self.engine, self._sampler, self._slots, self._inner = engine, sampler, slots, inner
        self._corpus = corpus
        self.kinds: frozenset[DraftKind] = frozenset({*LOOKUPS, "random"})
        self.kinds |= frozenset({"model"} if engine else ())
        self.kinds |= frozenset({"chain"} if inner else ())
        self.kinds |= frozenset(TABLES if tables else ())
        wide = sampler.vocab_size
        self._width = min(wide, engine.vocab_size) if engine else wide
        # No counts, where a random draft is all that is asked of them.
        self._rows_of = tables or Tables(np.zeros(wide, np.float32), ())
        self._lookups: dict[ActiveSequence, Lookup] = {}
        self._own: Logits = np.empty((0, 0, 0), np.float32)  # rows of no engine's buffer

    def forget(self, sequence: ActiveSequence) -> None:
        self._lookups.pop(sequence, None)

    def propose(self, gammas: Gammas) -> Drafted:
        """Draft for these sequences, at most gamma tokens each; gammas become what was drafted."""
        drafted = Drafted({sequence: [] for sequence in gammas})
        begin = time.perf_counter()
        self._look_up(gammas, drafted)
        kinds = {sequence.request.draft for sequence, gamma in gammas.items() if gamma}
        if "chain" in kinds:
            self._chain(gammas, drafted)
        drafted.time_draft = time.perf_counter() - begin - drafted.time_prefill
        self._sampler.begin([place(sequence, gamma) for sequence, gamma in gammas.items()])
        if kinds - LOOKUPS:
            self._steps(gammas, drafted, draw=bool(kinds - LOOKUPS - {"chain"}))
        if "chain" in kinds or not kinds - LOOKUPS:
            self._sampler.give(list(drafted.tokens.values()), span(_taking_part(gammas))[0])
        return drafted

    # All tokens at once

    def _look_up(self, gammas: Gammas, drafted: Drafted) -> None:
        """Lookups; their gamma becomes what was found."""
        wanted = [sequence for sequence in gammas if sequence.request.draft in LOOKUPS]
        # Beside drafts by the step a lookup takes part in those steps, and has no others.
        others = [gamma for sequence, gamma in gammas.items() if sequence not in wanted]
        most = max(others, default=0) or max(gammas.values(), default=0)
        for sequence in wanted:
            found = self._found(sequence, min(gammas[sequence], most), [])
            gammas[sequence], drafted.tokens[sequence] = len(found), found

    def _found(self, sequence: ActiveSequence, count: int, drafts: list[int]) -> list[int]:
        """What a lookup says after the text and these drafts."""
        lookup = self._lookups.get(sequence)
        if lookup is None:
            self._lookups[sequence] = lookup = Lookup(corpus=self._corpus)
        request, text = sequence.request, sequence.slot.tokens
        known = request.prompt if request.draft == "copy" else text
        lookup.read(known)
        found = lookup.propose(count, [*text[len(known) :], *drafts]) if count > 0 else []
        return found[: first_forbidden(sequence, found, self._width, len(drafts))]

    def _chain(self, gammas: Gammas, drafted: Drafted) -> None:
        """Tokens of the draft model by speculative decoding of its own.

        The rounds within have a stream of random numbers of their own, another for each round: what
        they looked at beyond the target's first rejection is not looked at again.
        """
        engine, inner = self.engine, self._inner
        assert engine is not None and inner is not None
        chained = [r for r, gamma in gammas.items() if gamma and r.request.draft == "chain"]
        seeds = {sequence: _seed(sequence) for sequence in chained}
        own = self._buffer(max(gammas.values()))
        for sequence in chained:
            self._catch_up(engine, sequence, drafted)
        while active := [r for r in chained if len(drafted.tokens[r]) < gammas[r]]:
            guesses = [
                self._found(r, gammas[r] - len(drafted.tokens[r]) - 1, drafted.tokens[r])
                for r in active
            ]
            first, last = span(active)
            width = 2 + max(map(len, guesses))  # two known tokens, as in a first step
            ids = np.zeros((last - first, width), np.int64)
            position = idle_positions(self._slots, first, last, "draft_len")
            for sequence, guess in zip(active, guesses, strict=True):
                row, text = sequence.slot.index - first, sequence.slot.tokens
                known = [*text[-2:], *drafted.tokens[sequence]]
                ids[row, : 2 + len(guess)] = readable(engine, [*known[-2:], *guess])
                position[row] = len(text) + len(known) - 4
            logits = engine.forward(ids, position, np.arange(1, width), first_slot=first)
            for sequence in active:
                _temper(logits[sequence.slot.index - first], sequence)
            inner.begin([
                place(sequence, len(guess), drafted.tokens[sequence], seeds[sequence])
                for sequence, guess in zip(active, guesses, strict=True)
            ])  # fmt: skip
            inner.give(guesses)
            for sequence, guess, verdict in zip(
                active, guesses, inner.verify(logits, first_slot=first), strict=True
            ):
                tokens, slot = drafted.tokens[sequence], sequence.slot.index
                start, end = len(tokens), len(tokens) + verdict.accepted + 1
                rows = logits[slot - first, : verdict.accepted + 1, : self._width]
                own[start:end, slot] = rows
                tokens += [*guess[: verdict.accepted], verdict.token]

    # Step by step

    def _steps(self, gammas: Gammas, drafted: Drafted, *, draw: bool) -> None:
        """x1..x(gamma) of each sequence from q, one engine call a step for all who want the model.

        draw: False where all tokens are there, and only their rows are wanted.
        """
        drafting = [r for r, gamma in gammas.items() if gamma and r.request.draft == "model"]
        for sequence in drafting:
            assert self.engine is not None
            self._catch_up(self.engine, sequence, drafted)
        first, last = span(_taking_part(gammas))
        own = None if drafting else self._buffer(max(gammas.values()))
        step = 0
        while step < max(gammas.values()):
            begin = time.perf_counter()
            if own is None:
                logits = self._forward(drafting, drafted, step, first, last)
            else:
                logits = own[step, first:last]
            for sequence, gamma in gammas.items():
                if step < gamma:
                    self._fill(logits[sequence.slot.index - first], sequence, drafted, step)
            drafted.logits.append(logits)
            after = time.perf_counter()
            drafted.time_draft += after - begin
            if draw:
                self._draw(gammas, drafted, step, first)
                drafted.time_sample += time.perf_counter() - after
            step += 1

    def _forward(
        self, drafting: list[ActiveSequence], drafted: Drafted, step: int, first: int, last: int
    ) -> Logits:
        """The draft model's logits [S, V] of this step, in the step's buffer."""
        engine = self.engine
        assert engine is not None
        # Two tokens first: after a fully accepted round the draft lacks a row (Slot.commit).
        width = 1 if step else 2
        ids = np.zeros((last - first, width), np.int64)
        position = idle_positions(self._slots, first, last, "draft_len")
        for sequence, drafts in drafted.tokens.items():
            if sequence.request.draft == "chain" and drafts:  # beyond the rows that it just got
                position[sequence.slot.index - first] = len(sequence.slot.tokens) - 1 + len(drafts)
        for sequence in drafting:
            tokens, drafts = sequence.slot.tokens, drafted.tokens[sequence]
            row, length = sequence.slot.index - first, len(tokens)
            # Past its own gamma a sequence repeats its last draft: the row is never committed.
            ids[row] = readable(engine, drafts[-1:] if step else tokens[-2:])
            position[row] = length - 1 + len(drafts) if step else length - 2
        index = np.array([width - 1])
        return engine.forward(ids, position, index, first_slot=first, buffer=step)[:, 0]

    def _fill(self, row: Logits, sequence: ActiveSequence, drafted: Drafted, step: int) -> None:
        """Make a row [V] what this sequence's token of the step is drawn from."""
        kind, drafts = sequence.request.draft, drafted.tokens[sequence]
        if kind in LOOKUPS:  # what was looked up is what will be drawn
            row[:] = -np.inf
            row[drafts[step]] = 0
        elif kind == "chain":
            row[: self._width] = self._own[step, sequence.slot.index]
            row[self._width :] = -np.inf
        else:
            if kind != "model":
                text = sequence.slot.tokens
                row[: self._width] = self._rows_of.row(kind, text, drafts)[: self._width]
            _temper(row, sequence)

    def _draw(self, gammas: Gammas, drafted: Drafted, step: int, first: int) -> None:
        logits = drafted.logits[step]
        drawn = self._sampler.draw(logits, step, keep=False, first_slot=first).tolist()
        for b, (sequence, token) in enumerate(zip(gammas, drawn, strict=True)):
            request = sequence.request
            if step >= gammas[sequence] or request.draft in LOOKUPS or request.draft == "chain":
                continue
            drafted.tokens[sequence].append(token)
            if request.draft_threshold and step + 1 < gammas[sequence]:
                row = logits[sequence.slot.index - first, : self._width]
                if _confidence(row, sequence, token) < request.draft_threshold:
                    gammas[sequence] = step + 1
                    self._sampler.stop(b, step + 1)

    def _catch_up(self, engine: Engine, sequence: ActiveSequence, drafted: Drafted) -> None:
        """Give the draft the rows it lacks: the prompt at first, plain rounds later."""
        slot = sequence.slot
        need = len(slot.tokens) - 2  # the first draft step feeds the last two itself
        if slot.draft_len < need:
            begin = time.perf_counter()
            prefill(engine, slot.index, slot.tokens[:need], slot.draft_len)
            slot.draft_len = need
            drafted.time_prefill += time.perf_counter() - begin

    def _buffer(self, gamma: int) -> Logits:
        """[gamma or more, S, V] for rows that no engine's buffer holds."""
        if len(self._own) < gamma:
            self._own = np.zeros((gamma, len(self._slots), self._width), np.float32)
        return self._own


def _taking_part(gammas: Gammas) -> list[ActiveSequence]:
    return [sequence for sequence, gamma in gammas.items() if gamma] or list(gammas)


def _seed(sequence: ActiveSequence) -> int:
    """Of the rounds between lookups and draft in the round that starts here."""
    position = len(sequence.slot.tokens)
    low, high, _, _ = philox4x32(sequence.request.params.seed, (position, Purpose.CHAIN, 0, 0))
    return high << 32 | low


def _scale(sequence: ActiveSequence) -> float:
    """What logits are multiplied with so that division by the target's temperature makes it the
    draft's: filters and penalties of q then are those of p, at its own temperature."""
    request = sequence.request
    own = request.draft_temperature
    return 1.0 if own is None else request.params.temperature / own


def _temper(rows: npt.NDArray[np.float32], sequence: ActiveSequence) -> None:
    if (scale := _scale(sequence)) != 1:
        rows *= np.float32(scale)


def _confidence(row: Logits, sequence: ActiveSequence, token: int) -> float:
    """The softmax probability of a token in the draft's logits, as the draft gave them."""
    weights = np.exp((row - row.max()) / np.float32(_scale(sequence)))
    return float(weights[token] / weights.sum())
