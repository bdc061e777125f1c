"""python -m bench.side: Outrider and what a user would pick instead, side by side in one run.

The pair is the bundled one, grown to the shape of a real model without changing what it says
(bench/inflate.py), with a draft that agrees with it about as often as is asked for. Every system is
a process of its own (bench/peers.py). Each prompt goes to all of them, one after the other in an
order that changes; ratios are taken prompt by prompt, and their median is told.

Progress goes to stderr, tables to stdout, one JSON line last; with --out also to side.json, side.md
and plots.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.corpus import collect
from runtime.files.errors import CommandParser, OutriderError, run_command

from . import machine, side_batch, side_figures, side_pair, side_plots, side_tables
from .peer_worker import weights_bytes
from .peers import PEERS
from .side_figures import Row, sizes_of
from .side_goals import goals
from .side_run import (
    GAMMA,
    MEMORY_SHAPE,
    OURS,
    WARM_UPS,
    Job,
    Place,
    Run,
    System,
    measure,
    measure_memory,
    say,
    systems,
)
from .workloads import KINDS, Prompts, workloads


@dataclass(frozen=True)
class Cell:
    """kinds of prompts, of one length (tokens), with outputs of one. few: for the main systems."""

    kinds: tuple[str, ...]
    prompt: int
    new_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    few: bool = False


@dataclass(frozen=True)
class Scale:
    """count: prompts of a workload. together: sizes of batches; times: how often each; batch:
    (prompt, output) tokens of their texts. memory: of all systems, or of the main ones."""

    name: str
    shape: str
    count: int
    cells: tuple[Cell, ...]
    together: tuple[int, ...]
    times: int
    batch: tuple[int, int]
    memory_of_all: bool


FULL = Scale(
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
QUICK = Scale(
    "quick", "smollm-135m", 2, (Cell(("completion", "editing"), 128, 24),),
    together=(1, 4), times=1, batch=(64, 16), memory_of_all=False,
)  # fmt: skip


def jobs(scale: Scale, prompts: Prompts, chosen: Sequence[System]) -> list[Job]:
    made = []
    for cell in scale.cells:
        loads = workloads(prompts, scale.count, ((cell.prompt, cell.new_tokens),), cell.kinds)
        some = [s for s in chosen if s.among_few] if cell.few else list(chosen)
        made += [Job(load, t, some) for t in cell.temperatures for load in loads]
    return made


def estimate(scale: Scale, work: Sequence[Job], chosen: Sequence[System], step: float) -> float:
    """Seconds, about: a token of a prefill is worth an eighth of a step. step: seconds of a plain
    step of ours. The other figures are of a machine of two cores."""

    def steps(system: System, prompt: int, new_tokens: int, together: int = 1) -> float:
        pace = 2.0 if system.peer == "transformers" else 1.0
        pace *= 0.5 if system.mode != "plain" or system.precision != "float32" else 1.0
        return together * prompt / 8 + pace * new_tokens * (1 + (together - 1) / 8)

    texts = sum(
        steps(system, len(prompt), job.load.new_tokens)
        for job in work
        for prompt in job.load.prompts
        for system in job.systems
    )
    batches = scale.times * sum(
        steps(system, *scale.batch, size)
        for size in scale.together
        for system in side_batch.batched(chosen)
    )
    held = [s for s in chosen if scale.memory_of_all or s.among_few]
    memory = sum(steps(system, *MEMORY_SHAPE) for system in held)
    warm = WARM_UPS * sum(steps(system, 32, 12) for system in chosen)
    starts = len(held) + 2 * len({system.worker for system in chosen})
    return step * (texts + batches + memory + warm) + 5.0 * starts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="python -m bench.side", description=(__doc__ or "").split("\n\n")[1])
    add = made.add_argument
    add("--quick", action="store_true", help="minutes: one shape of prompts, two of each kind")
    add(
        "--alpha", type=float, default=0.8, metavar="A", help="acceptance of the draft; default 0.8"
    )
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    add("--threads", type=int, default=machine.physical_cores(), metavar="N",
        help="of every system; default: the machine's cores")  # fmt: skip
    add("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="where pairs and what peers make of them are kept")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="write side.json, side.md and plots")
    return made


def _main(args: argparse.Namespace) -> int:
    if OURS not in args.peers:
        raise OutriderError("option", "--peers leaves outrider out", "Name it too.")
    scale = QUICK if args.quick else FULL
    pair = side_pair.make(scale.shape, args.alpha, args.work)
    encode, begin = side_pair.encoder(pair.target)
    prompts = Prompts(collect().held_out, encode, begin, seed=1)
    results = run(scale, Place(pair, args.threads, args.work), prompts, systems(args.peers))
    print(side_tables.heading(results), end="\n\n")
    for table in side_tables.tables(results):
        print(table.text(), flush=True)
    if args.out is not None:
        for line in write(results, args.out):
            say(line)
    print(json.dumps(results, separators=(",", ":")))
    return 0


def run(scale: Scale, place: Place, prompts: Prompts, chosen: Sequence[System]) -> dict[str, Any]:
    """Measure all of a scale; the JSON object."""
    work, found = jobs(scale, prompts, chosen), Run()
    reader = machine.MemoryReader(place.threads)
    for _ in range(5):
        reader()
    weights = weights_bytes(place.pair.target)
    minutes = estimate(scale, work, chosen, 1.3 * weights / reader.bandwidth) / 60
    say(f"about {minutes:.0f} minutes, and longer where something is to be converted first")
    measure(work, place, found, reader)
    batches = side_batch.measure(
        chosen, scale.together, scale.times, scale.batch[1],
        lambda: prompts.completion(scale.batch[0]), place, found,
    )  # fmt: skip
    held = [s for s in chosen if scale.memory_of_all or s.among_few]
    measure_memory(held, prompts.completion(MEMORY_SHAPE[0]), place, found)
    return {
        "machine": machine.describe(place.threads), "scale": scale.name, "gamma": GAMMA,
        "pair": place.pair.facts, "bytes_per_second": round(reader.bandwidth),
        **_texts(work, chosen, found, place, reader.bandwidth),
        "batches": side_batch.summary(batches, [s.name for s in chosen]),
        "missing": found.missing, "facts": found.facts,
    }  # fmt: skip


def _texts(
    work: Sequence[Job], chosen: Sequence[System], found: Run, place: Place, rate: float
) -> dict[str, Any]:
    """What the texts tell: by workload, all together, memory and goals."""
    models = place.pair.target, place.pair.draft
    cells: list[dict[str, Any]] = []
    every: list[Row] = []
    by_temperature: dict[str, list[Row]] = {}
    for job in work:
        rows = found.texts[job.name]
        every += rows
        if set(job.systems) == set(chosen):  # or medians would be over different prompts
            by_temperature.setdefault(f"{job.temperature:g}", []).extend(rows)
        some = {
            s.name: side_figures.summary(rows, s, sizes_of(found, job, s, models, rate))
            for s in job.systems
            if s.worker in found.facts
        }
        cells.append(
            {
                "name": job.name, "kind": job.load.name.split()[0],
                "prompt": len(job.load.prompts[0]), "new_tokens": job.load.new_tokens,
                "temperature": job.temperature,
                "systems": {name: entry for name, entry in some.items() if entry is not None},
                "theory": side_figures.theory(rows, found.costs.get(job.name, ())),
            }
        )  # fmt: skip
    whole = {}
    for temperature, rows in by_temperature.items():
        pairs = ((s.name, side_figures.summary(rows, s, None)) for s in chosen)
        whole[temperature] = {
            "systems": {name: entry for name, entry in pairs if entry is not None}
        }
    memory = side_figures.memory(found, *models)
    quotients = [q for cell in cells if cell["theory"] for q in cell["theory"]["quotients"]]
    loads = {
        worker: asdict(spread)
        for worker, seconds in found.loads.items()
        if (spread := side_figures.Spread.of(seconds))
    }
    told = goals(every, quotients, memory, found.loads.get(f"{OURS} float32", []))
    return {
        "floor_ms": round(1e3 * _floor(found, models[0], rate), 3),
        "cells": cells, "all": whole, "memory": memory, "loads": loads,
        "goals": [goal.json_object() for goal in told],
    }  # fmt: skip


def _floor(found: Run, target: Path, rate: float) -> float:
    """Seconds in which float32 weights, without a cache, can be read."""
    weights = [facts["weights"] for facts in found.facts.values() if facts["dtype"] == "float32"]
    return min(weights, default=0) / rate


def write(results: dict[str, Any], out: Path) -> list[str]:
    """Write what --out asks for; a line for each file."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "side.json").write_text(json.dumps(results))
    (out / "side.md").write_text(side_tables.markdown(results))
    return ["side.json", "side.md", *side_plots.draw_or_explain(results, out)]


if __name__ == "__main__":
    sys.exit(main())
