"""The sampling kernel on a GPU: liboutrider makes launch plans, this module launches them.

A plan (plugins/include/outrider.h) holds only addresses and grids; whatever varies from round to
round is in device memory. So a captured CUDA graph can replay it, and this module runs only once
per shape.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.cuda import Cuda
from ..files.errors import OutriderError
from ..sampling import kernel

FILTERS, PENALTIES, BLOCK, SHAPES, COUPLED = 1, 2, 4, 8, 16  # outrider_device_sizes.flags
KERNELS = tuple(
    b"outrider_" + name
    for name in (
        b"mark", b"verify_scan", b"verify_scan_general", b"verify_filter", b"verify_mass",
        b"verify_couple", b"verify_rest", b"verify_rest_general", b"draw_scan",
        b"draw_scan_general", b"draw_filter", b"draw_mass", b"draw_couple", b"begin", b"feed",
        b"commit",
    )
)  # fmt: skip
IMAGE_FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2] / "build" / "cuda")


class KernelSizes(ctypes.Structure):
    """outrider_device_sizes: the sizes that a workspace and its plans are made for."""

    _fields_ = tuple((name, ctypes.c_int32) for name in (
        "slot_count", "width", "vocab_size", "draft_vocab_size", "flags", "reserved",
    ))  # fmt: skip


class Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32),
    )


class Plan(ctypes.Structure):
    """outrider_device_plan: launches in order, and the one parameter that all of them take."""

    _fields_ = (
        ("launch_count", ctypes.c_int32),
        ("launches", Launch * 6),
        ("call", ctypes.c_uint64 * 64),
    )


class Bookkeeping(ctypes.Structure):
    """outrider_bookkeeping: the memory of the kernels between the models' calls."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "sequences", "slots", "turns", "drafts", "verdicts", "draft_ids", "draft_position",
            "step_ids", "step_position", "target_ids", "target_position", "clock",
        )),
        *((name, ctypes.c_int32) for name in ("slot_count", "width", "step", "draft_vocab_size")),
    )  # fmt: skip


# outrider_sequence
SEQUENCE = np.dtype(
    [
        ("tokens", "u8"), ("draft_tokens", "u8"), ("ends", "u8"), ("end_count", "i4"),
        ("length", "i4"), ("max_length", "i4"), ("draft_max_length", "i4"),
        ("unsuppressed", "i4"), ("ended", "i4"),
    ],
    align=True,
)  # fmt: skip


@dataclass(frozen=True)
class KernelBuffers:
    """Device addresses that draws and verifications share, each in the layout of outrider.h.

    slots: kernel.SLOT [B]. drafts: int64 [B, width]. rows: kernel.ROW [B, width]. verdicts:
    kernel.VERDICT [B]. ratios: float64 [B, width]. workspace: `workspace_size` bytes, 256-byte-
    aligned, zeroed once. An address may be 0 where outrider.h allows NULL.
    """

    slots: int
    drafts: int
    rows: int
    verdicts: int
    ratios: int
    workspace: int


def workspace_size(sizes: KernelSizes, library: ctypes.CDLL | None = None) -> int:
    """Size of the workspace in bytes of device memory; 0 for illegal sizes."""
    size: int = (library or kernel.load()).outrider_device_workspace_size(ctypes.byref(sizes))
    return size


def plan_draw(
    sizes: KernelSizes,
    logits: kernel.Logits,
    buffers: KernelBuffers,
    step: int,
    *,
    uniforms: int = 0,
    library: ctypes.CDLL | None = None,
) -> Plan:
    """Plan the draw of one draft step. logits: device addresses, with rows aligned to their type
    or, for speed, to 16 bytes. Raises ValueError if outrider.h forbids the arguments."""
    return _plan(
        "outrider_device_plan_draw", sizes, library, ctypes.byref(logits), buffers.slots, step,
        uniforms, buffers.drafts, buffers.rows, buffers.verdicts, buffers.workspace,
    )  # fmt: skip


