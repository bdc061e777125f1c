"""The backends that bundles can be built for: a module of this package each, and one line here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from runtime.files.errors import OutriderError
from runtime.files.manifest import EngineFacts, Format, GraphFacts

BACKENDS = {  # imported when they are asked for
    "onnxruntime": "onnxruntime",
    "tensorrt_rtx": "tensorrt.rtx",
    "tensorrt": "tensorrt.plain",
    "aotinductor": "aotinductor",
}


class Backend(Protocol):
    """What such a module has. All raise OutriderError."""

    DTYPES: tuple[str, ...]  # of the graphs that it builds
    # Of those with quantised weights, by their kind; of ENCODER_DECODERS, for CPUs; and of models
    # with RECURRENT_STATES.
    RUNS: Mapping[str, tuple[str, ...]]
    FORMAT: Format  # of the graphs
    LEVELS: range  # of optimisation; empty where there is no choice

    def versions(self) -> dict[str, str]:
        """Of what it builds with."""

    def targets(self, sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
        """The GPU architectures that a user's list stands for; also says that it can build graphs
        of this precision with such weights for them."""

    def plan(
        self,
        models: dict[str, GraphFacts],
        slots: int,
        max_gamma: int,
        sm: str,
        level: int | None,
    ) -> dict[str, EngineFacts] | None:
        """What there is to compile, by role; None where the graphs are the engines."""

    def compile(
        self, role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
    ) -> EngineFacts | None:
        """Write the engine of the graph in folder `graph` into folder `out`, or refuse the graph;
        `to` with the figures of what was made."""


def find(backend: str) -> Backend:
    """Raises OutriderError "backend" for a name that is none."""
    if backend not in BACKENDS:
        raise OutriderError(
            "backend",
            f"this version cannot build for the backend {backend}",
            f"Use BACKEND={' or '.join(BACKENDS)}.",
        )
    return cast(Backend, import_module(f".{BACKENDS[backend]}", __package__))
