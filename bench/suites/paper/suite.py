"""The analyses of "Optimized Speculative Sampling for GPU Hardware Accelerators", done again.

That is arXiv 2406.11016; here it is this kernel on this machine. Time of a round's sampling against
gamma (figure 3), realised bandwidth (table 3), and what alpha and beta do to the output (tables 2
and 7), there in total variation from the target's distribution.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from typing import Any

from runtime.bundle import load

from ...core.clock import Clock
from ...core.command import Results, Suite, bundle_option
from ...core.table import Column, Table, decimals, table_of
from ..kernel import times
from ..kernel.points import less, percent, points_of, points_table, ranges_table
from ..kernel.rounds import RULES
from .sigmoid import POSITIONS, PUBLISHED, effects, held_out_logits

EXACT, BLOCK, SIGMOID = (f"{rule}: {times.VERIFY}" for rule in RULES)
FROM_LOGITS, REFERENCE, THEIRS, ALONE = (
    f"token: {way}" for way in (times.RAW, times.NUMPY, times.TRANSFORMERS, times.FUNCTION)
)
CALLS = {  # and their headings
    EXACT: "exact", FROM_LOGITS: "exact, q from logits", BLOCK: "block", SIGMOID: "sigmoid",
    REFERENCE: "NumPy, exact", THEIRS: times.TRANSFORMERS, ALONE: times.FUNCTION,
}  # fmt: skip
VOCABULARIES = (32_000, 51_864, 151_936)
GAMMAS = (1, 2, 3, 5, 8, 12, 16, 20)
TABLED = (1, 5, 8, 20)  # gammas in the tables; the JSON object has all
DRAWS = 16  # rounds on different logits in one sample, the same in every run
DOCUMENTS, QUICK_DOCUMENTS = 48, 8


def run(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """All of it, the analysis of alpha and beta on a bundle of the bundled pair."""
    clock.note("alpha and beta, on the bundled pair")
    engine = load(args.engines, threads=args.threads, verify=False)
    documents = list(held_out_logits(engine, QUICK_DOCUMENTS if args.quick else DOCUMENTS))
    sizes = product(VOCABULARIES[:2], TABLED) if args.quick else product(VOCABULARIES, GAMMAS)
    jobs = [(tuple(RULES), (vocab_size, gamma, 1)) for vocab_size, gamma in sizes]
    timed = times.run(jobs, list(CALLS), args, clock, range(DRAWS))
    counts = {"documents": len(documents), "positions": POSITIONS}
    return {**timed, "rules": effects(documents), **counts}


def tables(results: Results) -> list[Table]:
    """Those of docs/paper.md, by the names of their places there, and what the text cites."""
    points = points_of(results)
    tabled = [p for p in points if p["γ"] in TABLED]
    gamma: Column = ("γ", "γ", str)
    took = [(call, name, decimals(3)) for call, name in CALLS.items()]
    # Of the block rule, and of scores that are ready, the outcome does not tell the bytes.
    shares = [
        (f"share of {call}", name, percent(0))
        for call, name in CALLS.items()
        if call not in (BLOCK, ALONE)
    ]
    saved = [
        (less(EXACT, THEIRS), "exact: less than Transformers", percent(1)),
        (less(FROM_LOGITS, ALONE), "q from logits: less than alone", percent(1)),
    ]
    columns = [
        gamma,
        ("accepted by token", "stand, exact", decimals(1)),
        ("accepted by sigmoid", "stand, sigmoid", decimals(1)),
        (f"floor of {EXACT}", "floor of exact", decimals(3)),
        *took,
        (f"{SIGMOID} / {EXACT}", "sigmoid / exact", decimals(2)),
        *saved,
    ]
    memory = f"Realised bandwidth, of the {results['bandwidth_gb_s']:.1f} GB/s that memory gives"
    title = "Sampling of a round, B = 1: ms; the kernel unless named"
    return [
        points_table(title, tabled, columns, "time"),
        points_table(memory, tabled, [gamma, *shares], "bandwidth"),
        rules_table(results),
        ranges_table("Less time, of all V and γ", points, saved),
        ranges_table(f"{memory}, of all V and γ", points, shares),
    ]


def rules_table(results: Results) -> Table:
    rows = []
    for found in results["rules"]:
        scale = found["scale"]
        name = f"eq. 5, ±{scale:,.0f}" if scale else "exact"
        rows.append(
            (name + (f" (the paper's, {by})" if (by := PUBLISHED.get(scale)) else ""), found)
        )
    count, positions = results["documents"], results["documents"] * results["positions"]
    title = (
        f"alpha and beta, T = 1, {positions} held-out positions of {count} texts (standard error "
        f"up to {max(found['error'] for _, found in rows):.3f})"
    )
    columns = [
        ("accepted", "accepted", decimals(5)),
        ("to_target", "TV to target", decimals(4)),
        ("to_draft", "TV to draft", "{:.2g}".format),
    ]
    return replace(table_of(title, rows, columns), name="scaling")


def options(parser: argparse.ArgumentParser) -> None:
    times.options(parser)
    bundle_option(parser)


SUITE = Suite(
    name="paper", about=__doc__ or "", quick="fewer shapes and texts",
    options=options, measure=run, tables=tables, places=("time", "bandwidth", "scaling"),
)  # fmt: skip
main = SUITE.main
