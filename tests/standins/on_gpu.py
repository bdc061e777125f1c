"""liboutrider's C interface with its draws and verifications on the GPU, for checks.

Functions that take host memory take it here too: each call copies in, launches and copies out. So
the tests that check the CPU library also check the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.gpu import launch as cuda_kernel
from runtime.gpu.launch import Device, KernelBuffers, KernelSizes, Plan
from runtime.sampling import kernel

Array = npt.NDArray[Any]
OK, BAD_PARAMETER, SLOT_FAILED = 0, 2, 5


def flags_of(slots: Array) -> int:
    """The plan flags that these slots, [B] of kernel.SLOT, need."""
    needs = {
        cuda_kernel.FILTERS: (slots["top_k"] != 0) | (slots["top_p"] < 1) | (slots["min_p"] > 0),
        cuda_kernel.PENALTIES: (slots["repetition_penalty"] != 1) | (slots["suppress_rows"] > 0),
        cuda_kernel.BLOCK: slots["rule"] == kernel.RULES["block"],
        cuda_kernel.COUPLED: slots["rule"] == kernel.RULES["coupled"],
    }
    return sum(flag for flag, needed in needs.items() if needed.any())


class OnGpu:
    """Replaces `kernel.load()`: all functions but draw and verify are the CPU library's. added,
    removed: flags set or cleared in plans, beside those that the slots need."""

    def __init__(self, device: Device, library: ctypes.CDLL):
        self._device, self._library = device, library
        self._workspaces: dict[bytes, int] = {}
        self.added = self.removed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def outrider_draw(
        self, logits: int, slots: int, count: int, width: int, step: int, uniforms: int | None,
        drafts: int, rows: int, verdicts: int, *_: Any,
    ) -> int:  # fmt: skip
        if count == 0:
            return OK
        with self._memory() as memory:
            given = kernel.Logits.from_address(logits)
            places = memory.slots(slots, count)
            at, places["index"] = np.unique(places["index"], return_inverse=True)
            device_logits = memory.logits(given, at, 1)
            sizes = KernelSizes(count, width, 0, given.vocab_size, self._flags_of(places), 0)
            buffers = memory.buffers(sizes, places, drafts, rows, self._workspace(sizes))
            device_uniforms = memory.copied(uniforms, 8 * count * width) if uniforms else 0
            plan = cuda_kernel.plan_draw(
                sizes, device_logits, buffers, step, uniforms=device_uniforms,
                library=self._library,
            )  # fmt: skip
            status = self._run(plan, buffers, verdicts, count)
            self._device.read(drafts, buffers.drafts, 8 * count * width)
            self._device.read(rows, buffers.rows, kernel.ROW.itemsize * count * width)
        return status

    def outrider_verify(
        self, target: int, draft: int | None, slots: int, count: int, width: int,
        uniforms: int | None, drafts: int, rows: int | None, verdicts: int, ratios: int, *_: Any,
    ) -> int:  # fmt: skip
        if count == 0:
            return OK
        with self._memory() as memory:
            given = kernel.Logits.from_address(target)
            places = memory.slots(slots, count)
            # Slots may share logits, as in a test that draws thousands of times.
            at, places["index"] = np.unique(places["index"], return_inverse=True)
            most = max(0, int(places["gamma"].max()))
            device_target = memory.logits(given, at, most + 1)
            device_draft = None
            given_draft = kernel.Logits.from_address(draft) if draft else None
            if given_draft is not None and given_draft.data:
                device_draft = memory.logits(given_draft, at, most)
            flags = self._flags_of(places)
            if device_draft is not None and not rows:
                flags |= cuda_kernel.SHAPES
            sizes = KernelSizes(
                count, width, given.vocab_size,
                device_draft.vocab_size if device_draft else 0, flags, 0,
            )  # fmt: skip
            buffers = memory.buffers(sizes, places, drafts, rows, self._workspace(sizes))
            device_uniforms = memory.copied(uniforms, 8 * count * (width + 1)) if uniforms else 0
            plan = cuda_kernel.plan_verify(
                sizes, device_target, device_draft, buffers, uniforms=device_uniforms,
                library=self._library,
            )  # fmt: skip
            status = self._run(plan, buffers, verdicts, count)
            self._device.read(ratios, buffers.ratios, 8 * count * width)
        return status

    def _flags_of(self, slots: Array) -> int:
        return (flags_of(slots) | self.added) & ~self.removed

    def _workspace(self, sizes: KernelSizes) -> int:
        """One workspace per set of sizes, never cleared. Kernels must not read anything but its
        counters before writing it, so the rest starts as garbage."""
        key = bytes(sizes)
        if key not in self._workspaces:
            size = cuda_kernel.workspace_size(sizes, self._library)
            content = np.full(size, 0xA5, np.uint8)
            content[: 4 * sizes.slot_count] = 0
            self._workspaces[key] = self._device.allocate(size)
            self._device._call("cuMemcpyHtoD", self._workspaces[key], content.ctypes.data, size)
        return self._workspaces[key]

    def _run(self, plan: Plan, buffers: KernelBuffers, verdicts: int, count: int) -> int:
        self._device.launch(plan)
        size = kernel.VERDICT.itemsize
        self._device.read(verdicts, buffers.verdicts, size * count)
        statuses = _view(verdicts, kernel.VERDICT, count)["status"]
        if (statuses == BAD_PARAMETER).any():
            return BAD_PARAMETER
        return SLOT_FAILED if statuses.any() else OK

    @contextmanager
    def _memory(self) -> Iterator[_Memory]:
        memory = _Memory(self._device)
        try:
            yield memory
        finally:
            memory.free()


class _Memory:
    """The device memory of one call, and the host memory copied into it."""

    def __init__(self, device: Device):
        self._device = device
        self._taken: list[int] = []

    def free(self) -> None:
        for address in self._taken:
            self._device._owned.remove(("cuMemFree", address))
            self._device._call("cuMemFree", address)

    def zeroed(self, size: int) -> int:
        self._taken.append(self._device.allocate(size))
        return self._taken[-1]

    def copied(self, source: int, size: int) -> int:
        address = self.zeroed(size)
        if size:
            self._device._call("cuMemcpyHtoD", address, source, size)
        return address

    def slots(self, address: int, count: int) -> Array:
        """The slots, numbered from 0, with their ids in device memory."""
        slots = _view(address, kernel.SLOT, count).copy()
        for slot in slots:
            for name in ("context", "suppress"):
                if length := int(slot[f"{name}_length"]):
                    slot[name] = self.copied(int(slot[name]), 8 * length)
        return slots

    def logits(self, given: kernel.Logits, indices: Iterable[int], count: int) -> kernel.Logits:
        """`count` rows of each of these slots, contiguous."""
        size = given.vocab_size * (4 if given.dtype == 0 else 2)
        sources = [
            given.data + int(index) * given.slot_stride + i * given.row_stride
            for index in indices
            for i in range(count)
        ]
        together = np.empty(len(sources) * size, np.uint8)  # one copy to the device
        for at, source in enumerate(sources):
            ctypes.memmove(together.ctypes.data + at * size, source, size)
        address = self.copied(together.ctypes.data, together.nbytes)
        return kernel.Logits(address, count * size, size, given.vocab_size, given.dtype)

    def buffers(
        self, sizes: KernelSizes, slots: Array, drafts: int, rows: int | None, workspace: int
    ) -> KernelBuffers:
        count, width = sizes.slot_count, sizes.width
        row_size = kernel.ROW.itemsize * count * width
        return KernelBuffers(
            slots=self.copied(slots.ctypes.data, slots.nbytes),
            drafts=self.copied(drafts, 8 * count * width),
            rows=self.copied(rows, row_size) if rows else 0,
            verdicts=self.zeroed(kernel.VERDICT.itemsize * count),
            ratios=self.zeroed(8 * count * width),
            workspace=workspace,
        )


def _view(address: int, dtype: np.dtype[Any], count: int) -> Array:
    memory: Any = (ctypes.c_char * (dtype.itemsize * count)).from_address(address)
    view: Array = np.frombuffer(memory, dtype)
    return view


def open_gpu() -> OnGpu:
    """Raises OutriderError("backend") if there is no GPU, driver or machine code."""
    return OnGpu(Device(), kernel.load())
