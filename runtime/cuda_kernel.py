"""The sampling kernel on a GPU: liboutrider plans, this module launches.

A plan (plugins/outrider.h) holds addresses and grids alone; what varies from round to round lies in
device memory. So a captured CUDA graph replays it, and this module is needed once a shape.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import kernel
from .errors import OutriderError, first_line

FILTERS, PENALTIES, BLOCK, SHAPES = 1, 2, 4, 8  # outrider_device_sizes.flags
FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "build" / "cuda")


class Sizes(ctypes.Structure):
    """outrider_device_sizes: what a workspace and its plans are for."""

    _fields_ = (
        ("slot_count", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("vocab_size", ctypes.c_int32),
        ("draft_vocab_size", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class Plan(ctypes.Structure):
    """outrider_device_plan: launches in order, and the one parameter of all of them."""

    _fields_ = (
        ("launch_count", ctypes.c_int32),
        ("call_size", ctypes.c_int32),
        ("launches", Launch * 4),
        ("call", ctypes.c_uint64 * 64),
    )


@dataclass(frozen=True)
class DeviceLogits:
    """Logits [slots, rows, V] in device memory. address, strides: bytes. dtype: float32, float16 or
    bfloat16; rows aligned to it, and for speed to 16 bytes."""

    address: int
    slot_stride: int
    row_stride: int
    vocab_size: int
    dtype: str

    def structure(self) -> kernel.Logits:
        code = ("float32", "float16", "bfloat16").index(self.dtype)
        return kernel.Logits(self.address, self.slot_stride, self.row_stride, self.vocab_size, code)


@dataclass(frozen=True)
class Buffers:
    """Device addresses that draws and verifications share, each in outrider.h's layout.

    slots: kernel.SLOT [B]. drafts: int64 [B, width]. rows: kernel.ROW [B, width]. verdicts:
    kernel.VERDICT [B]. ratios: float64 [B, width]. workspace: `workspace_size` bytes, 256-byte-
    aligned, zeroed once. 0 where outrider.h allows NULL.
    """

    slots: int
    drafts: int
    rows: int
    verdicts: int
    ratios: int
    workspace: int


def workspace_size(sizes: Sizes, library: ctypes.CDLL | None = None) -> int:
    """Bytes of device memory; 0 for illegal sizes."""
    size: int = (library or kernel.load()).outrider_device_workspace_size(ctypes.byref(sizes))
    return size


def plan_draw(
    sizes: Sizes,
    logits: DeviceLogits,
    buffers: Buffers,
    step: int,
    *,
    uniforms: int = 0,
    kept: int = 0,
    library: ctypes.CDLL | None = None,
) -> Plan:
    """The draft's draw of one step. Raises ValueError where outrider.h forbids the arguments."""
    library, plan = library or kernel.load(), Plan()
    status = library.outrider_device_plan_draw(
        ctypes.byref(sizes), ctypes.byref(logits.structure()), buffers.slots, step, None, uniforms,
        buffers.drafts, buffers.rows, kept, buffers.verdicts, buffers.workspace,
        workspace_size(sizes, library), ctypes.byref(plan),
    )  # fmt: skip
    if status:
        raise ValueError(kernel.status_text(library, status))
    return plan


def plan_verify(
    sizes: Sizes,
    target: DeviceLogits,
    draft: DeviceLogits | None,
    buffers: Buffers,
    *,
    by_index: bool = False,
    uniforms: int = 0,
    library: ctypes.CDLL | None = None,
) -> Plan:
    """The verification of a round. by_index: a slot's draft logits are at its index, as the
    target's are, and not at its number in the round. Raises ValueError likewise."""
    library, plan = library or kernel.load(), Plan()
    rows = ctypes.byref(draft.structure()) if draft else None
    status = library.outrider_device_plan_verify(
        ctypes.byref(sizes), ctypes.byref(target.structure()), rows, int(by_index), buffers.slots,
        uniforms, buffers.drafts, buffers.rows, buffers.verdicts, buffers.ratios,
        buffers.workspace, workspace_size(sizes, library), ctypes.byref(plan),
    )  # fmt: skip
    if status:
        raise ValueError(kernel.status_text(library, status))
    return plan


