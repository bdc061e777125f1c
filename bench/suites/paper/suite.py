"""The analyses of "Optimized Speculative Sampling for GPU Hardware Accelerators", done again.

That is arXiv 2406.11016; here it is this kernel on this machine.

Time of a round's sampling against gamma (figure 3), realised bandwidth (table 3), memory overhead
(figures 4 and 5), and what alpha and beta do to the output (tables 2 and 7), there in total
variation from the target's distribution.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bundle import load
from runtime.sampling import kernel

from ...core import machine
from ...core.clock import Clock, alternate
from ...core.command import Suite
from ..kernel.rounds import RULES, Round, Rows, random_logits
from ..kernel.times import FUNCTION, NUMPY, RAW, TRANSFORMERS, VERIFY, Point, measure
from . import memory, sigmoid
from .plots import PLOTS
from .tables import PaperRun, tables

WAYS = [
    *((rule, VERIFY) for rule in RULES), ("token", RAW), ("token", NUMPY),
    ("token", TRANSFORMERS), ("token", FUNCTION),
]  # fmt: skip
SAMPLES = 7  # undisturbed, of each call
CONTEXT = 64  # tokens before the first position
AGREEING = 5  # gamma of the rounds in which every draft token stands


@dataclass(frozen=True)
class PaperSize:
    """How much is measured. draws: rounds on different logits in one sample. patience: seconds for
    which a configuration waits for undisturbed samples. base: V, gamma and B at which memory is
    varied, one at a time. positions: of a document."""

    vocabularies: tuple[int, ...]
    gammas: tuple[int, ...]
    draws: int
    patience: float
    read_bytes: int
    base: tuple[int, int, int]
    varied: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    documents: int
    positions: int


GAMMAS = (1, 2, 3, 5, 8, 12, 16, 20)
BASE = 51_864, 5, 1
FULL = PaperSize(
    (32_000, 51_864, 151_936), GAMMAS, 16, 5, machine.READ_BYTES, BASE,
    ((4_096, 32_000, 51_864, 128_256, 151_936), GAMMAS, (1, 2, 4, 8, 16, 32)), 48, 48,
)  # fmt: skip
QUICK = PaperSize(
    (32_000, 51_864), (1, 5, 20), 8, 1, 1 << 28, BASE,
    ((4_096, 51_864, 151_936), (1, 5, 20), (1, 8)), 24, 12,
)  # fmt: skip


def overheads(size: PaperSize, threads: int) -> list[memory.Overhead]:
    """Of every round that differs from `base` in one of V, gamma and B."""
    places = []
    for axis, values in enumerate(size.varied):
        for value in values:
            v, gamma, batch = (value if i == axis else size.base[i] for i in range(3))
            places.append((v, gamma, batch))
    return [o for place in dict.fromkeys(places) for o in memory.overheads(place, threads)]


def point(
    logits: list[tuple[Rows, Rows]], gamma: int, size: PaperSize, patience: float, threads: int
) -> Point:
    """logits: of each draw, for this gamma or a larger one: their first rows are a round's too."""
    rounds: Mapping[str, list[Round]] = {
        rule: [
            Round((target[:, : gamma + 1], draft[:, :gamma]), params, seed=n, threads=threads)
            for n, (target, draft) in enumerate(logits)
        ]
        for rule, params in RULES.items()
    }
    return measure(rounds, WAYS, samples=SAMPLES, patience=patience)


def run(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """All of it, the analysis of alpha and beta on a bundle of the bundled pair."""
    size = QUICK if args.quick else FULL
    patience = size.patience if args.patience is None else args.patience
    library = kernel.load()  # an error that names the remedy, where there is no library
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler is talkative
    import torch

    torch.set_num_threads(args.threads)
    clock.note("alpha and beta, on the bundled pair")
    engine = load(args.engines, threads=args.threads, verify=False)
    documents = list(
        sigmoid.held_out_logits(engine, context=CONTEXT, count=size.positions, limit=size.documents)
    )
    clock.note("memory")
    allocated = overheads(size, args.threads)
    reader = machine.MemoryReader(args.threads, size.read_bytes)
    points, agreeing = [], []
    for vocab_size in size.vocabularies:
        # A seed each: another run has the same rounds.
        logits = [random_logits(vocab_size, max(size.gammas), 1, seed=n) for n in range(size.draws)]
        for gamma in size.gammas:
            clock.note(f"time at V = {vocab_size:,}, gamma {gamma}")
            points.append(point(logits, gamma, size, patience, args.threads))
            alternate({"read": reader}, rounds=2, patience=1)
        clock.note(f"time at V = {vocab_size:,}, every draft token stands")
        equal = [(target, target[:, :-1].copy()) for target, _ in logits]
        agreeing.append(point(equal, AGREEING, size, patience, args.threads))
    found = PaperRun(
        reader.bandwidth, points, agreeing, size.base, allocated, sigmoid.effects(documents),
        sigmoid.released_bonus(documents), len(documents), size.positions,
    )  # fmt: skip
    return {
        "machine": machine.describe(args.threads),
        "instruction_set": library.outrider_instruction_set().decode(),
        **found.json_object(),
    }


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(threads=1)
    add = parser.add_argument
    add("--engines", type=Path, default=Path("build/demo"), metavar="DIR",
        help="a bundle of the bundled pair; default: build/demo")  # fmt: skip
    add("--patience", type=float, metavar="SECONDS", help="how long a shape waits for quiet")


SUITE = Suite(
    name="paper", about=__doc__ or "", quick="fewer shapes and positions, half a minute",
    options=options, measure=run, tables=tables, plots=PLOTS,
)  # fmt: skip
