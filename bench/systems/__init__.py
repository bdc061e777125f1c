"""Inference systems on the same checkpoints, each in its own process, so that threads and memory
are separate.

A system is a module with a worker (`worker.Worker`), a line in `SYSTEMS`, and entries in `MEASURED`
of suites/side/run.py. `peer.Peer` starts the process and sends it the requests of `protocol`; it
receives a `Text` for each prompt, or the reason for a failure.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Module:
    """A system. worker: its module in this package, and the class. packages: packages that the
    module imports. extra: the extra in pyproject.toml that installs them."""

    worker: str
    packages: tuple[str, ...]
    extra: str

    def missing_reason(self) -> str | None:
        """The reason why the system is missing; None if its packages are installed."""
        absent = [package for package in self.packages if not importlib.util.find_spec(package)]
        return f"{' and '.join(absent)} not installed (extra {self.extra})" if absent else None


SYSTEMS = {
    "outrider": Module("outrider.OutriderWorker", ("onnxruntime", "torch", "transformers"), "dev"),
    "transformers": Module("transformers.TransformersWorker", ("torch", "transformers"), "dev"),
    "genai": Module(
        "genai.GenaiWorker", ("onnxruntime_genai", "onnx_ir", "torch", "transformers"), "genai"
    ),
    "llama.cpp": Module(
        "llama.LlamaWorker", ("llama_cpp", "gguf", "torch", "safetensors"), "llama"
    ),
    "ctranslate2": Module(
        "ctranslate2.CTranslateWorker", ("ctranslate2", "torch", "transformers"), "ctranslate2"
    ),
}
