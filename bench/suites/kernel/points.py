"""What rounds of the sampling have taken, as tables: one of sizes, one of ranges over them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from ...core.clock import ENOUGH
from ...core.table import Column, Table, table_of

Point = dict[str, Any]


def less(ours: str, theirs: str) -> str:
    """The key of the share of their time that ours does not take."""
    return f"{ours} less than {theirs}"


def points_of(results: Mapping[str, Any]) -> list[Point]:
    """The numbers of each point of `times.run`, by name.

    "V", "γ", "B"; by call the milliseconds of a round; "floor of CALL", milliseconds in which
    memory gives the bytes that the outcome needs; "share of CALL", of that speed; "A / B" and
    `less` of any two calls; "accepted by VARIANT", draft tokens of a slot, the mean.
    """
    points = []
    for p in results["points"]:
        ms = {call: figure["ms"] for call, figure in p["times"].items()}
        memory = 1e6 * results["bandwidth_gb_s"]  # bytes in a millisecond
        made = {"V": p["vocab_size"], "γ": p["gamma"], "B": p["batch"]}
        made |= ms | {f"accepted by {rule}": mean for rule, mean in p["accepted"].items()}
        for call, size in p["bytes"].items():
            made |= {
                f"floor of {call}": size / memory,
                f"share of {call}": size / memory / ms[call],
            }
        for a, b in permutations(ms, 2):
            made |= {f"{a} / {b}": ms[a] / ms[b], less(a, b): 1 - ms[a] / ms[b]}
        made["disturbed"] = any(figure["kept"] < ENOUGH for figure in p["times"].values())
        points.append(made)
    return points


def points_table(
    title: str, points: Iterable[Point], columns: Sequence[Column], name: str = ""
) -> Table:
    """A row for each point, without columns that nobody timed."""
    rows = [(f"V = {p['V']:,}", p) for p in points]
    return replace(table_of(title, rows, columns), name=name)


def ranges_table(title: str, points: Sequence[Point], rows: Iterable[Column]) -> Table:
    """Least, median and most of all points."""
    told = []
    for key, heading, spec in rows:
        if found := sorted(p[key] for p in points if key in p):
            three = found[0], statistics.median(found), found[-1]
            told.append((heading, *(format(value, spec) for value in three)))
    return Table(title, ("", "least", "median", "most"), told)
