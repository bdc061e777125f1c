"""The sampling kernel on the CPU: its cost, and the output distribution of its rules.

Times the sampling of a round by the kernel, by NumPy and by Transformers' `_speculative_sampling`
with its logits processors, as assisted generation calls it. Each figure is shown with its floor:
the time to read the necessary bytes at the bandwidth measured in the same run. What is timed is
first compared with NumPy.

This repeats the analyses of "Optimized Speculative Sampling for GPU Hardware Accelerators" (arXiv
2406.11016) on this machine: time against gamma (figure 3), realised bandwidth (table 3), and the
effect of alpha and beta on the output (tables 2 and 7), here as total variation from the target's
distribution. `python -m bench.suites.gpu.kernel` measures the CUDA kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from ...core.clock import MIN_SAMPLES, Clock
from ...core.command import Results, Suite, bundle_option
from ...core.runs import load_pair
from ...core.table import Column, Table, make_table
from . import times
from .rounds import RULES
from .sigmoid import POSITIONS, PUBLISHED, held_out_logits, measure_scales

Point = dict[str, Any]
EXACT = f"token: {times.VERIFY}"
BLOCK = f"block: {times.VERIFY}"
SIGMOID = f"sigmoid: {times.VERIFY}"
FROM_LOGITS = f"token: {times.FROM_LOGITS}"
REFERENCE = f"token: {times.NUMPY}"
TRANSFORMERS = f"token: {times.TRANSFORMERS}"
FUNCTION_ONLY = f"token: {times.FUNCTION_ONLY}"
ROUND = f"token: {times.ROUND}"
NUMPY_ROUND = f"token: {times.NUMPY_ROUND}"
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

SPEEDUP = ("speedup", "round: speed vs. NumPy", ",.1f")  # columns with the values of `ratios_of`
SAVED: list[Column] = [
    ("saved", "exact: time saved vs. Transformers", ".1%"),
    ("saved_function", "q from logits: time saved vs. function only", ".1%"),
]
GOAL_COLUMNS = [("verify_share", "round: share of a 0.5B verification", ".2%"), SPEEDUP, *SAVED]
# At the size `GOAL`.
GOALS = {"verify_share": "at most 5 %", "speedup": "at least 5", "saved": "at least 94 %"}


def points_of(results: Mapping[str, Any]) -> list[Point]:
    """The numbers of each point of `times.run`, by name.

    "V", "γ", "B"; for each call the milliseconds per round; "floor of CALL", milliseconds to read
    the bytes that the outcome needs; "share of CALL", floor over time; "accepted by RULE", the mean
    number of accepted draft tokens per slot.
    """
    points = []
    for p in results["points"]:
        ms = {call: figure["ms"] for call, figure in p["times"].items()}
        memory = 1e6 * results["bandwidth_gb_s"]  # bytes per millisecond
        point = {"V": p["vocab_size"], "γ": p["gamma"], "B": p["batch"]}
        point |= ms | {f"accepted by {rule}": mean for rule, mean in p["accepted"].items()}
        for call, size in p["bytes"].items():
            point |= {
                f"floor of {call}": size / memory,
                f"share of {call}": size / memory / ms[call],
            }
        point["disturbed"] = any(figure["kept"] < MIN_SAMPLES for figure in p["times"].values())
        points.append(point)
    return points


def points_table(title: str, points: Iterable[Point], columns: Sequence[Column]) -> Table:
    """One row per point, without the columns for which nothing was timed."""
    rows = [(f"V = {p['V']:,}", p) for p in points]
    return make_table(title, rows, columns)


def ranges_table(title: str, points: Sequence[Point], rows: Iterable[Column]) -> Table:
    """Minimum, median and maximum over all points."""
    cells = []
    for key, heading, spec in rows:
        if found := sorted(p[key] for p in points if key in p):
            three = found[0], statistics.median(found), found[-1]
            cells.append((heading, *(format(value, spec) for value in three)))
    return Table(title, ("", "min", "median", "max"), cells)


def run(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Measure everything; returns the JSON object: alpha and beta on a bundle of the bundled pair,
    and the rules at all sizes, with --quick only at the size `GOAL`."""
    clock.note("alpha and beta on the bundled pair")
    engine = load_pair(args.engines, args.threads)
    documents = list(held_out_logits(engine, QUICK_DOCUMENTS if args.quick else DOCUMENTS))
    jobs = [(list(RULES), size) for size in ([GOAL] if args.quick else SIZES)]
    if not args.quick:
        jobs += [(["token"], size) for size in BATCHES]
    timed = times.run(jobs, [*CALLS, ROUND, NUMPY_ROUND], args, clock)
    counts = {"documents": len(documents), "positions": POSITIONS}
    return {**timed, "rules": measure_scales(documents), **counts}


