"""ONNX Runtime: fixed buffers, caches updated in place, one binding per shape.

A GPU needs onnxruntime-gpu 1.25 or newer, the first with CUDA kernels for TensorScatter and
Attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError, first_line, importing, is_out_of_memory
from ..files.graphs import ENCODER_FILE, GRAPH_FILE, HOST_FILE, GraphFacts
from ..files.library import add_operators
from ..files.manifest import ORT_LEFT_OUT, EngineFacts
from ..sampling import kernel
from .cuda import CaptureError
from .device import DeviceCall, PreparedEngine, Tensor
from .engine import Ids, Logits
from .host import HostEngine

FOLD_ANY_SIZE = "optimization.constant_folding_max_output_size_in_bytes"
PROVIDER = "CUDAExecutionProvider"
UPGRADE_REMEDY = "Install onnxruntime-gpu 1.25 or newer in place of onnxruntime."
LIBRARIES_REMEDY = (
    "Install the CUDA and cuDNN that this onnxruntime-gpu needs; its warning names them."
)
# Operators that ONNX Runtime runs on the CPU by choice: they compute shapes, which are in host
# memory. So "session.disable_cpu_ep_fallback" is of no use: it refuses every graph that has them.
SHAPE_OPERATORS = {
    "Add", "Cast", "Concat", "Div", "Gather", "Mul", "Range", "Shape", "Slice", "Squeeze", "Sub",
    "Unsqueeze",
}  # fmt: skip


def open_session(
    file: Path, facts: GraphFacts, providers: list[Any], threads: int, **entries: str
) -> Any:
    """Open a session for a graph. entries: of its configuration. Raises OutriderError "backend" or
    "memory"."""
    with importing("onnxruntime", "Install it: pip install onnxruntime."):
        import onnxruntime as ort
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures are raised, and need not be printed too
    options.intra_op_num_threads = threads
    # Two models share the cores: the idle one's threads must not spin on them.
    for name, value in {"force_spinning_stop": "1", **entries}.items():
        options.add_session_config_entry(f"session.{name}", value)
    # By default it would make a matrix of 16 bits with over 2^28 numbers float32 in every call.
    options.add_session_config_entry(FOLD_ANY_SIZE, "0")
    try:
        if file.name != GRAPH_FILE and kernel.available():
            add_operators(options)
        return ort.InferenceSession(
            str(file),
            options,
            providers=providers,
            disabled_optimizers=ORT_LEFT_OUT.get(facts.dtype),
            enable_fallback=0,  # otherwise it prints the failure and tries again on the CPU
        )
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises a dozen unrelated classes here
        if is_out_of_memory(error):
            raise OutriderError(
                "memory",
                f"not enough memory to open {file}",
                "Free some memory, or use a smaller checkpoint or a smaller DTYPE.",
            ) from None
        raise OutriderError(
            "backend",
            f"ONNX Runtime {ort.__version__} cannot load {file}: " + first_line(error),
            "Build the bundle again; if it persists, install the pinned onnxruntime.",
        ) from None


def bind(
    session: Any,
    device: tuple[str, int],
    ids: Iterable[Tensor],
    logits: Tensor,
    caches: Iterable[Tensor],
    dtype: Any,
) -> Any:
    """Bind a call to addresses on a device. dtype: of the caches.

    Input and output of a cache are the same memory, which makes ONNX Runtime's TensorScatter, or
    our own attention, write in place instead of copying the cache.
    """
    binding = session.io_binding()
    for name, address, shape in ids:
        binding.bind_input(name, *device, np.int64, shape, address)
    name, address, shape = logits
    binding.bind_output(name, *device, np.float32, shape, address)
    for name, address, shape in caches:
        binding.bind_input(name, *device, dtype, shape, address)
        binding.bind_output(f"{name}_out", *device, dtype, shape, address)
    return binding


class OrtEngine(HostEngine[Any]):
    """See `HostEngine`; a call is an IOBinding."""

    _library = "ONNX Runtime"
    default_min_width = 2  # calls of one token run other kernels, GEMV instead of GEMM

    def _open(self, folder: Path, facts: GraphFacts, threads: int) -> None:
        if facts.has_host_weights:
            try:
                kernel.load()
            except OutriderError as error:
                raise OutriderError(
                    "backend",
                    f"{folder} has quantised weights, which need liboutrider: {error.cause}",
                    f"{error.remedy} Or build with full weights (DRAFT_WEIGHTS=full for a draft).",
                ) from None
        # `host.open_rounds` logs a warning if the kernel is not available.
        use_host_graph = facts.has_host_weights or (HOST_FILE in facts.files and kernel.available())
        file = folder / (HOST_FILE if use_host_graph else GRAPH_FILE)
        self._session = open_session(file, facts, ["CPUExecutionProvider"], threads)
        if facts.encoder is not None:
            file = folder / ENCODER_FILE
            self._encoder = open_session(file, facts, ["CPUExecutionProvider"], threads)
        self._dtype = np.dtype(facts.cache or facts.dtype)

    def _zeros(self, *shape: int) -> npt.NDArray[Any]:
        return np.zeros(shape, self._dtype)

    def _bind(
        self, ids: dict[str, Ids], caches: dict[str, Any], source: dict[str, Any], logits: Logits
    ) -> Any:
        def tensors(arrays: dict[str, Any]) -> list[Tensor]:
            return [(name, array.ctypes.data, array.shape) for name, array in arrays.items()]

        (logits_tensor,) = tensors({"logits": logits})
        device, dtype = ("cpu", 0), self._dtype.type
        binding = bind(self._session, device, tensors(ids), logits_tensor, tensors(caches), dtype)
        for name, address, shape in tensors(source):
            binding.bind_input(name, *device, dtype, shape, address)
        return binding

    def _encode(self, source: npt.NDArray[Any], names: Sequence[str]) -> dict[str, Any]:
        (encoder_input,) = self._encoder.get_inputs()
        outputs = self._encoder.run(names, {encoder_input.name: source})
        return dict(zip(names, outputs, strict=True))

    def _run(self, call: Any) -> None:
        self._session.run_with_iobinding(call)


class OrtCudaEngine(PreparedEngine):
    """See `DeviceEngine`; a call is an IOBinding."""

    _library = "ONNX Runtime"
    _provider, _device_type = PROVIDER, "cuda"  # replaced in tests

    def _open(self, folder: Path, facts: GraphFacts, engine: EngineFacts | None) -> None:
        provider = {
            "device_id": str(self.cuda.ordinal),
            "user_compute_stream": str(self.stream),
            "use_tf32": "0",  # the bundle was checked in full float32
        }
        self.cuda.make_current()
        self._session = open_session(
            folder / GRAPH_FILE, facts, [(self._provider, provider)], 1,
            record_ep_graph_assignment_info="1",
            # Otherwise the weights go into the arena, which grows by powers of two.
            use_device_allocator_for_initializers="1",
        )  # fmt: skip
        self._check_placement()
        import onnxruntime as ort

        self._options = ort.RunOptions()
        # Otherwise each run waits for the stream at its end.
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._dtype = np.dtype(facts.dtype).type

    @classmethod
    def check(cls) -> None:
        if cause := unavailable_reason():
            raise OutriderError("backend", cause, UPGRADE_REMEDY)

    def capturing(self) -> AbstractContextManager[object]:
        """Raises CaptureError: ONNX Runtime up to 1.31 does not support external capture. Data that
        a run copies from the host (as mixtures of experts do) would be read again at replay, from
        memory that has other contents by then; and such a capture can end the process (its pull
        request 32081)."""
        raise CaptureError("ONNX Runtime does not support capturing its runs")

    def _run(self, call: Any) -> None:
        self._session.run_with_iobinding(call, self._options)

    def _prepare(self, call: DeviceCall) -> Any:
        logits = ("logits", call.logits, (call.batch, call.outputs, self.vocab_size))
        device = (self._device_type, self.cuda.ordinal)
        return bind(
            self._session,
            device,
            call.integer_inputs(),
            logits,
            self.cache_tensors(call),
            self._dtype,
        )

    def _check_placement(self) -> None:
        """Check that everything but shapes is computed on the GPU. Raises OutriderError
        "backend"."""
        if self._provider not in self._session.get_providers():  # ONNX Runtime only logs a warning
            raise OutriderError(
                "backend", "ONNX Runtime cannot start on this GPU", LIBRARIES_REMEDY
            )
        placement = getattr(self._session, "get_provider_graph_assignment_info", None)
        if placement is None:
            raise OutriderError(
                "backend", "this onnxruntime-gpu is older than 1.24", UPGRADE_REMEDY
            )
        on_cpu = {
            node.op_type
            for part in placement()
            if part.ep_name != self._provider
            for node in part.get_nodes()
        }
        if missing := sorted(on_cpu - SHAPE_OPERATORS):
            raise OutriderError(
                "backend",
                f"ONNX Runtime has no CUDA kernel for {', '.join(missing)}",
                UPGRADE_REMEDY,
            )


def unavailable_reason() -> str | None:
    """None if ONNX Runtime has its CUDA provider; otherwise the cause, in one line."""
    try:
        import onnxruntime as ort
    except ImportError:
        return "onnxruntime is not installed"
    if PROVIDER in ort.get_available_providers():
        return None
    return f"onnxruntime {ort.__version__} has no {PROVIDER}; that is part of onnxruntime-gpu"
