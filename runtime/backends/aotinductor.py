"""AOTInductor: runs torch's own compiled graph; caches are updated in place."""

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

from ..files.errors import OutriderError, convert_errors, importing
from ..files.graphs import Dtype, GraphFacts
from ..files.manifest import ENCODER_PACKAGE_FILE, PACKAGE_FILE, EngineFacts, Manifest
from ..files.torch_files import JOINED, cpu_targets, find_holes, program_files, read_tensors
from .cuda import Cuda
from .device import DeviceCall, PreparedEngine
from .engine import Ids, Logits
from .host import HostEngine

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16  # bytes: compiled code copies arguments that are not aligned to this


class Call(NamedTuple):
    """The arguments of a call, as views of the engine's memory."""

    integer_inputs: list[torch.Tensor]  # int64: input_ids [B, N], position [B], logits_index [K]
    # In the contract's order, each [B, Hkv, S, D]; with an encoder followed by those of the
    # sources, which are only read, and the sources' lengths, int64 [B].
    caches: list[torch.Tensor]
    logits: torch.Tensor  # [B, K, V]; float32 on the CPU


def import_torch(version: str | None = None) -> Any:
    # Any build of that version will do, see `runtime.bundle`.
    wanted = f"=={version.partition('+')[0]}" if version else ""
    remedy = f"Install it: pip install torch{wanted}, or build with BACKEND=onnxruntime."
    with importing("torch", remedy, "PyTorch"):
        import torch
    return torch


class Package:
    """The compiled code of a model, with its weights on a device. index: number of the GPU, -1 for
    the CPU. encoder: load the model's encoder instead.

    weights: by their names in the graph. The code reads these tensors in place.
    """

    def __init__(
        self, folder: Path, index: int = -1, device: str = "cpu", *, encoder: bool = False
    ):
        file = ENCODER_PACKAGE_FILE if encoder else PACKAGE_FILE
        # torch._inductor.aoti_load_package creates the same loader, but imports the compiler.
        # Single-threaded, because the caller serialises the calls; otherwise the loader waits for
        # events, which cannot be captured in a CUDA graph.
        loader = import_torch()._C._aoti.AOTIModelPackageLoader(
            str(folder / file), "model", True, 1, index
        )
        joined = json.loads(loader.get_metadata().get(JOINED, "{}"))
        # The code uses the tensors in place; this dictionary keeps them alive.
        self.weights, read = load_weights(
            folder / program_files(encoder)[1], loader.get_constant_fqns(), joined, device
        )
        # The loader never releases its references, which would keep the memory after this object
        # is gone. So it gets detached tensors, which are emptied when the loader is.
        detached = [tensor.detach() for tensor in read.values()]
        loader.load_constants(dict(zip(read, detached, strict=True)), False, True, True)
        finalize(loader, _empty, detached).atexit = False  # at exit a thread may still be computing
        self.run = loader.run


def _empty(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)


