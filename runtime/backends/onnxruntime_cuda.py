"""ONNX Runtime on a GPU: each call enqueued on our stream, caches written where they are.

Wants onnxruntime-gpu 1.25 or newer, the first with CUDA kernels for TensorScatter and Attention.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from ..files.errors import OutriderError, first_line
from ..files.manifest import GRAPH_FILE, GraphFacts
from .cuda import CaptureError, Cuda
from .device import DeviceCall, DeviceEngine
from .onnxruntime import open_session

PROVIDER = "CUDAExecutionProvider"
NEWER = "Install onnxruntime-gpu 1.25 or newer in place of onnxruntime."
LIBRARIES = "Install the CUDA and cuDNN that this onnxruntime-gpu wants; its warning names them."
# What ONNX Runtime does on the CPU by choice: it makes shapes of shapes, which lie in host memory.
# So "session.disable_cpu_ep_fallback" is of no use here: it refuses every graph that does.
SHAPES = {
    "Add", "Cast", "Concat", "Div", "Gather", "Mul", "Range", "Shape", "Slice", "Squeeze", "Sub",
    "Unsqueeze",
}  # fmt: skip


class OrtCudaEngine(DeviceEngine):
    """See `DeviceEngine`; a call is an IOBinding."""

    _provider, _place = PROVIDER, "cuda"  # the tests replace them

    def __init__(
        self,
        cuda: Cuda,
        stream: int,
        folder: Path,
        facts: GraphFacts,
        *,
        slots: int,
        widest: int,
        buffers: int = 1,
    ):
        provider = {
            "device_id": str(cuda.ordinal),
            "user_compute_stream": str(stream),
            "use_tf32": "0",  # float32 is what the bundle was checked in
        }
        cuda.use()
        self._session = open_session(
            folder / GRAPH_FILE, facts, [(self._provider, provider)], 1,
            record_ep_graph_assignment_info="1",
            # Otherwise in the arena, which grows by powers of two.
            use_device_allocator_for_initializers="1",
        )  # fmt: skip
        self._check_placement()
        self._options = _run_options()
        self._dtype = np.dtype(facts.dtype).type
        super().__init__(cuda, stream, facts, slots=slots, widest=widest, buffers=buffers)
        self._bindings: dict[DeviceCall, Any] = {}  # of rounds; the prompts' vary too much

    @classmethod
    def check(cls) -> None:
        if cause := unavailable():
            raise OutriderError("backend", cause, NEWER)

    def enqueue(self, call: DeviceCall, graph: object = None) -> None:
        binding = self._bindings.get(call)
        try:
            if binding is None:
                binding = self._bind(call)
                if graph is not None:
                    self._bindings[call] = binding
            self._run(binding)
        except Exception as error:  # noqa: BLE001 - ONNX Runtime raises a dozen unrelated classes
            raise self._failed("ONNX Runtime", call, first_line(error)) from None

    def capturing(self) -> AbstractContextManager[object]:
        """Raises CaptureError: up to 1.31 ONNX Runtime does not support it. What a run copies from
        the host (mixtures of experts do) a graph would read again from memory that is somebody
        else's by then; and a capture from outside can end the process (its pull request 32081)."""
        raise CaptureError("ONNX Runtime does not let others capture its runs")

    def _run(self, binding: Any) -> None:
        self._session.run_with_iobinding(binding, self._options)

    def _bind(self, call: DeviceCall) -> Any:
        """Everything bound by address; a cache's input and output to the same, so that
        TensorScatter writes in place."""
        binding, at = self._session.io_binding(), (self._place, self.cuda.ordinal)
        for name, address, shape in (
            ("input_ids", call.input_ids, (call.batch, call.tokens)),
            ("position", call.position, (call.batch,)),
            ("logits_index", call.logits_index, (call.outputs,)),
        ):
            binding.bind_input(name, *at, np.int64, shape, address)
        logits_shape = (call.batch, call.outputs, self.vocab_size)
        binding.bind_output("logits", *at, np.float32, logits_shape, call.logits)
        for name, (_, (heads, width)) in self.caches.items():
            rows = (call.batch, heads, self.capacity, width)
            cache = (*at, self._dtype, rows, self.cache_address(name, call.first_slot))
            binding.bind_input(name, *cache)
            binding.bind_output(f"{name}_out", *cache)
        return binding

    def _check_placement(self) -> None:
        """Everything but shapes is computed on the GPU. Raises OutriderError "backend"."""
        if self._provider not in self._session.get_providers():  # it logs a warning, and goes on
            raise OutriderError("backend", "ONNX Runtime cannot start on this GPU", LIBRARIES)
        placement = getattr(self._session, "get_provider_graph_assignment_info", None)
        if placement is None:
            raise OutriderError("backend", "this onnxruntime-gpu is older than 1.24", NEWER)
        elsewhere = {
            node.op_type
            for part in placement()
            if part.ep_name != self._provider
            for node in part.get_nodes()
        }
        if missing := sorted(elsewhere - SHAPES):
            raise OutriderError(
                "backend", f"ONNX Runtime has no CUDA kernel for {', '.join(missing)}", NEWER
            )


def unavailable() -> str | None:
    """None where ONNX Runtime has its CUDA provider; otherwise the cause, in one line."""
    try:
        import onnxruntime as ort
    except ImportError:
        return "onnxruntime is not installed"
    if PROVIDER in ort.get_available_providers():
        return None
    return f"onnxruntime {ort.__version__} is without {PROVIDER}, which onnxruntime-gpu has"


def _run_options() -> Any:
    import onnxruntime as ort

    options = ort.RunOptions()
    # Or a run waits for the stream at its end.
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
