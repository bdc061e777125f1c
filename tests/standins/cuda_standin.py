"""A CUDA driver without a GPU: device memory is host memory, and a launch runs the emulated kernel.

Enough of cuda.bindings.driver for runtime/backends/cuda.py and gpu/launch.py, with its conventions:
every function returns a tuple that begins with an error code. Work on a stream runs later: at any
call of the driver, some work of any stream may run, at seeded random; at the latest it runs when
the host waits. So code that reads too early may read garbage, and memory that must not change
during a copy is read late. A capture records work, and a graph repeats it.
"""

from __future__ import annotations

import ctypes
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plugins.tools.build import BuildError, build_emulated
from runtime.gpu.launch import Bookkeeping, Device, Plan
from runtime.sampling import kernel

DEFAULT, STREAM = 0, 0x5EED  # neither waits for the other
PROGRESS = 0.5  # probability, on each call, that the device has run one more piece of work
BOOKKEEPING_KERNELS = (b"outrider_begin", b"outrider_feed", b"outrider_commit")
NAMES = {
    0: "CUDA_SUCCESS",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    500: "CUDA_ERROR_NOT_FOUND",
    600: "CUDA_ERROR_NOT_READY",
    700: "CUDA_ERROR_ILLEGAL_ADDRESS",
    900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
}


