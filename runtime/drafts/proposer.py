"""The draft tokens of a round on the host, from the draft that each request uses.

Sequences with different kinds of draft share a round: those whose drafts know all tokens at once
get them first, the others draw theirs step by step, with one call of the draft model per step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import index

import numpy as np

from ..backends.engine import Logits
from ..calls import copy_prefix, first_forbidden, prefill, slot_range, slot_sampling
from ..files.errors import attribute_errors_to
from ..sampling.sampler import Sampler
from ..sampling.softmax import confidence
from ..sequence import ActiveSequence
from .draft import Draft, Sources, apply_draft_temperature, temperature_factor
from .model import ModelDraft
from .registry import KINDS

Gammas = dict[ActiveSequence, int]


@dataclass(slots=True)
class Drafted:
    """A round's drafts: their number and the tokens, by sequence; for each step the logits [S, V]
    that they were drawn from, empty if all are point masses."""

    gammas: Gammas
    tokens: dict[ActiveSequence, list[int]]
    logits: list[Logits] = field(default_factory=list)


class Proposer:
    """Proposes the draft tokens of rounds. `propose` begins the sampler's round.

    sources: what drafts can use. sampler: of the target's rounds.
    """

    def __init__(self, sources: Sources, sampler: Sampler):
        self.sources, self._sampler = sources, sampler
        self._drafts: dict[str, Draft] = {}  # those requested so far
        self._rows: Logits = np.empty((0, 0, 0), np.float32)  # see `_buffer`

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of draft that a request may use."""
        return frozenset(name for name, kind in KINDS.items() if kind.is_available(self.sources))

    def forget(self, sequence: ActiveSequence) -> None:
        if draft := self._drafts.get(sequence.request.draft):
            with self._attribute_errors(sequence):
                draft.forget(sequence)

    def sequences_behind(self, gammas: Gammas) -> list[ActiveSequence]:
        """The sequences whose source, or some of whose text, the draft model has yet to read."""
        return [
            sequence
            for sequence, gamma in gammas.items()
            if gamma
            and self._draft_of(sequence).reads_model
            and (sequence.slot.draft_unread or not self._has_source(sequence))
        ]

    def _has_source(self, sequence: ActiveSequence) -> bool:
        source, engine = sequence.request.source, self.sources.engine
        return engine is None or engine.cached_rows.has_source(sequence.slot.index, source)

    def catch_up(self, sequence: ActiveSequence, *, one_chunk: bool = False) -> None:
        """Let the draft model read what it lacks: source and prompt at first, later the tokens of
        plain rounds. one_chunk: not all of it, at most a chunk."""
        slot, engine = sequence.slot, self.sources.engine
        assert engine is not None
        engine.encode(slot.index, sequence.request.source)
        if slot.draft_unread:
            need = slot.draft_len + slot.draft_unread
            # An interrupted read may have overwritten the rows that this one would start from.
            start = engine.cached_rows.resume_position(slot.index, slot.draft_len)
            slot.draft_len = start  # in case that this read is interrupted too
            tokens = slot.tokens[:need]
            if self.sources.slots.copies:
                start = copy_prefix(engine, slot.index, tokens, start, sequence.request.source)
            end = min(need, start + engine.chunk) if one_chunk else need
            if start < end:
                prefill(engine, slot.index, tokens[:end], start)
            slot.draft_len = end

    def propose(self, gammas: Gammas) -> Drafted:
        """Draft for these sequences, at most gamma tokens each."""
        drafted = Drafted(dict(gammas), {sequence: [] for sequence in gammas})
        self._propose_at_once(drafted)
        gammas = drafted.gammas
        drafts = {sequence: self._draft_of(sequence) for sequence, gamma in gammas.items() if gamma}
        self._sampler.begin([slot_sampling(sequence, gamma) for sequence, gamma in gammas.items()])
        with_rows = [draft for draft in drafts.values() if not draft.point_masses]
        if with_rows:
            self._draft_stepwise(drafts, drafted)
        if not with_rows or any(draft.at_once for draft in with_rows):
            self._sampler.set_drafts(list(drafted.tokens.values()), slot_range(drafts or gammas)[0])
        return drafted

    def _draft_of(self, sequence: ActiveSequence) -> Draft:
        name = sequence.request.draft
        draft = self._drafts.get(name)
        if draft is None:
            with self._attribute_errors(sequence):
                self._drafts[name] = draft = KINDS[name](self.sources)
        return draft

    def _attribute_errors(self, sequence: ActiveSequence) -> AbstractContextManager[None]:
        return attribute_errors_to(f"draft={sequence.request.draft}")

    def _propose_at_once(self, drafted: Drafted) -> None:
        """Get all tokens of the drafts that are `at_once`; gamma becomes the number of tokens."""
        requested = [(x, self._draft_of(x), gamma) for x, gamma in drafted.gammas.items() if gamma]
        by_draft: dict[Draft, Gammas] = {}
        for sequence, draft, gamma in requested:
            if draft.at_once:
                by_draft.setdefault(draft, {})[sequence] = gamma
        for draft, wanted in by_draft.items():
            with self._attribute_errors(next(iter(wanted))):
                proposed = draft.propose(wanted)
                found = {x: [*map(index, proposed.get(x, ()))] for x in wanted}
            for sequence, gamma in wanted.items():
                tokens = found[sequence][:gamma]
                tokens = tokens[: first_forbidden(sequence, tokens, self.sources.width)]
                drafted.gammas[sequence], drafted.tokens[sequence] = len(tokens), tokens

    def _draft_stepwise(self, drafts: dict[ActiveSequence, Draft], drafted: Drafted) -> None:
        """Draw x1..x(gamma) of each sequence from q; for tokens already proposed, only the rows."""
        first, last = slot_range(drafts)
        gammas, tokens = drafted.gammas, drafted.tokens
        drafting = [x for x, draft in drafts.items() if isinstance(draft, ModelDraft)]
        model = drafts[drafting[0]] if drafting else None
        ahead = {x: len(tokens[x]) for x, d in drafts.items() if d.at_once and d.reads_model}
        draws = {x for x, draft in drafts.items() if not draft.at_once}
        known = {x: d for x, d in drafts.items() if d.at_once and x.request.processors}
        # All rows of a round must be in one buffer: the engine's only if it drafts for all.
        own_rows = self._buffer(max(gammas.values())) if len(drafting) < len(drafts) else None
        step = 0
        while step < max(gammas.values()):
            if own_rows is not None:
                logits = own_rows[step, first:last]
            if isinstance(model, ModelDraft) and any(step < gammas[x] for x in drafting):
                found = model.step(drafting, ahead, tokens, step, first, last)
                if own_rows is None:
                    logits = found
                else:
                    logits[:] = found[:, : logits.shape[1]]
            drafted.logits.append(logits)
            self._fill_rows(logits, first, drafts, drafted, step)
            if draws:
                self._draw_tokens(draws, drafted, step, first)
                # The draw has processed all rows, those of known tokens after another text: after
                # the tokens that it drew in their place.
                self._fill_rows(logits, first, known, drafted, step)
            step += 1

    def _fill_rows(
        self, logits: Logits, first: int, drafts: dict[ActiveSequence, Draft], drafted: Drafted,
        step: int,
    ) -> None:  # fmt: skip
        for sequence, draft in drafts.items():
            if step < drafted.gammas[sequence]:
                row = logits[sequence.slot.index - first]
                self._fill_row(row, sequence, draft, drafted.tokens[sequence], step)

    def _fill_row(
        self, row: Logits, sequence: ActiveSequence, draft: Draft, tokens: list[int], step: int
    ) -> None:
        """Fill a row [V] with the logits that this sequence's token of the step is drawn from."""
        if draft.point_masses:  # makes the draw give the guessed token
            row[:] = -np.inf
            row[tokens[step]] = 0
            return
        if not isinstance(draft, ModelDraft):
            width = self.sources.width
            with self._attribute_errors(sequence):
                row[:width] = draft.row(sequence, tokens[:step])[:width]
        if not draft.at_once:
            apply_draft_temperature(row, sequence)

    def _draw_tokens(
        self, draws: set[ActiveSequence], drafted: Drafted, step: int, first: int
    ) -> None:
        """Draw a token for each sequence in `draws`; stop the drafting of a sequence after a token
        below its draft threshold."""
        gammas, logits = drafted.gammas, drafted.logits[step]
        drawn = self._sampler.draw(logits, step, first_slot=first).tolist()
        for b, (sequence, token) in enumerate(zip(gammas, drawn, strict=True)):
            if step >= gammas[sequence] or sequence not in draws:
                continue
            drafted.tokens[sequence].append(token)
            threshold = sequence.request.draft_threshold
            if threshold and step + 1 < gammas[sequence]:
                row = logits[sequence.slot.index - first, : self.sources.width]
                if confidence(row, token, temperature_factor(sequence)) < threshold:
                    gammas[sequence] = step + 1
                    self._sampler.reduce_gamma(b, step + 1)

    def _buffer(self, gamma: int) -> Logits:
        """A buffer [gamma or more, S, V] for rows that are not in an engine's buffer."""
        if len(self._rows) < gamma:
            shape = gamma, len(self.sources.slots), self.sources.width
            self._rows = np.zeros(shape, np.float32)
        return self._rows
