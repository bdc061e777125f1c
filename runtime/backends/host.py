"""The common part of CPU engines: slots that grow with the text, and calls prepared per shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError, first_line, is_out_of_memory
from ..files.graphs import GAMMA_LIMIT, GraphFacts
from ..files.manifest import CHUNK, FIRST_ROWS, Manifest
from .engine import (
    CachedRows,
    Features,
    Ids,
    Logits,
    Source,
    cache_shapes,
    source_shapes,
    state_shapes,
)

Call = TypeVar("Call")
STATES_OUTPUT = "encoder_states"
MAX_PREPARED_CALLS = 1024  # prepared calls that are kept: kilobytes each, more for a deep model


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
    default_min_width: ClassVar[int] = 1  # a target's `min_width`, if it was not measured

    def __init__(
        self,
        folder: Path,
        facts: GraphFacts,
        *,
        slots: int,
        max_outputs: int,
        buffers: int = 1,
        threads: int = 0,
        min_width: int = 1,
    ):
        """folder: the model's, in the bundle. slots, min_width: as in `Engine`. max_outputs: the
        largest K of a call. buffers: number of calls whose logits are kept, evenly spaced in memory
        if the calls have the same shape. threads: 0 leaves the choice to the library. Raises
        OutriderError "backend"."""
        self.slots, self.capacity, self.vocab_size = slots, facts.capacity, facts.vocab_size
        self.chunk, self.min_width = min(CHUNK, self.capacity), min_width
        self._open(folder, facts, threads)
        self._input_ids = np.zeros(slots * self.chunk, np.int64)
        self._position = np.zeros(slots, np.int64)
        self._index = np.zeros(max_outputs, np.int64)
        self._logits = np.zeros((buffers, slots * max_outputs * self.vocab_size), np.float32)
        self._shapes = cache_shapes(facts)
        self._cache: dict[str, Any] = {}  # in the contract's order; each [slots, Hkv, S, D]
        self.row_count = 0  # S, for now
        rings = facts.states.rows if facts.states else 0
        self._rings = {
            name: self._zeros(slots, heads, rings, width)
            for name, (heads, width) in state_shapes(facts).items()
        }
        self._prepared: dict[tuple[int, ...], tuple[Call, Logits]] = {}
        self._source_shapes = source_shapes(facts)
        self._source: dict[str, Any] = {}
        self._source_length = np.ones(slots, np.int64)  # attention needs at least one row
        self.source_row_count = 0  # E, for now
        self._fixed_rows = facts.encoder.rows if facts.encoder else None  # E, where it is fixed
        self._states_engine: HostEngine[Any] | None = None
        self._keeps_states = False
        # [1, E, D] by slot: the encoder's output before the decoder's own projections.
        self._states: dict[int, npt.NDArray[Any]] = {}
        if self._source_shapes:
            self._reserve_source(self._fixed_rows or 1)
        self.cached_rows = CachedRows(slots, self.vocab_size, facts.states)

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
        self, input_ids: Ids, position: Ids, logits_index: Ids, first_slot: int = 0, buffer: int = 0
    ) -> Logits:
        (batch, width), outputs = input_ids.shape, len(logits_index)
        if width > self.chunk or first_slot + batch > self.slots:
            raise ValueError(f"call of {batch} slots x {width} tokens at slot {first_slot}")
        starts = position.tolist()
        self._reserve(starts, width)
        self._input_ids[: batch * width] = input_ids.reshape(-1)
        self._position[:batch] = position
        self._index[:outputs] = logits_index
        shape = (first_slot, batch, width, outputs, buffer)
        prepared = self._prepared.get(shape)
        if prepared is None:
            prepared = self._prepare(*shape)
            if width <= len(self._index):  # steps and verifications; prefill widths vary too much
                # There is one for each first slot, last slot and width.
                if len(self._prepared) >= MAX_PREPARED_CALLS:
                    self._prepared.clear()
                self._prepared[shape] = prepared
        call, logits = prepared
        for slot, start in enumerate(starts, first_slot):
            self.cached_rows.begin_call(slot, start, width)
        try:
            self._run(call)
        except Exception as error:  # noqa: BLE001 - the libraries raise anything here
            raise self._translated(error, f"{batch} slots x {width} tokens") from None
        self.cached_rows.end_call(first_slot, input_ids, position)
        return logits

    def _translated(self, error: Exception, what: str) -> OutriderError:
        """The OutriderError, "memory" or "backend", for an error that the library raised."""
        return OutriderError(
            "memory" if is_out_of_memory(error) else "backend",
            f"{self._library} failed on {what}: {first_line(error)}",
            "Free some memory, or build with a smaller MAX_LEN or fewer SLOTS.",
        )

    def encode(self, slot: int, source: Source) -> None:
        if self.cached_rows.has_source(slot, source):
            return
        other_slot = self.cached_rows.slot_with(source)
        if other_slot is None:
            self._encode_into(slot, source)
            return
        self.cached_rows.set_source(slot, ())  # as in `_encode_into`
        for array in (*self._source.values(), self._source_length):
            array[slot] = array[other_slot]
        if other_slot in self._states:
            self._states[slot] = self._states[other_slot]
        self.cached_rows.set_source(slot, source)

    def _encode_into(self, slot: int, source: Source) -> None:
        if isinstance(source, Features):
            inputs: npt.NDArray[Any] = source.array
            what = f"{len(inputs)} x {inputs.shape[1]} features"
        else:
            inputs = np.array(source, np.int64)
            inputs[inputs >= self.vocab_size] = 0
            what = f"{len(inputs)} tokens"
        inputs = inputs[None]
        if self._states_engine is not None:
            self._states_engine.encode(slot, source)
            inputs = self._states_engine._states[slot]
        names = [*self._source_shapes, *([STATES_OUTPUT] if self._keeps_states else [])]
        try:
            outputs = self._encode(inputs, names)
        except Exception as error:  # noqa: BLE001 - as in `forward`
            raise self._translated(error, f"a source of {what}") from None
        length = self._fixed_rows or inputs.shape[1]
        self.cached_rows.set_source(slot, ())  # an interrupt then leaves the slot without a source
        self._reserve_source(length)
        if self._keeps_states:
            self._states[slot] = outputs.pop(STATES_OUTPUT)
        for name, output in outputs.items():
            self._source[name][slot, :, :length] = output[0]
        self._source_length[slot] = length
        self.cached_rows.set_source(slot, source)

    def read_states_of(self, target: HostEngine[Any]) -> None:
        """From now on, read the states that the target's encoder computed from a source, in place
        of the source itself. Both engines have the same number of slots."""
        self._states_engine, target._keeps_states = target, True

    def copy_rows(self, source: int, destination: int, rows: int) -> None:
        """Copy the first `rows` rows of one slot to another, whose rows from there on are garbage.

        Copies the keys and values of every layer. Only rows that a call has written can be copied.
        """
        self.cached_rows.truncate(destination, 0)  # for an interrupt
        for cache in self._cache.values():
            cache[destination, :, :rows] = cache[source, :, :rows]
        self.cached_rows.copy_rows(source, destination, rows)

    def clear(self, slot: int) -> None:
        self.cached_rows.set_source(slot, ())  # first, so that an interrupt leaves no valid rows
        for cache in (*self._cache.values(), *self._rings.values(), *self._source.values()):
            cache[slot] = 0
        self._source_length[slot] = 1

    def _reserve(self, starts: Sequence[int], width: int) -> None:
        """Make enough rows for this call, but not many more: attention reads all S, valid or not.

        With one slot, S shrinks again when another text starts.
        """
        need = max(starts) + width
        if need > self.capacity:
            raise ValueError(f"row {need} is beyond the capacity of {self.capacity}")
        start = starts[0]
        # No round goes back this far, so this is another text, whose first rows may be held.
        new_text = self.slots == 1 and (
            start == 0 or self.cached_rows.length(0) - start > 2 * GAMMA_LIMIT
        )
        if need <= self.row_count and not (new_text and need <= self.row_count // 2 >= FIRST_ROWS):
            return
        rows = self._round_up_rows(need)
        kept = start if new_text else self.row_count
        grown = self._reallocate(self._shapes, rows, self._cache, kept)
        if new_text:
            self.cached_rows.truncate(0, kept)
        self._prepared.clear()  # they contain the old addresses
        self._cache, self.row_count = grown, rows

    def _round_up_rows(self, need: int) -> int:
        """The next power of two, from `FIRST_ROWS` to the capacity: while growing, each row is
        copied about once in total."""
        return min(self.capacity, max(FIRST_ROWS, 1 << (need - 1).bit_length()))

    def _reallocate(
        self, shapes: Mapping[str, tuple[int, int]], rows: int, arrays: Mapping[str, Any], kept: int
    ) -> dict[str, Any]:
        """New arrays of `rows` rows with the first `kept` rows of the old ones. All are complete
        before any is used, so that an interrupt or a lack of memory changes nothing."""
        grown = {}
        for name, (heads, width) in shapes.items():
            grown[name] = self._zeros(self.slots, heads, rows, width)  # why zero: `Engine.clear`
            if kept:
                grown[name][:, :, :kept] = arrays[name][:, :, :kept]
        return grown

    def _reserve_source(self, need: int) -> None:
        """Make enough rows for a source of this length, by the same rule. With several slots their
        number never shrinks, since the other slots' sources may need them."""
        if need > (self._fixed_rows or self.capacity):
            raise ValueError(f"a source of {need} tokens is beyond the capacity of {self.capacity}")
        rows = self._fixed_rows or self._round_up_rows(need)
        if rows == self.source_row_count or (rows < self.source_row_count and self.slots > 1):
            return
        kept = min(rows, self.source_row_count)
        grown = self._reallocate(self._source_shapes, rows, self._source, kept)
        self._prepared.clear()
        self._source, self.source_row_count = grown, rows
