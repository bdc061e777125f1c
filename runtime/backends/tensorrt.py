"""TensorRT and TensorRT-RTX: the same code for `tensorrt` and `tensorrt_rtx`, which share an API.

Every call in a CUDA graph has an execution context of its own: on a shared context, all replays
would read the shapes and addresses that were set last. All contexts of an engine use the same
working memory, since calls run one after the other, on one stream.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from ..files.errors import OutriderError, importing
from ..files.graphs import GraphFacts
from ..files.manifest import EngineFacts
from .cuda import CaptureError
from .device import DeviceCall, DeviceEngine
from .engine import cache_shapes

ALIGNMENT = 256  # bytes, of every tensor (NvInferRuntime.h, setTensorAddress)
PRODUCTS = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX"}  # by the module's name


class TensorRtEngine(DeviceEngine):
    """See `DeviceEngine`. module: "tensorrt" or "tensorrt_rtx", or a stand-in module."""

    alignment = ALIGNMENT
    module: Any = "tensorrt"

    def _open(self, folder: Path, facts: GraphFacts, engine: EngineFacts | None) -> None:
        assert engine is not None
        by_name = isinstance(self.module, str)
        self._trt: Any = load_library(self.module) if by_name else self.module
        self._library = PRODUCTS[self._trt.__name__]
        self._profiles = engine.profiles
        if self.slots > (max_slots := max(profile.slots[-1] for profile in engine.profiles)):
            raise OutriderError(
                "option",
                f"slots={self.slots} is over the {max_slots} that the bundle was built for",
                f"Use {max_slots} or fewer, or build with SLOTS={self.slots}.",
            )
        self._logger = _logger(self._trt)
        self._runtime = self._trt.Runtime(self._logger)
        self._engine = self._load(folder / engine.file)
        self._check_tensors(folder / engine.file, facts)
        sizes = map(self._engine.get_device_memory_size_for_profile_v2, range(len(engine.profiles)))
        self.activations = max(sizes)
        self._scratch = self.cuda.allocate(self.activations)
        # Copies of ids that are read from the middle of a text, at any multiple of 8 bytes.
        self._staging = {
            name: self.cuda.allocate(8 * size)
            for name, size in (
                ("input_ids", self.slots * max(self.chunk, self._max_outputs)),
                ("position", self.slots),
                ("logits_index", self._max_outputs),
            )
        }
        # Kernels that TensorRT-RTX compiled, shared by all contexts.
        self._runtime_cache: Any = None
        self._contexts: dict[object, Any] = {}  # by (graph, call); outside of graphs by profile
        self._capturing = False

    def enqueue(self, call: DeviceCall, graph: object = None) -> None:
        key = (graph, call) if graph is not None else self._profile(call)
        context = self._contexts.get(key)
        if context is None or graph is None:
            context = self._contexts[key] = self._bind(context, call, for_graph=graph is not None)
        for name, address, shape in call.integer_inputs():
            if address % ALIGNMENT:
                self.cuda.copy(self._staging[name], address, 8 * prod(shape), self.stream)
        is_capturable = getattr(context, "is_stream_capturable", None)  # only TensorRT-RTX has this
        if self._capturing and is_capturable is not None and not is_capturable(self.stream):
            raise CaptureError(f"{self._library} cannot capture calls of {call.tokens} tokens")
        if not context.execute_async_v3(self.stream):
            raise self._call_error(call, self._take_error())

    @contextmanager
    def capturing(self) -> Iterator[None]:
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def _profile(self, call: DeviceCall) -> int:
        """The index of the first profile that accepts the call."""
        sizes = call.batch, call.tokens, call.outputs
        for i, profile in enumerate(self._profiles):
            ranges = profile.slots, profile.tokens, profile.outputs
            if all(r[0] <= size <= r[-1] for size, r in zip(sizes, ranges, strict=True)):
                return i
        raise ValueError(f"no profile takes {call}")

    def _bind(self, context: Any, call: DeviceCall, *, for_graph: bool) -> Any:
        """Set the call's shapes and addresses on a context; None makes a new one with the call's
        profile."""
        index = self._profile(call)
        if context is None:
            context = self._context(index, for_graph)
        caches = list(self.cache_tensors(call))
        tensors = [
            (name, self._staging[name] if address % ALIGNMENT else address, shape)
            for name, address, shape in call.integer_inputs()
        ] + caches
        outputs = [("logits", call.logits)]
        outputs += [(f"{name}_out", address) for name, address, _ in caches]  # in place
        accepted = all(
            context.set_input_shape(name, shape) and context.set_tensor_address(name, address)
            for name, address, shape in tensors
        ) and all(context.set_tensor_address(name, address) for name, address in outputs)
        if not accepted:
            raise self._call_error(call, self._take_error())
        return context

    def _context(self, profile: int, for_graph: bool) -> Any:
        trt, engine = self._trt, self._engine
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if hasattr(trt, "CudaGraphStrategy"):  # TensorRT-RTX
            config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED  # ours has all engines
            if self._runtime_cache is None:
                self._runtime_cache = config.create_runtime_cache()
            config.set_runtime_cache(self._runtime_cache)
            if for_graph:  # a capture must get the kernel for this shape, not the generic fallback
                config.dynamic_shapes_kernel_specialization_strategy = (
                    trt.DynamicShapesKernelSpecializationStrategy.EAGER
                )
        context = engine.create_execution_context(config)
        if context is None:
            raise OutriderError(
                "memory",
                f"{self._library} cannot make a context: {self._take_error()}",
                "Use fewer SLOTS or a smaller MAX_LEN, or free the GPU's memory.",
            )
        context.set_device_memory(self._scratch, self.activations)
        if not context.set_optimization_profile_async(profile, self.stream):
            cause = f"{self._library} refuses profile {profile}: {self._take_error()}"
            raise OutriderError("backend", cause, "Build the bundle again.")
        # The switch may copy, from temporary memory of the library.
        self.cuda.wait_for_stream(self.stream)
        return context

    def _load(self, path: Path) -> Any:
        """Load the engine of a file; the library copies it to the GPU from the mapping."""
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._check_validity(path, mapped)
            engine = self._runtime.deserialize_cuda_engine(mapped)
        finally:
            mapped.close()
        if engine is None:
            raise self._load_error(path, self._take_error())
        return engine

    def _check_validity(self, path: Path, code: mmap.mmap) -> None:
        """Let TensorRT-RTX check a file before it is loaded."""
        if not hasattr(self._runtime, "get_engine_validity"):
            return
        validity, reasons = self._runtime.get_engine_validity(code)
        if validity != self._trt.EngineValidity.INVALID:
            return
        bits = self._trt.EngineInvalidityDiagnostics.__members__
        names = [name for name, bit in bits.items() if int(reasons) & int(bit)]
        raise self._load_error(path, ", ".join(names) or self._take_error())

    def _load_error(self, path: Path, cause: str) -> OutriderError:
        cause = f"{self._library} {self._trt.__version__} cannot load {path}: {cause}"
        return OutriderError("backend", cause, "Build the bundle again, for this GPU.")

    def _check_tensors(self, path: Path, facts: GraphFacts) -> None:
        """Check that the engine is one of ours and updates its caches in place."""
        engine = self._engine
        names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        caches = cache_shapes(facts).keys()
        expected = {"input_ids", "position", "logits_index", "logits", *caches}
        if unexpected := names ^ (expected | {f"{name}_out" for name in caches}):
            raise self._load_error(
                path, f"it was built from another graph (tensor {min(unexpected)})"
            )
        for name in sorted(caches):
            if engine.get_aliased_input_tensor(f"{name}_out") != name:
                raise self._load_error(path, f"it does not update {name} in place")

    def _take_error(self) -> str:
        """The first error logged since the last call; the library reports reasons only in its
        log."""
        errors, self._logger.errors = self._logger.errors, []
        return errors[0].strip().partition("\n")[0][:200] if errors else "no reason was given"


class TensorRtRtxEngine(TensorRtEngine):
    module = "tensorrt_rtx"


def load_library(module: str) -> Any:
    """Import `tensorrt` or `tensorrt_rtx`. Raises OutriderError "backend"."""
    remedy = (
        "Install it: pip install tensorrt-rtx."
        if module == "tensorrt_rtx"
        else "Install TensorRT 10.16 or newer and its Python module."
    )
    with importing(module, remedy, PRODUCTS[module]):
        return importlib.import_module(module)


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()
