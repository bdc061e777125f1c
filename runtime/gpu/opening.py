"""Open a bundle on a GPU: check the architecture and the memory, and load the engines."""

from __future__ import annotations

from pathlib import Path

from ..backends.device import LOGIT_BYTES, DeviceEngine
from ..backends.registry import device_engine
from ..files.errors import OutriderError
from ..files.graphs import GraphFacts
from ..files.manifest import Manifest
from ..files.progress import size_text
from ..sampling import kernel
from .launch import Device
from .memory import Sizes
from .rounds import DeviceRounds


def open_device(manifest: Manifest, folder: Path, ordinal: int) -> Device:
    """Open the GPU and check that the bundle's engines and the kernel run on it. Raises
    OutriderError "backend", "option"."""
    if cause := kernel.unavailable_reason():
        raise OutriderError("backend", f"GPU rounds need the kernel: {cause}", "Run make plugins.")
    device = Device(ordinal)
    check_gpu(manifest, folder, device.capability)
    return device


def open_rounds(
    manifest: Manifest,
    folder: Path,
    device: Device,
    slots: int,
    memory: dict[str, int],
    *,
    graphs: bool,
) -> DeviceRounds:
    """Open both engines on a GPU. memory: the bytes of weights and caches, to which this adds those
    of activations and buffers. Raises OutriderError "backend", "memory"."""
    memory.update(working_memory(manifest, slots))
    if sum(memory.values()) > device.memory_info()[0]:
        device_engine(manifest.backend).release_unused_memory()
    check_free_memory(memory, *device.memory_info())
    pair, stream = manifest.pair, device.create_stream()
    engines = {
        role: open_engine(
            manifest, folder / role, role, facts, device, stream, slots=slots,
            max_outputs=pair.max_gamma + 1 if role == "target" else 1,
        )
        for role, facts in pair.models()
    }  # fmt: skip
    return DeviceRounds(
        device, stream, engines["target"], engines.get("draft"), vocab_size=pair.vocab_size,
        max_len=pair.max_len, max_gamma=pair.max_gamma, graphs=graphs,
        draft_max_len=pair.draft.max_len if pair.draft else None,
    )  # fmt: skip


def open_engine(
    manifest: Manifest,
    folder: Path,
    role: str,
    facts: GraphFacts,
    device: Device,
    stream: int,
    **sizes: int,
) -> DeviceEngine:
    """Open the engine of one model of a bundle on a GPU. sizes: see `DeviceEngine`."""
    backend = device_engine(manifest.backend)
    backend.check()
    compiled = (manifest.engines or {}).get(role)
    return backend(device, stream, folder, facts, compiled, **sizes)


def check_gpu(manifest: Manifest, folder: Path, capability: tuple[int, int]) -> None:
    """Raise OutriderError "backend", with the command that rebuilds the bundle, if its engines are
    for other GPUs."""
    targets, here = manifest.gpu_targets(), "sm{}{}".format(*capability)
    if targets and here not in targets:
        raise OutriderError(
            "backend",
            f"{folder} was compiled for {', '.join(targets)}, and this GPU is {here}",
            f"Build it again: {manifest.rebuild_command(folder, gpu=here)}",
        )


def working_memory(manifest: Manifest, slots: int) -> dict[str, int]:
    """Bytes in addition to weights and caches. activations: those of both models if the builder
    reported both, otherwise the engines' allowance, which includes CUDA graphs; buffers: those
    of a round. Does not include the driver's own memory."""
    pair, engine_class = manifest.pair, device_engine(manifest.backend)
    rows = (
        f.vocab_size * LOGIT_BYTES[engine_class.logits_dtype(f)] if f else 0
        for f in (pair.target, pair.draft)
    )
    sizes = Sizes(
        slots, pair.max_gamma if pair.draft else 0, pair.max_len, pair.capacity, *rows
    )  # fmt: skip
    reported = manifest.activation_bytes
    activations = engine_class.allowance if reported is None else reported
    return {"activations": activations, "buffers": sum(sizes.bytes().values())}


def check_free_memory(memory: dict[str, int], free: int, total: int) -> None:
    """Raise OutriderError "memory", before minutes of loading, if the GPU has too little memory."""
    need = sum(memory.values())
    if need > free:
        raise OutriderError(
            "memory",
            f"the bundle needs {size_text(need)} of the GPU's memory, but only {size_text(free)} "
            f"of {size_text(total)} are free",
            "Use fewer slots, build with a smaller MAX_LEN, or free some of its memory.",
        )
