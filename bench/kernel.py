"""python -m bench.kernel: the sampling kernel; first whether it is right, then what it costs.

Checks the native kernel against the NumPy reference on fresh random logits, then times a round of
both, and of Transformers' `_speculative_sampling` with its logits processors as assisted generation
calls it. Beside each figure: the bytes that must be read, the time that takes at the bandwidth
measured here (the floor), and the fraction of the floor that is reached. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime import kernel
from runtime.errors import run_command
from runtime.kernel import RoundSampler
from runtime.philox import Purpose, uniform
from runtime.sampler import Place
from runtime.sampling import Verdict, verify
from runtime.warping import Distribution, SamplingParams, warp

from . import machine
from .timing import Figure, alternate

Rows = npt.NDArray[np.float32]

VOCABULARIES = (32_000, 51_864, 128_256, 151_936)
GAMMAS = (1, 3, 5, 8)
BATCHES = (1, 8, 32)
ONE = 1 - 2.0**-53  # the largest uniform
TARGET_BYTES = 0.5e9 * 4  # of a 0.5B-parameter float32 target, read once by a verify call

TOKEN = SamplingParams(temperature=0.7)
VARIANTS = {
    "token": TOKEN,
    "greedy": SamplingParams(),
    "block": replace(TOKEN, verify="block"),
    "sigmoid": replace(TOKEN, verify="sigmoid"),
    "top-k 50, top-p 0.9": replace(TOKEN, top_k=50, top_p=0.9),
    "top-p 0.9": replace(TOKEN, top_p=0.9),
    "min-p 0.05": replace(TOKEN, min_p=0.05),
    "penalty 1.1": replace(TOKEN, repetition_penalty=1.1),
}


def random_logits(vocab_size: int, gamma: int, batch: int) -> tuple[Rows, Rows]:
    """Peaked rows float32 [B, gamma + 1, V] with draft rows near them, so that some drafts stand
    and some fall."""
    rng = np.random.default_rng()
    shape = (batch, gamma + 1, vocab_size)
    target = 2.5 * rng.standard_normal(shape, dtype=np.float32)
    noise = rng.standard_normal((batch, gamma, vocab_size), dtype=np.float32)
    return target, target[:, :gamma] + np.float32(0.7) * noise


class Round:
    """Logits of B slots and the round on them, by the kernel, by NumPy and by Transformers.

    The uniforms are the counters': every call does the same work.
    """

    def __init__(
        self,
        vocab_size: int,
        gamma: int,
        batch: int,
        params: SamplingParams,
        threads: int,
        logits: tuple[Rows, Rows] | None = None,
    ):
        """logits: the target's [B, gamma + 1, V] and the draft's [B, gamma, V], or fresh ones."""
        rng = np.random.default_rng()
        self.target, self.draft = logits or random_logits(vocab_size, gamma, batch)
        self.vocab_size, self.gamma, self.batch, self.params = vocab_size, gamma, batch, params
        context = rng.integers(0, vocab_size, 500)
        self.places = [
            Place(replace(params, seed=b), gamma, 500, b, context, name=f"slot {b}")
            for b in range(batch)
        ]
        self.sampler = RoundSampler(vocab_size, gamma, batch, threads)
        self.q: list[list[Distribution]] = []
        self.nudge = 0.0

    # The kernel

    def kernel_draw(self, keep: bool = True) -> list[list[int]]:
        self.sampler.begin(self.places)
        for step in range(self.gamma):
            self.sampler.draw(self.draft[:, step], step, keep=keep)
        drafts: list[list[int]] = self.sampler.drafts[: self.batch].tolist()
        return drafts

    def kernel_verify(self) -> list[Verdict]:
        return self.sampler.verify(self.target, self.draft)

    # The reference, as runtime/decode.py uses it

    def numpy_draw(self) -> list[list[int]]:
        self.q, drafts = [], []
        for b, place in enumerate(self.places):
            rows: list[Distribution] = []
            drawn: list[int] = []
            for i in range(self.gamma):
                rows.append(self._warp(self.draft[b, i], place, drawn))
                drawn.append(rows[i].draw(self._uniform(place, i, Purpose.DRAFT)))
            self.q.append(rows)
            drafts.append(drawn)
        return drafts

    def numpy_verify(self, drafts: list[list[int]]) -> list[Verdict]:
        return [
            verify(
                _Lazy(partial(self._target_row, b, drafts[b]), self.gamma + 1),
                self.q[b],
                drafts[b],
                [self._uniform(place, i, Purpose.ACCEPT) for i in range(self.gamma)],
                self._uniform(place, 0, Purpose.RESIDUAL),
                self.params,
            )
            for b, place in enumerate(self.places)
        ]

    def reference(self, nudge: float = 0.0) -> list[tuple[list[int], int, int]]:
        """(drafts, accepted, token) of every slot. nudge: relative, on every uniform."""
        self.nudge = nudge
        drafts = self.numpy_draw()
        verdicts = self.numpy_verify(drafts)
        self.nudge = 0.0
        return [(d, v.accepted, v.token) for d, v in zip(drafts, verdicts, strict=True)]

    def _target_row(self, b: int, drawn: list[int], i: int) -> Distribution:
        return self._warp(self.target[b, i], self.places[b], drawn[:i])

    def _warp(self, row: Any, place: Place, drawn: list[int]) -> Distribution:
        context: Any = ()
        if self.params.repetition_penalty != 1:
            assert place.context is not None
            context = np.concatenate([place.context, np.array(drawn, np.int64)])
        return warp(row, self.params, context)

    def _uniform(self, place: Place, i: int, purpose: Purpose) -> float:
        lane = place.position if self.params.verify == "block" else 0
        u = uniform(place.params.seed, place.position + i, purpose, lane)
        return min(u * (1 + self.nudge), ONE)

    # Transformers

    def transformers_verify(self, drafts: list[list[int]]) -> Callable[[], object] | None:
        """Processors on the gamma + 1 target rows and `_speculative_sampling`; the function takes
        one sequence, so slots are called in turn. None where Transformers is missing."""
        try:
            import torch
            from transformers import LogitsProcessorList
            from transformers.generation import logits_process as processes
            from transformers.generation.utils import _speculative_sampling
        except ImportError:
            return None
        processors = LogitsProcessorList(
            [processes.TemperatureLogitsWarper(self.params.temperature)]
        )
        if self.params.top_k:
            processors.append(processes.TopKLogitsWarper(self.params.top_k))
        if self.params.top_p < 1:
            processors.append(processes.TopPLogitsWarper(self.params.top_p))
        target, draft = torch.from_numpy(self.target), torch.from_numpy(self.draft)
        ids: Any = torch.tensor(drafts)
        temperature = self.params.temperature

        def call() -> None:
            for b in range(self.batch):
                new_logits = target[b : b + 1].clone()  # assisted generation's own copy
                for i in range(self.gamma + 1):
                    new_logits[:, i] = processors(ids[b : b + 1, :i], new_logits[:, i])
                _speculative_sampling(
                    ids[b : b + 1], draft_scores[b : b + 1], self.gamma, new_logits
                )

        # The draft's scores come processed out of its own generate.
        draft_scores = draft / temperature
        if self.params.top_k or self.params.top_p < 1:
            flat = draft_scores.reshape(-1, self.vocab_size)
            for processor in list(processors)[1:]:
                flat = processor(ids[:, :0], flat)
            draft_scores = flat.reshape(draft.shape)
        return call

    def bytes_read(self, verdicts: list[Verdict]) -> int:
        """What this round has to read: the rows up to the first rejection and, where there was one,
        the draft's row. By the block rule all."""
        rows = 0
        for verdict in verdicts:
            rows += len(verdict.ratios) if verdict.accepted < self.gamma else self.gamma + 1
            rows += verdict.accepted < self.gamma
        return rows * self.vocab_size * self.target.itemsize


