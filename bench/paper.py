"""python -m bench.paper: the analyses of "Optimized Speculative Sampling for GPU Hardware
Accelerators" (arXiv 2406.11016), done again with this kernel on this machine.

Time of a round's sampling against gamma (figure 3), realised bandwidth (table 3), memory overhead
(figures 4 and 5), and what alpha and beta do to the output (tables 2 and 7), there in total
variation from the target's distribution. Tables on stdout, progress on stderr, plots and the JSON
object in a folder, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError, run_command
from runtime.sampling import kernel

from . import machine, models, overhead, paper_plot, sigmoid, systems
from .overhead import Overhead
from .paper_tables import (
    agreeing_table,
    bandwidth_table,
    memory_table,
    scaling_table,
    summary,
    time_table,
    update,
)
from .round_time import Point, measure
from .rounds import random_logits
from .sigmoid import Outcome
from .timing import ENOUGH, alternate

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Scale:
    """How much is measured. draws: rounds on different logits in one sample. base: (V, gamma, B)
    at which memory is varied one at a time."""

    name: str
    vocabularies: tuple[int, ...]
    gammas: tuple[int, ...]
    draws: int
    rounds: int
    patience: float  # seconds for which a configuration waits for undisturbed samples
    read_bytes: int
    base: tuple[int, int, int]
    memory_vocabularies: tuple[int, ...]
    memory_gammas: tuple[int, ...]
    memory_batches: tuple[int, ...]
    documents: int
    positions: int  # of a document


BASE = 51_864, 5, 1
LARGE = 128_256, 151_936
FULL = Scale(
    "full", (32_000, 51_864, 151_936), (1, 2, 3, 5, 8, 12, 16, 20), 16, 7, 5, machine.READ_BYTES,
    BASE, (4_096, 32_000, 51_864, *LARGE), (1, 2, 3, 5, 8, 12, 16, 20), (1, 2, 4, 8, 16, 32),
    48, 48,
)  # fmt: skip
QUICK = Scale(
    "quick", (32_000, 51_864), (1, 5, 20), 8, 5, 1, 1 << 28,
    BASE, (4_096, 51_864, 151_936), (1, 5, 20), (1, 8), 24, 12,
)  # fmt: skip
CONTEXT = 64  # tokens before the first position


# Memory


def memory(scale: Scale, threads: int) -> list[Overhead]:
    vocab_size, gamma, batch = scale.base
    places = [(v, gamma, batch) for v in scale.memory_vocabularies]
    places += [(vocab_size, g, batch) for g in scale.memory_gammas]
    places += [(vocab_size, gamma, b) for b in scale.memory_batches]
    return [o for place in dict.fromkeys(places) for o in overhead.overheads(*place, threads)]


# alpha and beta


def scaling(scale: Scale, work: Path, threads: int) -> tuple[list[Outcome], float, int]:
    """Outcomes on the bundled pair; the released program's bonus token; how many documents."""
    from runtime.bundle import load

    folder = ROOT / "models"
    bundle = models.make_bundle("pair", folder / "target", folder / "draft", work, max_len=None)
    engine = load(bundle, threads=threads, verify=False)
    documents = list(
        sigmoid.held_out_logits(
            engine, folder, context=CONTEXT, count=scale.positions, limit=scale.documents
        )
    )
    return sigmoid.outcomes(documents), sigmoid.released_bonus(documents), len(documents)


# The run


def report_of(
    scale: Scale,
    threads: int,
    bandwidth: float,
    points: list[Point],
    overheads: list[Overhead],
    outcomes: list[Outcome],
) -> dict[str, Any]:
    """The JSON object. bandwidth: of the memory, bytes a second."""
    return {
        "benchmark": "paper",
        "scale": scale.name,
        "machine": machine.describe(threads),
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "disturbed": sum(f.kept < ENOUGH for p in points for f in p.times.values()),
        "points": [p.json_object() for p in points],
        "memory_base": scale.base,
        "memory": [o.json_object() for o in overheads],
        "scaling": [o.json_object() for o in outcomes],
    }


