"""The interface of a model on a GPU: calls on device addresses, enqueued on a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..files.errors import OutriderError, first_line
from ..files.graphs import Dtype, GraphFacts
from ..files.manifest import CHUNK, EngineFacts
from .cuda import Cuda
from .engine import CachedRows, Ids, Logits, Source, cache_shapes

LOGIT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Tensor = tuple[str, int, tuple[int, ...]]  # name, device address, shape


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """One call: B slots from `first_slot` on, N tokens of each, K of which get logits.

    The arrays are contiguous and given by their device addresses. input_ids: int64 [B, N].
    position: int64 [B]. logits_index: int64 [K]. logits: [B, K, V] of the engine's `logits_dtype`.
    """

    batch: int
    tokens: int
    outputs: int
    input_ids: int
    position: int
    logits_index: int
    logits: int
    first_slot: int = 0

    def integer_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            ("input_ids", self.input_ids, (self.batch, self.tokens)),
            ("position", self.position, (self.batch,)),
            ("logits_index", self.logits_index, (self.outputs,)),
        )


class DeviceCache(NamedTuple):
    """The keys or values of one layer: device memory [slots, heads, capacity, width].

    slot_bytes: size of one slot's part."""

    address: int
    heads: int
    width: int
    slot_bytes: int

    def slot_address(self, slot: int) -> int:
        return self.address + slot * self.slot_bytes