def plan_verify(
    sizes: KernelSizes,
    target: kernel.Logits,
    draft: kernel.Logits | None,
    buffers: KernelBuffers,
    *,
    uniforms: int = 0,
    library: ctypes.CDLL | None = None,
) -> Plan:
    """Plan the verification of a round. Raises ValueError if outrider.h forbids the arguments."""
    return _plan(
        "outrider_device_plan_verify", sizes, library, ctypes.byref(target),
        ctypes.byref(draft) if draft else None, buffers.slots, uniforms, buffers.drafts,
        buffers.rows, buffers.verdicts, buffers.ratios, buffers.workspace,
    )  # fmt: skip


def _plan(name: str, sizes: KernelSizes, library: ctypes.CDLL | None, *arguments: Any) -> Plan:
    library, plan = library or kernel.load(), Plan()
    make_plan = getattr(library, name)
    size = workspace_size(sizes, library)
    if status := make_plan(ctypes.byref(sizes), *arguments, size, ctypes.byref(plan)):
        raise ValueError(kernel.status_text(library, status))
    return plan


def find_image(major: int, minor: int, folders: tuple[Path, ...] = IMAGE_FOLDERS) -> Path:
    """The file with the kernels' code for a compute capability: machine code of the same major
    version and the highest minor version that is not above it, otherwise PTX, which the driver
    compiles. Raises OutriderError "backend"."""
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


class Device(Cuda):
    """A `Cuda` with the kernels loaded. Raises OutriderError("backend") also if there is no code
    for this GPU."""

    def __init__(self, ordinal: int = 0, image: Path | None = None, driver: Any = None):
        super().__init__(ordinal, driver)
        self.image = image or find_image(*self.capability)
        code = self.image.read_bytes()
        self._module = self._call("cuModuleLoadData", code + b"\0")  # PTX is zero-terminated text
        self._check_interface()
        # Load the kernels now: otherwise their first launch, inside a capture, would load them.
        self._kernels = {
            name: self._call("cuModuleGetFunction", self._module, name) for name in KERNELS
        }
        for function in self._kernels.values():
            self._call("cuFuncLoad", function)

    def _check_interface(self) -> None:
        """Refuse code that was compiled for another version of plugins/core/outrider_device.h."""
        name = f"outrider_interface_{kernel.ABI_VERSION}".encode()
        if int(self._driver.cuModuleGetFunction(self._module, name)[0]):
            cause = f"{self.image.name} was compiled for another version of liboutrider"
            raise OutriderError("backend", cause, "Run make cubins again.")

    def launch(self, plan: Plan, stream: int = 0) -> None:
        """Enqueue a plan. This may be captured in a graph; the plan may be dropped afterwards."""
        self.make_current()
        parameter = ctypes.addressof(plan) + Plan.call.offset
        for launch in plan.launches[: plan.launch_count]:
            self._launch(launch.kernel, tuple(launch.grid), launch.block, parameter, stream)

    def launch_bookkeeping(self, kernel: str, data: Bookkeeping, stream: int) -> None:
        """Enqueue outrider_begin, _feed or _commit. May be captured too."""
        self.make_current()
        block = min(512, -(-data.slot_count // 32) * 32)
        self._launch(kernel.encode(), (1, 1, 1), block, ctypes.addressof(data), stream)

    def _launch(
        self, kernel: bytes, grid: tuple[int, ...], block: int, parameter: int, stream: int
    ) -> None:
        """Launch a kernel. parameter: the address of its only parameter, passed by value."""
        assert kernel in self._kernels, kernel
        parameters = (ctypes.c_void_p * 1)(parameter)
        self._call(
            "cuLaunchKernel", self._kernels[kernel], *grid, block, 1, 1, 0, stream,
            ctypes.addressof(parameters), 0,
        )  # fmt: skip
