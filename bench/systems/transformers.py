"""Transformers' `generate`: plain, with an assistant model, with prompt lookup."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from .protocol import Batch, Request, Setup
from .worker import Arrivals, arrived_together, loading, weights_bytes

library: Any = transformers  # most of it is not annotated


class _Streamer:
    """Hands tokens to the texts, a `put` a round; the first `put` is the prompts."""

    def __init__(self, texts: Sequence[Arrivals]) -> None:
        self._texts, self._prompt = texts, True

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompt:  # of several texts, each has one
            arrived_together(self._texts, tokens.reshape(len(self._texts), -1).tolist())
        self._prompt = False

    def end(self) -> None:
        pass


class TransformersWorker:
    """See `worker.Worker`. The draft is loaded when a request drafts."""

    def __init__(self, setup: Setup):
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        torch.set_num_threads(setup.threads)
        self._target, self.load = loading(lambda: _load(setup.target))
        self._draft_folder = setup.draft
        self._draft: Any = None
        self.facts = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "weights": sum(x.numel() * x.element_size() for x in self._target.parameters()),
            "draft_weights": weights_bytes(setup.draft) if setup.draft else 0,
            "cache_element": 4,
        }

    def generate(self, request: Request, text: Arrivals) -> None:
        torch.manual_seed(request.seed)
        self._generate([request.prompt], request, [text], **_sampling(request.temperature))

    def batch(self, request: Batch, texts: Sequence[Arrivals]) -> None:
        self._generate(request.prompts, request, texts, do_sample=False)

    def _generate(
        self, prompts: list[list[int]], request: Request | Batch, texts: Sequence[Arrivals],
        **sampling: Any,
    ) -> None:  # fmt: skip
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.new_tokens,
                streamer=_Streamer(texts),
                **sampling,
                **self._drafting(request),
            )

    def _drafting(self, request: Request | Batch) -> dict[str, Any]:
        if request.mode == "lookup":
            return {"prompt_lookup_num_tokens": request.gamma}
        if request.mode not in ("draft", "assistant"):
            return {}
        if self._draft is None:
            if self._draft_folder is None:
                raise ValueError("no draft model was given")
            self._draft = _load(self._draft_folder)
            self._defaults = self._draft.generation_config
        own = self._draft.generation_config = copy.deepcopy(self._defaults)
        if request.mode == "draft":
            own.num_assistant_tokens = request.gamma
            own.num_assistant_tokens_schedule = "constant"
            own.assistant_confidence_threshold = 0.0
        return {"assistant_model": self._draft}


def _load(folder: str) -> Any:
    model = library.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # so that every text has all its tokens
    return model


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
