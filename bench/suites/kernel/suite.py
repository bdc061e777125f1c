"""The sampling kernel on the CPU: first whether it is right, then what it costs.

Holds the native kernel against the NumPy reference on fresh random logits, all rules and filters.
Then times a round by the token rule, of both, and of Transformers' `_speculative_sampling` with its
logits processors as assisted generation calls it. Beside each figure stands the floor: the bytes
that must be read, at the bandwidth that was measured in the same run. `python -m
bench.suites.gpu.kernel` has the CUDA kernels.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from ...core.clock import Clock
from ...core.command import Results, Suite
from ...core.table import Table, decimals
from . import times
from .points import less, percent, points_of, points_table, ranges_table
from .rounds import RULES, VARIANTS
from .times import NUMPY_ROUND, ROUND, TRANSFORMERS, VERIFY

VOCABULARIES = (32_000, 51_864, 128_256, 151_936)
GAMMAS = (1, 3, 5, 8)
BATCHES = (1, 8, 32)
SIZES = list(product(VOCABULARIES, GAMMAS, BATCHES))
GOAL = (151_936, 5, 1)  # V, gamma and B of the goals
TARGET_BYTES = 0.5e9 * 4  # of a 0.5B-parameter float32 target, read once by a verify call
# In docs/performance.md.
TABLED = [
    *((v, 5, 1) for v in VOCABULARIES[:3]), *((151_936, g, 1) for g in GAMMAS),
    (151_936, 5, 8), (151_936, 8, 32),
]  # fmt: skip
WAYS = VERIFY, ROUND, NUMPY_ROUND, TRANSFORMERS
CALLS = OURS, OUR_ROUND, NUMPYS_ROUND, THEIRS = [f"token: {way}" for way in WAYS]

LOAD = "share of a verification"  # the key of what `tables` adds to a point
SHARE = (f"share of {OURS}", "share of the floor's speed", percent(0))
LESS = (less(OURS, THEIRS), "less time than Transformers", percent(1))
RATIO = (f"{NUMPYS_ROUND} / {OUR_ROUND}", "times as fast as NumPy", decimals(1))
COLUMNS = (
    ("γ", "γ", str), ("B", "B", str),
    (OURS, "verify, ms", decimals(3)), SHARE, (THEIRS, "Transformers", decimals(2)), LESS,
    (OUR_ROUND, "round, ms", decimals(3)), (NUMPYS_ROUND, "NumPy", decimals(2)), RATIO,
)  # fmt: skip
# At the size `GOAL`.
GOALS = {LOAD: "at most 5 %", RATIO[0]: "at least 5", LESS[0]: "at least 94 %"}
RANGES = (LOAD, "round: share of a 0.5B verification", percent(2)), RATIO, LESS, SHARE


def run(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Every variant at `GOAL`, and unless --quick the rules at all sizes; the token rule is
    timed."""
    jobs: list[times.Job] = [([variant], GOAL) for variant in VARIANTS]
    if not args.quick:
        jobs += [([rule], size) for rule in RULES for size in SIZES if size != GOAL]
    return times.run(jobs, CALLS, args, clock)


def tables(results: Results) -> list[Table]:
    reading = 1e3 * TARGET_BYTES / (1e9 * results["bandwidth_gb_s"])  # milliseconds
    token = [p | {LOAD: p[OUR_ROUND] / reading} for p in points_of(results) if OURS in p]
    points = {(p["V"], p["γ"], p["B"]): p for p in token}
    tabled = [points[size] for size in TABLED if size in points]
    goal = points[GOAL]
    met = [
        (heading, show(goal[key]), GOALS.get(key, ""))
        for key, heading, show in RANGES
        if key in goal
    ]
    title = "Goals, V {:,}, γ {}, B {}".format(*GOAL)
    return [
        points_table("Sampling by the token rule", tabled, COLUMNS, "kernel"),
        Table(title, ("", "measured", "goal"), met),
        ranges_table(f"The same, of all sizes: {len(token)}", token, RANGES),
    ]


SUITE = Suite(
    name="kernel", about=__doc__ or "", quick="one size instead of all", options=times.options,
    measure=run, tables=tables, places=("kernel",),
)  # fmt: skip
main = SUITE.main
