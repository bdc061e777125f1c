"""Outrider under the same conditions as its peers: a process of its own, one prompt at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtime.bundle import load
from runtime.sequence import ActiveSequence
from runtime.text.engine import TextEngine
from runtime.text.options import Options

from .decode import step
from .peer_worker import Clock, arrived_together
from .peers import Batch, Request, Setup, StepCosts
from .timing import alternate

CALLS, PATIENCE = 5, 2.0  # of each width, for its cost; seconds for undisturbed ones


class Worker:
    """See `peer_worker.Worker`. precision: a dtype of the graphs."""

    def __init__(self, setup: Setup):
        bundle = build(setup)
        begin = time.perf_counter()
        self.engine: TextEngine = load(bundle, slots=setup.slots, threads=setup.threads)
        self.facts = {
            "outrider": f"onnxruntime {version('onnxruntime')}",
            "dtype": setup.precision,
            "load_seconds": time.perf_counter() - begin,  # of both models, if there are two
            "weights": self.engine.memory["target"],
            "draft_weights": self.engine.memory.get("draft", 0),
            "cache_element": 4,
        }

    def generate(self, request: Request, clock: Clock) -> None:
        for event in self.engine.stream(request.prompt, **options(request)):
            if event.tokens:
                clock.arrived(event.token_ids)
            if event.result is not None:
                clock.notes = event.result.stats.summary()

    def batch(self, request: Batch, clocks: Sequence[Clock]) -> None:
        """As `TextEngine.batch` with a slot for each, and the times of the rounds."""
        decoder, sequence = self.engine.decoder, dict[ActiveSequence, Clock]()
        try:
            for number, (prompt, clock) in enumerate(zip(request.prompts, clocks, strict=True)):
                one = Request(prompt, request.new_tokens, request.mode, 0.0, number, request.gamma)
                joined = decoder.admit(self.engine.request(prompt, Options(**options(one))))
                sequence[joined] = clock
                clock.arrived([token.id for token in joined.output])
            while sequence:
                new = decoder.round(sequence)
                ids = [[token.id for token in new[text]] for text in sequence]
                arrived_together(list(sequence.values()), ids)
                for text in [text for text in sequence if text.finish_reason is not None]:
                    sequence.pop(text).notes = text.stats.summary()
                    decoder.release(text)
        finally:
            for text in sequence:
                decoder.release(text)

    def costs(self, position: int, gamma: int) -> StepCosts:
        """See `Peer.costs`; medians of a few calls, taken in alternation."""
        decoder = self.engine.decoder
        if decoder.draft is None:
            raise ValueError("no draft model was given")
        calls: dict[str, Callable[[], object]] = {"draft": step(decoder.draft, 1, position, 1)}
        for width in range(1, gamma + 2):
            calls[str(width)] = step(decoder.target, width, position, width)
        with self.engine.exclusive():
            figures = alternate(calls, rounds=CALLS, patience=PATIENCE)
        seconds = [1e-3 * figure.ms for figure in figures.values()]
        return StepCosts(seconds[0], seconds[1:])


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


def build(setup: Setup) -> Path:
    """The bundle of this pair, made as `make engines` makes it; finished parts are kept."""
    work = Path(setup.work)
    name = f"{Path(setup.target).name}-{Path(setup.draft).name if setup.draft else 'none'}"
    graphs, bundle = work / "graphs" / name, work / "bundle" / name
    commands = [
        ["export", "--model", setup.target, "--draft", setup.draft or "none", "--out",
         str(graphs), "--dtype", setup.precision, "--max-len", str(setup.max_len), "--cache",
         str(work / "cache")],
        ["engines", "--graphs", str(graphs), "--out", str(bundle)],
    ]  # fmt: skip
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stdout.strip().splitlines()[-1])
    return bundle
