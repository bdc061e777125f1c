"""The bundle's draft model: one call a step for all sequences that want it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..backends.engine import Logits
from ..calls import idle_positions, readable
from ..sequence import ActiveSequence
from .draft import Draft


class ModelDraft(Draft):
    """Rows come from the engine's buffers, of all slots at once: see `step`."""

    help = "the bundle's draft model"
    needs = ("engine",)
    reads_model = True
    usual_gamma = 4

    def step(
        self,
        drafting: Sequence[ActiveSequence],
        ahead: Mapping[ActiveSequence, int],
        tokens: Mapping[ActiveSequence, list[int]],
        step: int,
        first: int,
        last: int,
    ) -> Logits:
        """Logits [S, V] of this step, of the slots first .. last - 1, in the step's own buffer.

        ahead: sequences that this round's drafts have rows of already, and how many.
        """
        engine, slots = self.sources.engine, self.sources.slots
        assert engine is not None
        # Two tokens first: after a fully accepted round the draft lacks a row (Slot.commit).
        width = 1 if step else 2
        ids = np.zeros((last - first, width), np.int64)
        position = idle_positions(slots, engine, first, last, "draft_len", width)
        for sequence, count in ahead.items():
            position[sequence.slot.index - first] = len(sequence.slot.tokens) - 1 + count
        for sequence in drafting:
            text, drafts = sequence.slot.tokens, tokens[sequence]
            row, length = sequence.slot.index - first, len(text)
            # Past its own gamma a sequence repeats its last draft: the row is never committed.
            ids[row] = readable(engine, drafts[-1:] if step else text[-2:])
            position[row] = length - 1 + len(drafts) if step else length - 2
        index = np.array([width - 1])
        return engine.forward(ids, position, index, first_slot=first, buffer=step)[:, 0]
