"""The process of a system. Its loop knows no system: each has a module with a `Worker`.

Nothing of the runtime is imported here, so that the memory of the others is theirs.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import time
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from ..core.clock import lost_seconds, sample
from ..core.kept import kept, run_module
from ..core.machine import resident
from . import SYSTEMS
from .protocol import Request, Setup, Steps, Text, Unavailable

_OF_SOURCE = re.compile(r"^(model\.)?encoder\.|EncDecAttention\.[kv]\.|encoder_attn\.[kv]_proj\.")


class Arrivals:
    """The texts of a request, to which tokens come. Times are since it was made."""

    def __init__(self, count: int = 1) -> None:
        self.texts = [Text() for _ in range(count)]
        self._lost, self._begin = lost_seconds(), time.perf_counter()

    def add(self, tokens: Iterable[tuple[int, Sequence[int]]], *, same_round: bool = False) -> None:
        """Tokens that have just come, by the number of their text. same_round: with those before;
        all of them get this time."""
        now, lost = time.perf_counter() - self._begin, lost_seconds() - self._lost
        for number, some in tokens:
            text = self.texts[number]
            text.tokens += some
            begin = text.times.index(text.times[-1]) if same_round else len(text.times)
            size = len(text.tokens) - begin
            text.times[begin:], text.lost[begin:] = [now] * size, [lost] * size


class Worker(Protocol):
    """What a system's module has. What it is made of is converted when it is made, and read by
    `load`, which is timed. It reuses no prefixes of earlier prompts.

    One worker has `steps` too, from `Steps` to samples by name.
    """

    def __init__(self, setup: Setup): ...

    def load(self) -> dict[str, Any]:
        """The facts of a `Peer`, those apart that `serve` adds."""

    def generate(self, request: Request, arrivals: Arrivals) -> None:
        """Every token goes through `arrivals`."""


def converted(folder: Path, checkpoint: Path, module: str, *arguments: object) -> Path:
    """`folder`, filled by `python -m module` from the checkpoint, unless it has been.

    In a process of its own: what a conversion needs is no memory of the system's.
    """

    def convert() -> None:
        if said := run_module(module, *arguments):
            raise RuntimeError(f"{module} cannot convert the checkpoint: it {said}")

    return kept(folder, [checkpoint], convert)


def weights_bytes(folder: Path, pattern: str = "*.safetensors") -> int:
    """Of the files that hold a model's weights."""
    return sum(file.stat().st_size for file in folder.glob(pattern))


def step_share(checkpoint: Path) -> float:
    """The part of the weights that a step reads. An encoder-decoder's encoder, and what makes keys
    and values of the source, are not in it."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                sizes[name] = math.prod(file.get_slice(name).get_shape())
    read = sum(size for name, size in sizes.items() if not _OF_SOURCE.search(name))
    return read / sum(sizes.values())


def serve(pipe: Connection, name: str, setup: Setup) -> None:
    """The process of one system: facts first, then an answer to every request until the pipe ends.

    An answer may be `Unavailable`, whatever the system has failed with.
    """
    os.dup2(2, 1)  # libraries print what they like, and stdout is the suite's
    facts: dict[str, Any] = {}
    try:
        module, kind = SYSTEMS[name].worker.split(".")
        made = getattr(importlib.import_module(f".{module}", __package__), kind)
        facts["before"], _ = resident()
        worker: Worker = made(setup)
        taken = sample(lambda: facts.update(worker.load()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the system is missing with a reason
        pipe.send(_failed(error))
        return
    facts |= {"load_seconds": taken.seconds, "load_lost": taken.lost}
    pipe.send({**facts, "loaded": resident()[1]})
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(_answer(worker, request))
        except Exception as error:  # noqa: BLE001 - as above
            pipe.send(_failed(error))


def _failed(error: Exception) -> Unavailable:
    traceback.print_exc()
    return Unavailable(f"{type(error).__name__}: {error}")


def _answer(worker: Any, request: Request | Steps) -> Any:
    if isinstance(request, Steps):
        return worker.steps(request)
    arrivals = Arrivals(len(request.prompts))
    worker.generate(request, arrivals)
    for text in arrivals.texts:
        _, text.peak = resident()
    return arrivals.texts
