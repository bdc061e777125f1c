"""The interface that a round uses to run a model, whatever the backend."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..files.graphs import SCALE_BYTES, GraphFacts, StateFacts

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


def cache_shapes(facts: GraphFacts) -> dict[str, tuple[int, int]]:
    """Hkv and D of each cache, in the contract's order; D includes the scale of a quantised row."""
    scale = SCALE_BYTES if facts.cache else 0
    shapes = _by_layer(key=facts.key_shapes, value=facts.value_shapes)
    return {name: (heads, width + scale) for name, (heads, width) in shapes.items()}


def state_shapes(facts: GraphFacts) -> dict[str, tuple[int, int]]:
    """H and D of the recurrent layers' states, in the contract's order; empty without any."""
    return _by_layer(state=facts.states.shapes) if facts.states else {}


def source_shapes(facts: GraphFacts) -> dict[str, tuple[int, int]]:
    """H and D of what an encoder stores in a slot, in the contract's order; empty without one."""
    encoder = facts.encoder
    return (
        _by_layer(cross_key=encoder.key_shapes, cross_value=encoder.value_shapes) if encoder else {}
    )


def _by_layer(**sides: list[list[int]]) -> dict[str, tuple[int, int]]:
    return {
        f"{side}_{layer}": (heads, width)
        for side, shapes in sides.items()
        for layer, (heads, width) in enumerate(shapes)
    }


class Features:
    """A source that is not text: read-only float32 [bands, frames]. Two with the same numbers are
    equal."""

    def __init__(self, array: npt.ArrayLike):
        self.array = np.array(array, np.float32, order="C")
        self.array.flags.writeable = False
        shape = str(self.array.shape).encode()
        self._digest = hashlib.blake2b(self.array.tobytes(), key=shape).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


Source = Sequence[int] | Features  # what an encoder reads; no ids if the model has none


def source_ids(source: Source) -> Sequence[int]:
    """The source's tokens; empty for `Features`."""
    return () if isinstance(source, Features) else source


class CachedRows:
    """What an engine's cache rows were computed from: a record of its calls, slot by slot.

    Row i of a slot depends on tokens 0 .. i and, with an encoder, on the slot's source. So a text
    with that source that begins with the same tokens can reuse its rows. A call overwrites rows,
    after which those behind them belong to no text. vocab_size: of the engine; ids beyond it are
    read as 0 (`calls.replace_unknown_ids`). states: of recurrent layers, whose rows are a ring: a
    text can be continued only while the rows that a call reads are still there.
    """

    def __init__(self, slots: int, vocab_size: int, states: StateFacts | None = None):
        self.states, self._min_resume = states, [0] * slots
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._sources: list[tuple[int, ...] | Features] = [()] * slots
        self._vocab_size = vocab_size

    def has_source(self, slot: int, source: Source) -> bool:
        return self._sources[slot] == _hashable(source)

    def slot_with(self, source: Source) -> int | None:
        """A slot that has this source; None if there is none."""
        key = _hashable(source)
        return self._sources.index(key) if key in self._sources else None

    def set_source(self, slot: int, source: Source) -> None:
        """Record that the slot has another source."""
        self._sources[slot] = _hashable(source)
        self.truncate(slot, 0)

    def length(self, slot: int) -> int:
        return len(self._tokens[slot])

    def common_prefix(self, slot: int, text: Sequence[int], source: Source = ()) -> int:
        """How many leading tokens the slot's rows have in common with this text of this source."""
        if not self.has_source(slot, source):
            return 0
        tokens, vocab_size = self._tokens[slot], self._vocab_size
        pairs = enumerate(zip(tokens, text, strict=False))
        differences = (i for i, (a, b) in pairs if a != (b if b < vocab_size else 0))
        return next(differences, min(len(tokens), len(text)))

    def resume_position(self, slot: int, length: int) -> int:
        """Where to continue a text whose first `length` rows the slot holds: at `length`, or at 0
        if the state needed there is lost."""
        return length if length >= self._min_resume[slot] else 0

    def truncate(self, slot: int, length: int) -> None:
        """Record that the rows from `length` on are invalid."""
        del self._tokens[slot][length:]

    def begin_call(self, slot: int, start: int, width: int) -> None:
        """Record that a call of `width` tokens begins. If it fails, its rows are invalid."""
        self.truncate(slot, start)
        if self.states:
            lost = start + width - self.states.rows + self.states.reach
            self._min_resume[slot] = max(self._min_resume[slot] if start else 0, lost)

    def end_call(self, first_slot: int, input_ids: Ids, position: Ids) -> None:
        """Record a call with the arguments of `Engine.forward`. Rows behind a gap belong to no
        text."""
        for slot, (ids, start) in enumerate(
            zip(input_ids.tolist(), position.tolist(), strict=True), first_slot
        ):
            tokens = self._tokens[slot]
            del tokens[start:]
            if len(tokens) == start:
                tokens += ids

    def copy_rows(self, source: int, destination: int, length: int) -> None:
        """Record that the first rows of one slot were copied to another with the same source."""
        self._tokens[destination] = self._tokens[source][:length]


def _hashable(source: Source) -> tuple[int, ...] | Features:
    return source if isinstance(source, Features) else tuple(source)


class Engine(Protocol):
    """One model with its cache slots.

    The caller, not the engine, keeps the length of a slot: a call overwrites or masks the rows at
    or beyond its position, so rolling back means calling with a lower position.

    slots: how many sequences it holds. capacity: rows S of each. chunk: the largest N of a call.
    min_width: the least N of a call that decides tokens; a narrower one may round differently.
    vocab_size: V of the logits. cached_rows: a record of the rows; empty if the engine keeps none.
    """

    slots: int
    capacity: int
    chunk: int
    min_width: int
    vocab_size: int
    cached_rows: CachedRows

    def forward(
        self, input_ids: Ids, position: Ids, logits_index: Ids, first_slot: int = 0, buffer: int = 0
    ) -> Logits:
        """Run N consecutive tokens for each of the B slots that start at `first_slot`.

        input_ids: int64 [B, N]. position: int64 [B], the row of each slot's first token; the caller
        ensures position + N <= capacity. logits_index: int64 [K], which of the N tokens get logits.
        buffer: number of the buffer for the logits. Returns float32 [B, K, V], a view of that
        buffer, valid until the next call with it.
        """

    def encode(self, slot: int, source: Source) -> None:
        """Give the slot a source, which is empty unless the model has an encoder. Unless the slot
        has that source already, this runs the encoder and invalidates all rows. The caller ensures
        a legal length or shape; ids beyond the vocabulary are read as 0."""

    def clear(self, slot: int) -> None:
        """Zero a slot whose rows may hold NaN: masked rows are multiplied too, and 0 times NaN is
        NaN."""