class Error(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return NAMES[self]


OK = Error(0)
Work = Callable[[], object]
Status = tuple[Error]


def _always(*answer: object) -> Any:
    """A function of the driver that does nothing."""
    return staticmethod(lambda *_: (OK, *answer))


def _garbage(size: int) -> Any:
    return (ctypes.c_char * size).from_buffer(bytearray(b"\xa5" * size))


@cache
def emulation() -> ctypes.CDLL:
    """The library of plugins/cuda/emulate.cpp; skips the test where it cannot be compiled."""
    try:
        library = ctypes.CDLL(str(build_emulated(Path(__file__).parents[2] / "build" / "lib")))
    except BuildError as error:
        pytest.skip(f"the emulation cannot be built here: {error}")
    pointer = ctypes.c_void_p
    library.outrider_emulate_launch.argtypes = ctypes.c_char_p, pointer, ctypes.c_uint32, pointer
    return library


class FakeDriver:
    """memory: bytes of device memory. seed: for the timing of work.

    launched: every kernel that ran. log: operations on streams and graphs, in order.
    """

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0,
    )
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, memory: int = 1 << 28, seed: int = 0):
        self._emulation, self._memory = emulation(), memory
        self._chance = random.Random(seed)
        self.allocated: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.launched: list[tuple[str, tuple[int, int, int], int, int]] = []
        self.log: list[str] = []
        self.loaded = b""
        self.interface = f"outrider_interface_{kernel.ABI_VERSION}".encode()
        self.loaded_kernels: set[bytes] = set()
        self._queues: dict[int, list[Work]] = {DEFAULT: [], STREAM: []}
        self._recording: list[Work] | None = None
        self._invalid = False
        self.current: list[str] = []  # context stack of the only thread
        self._busy = False  # work of a stream is running

    # The device, its contexts, and the code that it runs

    cuInit = _always()
    cuDevicePrimaryCtxRetain = _always("context")

    def cuDeviceGet(self, ordinal: int) -> tuple[Error, int]:
        return OK, ordinal

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Error, int]:
        return OK, attribute  # CUdevice_attribute above maps each attribute to its value

    def cuCtxSetCurrent(self, context: str) -> Status:
        self.current = [context]
        return (OK,)

    def cuCtxPushCurrent(self, context: str) -> Status:
        self.current.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Error, str]:
        return OK, self.current.pop()

    def cuCtxSynchronize(self) -> Status:
        assert self.current[-1] == "context"
        if self._recording is not None:
            self._invalid = True
            return (Error(900),)
        for stream in self._queues:
            self.drain(stream)
        return (OK,)

    def cuModuleLoadData(self, image: bytes) -> tuple[Error, str]:
        self.loaded = image
        return OK, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Error, bytes | None]:
        known = self._emulation.outrider_emulate_has_kernel(name) or name == self.interface
        return (OK, name) if known else (Error(500), None)

    def cuFuncLoad(self, function: bytes) -> Status:
        assert self._recording is None
        self.loaded_kernels.add(function)
        return (OK,)

    def cuLaunchKernel(
        self, kernel: bytes, x: int, y: int, z: int, block: int, block_y: int, block_z: int,
        shared: int, stream: int, parameters: int, extra: int,
    ) -> Status:  # fmt: skip
        assert (block_y, block_z, extra) == (1, 1, 0)
        assert kernel in self.loaded_kernels
        bookkeeping = kernel in BOOKKEEPING_KERNELS
        size = ctypes.sizeof(Bookkeeping) if bookkeeping else Plan.call.size
        parameter = ctypes.string_at(ctypes.c_void_p.from_address(parameters).value, size)

        def work() -> None:
            self.launched.append((kernel.decode(), (x, y, z), block, stream))
            grid = (ctypes.c_uint32 * 3)(x, y, z)
            self._emulation.outrider_emulate_launch(kernel, grid, block, parameter)

        return self.enqueue(stream, work)

    # The stream

    def enqueue(self, stream: int, work: Work) -> Status:
        """Put work on a stream, as an engine's library does; a capture may be recording it."""
        if stream not in self._queues:
            work()
        elif stream == STREAM and self._recording is not None:
            self._recording.append(work)
        else:
            self._queues[stream].append(work)
            self.pass_time()
        return (OK,)

    def pass_time(self) -> None:
        """Let the device run some of the work on its streams, at random."""
        while not self._busy and self._recording is None and self._chance.random() < PROGRESS:
            waiting = [stream for stream, queue in self._queues.items() if queue]
            if not waiting:
                break
            self._step(self._chance.choice(waiting))

    def drain(self, stream: int = STREAM) -> None:
        """Run all work on the stream."""
        # The garbage collector may call this during other work, which nothing may overtake.
        while self._queues[stream] and not self._busy:
            self._step(stream)

    def drop(self) -> None:
        """Discard all work on the stream."""
        self._queues[STREAM].clear()

    def _step(self, stream: int = STREAM) -> None:
        self._busy = True
        try:
            self._queues[stream].pop(0)()
        finally:
            self._busy = False

    def _free(self, work: Work) -> Status:
        """Run `work` now, or after everything on the stream if the garbage collector calls this
        during other work."""
        if self._busy:
            self._queues[STREAM].append(work)
        else:
            work()
        return (OK,)

    def cuStreamCreate(self, flags: int) -> tuple[Error, int]:
        assert flags == 1
        return OK, STREAM

    def cuStreamSynchronize(self, stream: int) -> Status:
        if stream == STREAM:
            assert self._recording is None
            self.log.append("wait")
        self.drain(stream)
        return (OK,)

    def cuEventCreate(self, flags: int) -> tuple[Error, dict[str, int]]:
        assert flags == 2
        return OK, {"recorded": 0, "reached": 0}

    def cuEventRecord(self, event: dict[str, int], stream: int) -> Status:
        event["recorded"] += 1  # a later record replaces an earlier one
        number = event["recorded"]
        return self.enqueue(stream, lambda: event.update(reached=number))

    def cuEventSynchronize(self, event: dict[str, int]) -> Status:
        self.log.append("wait for event")
        while event["reached"] != event["recorded"]:
            self._step()
        return (OK,)

    def cuEventQuery(self, event: dict[str, int]) -> Status:
        self.pass_time()
        return (OK if event["reached"] == event["recorded"] else Error(600),)

    # Captures and graphs

    def break_capture(self) -> None:
        """Invalidate the capture, as a forbidden call does."""
        self._invalid = self._recording is not None

    def cuStreamBeginCapture(self, stream: int, mode: int) -> Status:
        assert (stream, self._recording) == (STREAM, None)
        self._recording = []
        self.log.append("capture")
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Error, list[Work] | None]:
        graph, self._recording = self._recording, None
        if self._invalid:
            self._invalid = False
            return Error(901), None
        return OK, graph

    def cuGraphGetNodes(self, graph: list[Work]) -> tuple[Error, list[object], int]:
        return OK, [], len(graph)

    def cuGraphInstantiate(self, graph: list[Work], flags: int) -> tuple[Error, list[Work]]:
        return OK, list(graph)

    def cuGraphDestroy(self, graph: list[Work]) -> Status:
        graph.clear()
        return (OK,)

    def cuGraphExecDestroy(self, graph: list[Work]) -> Status:
        return self._free(graph.clear)

    def cuGraphLaunch(self, graph: list[Work], stream: int) -> Status:
        assert graph, "an empty or destroyed graph"
        self.log.append("graph")
        for work in graph:
            self.enqueue(stream, work)
        return (OK,)

    # Memory

    def cuMemAlloc(self, size: int) -> tuple[Error, int]:
        if size > self._memory:
            return Error(2), 0
        block = _garbage(size + 256)
        address = (ctypes.addressof(block) + 255) // 256 * 256
        self.allocated[address] = block
        return OK, address

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Error, int]:
        block = _garbage(size)
        self.pinned[ctypes.addressof(block)] = block
        return OK, ctypes.addressof(block)

    def cuMemFree(self, address: int) -> Status:
        return self._free(lambda: self.allocated.pop(address))

    def cuMemFreeHost(self, address: int) -> Status:
        return self._free(lambda: self.pinned.pop(address))

    def cuMemGetInfo(self) -> tuple[Error, int, int]:
        used = sum(len(block) for block in self.allocated.values())
        return OK, self._memory - used, self._memory

    def cuMemsetD8(self, address: int, value: int, size: int) -> Status:
        """Runs on the default stream, for which STREAM does not wait."""
        return self.cuMemsetD8Async(address, value, size, DEFAULT)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> Status:
        return self.enqueue(stream, lambda: ctypes.memset(address, value, size))

    def cuMemcpyHtoD(self, target: int, source: int, size: int) -> Status:
        self.cuStreamSynchronize(0)
        ctypes.memmove(target, source, size)
        return (OK,)

    cuMemcpyDtoH = cuMemcpyHtoD

    def cuMemcpyHtoDAsync(self, address: int, source: int, size: int, stream: int) -> Status:
        """Reads page-locked memory when the copy runs; other memory now, after waiting."""
        if not self._is_pinned(source):
            self.cuStreamSynchronize(stream)
            data = ctypes.string_at(source, size)
            return self.enqueue(stream, lambda: ctypes.memmove(address, data, size))
        return self.cuMemcpyDtoDAsync(address, source, size, stream)

    def _is_pinned(self, address: int) -> bool:
        return any(at <= address < at + len(block) for at, block in self.pinned.items())

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> Status:
        return self.enqueue(stream, lambda: ctypes.memmove(target, source, size))

    def cuMemcpyDtoHAsync(self, target: int, address: int, size: int, stream: int) -> Status:
        assert self._is_pinned(target)
        return self.cuMemcpyDtoDAsync(target, address, size, stream)


def make_device(driver: FakeDriver, ordinal: int = 0) -> Device:
    """A GPU with this driver; its machine code is an empty file."""
    with tempfile.NamedTemporaryFile(prefix="outrider_sm_90", suffix=".cubin") as image:
        return Device(ordinal, Path(image.name), driver)
