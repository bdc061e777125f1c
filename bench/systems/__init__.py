"""Decoders on the same checkpoints, each in a process of its own: its threads and its memory stay
out of ours.

A system is a module with a worker (`worker.Worker`) and a line in `SYSTEMS`. `peer.Peer` starts the
process, sends it what `protocol` has, and gets a `Text` for each prompt, or why not.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A system. worker: a module of this package and its class. packages: what the module imports.
    extra: the group in pyproject.toml that brings them.

    modes, of one name in all systems: "plain" decoding; "draft", with the draft model, and
    "lookup", with n-grams of the text, of gamma tokens a round; "auto" chooses gamma for each
    round; "assistant" drafts as the library sets it up. precisions: of the weights; "mixed" is a
    target of float32 with a draft of int8. models: "text"
    goes on with a prompt; "seq2seq", an encoder-decoder, reads it.
    """

    worker: str
    packages: tuple[str, ...]
    extra: str
    modes: tuple[str, ...]
    precisions: tuple[str, ...] = ("float32",)
    models: tuple[str, ...] = ("text",)

    def missing(self) -> str | None:
        """Why there is no such system, None if its packages are installed."""
        absent = [package for package in self.packages if not importlib.util.find_spec(package)]
        return f"{' and '.join(absent)} not installed (extra {self.extra})" if absent else None


SYSTEMS = {
    "outrider": Kind(
        "ours.OutriderWorker", ("onnxruntime", "torch", "transformers"), "dev",
        ("plain", "draft", "auto", "lookup"), ("float32", "mixed", "int8", "int4"),
        ("text", "seq2seq"),
    ),
    "transformers": Kind(
        "transformers.TransformersWorker", ("torch", "transformers"), "dev",
        ("plain", "draft", "assistant", "lookup"), models=("text", "seq2seq"),
    ),
    "genai": Kind(
        "genai.GenaiWorker", ("onnxruntime_genai", "onnx_ir", "torch", "transformers"), "genai",
        ("plain", "draft", "lookup"),
    ),
    "llama.cpp": Kind(
        "llama.LlamaWorker", ("llama_cpp", "gguf", "torch", "safetensors"), "llama",
        ("plain", "draft", "lookup"), ("float32", "q8_0", "q4_0"),
    ),
    "ctranslate2": Kind(
        "ctranslate2.CTranslateWorker", ("ctranslate2", "torch", "transformers"), "ctranslate2",
        ("plain",), ("float32", "int8"), ("seq2seq",),
    ),
}  # fmt: skip
