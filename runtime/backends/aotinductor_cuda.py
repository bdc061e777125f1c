"""AOTInductor on a GPU: torch's own graph, compiled; caches written where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from ..files.errors import OutriderError, first_line
from ..files.manifest import PACKAGE_FILE, GraphFacts
from ..files.torch_files import WEIGHTS_FILE, read_tensors
from .aotinductor import import_torch
from .cuda import Cuda
from .device import DeviceCall, DeviceEngine

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: compiled code reads its arguments in steps of that, or copies them first


class TorchGpu:
    """The device and the stream of a `Cuda`, to torch: all that is asked of torch.cuda."""

    def __init__(self, cuda: Cuda, stream: int):
        self._torch = import_torch()
        cuda.use()  # torch goes by the current device
        self._torch.cuda.init()
        self.index, self.device = cuda.ordinal, f"cuda:{cuda.ordinal}"
        self._stream = self._torch.cuda.ExternalStream(stream, self.device)
        self._pool = self._torch.cuda.MemPool()

    def bytes(self, address: int, size: int) -> torch.Tensor:
        """uint8 [size] over device memory that is not torch's."""
        memory = SimpleNamespace(
            __cuda_array_interface__={
                "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 2,
            }
        )  # fmt: skip
        tensor: torch.Tensor = self._torch.as_tensor(memory, device=self.device)
        return tensor

    def enqueue(self, work: Callable[[], object]) -> None:
        """Put on the stream what `work` has torch do."""
        with self._torch.cuda.stream(self._stream):
            work()

    def capturing(self) -> AbstractContextManager[object]:
        """Give what is allocated meanwhile from a pool of this object's.

        A graph writes to the addresses of its capture at every replay. Memory of a pool is given
        to nobody outside of it, and not back to the driver while the pool lives. All graphs may
        share it: they replay one after the other, and nothing in it is needed between replays.

        Before cudaMalloc torch asks the stream itself whether it captures. Events it must not query
        then: 2.11 takes a pool in use for a capture and does not, 2.13 does but has none, since
        nothing here is used on a second stream.
        """
        pooled: AbstractContextManager[object] = self._torch.cuda.use_mem_pool(self._pool)
        return pooled


class Arguments(NamedTuple):
    ids: list[torch.Tensor]  # int64: input_ids [B, N], position [B], logits_index [K]
    caches: list[torch.Tensor]  # in the contract's order, each [B, Hkv, S, D]
    logits: torch.Tensor  # float32 [B, K, V]


class AotiCudaEngine(DeviceEngine):
    """See `DeviceEngine`. Raises OutriderError "backend" where torch cannot load the package.

    gpu: what stands in for torch.cuda.
    """

    alignment = ALIGNMENT  # the copy of a cache would be updated in its place

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
        gpu: TorchGpu | None = None,
    ):
        self._torch = import_torch()
        self._dtype = getattr(self._torch, facts.dtype)
        self._arguments: dict[DeviceCall, Arguments] = {}  # of the calls of rounds
        self._slots: dict[tuple[int, int], list[torch.Tensor]] = {}  # by first slot and how many
        try:
            self.gpu = gpu or TorchGpu(cuda, stream)
            # Single-threaded: otherwise it waits for events, which no graph can hold.
            self._loader = self._torch._C._aoti.AOTIModelPackageLoader(
                str(folder / PACKAGE_FILE), "model", True, 1, self.gpu.index
            )
            # The code uses them where they are; this dictionary keeps them there.
            self._weights = self._load(folder / WEIGHTS_FILE)
            self._loader.load_constants(self._weights, False, True, True)
        except Exception as error:  # noqa: BLE001 - torch raises what its C++ raises
            raise OutriderError(
                "backend",
                f"torch {self._torch.__version__} cannot load {folder / PACKAGE_FILE}: "
                + first_line(error),
                "Build the bundle again, on this machine, or free some memory of the GPU.",
            ) from None
        super().__init__(cuda, stream, facts, slots=slots, widest=widest, buffers=buffers)

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        """The weights on the GPU; tied ones, which share their place in the file, once."""
        weights, loaded = read_tensors(path), {}
        moved: dict[tuple[object, ...], torch.Tensor] = {}
        for name in self._loader.get_constant_fqns():
            place = (weights[name].data_ptr(), weights[name].dtype, weights[name].shape)
            if place not in moved:
                moved[place] = weights[name].to(self.gpu.device)
            loaded[name] = moved[place]
        return loaded

    def enqueue(self, call: DeviceCall, graph: object = None) -> None:
        try:
            arguments = self._arguments.get(call)
            if arguments is None:
                arguments = self._prepare(call)
                if graph is not None:  # prefills: their addresses and widths vary too much
                    self._arguments[call] = arguments
            self.gpu.enqueue(lambda: self._run(arguments))
        except RuntimeError as error:  # torch's own are all derived from it
            raise self._failed("AOTInductor", call, first_line(error)) from None

    def capturing(self) -> AbstractContextManager[object]:
        return self.gpu.capturing()

    def _run(self, arguments: Arguments) -> None:
        # The package would copy ids itself where they are not aligned, but warns each time.
        ids = [x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in arguments.ids]
        (logits,) = self._loader.run([*ids, *arguments.caches])
        arguments.logits.copy_(logits, non_blocking=True)

    def _prepare(self, call: DeviceCall) -> Arguments:
        int64, batch = self._torch.int64, call.batch
        slots = self._slots.get((call.first_slot, batch))
        if slots is None:
            slots = self._slots[call.first_slot, batch] = [
                self._view(
                    self.cache_address(name, call.first_slot), self._dtype,
                    batch, heads, self.capacity, width,
                )
                for name, (_, (heads, width)) in self.caches.items()
            ]  # fmt: skip
        return Arguments(
            [
                self._view(call.input_ids, int64, batch, call.tokens),
                self._view(call.position, int64, batch),
                self._view(call.logits_index, int64, call.outputs),
            ],
            slots,
            self._view(call.logits, self._torch.float32, batch, call.outputs, self.vocab_size),
        )

    def _view(self, address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self.gpu.bytes(address, prod(shape) * dtype.itemsize).view(dtype).view(shape)
