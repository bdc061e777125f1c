"""TensorRT without a GPU: contexts that check their inputs, and fakes in place of kernels.

It has only names that the real module has: `test_trt_engine.py` checks each against TensorRT-RTX.
"""

from __future__ import annotations

import ctypes
import json
from enum import IntEnum
from typing import Any

import numpy as np
from cuda_standin import STREAM, FakeDriver
from fakes import FakeEngine

from runtime.backends.engine import Ids


class Strategy(IntEnum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class Specialization(IntEnum):
    LAZY, EAGER, NONE = range(3)


class GraphStrategy(IntEnum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class Validity(IntEnum):
    VALID, SUBOPTIMAL, INVALID = range(3)


class Diagnostics(IntEnum):
    VERSION_MISMATCH, UNSUPPORTED_CC = 1, 2


class Logger:
    ERROR, INTERNAL_ERROR, WARNING = "error", "internal", "warning"

    def __init__(self) -> None:
        self.made = True


class Config:
    cuda_graph_strategy: Any = None
    dynamic_shapes_kernel_specialization_strategy: Any = Specialization.LAZY
    strategy: Any = Strategy.STATIC

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: object) -> bool:
        self.cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy


class Context:
    """Runs with the shapes and addresses last set, and checks that they are complete."""

    def __init__(self, engine: Engine, config: Config):
        self.engine, self.config = engine, config
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile: int | None = None
        self.memory = 0
        self.runs: list[tuple[bool, object]] = []  # (captured, shapes and addresses)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        assert stream == STREAM
        self.profile = index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % 256 == 0
        self.memory = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None
        rows, tokens, outputs = self.engine.module.profiles[self.profile]
        size, (least, most) = {
            "input_ids": (shape[-1], tokens),
            "logits_index": (shape[0], outputs),
        }.get(name, (shape[0], rows))
        if not least <= size <= most:
            self.engine.module.say(f"{name}: {size} is out of profile {self.profile}")
            return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert memory % 256 == 0, f"{name} at {memory}"
        self.addresses[name] = memory
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.module.capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        module, driver = self.engine.module, self.engine.module.driver
        assert stream_handle == STREAM
        assert set(self.addresses) == set(self.engine.names), "a tensor has no address"
        assert self.memory >= self.engine.get_device_memory_size_for_profile_v2(self.profile or 0)
        if module.broken:
            module.say(module.broken)
            return False
        bindings = (dict(self.shapes), dict(self.addresses))
        captured = driver._recording is not None
        if captured:
            assert self.runs, "captured before it ran"
            assert bindings == self.runs[-1][1], "captured with other shapes or addresses"
        elif any(was for was, _ in self.runs):
            assert bindings == self.runs[-1][1], "a graph's context got other shapes or addresses"
        self.runs.append((captured, bindings))
        shapes, addresses = bindings
        driver.enqueue(stream_handle, lambda: self.engine.run(shapes, addresses))
        return True


class Engine:
    """The engine that a file represents. fake: computes its logits."""

    def __init__(self, module: FakeTensorRt, fake: FakeEngine, names: list[str]):
        self.module, self.fake, self.names = module, fake, names
        self.contexts: list[Context] = []

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    def get_tensor_name(self, i: int) -> str:
        return self.names[i]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return name.removesuffix("_out") if self.module.in_place else None

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return (1000, 3000)[index]

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, config: Config) -> Context | None:
        if self.module.no_context:
            return None
        self.contexts.append(Context(self, config))
        return self.contexts[-1]

    def run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        def ids(name: str) -> Ids:
            count = int(np.prod(shapes[name]))
            array = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(addresses[name]))
            return array.reshape(shapes[name]).copy()

        first = (addresses["key_0"] - self.module.cache_of[self]) // self.module.stride
        for name, address in addresses.items():
            if name.startswith(("key", "value")):
                assert address == addresses[name.removesuffix("_out")], "not in place"
        logits = self.fake.forward(ids("input_ids"), ids("position"), ids("logits_index"), first)
        ctypes.memmove(addresses["logits"], logits.ctypes.data, logits.nbytes)


class Runtime:
    def __init__(self, module: FakeTensorRt, logger: Any):
        assert logger.made
        module.loggers.append(logger)
        self.module = module

    def get_engine_validity(self, buffer: Any) -> tuple[Validity, int]:
        bits = self.module.invalid
        return (Validity.INVALID if bits else Validity.VALID), bits

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Engine | None:
        what = json.loads(bytes(serialized_engine))
        if "error" in what:
            self.module.say(what["error"])
            return None
        return Engine(self.module, self.module.fakes[what["fake"]], what["names"])


class FakeTensorRt:
    """The module. fakes: the engines that engine files name. profiles: (slots, tokens, outputs) of
    each, every one as (smallest, largest)."""

    __version__ = "1.2.3"
    ILogger = Logger
    ExecutionContextAllocationStrategy = Strategy
    EngineValidity = Validity
    EngineInvalidityDiagnostics = Diagnostics

    __name__ = "tensorrt"

    def __init__(self, driver: FakeDriver):
        self.driver, self.fakes = driver, dict[str, FakeEngine]()
        self.profiles: list[tuple[tuple[int, int], ...]] = []
        self.cache_of: dict[Engine, int] = {}
        self.stride = 0
        self.loggers: list[Any] = []
        self.capturable = self.in_place = True
        self.no_context, self.broken, self.invalid = False, "", 0

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self, logger)

    def say(self, message: str) -> None:
        for logger in self.loggers:
            logger.log(Logger.WARNING, "nothing to worry about")
            logger.log(Logger.ERROR, message)


class FakeTensorRtx(FakeTensorRt):
    """Adds the names that only TensorRT-RTX has."""

    DynamicShapesKernelSpecializationStrategy = Specialization
    CudaGraphStrategy = GraphStrategy
    __name__ = "tensorrt_rtx"
