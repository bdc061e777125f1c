"""python -m bench.kernel: the sampling kernel; first whether it is right, then what it costs.

Checks the native kernel against the NumPy reference on fresh random logits, then times a round of
both, and of Transformers' `_speculative_sampling` with its logits processors as assisted generation
calls it. Beside each figure: the bytes that must be read, the time that takes at the bandwidth
measured here (the floor), and the fraction of the floor that is reached. Then the same for the
CUDA kernels, where there is a GPU. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError, run_command
from runtime.sampling import kernel
from runtime.sampling.warp import SamplingParams

from . import kernel_gpu, machine
from .rounds import RULES, TOKEN, VARIANTS, Round, disagreements
from .timing import Figure, alternate

VOCABULARIES = (32_000, 51_864, 128_256, 151_936)
GAMMAS = (1, 3, 5, 8)
BATCHES = (1, 8, 32)
SWEEP = (VOCABULARIES, GAMMAS, BATCHES)
QUICK_SWEEP = ((128_256,), (5, 8), BATCHES)
GOAL = (151_936, 5, 1)  # V, gamma, B of KERNEL.md's goals for the CPU
TARGET_BYTES = 0.5e9 * 4  # of a 0.5B-parameter float32 target, read once by a verify call


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


def measure(
    name: str, vocab_size: int, gamma: int, batch: int, params: SamplingParams, threads: int,
    bandwidth: float, rounds: int, patience: float,
) -> Result:  # fmt: skip
    round_ = Round(vocab_size, gamma, batch, params, threads)
    agreed = batch - len(disagreements(round_, round_.kernel_outcomes()))
    drafts, verdicts = round_.kernel_draw(), round_.kernel_verify()
    round_.numpy_draw()
    calls: dict[str, Callable[[], object]] = {
        "kernel verify": round_.kernel_verify,
        # As the runtime has it: the engine keeps the draft's logits, nothing is copied.
        "kernel round": lambda: (round_.kernel_draw(keep=False), round_.kernel_verify()),
        "kernel round, copying": lambda: (round_.kernel_draw(), round_.kernel_verify()),
        "NumPy verify": round_.numpy_verify,
        "NumPy round": lambda: (round_.numpy_draw(), round_.numpy_verify()),
    }
    # It knows one rule, its repetition penalty and min-p are left out, and at temperature 0 it is
    # not called.
    plain = params.temperature > 0 and params.min_p == 0 and params.repetition_penalty == 1
    if plain and params.verify == "token" and (theirs := round_.transformers_verify(drafts)):
        calls["Transformers verify"] = theirs
    times = alternate(calls, rounds=rounds, patience=patience)
    size = round_.bytes_read(verdicts)
    floor = 1e3 * size / bandwidth
    return Result(name, vocab_size, gamma, batch, threads, agreed, size, floor, times)


def summary(results: list[Result], bandwidth: float) -> dict[str, float]:
    """The goals, by the token rule."""
    wanted = "token", *GOAL
    times = next(r.times for r in results if (r.name, r.vocab_size, r.gamma, r.batch) == wanted)
    goals = {
        "round_speedup_over_numpy": times["NumPy round"].ms / times["kernel round"].ms,
        "round_with_copies_speedup_over_numpy": (
            times["NumPy round"].ms / times["kernel round, copying"].ms
        ),
        "verify_speedup_over_numpy": times["NumPy verify"].ms / times["kernel verify"].ms,
        "round_share_of_0.5B_verify": times["kernel round"].ms / (1e3 * TARGET_BYTES / bandwidth),
    }
    if "Transformers verify" in times:
        goals["less_time_than_transformers"] = (
            1 - times["kernel verify"].ms / times["Transformers verify"].ms
        )
    return {name: round(value, 4) for name, value in goals.items()}


def on_cpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report's part on the CPU library."""
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
    jobs = [(n, *GOAL, p) for n, p in VARIANTS.items()]
    if not arguments.quick:
        jobs += [
            (n, v, g, b, VARIANTS[n])
            for n in RULES for v in VOCABULARIES for g in GAMMAS for b in BATCHES
            if (v, g, b) != GOAL
        ]  # fmt: skip
    results = []
    for job in jobs:
        result = measure(*job, arguments.threads, bandwidth, arguments.rounds, arguments.patience)
        results.append(result)
        print(result.line(), file=sys.stderr)
    goals = summary(results, bandwidth)
    for goal, value in goals.items():
        print(f"{goal}: {value:.3g}")
    return {
        "instruction_set": name,
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "goals": goals,
        "disagree": sum(r.batch - r.agreed for r in results),
        "results": [r.json_object() for r in results],
    }


def on_gpu(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report's part on the CUDA kernels. Raises OutriderError("backend") without a GPU."""
    disagree = kernel_gpu.check(quick=arguments.quick)
    shapes = [(VARIANTS[n], n, s) for n in RULES for s in kernel_gpu.shapes(*SWEEP)]
    if arguments.quick:
        shapes = [(TOKEN, "token", s) for s in kernel_gpu.shapes(*QUICK_SWEEP)]
    for name, params in VARIANTS.items():
        if name not in RULES:
            shapes += [(params, name, s) for s in kernel_gpu.shapes((151_936,), (5,), (1, 8))]

    def save(report: dict[str, Any]) -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({"gpu": {"disagree": disagree, **report}}) + "\n")

    return {"disagree": disagree, **kernel_gpu.times(shapes, save)}


def run(arguments: argparse.Namespace) -> int:
    report: dict[str, Any] = {"machine": machine.describe(arguments.threads)}
    if not arguments.gpu:
        report["cpu"] = on_cpu(arguments)
    if not arguments.cpu:
        try:
            report["gpu"] = on_gpu(arguments)
        except OutriderError as error:
            if arguments.gpu or error.kind != "backend":
                raise
            report["gpu"] = None
            print(f"no GPU: {error.cause}")
    disagree = sum(part["disagree"] for name in ("cpu", "gpu") if (part := report.get(name)))
    print(f"slots that disagree with the reference: {disagree}")
    line = json.dumps(report)
    if arguments.out is not None:
        arguments.out.write_text(line + "\n")
    print(line)
    return 1 if disagree else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the sampling kernel, then time it.")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU library, and of torch")
    parser.add_argument("--rounds", type=int, default=7, help="undisturbed samples of each call")
    parser.add_argument("--patience", type=float, default=2.0, help="seconds to wait for them")
    parser.add_argument("--quick", action="store_true", help="a few sizes instead of all")
    parser.add_argument("--out", type=Path, help="where the JSON line goes too")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--cpu", action="store_true", help="not the GPU, even where there is one")
    one.add_argument("--gpu", action="store_true", help="the GPU alone; without one an error")
    arguments = parser.parse_args()
    return run_command(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
