"""What bench/side.py runs: every prompt through every system, one after the other in an order that
changes, and a text of each in a process of its own for what it holds in memory."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .peers import PEERS, Peer, Request, StepCosts, Text, Unavailable
from .side_pair import Pair
from .workloads import Workload

GAMMA = 4
WARM_UPS = 3
MAX_LEN = 2048
OURS = "outrider"
MODES = ("plain", "draft", "assistant", "auto", "lookup")  # "eager" is never the faster one
PRECISIONS = {"llama.cpp": ("float32", "q8_0", "q4_0")}
FEW = {OURS: ("plain", "draft", "auto"), "transformers": ("plain", "assistant")}
MEMORY_SHAPE = 128, 64  # (prompt, output) tokens


@dataclass(frozen=True)
class System:
    """A mode of a peer. name: what tables call it."""

    peer: str
    mode: str
    precision: str = "float32"

    @property
    def name(self) -> str:
        weights = "" if self.precision == "float32" else f" {self.precision}"
        return f"{self.peer}{weights} {self.mode}"

    @property
    def worker(self) -> str:
        """What it shares a process with."""
        return f"{self.peer} {self.precision}"

    @property
    def among_few(self) -> bool:
        """Whether it is there where texts take long."""
        return self.precision == "float32" and self.mode in FEW.get(self.peer, ("plain",))


def systems(wanted: Sequence[str]) -> list[System]:
    """Modes of the peers; of quantised weights the plain one."""
    made = []
    for name, kind in PEERS.items():
        for precision in PRECISIONS.get(name, ("float32",)) if name in wanted else ():
            modes = [m for m in MODES if m in kind.modes]
            made += [
                System(name, mode, precision)
                for mode in modes[: None if precision == "float32" else 1]
            ]
    return made


@dataclass(frozen=True)
class Job:
    """A workload at a temperature, and who gets it."""

    load: Workload
    temperature: float
    systems: Sequence[System]

    @property
    def name(self) -> str:
        return f"{self.load.name}, temperature {self.temperature:g}"


@dataclass(frozen=True)
class Place:
    """Where and with what workers run. work: folder of what they convert."""

    pair: Pair
    threads: int
    work: Path

    def start(self, system: System, *, draft: bool = True, slots: int = 1) -> Peer:
        """A worker of the system's peer and precision. Raises Unavailable."""
        return Peer(
            system.peer, self.pair.target, draft=self.pair.draft if draft else None,
            threads=self.threads, work=self.work, precision=system.precision, max_len=MAX_LEN,
            slots=slots,
        )  # fmt: skip


