"""What the side-by-side benchmark runs.

Every prompt goes through every system, one after the other in an order that changes
(`clock.order`), and so do batches. A text of each in a process of its own tells what it holds in
memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from runtime.costs import RoundCosts

from ...core import costs
from ...core.clock import Clock, order
from ...core.pair import Pair
from ...core.prompts import Workload
from ...systems import SYSTEMS
from ...systems.peer import MAX_LEN, Peer
from ...systems.protocol import Batch, Request, Steps, Text, Unavailable

GAMMA = 4
WARM_UPS = 3
OURS = "outrider"
MODES = ("plain", "draft", "assistant", "auto", "lookup")
FEW = {OURS: ("plain", "draft", "auto"), "transformers": ("plain", "assistant")}
TOGETHER = ("plain", "draft")
MEMORY_SHAPE = 128, 64  # (prompt, output) tokens
T = TypeVar("T")
Peers = dict[str, Peer]  # by `System.worker`


@dataclass(frozen=True)
class System:
    """A mode of a decoder. name: what tables call it."""

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
    """Modes of the decoders; of quantised weights the plain one."""
    return [
        System(name, mode, precision)
        for name, kind in SYSTEMS.items()
        if name in wanted
        for precision in kind.precisions
        for mode in MODES
        if mode in kind.modes and (precision == "float32" or mode == "plain")
    ]


@dataclass(frozen=True)
class Job:
    """A workload at a temperature, and who gets it."""

    load: Workload
    temperature: float
    systems: Sequence[System]

    @property
    def name(self) -> str:
        return f"{self.load.name}, temperature {self.temperature:g}"

    @property
    def weight(self) -> int:
        """About how long a prompt takes: a step is worth 8 tokens of a prefill."""
        return len(self.systems) * (len(self.load.prompts[0]) + 8 * self.load.new_tokens)


@dataclass(frozen=True)
class Place:
    """Where and with what workers run. work: folder of what they convert."""

    pair: Pair
    threads: int
    work: Path

    def start(self, system: System, *, draft: bool = True, slots: int = 1) -> Peer:
        """A worker of the system. Raises Unavailable."""
        return Peer(
            system.peer, self.pair.target, draft=self.pair.draft if draft else None,
            threads=self.threads, work=self.work, precision=system.precision, max_len=MAX_LEN,
            slots=slots,
        )  # fmt: skip


@dataclass
class Found:
    """What a run has found so far.

    By the name of a job: texts, for each prompt by system, and the costs of our engines, for each
    prompt. missing: why, by system or worker. By worker: facts, and loads, seconds of each time
    that it was started. memory: by system, see `measure_memory`.
    """

    clock: Clock
    texts: dict[str, list[dict[str, Text]]] = field(default_factory=dict)
    costs: dict[str, list[RoundCosts | None]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    loads: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def started(self, system: System, peer: Peer) -> None:
        self.facts.setdefault(system.worker, peer.facts)
        self.loads.setdefault(system.worker, []).append(peer.facts["load_seconds"])

    @contextmanager
    def lacking(self, name: str) -> Iterator[None]:
        """Notes why there is no such thing; no folder of this machine goes into public text."""
        try:
            yield
        except Unavailable as error:
            self.missing[name] = re.sub(r"/\S*/", "", str(error))
            self.clock.note(f"missing: {name}: {error}")


def start(
    chosen: Sequence[System], place: Place, found: Found, stack: ExitStack, *, slots: int = 1
) -> Peers:
    """Workers of the systems; those that cannot be started are noted as missing.

    On some machines what is loaded first gets slower memory, by 15 % a token (docs/LOG.md). So the
    first worker is started twice, and the one that was first is never asked.
    """
    peers: Peers = {}
    for system in chosen[:1]:
        with suppress(Unavailable):
            stack.enter_context(place.start(system, slots=slots))
    for system in chosen:
        if system.worker not in peers and system.worker not in found.missing:
            found.clock.note(f"starting {system.worker}")
            with found.lacking(system.worker):
                peers[system.worker] = stack.enter_context(place.start(system, slots=slots))
                found.started(system, peers[system.worker])
    return peers


def ask_all(
    chosen: Sequence[System], turn: int, peers: Peers, found: Found,
    ask: Callable[[Peer, System], T], what: str = "",
) -> dict[str, T]:  # fmt: skip
    """The answers of the systems that are there, by name, in the order of the turn.

    what: which of its uses a system lacks that does not answer, and is not asked again for.
    """
    answers: dict[str, T] = {}
    alive = [s for s in chosen if s.worker in peers and s.name + what not in found.missing]
    for system in order(alive, turn):
        with found.lacking(system.name + what):
            answers[system.name] = ask(peers[system.worker], system)
    return answers


def measure_texts(
    jobs: Sequence[Job], place: Place, found: Found, between: Callable[[], object]
) -> None:
    """Every prompt of every job through its systems. between: called after each prompt."""
    every = list(dict.fromkeys(system for job in jobs for system in job.systems))
    with ExitStack() as stack:
        peers = start(every, place, found, stack)
        found.clock.note("warming up")
        for turn in range(WARM_UPS):
            for number, system in enumerate(every):  # another prompt for each
                prompt = jobs[turn % len(jobs)].load.prompts[0][: 8 + len(every) * turn + number]
                ask_all([system], turn, peers, found, partial(_generate, prompt, 12, 0.0, turn))
        total = sum(job.weight * len(job.load.prompts) for job in jobs)
        done, begin = 0, time.perf_counter()
        for job in jobs:
            for number, prompt in enumerate(job.load.prompts):
                tokens = job.load.new_tokens
                ask = partial(_generate, prompt, tokens, job.temperature, number)
                row = ask_all(job.systems, number, peers, found, ask)
                found.texts.setdefault(job.name, []).append(row)
                position = len(prompt) + tokens // 2
                found.costs.setdefault(job.name, []).append(_costs_at(position, peers, found))
                between()
                done += job.weight
                left = (time.perf_counter() - begin) / done * (total - done)
                found.clock.note(f"{job.name}: {done / total:.0%}, {left:.0f} s to go")


def _generate(
    prompt: list[int], tokens: int, temperature: float, seed: int, peer: Peer, system: System
) -> Text:
    return peer.generate(Request(prompt, tokens, system.mode, temperature, seed, GAMMA))


def _batch(prompts: list[list[int]], tokens: int, peer: Peer, system: System) -> list[Text]:
    return peer.batch(Batch(prompts, tokens, system.mode, GAMMA))


def _costs_at(position: int, peers: Peers, found: Found) -> RoundCosts | None:
    """Of our engines alone; None without them."""
    name = f"costs of {OURS}"
    if (ours := peers.get(f"{OURS} float32")) is not None and name not in found.missing:
        with found.lacking(name):
            samples, _ = ours.steps(Steps(position, list(range(1, GAMMA + 2))))
            return costs.of_calls(samples)
    return None


Batches = dict[int, list[dict[str, list[Text]]]]  # by size, for each repetition, by system


def measure_batches(
    chosen: Sequence[System], sizes: Sequence[int], times: int, prompt: Callable[[], list[int]],
    new_tokens: int, place: Place, found: Found,
) -> Batches:  # fmt: skip
    """Batches of fresh prompts, `times` of each size; each goes to all systems in turn."""
    rows: Batches = {size: [] for size in sizes}
    some = [s for s in chosen if s.mode in TOGETHER and s.precision == "float32"]
    with ExitStack() as stack:
        peers = start(some, place, found, stack, slots=max(sizes))
        for turn in range(times + 1):  # the first is the warm-up
            for size in sizes:
                ask = partial(_batch, [prompt() for _ in range(size)], new_tokens)
                row = ask_all(some, turn, peers, found, ask, f", {size} together")
                if turn:
                    rows[size].append(row)
                    found.clock.note(f"{size} together: {turn} of {times}")
    return rows


def measure_memory(chosen: Sequence[System], prompt: list[int], place: Place, found: Found) -> None:
    """Each system in a fresh process that decodes one text; a draft is given only to draft with.

    Of each: bytes of its `peak`, `before` a model was loaded, of `weights` and `draft_weights`.
    """
    names = "before", "weights", "draft_weights", "cache_element"
    for system in chosen:
        if system.name in found.missing or system.worker in found.missing:
            continue
        drafts = system.mode not in ("plain", "lookup")
        found.clock.note(f"memory of {system.name}")
        with found.lacking(f"memory of {system.name}"), place.start(system, draft=drafts) as peer:
            found.started(system, peer)
            text = peer.generate(Request(prompt, MEMORY_SHAPE[1], system.mode, gamma=GAMMA))
            facts = {name: peer.facts[name] for name in names}
            found.memory[system.name] = {"peak": text.memory["peak"], **facts}