class _Lazy(list):  # type: ignore[type-arg]
    """Rows that are warped when they are looked at, as in the round."""

    def __init__(self, row: Callable[[int], Distribution], count: int):
        super().__init__([None] * count)
        self._row = row

    def __getitem__(self, i: Any) -> Any:
        if super().__getitem__(i) is None:
            self[i] = self._row(i)
        return super().__getitem__(i)


@dataclass
class Result:
    """One configuration: times in ms of the verification and of the whole sampling of a round."""

    name: str
    vocab_size: int
    gamma: int
    batch: int
    threads: int
    agreed: int
    bytes: int
    floor_ms: float
    times: dict[str, Figure]

    def line(self) -> str:
        ours = self.times["kernel verify"]
        parts = [
            f"{self.name:20} V {self.vocab_size:7,} gamma {self.gamma} B {self.batch:2} "
            f"threads {self.threads}: verify {ours}",
            f"{self.bytes / 1e6:.1f} MB, floor {self.floor_ms:.3f} ms, "
            f"{self.floor_ms / ours.ms:.0%} of it",
        ]
        for name, figure in self.times.items():
            if name != "kernel verify":
                parts.append(f"{name} {figure}")
        return "; ".join(parts)

    def json_object(self) -> dict[str, Any]:
        ours = self.times["kernel verify"]
        times = {name: figure.json_object() for name, figure in self.times.items()}
        return {
            "name": self.name, "V": self.vocab_size, "gamma": self.gamma, "B": self.batch,
            "threads": self.threads, "slots_that_agree": self.agreed, "bytes": self.bytes,
            "floor_ms": round(self.floor_ms, 4),
            "fraction_of_floor": round(self.floor_ms / ours.ms, 3), "times": times,
        }  # fmt: skip


