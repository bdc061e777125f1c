"""AOTInductor: torch's own graph, compiled; caches written where they are."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, finalize

import numpy as np

from ..files.errors import OutriderError, first_line, importing
from ..files.manifest import (
    ENCODER_PACKAGE_FILE,
    PACKAGE_FILE,
    Dtype,
    EngineFacts,
    GraphFacts,
    Manifest,
)
from ..files.torch_files import JOINED, cpu_targets, program_files, read_tensors
from .cuda import Cuda
from .device import DeviceCall, PreparedEngine
from .engine import Ids, Logits
from .host import HostEngine

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: compiled code reads its arguments in steps of that, or copies them first


class Call(NamedTuple):
    """Views of the engine's memory."""

    ids: list[torch.Tensor]  # int64: input_ids [B, N], position [B], logits_index [K]
    # In the contract's order, each [B, Hkv, S, D]; with an encoder those of the sources too, which
    # are only read, and how long they are, int64 [B].
    caches: list[torch.Tensor]
    logits: torch.Tensor  # [B, K, V], on the CPU float32


def import_torch(version: str | None = None) -> Any:
    # Any build of that version: +cpu or +cu130 is where it comes from.
    wanted = f"=={version.partition('+')[0]}" if version else ""
    remedy = f"Install it: pip install torch{wanted}, or build with BACKEND=onnxruntime."
    with importing("torch", remedy, "PyTorch"):
        import torch
    return torch


class Package:
    """The code of a model, and its weights on a device. index: of a GPU, -1 for the CPU. encoder:
    those of its encoder.

    weights: by their names in the graph; what is written into them is what the code reads.
    """

    def __init__(
        self, folder: Path, index: int = -1, device: str = "cpu", *, encoder: bool = False
    ):
        file = ENCODER_PACKAGE_FILE if encoder else PACKAGE_FILE
        # Not torch._inductor.aoti_load_package: it imports the compiler, for the same loader.
        # Single-threaded: the turns are the caller's, and otherwise it waits for events, which no
        # CUDA graph can hold.
        loader = import_torch()._C._aoti.AOTIModelPackageLoader(
            str(folder / file), "model", True, 1, index
        )
        joined = json.loads(loader.get_metadata().get(JOINED, "{}"))
        # The code uses them where they are; this dictionary keeps them there.
        self.weights, read = load_weights(
            folder / program_files(encoder)[1], loader.get_constant_fqns(), joined, device
        )
        # Tensors of its own: the loader has a reference to each that it never gives back, so that
        # the memory would stay when all is gone.
        own = [tensor.detach() for tensor in read.values()]
        loader.load_constants(dict(zip(read, own, strict=True)), False, True, True)
        finalize(loader, _empty, own).atexit = False  # a thread may still compute with them then
        self.run = loader.run


def _empty(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)


