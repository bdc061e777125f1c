"""AOTInductor on the CPU: torch's own graph, compiled; caches written where they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..files.errors import OutriderError, first_line, importing
from ..files.manifest import PACKAGE_FILE, GraphFacts, Manifest
from ..files.torch_files import WEIGHTS_FILE, cpu_targets, read_tensors
from .host import HostEngine

if TYPE_CHECKING:
    import torch


class Call(NamedTuple):
    inputs: list[torch.Tensor]  # views of the engine's memory, in the graph's order
    logits: torch.Tensor  # likewise, [B, K, V]


def import_torch(version: str | None = None) -> Any:
    # Any build of that version: +cpu or +cu130 is where it comes from.
    wanted = f"=={version.partition('+')[0]}" if version else ""
    remedy = f"Install it: pip install torch{wanted}, or build with BACKEND=onnxruntime."
    with importing("torch", remedy, "PyTorch"):
        import torch
    return torch


class AotiEngine(HostEngine[Call]):
    """See `HostEngine`; a call is the list of its arguments."""

    _library = "AOTInductor"

    def __init__(
        self,
        folder: Path,
        facts: GraphFacts,
        *,
        slots: int,
        widest: int,
        buffers: int = 1,
        threads: int = 0,
    ):
        self._torch, self._threads = import_torch(), threads
        try:
            # Not torch._inductor.aoti_load_package: it imports the compiler, for the same loader.
            # Single-threaded: the turns are the caller's, as for every engine.
            self._loader = self._torch._C._aoti.AOTIModelPackageLoader(
                str(folder / PACKAGE_FILE), "model", True, 1, -1
            )
            # The code uses them where they are mapped; this dictionary keeps them there.
            weights = read_tensors(folder / WEIGHTS_FILE)
            self._weights = {name: weights[name] for name in self._loader.get_constant_fqns()}
            self._loader.load_constants(self._weights, False, True, True)
        except Exception as error:  # noqa: BLE001 - torch raises what its C++ raises
            raise OutriderError(
                "backend",
                f"torch {self._torch.__version__} cannot load {folder / PACKAGE_FILE}: "
                + first_line(error),
                "Build the bundle again.",
            ) from None
        self._dtype = getattr(self._torch, facts.dtype)
        self._allocate(facts, slots=slots, widest=widest, buffers=buffers)

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

    def _prepare(self, first: int, batch: int, width: int, outputs: int, buffer: int) -> Call:
        view = self._torch.from_numpy
        shape = (batch, outputs, self.vocab_size)
        return Call(
            [
                view(self._input_ids[: batch * width]).reshape(batch, width),
                view(self._position[:batch]),
                view(self._index[:outputs]),
                *(array[first : first + batch] for array in self._cache.values()),
            ],
            view(self._logits[buffer, : batch * outputs * self.vocab_size]).reshape(shape),
        )

    def _run(self, call: Call) -> None:
        before = self._torch.get_num_threads()
        if self._threads:  # the process's, so a host application gets its own back
            self._torch.set_num_threads(self._threads)
        try:
            # A package allocates its output: that is copied, the caches are not.
            call.logits.copy_(self._loader.run(call.inputs)[0])
        finally:
            if self._threads:
                self._torch.set_num_threads(before)
