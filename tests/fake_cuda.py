"""A CUDA driver without a GPU: device memory is host memory, and a launch runs the emulated kernel.

Enough of cuda.bindings.driver for runtime/cuda_kernel.py, with its conventions: every function
returns a tuple that begins with an error code.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from runtime import kernel


class Error(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return {0: "CUDA_SUCCESS", 2: "CUDA_ERROR_OUT_OF_MEMORY", 500: "CUDA_ERROR_NOT_FOUND"}[self]


class FakeDriver:
    """emulation: the library of plugins/emulate.cpp. memory: bytes that the device has."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
    )

    def __init__(
        self, emulation: ctypes.CDLL, capability: tuple[int, int] = (9, 0), memory: int = 1 << 28
    ):
        self._emulation, self._memory = emulation, memory
        pointer = ctypes.c_void_p
        emulation.outrider_emulate_launch.argtypes = (
            ctypes.c_char_p, pointer, ctypes.c_uint32, pointer,
        )  # fmt: skip
        self._capability = dict(zip(("major", "minor"), capability, strict=True))
        self.allocated: dict[int, Any] = {}
        self.launched: list[tuple[str, tuple[int, int, int], int, int]] = []
        self.loaded = b""
        self.interface = f"outrider_interface_{kernel.ABI_VERSION}".encode()

    def cuInit(self, flags: int) -> tuple[Error]:
        return (Error(0),)

    def cuDeviceGet(self, ordinal: int) -> tuple[Error, int]:
        return Error(0), ordinal

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Error, int]:
        return Error(0), self._capability[attribute]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Error, str]:
        return Error(0), "context"

    def cuCtxSetCurrent(self, context: str) -> tuple[Error]:
        assert context == "context"
        return (Error(0),)

    def cuCtxSynchronize(self) -> tuple[Error]:
        return (Error(0),)

    def cuModuleLoadData(self, image: bytes) -> tuple[Error, str]:
        self.loaded = image
        return Error(0), "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Error, bytes | None]:
        known = self._emulation.outrider_emulate_knows(name) or name == self.interface
        return (Error(0), name) if known else (Error(500), None)

    def cuLaunchKernel(
        self, kernel: bytes, x: int, y: int, z: int, block: int, block_y: int, block_z: int,
        shared: int, stream: int, parameters: int, extra: int,
    ) -> tuple[Error]:  # fmt: skip
        assert (block_y, block_z, extra) == (1, 1, 0)
        self.launched.append((kernel.decode(), (x, y, z), block, stream))
        call = ctypes.c_void_p.from_address(parameters).value
        self._emulation.outrider_emulate_launch(kernel, (ctypes.c_uint32 * 3)(x, y, z), block, call)
        return (Error(0),)

    def cuMemAlloc(self, size: int) -> tuple[Error, int]:
        if size > self._memory:
            return Error(2), 0
        block = (ctypes.c_char * (size + 256)).from_buffer(bytearray(b"\xa5" * (size + 256)))
        address = (ctypes.addressof(block) + 255) // 256 * 256
        self.allocated[address] = block
        return Error(0), address

    def cuMemFree(self, address: int) -> tuple[Error]:
        del self.allocated[address]
        return (Error(0),)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Error]:
        ctypes.memset(address, value, size)
        return (Error(0),)

    def cuMemcpyHtoD(self, address: int, source: int, size: int) -> tuple[Error]:
        ctypes.memmove(address, source, size)
        return (Error(0),)

    def cuMemcpyDtoH(self, target: int, address: int, size: int) -> tuple[Error]:
        ctypes.memmove(target, address, size)
        return (Error(0),)
