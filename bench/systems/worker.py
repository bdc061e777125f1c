"""The process of a system. Its loop knows no system: each has a module with a `Worker`.

Nothing of the runtime is imported here, so that the memory of the others is theirs.
"""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from ..core.clock import Sample, lost_seconds, sample
from ..core.kept import kept
from ..core.machine import resident
from . import SYSTEMS
from .protocol import Batch, Request, Setup, Steps, Text, Unavailable


class Arrivals:
    """Which tokens came when: seconds, and seconds lost, since it was made. notes: what a worker
    wants to tell with them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.lost: list[float] = []
        self.notes: dict[str, Any] = {}
        self._round = 0  # index of its first token
        self._lost, self._begin = lost_seconds(), time.perf_counter()

    def now(self) -> tuple[float, float]:
        """Seconds, and seconds lost, since it was made."""
        return time.perf_counter() - self._begin, lost_seconds() - self._lost

    def arrived(
        self,
        tokens: Sequence[int],
        *,
        same_round: bool = False,
        at: tuple[float, float] | None = None,
    ) -> None:
        """Tokens that have just come, or did at a time. same_round: with those before; all of them
        get this time."""
        now, lost = at or self.now()
        if not same_round:
            self._round = len(self.tokens)
        self.tokens += tokens
        size = len(self.tokens) - self._round
        self.times[self._round :] = [now] * size
        self.lost[self._round :] = [lost] * size

    def text(self) -> Text:
        """All that came."""
        return Text(self.tokens, self.times, self.lost, resident(), self.notes)


def arrived_together(texts: Sequence[Arrivals], tokens: Sequence[Sequence[int]]) -> None:
    """Tokens of several texts, a sequence each, that have just come."""
    at = texts[0].now()  # reading what was lost takes a while
    for text, some in zip(texts, tokens, strict=True):
        text.arrived(some, at=at)


class Worker(Protocol):
    """What a system's module has. Prefixes of earlier prompts are not reused.

    load: what `loading` gave. facts: see `Peer`; those that `serve` does not add. One worker has
    `steps` too, from `Steps` to samples by name.
    """

    load: Sample
    facts: dict[str, Any]

    def __init__(self, setup: Setup): ...

    def generate(self, request: Request, text: Arrivals) -> None:
        """Every token goes through `text`."""

    def batch(self, request: Batch, texts: Sequence[Arrivals]) -> None:
        """Arrivals for each text."""


def loading(load: Callable[[], Any]) -> tuple[Any, Sample]:
    """What a load gives, and what it took."""
    loaded: list[Any] = []
    taken = sample(lambda: loaded.append(load()))
    return loaded[0], taken


def converted(folder: Path, checkpoint: Path, module: str, *arguments: object) -> Path:
    """`folder`, filled by `python -m module` from the checkpoint, unless it has been.

    In a process of its own: what a conversion needs is no memory of the system's.
    """

    def convert() -> None:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode:
            lines = done.stdout.strip().splitlines() or [f"status {done.returncode}"]
            raise RuntimeError(f"{module} cannot convert the checkpoint: {lines[-1]}")

    return kept(folder, [checkpoint], convert)


def weights_bytes(folder: str | Path, pattern: str = "*.safetensors") -> int:
    """Of the files that hold a model's weights."""
    return sum(file.stat().st_size for file in Path(folder).glob(pattern))


def serve(pipe: Connection, name: str, setup: Setup) -> None:
    """The process of one system: facts first, then an answer to every request until the pipe ends.

    An answer may be `Unavailable`, whatever the system has failed with.
    """
    os.dup2(2, 1)  # libraries print what they like, and stdout is the suite's
    try:
        kind = SYSTEMS[name]
        module = importlib.import_module(f".{kind.module}", __package__)
        before = resident()["rss"]
        worker: Worker = getattr(module, kind.worker)(setup)
    except Exception as error:  # noqa: BLE001 - whatever it is, the system is missing with a reason
        pipe.send(_failed(error))
        return
    load = {"load_seconds": worker.load.seconds, "load_lost": worker.load.lost}
    pipe.send({"before": before, "loaded": resident()["peak"], **load, **worker.facts})
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


def _answer(worker: Any, request: Request | Batch | Steps) -> Any:
    if isinstance(request, Steps):
        return worker.steps(request), resident()["peak"]
    first = Arrivals()
    if isinstance(request, Request):
        worker.generate(request, first)
        return first.text()
    texts = [first, *(copy.deepcopy(first) for _ in request.prompts[1:])]  # of one beginning
    worker.batch(request, texts)
    return [text.text() for text in texts]