def find_image(major: int, minor: int, folders: tuple[Path, ...] = FOLDERS) -> Path:
    """The kernels' machine code for a compute capability: of the same major version the highest
    minor one that is not above; else PTX, which the driver compiles. Raises "backend"."""
    for folder in folders:
        for lower in range(minor, -1, -1):
            if (path := folder / f"outrider_sm_{major}{lower}.cubin").is_file():
                return path
        images = {int(p.stem.rpartition("_")[2]): p for p in folder.glob("outrider_compute_*.ptx")}
        if fitting := [version for version in images if version <= 10 * major + minor]:
            return images[max(fitting)]
    raise OutriderError(
        "backend",
        f"the sampling kernel is not compiled for compute capability {major}.{minor}",
        "Run make cubins." if major >= 8 else "Use a GPU of compute capability 8.0 or newer.",
    )


class Device:
    """A GPU, its primary context made current, and the kernels loaded into it.

    driver: cuda.bindings.driver, or what stands in for it. Raises OutriderError("backend") where
    there is no driver, no device, or no machine code for it.
    """

    def __init__(self, ordinal: int = 0, image: Path | None = None, driver: Any = None):
        self._driver = driver or _driver()
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", ordinal)
        attribute = self._driver.CUdevice_attribute
        self.capability: tuple[int, int] = (
            self._call(
                "cuDeviceGetAttribute",
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                device,
            ),
            self._call(
                "cuDeviceGetAttribute",
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                device,
            ),
        )
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxSetCurrent", self._context)
        self.image = image or find_image(*self.capability)
        code = self.image.read_bytes()
        self._module = self._call("cuModuleLoadData", code + b"\0")  # PTX is text: it ends in 0
        self._kernels: dict[bytes, Any] = {}
        self._check_interface()

    def _check_interface(self) -> None:
        """Refuse machine code that was compiled for another plugins/outrider_device.h."""
        name = f"outrider_interface_{kernel.ABI_VERSION}".encode()
        if int(self._driver.cuModuleGetFunction(self._module, name)[0]):
            raise OutriderError(
                "backend",
                f"{self.image.name} is of another version than liboutrider",
                "Run make cubins again.",
            )

    def launch(self, plan: Plan, stream: int = 0) -> None:
        """Enqueue a plan. It may be captured into a graph; the plan may be dropped afterwards."""
        self._call("cuCtxSetCurrent", self._context)  # of this thread
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(plan) + Plan.call.offset)
        for launch in plan.launches[: plan.launch_count]:
            if launch.kernel not in self._kernels:
                self._kernels[launch.kernel] = self._call(
                    "cuModuleGetFunction", self._module, launch.kernel
                )
            self._call(
                "cuLaunchKernel", self._kernels[launch.kernel], *launch.grid, launch.block, 1, 1,
                launch.shared_bytes, stream, ctypes.addressof(parameters), 0,
            )  # fmt: skip

    # Memory, for checks and tools: the decoder's is its own.

    def allocate(self, size: int) -> int:
        """Zeroed device memory; the address."""
        address = int(self._call("cuMemAlloc", max(size, 1)))
        self._call("cuMemsetD8", address, 0, max(size, 1))
        return address

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def write(self, address: int, source: int, size: int) -> None:
        """Copy `size` bytes from a host address; waits."""
        if size:
            self._call("cuMemcpyHtoD", address, source, size)

    def read(self, target: int, address: int, size: int) -> None:
        """Copy `size` bytes to a host address, after all that was launched."""
        self._call("cuCtxSynchronize")
        if size:
            self._call("cuMemcpyDtoH", target, address, size)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *answer = getattr(self._driver, name)(*arguments)
        if int(error):
            raise OutriderError(
                "backend", f"{name} failed: {error.name}", "Check the GPU with nvidia-smi."
            )
        return answer[0] if answer else None


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise OutriderError(
            "backend", "cuda-bindings is not installed", "Install it: pip install cuda-bindings."
        ) from None
    try:
        driver.cuInit(0)
    except Exception as error:  # noqa: BLE001 - its own class where there is no driver, by version
        raise OutriderError(
            "backend", f"there is no CUDA driver ({first_line(error)})", "Install NVIDIA's driver."
        ) from None
    return driver


def unavailable() -> str | None:
    """Why nothing can be launched here, in one line; None where it can."""
    try:
        Device()
    except OutriderError as error:
        return error.cause
    return None