def check(round_: Round) -> tuple[int, list[Verdict]]:
    """In how many slots kernel and reference agree token for token, and the kernel's verdicts.

    Where they do not, the reference decides again with its uniforms a few float32 roundings lower
    and higher: if that changes its own mind, the slot was on an edge, which says nothing.
    """
    drafts = round_.kernel_draw()
    verdicts = round_.kernel_verify()
    ours = [(d, v.accepted, v.token) for d, v in zip(drafts, verdicts, strict=True)]
    theirs = round_.reference()
    agreed = [a == b for a, b in zip(ours, theirs, strict=True)]
    if not all(agreed):
        lower, higher = round_.reference(-4e-6), round_.reference(4e-6)
        agreed = [
            same or low != high for same, low, high in zip(agreed, lower, higher, strict=True)
        ]
    return sum(agreed), verdicts


def measure(
    name: str, vocab_size: int, gamma: int, batch: int, params: SamplingParams, threads: int,
    bandwidth: float, rounds: int, patience: float,
) -> Result:  # fmt: skip
    round_ = Round(vocab_size, gamma, batch, params, threads)
    agreed, verdicts = check(round_)
    drafts = round_.numpy_draw()
    calls: dict[str, Callable[[], object]] = {
        "kernel verify": round_.kernel_verify,
        # With and without the copy of the draft's logits, which an engine may make unnecessary.
        "kernel round": lambda: (round_.kernel_draw(), round_.kernel_verify()),
        "kernel round, no copy": lambda: (round_.kernel_draw(keep=False), round_.kernel_verify()),
        "NumPy verify": lambda: round_.numpy_verify(drafts),
        "NumPy round": lambda: round_.numpy_verify(round_.numpy_draw()),
    }
    # Its own repetition penalty and min-p are left out, and at temperature 0 it is not called.
    plain = params.temperature > 0 and params.min_p == 0 and params.repetition_penalty == 1
    if plain and (theirs := round_.transformers_verify(drafts)) is not None:
        calls["Transformers verify"] = theirs
    times = alternate(calls, rounds=rounds, patience=patience)
    size = round_.bytes_read(verdicts)
    floor = 1e3 * size / bandwidth
    return Result(name, vocab_size, gamma, batch, threads, agreed, size, floor, times)


def summary(results: list[Result], bandwidth: float) -> dict[str, float]:
    """The goals, at V = 151,936, gamma = 5, one slot, one thread."""
    wanted = "token", 151_936, 5, 1
    times = next(r.times for r in results if (r.name, r.vocab_size, r.gamma, r.batch) == wanted)
    goals = {
        "round_speedup_over_numpy": times["NumPy round"].ms / times["kernel round"].ms,
        "round_without_copy_speedup_over_numpy": (
            times["NumPy round"].ms / times["kernel round, no copy"].ms
        ),
        "verify_speedup_over_numpy": times["NumPy verify"].ms / times["kernel verify"].ms,
        "round_share_of_0.5B_verify": times["kernel round"].ms / (1e3 * TARGET_BYTES / bandwidth),
    }
    if "Transformers verify" in times:
        goals["less_time_than_transformers"] = (
            1 - times["kernel verify"].ms / times["Transformers verify"].ms
        )
    return {name: round(value, 4) for name, value in goals.items()}


def run(arguments: argparse.Namespace) -> int:
    kernel.load()  # an error that names the remedy, where there is no library
    reader = machine.MemoryReader(arguments.threads, 1 << 28)
    alternate({"read": reader}, rounds=5, patience=5)
    bandwidth = reader.bandwidth
    try:
        import torch

        torch.set_num_threads(arguments.threads)
    except ImportError:
        print("Transformers is not installed: it is not compared", file=sys.stderr)
    name = kernel.load().outrider_instruction_set().decode()
    print(f"liboutrider with {name}; memory {bandwidth / 1e9:.1f} GB/s", file=sys.stderr)
    jobs = [(n, 151_936, 5, 1, p) for n, p in VARIANTS.items()]
    if not arguments.quick:
        jobs += [
            ("token", v, g, b, TOKEN)
            for v in VOCABULARIES for g in GAMMAS for b in BATCHES
            if (v, g, b) != (151_936, 5, 1)
        ]  # fmt: skip
    results = []
    for job in jobs:
        result = measure(*job, arguments.threads, bandwidth, arguments.rounds, arguments.patience)
        results.append(result)
        print(result.line(), file=sys.stderr)
    disagree = sum(r.batch - r.agreed for r in results)
    goals = summary(results, bandwidth)
    for goal, value in goals.items():
        print(f"{goal}: {value:.3g}")
    print(f"slots that disagree with the reference: {disagree}")
    report = {
        "machine": machine.describe(arguments.threads),
        "instruction_set": name,
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "goals": goals,
        "disagree": disagree,
        "results": [r.json_object() for r in results],
    }
    line = json.dumps(report)
    if arguments.out is not None:
        arguments.out.write_text(line + "\n")
    print(line)
    return 1 if disagree else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the sampling kernel, then time it.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7, help="undisturbed samples of each call")
    parser.add_argument("--patience", type=float, default=2.0, help="seconds to wait for them")
    parser.add_argument("--quick", action="store_true", help="V = 151,936, gamma = 5, B = 1 only")
    parser.add_argument("--out", type=Path, help="where the JSON line goes too")
    arguments = parser.parse_args()
    return run_command(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
