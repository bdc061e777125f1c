"""The sampling kernel on the CPU: first whether it is right, then what it costs.

Holds the native kernel against the NumPy reference on fresh random logits, then times a round of
both, and of Transformers' `_speculative_sampling` with its logits processors as assisted generation
calls it. Beside each figure stands the floor: the bytes that must be read, at the bandwidth that
was measured in the same run. `python -m bench.suites.gpu.kernel` has the CUDA kernels.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

from runtime.sampling import kernel

from ...core import machine
from ...core.clock import Clock, alternate
from ...core.command import Results, Suite
from ...core.table import Table
from .rounds import RULES, VARIANTS, Round, random_logits
from .times import (
    COPYING,
    NUMPY,
    NUMPY_ROUND,
    ROUND,
    TRANSFORMERS,
    VERIFY,
    Point,
    call,
    measure,
)

VOCABULARIES = (32_000, 51_864, 128_256, 151_936)
GAMMAS = (1, 3, 5, 8)
BATCHES = (1, 8, 32)
SIZES = list(itertools.product(VOCABULARIES, GAMMAS, BATCHES))
GOAL = (151_936, 5, 1)  # V, gamma and B of KERNEL.md's goals
TARGET_BYTES = 0.5e9 * 4  # of a 0.5B-parameter float32 target, read once by a verify call
READ_BYTES = 1 << 28
SAMPLES = 5  # undisturbed, of each call
# In docs/performance.md.
TABLED = [
    *((v, 5, 1) for v in VOCABULARIES[:3]), *((151_936, g, 1) for g in GAMMAS),
    (151_936, 5, 8), (151_936, 8, 32),
]  # fmt: skip
OURS, THEIRS = call("token", VERIFY), call("token", TRANSFORMERS)
OUR_ROUND, COPYING_ROUND = call("token", ROUND), call("token", COPYING)
NUMPYS_ROUND = call("token", NUMPY_ROUND)


def run(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Every variant at `GOAL`, and unless --quick the rules at all sizes."""
    library = kernel.load()  # an error that names the remedy, where there is no library
    reader = machine.MemoryReader(args.threads, READ_BYTES)
    alternate({"read": reader}, rounds=5, patience=5)
    try:
        import torch

        torch.set_num_threads(args.threads)
    except ImportError:
        clock.note("Transformers is not installed: it is not compared")
    jobs = [(variant, GOAL) for variant in VARIANTS]
    if not args.quick:
        jobs += [(rule, size) for rule in RULES for size in SIZES if size != GOAL]
    points = []
    for variant, size in jobs:
        clock.note(f"{variant}, V {size[0]:,}, gamma {size[1]}, B {size[2]}")
        round_ = Round(random_logits(*size), VARIANTS[variant], threads=args.threads)
        ways = VERIFY, ROUND, COPYING, NUMPY, NUMPY_ROUND, TRANSFORMERS
        named = [(variant, way) for way in ways]
        point = measure({variant: [round_]}, named, samples=SAMPLES, patience=args.patience)
        points.append(point.json_object())
    return {
        "machine": machine.describe(args.threads),
        "instruction_set": library.outrider_instruction_set().decode(),
        "bandwidth_gb_s": round(reader.bandwidth / 1e9, 2),
        "points": points,
    }


def of_token(results: Results) -> dict[tuple[int, int, int], Point]:
    """By V, gamma and B."""
    points = [Point.of(found) for found in results["points"]]
    return {(p.vocab_size, p.gamma, p.batch): p for p in points if "token" in p.accepted}


def tables(results: Results) -> list[Table]:
    return [kernel_table(results), goals_table(results)]


def kernel_table(results: Results) -> Table:
    points, bandwidth = of_token(results), 1e9 * results["bandwidth_gb_s"]
    rows = []
    for size in (size for size in TABLED if size in points):
        p = points[size]
        ours, numpy = p.ms(OUR_ROUND), p.ms(NUMPYS_ROUND)
        rows.append(
            (
                *(f"{n:,}" for n in size),
                f"{p.ms(OURS):.3f}",
                f"{p.bandwidth(OURS) / bandwidth:.0%}",
                f"{p.ms(THEIRS):.2f}" if THEIRS in p.times else "-",
                f"{p.saved(OURS, THEIRS):.1%}" if THEIRS in p.times else "-",
                f"{ours:.3f}",
                f"{numpy:.2f}",
                f"{numpy / ours:.1f} ×",
            )
        )
    head = (
        "V", "γ", "B", "verify, ms", "share of the floor's speed", "Transformers", "less time",
        "round, ms", "NumPy", "ratio",
    )  # fmt: skip
    return Table("Sampling by the token rule", head, rows, name="kernel")


def goals_table(results: Results) -> Table:
    """What KERNEL.md asks of the token rule at `GOAL`, and the same of all its sizes."""
    points, bandwidth = of_token(results), 1e9 * results["bandwidth_gb_s"]
    wanted: dict[str, Callable[[Point], float]] = {
        "round: times as fast as NumPy": lambda p: p.ms(NUMPYS_ROUND) / p.ms(OUR_ROUND),
        "with the draft's logits copied": lambda p: p.ms(NUMPYS_ROUND) / p.ms(COPYING_ROUND),
        "share of a 0.5B verification": lambda p: (
            p.ms(OUR_ROUND) / (1e3 * TARGET_BYTES / bandwidth)
        ),
        "verify: share of the floor's speed": lambda p: p.bandwidth(OURS) / bandwidth,
    }
    if THEIRS in points[GOAL].times:
        wanted["verify: less time than Transformers"] = lambda p: p.saved(OURS, THEIRS)
    rows = []
    for name, value in wanted.items():
        of_all = sorted(value(p) for p in points.values())
        shown = value(points[GOAL]), of_all[0], median(of_all), of_all[-1]
        rows.append((name, *(f"{x:.3g}" for x in shown)))
    title = f"Goals of the token rule, and all {len(points)} sizes"
    return Table(title, ("", "V {:,}, γ {}, B {}".format(*GOAL), "least", "median", "most"), rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(threads=1)
    parser.add_argument("--patience", type=float, default=0.7, metavar="SECONDS",
                        help="how long a size waits for quiet; default 0.7")  # fmt: skip


SUITE = Suite(
    name="kernel", about=__doc__ or "", quick="one size instead of all", options=options,
    measure=run, tables=tables,
)  # fmt: skip
