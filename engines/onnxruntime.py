"""ONNX Runtime on the CPU: the portable graph is the engine.

Saving ONNX Runtime's optimised graph was measured and dropped: it saves a fraction of a second of
loading, but needs a second copy of the weights and ties the bundle to one version and one processor
(docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runtime.files.errors import OutriderError, convert_errors, importing
from runtime.files.graphs import ENCODER_FILE, GRAPH_FILE, HOST_FILE, Format, GraphFacts
from runtime.files.library import add_operators
from runtime.files.manifest import ENCODER_DECODERS, RECURRENT_STATES, EngineFacts

DTYPES = ("float32", "float16")  # ONNX Runtime has no bfloat16 kernels for the CPU
# liboutrider multiplies quantised weights, in float32.
RUNS = dict.fromkeys(("int8", "int4", ENCODER_DECODERS, RECURRENT_STATES), ("float32",))
FORMAT: Format = "onnx"
LEVELS = range(0)


def versions() -> dict[str, str]:
    with importing("onnxruntime", "Install it: pip install onnxruntime."):
        import onnxruntime

    return {"onnxruntime": onnxruntime.__version__}


def targets(sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
    """No GPU architectures. Raises OutriderError "option" if any are given."""
    if sm:
        cause = f"SM={sm} names GPUs, but BACKEND=onnxruntime builds for CPUs"
        raise OutriderError("option", cause, "Leave SM out, or use BACKEND=tensorrt_rtx.")
    return []


def plan(
    models: dict[str, GraphFacts], slots: int, max_gamma: int, targets: list[str], level: int | None
) -> None:
    """Nothing to compile: the bundle holds the graphs."""


def compile(
    role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
) -> EngineFacts | None:
    """Check that this ONNX Runtime loads the graph. Raises OutriderError "backend"."""
    import onnxruntime as ort

    if facts.max_difference is None:  # running it would crash the process
        cause = f"the graph of {facts.source} was {facts.comparison}"
        raise OutriderError("backend", cause, "Build with DTYPE=float32, or for another BACKEND.")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")  # no second copy
    what = f"ONNX Runtime {ort.__version__} rejects the graph of {facts.source}"
    with convert_errors("backend", what, "Install the pinned onnxruntime and build again."):
        ours = add_operators(options)
        graphs = (HOST_FILE,) if facts.has_host_weights else (GRAPH_FILE, HOST_FILE)
        for name in (*graphs, ENCODER_FILE) if facts.encoder else graphs:
            if name == HOST_FILE and not (ours and name in facts.files):
                continue
            ort.InferenceSession(str(graph / name), options, providers=["CPUExecutionProvider"])
    return to
