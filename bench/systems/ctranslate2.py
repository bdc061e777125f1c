"""CTranslate2, on an encoder-decoder converted by its own converter.

It transcribes with the engine of faster-whisper, from the same features as the other systems.
"""

from __future__ import annotations

import json
import time
from typing import Any

import ctranslate2
import numpy as np

from .protocol import Request, Setup
from .worker import Arrivals, convert_checkpoint, step_share, weights_bytes

library: Any = ctranslate2  # has no annotations
CONVERTER = "ctranslate2.converters.transformers"
WEIGHTS = "model.bin"


class CTranslateWorker:
    """See `worker.Worker`."""

    def __init__(self, setup: Setup):
        config = json.loads((setup.target / "config.json").read_text())
        self._sound, self._end = config["model_type"] == "whisper", config["eos_token_id"]
        self._setup = setup
        self._folder = setup.work / "ctranslate2" / f"{setup.target.name}-{setup.precision}"
        convert_checkpoint(
            self._folder, setup.target, CONVERTER, "--model", setup.target, "--output_dir",
            self._folder, "--quantization", setup.precision, "--force",
        )  # fmt: skip

    def load(self) -> dict[str, Any]:
        setup = self._setup
        kind = library.models.Whisper if self._sound else library.Translator
        self._model = kind(
            str(self._folder), compute_type=setup.precision, intra_threads=setup.threads
        )
        (file,) = self._folder.glob("*vocabulary.json")
        self._tokens: list[str] = json.loads(file.read_text())
        return {
            "ctranslate2": library.__version__,
            "dtype": setup.precision,
            "weights": step_share(setup.target) * weights_bytes(self._folder, WEIGHTS),
            "draft_weights": 0,
            "cache_element": 4,
        }

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        if len(request.prompts) > 1:
            raise ValueError("texts are decoded one at a time")
        library.set_random_seed(request.seed)
        sampling: dict[str, Any] = {"beam_size": 1}
        if request.temperature:
            sampling |= {"sampling_topk": 0, "sampling_temperature": request.temperature}
        if self._sound:
            self._transcribe(request, arrivals, sampling)
        else:
            self._translate(request, arrivals, sampling)

    def _translate(self, request: Request, arrivals: Arrivals, sampling: dict[str, Any]) -> None:
        """Decode with a callback for each token. The encoder's time is not available."""

        begin = request.begin[1:]  # CTranslate2 adds the first one itself

        def on_token(step: Any) -> bool:
            if step.step >= len(begin):  # the callback is also called for the given tokens
                arrivals.add([(0, [step.token_id])])
            return False

        self._model.translate_batch(
            [[self._tokens[i] for i in request.prompts[0]]],
            target_prefix=[[self._tokens[i] for i in begin]],
            max_input_length=0, min_decoding_length=len(begin) + request.new_tokens,
            max_decoding_length=len(begin) + request.new_tokens, callback=on_token, **sampling,
        )  # fmt: skip

    def _transcribe(self, request: Request, arrivals: Arrivals, sampling: dict[str, Any]) -> None:
        """Transcribe in two calls, for the first token and for the rest, because a call returns all
        of its tokens at the end."""
        begin, features = time.perf_counter(), np.asarray(request.prompts[0])[None]
        encoded = self._model.encode(library.StorageView.from_array(features))
        arrivals.texts[0].notes["encode"] = time.perf_counter() - begin
        output = list(request.begin)
        prompt_size = sum(self._tokens[token].startswith("<|") for token in output)
        for count in (1, request.new_tokens - 1):
            # CTranslate2 reserves half of max_length for the prompt. Tokens of the output so far
            # count against the other half, and are returned again.
            max_length = 2 * (len(output) - prompt_size + count)
            (result,) = self._model.generate(
                encoded, [output], max_length=max_length, suppress_blank=False,
                suppress_tokens=[self._end], **sampling,
            )  # fmt: skip
            tokens = result.sequences_ids[0][-count:]
            arrivals.add([(0, tokens)])
            output += tokens
