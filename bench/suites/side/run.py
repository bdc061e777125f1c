"""Runs the side-by-side benchmark, and keeps the figures of each text.

Every prompt goes through all systems, one after the other in a changing order (`clock.order`), and
so does every batch. Memory is measured by decoding one text per system in a separate process.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.gamma.costs import RoundCosts
from runtime.theory.formulas import expected_tokens

from ...core.clock import Clock, order
from ...core.costs import Traffic, costs_from_calls, predicted_speedup, row_bytes, verify_cost
from ...core.pair import Pair
from ...systems.peer import Peer
from ...systems.protocol import Prompt, Request, StepsRequest, Text, Unavailable, time_per_token

GAMMA = 4
WARM_UPS = 4  # as many as there are sizes of batches
PLAIN, DRAFT = "outrider plain", "outrider draft"
DRAFTLESS = "plain", "lookup"  # modes without a draft model
PLAIN_DRAFT, PLAIN_DRAFT_LOOKUP = ("plain", "draft"), ("plain", "draft", "lookup")
# The modes that are measured, by kind of model, system and precision. "text" models continue a
# prompt; "seq2seq" models (encoder-decoders) read it. A system's fewest bits come last. Modes have
# the same names in all systems: "plain" decoding; "draft" (draft model) and "lookup" (n-grams of
# the text) with gamma tokens per round; "auto" chooses gamma for each round; "assistant" drafts
# with the library's defaults.
MEASURED: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {
    "text": {
        ("outrider", "float32"): PLAIN_DRAFT_LOOKUP,
        ("outrider", "mixed"): ("draft",),  # a float32 target with an int8 draft
        ("outrider", "int8"): PLAIN_DRAFT,
        ("outrider", "int4"): ("plain", "draft", "auto", "lookup"),
        ("transformers", "float32"): ("plain", "draft", "assistant", "lookup"),
        ("genai", "float32"): PLAIN_DRAFT_LOOKUP,
        ("genai", "int4"): PLAIN_DRAFT_LOOKUP,
        ("llama.cpp", "float32"): PLAIN_DRAFT_LOOKUP,
        ("llama.cpp", "bf16"): PLAIN_DRAFT_LOOKUP,
        ("llama.cpp", "q8_0"): PLAIN_DRAFT,
        ("llama.cpp", "q4_0"): PLAIN_DRAFT_LOOKUP,
    },
    "seq2seq": {
        ("outrider", "float32"): PLAIN_DRAFT_LOOKUP,
        ("outrider", "mixed"): ("draft",),
        ("outrider", "int8"): PLAIN_DRAFT,
        ("outrider", "int4"): PLAIN_DRAFT_LOOKUP,
        ("transformers", "float32"): ("plain", "assistant"),
        ("ctranslate2", "float32"): ("plain",),
        ("ctranslate2", "int8"): ("plain",),
    },
}
PRECISIONS = {  # the option, and the names in all systems
    "float32": ("float32",),
    "mixed": ("mixed",),
    "bf16": ("bf16",),
    "int8": ("int8", "q8_0"),
    "int4": ("int4", "q4_0"),
}
# Of the grown pair, which is not stored in 16 bits.
DEFAULT_PRECISIONS = tuple(name for name in PRECISIONS if name != "bf16")
LONG_MODES = {"outrider": ("plain", "draft", "auto"), "transformers": ("plain", "assistant")}
SHARED, LENGTHS, TOGETHER = "Workloads", "Other lengths", "Texts decoded together"
MEMORY_SHAPE = 128, 64  # (prompt, output) tokens
# ms, without the draft's prefill
ROUND_TIMES = ("time_draft", "time_verify", "time_sample", "time_host")
TextFigures = dict[str, float]  # figures of the texts of a request, see `text_figures`


@dataclass(frozen=True)
class System:
    """A mode of a system. name: its name in tables. worker: systems with the same worker share a
    process."""

    peer: str
    mode: str
    precision: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.worker} {self.mode}".replace(" float32", "")

    @property
    def worker(self) -> str:
        return f"{self.peer} {self.precision}"


def systems(
    wanted: Sequence[str], bits: Sequence[str] = tuple(PRECISIONS), models: str = "text"
) -> list[System]:
    """The modes of these systems. bits: keys of `PRECISIONS`. models: key of `MEASURED`."""
    precisions = [name for key in bits for name in PRECISIONS[key]]
    return [
        System(name, mode, precision)
        for (name, precision), modes in MEASURED[models].items()
        if name in wanted and precision in precisions
        for mode in modes
    ]


def with_fewest_bits(chosen: Sequence[System]) -> list[System]:
    """Of each peer, the modes in the precision with the fewest bits that has plain decoding."""
    fewest = {system.peer: system.precision for system in chosen if system.mode == "plain"}
    return [system for system in chosen if system.precision == fewest.get(system.peer)]


@dataclass(frozen=True)
class Job:
    """A workload. group: the table that it belongs to. requests: all at the same temperature; each
    system gets them with its own mode."""

    group: str
    name: str
    requests: Sequence[Request]
    systems: Sequence[System]


@dataclass
class SideRun:
    """The setting of a run, and its findings about the systems.

    work: folder for converted checkpoints. max_len: rows of the caches. warm_ups: turns of short
    texts before anything is timed. missing: by system or worker, the reason why it is missing.
    facts: by worker. loads: by worker, the load time in seconds of each start.
    """

    pair: Pair
    threads: int
    work: Path
    clock: Clock
    max_len: int = 2048
    warm_ups: int = WARM_UPS
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    loads: dict[str, list[float]] = field(default_factory=dict)

    def start(self, system: System, draft: bool = True, slots: int = 1) -> Peer:
        """Start a worker of the system. Raises Unavailable if that fails."""
        peer = Peer(
            system.peer, self.pair.target, draft=self.pair.draft if draft else None,
            threads=self.threads, work=self.work, precision=system.precision, slots=slots,
            max_len=self.max_len,
        )  # fmt: skip
        self.facts.setdefault(system.worker, peer.facts)
        self.loads.setdefault(system.worker, []).append(peer.facts["load_seconds"])
        return peer

    @contextmanager
    def record_unavailable(self, name: str) -> Iterator[None]:
        """Record the reason if `name` is unavailable, without folders of this machine, because the
        results are published."""
        try:
            yield
        except Unavailable as error:
            self.missing[name] = re.sub(r"/\S*/", "", str(error))
            self.clock.note(f"missing: {name}: {error}")

    def start_all(self, stack: ExitStack, chosen: Sequence[System], slots: int) -> dict[str, Peer]:
        """Start the workers of the systems, except those that cannot be started.

        On some machines the first process to load gets slower memory, by 15 % per token
        (docs/LOG.md). So the first worker is started twice, and its first process is not used.
        """
        peers: dict[str, Peer] = {}
        if (first := chosen[0]).worker not in self.missing:
            with self.record_unavailable(first.worker):
                stack.enter_context(self.start(first, slots=slots))
        for system in chosen:
            if system.worker not in peers and system.worker not in self.missing:
                self.clock.note(f"starting {system.worker}")
                with self.record_unavailable(system.worker):
                    peer = stack.enter_context(self.start(system, slots=slots))
                    peers[system.worker] = peer
        return peers

    def measure(
        self, jobs: Sequence[Job], after_request: Callable[[], object]
    ) -> list[dict[str, Any]]:
        """Send every request of every job through its systems. after_request: called after each
        request.

        Returns the cells: for each job, its rows. A row has, for one request, the figures of
        `text_figures` by system, and those of `compare_with_theory`.
        """
        slots = max(len(request.prompts) for job in jobs for request in job.requests)
        all_systems = list(dict.fromkeys(system for job in jobs for system in job.systems))
        cells = []
        with ExitStack() as stack:
            peers = self.start_all(stack, all_systems, slots)
            for turn in range(self.warm_ups):
                request = jobs[turn % len(jobs)].requests[0]
                for number, system in enumerate(all_systems):  # a different prompt for each
                    size = 8 + len(all_systems) * turn + number
                    some = [
                        _rotated(prompt, size) if request.begin else prompt[:size]
                        for prompt in request.prompts
                    ]
                    short = replace(request, prompts=some, new_tokens=12, seed=turn)
                    self.decode(peers, system, short)
            for job in jobs:
                rows = []
                for turn, request in enumerate(job.requests):
                    row = dict[str, TextFigures]()
                    for system in order(job.systems, turn):
                        if figures := self.decode(peers, system, request):
                            row[system.name] = figures
                    rows.append(row)
                    if len(request.prompts) == 1:
                        self.add_theory(peers, job.systems, request, row)
                    after_request()
                temperature = job.requests[0].temperature
                shape = {"group": job.group, "name": job.name, "temperature": temperature}
                cells.append({**shape, "rows": rows})
                self.clock.note(f"{job.name}: {len(cells)} of {len(jobs)}; {_speeds_note(rows)}")
        return cells

    def decode(self, peers: dict[str, Peer], system: System, request: Request) -> TextFigures:
        """Decode with one system and return the figures of `text_figures`; empty if the system has
        failed before with as many texts."""
        name, prompts = system.name, request.prompts
        if len(prompts) > 1:
            name += f", {len(prompts)} together"
        if system.worker in peers and name not in self.missing:
            peer = peers[system.worker]
            with self.record_unavailable(name):
                texts = peer.generate(replace(request, mode=system.mode, gamma=GAMMA))
                facts = peer.facts
                rows = _prompt_rows(prompts[0]) + len(request.begin) + request.new_tokens / 2
                row, more = self.row_sizes(facts["cache_element"])
                traffic = Traffic(facts["weights"], row, rows, facts["draft_weights"], more)
                found = text_figures(texts, system.mode, traffic)
                return found | {"whole": texts[0].times[-1]} if request.begin else found
        return {}

    def row_sizes(self, element: int) -> tuple[int, int]:
        """Bytes per token in the caches of target and draft. element: bytes per number."""
        draft = self.pair.draft
        return row_bytes(self.pair.target, element), row_bytes(draft, element) if draft else 0

    def add_theory(
        self,
        peers: dict[str, Peer],
        chosen: Sequence[System],
        request: Request,
        row: dict[str, TextFigures],
    ) -> None:
        """Add the figures of `compare_with_theory` to those of Outrider's drafts, in its fewest
        bits. The costs are from calls of the engines alone, after the texts of the prompt."""
        own = {s.mode: s for s in with_fewest_bits(chosen) if s.peer == "outrider"}
        if not all(mode in own and own[mode].name in row for mode in PLAIN_DRAFT):
            return
        if (name := "costs of outrider") in self.missing:
            return
        plain, fast = (row[own[mode].name] for mode in PLAIN_DRAFT)
        position = len(request.begin or request.prompts[0]) + request.new_tokens // 2
        with self.record_unavailable(name):
            steps = StepsRequest(position, list(range(1, GAMMA + 2)))
            costs = costs_from_calls(peers[own["draft"].worker].time_steps(steps))
            fast |= compare_with_theory(plain, fast, costs)

    def measure_memory(
        self, chosen: Sequence[System], prompt: list[int]
    ) -> dict[str, dict[str, float]]:
        """Memory of each system in a new process that decodes one text. The process gets a draft
        model only if the mode uses one.

        For each system, in bytes: peak; before, the memory before a model was loaded; weights; and
        cache, for the final length of the text in all models that decode it. ratio: peak over
        weights and cache. own: the same without `before`.
        """
        found = {}
        for system in (s for s in chosen if not {s.name, s.worker} & self.missing.keys()):
            name, drafts = f"memory of {system.name}", system.mode not in DRAFTLESS
            self.clock.note(name)
            with self.record_unavailable(name), self.start(system, draft=drafts) as peer:
                (text,) = peer.generate(
                    Request([prompt], MEMORY_SHAPE[1], system.mode, gamma=GAMMA)
                )
                facts, peak = peer.facts, text.peak
                before, weights = facts["before"], facts["weights"] + facts["draft_weights"]
                row = sum(self.row_sizes(facts["cache_element"])[: 1 + drafts])
                cache = sum(MEMORY_SHAPE) * row
                found[system.name] = {
                    "peak": peak, "before": before, "weights": weights, "cache": cache,
                    "ratio": peak / (weights + cache), "own": (peak - before) / (weights + cache),
                }  # fmt: skip
        return found


def _speeds_note(rows: Sequence[dict[str, TextFigures]]) -> str:
    """Tokens per second, for progress notes; also useful if the run is interrupted."""
    found: dict[str, list[float]] = {}
    for name, figures in (item for row in rows for item in row.items() if "token" in item[1]):
        found.setdefault(name, []).append(1 / figures["token"])
    return ", ".join(f"{name} {statistics.median(x):.1f}" for name, x in found.items())


def _prompt_rows(prompt: Prompt) -> int:
    """Rows of the prompt in a cache: one per token, or one per two frames of a sound."""
    return prompt.shape[1] // 2 if isinstance(prompt, np.ndarray) else len(prompt)


def _rotated(prompt: Prompt, size: int) -> Prompt:
    """The prompt, rotated by `size`."""
    if isinstance(prompt, np.ndarray):
        return np.roll(prompt, size, axis=1)
    return prompt[size:] + prompt[:size]


def text_figures(texts: Sequence[Text], mode: str, traffic: Traffic) -> TextFigures:
    """The figures kept for texts that were decoded together, as far as they are known.

    first: seconds until all texts have their first token. token, lost: seconds per token after
    that (`time_per_token`), and the share lost to other processes. For a single text also: tokens,
    rounds: those after the first round; bytes: that these rounds had to read; the counts of
    `draft_counts`; with Outrider spent, host, pace: ms of its rounds, of their host part, and per
    token. encode: seconds in encoders, included in first.
    """
    found: TextFigures = {"first": max(text.times[0] for text in texts)}
    if (token := time_per_token(texts)) is None:
        return found  # a short text may have one round
    found |= {"token": token.seconds, "lost": token.lost}
    if len(texts) > 1:
        return found
    rounds, notes = texts[0].round_tokens(), texts[0].notes
    if "encode" in notes:
        found["encode"] = notes["encode"]
    found |= {"tokens": sum(rounds), "rounds": len(rounds), **draft_counts(texts[0], mode)}
    if "time_host" in notes:
        found |= {"spent": sum(notes[part] for part in ROUND_TIMES), "host": notes["time_host"]}
        found["pace"] = found["spent"] / (notes["output_tokens"] - 1)
    if mode in DRAFTLESS:  # a lookup reads no weights
        found["bytes"] = len(rounds) * traffic.round_bytes()
    elif found.get("drafting"):
        found["bytes"] = len(rounds) * traffic.round_bytes(found["drafted"] / found["drafting"])
    return found


def draft_counts(text: Text, mode: str) -> TextFigures:
    """The numbers of drafted, examined and accepted tokens and of rounds, if known.

    Outrider counts them. For a system that drafts GAMMA tokens in each round, they follow from the
    number of tokens that each round yields; the last round may be cut short and is left out.
    """
    if mode != "plain" and "drafted" in text.notes:
        counts = {key: text.notes[key] for key in ("drafted", "examined", "accepted")}
        return {**counts, "drafting": text.notes["rounds"]}
    if mode != "draft":
        return {}
    whole = text.round_tokens()[:-1]
    return {
        "drafted": GAMMA * len(whole), "examined": sum(min(tokens, GAMMA) for tokens in whole),
        "accepted": sum(whole) - len(whole), "drafting": len(whole),
    }  # fmt: skip


def compare_with_theory(plain: TextFigures, fast: TextFigures, costs: RoundCosts) -> TextFigures:
    """Compares Theorem 3.8 with the figures of a text decoded by Outrider without and with drafts.

    measured: speedup over Outrider's plain decoding, without any prefill. predicted: computed from
    alpha (accepted of examined), gamma (drafted per round), and c and verify, from calls of the
    engines alone. The quotient therefore shows what the prediction ignores: sampling, host, and
    that acceptances are not independent. For the last of these, compare given with expected, the
    measured and the predicted tokens per round.
    """
    if not fast.get("drafted") or "pace" not in plain:
        return {}
    # The last round may draft fewer tokens, so gamma need not be an integer.
    alpha, gamma = fast["accepted"] / fast["examined"], fast["drafted"] / fast["drafting"]
    measured, expected = plain["pace"] / fast["pace"], predicted_speedup(alpha, [gamma], costs)
    return {
        "alpha": alpha, "c": costs.draft, "verify": verify_cost(costs, gamma),
        "given": fast["tokens"] / fast["rounds"], "expected": expected_tokens(alpha, gamma),
        "predicted": expected, "measured": measured, "quotient": measured / expected,
    }  # fmt: skip
