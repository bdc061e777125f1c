"""ONNX Runtime on the CPU: fixed buffers, caches updated in place, one binding per shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError, first_line, importing, out_of_memory
from ..files.manifest import GRAPH_FILE, ONE_SLOT_FILE, ORT_LEFT_OUT, GraphFacts
from .engine import Ids
from .host import HostEngine


def open_session(
    file: Path, facts: GraphFacts, providers: list[Any], threads: int, **entries: str
) -> Any:
    """A session of a graph. entries: of its configuration. Raises OutriderError "backend"."""
    with importing("onnxruntime", "Install it: pip install onnxruntime."):
        import onnxruntime as ort
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what fails is raised; it need not be printed too
    options.intra_op_num_threads = threads
    # Two models share the cores: the idle one's threads must not spin on them.
    for name, value in {"force_spinning_stop": "1", **entries}.items():
        options.add_session_config_entry(f"session.{name}", value)
    try:
        return ort.InferenceSession(
            str(file),
            options,
            providers=providers,
            disabled_optimizers=ORT_LEFT_OUT.get(facts.dtype),
            enable_fallback=0,  # or it prints what failed and tries again on the CPU
        )
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises a dozen unrelated classes here
        if out_of_memory(error):
            raise OutriderError(
                "memory",
                f"not enough memory to open {file}",
                "Free some, or use a smaller checkpoint, or a bundle with a smaller DTYPE.",
            ) from None
        raise OutriderError(
            "backend",
            f"ONNX Runtime {ort.__version__} cannot load {file}: " + first_line(error),
            "Build the bundle again; if it persists, install the pinned onnxruntime.",
        ) from None


class OrtEngine(HostEngine[Any]):
    """See `HostEngine`; a call is an IOBinding."""

    _library = "ONNX Runtime"

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
        # Texts of different lengths need the operators that every backend has; one goes faster.
        one_slot = slots == 1 and ONE_SLOT_FILE in facts.files
        file = folder / (ONE_SLOT_FILE if one_slot else GRAPH_FILE)
        self._session = open_session(file, facts, ["CPUExecutionProvider"], threads)
        self._dtype = np.dtype(facts.dtype)
        self._allocate(facts, slots=slots, widest=widest, buffers=buffers)

    def _zeros(self, *shape: int) -> npt.NDArray[Any]:
        return np.zeros(shape, self._dtype)

    def _prepare(self, first: int, batch: int, width: int, outputs: int, buffer: int) -> Any:
        """Everything bound by address.

        Input and output of a cache are the same memory: that is what makes ONNX Runtime's
        TensorScatter, or GroupQueryAttention, write in place instead of copying the cache.
        """
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
        return binding

    def _run(self, call: Any) -> None:
        self._session.run_with_iobinding(call)
