"""The plots of the growth benchmark, from its JSON object.

Log-log small multiples: points with their range, the fitted power law as a line of the same colour
and its exponent in the legend, the floor dotted.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ...core.command import Results
from ...core.plot import BLUE, GREEN, ORANGE, PURPLE, RED, WIDTH

COLUMNS = 2
STYLES = ((BLUE, "o"), (RED, "s"), (GREEN, "^"), (ORANGE, "D"), (PURPLE, "v"))


def in_bytes(curve: str) -> bool:
    """Whether a curve is of bytes; the others are of seconds."""
    return curve == "bundle" or curve.endswith(("memory", "peak"))


def unit(curve: str, most: float) -> tuple[str, float]:
    """What to print a curve in, and how much of it one second or byte is."""
    if in_bytes(curve):
        return "MiB", 2**-20
    return ("s", 1.0) if most >= 10 else ("ms", 1e3)


def _plot(results: Results, of_bytes: bool) -> Any:
    from matplotlib.figure import Figure

    panels = {}
    for name, section in results["sections"].items():
        curves = {c: v for c, v in section["curves"].items() if in_bytes(c) == of_bytes}
        if curves:
            panels[name] = section["axis"], curves
    rows = math.ceil(len(panels) / COLUMNS)
    figure = Figure(figsize=(WIDTH, 2.9 * rows), layout="constrained")
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes, (name, (axis, curves)) in zip(grid, panels.items(), strict=False):
        for (color, marker), (curve, content) in zip(STYLES, curves.items(), strict=False):
            _curve(axes, curve, content, color, marker, 2**-20 if of_bytes else 1.0)
        axes.set(xscale="log", yscale="log", title=name, xlabel=axis)
        axes.set_ylabel("MiB" if of_bytes else "seconds")
        places = sorted({p["x"] for content in curves.values() for p in content["points"]})
        _tidy(axes, len(curves), places)
        axes.legend(loc="upper left")
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    return figure


def _curve(
    axes: Any, name: str, content: dict[str, Any], color: str, marker: str, factor: float
) -> None:
    points, fit = content["points"], content["power"]
    x, y, low, high = ([p[key] for p in points] for key in ("x", "y", "low", "high"))
    y, low, high = ([factor * value for value in series] for series in (y, low, high))
    spread = [[a - b for a, b in zip(y, low, strict=True)],
              [b - a for a, b in zip(y, high, strict=True)]]  # fmt: skip
    label = name
    if fit is not None:
        label += f": $x^{{{fit['exponent']:.2f} \\pm {fit['error']:.2f}}}$"
        line = [factor * fit["scale"] * value ** fit["exponent"] for value in x]
        axes.plot(x, line, color=color, linewidth=1)
    axes.errorbar(x, y, spread, color=color, marker=marker, linestyle="", label=label, elinewidth=1)
    floors = [(p["x"], factor * p["floor"]) for p in points if p["floor"]]
    if floors:
        axes.plot(*zip(*floors, strict=True), color=color, linestyle=":", linewidth=1)


def _tidy(axes: Any, curves: int, places: list[float]) -> None:
    """Room for the legend, and numbers without powers: along x at measured places."""
    from matplotlib.ticker import NullFormatter

    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * max(1.6, (top / bottom) ** (0.15 + 0.1 * curves)))
    axes.yaxis.set_major_formatter(_plain)
    few = top / bottom < 30  # then the powers of ten are too few
    axes.yaxis.set_minor_formatter(_plain if few else NullFormatter())
    axes.tick_params(axis="y", which="minor", labelsize=7)
    apart: list[float] = []
    for place in places:
        if not apart or place > (places[-1] / places[0]) ** 0.11 * apart[-1]:
            apart.append(place)
    axes.set_xticks(apart, [_short(place) for place in apart])
    axes.minorticks_on()
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)


def _plain(value: float, _: int) -> str:
    """Every second of the minor ticks has a number: 1, 2, 4, 6, 8."""
    first = f"{value:.0e}"[0]
    return f"{value:g}" if first in "12468" else ""


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if value >= 1000 else f"{value:g}"


PLOTS = {
    "growth-time": partial(_plot, of_bytes=False),
    "growth-memory": partial(_plot, of_bytes=True),
}