@dataclass
class Run:
    """By the name of a job: texts, for each prompt by system, and the costs of our engines, for
    each prompt. missing: why, by system or worker. By worker: facts, and loads, seconds of each
    time that it was started. memory: see `measure_memory`."""

    texts: dict[str, list[dict[str, Text]]] = field(default_factory=dict)
    costs: dict[str, list[StepCosts | None]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    loads: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def started(self, system: System, peer: Peer) -> None:
        self.facts.setdefault(system.worker, peer.facts)
        self.loads.setdefault(system.worker, []).append(peer.facts["load_seconds"])

    def lacks(self, name: str, error: Exception) -> None:
        """Note why there is no such system; no folder of this machine goes into public text."""
        self.missing[name] = re.sub(r"/\S*/", "", str(error))
        say(f"missing: {name}: {error}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def start(
    chosen: Sequence[System], place: Place, run: Run, stack: ExitStack, *, slots: int = 1
) -> dict[str, Peer]:
    """Workers by `System.worker`; those that cannot be started are noted as missing.

    On some machines what is loaded first gets slower memory, by 15 % a token (docs/LOG.md). So the
    first worker is started twice, and the one that was first is never asked.
    """
    peers: dict[str, Peer] = {}
    for system in chosen[:1]:
        with suppress(Unavailable):
            stack.enter_context(place.start(system, slots=slots))
    for system in chosen:
        if system.worker in peers or system.worker in run.missing:
            continue
        say(f"starting {system.worker}")
        try:
            peer = place.start(system, slots=slots)
        except Unavailable as error:
            run.lacks(system.worker, error)
            continue
        peers[system.worker] = stack.enter_context(peer)
        run.started(system, peer)
    return peers


def measure(jobs: Sequence[Job], place: Place, run: Run, between: Callable[[], object]) -> None:
    """Every prompt of every job through its systems. between: called after each prompt."""
    every = list(dict.fromkeys(system for job in jobs for system in job.systems))
    with ExitStack() as stack:
        peers = start(every, place, run, stack)
        _warm_up(peers, every, jobs, run)
        total = sum(_weight(job) * len(job.load.prompts) for job in jobs)
        done, begin = 0, time.perf_counter()
        for job in jobs:
            rows = run.texts.setdefault(job.name, [])
            for number, prompt in enumerate(job.load.prompts):
                alive = [s for s in job.systems if s.worker in peers and s.name not in run.missing]
                rows.append({})
                for system in order(alive, number, len(job.load.prompts)):
                    request = Request(
                        prompt, job.load.new_tokens, system.mode, job.temperature, number, GAMMA
                    )
                    text = ask(peers, system, request, run)
                    if text is not None:
                        rows[-1][system.name] = text
                position = len(prompt) + job.load.new_tokens // 2
                if (ours := peers.get(f"{OURS} float32")) is not None:
                    try:
                        cost = ours.costs(position, GAMMA)
                    except Unavailable as error:  # its texts are missing too
                        run.lacks(f"costs of {OURS}", error)
                        cost = None
                    run.costs.setdefault(job.name, []).append(cost)
                between()
                done += _weight(job)
                left = (time.perf_counter() - begin) / done * (total - done)
                say(f"{job.name}: {done / total:.0%}, {left:.0f} s to go")


def order(alive: Sequence[System], number: int, count: int) -> list[System]:
    """Of prompt `number` of `count`: begun elsewhere each time, and every other time backwards, so
    that a system does not always follow the same one."""
    turn = number * len(alive) // count
    turned = [*alive[turn:], *alive[:turn]]
    return turned[::-1] if number % 2 else turned


def _weight(job: Job) -> int:
    """About how long a prompt takes: a step is worth 8 tokens of a prefill."""
    return len(job.systems) * (len(job.load.prompts[0]) + 8 * job.load.new_tokens)


def ask(peers: dict[str, Peer], system: System, request: Request, run: Run) -> Text | None:
    """Its text; None from a system that has no such mode, which is noted."""
    try:
        return peers[system.worker].generate(request)
    except Unavailable as error:
        run.lacks(system.name, error)
        return None


def _warm_up(
    peers: dict[str, Peer], every: Sequence[System], jobs: Sequence[Job], run: Run
) -> None:
    say("warming up")
    for turn in range(WARM_UPS):
        for number, system in enumerate(every):
            if system.worker in peers and system.name not in run.missing:
                prompt = jobs[turn % len(jobs)].load.prompts[0][: 8 + len(every) * turn + number]
                ask(peers, system, Request(prompt, 12, system.mode, 0.0, turn, GAMMA), run)


def measure_memory(chosen: Sequence[System], prompt: list[int], place: Place, run: Run) -> None:
    """Each system in a fresh process that decodes one text; a draft is given only to draft with.

    Of each: bytes of its `peak`, `before` a model was loaded, of `weights` and `draft_weights`.
    """
    for system in chosen:
        if system.name in run.missing or system.worker in run.missing:
            continue
        drafts = system.mode not in ("plain", "lookup")
        say(f"memory of {system.name}")
        try:
            with place.start(system, draft=drafts) as peer:
                run.started(system, peer)
                request = Request(prompt, MEMORY_SHAPE[1], system.mode, gamma=GAMMA)
                peak = peer.generate(request).memory["peak"]
                names = "before", "weights", "draft_weights", "cache_element"
                run.memory[system.name] = {"peak": peak, **{n: peer.facts[n] for n in names}}
        except Unavailable as error:
            run.lacks(f"memory of {system.name}", error)
