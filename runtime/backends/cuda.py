"""A GPU through the CUDA driver: memory, streams, graphs. Nothing here knows what runs on it.

This uses cuda.bindings.driver, which is the C interface name for name: stable across versions, and
small enough for the tests to replace all of it. (`cuda.core` cannot launch a kernel whose parameter
is a structure passed by value.)
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError, first_line, importing

Array = npt.NDArray[Any]
# Pieces of page-locked memory, and bytes of each: one holds a prompt of 2,000 tokens.
STAGING_PIECES, PIECE_BYTES = 32, 1 << 14

# During a capture no thread may wait for its context ("Stream management" of the CUDA driver's
# documentation). So the garbage collector pauses, and what other threads drop is released later.
_captures: list[bool] = []  # those under way: whether the collector was enabled before
_deferred_releases: list[Callable[[], None]] = []


class CaptureError(Exception):
    """Work that cannot be captured in a CUDA graph. The message is one line."""


@dataclass(frozen=True)
class Graph:
    """A graph that can be launched. nodes: how many kernels, copies and fills it has."""

    executable: Any
    nodes: int


class Cuda:
    """A GPU, with its primary context made current.

    driver: cuda.bindings.driver, or a stand-in for it. Raises OutriderError("backend") if there is
    no driver or no device, and whenever a call fails ("memory" if memory runs out).
    """

    def __init__(self, ordinal: int = 0, driver: Any = None):
        self._driver = driver or _driver()
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", ordinal)
        self.ordinal = ordinal
        attributes, name = self._driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
        self.capability: tuple[int, int] = (
            self._call("cuDeviceGetAttribute", getattr(attributes, f"{name}_MAJOR"), device),
            self._call("cuDeviceGetAttribute", getattr(attributes, f"{name}_MINOR"), device),
        )
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        self.make_current()
        # Resources to release, newest first, when this object is garbage collected.
        self._owned: list[tuple[str, Any]] = []
        self._staging: deque[tuple[npt.NDArray[np.uint8], Any]] = deque()  # oldest first
        weakref.finalize(self, _release, self._driver, self._context, self._owned)

    def make_current(self) -> None:
        """Make the context current in this thread."""
        self._call("cuCtxSetCurrent", self._context)

    # Memory

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._call("cuMemGetInfo")
        return free, total

    def allocate(self, size: int) -> int:
        """Allocate zeroed device memory that lives as long as this object. Returns its address."""
        address = int(self._call("cuMemAlloc", max(size, 1)))
        self._owned.append(("cuMemFree", address))
        self._call("cuMemsetD8", address, 0, max(size, 1))
        self._call("cuStreamSynchronize", 0)  # our streams do not wait for the default one
        return address

    def allocate_pinned(self, size: int) -> npt.NDArray[np.uint8]:
        """Page-locked host memory, which lives as long as this object. The device can address it,
        and only into such memory can it copy without making the host wait."""
        address = int(self._call("cuMemHostAlloc", max(size, 1), 0))
        self._owned.append(("cuMemFreeHost", address))
        return np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(address))

    def read(self, target: int, address: int, size: int) -> None:
        """Copy `size` bytes to a host address. The caller has waited for what writes them, unless
        that runs on the default stream."""
        if size:
            self._call("cuMemcpyDtoH", target, address, size)

    def upload(self, address: int, array: Array, stream: int) -> None:
        """Copy a contiguous array to the device, in the stream's order. The array may change as
        soon as this returns.

        The copy goes through page-locked memory: a copy from other memory may wait for everything
        on the stream, including the round that was launched ahead.
        """
        assert array.flags.c_contiguous
        data = array.reshape(-1).view(np.uint8)
        for begin in range(0, len(data), PIECE_BYTES):
            part = data[begin : begin + PIECE_BYTES]
            staged, copied = self._next_staging_piece()
            staged[: len(part)] = part
            self._call("cuMemcpyHtoDAsync", address + begin, staged.ctypes.data, len(part), stream)
            self.record(copied, stream)

    def _next_staging_piece(self) -> tuple[npt.NDArray[np.uint8], Any]:
        """A piece of page-locked memory that no copy still reads, and the event to record after
        its next copy."""
        if not self._staging:
            memory = self.allocate_pinned(STAGING_PIECES * PIECE_BYTES).reshape(
                STAGING_PIECES, PIECE_BYTES
            )
            self._staging.extend((piece, self.create_event()) for piece in memory)
        staged, copied = self._staging[0]
        self._staging.rotate(-1)
        if not self.is_event_done(copied):
            self.wait_for_event(copied)
        return staged, copied

    def zero(self, address: int, size: int, stream: int) -> None:
        """Fill device memory with zeros, in the stream's order."""
        self._call("cuMemsetD8Async", address, 0, size, stream)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy from device memory to device memory, in the stream's order."""
        self._call("cuMemcpyDtoDAsync", target, source, size, stream)

    def download(self, target: Array, address: int, stream: int) -> None:
        """Copy from the device into `target` (by `allocate_pinned`), in the stream's order."""
        self._call("cuMemcpyDtoHAsync", target.ctypes.data, address, target.nbytes, stream)

    # Streams, events, graphs

    def create_stream(self) -> int:
        """A new stream that does not wait for the default one."""
        return int(self._call("cuStreamCreate", 1))  # CU_STREAM_NON_BLOCKING

    def wait_for_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> Any:
        return self._call("cuEventCreate", 2)  # CU_EVENT_DISABLE_TIMING

    def record(self, event: Any, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait_for_event(self, event: Any) -> None:
        self._call("cuEventSynchronize", event)

    def is_event_done(self, event: Any) -> bool:
        """Whether the work before the event's last record has ended; True if the event was never
        recorded."""
        status = self._driver.cuEventQuery(event)[0]
        if status.name == "CUDA_ERROR_NOT_READY":
            return False
        self._check("cuEventQuery", status)
        return True

    def capture(self, enqueue: Callable[[], None], stream: int) -> Graph:
        """Capture what `enqueue` puts on the stream as a graph that can be launched. Nothing runs.

        Raises CaptureError; the stream is then as before.
        """
        with _capturing():
            mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            (status,) = self._driver.cuStreamBeginCapture(stream, mode)
            if int(status):
                raise CaptureError(f"cuStreamBeginCapture: {status.name}")
            failure: BaseException | None = None
            try:
                enqueue()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the capture must be ended
                failure = error
            status, graph = self._driver.cuStreamEndCapture(stream)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failure is not None:
            raise CaptureError(first_line(failure)) from failure
        if int(status):
            raise CaptureError(f"cuStreamEndCapture: {status.name}")
        _, nodes = self._call("cuGraphGetNodes", graph)
        status, executable = self._driver.cuGraphInstantiate(graph, 0)
        self._call("cuGraphDestroy", graph)
        if int(status):
            raise CaptureError(f"cuGraphInstantiate: {status.name}")
        self._owned.append(("cuGraphExecDestroy", executable))
        return Graph(executable, nodes)

    def replay(self, graph: Graph, stream: int) -> None:
        self._call("cuGraphLaunch", graph.executable, stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *result = getattr(self._driver, name)(*arguments)
        self._check(name, error, *arguments)
        return result[0] if len(result) == 1 else tuple(result) or None

    def _check(self, name: str, error: Any, *arguments: Any) -> None:
        if not int(error):
            return
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise OutriderError(
                "memory",
                f"the GPU has no room for {arguments[0]:,} more bytes"
                if name == "cuMemAlloc"
                else f"the GPU is out of memory ({name})",
                "Use fewer SLOTS or a smaller MAX_LEN, or free its memory.",
            )
        raise OutriderError(
            "backend", f"{name} failed: {error.name}", "Check the GPU with nvidia-smi."
        )


@contextmanager
def _capturing() -> Iterator[None]:
    _captures.append(gc.isenabled())
    gc.disable()  # destroying a library's objects may wait for the context too
    try:
        yield
    finally:
        gc_was_enabled = _captures.pop()  # the first capture's value stays until the last one ends
        if not _captures:
            if gc_was_enabled:
                gc.enable()
            with suppress(IndexError):  # another thread may have emptied it
                while _deferred_releases:
                    _deferred_releases.pop()()


def _release(driver: Any, context: Any, owned: list[tuple[str, Any]]) -> None:
    """Release resources, once all launched work has ended. Errors are ignored: nobody is left to
    handle them."""
    if _captures:
        _deferred_releases.append(partial(_release, driver, context, owned))
        return
    if int(driver.cuCtxPushCurrent(context)[0]):  # the interrupted code may use another context
        return
    driver.cuCtxSynchronize()
    for name, what in reversed(owned):
        getattr(driver, name)(what)
    driver.cuCtxPopCurrent()


def _driver() -> Any:
    remedy = "Install the extra outrider[cuda] on a machine with an NVIDIA GPU and its driver."
    with importing("cuda.bindings", remedy, "cuda-bindings"):
        from cuda.bindings import driver
    try:
        driver.cuInit(0)
    except Exception as error:  # noqa: BLE001 - without a driver, a class that varies by version
        raise OutriderError(
            "backend", f"there is no CUDA driver ({first_line(error)})", "Install NVIDIA's driver."
        ) from None
    return driver
