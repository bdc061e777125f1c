"""Decoders on the same checkpoints, each in a process of its own: its threads and its memory stay
out of ours.

A system is a module with a worker (`worker.Worker`), a line in `SYSTEMS`, and some in `MEASURED` of
suites/side/run.py. `peer.Peer` starts the process, sends it what `protocol` has, and gets a `Text`
for each prompt, or why not.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A system. worker: a module of this package and its class. packages: what the module imports.
    extra: the group in pyproject.toml that brings them."""

    worker: str
    packages: tuple[str, ...]
    extra: str

    def missing(self) -> str | None:
        """Why there is no such system, None if its packages are installed."""
        absent = [package for package in self.packages if not importlib.util.find_spec(package)]
        return f"{' and '.join(absent)} not installed (extra {self.extra})" if absent else None


SYSTEMS = {
    "outrider": Kind("ours.OutriderWorker", ("onnxruntime", "torch", "transformers"), "dev"),
    "transformers": Kind("transformers.TransformersWorker", ("torch", "transformers"), "dev"),
    "genai": Kind(
        "genai.GenaiWorker", ("onnxruntime_genai", "onnx_ir", "torch", "transformers"), "genai"
    ),
    "llama.cpp": Kind("llama.LlamaWorker", ("llama_cpp", "gguf", "torch", "safetensors"), "llama"),
    "ctranslate2": Kind(
        "ctranslate2.CTranslateWorker", ("ctranslate2", "torch", "transformers"), "ctranslate2"
    ),
}
