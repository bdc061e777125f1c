"""ONNX Runtime GenAI, on a checkpoint converted by its own model builder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import onnxruntime_genai

from .protocol import Request, Setup
from .worker import Arrivals, convert_checkpoint, weights_bytes

og: Any = onnxruntime_genai
BUILDER = "onnxruntime_genai.models.builder"
WEIGHTS = "model.onnx.data"
PRECISIONS = {"float32": "fp32", "int4": "int4"}  # the builder's names
NGRAM = 3  # for lookups: searches for the last two tokens, as Transformers does


class GenaiWorker:
    """See `worker.Worker`. Target and draft together are a separate model, which is loaded when a
    request drafts."""

    def __init__(self, setup: Setup):
        self._precision = setup.precision
        self._threads = {"session_options": {"intra_op_num_threads": setup.threads}}
        self._folder = _build(setup, setup.target)
        self._draft = _build(setup, setup.draft) if setup.draft else None
        self._models: dict[bool, Any] = {}

    def load(self) -> dict[str, Any]:
        self._model(pair=False)
        return {
            "onnxruntime-genai": og.__version__,
            "onnxruntime": onnxruntime.__version__,
            "dtype": self._precision,
            "weights": weights_bytes(self._folder, WEIGHTS),
            "draft_weights": weights_bytes(self._draft, WEIGHTS) if self._draft else 0,
            "cache_element": 4,
        }

    def _model(self, *, pair: bool) -> Any:
        """The target only, or target and draft."""
        if pair not in self._models:
            changes: dict[str, Any] = {"decoder": self._threads}
            config = og.Config(str(self._folder))
            if pair:
                if self._draft is None:
                    raise ValueError("no draft model was given")
                changes["draft"] = {**_link_draft(self._draft, self._folder), **self._threads}
            config.overlay(json.dumps({"model": changes}))
            self._models[pair] = og.Model(config)
        return self._models[pair]

    def _generator(self, request: Request) -> Any:
        model = self._model(pair=request.mode == "draft")
        parameters = og.GeneratorParams(model)
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature:
            unrestricted = {"top_k": 0, "top_p": 1.0, "random_seed": request.seed}
            sampling = {"do_sample": True, "temperature": request.temperature, **unrestricted}
        parameters.set_search_options(
            max_length=len(request.prompts[0]) + request.new_tokens,
            batch_size=len(request.prompts),
            **sampling,
        )
        if request.mode != "plain":
            ngram = NGRAM if request.mode == "lookup" else 0
            parameters.set_speculative_options(max_draft_tokens=request.gamma, ngram_size=ngram)
        generator = og.Generator(model, parameters)
        generator.append_tokens(np.array(request.prompts, np.int32))
        return generator

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        alone, drafts = len(request.prompts) == 1, request.mode != "plain"
        if drafts and not alone:
            raise ValueError("a batch is decoded without drafts")
        generator = self._generator(request)
        buffered = 0  # tokens of the last round that have not been returned yet
        tokens: list[int] = []
        while len(arrivals.texts[0].tokens) < request.new_tokens:
            # GenAI cannot ignore end-of-text tokens. For a single text, such a token is not part of
            # the sequence; appending it as a prompt continues, at the cost of any other step. In a
            # batch, a text that has ended is padded, at the cost of one that has not.
            if alone and generator.is_done():
                generator.append_tokens(tokens)
            generator.generate_next_token()
            tokens = generator.get_next_tokens().tolist()
            some = [tokens] if alone else [[token] for token in tokens]
            arrivals.add(enumerate(some), same_round=buffered > 0)
            buffered = generator.get_speculative_stats()["tokens_buffered"] if drafts else 0


def _build(setup: Setup, checkpoint: Path) -> Path:
    """Convert a checkpoint. int4 has the builder's defaults for a CPU: blocks of 32, products in 8
    bits."""
    folder = setup.work / "genai" / f"{checkpoint.name}-{setup.precision}"
    return convert_checkpoint(
        folder, checkpoint, BUILDER, "-i", checkpoint, "-o", folder,
        "-p", PRECISIONS[setup.precision], "-e", "cpu", "-c", folder.parent / "cache",
        "--extra_options", "hf_token=false",
    )  # fmt: skip


def _link_draft(draft: Path, folder: Path) -> dict[str, Any]:
    """The draft's section for the target's configuration. The draft's files are linked into the
    target's folder, where GenAI expects them."""
    place = folder / "draft"
    place.mkdir(exist_ok=True)
    for file in draft.glob("model.onnx*"):
        (place / file.name).unlink(missing_ok=True)
        (place / file.name).hardlink_to(file)
    section: dict[str, Any] = json.loads((draft / "genai_config.json").read_text())["model"]
    return {**section["decoder"], "filename": "draft/model.onnx"}
