"""python -m bench.peer_worker NAME SETUP: the process of one peer; a JSON line in, a line out.

A line in names a call and has its arguments; the first line out has facts. The loop knows no peer:
each has a module with a class `Worker` (see below).
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from .machine import resident
from .peers import PEERS, Batch, Request, Setup, Text
from .timing import lost_seconds


class Clock:
    """Notes which tokens came when: seconds, and seconds lost, since it was made. notes: what a
    worker wants to tell with them."""

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


def arrived_together(clocks: Sequence[Clock], tokens: Sequence[Sequence[int]]) -> None:
    """Tokens of several texts, a sequence each, that have just come."""
    at = clocks[0].now()  # reading what was lost takes a while
    for clock, some in zip(clocks, tokens, strict=True):
        clock.arrived(some, at=at)


class Worker(Protocol):
    """What a peer's module has under this name. Prefixes of earlier prompts are not reused.

    facts: see `Peer.facts`. One has `costs` too, with the arguments of `Peer.costs`.
    """

    facts: dict[str, Any]

    def __init__(self, setup: Setup): ...

    def generate(self, request: Request, clock: Clock) -> None:
        """Every token goes through the clock."""

    def batch(self, request: Batch, clocks: Sequence[Clock]) -> None:
        """A clock for each text."""


def converted(folder: Path, checkpoint: Path, module: str, *arguments: object) -> Path:
    """`folder`, filled by `python -m module` from the checkpoint, unless it has been.

    In a process of its own: what a conversion needs is no memory of the peer's.
    """
    stamp = folder / "bench.json"
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    wanted = json.dumps([[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files])
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"status {done.returncode}"]
        raise RuntimeError(f"{module} cannot convert the checkpoint: {lines[-1]}")
    stamp.write_text(wanted)  # last: what is half converted is made again
    return folder


def weights_bytes(checkpoint: str | Path, pattern: str = "*.safetensors") -> int:
    """Of the files that hold a model's weights."""
    return sum(file.stat().st_size for file in Path(checkpoint).glob(pattern))


def main(name: str, setup: Setup) -> None:
    # Libraries print what they like: to stderr, so that stdout has answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, object]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    def failed(error: Exception) -> dict[str, object]:
        traceback.print_exc()
        return {"unavailable": f"{type(error).__name__}: {error}"}

    try:
        made: type[Worker] = importlib.import_module(f".{PEERS[name].module}", __package__).Worker
        before = resident()["rss"]
        worker = made(setup)
    except Exception as error:  # noqa: BLE001 - whatever it is, the peer is missing with a reason
        answer(failed(error))
        return
    answer({**worker.facts, "before": before})
    for line in sys.stdin:
        try:
            for call, content in json.loads(line).items():
                answer(CALLS[call](worker, content))
        except Exception as error:  # noqa: BLE001 - as above
            answer(failed(error))


def _generate(worker: Worker, content: dict[str, Any]) -> dict[str, Any]:
    clock = Clock()
    worker.generate(Request(**content), clock)
    return _answer(clock)


def _batch(worker: Worker, content: dict[str, Any]) -> dict[str, Any]:
    request, clock = Batch(**content), Clock()
    clocks = [clock, *(copy.deepcopy(clock) for _ in request.prompts[1:])]  # of one beginning
    worker.batch(request, clocks)
    return {"texts": [_answer(clock) for clock in clocks]}


def _costs(worker: Any, content: dict[str, Any]) -> dict[str, Any]:
    return asdict(worker.costs(**content))


def _answer(clock: Clock) -> dict[str, Any]:
    return asdict(Text(clock.tokens, clock.times, clock.lost, resident(), clock.notes))


CALLS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "generate": _generate, "batch": _batch, "costs": _costs,
}  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], Setup(**json.loads(sys.argv[2])))
