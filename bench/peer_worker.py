"""python -m bench.peer_worker NAME SETUP: the process of one peer; a JSON line in, a line out.

The first line out has the peer's versions. The loop knows no peer: each has a module with a class
`Worker` (see below).
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from .machine import resident
from .peers import PEERS, Request, Setup, Text
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

    def arrived(self, tokens: Sequence[int], *, same_round: bool = False) -> None:
        """Tokens that have just come. same_round: with those before; all of them get this time."""
        now, lost = time.perf_counter() - self._begin, lost_seconds() - self._lost
        if not same_round:
            self._round = len(self.tokens)
        self.tokens += tokens
        size = len(self.tokens) - self._round
        self.times[self._round :] = [now] * size
        self.lost[self._round :] = [lost] * size


class Worker(Protocol):
    """What a peer's module has under this name. Prefixes of earlier prompts are not reused."""

    facts: dict[str, str]

    def __init__(self, setup: Setup): ...

    def generate(self, request: Request, clock: Clock) -> None:
        """Every token goes through the clock."""


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
        worker = made(setup)
    except Exception as error:  # noqa: BLE001 - whatever it is, the peer is missing with a reason
        answer(failed(error))
        return
    answer({**worker.facts})
    for line in sys.stdin:
        request, clock = Request(**json.loads(line)), Clock()
        try:
            worker.generate(request, clock)
        except Exception as error:  # noqa: BLE001 - as above
            answer(failed(error))
            continue
        answer(asdict(Text(clock.tokens, clock.times, clock.lost, resident(), clock.notes)))


if __name__ == "__main__":
    main(sys.argv[1], Setup(**json.loads(sys.argv[2])))
