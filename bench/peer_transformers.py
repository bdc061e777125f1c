"""Transformers' `generate` as a peer: plain, with an assistant model, with prompt lookup."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from .peer_worker import Clock, arrived_together, weights_bytes
from .peers import Batch, Request, Setup

library: Any = transformers  # most of it is not annotated


class _Streamer:
    """Hands tokens to the clocks, a `put` a round; the first `put` is the prompts."""

    def __init__(self, clocks: Sequence[Clock]) -> None:
        self._clocks, self._prompt = clocks, True

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompt:  # of several texts, each has one
            arrived_together(self._clocks, tokens.reshape(len(self._clocks), -1).tolist())
        self._prompt = False

    def end(self) -> None:
        pass


class Worker:
    """See `peer_worker.Worker`. The draft is loaded when a request drafts."""

    def __init__(self, setup: Setup):
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
        torch.set_num_threads(setup.threads)
        begin = time.perf_counter()
        self._target = _load(setup.target)
        seconds = time.perf_counter() - begin
        self._draft_folder = setup.draft
        self._draft: Any = None
        self.facts = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "load_seconds": seconds,
            "weights": sum(x.numel() * x.element_size() for x in self._target.parameters()),
            "draft_weights": weights_bytes(setup.draft) if setup.draft else 0,
            "cache_element": 4,
        }

    def generate(self, request: Request, clock: Clock) -> None:
        torch.manual_seed(request.seed)
        self._generate([request.prompt], request, [clock], **_sampling(request.temperature))

    def batch(self, request: Batch, clocks: Sequence[Clock]) -> None:
        self._generate(request.prompts, request, clocks, do_sample=False)

    def _generate(
        self, prompts: list[list[int]], request: Request | Batch, clocks: Sequence[Clock],
        **sampling: Any,
    ) -> None:  # fmt: skip
        self._target.set_attn_implementation("eager" if request.mode == "eager" else "sdpa")
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.new_tokens,
                streamer=_Streamer(clocks),
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