def run(
    scale: Scale,
    out: Path,
    work: Path,
    threads: int,
    markdown: bool = False,
    document: Path | None = None,
) -> dict[str, Any]:
    """All of it; the object of the JSON line. document: gets the tables, a folder beside it the
    plots."""
    started = time.perf_counter()

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    if (reason := systems.missing()) is not None:  # the corpus and the pair's compilation want them
        raise OutriderError("backend", reason, "Run make demo, which installs them into .venv.")
    library = kernel.load()  # an error that names the remedy, where there is no library
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler is talkative
    import torch

    torch.set_num_threads(threads)
    note("alpha and beta, on the bundled pair (the first time it is compiled)")
    outcomes, bonus, documents = scaling(scale, work, threads)
    note("memory")
    overheads = memory(scale, threads)
    reader = machine.MemoryReader(threads, scale.read_bytes)
    points = []
    agreeing = []
    for vocab_size in scale.vocabularies:
        longest = max(scale.gammas)  # a seed each: another run has the same rounds
        logits = [random_logits(vocab_size, longest, 1, seed=n) for n in range(scale.draws)]
        for gamma in scale.gammas:
            note(f"time at V = {vocab_size:,}, gamma {gamma}")
            points.append(
                measure(logits, gamma, threads, rounds=scale.rounds, patience=scale.patience)
            )
            alternate({"read": reader}, rounds=2, patience=1)
        note(f"time at V = {vocab_size:,}, every draft token stands")
        equal = [(target, target[:, :-1].copy()) for target, _ in logits]
        gamma = min(5, longest)
        agreeing.append(
            measure(equal, gamma, threads, rounds=scale.rounds, patience=scale.patience)
        )
    bandwidth = reader.bandwidth
    tables = [
        time_table(points, bandwidth),
        agreeing_table(agreeing),
        bandwidth_table(points, bandwidth),
        memory_table(overheads),
        scaling_table(outcomes, documents, scale.positions),
    ]
    for table in tables:
        print(table.text(markdown), flush=True)
    for name, (low, high) in summary(points, bandwidth).items():
        print(f"{name}: {low:.1%} to {high:.1%}", flush=True)
    print(f"TV of the released program's bonus token to the target: {bonus:.3f}", flush=True)
    report = report_of(scale, threads, bandwidth, points, overheads, outcomes)
    report["instruction_set"] = library.outrider_instruction_set().decode()
    report["summary"] = summary(points, bandwidth)
    report["agreeing"] = [p.json_object() for p in agreeing]
    report["scaling_positions"] = documents * scale.positions
    report["released_bonus"] = round(bonus, 4)
    report["seconds"] = round(time.perf_counter() - started, 1)
    (out / "paper.json").write_text(json.dumps(report) + "\n")
    for line in paper_plot.draw_or_explain(report, out):
        note(line)
    if document is not None:
        document.write_text(update(document.read_text(), tables))
        folder = document.with_suffix("")
        folder.mkdir(exist_ok=True)
        for plot in paper_plot.PLOTS:
            if (out / f"{plot}.png").is_file():
                shutil.copy(out / f"{plot}.png", folder)
    return report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer shapes and positions, half a minute")
    add("--markdown", action="store_true", help="print the tables as docs/paper.md has them")
    add("--update", type=Path, metavar="FILE", help="replace the tables and plots of docs/paper.md")
    add("--out", type=Path, default=Path("build/paper"), help="for plots; default: build/paper")
    add("--work", type=Path, default=Path("build/bench"), help="default: build/bench")
    add("--threads", type=int, default=1)
    add("--patience", type=float, metavar="SECONDS", help="how long a shape waits for quiet")
    arguments = parser.parse_args(argv)

    def command() -> int:
        if arguments.threads < 1:
            raise OutriderError("option", "threads must be at least 1", "Leave it out for one.")
        scale = QUICK if arguments.quick else FULL
        if arguments.patience is not None:
            scale = replace(scale, patience=arguments.patience)
        if arguments.update is not None and not arguments.update.is_file():
            raise OutriderError("option", f"{arguments.update} is missing", "Name a document.")
        report = run(
            scale,
            arguments.out,
            arguments.work,
            arguments.threads,
            arguments.markdown,
            arguments.update,
        )
        print(json.dumps(report))
        return 0

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
