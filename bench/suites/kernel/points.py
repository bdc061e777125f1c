"""Tables of sampling times: one row per size, and ranges over all sizes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.clock import MIN_SAMPLES
from ...core.table import Column, Table, make_table

Point = dict[str, Any]


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


def points_table(
    title: str, points: Iterable[Point], columns: Sequence[Column], name: str
) -> Table:
    """One row per point, without the columns for which nothing was timed."""
    rows = [(f"V = {p['V']:,}", p) for p in points]
    return make_table(title, rows, columns, name=name)


def ranges_table(title: str, points: Sequence[Point], rows: Iterable[Column]) -> Table:
    """Minimum, median and maximum over all points."""
    cells = []
    for key, heading, spec in rows:
        if found := sorted(p[key] for p in points if key in p):
            three = found[0], statistics.median(found), found[-1]
            cells.append((heading, *(format(value, spec) for value in three)))
    return Table(title, ("", "min", "median", "max"), cells)
