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
from . import tables
from .run import GAMMA, MEMORY_SHAPE, Job, SideRun, System, systems

SHAPE = "smollm-135m"
SHARED, LENGTHS, TOGETHER = "Workloads", "Other lengths", "Texts decoded together"


@dataclass(frozen=True)
class Cell:
    """kinds of prompts, of one length (tokens), with outputs of one."""

    kinds: tuple[str, ...]
    prompt: int
    new_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True)
class SideScale:
    """count: prompts of a workload. shared: the cell that all systems get; lengths: those of the
    main ones. together: sizes of batches; times: how often each; batch: (prompt, output) tokens of
    their texts."""

    count: int
    shared: Cell
    lengths: tuple[Cell, ...]
    together: tuple[int, ...]
    times: int
    batch: tuple[int, int]


FULL = SideScale(
    3,
    Cell(KINDS, 128, 64),
    (
        Cell(("completion",), 16, 8),
        Cell(("completion",), 16, 512, (0.0,)),
        Cell(("editing", "question"), 1024, 64, (0.0,)),
        Cell(("continuation",), 1500, 32, (0.0,)),
    ),
    together=(1, 2, 4, 8), times=3, batch=(64, 32),
)  # fmt: skip
QUICK = SideScale(
    2, Cell(("completion", "editing"), 128, 24), (), together=(1, 4), times=1, batch=(64, 16)
)


def workloads(scale: SideScale, prompts: Prompts, chosen: Sequence[System]) -> list[Job]:
    """Texts that are decoded alone: every kind at its temperatures."""
    made = []
    few = [system for system in chosen if system.among_few]
    for cell in (scale.shared, *scale.lengths):
        group, some = (SHARED, chosen) if cell is scale.shared else (LENGTHS, few)
        loads = {
            f"{kind} {cell.prompt}+{cell.new_tokens}": prompts.many(kind, scale.count, cell.prompt)
            for kind in cell.kinds
        }
        made += [
            Job(group, name, [[p] for p in load], cell.new_tokens, temperature, some)
            for temperature in cell.temperatures
            for name, load in loads.items()
        ]
    return made


def batches(scale: SideScale, prompts: Prompts, chosen: Sequence[System]) -> list[Job]:
    """Fresh prompts, of each size `times` batches, for plain decoding and drafts."""
    some = [s for s in chosen if s.mode in ("plain", "draft") and s.precision == "float32"]
    length, new_tokens = scale.batch

    def requests(size: int) -> list[list[list[int]]]:
        return [[prompts.completion(length) for _ in range(size)] for _ in range(scale.times)]

    return [
        Job(TOGETHER, f"{size} together", requests(size), new_tokens, 0.0, some)
        for size in scale.together
    ]


def run(
    scale: SideScale, side: SideRun, prompts: Prompts, chosen: Sequence[System]
) -> dict[str, Any]:
    """Measure all of a scale; the JSON object."""
    reader = machine.MemoryReader(side.threads)
    for _ in range(5):
        reader()
    cells = side.measure(workloads(scale, prompts, chosen), reader)
    cells += side.measure(batches(scale, prompts, chosen), reader)
    return {
        "machine": machine.describe(side.threads), "gamma": GAMMA, "pair": side.pair.facts,
        "bytes_per_second": reader.bandwidth, "systems": [system.name for system in chosen],
        "cells": cells, "memory": side.memory(chosen, prompts.completion(MEMORY_SHAPE[0])),
        "loads": side.loads, "missing": side.missing, "facts": side.facts,
    }  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--alpha", type=float, default=0.8, metavar="A",
        help="acceptance of the draft on held-out text; default 0.8")  # fmt: skip
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="default: all")
    add("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="where pairs and what systems make of them are kept; default build/side")  # fmt: skip


def _measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    if "outrider" not in args.systems:
        raise OutriderError("option", "--systems leaves outrider out", "Name it too.")
    made = pair.make(SHAPE, args.alpha, args.work)
    prompts = Prompts(collect().held_out, *pair.encoder(made.target), seed=1)
    side = SideRun(made, args.threads, args.work, clock)
    return run(QUICK if args.quick else FULL, side, prompts, systems(args.systems))


SUITE = Suite(
    name="side",
    about=__doc__ or "",
    quick="10 minutes: one shape of prompts, two of each kind",
    measure=_measure,
    tables=tables.tables,
    heading=tables.heading,
    options=_options,
)
main = SUITE.main