def load_weights(
    path: Path, names: Sequence[str], joined: Mapping[str, Sequence[str]], device: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those of a file on a device, by their names there, and by those that the code has: each of
    `joined` is one tensor, and its parts are views of it. Tied ones, which share their place in
    the file, are there once."""
    weights, loaded = read_tensors(path), {}
    read: dict[str, torch.Tensor] = {}
    moved: dict[tuple[object, ...], torch.Tensor] = {}
    for name in names:
        if name in joined:
            parts = [weights[part] for part in joined[name]]
            rows = [len(part) for part in parts]
            whole = read[name] = parts[0].new_empty(sum(rows), *parts[0].shape[1:], device=device)
            for part, view in zip(joined[name], import_torch().split(whole, rows), strict=True):
                loaded[part] = view.copy_(weights[part])
            continue
        place = (weights[name].data_ptr(), weights[name].dtype, weights[name].shape)
        if place not in moved:
            moved[place] = weights[name].to(device)
        loaded[name] = read[name] = moved[place]
    return loaded, read


@contextmanager
def opening(folder: Path, remedy: str) -> Iterator[None]:
    """What fails within is a package that cannot be loaded: OutriderError "backend"."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - torch raises what its C++ raises
        version = import_torch().__version__
        cause = f"torch {version} cannot load the code in {folder}: {first_line(error)}"
        raise OutriderError("backend", cause, remedy) from None


class AotiEngine(HostEngine[Call]):
    """See `HostEngine`; a call is the list of its arguments."""

    _library = "AOTInductor"

    def _open(self, folder: Path, facts: GraphFacts, threads: int) -> None:
        self._torch, self._threads = import_torch(), threads
        with opening(folder, "Build the bundle again."):
            self._loader = Package(folder)
            self._encoder = Package(folder, encoder=True) if facts.encoder else None
        self.weights = self._loader.weights
        self._dtype = getattr(self._torch, facts.dtype)

    @classmethod
    def check(cls, manifest: Manifest, folder: Path) -> None:
        """Refuse code for instructions that this machine lacks."""
        import_torch(manifest.versions.get("torch"))
        here = set(cpu_targets())
        for engine in (manifest.engines or {}).values():
            missing = [target for target in engine.targets if target not in here]
            if missing:
                raise OutriderError(
                    "backend",
                    f"{folder} was compiled for a processor with {', '.join(missing)}, which this "
                    "one lacks",
                    f"Build it again, on this machine: {manifest.rebuild_command(folder)}",
                )

    def _zeros(self, *shape: int) -> torch.Tensor:
        zeros: torch.Tensor = self._torch.zeros(shape, dtype=self._dtype)
        return zeros

    def _bind(
        self, ids: dict[str, Ids], caches: dict[str, Any], source: dict[str, Any], logits: Logits
    ) -> Call:
        view = self._torch.from_numpy
        first, lengths = [*map(view, ids.values())], []
        if source:
            lengths = [first.pop()]
        return Call(first, [*caches.values(), *source.values(), *lengths], view(logits))

    def _encode(self, source: Any, names: Sequence[str]) -> dict[str, Any]:
        assert self._encoder is not None
        if isinstance(source, np.ndarray):  # else what another package has made
            source = self._torch.from_numpy(source.copy())  # it may be read-only
        with self._own_threads():
            found = self._encoder.run([source])
        assert len(names) <= len(found)  # the states last, where they are asked for
        return dict(zip(names, found, strict=False))

    def _run(self, call: Call) -> None:
        with self._own_threads():
            # A package allocates its output: that is copied, the caches are not.
            call.logits.copy_(self._loader.run([*call.ids, *call.caches])[0])

    @contextmanager
    def _own_threads(self) -> Iterator[None]:
        """While as many threads run as were asked for."""
        before = self._torch.get_num_threads()
        if self._threads:  # the process's, so a host application gets its own back
            self._torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            if self._threads:
                self._torch.set_num_threads(before)


class TorchGpu:
    """The device and the stream of a `Cuda`, to torch: all that is asked of torch.cuda."""

    _made: ClassVar[WeakKeyDictionary[Cuda, TorchGpu]] = WeakKeyDictionary()

    @classmethod
    def of(cls, cuda: Cuda, stream: int) -> TorchGpu:
        """One for all engines of a decoder, who share the pool that their graphs allocate from."""
        if cuda not in cls._made:
            cls._made[cuda] = cls(cuda, stream)
        return cls._made[cuda]

    def __init__(self, cuda: Cuda, stream: int):
        self._torch = import_torch()
        cuda.use()  # torch goes by the current device
        self._torch.cuda.init()
        self.index, self.device = cuda.ordinal, f"cuda:{cuda.ordinal}"
        self._stream = self._torch.cuda.ExternalStream(stream, self.device)
        self._pool, self._capturing = self._torch.cuda.MemPool(), False

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

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Give what is allocated meanwhile from a pool of this object's. Each engine enters; torch
        refuses a pool that is in use, so only the first does something.

        A graph writes to the addresses of its capture at every replay. Memory of a pool is given
        to nobody outside of it, and not back to the driver while the pool lives. All graphs may
        share it: they replay one after the other, and nothing in it is needed between replays.

        Before cudaMalloc torch asks the stream itself whether it captures. Events it must not query
        then: 2.11 takes a pool in use for a capture and does not, 2.13 does but has none, since
        nothing here is used on a second stream.
        """
        if self._capturing:
            yield
            return
        self._capturing = True
        try:
            with self._torch.cuda.use_mem_pool(self._pool):
                yield
        finally:
            self._capturing = False


class AotiCudaEngine(PreparedEngine):
    """See `DeviceEngine`. Raises OutriderError "backend" where torch cannot load the package."""

    alignment = ALIGNMENT  # the copy of a cache would be updated in its place
    # Not measured yet: cuBLAS's workspaces (32 MiB each on Hopper), its kernels as they are loaded,
    # a prompt's activations, the pool of the graphs.
    allowance = 1 << 28
    _library, _gpu = "AOTInductor", TorchGpu  # what the tests stand in for

    @staticmethod
    def logits_dtype(facts: GraphFacts) -> Dtype:
        return facts.dtype  # see engines.aotinductor.fitted

    @classmethod
    def give_back(cls) -> None:
        gc.collect()
        import_torch().cuda.empty_cache()

    def _open(self, folder: Path, facts: GraphFacts, engine: EngineFacts | None) -> None:
        self._torch = import_torch()
        self._dtype = getattr(self._torch, facts.dtype)
        self._slots: dict[tuple[int, int], list[torch.Tensor]] = {}  # by first slot and how many
        remedy = "Build the bundle again, on this machine, or free some memory of the GPU."
        with opening(folder, remedy):
            self.gpu = self._gpu.of(self.cuda, self.stream)
            self._loader = Package(folder, self.gpu.index, self.gpu.device)
        self.weights = self._loader.weights

    def capturing(self) -> AbstractContextManager[object]:
        return self.gpu.capturing()

    def _run(self, call: Call) -> None:
        def work() -> None:
            # The package would copy ids itself where they are not aligned, but warns each time.
            ids = [x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in call.ids]
            (logits,) = self._loader.run([*ids, *call.caches])
            call.logits.copy_(logits, non_blocking=True)

        self.gpu.enqueue(work)

    def _prepare(self, call: DeviceCall) -> Call:
        torch = self._torch
        slots = self._slots.get((call.first_slot, call.batch))
        if slots is None:
            slots = self._slots[call.first_slot, call.batch] = [
                self._view(address, self._dtype, *shape)
                for _, address, shape in self.caches_of(call)
            ]
        return Call(
            [self._view(address, torch.int64, *shape) for _, address, shape in call.ids()],
            slots,
            self._view(
                call.logits, getattr(torch, self.logit_type), call.batch, call.outputs,
                self.vocab_size,
            ),
        )  # fmt: skip

    def _view(self, address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self.gpu.bytes(address, prod(shape) * dtype.itemsize).view(dtype).view(shape)
