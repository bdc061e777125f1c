"""The worker process of a system. The loop is the same for all systems, each of which has a module
with a `Worker`.

This module does not import the runtime, so that it does not add to the memory of other systems.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from ..core.cache import cached_folder, run_module
from ..core.clock import lost_seconds, sample
from ..core.machine import resident_memory
from . import SYSTEMS
from .protocol import Request, Setup, StepsRequest, Text, Unavailable

_SOURCE_ONLY = re.compile(r"^(model\.)?encoder\.|EncDecAttention\.[kv]\.|encoder_attn\.[kv]_proj\.")


class Arrivals:
    """Collects the tokens of a request's texts as they arrive. Times count from its
    construction."""

    def __init__(self, count: int) -> None:
        self.texts = [Text() for _ in range(count)]
        self._lost, self._begin = lost_seconds(), time.perf_counter()

    def add(self, tokens: Iterable[tuple[int, Sequence[int]]], *, same_round: bool = False) -> None:
        """Add tokens that have just arrived, with the numbers of their texts. same_round: they
        belong to the same round as the previous ones; all of these then get this time."""
        now, lost = time.perf_counter() - self._begin, lost_seconds() - self._lost
        for number, some in tokens:
            text = self.texts[number]
            text.tokens += some
            begin = text.times.index(text.times[-1]) if same_round else len(text.times)
            size = len(text.tokens) - begin
            text.times[begin:], text.lost[begin:] = [now] * size, [lost] * size


class Worker(Protocol):
    """The interface of a system. The constructor converts the checkpoints; `load`, which is timed,
    reads the converted files. A worker must not reuse prefixes of earlier prompts.

    Outrider's worker also has a method `time_steps`, from `StepsRequest` to samples by name.
    """

    def __init__(self, setup: Setup): ...

    def load(self) -> dict[str, Any]:
        """Load the model; returns the facts of a `Peer`, except those that `serve` adds."""

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        """Decode the texts, and add every token to `arrivals`."""


def convert_checkpoint(folder: Path, checkpoint: Path, module: str, *arguments: object) -> Path:
    """`folder`, filled by `python -m module` from the checkpoint, unless it is up to date.

    The conversion runs in a separate process, so that its memory does not count as the system's.
    """
    return cached_folder(folder, [checkpoint], lambda: run_module(module, *arguments))


def weights_bytes(folder: Path, pattern: str = "*.safetensors") -> int:
    """Total size of the files that contain a model's weights."""
    return sum(file.stat().st_size for file in folder.glob(pattern))


def step_share(checkpoint: Path) -> float:
    """The share of the weights that a step reads. It excludes an encoder-decoder's encoder and the
    projections that compute keys and values of the source."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                sizes[name] = math.prod(file.get_slice(name).get_shape())
    read = sum(size for name, size in sizes.items() if not _SOURCE_ONLY.search(name))
    return read / sum(sizes.values())


def serve(pipe: Connection, name: str, setup: Setup) -> None:
    """Main function of a worker process: send the facts, then answer every request until the pipe
    is closed.

    If the system raises any error, the answer is `Unavailable`.
    """
    os.dup2(2, 1)  # stdout belongs to the suite, and libraries may print
    # A terminal sends Ctrl-C to every process; the suite reports it, so the worker ends silently.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    facts: dict[str, Any] = {}
    try:
        module, kind = SYSTEMS[name].worker.split(".")
        worker_class = getattr(importlib.import_module(f".{module}", __package__), kind)
        facts["before"], _ = resident_memory()
        worker: Worker = worker_class(setup)
        taken = sample(lambda: facts.update(worker.load()))
    except Exception as error:  # noqa: BLE001 - any failure becomes the reason why it is missing
        pipe.send(_unavailable(error))
        return
    facts |= {"load_seconds": taken.seconds, "load_lost": taken.lost}
    pipe.send({**facts, "loaded": resident_memory()[1]})
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_answer(worker, request))
        except Exception as error:  # noqa: BLE001 - as above
            pipe.send(_unavailable(error))


def _unavailable(error: Exception) -> Unavailable:
    traceback.print_exc()
    return Unavailable(f"{type(error).__name__}: {error}")


def _answer(worker: Any, request: Request | StepsRequest) -> Any:
    if isinstance(request, StepsRequest):
        return worker.time_steps(request)
    arrivals = Arrivals(len(request.prompts))
    worker.generate(request, arrivals)
    for text in arrivals.texts:
        _, text.peak = resident_memory()
    return arrivals.texts
