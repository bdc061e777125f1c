"""The plots of bench/paper.py, from its JSON object: `python -m bench.paper_plot build/paper`.

matplotlib is of the group `dev`; without it only the plots are missing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from . import plots
from .plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend, panels

ALONE = "Transformers, its function alone"
STYLES: dict[str, dict[str, Any]] = {
    "kernel, exact": {"color": BLUE, "marker": "o"},
    "kernel, exact, q from logits": {"color": SKY, "marker": "v", "linestyle": "--"},
    "kernel, block": {"color": GREEN, "marker": "^", "linestyle": "-."},
    "kernel, sigmoid": {"color": ORANGE, "marker": "s", "linestyle": "--"},
    "kernel": {"color": BLUE, "marker": "o"},
    "NumPy, exact": {"color": PURPLE, "marker": "D"},
    "NumPy": {"color": PURPLE, "marker": "D"},
    "Transformers": {"color": RED, "marker": "X"},
    ALONE: {"color": RED, "marker": "x", "linestyle": ":"},
    "the paper's τ and a": {"color": BLACK, "marker": "P", "linestyle": ":"},
}
PAPER_SHARES = 9.32 / 2000, 62.99 / 2000  # table 3: GB/s of 2 TB/s


def draw_or_explain(report: dict[str, Any], out: Path) -> list[str]:
    """See `plots.draw_or_explain`."""
    return plots.draw_or_explain(PLOTS, report, out)


def _by_vocabulary(report: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for point in report["points"]:
        groups.setdefault(point["V"], []).append(point)
    return groups


def time_plot(report: dict[str, Any]) -> Any:
    groups = _by_vocabulary(report)
    figure, grid = panels(len(groups), 3.2, sharey=True)
    for axes, (vocab_size, points) in zip(grid, groups.items(), strict=True):
        gammas = [p["gamma"] for p in points]
        for name in points[0]["times"]:
            figures = [p["times"][name] for p in points]
            axes.plot(gammas, [f["ms"] for f in figures], label=name, **STYLES[name])
        floors = [p["bytes"]["kernel, exact"] / report["bandwidth_gb_s"] / 1e6 for p in points]
        label = f"floor: bytes of exact at {report['bandwidth_gb_s']:.1f} GB/s"
        axes.plot(gammas, floors, color=BLACK, linewidth=1, label=label)
        _gamma_axis(axes, gammas)
        axes.set(yscale="log", title=f"V = {vocab_size:,}")
        axes.yaxis.set_major_formatter(_plain)
    grid[0].set_ylabel("sampling of a round, ms")
    legend(figure, grid[0], 3)
    return figure


def bandwidth_plot(report: dict[str, Any]) -> Any:
    groups = _by_vocabulary(report)
    figure, grid = panels(len(groups), 3.2, sharey=True)
    for axes, (vocab_size, points) in zip(grid, groups.items(), strict=True):
        gammas = [p["gamma"] for p in points]
        for name in (n for n in points[0]["gb_s"] if n not in ("kernel, block", ALONE)):
            shares = [100 * p["gb_s"][name] / report["bandwidth_gb_s"] for p in points]
            axes.plot(gammas, shares, label=name, **STYLES[name])
        axes.axhline(100, color=BLACK, linewidth=1, label="memory, measured in this run")
        low, high = (100 * share for share in PAPER_SHARES)
        axes.axhspan(low, high, color="0.85", zorder=0, label="paper, table 3, of an A100's 2 TB/s")
        _gamma_axis(axes, gammas)
        axes.set(yscale="log", title=f"V = {vocab_size:,}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    grid[0].set_ylabel(f"bandwidth, % of {report['bandwidth_gb_s']:.1f} GB/s")
    legend(figure, grid[0], 3)
    return figure


def memory_plot(report: dict[str, Any]) -> Any:
    base = dict(zip(("V", "gamma", "B"), report["memory_base"], strict=True))
    figure, grid = panels(3, 3.0, sharey=True)
    names = list(dict.fromkeys(o["name"] for o in report["memory"]))
    titles = {"V": "vocabulary V", "gamma": "draft tokens γ", "B": "slots B"}
    for axes, axis in zip(grid, base, strict=True):
        others = [key for key in base if key != axis]
        line = [o for o in report["memory"] if all(o[key] == base[key] for key in others)]
        for name in names:
            points = sorted((o[axis], o["extra"] / 1e6) for o in line if o["name"] == name)
            axes.plot(*zip(*points, strict=True), label=name, **STYLES[name])
        rows = sorted({(o[axis], 4e-6 * o["B"] * o["gamma"] * o["V"]) for o in line})
        label = "the draft's rows, kept by all (not in the others)"
        axes.plot(*zip(*rows, strict=True), color="0.6", linewidth=1, label=label)
        title = ", ".join(f"{k if k != 'gamma' else 'γ'} = {base[k]:,}" for k in others)
        axes.set(xscale="log", yscale="log", xlabel=titles[axis], title=title)
        axes.yaxis.set_major_formatter(_plain)
        _plain_ticks(axes, [x for x, _ in rows])
    grid[0].set_ylabel("memory of a verification, MB")
    legend(figure, grid[0], 3)
    return figure


def scaling_plot(report: dict[str, Any]) -> Any:
    figure, grid = panels(2, 3.2, sharey=True)
    titles = {"eq. 5": "eq. 5", "float16": "in float16, as the paper's program"}
    exact = next(o for o in report["scaling"] if o["name"] == "exact")
    for axes, (name, title) in zip(grid, titles.items(), strict=True):
        outcomes = [o for o in report["scaling"] if o["name"] == name]
        scales = [o["scale"] for o in outcomes]
        numbers = [o for o in outcomes if o["lowest"] is not None]  # and not NaN
        axes.axhline(
            exact["accepted"], color=BLUE, linewidth=1, label="exact rule: draft tokens accepted"
        )
        axes.axhline(
            exact["to_draft"], color=BLACK, linewidth=1, linestyle=":",
            label="distance of target and draft",
        )  # fmt: skip
        for key, label, color, marker in (
            ("accepted", "draft tokens accepted", ORANGE, "s"),
            ("to_target", "distance of the output from the target", RED, "o"),
            ("to_draft", "distance of the output from the draft", GREEN, "^"),
        ):
            values = [o[key] for o in outcomes]
            axes.plot(scales, values, color=color, marker=marker, linestyle="")
            line = [o[key] for o in numbers]
            axes.plot(scales[: len(line)], line, color=color, marker=marker, label=label)
        axes.axvspan(1e3 / 1.6, 1e4 * 1.6, color="0.92", zorder=0, label="what the paper uses")
        if len(numbers) < len(outcomes):
            text = "±10⁵ is infinite in float16: all draft\ntokens rejected, the redraw uniform"
            axes.text(8e3, 0.2, text, ha="right", va="center", fontsize=7)
        axes.set(xscale="log", title=title, xlabel="β = −α, logits", ylim=(-0.03, 1.03))
    grid[0].set_ylabel("share, or total variation")
    legend(figure, grid[0], 2)
    return figure


def _plain(value: float, _: int) -> str:
    return f"{value:g}"


def _gamma_axis(axes: Any, gammas: Iterable[int]) -> None:
    axes.set_xlabel("draft tokens γ")
    axes.set_xticks([g for g in gammas if g in (1, 5, 8, 12, 16, 20) or g > 20])
    axes.set_xlim(left=0)


def _plain_ticks(axes: Any, places: list[int]) -> None:
    """At the measured places, as far as they do not overlap; 51,864 is 52k."""
    apart: list[int] = []
    for place in places:
        if not apart or place > 1.9 * apart[-1]:
            apart.append(place)
    axes.set_xticks(apart, [f"{p}" if p < 1000 else f"{p / 1000:.0f}k" for p in apart])
    axes.minorticks_off()


PLOTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "time": time_plot,
    "bandwidth": bandwidth_plot,
    "memory": memory_plot,
    "scaling": scaling_plot,
}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for text in draw_or_explain(json.loads((folder / "paper.json").read_text()), folder):
        print(text)