def load_weights(
    path: Path, names: Sequence[str], joined: Mapping[str, Sequence[str]], device: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Load the weights of a file to a device. Returns them by their names in the file, and by the
    names that the code uses: each entry of `joined` is one tensor, of which its parts are views.
    Tied weights, which share their place in the file, are loaded once. Holes of the file become
    zeros without being read."""
    weights, loaded, holes = read_tensors(path), {}, find_holes(path)
    read: dict[str, torch.Tensor] = {}
    moved: dict[tuple[object, ...], torch.Tensor] = {}
    for name in names:
        if name in joined:
            parts = [weights[part] for part in joined[name]]
            rows = [len(part) for part in parts]
            whole = read[name] = parts[0].new_empty(sum(rows), *parts[0].shape[1:], device=device)
            for part, view in zip(joined[name], import_torch().split(whole, rows), strict=True):
                loaded[part] = view.zero_() if part in holes else view.copy_(weights[part])
            continue
        place = (weights[name].data_ptr(), weights[name].dtype, weights[name].shape)
        if place not in moved:
            weight = weights[name]
            moved[place] = (
                weight.new_zeros(weight.shape, device=device)
                if name in holes
                else weight.to(device)
            )
        loaded[name] = read[name] = moved[place]
    return loaded, read


def load_errors(folder: Path, remedy: str) -> AbstractContextManager[None]:
    """Converts what torch's C++ code throws if a package cannot be loaded."""
    what = f"torch {import_torch().__version__} cannot load the code in {folder}"
    return convert_errors("backend", what, remedy)


class AotiEngine(HostEngine[Call]):
    """See `HostEngine`; a call is the list of its arguments."""

    _library = "AOTInductor"

    def _open(self, folder: Path, facts: GraphFacts, threads: int) -> None:
        self._torch, self._threads = import_torch(), threads
        with load_errors(folder, "Build the bundle again."):
            self._loader = Package(folder)
            self._encoder = Package(folder, encoder=True) if facts.encoder else None
        self.weights = self._loader.weights
        self._dtype = getattr(self._torch, facts.dtype)

    @classmethod
    def check(cls, manifest: Manifest, folder: Path) -> None:
        """Refuse code that uses instruction sets this machine lacks."""
        import_torch(manifest.versions.get("torch"))
        supported = set(cpu_targets())
        for engine in (manifest.engines or {}).values():
            missing = [target for target in engine.targets if target not in supported]
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
        if isinstance(source, np.ndarray):  # otherwise the output of another package
            source = self._torch.from_numpy(source.copy())  # a copy, since it may be read-only
        with self._requested_threads():
            outputs = self._encoder.run([source])
        assert len(names) <= len(outputs)  # the states come last and may not be wanted
        return dict(zip(names, outputs, strict=False))

    def _run(self, call: Call) -> None:
        with self._requested_threads():
            # The package allocates its output, which is copied; caches are updated in place.
            call.logits.copy_(self._loader.run([*call.integer_inputs, *call.caches])[0])

    @contextmanager
    def _requested_threads(self) -> Iterator[None]:
        """Run with the requested number of threads."""
        previous = self._torch.get_num_threads()
        if self._threads:  # the setting is global: restore the host application's afterwards
            self._torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            if self._threads:
                self._torch.set_num_threads(previous)


class TorchGpu:
    """The device and stream of a `Cuda`, for torch; everything that uses torch.cuda is here."""

    _instances: ClassVar[WeakKeyDictionary[Cuda, TorchGpu]] = WeakKeyDictionary()

    @classmethod
    def of(cls, cuda: Cuda, stream: int) -> TorchGpu:
        """The one instance for all engines of a decoder, whose graphs share its memory pool."""
        if cuda not in cls._instances:
            cls._instances[cuda] = cls(cuda, stream)
        return cls._instances[cuda]

    def __init__(self, cuda: Cuda, stream: int):
        self._torch = import_torch()
        cuda.make_current()  # torch uses the current device
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
        """Run `work`, whose torch operations go onto the stream."""
        with self._torch.cuda.stream(self._stream):
            work()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Allocate from this object's own pool while calls are captured. Every engine enters, but
        torch refuses a pool that is in use, so only the first entry has an effect.

        A graph writes to the addresses of its capture at every replay. Memory of a pool is never
        used outside of it, nor returned to the driver while the pool lives. All graphs may share
        the pool: they replay one after the other, and nothing in it is needed between replays.

        Before cudaMalloc, torch asks the stream itself whether it is capturing. It must not query
        events meanwhile: torch 2.11 treats a pool in use as a capture and queries none; 2.13 would,
        but there are none, since nothing here is used on a second stream.
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
    """See `DeviceEngine`. Raises OutriderError "backend" if torch cannot load the package."""

    alignment = ALIGNMENT  # otherwise a copy of the cache would be updated in its place
    # Measured on an H200: 364 MB for a pair of 1 B, 491 MB for one of 8 B. cuBLAS workspaces, its
    # kernels as they are loaded, a prompt's activations, the pool of the graphs and the graphs.
    allowance = 1 << 29
    _library, _gpu_class = "AOTInductor", TorchGpu  # replaced in tests

    @staticmethod
    def logits_dtype(facts: GraphFacts) -> Dtype:
        return facts.dtype  # see engines.aotinductor.program

    @classmethod
    def release_unused_memory(cls) -> None:
        gc.collect()
        import_torch().cuda.empty_cache()

    def _open(self, folder: Path, facts: GraphFacts, engine: EngineFacts | None) -> None:
        self._torch = import_torch()
        self._dtype = getattr(self._torch, facts.dtype)
        self._slots: dict[tuple[int, int], list[torch.Tensor]] = {}  # by (first slot, slot count)
        remedy = "Build the bundle again, on this machine, or free some memory of the GPU."
        with load_errors(folder, remedy):
            self.gpu = self._gpu_class.of(self.cuda, self.stream)
            self._loader = Package(folder, self.gpu.index, self.gpu.device)
        self.weights = self._loader.weights

    def capturing(self) -> AbstractContextManager[object]:
        return self.gpu.capturing()

    def _run(self, call: Call) -> None:
        def work() -> None:
            # The package would copy unaligned ids itself, but with a warning each time.
            inputs = [
                x if x.data_ptr() % ALIGNMENT == 0 else x.clone() for x in call.integer_inputs
            ]
            (logits,) = self._loader.run([*inputs, *call.caches])
            call.logits.copy_(logits, non_blocking=True)

        self.gpu.enqueue(work)

    def _prepare(self, call: DeviceCall) -> Call:
        torch = self._torch
        slots = self._slots.get((call.first_slot, call.batch))
        if slots is None:
            slots = self._slots[call.first_slot, call.batch] = [
                self._view(address, self._dtype, *shape)
                for _, address, shape in self.cache_tensors(call)
            ]
        return Call(
            [
                self._view(address, torch.int64, *shape)
                for _, address, shape in call.integer_inputs()
            ],
            slots,
            self._view(
                call.logits, getattr(torch, self.logit_type), call.batch, call.outputs,
                self.vocab_size,
            ),
        )  # fmt: skip

    def _view(self, address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return self.gpu.bytes(address, prod(shape) * dtype.itemsize).view(dtype).view(shape)
