"""The sampling kernel on the CPU: correctness, cost, and the output distribution of its rules.

Compares the native kernel with the NumPy reference, for all rules and filters. Then times the
sampling of a round by the kernel, by NumPy and by Transformers' `_speculative_sampling` with its
logits processors, as assisted generation calls it. Each figure is shown with its floor: the time to
read the necessary bytes at the bandwidth measured in the same run.

This repeats the analyses of "Optimized Speculative Sampling for GPU Hardware Accelerators" (arXiv
2406.11016) on this machine: time against gamma (figure 3), realised bandwidth (table 3), and the
effect of alpha and beta on the output (tables 2 and 7), here as total variation from the target's
distribution. `python -m bench.suites.gpu.kernel` measures the CUDA kernels.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from runtime.bundle import load

from ...core.clock import Clock
from ...core.command import Results, Suite, bundle_option
from ...core.table import Column, Table, make_table
from . import times
from .points import points_of, points_table, ranges_table, saved_key
from .rounds import RULES, VARIANTS
from .sigmoid import POSITIONS, PUBLISHED, held_out_logits, measure_scales

EXACT, BLOCK, SIGMOID = (f"{rule}: {times.VERIFY}" for rule in RULES)
FROM_LOGITS, REFERENCE, TRANSFORMERS, FUNCTION_ONLY, ROUND, NUMPY_ROUND = (
    f"token: {way}"
    for way in (
        times.FROM_LOGITS, times.NUMPY, times.TRANSFORMERS, times.FUNCTION_ONLY, times.ROUND,
        times.NUMPY_ROUND,
    )
)  # fmt: skip
CALLS = {  # ways to verify a round, and their column headings
    EXACT: "exact", FROM_LOGITS: "exact, q from logits", BLOCK: "block", SIGMOID: "sigmoid",
    REFERENCE: "NumPy, exact", TRANSFORMERS: times.TRANSFORMERS,
    FUNCTION_ONLY: "Transformers, function only",
}  # fmt: skip
GOAL = (151_936, 5, 1)  # V, gamma and B of the goals
SIZES = list(product((32_000, 51_864, 128_256, 151_936), (1, 5, 8, 20), (1,)))
BATCHES = [(151_936, 5, 8), (151_936, 8, 32)]  # for the token rule only
TARGET_BYTES = 0.5e9 * 4  # a 0.5B-parameter float32 target, read once per verification
DOCUMENTS, QUICK_DOCUMENTS = 48, 8

VERIFY_SHARE = "share of a verification"  # key that `tables` adds to a point
SAVED_EXACT, SAVED_FUNCTION = saved_key(EXACT, TRANSFORMERS), saved_key(FROM_LOGITS, FUNCTION_ONLY)
RATIO = (f"{NUMPY_ROUND} / {ROUND}", "round: speed vs. NumPy", ",.1f")
SAVED: list[Column] = [
    (SAVED_EXACT, "exact: time saved vs. Transformers", ".1%"),
    (SAVED_FUNCTION, "q from logits: time saved vs. function only", ".1%"),
]
GOAL_COLUMNS: list[Column] = [
    (VERIFY_SHARE, "round: share of a 0.5B verification", ".2%"),
    RATIO,
    *SAVED,
]
# At the size `GOAL`.
GOALS = {VERIFY_SHARE: "at most 5 %", RATIO[0]: "at least 5", SAVED_EXACT: "at least 94 %"}


def run(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Measure everything; returns the JSON object: alpha and beta on a bundle of the bundled pair,
    every variant at the size `GOAL` and, without --quick, the rules at all sizes."""
    clock.note("alpha and beta on the bundled pair")
    engine = load(args.engines, threads=args.threads, verify=False)
    documents = list(held_out_logits(engine, QUICK_DOCUMENTS if args.quick else DOCUMENTS))
    jobs: list[times.Job] = [([v], GOAL) for v in VARIANTS if v not in RULES]
    jobs += [(list(RULES), size) for size in ([GOAL] if args.quick else SIZES)]
    if not args.quick:
        jobs += [(["token"], size) for size in BATCHES]
    timed = times.run(jobs, [*CALLS, ROUND, NUMPY_ROUND], args, clock)
    counts = {"documents": len(documents), "positions": POSITIONS}
    return {**timed, "rules": measure_scales(documents), **counts}


