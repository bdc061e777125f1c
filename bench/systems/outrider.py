"""Outrider, under the same conditions as the peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime  # a library, not memory or loading time of the model

from runtime.backends.engine import Engine
from runtime.bundle import load
from runtime.files.torch_files import ENCODER_WEIGHTS_FILE
from runtime.sequence import ActiveSequence
from runtime.sequence import Request as RuntimeRequest
from runtime.text.engine import TextEngine
from runtime.text.options import Options

from ..core.clock import Sample, sample_in_turn
from ..core.pair import build_bundle
from .protocol import Request, Setup, StepsRequest
from .worker import Arrivals

WARM_UPS = 3  # of a step


class OutriderWorker:
    """See `worker.Worker`."""

    engine: TextEngine

    def __init__(self, setup: Setup):
        self._setup = setup
        self._folder = build_bundle(
            setup.target, setup.draft, setup.work, max_len=setup.max_len, precision=setup.precision
        )

    def load(self) -> dict[str, Any]:
        setup = self._setup
        # The same prompt is decoded once in every mode; rows that a slot still holds must not help.
        self.engine = load(self._folder, slots=setup.slots, threads=setup.threads, reuse=False)
        return {
            "outrider": f"onnxruntime {onnxruntime.__version__}",
            "dtype": setup.precision,
            "weights": self._step_bytes("target"),
            "parameters": self.engine.manifest.pair.target.parameters,
            "draft_weights": self._step_bytes("draft"),
            "cache_element": 4,
            "plain_width": self.engine.decoder.target.min_width,
        }

    def _step_bytes(self, role: str) -> int:
        """Bytes of the weights that a step reads: all except the encoder's."""
        encoder = self._folder / role / ENCODER_WEIGHTS_FILE
        return self.engine.memory.get(role, 0) - (encoder.stat().st_size if encoder.exists() else 0)

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        """Like `TextEngine.batch` with a slot for each text, but all prompts are read before the
        first round, and the times of rounds are recorded."""
        decoder, numbers = self.engine.decoder, dict[ActiveSequence, int]()
        notes: dict[str, float] = {}
        try:
            for number, prompt in enumerate(request.prompts):
                source = prompt if request.begin else None
                options = Options(**_options(request), seed=request.seed + number, source=source)
                ids = list(request.begin or prompt)
                runtime_request = self.engine.request(ids, options)
                if request.begin:
                    notes = {"encode": self._encode(runtime_request)}
                sequence = decoder.admit(runtime_request)
                numbers[sequence] = number
                arrivals.add([(number, [token.id for token in sequence.output])])
            while running := [x for x in numbers if x.finish_reason is None]:
                lengths = {x: len(x.output) for x in running}
                decoder.round(running)
                arrivals.add(
                    (numbers[x], [token.id for token in x.output[lengths[x] :]]) for x in running
                )
            for sequence, number in numbers.items():
                arrivals.texts[number].notes = {**sequence.stats.summary(), **notes}
        finally:
            for sequence in numbers:
                decoder.release(sequence)

    def _encode(self, request: RuntimeRequest) -> float:
        """Run the encoders, the target's and the draft's (which would otherwise run later); returns
        the seconds. Discards the source that the slot may still hold from another mode's text."""
        begin, decoder = time.perf_counter(), self.engine.decoder
        drafts = decoder.draft is not None and request.gamma and request.draft == "model"
        for model in (decoder.target, decoder.draft if drafts else None):
            if model is not None:
                model.cached_rows.set_source(0, ())
                model.encode(0, request.source)
        return time.perf_counter() - begin

    def time_steps(self, request: StepsRequest) -> dict[str, list[Sample]]:
        """See `StepsRequest`."""
        decoder, position = self.engine.decoder, np.full(request.slots, request.position)

        def call(engine: Engine, width: int) -> Callable[[], object]:
            ids, index = np.ones((request.slots, width), np.int64), np.arange(width)
            return lambda: engine.forward(ids, position, index)

        calls = {str(n): call(decoder.target, n) for n in request.widths}
        if decoder.draft is not None:
            calls["draft"] = call(decoder.draft, 1)
        with self.engine.exclusive_access():
            for work in [*calls.values()] * (WARM_UPS - 1):  # `sample_in_turn` does the last one
                work()
            return sample_in_turn(calls, rounds=request.rounds, patience=request.patience)


def _options(request: Request) -> dict[str, Any]:
    """The fields of `Options` for a request, except the seed."""
    gammas: dict[str, int | str] = {"plain": 0, "auto": "auto"}
    return {
        "gamma": gammas.get(request.mode, request.gamma),
        "draft": "ngram" if request.mode == "lookup" else None,
        "max_new_tokens": request.new_tokens,
        "temperature": request.temperature,
        "ignore_eos": True,
    }
