"""The slots of an engine as a cache of continuations of one prompt. Nothing here knows of beams."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..backends.engine import Engine, Ids, Logits, Source
from ..calls import pad_to_narrowest, replace_unknown_ids
from ..files.errors import OutriderError

Tokens = tuple[int, ...]  # generated tokens, without the prompt
UNKNOWN = -1


@dataclass(slots=True)
class PoolStats:
    """calls: of the engine. rows: cache rows that they computed, including padding. copied: rows
    copied from slot to slot. seconds: total time of all that."""

    calls: int = 0
    rows: int = 0
    copied: int = 0
    seconds: float = 0.0


class Pool:
    """Tracks which tokens' rows each slot holds, and computes the missing ones.

    Slots never share rows: if several sequences continue what one slot holds, the first of them
    stays in that slot, and rows [0, common prefix) are copied for the others. The prefix of all
    sequences is computed once, in one slot, before it is copied; so a prompt is prefilled once.

    prompt: at least one id. name: the model's, for errors. A model with a smaller vocabulary reads
    ids that it lacks as 0. source: what an encoder reads. Raises OutriderError("option") for
    engines that cannot copy rows or return to any row.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        stats: PoolStats,
        name: str,
        source: Source = (),
    ):
        if not hasattr(engine, "copy_rows"):  # `HostEngine`s have it
            raise OutriderError(
                "option",
                "beam search runs on the CPU only in this version",
                "Use device=cpu with a bundle for the CPU, or leave beams out.",
            )
        if engine.cached_rows.states is not None:
            raise OutriderError(
                "option",
                f"beam search is for models without a recurrent state in this version, but the "
                f"{name} has one",
                "Leave beams out.",
            )
        self.engine, self.prompt, self.stats, self.name = engine, tuple(prompt), stats, name
        self._source = source
        self._copy_rows = engine.copy_rows
        # One column more than rows, in which all sequences differ (see `_common_lengths`).
        self._slot_ids: Ids = np.full((engine.slots, engine.capacity + 1), UNKNOWN, np.int64)

    def logits(self, nodes: Iterable[Tokens]) -> dict[Tokens, Logits]:
        """Raw logits, float32 [V], after prompt + node, for each of the nodes.

        nodes: continuations of the prompt. For each, all its prefixes down to the length of the
        shortest node are nodes too, so that their logits are read on the way to the leaves.
        Raises OutriderError("numeric") if the largest logit is not finite.
        """
        start = time.perf_counter()
        ordered = sorted(set(nodes))
        first = min(map(len, ordered))
        # In this order the continuations of a sequence come right after it.
        leaves = [
            node
            for node, after in zip(ordered, [*ordered[1:], None], strict=True)
            if after is None or after[: len(node)] != node
        ]
        self._compute_common_prefix(leaves, first)
        logits_by_node: dict[Tokens, Logits] = {}
        for begin in range(0, len(leaves), self.engine.slots):
            group = leaves[begin : begin + self.engine.slots]
            for leaf, rows in zip(group, self._feed(group, first), strict=True):
                for length, row in enumerate(rows[: len(leaf) - first + 1], first):
                    logits_by_node.setdefault(leaf[:length], row)
        for node, row in logits_by_node.items():
            if not math.isfinite(row.max()):
                for slot in np.flatnonzero(self._slot_ids[:, 0] != UNKNOWN).tolist():
                    self.engine.clear(slot)  # its rows may contain what broke the logits
                raise OutriderError(
                    "numeric",
                    f"{self.name}, position {len(self.prompt) + len(node)}: the largest logit is "
                    f"{row.max()}",
                    "Build the engines with DTYPE=float32, and check that the checkpoint is intact",
                )
        self.stats.seconds += time.perf_counter() - start
        return logits_by_node

    def _compute_common_prefix(self, sequences: Sequence[Tokens], first: int) -> None:
        """Make sure that one slot holds the common prefix of all (sorted) sequences."""
        low, high = sequences[0], sequences[-1]
        length = next((i for i in range(first) if low[i] != high[i]), first)
        rows = len(self.prompt) + length
        # The row of the first logits is computed in any case.
        need = min(rows, len(self.prompt) + first - 1)
        if len(sequences) > 1 and self._common_lengths(self._with_prompt(low)[:rows]).max() < need:
            self._feed([low[:length]], length)

    def _feed(self, sequences: Sequence[Tokens], first: int) -> Logits:
        """Feed prompt + sequence to a separate slot for each sequence: in one call, or one for each
        chunk.

        At most as many sequences as slots. Returns float32 [n, longest - first + 1, V]: logits
        after sequence[:first], sequence[:first + 1]...; garbage past a sequence's end.
        """
        texts = [self._with_prompt(sequence) for sequence in sequences]
        if self._source:
            for slot in range(len(texts)):  # the slots that they will get
                self.engine.encode(slot, self._source)
        row = len(self.prompt) + first - 1  # of the first logits
        common_lengths = np.minimum([self._common_lengths(text) for text in texts], row)
        slots = self._assign_slots(common_lengths)
        # Start all slots at the same row, since K is the same for all slots of a call; rows that a
        # slot already has get the same values again. Past its end a sequence is fed 0: those rows
        # are beyond the recorded length.
        start, end = int(common_lengths.max(1).min()), max(map(len, texts))
        ids = np.zeros((len(texts), end - start), np.int64)
        for slot, text in zip(slots, texts, strict=True):
            ids[slot, : len(text) - start] = text[start:]
            self._slot_ids[slot] = UNKNOWN
            self._slot_ids[slot, : len(text)] = text
        parts = []
        for begin in range(start, end, self.engine.chunk):
            block = ids[:, begin - start : begin - start + self.engine.chunk]
            width = block.shape[1]
            block = pad_to_narrowest(self.engine, block)
            index = np.arange(min(max(0, row - begin), width - 1), width)
            position = np.full(len(texts), begin, np.int64)
            logits = self.engine.forward(block, position, index)
            if begin + width > row:
                parts.append(logits.copy())
            self.stats.calls += 1
            self.stats.rows += block.size
        return np.concatenate(parts, axis=1)[slots]

    def _assign_slots(self, common_lengths: npt.NDArray[np.intp]) -> list[int]:
        """A slot for each of n sequences, with as many rows of the sequence as any slot held.

        common_lengths: [n, slots], how many rows of each sequence each slot holds. The sequences
        get the first n slots, so that a call has no idle ones. No row that is still to be copied
        is overwritten: a slot that holds the most rows of a sequence was assigned to a sequence
        before, or comes after the first n.
        """
        count = len(common_lengths)
        slots = [UNKNOWN] * count
        for i, rows in enumerate(common_lengths):
            longest = np.flatnonzero(rows[:count] == rows.max()).tolist()
            slots[i] = next((slot for slot in longest if slot not in slots), UNKNOWN)
        free = iter(sorted(set(range(count)) - set(slots)))
        for i, rows in enumerate(common_lengths):
            if slots[i] == UNKNOWN:
                slots[i], source, length = next(free), int(rows.argmax()), int(rows.max())
                if length:
                    self._copy_rows(source, slots[i], length)
                    self.stats.copied += length
        return slots

    def _common_lengths(self, ids: Ids) -> npt.NDArray[np.intp]:
        """How many of these ids' rows each slot holds: [slots]."""
        differs = self._slot_ids[:, : len(ids) + 1] != np.append(ids, UNKNOWN - 1)
        rows: npt.NDArray[np.intp] = differs.argmax(1)
        return rows

    def _with_prompt(self, sequence: Tokens) -> Ids:
        return np.array(replace_unknown_ids(self.engine, (*self.prompt, *sequence)))
