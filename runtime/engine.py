"""What the round asks of a model, whatever backend runs it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import OutriderError
from .manifest import GraphFacts, Manifest

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class Engine(Protocol):
    """One model with its cache slots.

    A slot's length is the caller's integer, not the engine's: rows at or beyond the position of a
    call are overwritten by it or masked in it, so rolling back is calling with a lower position.

    slots: how many sequences it holds. capacity: rows S of each. chunk: the largest N of a call.
    vocab_size: V of the logits. buffers: how many calls' logits it can hold, evenly spaced in
    memory where the calls have one shape.
    """

    slots: int
    capacity: int
    chunk: int
    vocab_size: int
    buffers: int

    def forward(
        self,
        input_ids: Ids,
        position: Ids,
        logits_index: Ids,
        first_slot: int = 0,
        buffer: int = 0,
    ) -> Logits:
        """Run N consecutive tokens for each of the B slots that start at `first_slot`.

        input_ids: int64 [B, N]. position: int64 [B], the row that the first of them goes to;
        position + N <= capacity is the caller's duty. logits_index: int64 [K], which of the N
        get logits. Returns float32 [B, K, V], a view of that buffer: valid until the next call
        with it.
        """
        ...


def check_bundle(manifest: Manifest, folder: Path) -> None:
    """Refuse, before anything is loaded, engines that this version does not run.

    An engine belongs to the version of the library that made it. Raises OutriderError "backend".
    """
    for package, built in manifest.versions.items() if manifest.engines else ():
        installed = _installed(package)
        if installed not in (None, built):
            raise OutriderError(
                "backend",
                f"{folder} was built with {package} {built}, and {installed} is installed",
                f"Build it again: {manifest.rebuild_command(folder)}",
            )
    if manifest.backend == "aotinductor":
        from .aoti_engine import check_processor

        check_processor(manifest, folder)
    if manifest.backend in ("tensorrt_rtx", "tensorrt"):
        raise OutriderError(
            "backend",
            f"this version builds {manifest.backend} bundles but cannot run them yet",
            "Build the bundle with BACKEND=onnxruntime.",
        )


def _installed(package: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def open_engine(
    backend: str,
    folder: Path,
    facts: GraphFacts,
    *,
    slots: int,
    widest: int,
    buffers: int = 1,
    threads: int,
) -> Engine:
    """The engine of one model of a bundle. The backend is imported here, and nowhere else.

    widest: the largest K of a call (target: gamma + 1). buffers: of logits (draft: gamma).
    threads: 0 leaves the choice to the backend.
    """
    options: dict[str, Any] = {
        "slots": slots, "widest": widest, "buffers": buffers, "threads": threads,
    }  # fmt: skip
    if backend == "onnxruntime":
        from .ort_engine import OrtEngine

        return OrtEngine(folder, facts, **options)
    if backend == "aotinductor":
        from .aoti_engine import AotiEngine

        return AotiEngine(folder, facts, **options)
    raise OutriderError(
        "backend",
        f"this version cannot run bundles of the backend {backend}",
        "Build the bundle with BACKEND=onnxruntime.",
    )
