"""Outrider under the same conditions as the others: a process of its own, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtime.bundle import load
from runtime.sequence import ActiveSequence
from runtime.text.engine import TextEngine
from runtime.text.options import Options

from ..core.clock import Sample, sampled
from ..core.costs import step
from ..core.pair import bundle
from .protocol import Batch, Request, Setup, Steps
from .worker import Arrivals, arrived_together, loading

WARM_UPS = 3  # of a step


class OutriderWorker:
    """See `worker.Worker`. precision: a dtype of the graphs."""

    def __init__(self, setup: Setup):
        draft = Path(setup.draft) if setup.draft else None
        folder = bundle(
            Path(setup.target), draft, Path(setup.work),
            max_len=setup.max_len, dtype=setup.precision,
        )  # fmt: skip
        self.engine: TextEngine
        self.engine, self.load = loading(
            lambda: load(folder, slots=setup.slots, threads=setup.threads)
        )
        self.facts = {
            "outrider": f"onnxruntime {version('onnxruntime')}",
            "dtype": setup.precision,
            "weights": self.engine.memory["target"],
            "draft_weights": self.engine.memory.get("draft", 0),
            "cache_element": 4,
        }

    def generate(self, request: Request, text: Arrivals) -> None:
        for event in self.engine.stream(request.prompt, **options(request)):
            if event.tokens:
                text.arrived(event.token_ids)
            if event.result is not None:
                text.notes = event.result.stats.summary()

    def batch(self, request: Batch, texts: Sequence[Arrivals]) -> None:
        """As `TextEngine.batch` with a slot for each, and the times of the rounds."""
        decoder, running = self.engine.decoder, dict[ActiveSequence, Arrivals]()
        try:
            for number, (prompt, text) in enumerate(zip(request.prompts, texts, strict=True)):
                one = Request(prompt, request.new_tokens, request.mode, 0.0, number, request.gamma)
                joined = decoder.admit(self.engine.request(prompt, Options(**options(one))))
                running[joined] = text
                text.arrived([token.id for token in joined.output])
            while running:
                new = decoder.round(running)
                ids = [[token.id for token in new[sequence]] for sequence in running]
                arrived_together(list(running.values()), ids)
                for done in [x for x in running if x.finish_reason is not None]:
                    running.pop(done).notes = done.stats.summary()
                    decoder.release(done)
        finally:
            for sequence in running:
                decoder.release(sequence)

    def steps(self, request: Steps) -> dict[str, list[Sample]]:
        """See `Steps`."""
        decoder = self.engine.decoder
        calls = {
            str(n): step(decoder.target, n, request.position, n, request.slots)
            for n in request.widths
        }
        if decoder.draft is not None:
            calls["draft"] = step(decoder.draft, 1, request.position, 1, request.slots)
        with self.engine.undisturbed():
            for call in [*calls.values()] * (WARM_UPS - 1):  # `sampled` has one
                call()
            return sampled(calls, rounds=request.rounds, patience=request.patience)


def options(request: Request) -> dict[str, Any]:
    """Those of `TextEngine.stream`."""
    modes: dict[str, dict[str, Any]] = {
        "plain": {"gamma": 0},
        "draft": {"gamma": request.gamma},
        "auto": {"gamma": "auto"},
        "lookup": {"draft": "ngram", "gamma": request.gamma},
    }
    return {
        **modes[request.mode],
        "max_new_tokens": request.new_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "ignore_eos": True,
    }
