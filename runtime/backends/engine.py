"""What the round asks of a model, whatever backend runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..files.manifest import SCALE_BYTES, GraphFacts, StateFacts

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


def cache_shapes(facts: GraphFacts) -> dict[str, tuple[int, int]]:
    """Hkv and D of each cache, in the contract's order; D with the scale of a quantised row."""
    scale = SCALE_BYTES if facts.cache else 0
    shapes = _by_layer(key=facts.key_shapes, value=facts.value_shapes)
    return {name: (heads, width + scale) for name, (heads, width) in shapes.items()}


def state_shapes(facts: GraphFacts) -> dict[str, tuple[int, int]]:
    """H and D of what recurrent layers keep, in the contract's order; none without them."""
    return _by_layer(state=facts.states.shapes) if facts.states else {}


def source_shapes(facts: GraphFacts) -> dict[str, tuple[int, int]]:
    """H and D of what an encoder leaves in a slot, in the contract's order; none without one."""
    left = facts.encoder
    return _by_layer(cross_key=left.key_shapes, cross_value=left.value_shapes) if left else {}


def _by_layer(**sides: list[list[int]]) -> dict[str, tuple[int, int]]:
    return {
        f"{side}_{layer}": (heads, width)
        for side, shapes in sides.items()
        for layer, (heads, width) in enumerate(shapes)
    }


class Features:
    """A source that is no text: float32 [bands, frames], which nobody writes any more. Two of the
    same numbers are equal."""

    def __init__(self, array: npt.ArrayLike):
        self.array = np.array(array, np.float32, order="C")
        self.array.flags.writeable = False
        shape = str(self.array.shape).encode()
        self._digest = hashlib.blake2b(self.array.tobytes(), key=shape).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Features) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


Source = Sequence[int] | Features  # what an encoder reads; no ids where there is none


def source_ids(source: Source) -> Sequence[int]:
    """Its tokens; none of what is no text."""
    return () if isinstance(source, Features) else source


class HeldRows:
    """What an engine's rows were computed from: an account of its calls, slot by slot.

    Row i of a slot holds what token i makes of tokens 0 .. i, and of the slot's source where there
    is an encoder. So a text of that source that begins with the same tokens finds its rows there. A
    call overwrites rows, and what lies behind them is no text's any more. vocab_size: of the
    engine; ids beyond are read as 0 (`calls.readable`). states: of recurrent layers, whose rows are
    a ring: a text goes on where those that a call reads are still there.
    """

    def __init__(self, slots: int, vocab_size: int, states: StateFacts | None = None):
        self.states, self._least = states, [0] * slots
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._sources: list[tuple[int, ...] | Features] = [()] * slots
        self._vocab_size = vocab_size

    def has(self, slot: int, source: Source) -> bool:
        return self._sources[slot] == _kept(source)

    def slot_of(self, source: Source) -> int | None:
        """A slot that has this source."""
        kept = _kept(source)
        return self._sources.index(kept) if kept in self._sources else None

    def encoded(self, slot: int, source: Source) -> None:
        """The slot has another source."""
        self._sources[slot] = _kept(source)
        self.cut(slot, 0)

    def length(self, slot: int) -> int:
        return len(self._tokens[slot])

    def common(self, slot: int, text: Sequence[int], source: Source = ()) -> int:
        """How many tokens this text, of this source, and the rows begin with together."""
        if not self.has(slot, source):
            return 0
        held, wide = self._tokens[slot], self._vocab_size
        pairs = enumerate(zip(held, text, strict=False))
        alike = (i for i, (a, b) in pairs if a != (b if b < wide else 0))
        return next(alike, min(len(held), len(text)))

    def resumes(self, slot: int, length: int) -> int:
        """Where a text whose first rows these are goes on: there, or at its beginning."""
        return length if length >= self._least[slot] else 0

    def cut(self, slot: int, length: int) -> None:
        """The rows from `length` on hold nothing of use."""
        del self._tokens[slot][length:]

    def overwrites(self, slot: int, start: int, width: int) -> None:
        """A call begins, of so many tokens; one that fails leaves nothing of use there."""
        self.cut(slot, start)
        if self.states:
            lost = start + width - self.states.rows + self.states.reach
            self._least[slot] = max(self._least[slot] if start else 0, lost)

    def wrote(self, first_slot: int, input_ids: Ids, position: Ids) -> None:
        """A call as `Engine.forward` has it. Rows behind a gap are those of no text."""
        for slot, (ids, start) in enumerate(
            zip(input_ids.tolist(), position.tolist(), strict=True), first_slot
        ):
            held = self._tokens[slot]
            del held[start:]
            if len(held) == start:
                held += ids

    def copied(self, source: int, destination: int, length: int) -> None:
        """The first rows of one slot became another's. Both are of one source."""
        self._tokens[destination] = self._tokens[source][:length]


def _kept(source: Source) -> tuple[int, ...] | Features:
    return source if isinstance(source, Features) else tuple(source)


class Engine(Protocol):
    """One model with its cache slots.

    A slot's length is the caller's integer, not the engine's: rows at or beyond the position of a
    call are overwritten by it or masked in it, so rolling back is calling with a lower position.

    slots: how many sequences it holds. capacity: rows S of each. chunk: the largest N of a call.
    narrowest: the least N of a call that gives a text's tokens; a narrower one may round otherwise.
    vocab_size: V of the logits. held: an account of the rows; empty where the engine keeps none.
    """

    slots: int
    capacity: int
    chunk: int
    narrowest: int
    vocab_size: int
    held: HeldRows

    def forward(
        self,
        input_ids: Ids,
        position: Ids,
        logits_index: Ids,
        first_slot: int = 0,
        buffer: int = 0,
    ) -> Logits:
        """Run N consecutive tokens for each of the B slots that start at `first_slot`.

        input_ids: int64 [B, N]. position: int64 [B], the row that the first of them goes to;
        position + N <= capacity is the caller's duty. logits_index: int64 [K], which of the N
        get logits. Returns float32 [B, K, V], a view of that buffer: valid until the next call
        with it.
        """

    def encode(self, slot: int, source: Source) -> None:
        """Let the slot's rows be of this source, of which there is one exactly where the model has
        an encoder. It runs unless the slot has that source already; otherwise no row is of use
        after it. Its length or shape is the caller's duty; ids that it lacks are read as 0."""

    def clear(self, slot: int) -> None:
        """Empty a slot whose rows may hold NaN: masked rows are multiplied too, and 0 times NaN is
        NaN."""
