"""Transformers' `generate`: plain, with an assistant model, and with prompt lookup.

Encoder-decoders use `GenerationMixin.generate` even if their class overrides it, as Whisper's does
to handle windows and languages.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from .protocol import Request, Setup
from .worker import Arrivals, step_share, weights_bytes

library: Any = transformers  # mostly without annotations


class _Streamer:
    """Adds tokens to the texts; each `put` is a round, and the first one is the prompts."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals, self._prompt = arrivals, True

    def put(self, tokens: torch.Tensor) -> None:
        if not self._prompt:  # with several texts, each gets one token
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
        self._encoder_seconds = 0.0  # seconds spent in encoders

    def load(self) -> dict[str, Any]:
        self._target = self._read(self._setup.target)
        draft = self._setup.draft
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": str(self._target.dtype).removeprefix("torch."),
            "weights": step_share(self._setup.target)
            * sum(x.numel() * x.element_size() for x in self._target.parameters()),
            "draft_weights": step_share(draft) * weights_bytes(draft) if draft else 0,
            "cache_element": 4,
        }

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        torch.manual_seed(request.seed)
        read = torch.tensor(np.array(request.prompts))
        inputs = {self._target.main_input_name: read}
        if not read.is_floating_point():
            inputs["attention_mask"] = torch.ones_like(read)
        if request.begin:
            inputs["decoder_input_ids"] = torch.tensor([request.begin])
        self._encoder_seconds = 0.0
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature:
            unrestricted = {"top_k": 0, "top_p": 1.0}
            sampling = {"do_sample": True, "temperature": request.temperature, **unrestricted}
        with torch.inference_mode():
            library.GenerationMixin.generate(
                self._target,
                **inputs,
                max_new_tokens=request.new_tokens,
                streamer=_Streamer(arrivals),
                **sampling,
                **self._drafting(request),
            )
        if request.begin:
            arrivals.texts[0].notes["encode"] = self._encoder_seconds

    def _drafting(self, request: Request) -> dict[str, Any]:
        if request.mode == "lookup":
            return {"prompt_lookup_num_tokens": request.gamma}
        if request.mode == "plain":
            return {}
        if self._draft is None:
            if self._setup.draft is None:
                raise ValueError("no draft model was given")
            self._draft = self._read(self._setup.draft)
            self._defaults = self._draft.generation_config
        own = self._draft.generation_config = copy.deepcopy(self._defaults)
        if request.mode == "draft":
            own.num_assistant_tokens = request.gamma
            own.num_assistant_tokens_schedule = "constant"
            own.assistant_confidence_threshold = 0.0
        return {"assistant_model": self._draft}

    def _read(self, folder: Path) -> Any:
        config = library.AutoConfig.from_pretrained(folder)
        kind = "AutoModelForCausalLM"
        if config.is_encoder_decoder:
            is_audio = hasattr(config, "num_mel_bins")
            kind = "AutoModelForSpeechSeq2Seq" if is_audio else "AutoModelForSeq2SeqLM"
        model = (
            getattr(library, kind)
            .from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
            .eval()
        )
        own = model.generation_config
        own.eos_token_id = None  # so that no text ends early
        # A checkpoint may name these too; no other system would apply them. Requests name the rest.
        own.repetition_penalty = own.min_p = None
        if config.is_encoder_decoder:
            self._time_encoder(model.get_encoder())
        return model

    def _time_encoder(self, encoder: Any) -> None:
        """Add the time of the encoder's calls to `_encoder_seconds`."""

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return forward(*args, **options)
            finally:
                self._encoder_seconds += time.perf_counter() - begin

        forward, encoder.forward = encoder.forward, timed
