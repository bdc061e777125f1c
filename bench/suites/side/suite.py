"""Outrider and what a user would pick instead, side by side in one run.

The pair is the bundled one, grown to the shape of a real model without changing what it says, with
a draft that agrees with it about as often as is asked for (bench.core.pair). Every system is a
process of its own (bench.systems). Each prompt goes to all of them, one after the other in an order
that changes; ratios are taken prompt by prompt, and their median is told.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.corpus import collect
from runtime.files.errors import OutriderError

from ...core import machine, pair
from ...core.clock import Clock
from ...core.command import Suite
from ...core.prompts import KINDS, Prompts
from ...systems import SYSTEMS
from . import figures, plots, tables
from .run import (
    GAMMA,
    MEMORY_SHAPE,
    OURS,
    Found,
    Job,
    Place,
    System,
    measure_batches,
    measure_memory,
    measure_texts,
    systems,
)


@dataclass(frozen=True)
class Cell:
    """kinds of prompts, of one length (tokens), with outputs of one. few: for the main systems."""

    kinds: tuple[str, ...]
    prompt: int
    new_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    few: bool = False


@dataclass(frozen=True)
class SideScale:
    """count: prompts of a workload. together: sizes of batches; times: how often each; batch:
    (prompt, output) tokens of their texts. memory_of_all: or of the main systems."""

    name: str
    shape: str
    count: int
    cells: tuple[Cell, ...]
    together: tuple[int, ...]
    times: int
    batch: tuple[int, int]
    memory_of_all: bool


FULL = SideScale(
    "full", "smollm-135m", 3,
    (
        Cell(KINDS, 128, 64),
        Cell(("completion",), 16, 8, few=True),
        Cell(("completion",), 16, 512, (0.0,), few=True),
        Cell(("editing", "question"), 1024, 64, (0.0,), few=True),
        Cell(("continuation",), 1500, 32, (0.0,), few=True),
    ),
    together=(1, 2, 4, 8), times=3, batch=(64, 32), memory_of_all=True,
)  # fmt: skip
QUICK = SideScale(
    "quick", "smollm-135m", 2, (Cell(("completion", "editing"), 128, 24),),
    together=(1, 4), times=1, batch=(64, 16), memory_of_all=False,
)  # fmt: skip


def jobs(scale: SideScale, prompts: Prompts, chosen: Sequence[System]) -> list[Job]:
    """Every workload at its temperatures, with the systems that get it."""
    made = []
    for cell in scale.cells:
        some = [s for s in chosen if s.among_few] if cell.few else list(chosen)
        loads = [
            load
            for kind in cell.kinds
            if (load := prompts.workload(kind, scale.count, cell.prompt, cell.new_tokens))
        ]
        made += [Job(load, t, some) for t in cell.temperatures for load in loads]
    return made


def run(
    scale: SideScale, place: Place, prompts: Prompts, chosen: Sequence[System], clock: Clock
) -> dict[str, Any]:
    """Measure all of a scale; the JSON object."""
    work, found = jobs(scale, prompts, chosen), Found(clock)
    reader = machine.MemoryReader(place.threads)
    for _ in range(5):
        reader()
    measure_texts(work, place, found, reader)
    size, new_tokens = scale.batch
    batches = measure_batches(
        chosen, scale.together, scale.times, lambda: prompts.completion(size), new_tokens,
        place, found,
    )  # fmt: skip
    held = [s for s in chosen if scale.memory_of_all or s.among_few]
    measure_memory(held, prompts.completion(MEMORY_SHAPE[0]), place, found)
    return {
        "machine": machine.describe(place.threads), "scale": scale.name, "gamma": GAMMA,
        "pair": place.pair.facts, "bytes_per_second": round(reader.bandwidth),
        **figures.of_texts(work, chosen, found, place, reader.bandwidth),
        "batches": figures.of_batches(batches, [s.name for s in chosen]),
        "missing": found.missing, "facts": found.facts,
    }  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--alpha", type=float, default=0.8, metavar="A",
        help="acceptance of the draft on held-out text; default 0.8")  # fmt: skip
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    add("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="where pairs and what systems make of them are kept; default build/side")  # fmt: skip


def _measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    if OURS not in args.systems:
        raise OutriderError("option", f"--systems leaves {OURS} out", "Name it too.")
    scale = QUICK if args.quick else FULL
    made = pair.make(scale.shape, args.alpha, args.work)
    encode, begin = pair.encoder(made.target)
    prompts = Prompts(collect().held_out, encode, begin, seed=1)
    return run(scale, Place(made, args.threads, args.work), prompts, systems(args.systems), clock)


SUITE = Suite(
    name="side",
    about=__doc__ or "",
    quick="10 minutes: one shape of prompts, two of each kind",
    measure=_measure,
    tables=tables.tables,
    heading=tables.heading,
    options=_options,
    plots=plots.PLOTS,
)
main = SUITE.main