def ratios_of(p: Point, reading: float) -> dict[str, float]:
    """The ratios of a point's times. reading: milliseconds to read the weights of a target."""
    found = {
        "verify_share": p[ROUND] / reading,
        "speedup": p[NUMPY_ROUND] / p[ROUND],
        "saved": 1 - p[EXACT] / p[TRANSFORMERS],
        "saved_function": 1 - p[FROM_LOGITS] / p[FUNCTION_ONLY],
    }
    return found | ({"sigmoid_ratio": p[SIGMOID] / p[EXACT]} if SIGMOID in p else {})


def tables(results: Results) -> list[Table]:
    """The tables of docs/paper.md, and those that docs/performance.md cites."""
    reading = 1e3 * TARGET_BYTES / (1e9 * results["bandwidth_gb_s"])  # milliseconds
    points = [p | ratios_of(p, reading) for p in points_of(results)]
    sizes: list[Column] = [("γ", "γ", ""), ("B", "B", "")]
    time_columns = [(call, name, ",.3f") for call, name in CALLS.items()]
    # The outcome does not determine the bytes read by the block rule or from processed scores.
    shares = [
        (f"share of {call}", name, ".0%")
        for call, name in CALLS.items()
        if call not in (BLOCK, FUNCTION_ONLY)
    ]
    named = [(key, f"{name}: share of bandwidth", spec) for key, name, spec in shares]
    columns = [
        *sizes,
        ("accepted by token", "accepted, exact", ",.1f"),
        ("accepted by sigmoid", "accepted, sigmoid", ",.1f"),
        (f"floor of {EXACT}", "floor, exact", ",.3f"),
        *time_columns,
        ("sigmoid_ratio", "sigmoid / exact", ",.2f"),
        *SAVED,
    ]
    memory = f"Realised bandwidth, as a share of the measured {results['bandwidth_gb_s']:.1f} GB/s"
    return [
        points_table(
            "Time to verify a round, ms (native kernel unless stated otherwise)",
            points,
            columns,
        ),
        points_table(memory, points, [*sizes, *shares]),
        rules_table(results),
        goals_table(points),
        ranges_table(f"Ranges over all {len(points)} sizes", points, [SPEEDUP, *SAVED, *named]),
    ]


def goals_table(points: Iterable[dict[str, Any]]) -> Table:
    goal = next(p for p in points if (p["V"], p["γ"], p["B"]) == GOAL)
    met = [
        (heading, format(goal[key], spec), GOALS.get(key, ""))
        for key, heading, spec in GOAL_COLUMNS
    ]
    return Table("Goals, V {:,}, γ {}, B {}".format(*GOAL), ("", "measured", "goal"), met)


def rules_table(results: Results) -> Table:
    rows = []
    for found in results["rules"]:
        scale = found["scale"]
        name = f"eq. 5, ±{scale:,.0f}" if scale else "exact"
        if by := PUBLISHED.get(scale):
            name += f" (used in the paper for {by})"
        rows.append((name, found))
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
    return make_table(title, rows, columns)


def options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(threads=1)
    bundle_option(parser)


SUITE = Suite(
    name="kernel", about=__doc__ or "", quick="one size instead of all, and fewer texts",
    options=options, measure=run, tables=tables,
)  # fmt: skip
main = SUITE.main
