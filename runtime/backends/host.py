"""The common part of CPU engines: slots that grow with the text, and calls prepared per shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError, first_line, is_out_of_memory
from ..files.manifest import CHUNK, FIRST_ROWS, GAMMA_LIMIT, GraphFacts, Manifest
from .engine import (
    Features,
    HeldRows,
    Ids,
    Logits,
    Source,
    cache_shapes,
    source_shapes,
    state_shapes,
)

Call = TypeVar("Call")
STATES = "encoder_states"
MOST_CALLS = 1024  # prepared calls that are kept: kilobytes each, more for a deep model


class HostEngine(ABC, Generic[Call]):
    """See `Engine`. The graph is that of docs/graph.md, with S rows for each slot and layer.

    The cache of all slots is one array [slots, Hkv, S, D] per layer and side, so that any run of
    consecutive slots is a plain pointer: a call for one slot touches only that slot. S grows with
    the longest text (`_reserve`). Arguments and logits have fixed buffers, so that a call of a
    shape seen before (`Call`) is ready to run; a step then only fills three small buffers.

    The number of rows of recurrent layers is fixed: [slots, H, R, D].

    The encoder's output is stored in the same way, [slots, H, E, D]. E is the number of rows that
    the longest source so far has needed (`_reserve_source`), or the fixed number of the model.
    """

    _library: ClassVar[str]  # name of the library, for errors
    least_width: ClassVar[int] = 1  # a target's `narrowest`, if it was not measured

    def __init__(
        self,
        folder: Path,
        facts: GraphFacts,
        *,
        slots: int,
        widest: int,
        buffers: int = 1,
        threads: int = 0,
        narrowest: int = 1,
    ):
        """folder: the model's, in the bundle. slots, narrowest: see `Engine`. widest: the largest K
        of a call. buffers: number of calls whose logits are kept, evenly spaced in memory if the
        calls have the same shape. threads: 0 leaves the choice to the library. Raises OutriderError
        "backend"."""
        self.slots, self.capacity, self.vocab_size = slots, facts.capacity, facts.vocab_size
        self.chunk, self.narrowest = min(CHUNK, self.capacity), narrowest
        self._open(folder, facts, threads)
        self._input_ids = np.zeros(slots * self.chunk, np.int64)
        self._position = np.zeros(slots, np.int64)
        self._index = np.zeros(widest, np.int64)
        self._logits = np.zeros((buffers, slots * widest * self.vocab_size), np.float32)
        self._shapes = cache_shapes(facts)
        self._cache: dict[str, Any] = {}  # in the contract's order; each [slots, Hkv, S, D]
        self.rows = 0  # S, for now
        rings = facts.states.rows if facts.states else 0
        self._rings = {
            name: self._zeros(slots, heads, rings, width)
            for name, (heads, width) in state_shapes(facts).items()
        }
        self._calls: dict[tuple[int, ...], tuple[Call, Logits]] = {}
        self._source_shapes = source_shapes(facts)
        self._source: dict[str, Any] = {}
        self._source_length = np.ones(slots, np.int64)  # attention needs at least one row
        self.source_rows = 0  # E, for now
        self._all_rows = facts.encoder.rows if facts.encoder else None  # E, where it is fixed
        self._states_of: HostEngine[Any] | None = None
        self._keeps_states = False
        # [1, E, D] by slot: the encoder's output before the decoder's own projections.
        self._states: dict[int, npt.NDArray[Any]] = {}
        if self._source_shapes:
            self._reserve_source(self._all_rows or 1)
        self.held = HeldRows(slots, self.vocab_size, facts.states)

    @classmethod
    def check(cls, manifest: Manifest, folder: Path) -> None:
        """Raise OutriderError "backend", before anything is loaded, if this machine cannot run the
        bundle."""

    @abstractmethod
    def _open(self, folder: Path, facts: GraphFacts, threads: int) -> None:
        """Load the model into the library."""

    @abstractmethod
    def _zeros(self, *shape: int) -> Any:
        """An array of the cache's dtype."""

    def _prepare(
        self, first: int, batch: int, width: int, outputs: int, buffer: int
    ) -> tuple[Call, Logits]:
        """Prepare a call on the fixed buffers and on `batch` slots from `first` on. Returns the
        call and its logits."""
        ids = {
            "input_ids": self._input_ids[: batch * width].reshape(batch, width),
            "position": self._position[:batch],
            "logits_index": self._index[:outputs],
        }
        caches, source = (
            {name: array[first : first + batch] for name, array in arrays.items()}
            for arrays in ({**self._cache, **self._rings}, self._source)
        )
        if source:
            ids["source_length"] = self._source_length[first : first + batch]
        size = batch * outputs * self.vocab_size
        logits = self._logits[buffer, :size].reshape(batch, outputs, self.vocab_size)
        return self._bind(ids, caches, source, logits), logits

    @abstractmethod
    def _bind(
        self, ids: dict[str, Ids], caches: dict[str, Any], source: dict[str, Any], logits: Logits
    ) -> Call:
        """Prepare a call on this memory. Caches are updated in place; `source` is only read."""

    @abstractmethod
    def _encode(self, source: npt.NDArray[Any], names: Sequence[str]) -> dict[str, Any]:
        """Run the encoder on a source: ids [1, E], features [1, F, T], or the states [1, E, D] that
        the target's encoder returned. Returns the named outputs, [1, H, E, D] and the states. The
        names are in the contract's order."""

    @abstractmethod
    def _run(self, call: Call) -> None:
        """Run the call; returns when the logits are written."""

    def forward(
        self,
        input_ids: Ids,
        position: Ids,
        logits_index: Ids,
        first_slot: int = 0,
        buffer: int = 0,
    ) -> Logits:
        (batch, width), outputs = input_ids.shape, len(logits_index)
        if width > self.chunk or first_slot + batch > self.slots:
            raise ValueError(f"call of {batch} slots x {width} tokens at slot {first_slot}")
        self._reserve(position, width)
        self._input_ids[: batch * width] = input_ids.reshape(-1)
        self._position[:batch] = position
        self._index[:outputs] = logits_index
        shape = (first_slot, batch, width, outputs, buffer)
        prepared = self._calls.get(shape)
        if prepared is None:
            prepared = self._prepare(*shape)
            if width <= len(self._index):  # steps and verifications; prefill widths vary too much
                if len(self._calls) >= MOST_CALLS:  # one for each first slot, last slot and width
                    self._calls.clear()
                self._calls[shape] = prepared
        call, logits = prepared
        for slot, start in enumerate(position.tolist(), first_slot):
            self.held.overwrites(slot, start, width)
        with self._running(f"{batch} slots x {width} tokens"):
            self._run(call)
        self.held.wrote(first_slot, input_ids, position)
        return logits

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """Run the library within. Raises OutriderError "memory" or "backend" if it fails."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the libraries raise anything here
            raise OutriderError(
                "memory" if is_out_of_memory(error) else "backend",
                f"{self._library} failed on {what}: {first_line(error)}",
                "Free some memory, or build with a smaller MAX_LEN or fewer SLOTS.",
            ) from None

    def encode(self, slot: int, source: Source) -> None:
        if self.held.has(slot, source):
            return
        other = self.held.slot_of(source)
        if other is None:
            self._encode_into(slot, source)
            return
        self.held.encoded(slot, ())  # as in `_encode_into`
        for array in (*self._source.values(), self._source_length):
            array[slot] = array[other]
        if other in self._states:
            self._states[slot] = self._states[other]
        self.held.encoded(slot, source)

    def _encode_into(self, slot: int, source: Source) -> None:
        if isinstance(source, Features):
            read: npt.NDArray[Any] = source.array
            what = f"{len(read)} x {read.shape[1]} features"
        else:
            read = np.array(source, np.int64)
            read[read >= self.vocab_size] = 0
            what = f"{len(read)} tokens"
        read = read[None]
        if self._states_of is not None:
            self._states_of.encode(slot, source)
            read = self._states_of._states[slot]
        names = [*self._source_shapes, *([STATES] if self._keeps_states else [])]
        with self._running(f"a source of {what}"):
            rows = self._encode(read, names)
        length = self._all_rows or read.shape[1]
        self.held.encoded(slot, ())  # an interrupt then leaves the slot without a source
        self._reserve_source(length)
        if self._keeps_states:
            self._states[slot] = rows.pop(STATES)
        for name, found in rows.items():
            self._source[name][slot, :, :length] = found[0]
        self._source_length[slot] = length
        self.held.encoded(slot, source)

    def read_states_of(self, target: HostEngine[Any]) -> None:
        """From now on, read the states that the target's encoder computed from a source, in place
        of the source itself. Both engines have the same number of slots."""
        self._states_of, target._keeps_states = target, True

    def copy_rows(self, source: int, destination: int, rows: int) -> None:
        """Copy the first `rows` rows of one slot to another, whose rows from there on are garbage.

        Copies the keys and values of every layer. Only rows that a call has written can be copied.
        """
        for cache in self._cache.values():
            cache[destination, :, :rows] = cache[source, :, :rows]
        self.held.copied(source, destination, rows)

    def clear(self, slot: int) -> None:
        self.held.encoded(slot, ())  # first, so that an interrupt leaves no valid rows
        for cache in (*self._cache.values(), *self._rings.values(), *self._source.values()):
            cache[slot] = 0
        self._source_length[slot] = 1

    def _reserve(self, position: Ids, width: int) -> None:
        """Make enough rows for this call, but not many more: attention reads all S, valid or not.

        With one slot, S shrinks again when another text starts.
        """
        need = int(position.max()) + width
        if need > self.capacity:
            raise ValueError(f"row {need} is beyond the capacity of {self.capacity}")
        start = int(position[0])
        # No round goes back this far, so this is another text, whose first rows may be held.
        another = self.slots == 1 and (start == 0 or self.held.length(0) - start > 2 * GAMMA_LIMIT)
        if need <= self.rows and not (another and need <= self.rows // 2 >= FIRST_ROWS):
            return
        rows = self._doubled(need)
        kept = start if another else self.rows
        other = self._grown(self._shapes, rows, self._cache, kept)
        if another:
            self.held.cut(0, kept)
        self._calls.clear()  # they contain the old addresses
        self._cache, self.rows = other, rows

    def _doubled(self, need: int) -> int:
        """The next power of two, from `FIRST_ROWS` to the capacity: while growing, each row is
        copied about once in total."""
        return min(self.capacity, max(FIRST_ROWS, 1 << (need - 1).bit_length()))

    def _grown(
        self, shapes: Mapping[str, tuple[int, int]], rows: int, arrays: Mapping[str, Any], kept: int
    ) -> dict[str, Any]:
        """New arrays of `rows` rows with the first `kept` rows of the old ones. All are complete
        before any is used, so that an interrupt or a lack of memory changes nothing."""
        other = {}
        for name, (heads, width) in shapes.items():
            other[name] = self._zeros(self.slots, heads, rows, width)  # why zero: `Engine.clear`
            if kept:
                other[name][:, :, :kept] = arrays[name][:, :, :kept]
        return other

    def _reserve_source(self, need: int) -> None:
        """Make enough rows for a source of this length, by the same rule. With several slots their
        number never shrinks, since the other slots' sources may need them."""
        if need > (self._all_rows or self.capacity):
            raise ValueError(f"a source of {need} tokens is beyond the capacity of {self.capacity}")
        rows = self._all_rows or self._doubled(need)
        if rows == self.source_rows or (rows < self.source_rows and self.slots > 1):
            return
        kept = min(rows, self.source_rows)
        other = self._grown(self._source_shapes, rows, self._source, kept)
        self._calls.clear()
        self._source, self.source_rows = other, rows