class DeviceEngine(ABC):
    """An `Engine` whose calls can also be enqueued on `stream`, where they run in order.

    The caches of all slots are device memory that this class allocates: [slots, Hkv, S, D] for each
    layer and side, S being the capacity. All engines of a decoder share one stream.

    alignment: the caches of each slot must start at a multiple of this many bytes.
    allowance: bytes to reserve for the library's own allocations if no builder reported them.
    """

    alignment = 1
    allowance = 0
    _library: str  # name of the library, for errors

    def __init__(
        self,
        cuda: Cuda,
        stream: int,
        folder: Path,
        facts: GraphFacts,
        engine: EngineFacts | None = None,
        *,
        slots: int,
        max_outputs: int,
    ):
        """Open the engine of one model of a bundle: the graph in `folder`, or the file there that
        was compiled from it (`engine`). slots, max_outputs: as in `HostEngine`. Raises
        OutriderError."""
        self.cuda, self.stream = cuda, stream
        self.slots, self.capacity, self.vocab_size = slots, facts.capacity, facts.vocab_size
        self.chunk = min(CHUNK, self.capacity)
        self.min_width = 1  # GPU libraries choose kernels by width anyway
        # Stays empty: texts and lengths live on the device.
        self.cached_rows = CachedRows(slots, self.vocab_size)
        self._max_outputs = max_outputs
        self.logit_type: Dtype = self.logits_dtype(facts)
        self.row_bytes = self.vocab_size * LOGIT_BYTES[self.logit_type]
        self._open(folder, facts, engine)
        item = 4 if facts.dtype == "float32" else 2
        # In the contract's order. Zeroed: masked rows are multiplied too, and 0 times NaN is NaN.
        self.caches: dict[str, DeviceCache] = {}
        for name, (heads, width) in cache_shapes(facts).items():
            size = heads * self.capacity * width * item
            if slots > 1 and size % self.alignment:
                raise OutriderError(
                    "backend",
                    f"slots of {self.capacity} rows of {heads} x {width} {facts.dtype} in {name} "
                    f"are not a multiple of {self.alignment} bytes",
                    "Use one slot, or BACKEND=onnxruntime.",
                )
            self.caches[name] = DeviceCache(cuda.allocate(slots * size), heads, width, size)

    @staticmethod
    def logits_dtype(facts: GraphFacts) -> Dtype:
        """The type of the logits that a call writes."""
        return "float32"

    @abstractmethod
    def _open(self, folder: Path, facts: GraphFacts, engine: EngineFacts | None) -> None:
        """Load the model into the library."""

    @classmethod
    def check(cls) -> None:
        """Raise OutriderError "backend", before anything is loaded, if the installed library has no
        GPU support."""
        return

    @classmethod
    def release_unused_memory(cls) -> None:
        """Return memory to the driver that the library keeps after its engines are gone."""
        return

    @abstractmethod
    def enqueue(self, call: DeviceCall, graph: object = None) -> None:
        """Put the call on the stream, without waiting.

        graph: identifies the graph that the call belongs to; None outside of graphs. An engine with
        state that belongs to a captured graph keeps one for each. Before a call is captured, it was
        made once outside of the capture, with the same shapes and the same `graph`. Raises
        OutriderError "backend".
        """

    def capturing(self) -> AbstractContextManager[object]:
        """The context in which calls are captured."""
        return nullcontext()

    @cached_property
    def _forward_buffers(self) -> tuple[int, int, int, int]:
        """The buffers of `forward`: input_ids, position, logits_index, logits. Allocated on first
        use, since a round does not need them."""
        sizes = (
            8 * self.slots * max(self.chunk, self._max_outputs), 8 * self.slots,
            8 * self._max_outputs, self.slots * self._max_outputs * self.row_bytes,
        )  # fmt: skip
        ids, position, index, logits = map(self.cuda.allocate, sizes)
        return ids, position, index, logits

    def cache_tensors(self, call: DeviceCall) -> Iterator[Tensor]:
        for name, cache in self.caches.items():
            shape = call.batch, cache.heads, self.capacity, cache.width
            yield name, cache.slot_address(call.first_slot), shape

    def forward(
        self, input_ids: Ids, position: Ids, logits_index: Ids, first_slot: int = 0, buffer: int = 0
    ) -> Logits:
        """`Engine.forward`: copies the arguments to the device and the logits back. For checks and
        tools; a round copies neither. Returns a new array, whatever the buffer."""
        (batch, width), outputs = input_ids.shape, len(logits_index)
        if width > self.chunk or outputs > self._max_outputs or first_slot + batch > self.slots:
            raise ValueError(
                f"call of {batch} slots x {width} tokens, {outputs} outputs at slot {first_slot}"
            )
        if (need := int(position.max()) + width) > self.capacity:
            raise ValueError(f"row {need} is beyond the capacity of {self.capacity}")
        self.cuda.make_current()
        ids, at, index, logits = self._forward_buffers
        for address, array in ((ids, input_ids), (at, position), (index, logits_index)):
            self.cuda.upload(address, np.ascontiguousarray(array, np.int64), self.stream)
        self.enqueue(DeviceCall(batch, width, outputs, ids, at, index, logits, first_slot))
        self.cuda.wait_for_stream(self.stream)
        return self.read_logits(logits, batch * outputs).reshape(batch, outputs, self.vocab_size)

    def read_logits(self, address: int, count: int) -> Logits:
        """Copy rows of logits, [count, V], from the device. The caller has waited for what writes
        them."""
        raw = np.empty(count * self.row_bytes, np.uint8)
        self.cuda.read(raw.ctypes.data, address, raw.nbytes)
        if self.logit_type == "bfloat16":  # the upper half of a float32
            raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
        kind = np.float16 if self.logit_type == "float16" else np.float32
        rows: Logits = raw.view(kind).astype(np.float32).reshape(count, self.vocab_size)
        return rows

    def encode(self, slot: int, source: Source) -> None:
        assert not source, "no bundle for GPUs has an encoder"

    def clear(self, slot: int) -> None:
        for cache in self.caches.values():
            self.cuda.zero(cache.slot_address(slot), cache.slot_bytes, self.stream)

    def _call_error(self, call: DeviceCall, cause: str) -> OutriderError:
        return OutriderError(
            "backend",
            f"{self._library} failed on {call.batch} slots x {call.tokens} tokens: {cause}",
            "Free some memory of the GPU, or build with a smaller MAX_LEN or fewer SLOTS.",
        )


class PreparedEngine(DeviceEngine):
    """An engine without per-graph state: a call is prepared once for all graphs."""

    def __init__(self, *arguments: Any, **sizes: Any):
        # Calls of rounds only; the addresses and widths of prompt calls vary too much.
        self._prepared: dict[DeviceCall, Any] = {}
        super().__init__(*arguments, **sizes)

    def enqueue(self, call: DeviceCall, graph: object = None) -> None:
        try:
            prepared = self._prepared.get(call)
            if prepared is None:
                prepared = self._prepare(call)
                if graph is not None:
                    self._prepared[call] = prepared
            self._run(prepared)
        except Exception as error:  # noqa: BLE001 - the libraries raise anything here
            raise self._call_error(call, first_line(error)) from None

    @abstractmethod
    def _prepare(self, call: DeviceCall) -> Any:
        """Prepare the library's arguments for a call."""

    @abstractmethod
    def _run(self, call: Any) -> None:
        """Enqueue a call that `_prepare` returned."""
