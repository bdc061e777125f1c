"""Outrider under the same conditions as its peers: a process of its own, one prompt at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runtime.bundle import load
from runtime.text_engine import TextEngine

from .peer_worker import Clock
from .peers import Request, Setup


class Worker:
    """See `peer_worker.Worker`. precision: a dtype of the graphs."""

    def __init__(self, setup: Setup):
        bundle = build(setup)
        begin = time.perf_counter()
        self.engine: TextEngine = load(bundle, slots=1, threads=setup.threads, verify=False)
        self.facts = {
            "outrider": f"onnxruntime {version('onnxruntime')}",
            "dtype": setup.precision,
            "load_seconds": f"{time.perf_counter() - begin:.3f}",
        }

    def generate(self, request: Request, clock: Clock) -> None:
        for event in self.engine.stream(request.prompt, **options(request)):
            if event.tokens:
                clock.arrived(event.token_ids)
            if event.result is not None:
                clock.notes = event.result.stats.summary()


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
    shared = {key: str(value) for key, value in asdict(setup).items()}
    commands = [
        ["export", "--model", shared["target"], "--draft", setup.draft or "none", "--out",
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
