"""TensorRT-RTX: engines for RTX GPUs, built with or without one.

An engine holds the weights and portable code whose compilation the GPU finishes at load time: one
file serves all listed architectures, at 8 bytes for each (docs/LOG.md).
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

PRODUCT, PACKAGE = "TensorRT-RTX", "tensorrt_rtx"
DTYPES = ("float16", "bfloat16")  # its attention has no float32 kernels
RUNS = dict.fromkeys(("int8", "int4", "fp8"), DTYPES)
FORMAT: Format = "onnx"
ENGINE_FILE = "engine.rtx"
LEVELS = range(0)  # it accepts levels but builds the same engine (docs/LOG.md)
# Built for only when asked: an engine that includes Turing is different, and larger.
TURING = 75
# The first architecture with each feature that the builder calls "HW-specific".
FIRST_ARCHITECTURE = {"bfloat16": 80, "int4": 80, "fp8": 89}


def versions() -> dict[str, str]:
    return {PACKAGE: str(_module().__version__)}


def _module() -> Any:
    remedy = "Install it: pip install tensorrt-rtx, or use BACKEND=onnxruntime."
    with importing(PACKAGE, remedy, PRODUCT):
        import tensorrt_rtx
    return tensorrt_rtx


def targets(sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
    """The GPU architectures to build for, such as sm89.

    sm: a list such as "80,89"; empty for the GPUs of this machine or, without any, for all
    architectures except Turing that have what the graphs need. weights: kinds of weights.
    Raises OutriderError "option" or "backend".
    """
    capabilities = _module().ComputeCapability.__members__
    known = [name.removeprefix("SM") for name in capabilities if name.startswith("SM")]
    present = sorted(map(str, present_gpus())) if not sm else []
    requested = [number.strip() for number in sm.split(",")] if sm else present
    for number in requested:
        if number not in known:
            raise OutriderError(
                "option",
                f"{PRODUCT} {versions()[PACKAGE]} does not build for "
                + (f"SM={number or sm}" if sm else f"the GPU of this machine (SM={number})"),
                f"Set SM to the GPUs that will run the bundle, any of SM={','.join(known)}.",
            )
    feature = max((dtype, *weights), key=lambda name: FIRST_ARCHITECTURE.get(name, 0))
    oldest = FIRST_ARCHITECTURE.get(feature, 0)
    if too_old := [number for number in requested if int(number) < oldest]:
        raise OutriderError(
            "option",
            f"the GPU SM={too_old[0]} has no {feature}, which needs SM={oldest} or newer",
            f"Use another {'DTYPE' if feature == dtype else 'WEIGHTS'}, or leave {too_old[0]} out "
            "of SM.",
        )
    chosen = map(int, requested or known)
    return [f"sm{n}" for n in sorted(set(chosen)) if requested or n >= max(oldest, TURING + 1)]


def plan(
    models: dict[str, GraphFacts], slots: int, max_gamma: int, targets: list[str], level: int | None
) -> dict[str, EngineFacts]:
    return builder.plan(ENGINE_FILE, models, slots, max_gamma, targets, versions(), level)


def compile(
    role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
) -> EngineFacts:
    assert to is not None
    return builder.compile(PACKAGE, PRODUCT, role, graph, out, facts, to)
