"""TensorRT: engines for the NVIDIA GPU that is present when they are built.

Written against the same interface as rtx.py, and never run: TensorRT's libraries
are not on the package index, and it builds on a GPU only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError, importing
from runtime.files.manifest import EngineFacts, Format, GraphFacts

from ..gpus import present_gpus
from . import builder

PRODUCT, PACKAGE = "TensorRT", "tensorrt"
DTYPES = ("float16", "bfloat16")
RUNS = dict.fromkeys(("int8", "int4"), DTYPES)
FORMAT: Format = "onnx"
ENGINE_FILE = "engine.plan"
LEVELS = range(6)  # how long it looks for a faster kernel


def versions() -> dict[str, str]:
    return {PACKAGE: str(_module().__version__)}


def _module() -> Any:
    remedy = "Install version 10.16 or newer and its Python module, or use BACKEND=tensorrt_rtx."
    with importing(PACKAGE, remedy, PRODUCT):
        import tensorrt
    return tensorrt


def targets(sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
    """The present GPU's architecture. Raises OutriderError "option" or "backend"."""
    _module()
    if sm:
        raise OutriderError(
            "option",
            f"SM={sm}: {PRODUCT} builds for the GPU that is present",
            "Leave SM out, or use BACKEND=tensorrt_rtx.",
        )
    present = sorted(present_gpus())
    if not present:
        raise OutriderError(
            "backend",
            f"{PRODUCT} builds on a GPU, and there is none here",
            "Build on the machine that will run it, or use BACKEND=tensorrt_rtx.",
        )
    return [f"sm{present[0]}"]


def plan(
    models: dict[str, GraphFacts], slots: int, max_gamma: int, sm: str, level: int | None
) -> dict[str, EngineFacts]:
    gpus = targets(sm, models["target"].dtype)
    return builder.plan(ENGINE_FILE, models, slots, max_gamma, gpus, versions(), level)


def compile(
    role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
) -> EngineFacts:
    assert to is not None
    # It times kernels on the GPU; the times of another version or GPU are no times of this one.
    timings = builder.TIMINGS / f"{to.targets[0]}-{versions()[PACKAGE]}.timings"
    return builder.compile(PACKAGE, PRODUCT, role, graph, out, facts, to, timings=timings)
