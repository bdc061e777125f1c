"""TensorRT: engines for the NVIDIA GPU that is present when they are built.

Written against the same interface as rtx.py, but never run: TensorRT's libraries are not on the
package index, and it builds only on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError, importing
from runtime.files.graphs import Format, GraphFacts
from runtime.files.manifest import EngineFacts

from ..gpus import present_gpus
from . import builder

PRODUCT, PACKAGE = "TensorRT", "tensorrt"
DTYPES = ("float16", "bfloat16")
RUNS = dict.fromkeys(("int8", "int4"), DTYPES)
FORMAT: Format = "onnx"
ENGINE_FILE = "engine.plan"
LEVELS = range(6)  # how long it searches for faster kernels


def versions() -> dict[str, str]:
    return {PACKAGE: str(_module().__version__)}


def _module() -> Any:
    remedy = "Install version 10.16 or newer and its Python module, or use BACKEND=tensorrt_rtx."
    with importing(PACKAGE, remedy, PRODUCT):
        import tensorrt
    return tensorrt


def targets(sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
    """The architecture of the GPU in this machine. Raises OutriderError "option" or "backend"."""
    _module()
    if sm:
        cause = f"SM={sm} was given, but {PRODUCT} builds only for the GPU of this machine"
        raise OutriderError("option", cause, "Leave SM out, or use BACKEND=tensorrt_rtx.")
    present = sorted(present_gpus())
    if not present:
        raise OutriderError(
            "backend",
            f"{PRODUCT} needs a GPU to build, and this machine has none",
            "Build on the machine that will run the bundle, or use BACKEND=tensorrt_rtx.",
        )
    return [f"sm{present[0]}"]


def plan(
    models: dict[str, GraphFacts], slots: int, max_gamma: int, targets: list[str], level: int | None
) -> dict[str, EngineFacts]:
    return builder.plan(ENGINE_FILE, models, slots, max_gamma, targets, versions(), level)


def compile(
    role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
) -> EngineFacts:
    assert to is not None
    # It times kernels on the GPU; times measured by another version or on another GPU do not apply.
    timings = builder.TIMINGS / f"{to.targets[0]}-{versions()[PACKAGE]}.timings"
    return builder.compile(PACKAGE, PRODUCT, role, graph, out, facts, to, timings=timings)