def tables(results: Results) -> list[Table]:
    """The tables of docs/paper.md, named after their places there, and other tables that documents
    cite."""
    reading = 1e3 * TARGET_BYTES / (1e9 * results["bandwidth_gb_s"])  # milliseconds
    points = [p | {VERIFY_SHARE: p[ROUND] / reading} for p in points_of(results) if EXACT in p]
    sizes: list[Column] = [("γ", "γ", ""), ("B", "B", "")]
    time_columns = [(call, name, ",.3f") for call, name in CALLS.items()]
    rounds = [(ROUND, "round", ",.3f"), (NUMPY_ROUND, "NumPy, round", ",.2f"), RATIO]
    # The outcome does not determine the bytes read by the block rule or from processed scores.
    shares = [
        (f"share of {call}", name, ".0%")
        for call, name in CALLS.items()
        if call not in (BLOCK, FUNCTION_ONLY)
    ]
    columns = [
        *sizes,
        ("accepted by token", "accepted, exact", ",.1f"),
        ("accepted by sigmoid", "accepted, sigmoid", ",.1f"),
        (f"floor of {EXACT}", "floor, exact", ",.3f"),
        *time_columns,
        (f"{SIGMOID} / {EXACT}", "sigmoid / exact", ",.2f"),
        *SAVED,
    ]
    memory = f"Realised bandwidth, as a share of the measured {results['bandwidth_gb_s']:.1f} GB/s"
    return [
        points_table(
            "Time to verify a round, ms (native kernel unless stated otherwise)",
            points,
            columns,
            "time",
        ),
        points_table(memory, points, [*sizes, *shares], "bandwidth"),
        rules_table(results),
        points_table(
            "Time of a whole round, with the draft's draws, ms", points, [*sizes, *rounds]
        ),
        goals_table(points),
        ranges_table(f"Ranges over all {len(points)} sizes", points, [RATIO, *SAVED, *shares]),
    ]


def goals_table(points: Iterable[dict[str, Any]]) -> Table:
    goal = next(p for p in points if (p["V"], p["γ"], p["B"]) == GOAL)
    met = [
        (heading, format(goal[key], spec), GOALS.get(key, ""))
        for key, heading, spec in GOAL_COLUMNS
        if key in goal
    ]
    return Table("Goals, V {:,}, γ {}, B {}".format(*GOAL), ("", "measured", "goal"), met)


def rules_table(results: Results) -> Table:
    rows = []
    for found in results["rules"]:
        scale = found["scale"]
        name = f"eq. 5, ±{scale:,.0f}" if scale else "exact"
        rows.append(
            (
                name + (f" (used in the paper for {by})" if (by := PUBLISHED.get(scale)) else ""),
                found,
            )
        )
    count, positions = results["documents"], results["documents"] * results["positions"]
    title = (
        f"alpha and beta, T = 1, {positions} held-out positions of {count} texts (standard error "
        f"up to {max(found['error'] for _, found in rows):.3f})"
    )
    columns = [
        ("accepted", "accepted", ",.5f"),
        ("to_target", "TV to target", ",.4f"),
        ("to_draft", "TV to draft", ".2g"),
    ]
    return replace(make_table(title, rows, columns), name="scaling")


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(threads=1)
    bundle_option(parser)


SUITE = Suite(
    name="kernel", about=__doc__ or "", quick="one size instead of all, and fewer texts",
    options=options, measure=run, tables=tables, table_prefixes=("time", "bandwidth", "scaling"),
)  # fmt: skip
main = SUITE.main
