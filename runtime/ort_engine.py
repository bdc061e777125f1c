"""ONNX Runtime on the CPU: fixed buffers, caches updated in place, one binding per shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Ids, Logits
from .errors import OutriderError, first_line
from .manifest import GRAPH_FILE, GraphFacts

CHUNK = 512  # tokens of one prefill call; bounds the activations
FIRST_ROWS = 256  # of a slot


class OrtEngine:
    """See `Engine`. The graph is that of docs/architecture.md; S rows for each slot and layer.

    The cache of all slots is one array [slots, Hkv, S, D] per layer and side, so that any run of
    consecutive slots is a plain pointer: a call for one slot touches only that slot. S grows with
    the longest text (`_reserve`).
    """

    def __init__(
        self,
        folder: Path,
        facts: GraphFacts,
        *,
        slots: int,
        widest: int,
        buffers: int = 1,
        threads: int = 0,
    ):
        try:
            import onnxruntime as ort
        except ImportError:
            raise OutriderError(
                "backend", "onnxruntime is not installed", "Install it: pip install onnxruntime."
            ) from None
        self.slots, self.capacity, self.vocab_size = slots, facts.capacity, facts.vocab_size
        self.chunk, self.buffers = min(CHUNK, self.capacity), buffers
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        # Two models share the cores: the idle one's threads must not spin on them.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self._session = ort.InferenceSession(
                str(folder / GRAPH_FILE), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # noqa: BLE001 - ONNX Runtime raises a dozen unrelated classes here
            raise OutriderError(
                "backend",
                f"ONNX Runtime {ort.__version__} cannot load {folder / GRAPH_FILE}: "
                + first_line(error),
                "Build the bundle again; if it persists, install the pinned onnxruntime.",
            ) from None

        self._input_ids = np.zeros(slots * self.chunk, np.int64)
        self._position = np.zeros(slots, np.int64)
        self._index = np.zeros(max(widest, 1), np.int64)
        self._logits = np.zeros((buffers, slots * max(widest, 1) * self.vocab_size), np.float32)
        self._dtype = np.dtype(facts.dtype)
        self._shapes = {
            f"{side}_{layer}": (heads, width)
            for side, shapes in (("key", facts.key_shapes), ("value", facts.value_shapes))
            for layer, (heads, width) in enumerate(shapes)
        }
        self._cache: dict[str, npt.NDArray[Any]] = {}  # each [slots, Hkv, S, D]
        self.rows = 0  # S, for now
        self._bindings: dict[tuple[int, ...], ort.IOBinding] = {}

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
        binding = self._binding(first_slot, batch, width, outputs, buffer)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # noqa: BLE001 - as above; most likely out of memory
            raise OutriderError(
                "backend",
                f"ONNX Runtime failed on {batch} slots x {width} tokens: {first_line(error)}",
                "Free some memory, or build with a smaller MAX_LEN or fewer SLOTS.",
            ) from None
        size = batch * outputs * self.vocab_size
        return self._logits[buffer, :size].reshape(batch, outputs, self.vocab_size)

    def _reserve(self, position: Ids, width: int) -> None:
        """Enough rows for this call, and not many more: attention reads all S, valid or not.

        S doubles from `FIRST_ROWS` to the capacity, which copies each row about once in all. With
        one slot, a text that starts over starts small again.
        """
        need = int(position.max()) + width
        if need > self.capacity:
            raise ValueError(f"row {need} is beyond the capacity of {self.capacity}")
        starts_over = self.slots == 1 and position[0] == 0
        if need <= self.rows and not (starts_over and need <= self.rows // 2 >= FIRST_ROWS):
            return
        rows = min(self.capacity, max(FIRST_ROWS, 1 << (need - 1).bit_length()))
        kept = 0 if starts_over else self.rows
        for name, (heads, head_width) in self._shapes.items():
            # zeros, not empty: masked rows are multiplied too, and 0 times NaN is NaN.
            larger = np.zeros((self.slots, heads, rows, head_width), self._dtype)
            if kept:
                larger[:, :, :kept] = self._cache[name]
            self._cache[name] = larger
        self.rows = rows
        self._bindings.clear()

    def _binding(self, first: int, batch: int, width: int, outputs: int, buffer: int) -> object:
        """Everything bound by address once per shape; a step then only fills three small buffers.

        Input and output of a cache are the same memory: that is what makes ONNX Runtime's
        TensorScatter write in place instead of copying the cache.
        """
        key = (first, batch, width, outputs, buffer)
        if key in self._bindings:
            return self._bindings[key]
        binding = self._session.io_binding()
        inputs: tuple[tuple[str, Ids, tuple[int, ...]], ...] = (
            ("input_ids", self._input_ids, (batch, width)),
            ("position", self._position, (batch,)),
            ("logits_index", self._index, (outputs,)),
        )
        for name, array, shape in inputs:
            binding.bind_input(name, "cpu", 0, np.int64, shape, array.ctypes.data)
        logits_shape = (batch, outputs, self.vocab_size)
        logits = self._logits[buffer].ctypes.data
        binding.bind_output("logits", "cpu", 0, np.float32, logits_shape, logits)
        for name, array in self._cache.items():
            rows = array[first : first + batch]
            arguments = ("cpu", 0, array.dtype.type, rows.shape, rows.ctypes.data)
            binding.bind_input(name, *arguments)
            binding.bind_output(f"{name}_out", *arguments)
        if width <= len(self._index):  # steps and verifications; prefill widths vary too much
            self._bindings[key] = binding
        return binding
