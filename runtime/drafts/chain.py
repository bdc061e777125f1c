"""The draft model with lookups as its own draft: the hierarchical version of Leviathan et al. 2023
(section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..backends.engine import Ids, Logits
from ..calls import feed, readable, slot_sampling, span
from ..sampling.philox import Purpose, philox4x32
from ..sequence import ActiveSequence
from .draft import Draft, Sources, temper
from .lookup import NgramDraft


class ChainDraft(Draft):
    """Tokens of the draft model by speculative decoding of its own.

    The rounds within have a stream of random numbers of their own, another for each round: what
    they looked at beyond the target's first rejection is not looked at again. By the coupled rule
    they have the text's own noise, as every draft.
    """

    help = "the draft model, with ngram as its own draft"
    needs = ("engine", "inner")
    reads_model = at_once = reads_corpus = True
    usual_gamma = 4

    def __init__(self, sources: Sources):
        super().__init__(sources)
        self._lookup = NgramDraft(sources)
        self._rows: Logits = np.empty((0, 0, 0), np.float32)  # [gamma or more, slots, V]

    def forget(self, sequence: ActiveSequence) -> None:
        self._lookup.forget(sequence)

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        row: Logits = self._rows[len(drafts), sequence.slot.index]
        return row

    def propose(self, wanted: Mapping[ActiveSequence, int]) -> dict[ActiveSequence, list[int]]:
        slots, width = self.sources.slots, self.sources.width
        if len(self._rows) < (most := max(wanted.values())):
            self._rows = np.zeros((most, len(slots), width), np.float32)
        tokens: dict[ActiveSequence, list[int]] = {sequence: [] for sequence in wanted}
        seeds = {x: _seed(x) for x in wanted}
        engine = self.sources.engine
        assert engine is not None
        # Of a recurrent state there are few rows, and none for what others' guesses are wider by.
        together = len(wanted) if engine.held.states is None else 1
        while active := [x for x in wanted if len(tokens[x]) < wanted[x]][:together]:
            guesses = [
                self._lookup.possible(x, tokens[x], wanted[x] - len(tokens[x]) - 1) for x in active
            ]
            self._round(active, guesses, tokens, seeds)
        return tokens

    def _round(
        self,
        active: Sequence[ActiveSequence],
        guesses: Sequence[list[int]],
        tokens: Mapping[ActiveSequence, list[int]],
        seeds: Mapping[ActiveSequence, int | None],
    ) -> None:
        """Draft with lookups, verify with the draft model, accept or correct or extend."""
        engine, inner = self.sources.engine, self.sources.inner
        assert engine is not None and inner is not None
        within = first, last = span(active)
        # Who has enough by now sits this call out behind the rows that its drafts wrote.
        fed: dict[ActiveSequence, tuple[int, Sequence[int] | Ids]] = {
            x: (len(x.slot.tokens) - 1 + len(drafts), [])
            for x, drafts in tokens.items()
            if first <= x.slot.index < last
        }
        for sequence, guess in zip(active, guesses, strict=True):
            known = [*sequence.slot.tokens[-2:], *tokens[sequence]]  # two, as in a first step
            start = len(sequence.slot.tokens) + len(known) - 4
            fed[sequence] = start, readable(engine, [*known[-2:], *guess])
        logits = feed(engine, self.sources.slots.draft_lengths, within, fed, since=1)
        for sequence in active:
            temper(logits[sequence.slot.index - first], sequence)
        inner.begin([
            slot_sampling(sequence, len(guess), tokens[sequence], seeds[sequence])
            for sequence, guess in zip(active, guesses, strict=True)
        ])  # fmt: skip
        inner.give(guesses)
        verdicts = inner.verify(logits, first_slot=first)
        for sequence, guess, verdict in zip(active, guesses, verdicts, strict=True):
            mine, slot = tokens[sequence], sequence.slot.index
            drawn = [*guess[: verdict.accepted], verdict.token]
            rows = logits[slot - first, : len(drawn), : self.sources.width]
            self._rows[len(mine) : len(mine) + len(drawn), slot] = rows
            mine += drawn


def _seed(sequence: ActiveSequence) -> int | None:
    """Of the rounds between lookups and draft in the round that starts here; None for the text's
    own."""
    if sequence.request.params.verify == "coupled":
        return None
    position = len(sequence.slot.tokens)
    low, high, _, _ = philox4x32(sequence.request.params.seed, (position, Purpose.CHAIN, 0, 0))
    return high << 32 | low
