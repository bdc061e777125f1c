"""The bundle's draft model: one call per step for all sequences that use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..backends.engine import Logits
from ..calls import forward_slots, replace_unknown_ids
from ..sequence import ActiveSequence
from .draft import Draft


class ModelDraft(Draft):
    """Its rows come from the engine's buffers, for all slots at once: see `step`."""

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
        """Logits [S, V] of this step for the slots first .. last - 1, in the step's own buffer.

        ahead: sequences whose drafts of this round are already in the cache, and how many.
        """
        engine, lengths = self.sources.engine, self.sources.slots.draft_lengths
        assert engine is not None
        inputs: dict[ActiveSequence, tuple[int, Sequence[int]]] = {
            sequence: (len(sequence.slot.tokens) - 1 + count, [])
            for sequence, count in ahead.items()
        }
        for sequence in drafting:
            text, drafts = sequence.slot.tokens, tokens[sequence]
            # The first step reads two tokens: after a fully accepted round the draft lacks a row
            # (Slot.commit). Past its own gamma a sequence repeats its last draft, whose row is
            # never committed.
            inputs[sequence] = (
                (len(text) - 1 + len(drafts), replace_unknown_ids(engine, drafts[-1:]))
                if step
                else (len(text) - 2, replace_unknown_ids(engine, text[-2:]))
            )
        logits_from = 0 if step else 1
        return forward_slots(engine, lengths, (first, last), inputs, logits_from, buffer=step)[:, 0]
