"""The backends that bundles can be built for: one module of this package and one line here each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from runtime.files.errors import OutriderError
from runtime.files.graphs import Format, GraphFacts
from runtime.files.manifest import EngineFacts

BACKENDS = {  # modules, imported on demand
    "onnxruntime": "onnxruntime",
    "tensorrt_rtx": "tensorrt.rtx",
    "tensorrt": "tensorrt.plain",
    "aotinductor": "aotinductor.builder",
}


class Backend(Protocol):
    """The interface of a backend's module. All functions raise OutriderError."""

    DTYPES: tuple[str, ...]  # of the graphs that it builds
    # The dtypes by feature: for each kind of quantised weights, for ENCODER_DECODERS (on the CPU)
    # and for RECURRENT_STATES.
    RUNS: Mapping[str, tuple[str, ...]]
    FORMAT: Format  # of the graphs
    LEVELS: range  # optimisation levels, from 0; empty if the backend has none

    def versions(self) -> dict[str, str]:
        """The versions of the libraries that it builds with."""

    def targets(self, sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
        """The GPU architectures to build for, from a user's list. Also checks that graphs of this
        precision and these weight types can be built for them."""

    def plan(
        self, models: dict[str, GraphFacts], slots: int, max_gamma: int, targets: list[str],
        level: int | None,
    ) -> dict[str, EngineFacts] | None:  # fmt: skip
        """The engines to compile, by role; None if the graphs themselves are the engines. targets:
        what `targets` returned."""

    def compile(
        self, role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
    ) -> EngineFacts | None:
        """Compile the graph in folder `graph` and write the engine into folder `out`, or refuse
        the graph. Returns `to`, completed with the figures of the engine."""


def find_backend(backend: str) -> Backend:
    """The module of a backend. Raises OutriderError "backend" for an unknown name."""
    if backend not in BACKENDS:
        cause = f"this version cannot build for the backend {backend}"
        raise OutriderError("backend", cause, f"Use BACKEND={' or '.join(BACKENDS)}.")
    return cast(Backend, import_module(f".{BACKENDS[backend]}", __package__))
