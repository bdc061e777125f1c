"""Transformers' `generate`: plain, with an assistant model, with prompt lookup."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from .protocol import Batch, Request, Setup
from .worker import Arrivals, weights_bytes

library: Any = transformers  # most of it is not annotated


class _Streamer:
    """Hands tokens to the texts, a `put` a round; the first `put` is the prompts."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals, self._prompt = arrivals, True

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompt:  # of several texts, each has one
            rows = tokens.reshape(len(self._arrivals.texts), -1).tolist()
            self._arrivals.add(enumerate(rows))
        self._prompt = False

    def end(self) -> None:
        pass


class TransformersWorker:
    """See `worker.Worker`. The draft is loaded when a request drafts."""

    def __init__(self, setup: Setup):
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        torch.set_num_threads(setup.threads)
        self._setup = setup
        self._draft: Any = None

    def load(self) -> dict[str, Any]:
        self._target = _load(self._setup.target)
        draft = self._setup.draft
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "weights": sum(x.numel() * x.element_size() for x in self._target.parameters()),
            "draft_weights": weights_bytes(draft) if draft else 0,
            "cache_element": 4,
        }

    def generate(self, request: Request | Batch, arrivals: Arrivals) -> None:
        torch.manual_seed(request.seed)
        ids = torch.tensor(request.prompts)
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature:
            unrestricted = {"top_k": 0, "top_p": 1.0}
            sampling = {"do_sample": True, "temperature": request.temperature, **unrestricted}
        with torch.inference_mode():
            self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.new_tokens,
                streamer=_Streamer(arrivals),
                **sampling,
                **self._drafting(request),
            )

    def _drafting(self, request: Request | Batch) -> dict[str, Any]:
        if request.mode == "lookup":
            return {"prompt_lookup_num_tokens": request.gamma}
        if request.mode == "plain":
            return {}
        if self._draft is None:
            if self._setup.draft is None:
                raise ValueError("no draft model was given")
            self._draft = _load(self._setup.draft)
            self._defaults = self._draft.generation_config
        own = self._draft.generation_config = copy.deepcopy(self._defaults)
        if request.mode == "draft":
            own.num_assistant_tokens = request.gamma
            own.num_assistant_tokens_schedule = "constant"
            own.assistant_confidence_threshold = 0.0
        return {"assistant_model": self._draft}


def _load(folder: Path) -> Any:
    model = library.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # so that every text has all its tokens
    return model
