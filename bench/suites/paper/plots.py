"""The plots of the paper's analyses, in docs/paper/."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ...core.plot import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend, panels
from ..kernel.times import TRANSFORMERS, Point
from .memory import KERNEL, NUMPY, PAPER, kept
from .tables import ALONE, BLOCK, EXACT, FROM_LOGITS, NAMES, REFERENCE, SIGMOID, THEIRS, PaperRun

STYLES: dict[str, dict[str, Any]] = {
    EXACT: {"color": BLUE, "marker": "o", "label": "kernel, exact"},
    FROM_LOGITS: {
        "color": SKY, "marker": "v", "linestyle": "--", "label": "kernel, exact, q from logits",
    },
    BLOCK: {"color": GREEN, "marker": "^", "linestyle": "-.", "label": "kernel, block"},
    SIGMOID: {"color": ORANGE, "marker": "s", "linestyle": "--", "label": "kernel, sigmoid"},
    REFERENCE: {"color": PURPLE, "marker": "D", "label": NAMES[REFERENCE]},
    THEIRS: {"color": RED, "marker": "X", "label": NAMES[THEIRS]},
    ALONE: {"color": RED, "marker": "x", "linestyle": ":", "label": NAMES[ALONE]},
    # Of memory.
    KERNEL: {"color": BLUE, "marker": "o"},
    NUMPY: {"color": PURPLE, "marker": "D"},
    TRANSFORMERS: {"color": RED, "marker": "X"},
    PAPER: {"color": BLACK, "marker": "P", "linestyle": ":"},
}  # fmt: skip
PAPER_SHARES = 100 * 9.32 / 2000, 100 * 62.99 / 2000  # table 3: GB/s of 2 TB/s, in per cent


def _by_vocabulary(run: PaperRun) -> tuple[Any, Iterator[tuple[Any, list[Point], list[int]]]]:
    """A figure, and of each panel its axes, points and gammas."""
    groups: dict[int, list[Point]] = {}
    for point in run.points:
        groups.setdefault(point.vocab_size, []).append(point)
    figure, grid = panels(len(groups), 3.2, sharey=True)

    def each() -> Iterator[tuple[Any, list[Point], list[int]]]:
        for axes, (vocab_size, points) in zip(grid, groups.items(), strict=True):
            gammas = [p.gamma for p in points]
            axes.set(yscale="log", title=f"V = {vocab_size:,}", xlabel="draft tokens γ")
            yield axes, points, gammas
            axes.set_xticks([g for g in gammas if g in (1, 5, 8, 12, 16, 20) or g > 20])
            axes.set_xlim(left=0)
        legend(figure, grid[0], 3)

    return figure, each()


def time_plot(run: PaperRun) -> Any:
    figure, each = _by_vocabulary(run)
    label = f"floor: bytes of exact at {run.bandwidth / 1e9:.1f} GB/s"
    for axes, points, gammas in each:
        for name in run.calls:
            axes.plot(gammas, [p.ms(name) for p in points], **STYLES[name])
        floors = [1e3 * p.bytes[EXACT] / run.bandwidth for p in points]
        axes.plot(gammas, floors, color=BLACK, linewidth=1, label=label)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    figure.axes[0].set_ylabel("sampling of a round, ms")
    return figure


def bandwidth_plot(run: PaperRun) -> Any:
    figure, each = _by_vocabulary(run)
    for axes, points, gammas in each:
        for name in (name for name in run.calls if name not in (BLOCK, ALONE)):
            shares = [100 * p.bandwidth(name) / run.bandwidth for p in points]
            axes.plot(gammas, shares, **STYLES[name])
        axes.axhline(100, color=BLACK, linewidth=1, label="memory, measured in this run")
        label = "paper, table 3, of an A100's 2 TB/s"
        axes.axhspan(*PAPER_SHARES, color="0.85", zorder=0, label=label)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    figure.axes[0].set_ylabel(f"bandwidth, % of {run.bandwidth / 1e9:.1f} GB/s")
    return figure


def memory_plot(run: PaperRun) -> Any:
    figure, grid = panels(3, 3.0, sharey=True)
    names = list(dict.fromkeys(o.name for o in run.overheads))
    titles, short = ("vocabulary V", "draft tokens γ", "slots B"), ("V", "γ", "B")
    for axis, axes in enumerate(grid):
        others = [i for i in range(3) if i != axis]
        line = [o for o in run.overheads if all(o.size[i] == run.base[i] for i in others)]
        for name in names:
            points = sorted((o.size[axis], o.extra / 1e6) for o in line if o.name == name)
            axes.plot(*zip(*points, strict=True), label=name, **STYLES[name])
        rows = sorted({(o.size[axis], kept(*o.size) / 1e6) for o in line})
        label = "the draft's rows, kept by all (not in the others)"
        axes.plot(*zip(*rows, strict=True), color="0.6", linewidth=1, label=label)
        title = ", ".join(f"{short[i]} = {run.base[i]:,}" for i in others)
        axes.set(xscale="log", yscale="log", xlabel=titles[axis], title=title)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _ticks_apart(axes, (x for x, _ in rows))
    grid[0].set_ylabel("memory of a verification, MB")
    legend(figure, grid[0], 3)
    return figure


def _ticks_apart(axes: Any, places: Iterable[int]) -> None:
    """At the measured places, as far as they do not overlap; 51,864 is 52k."""
    apart: list[int] = []
    for place in places:
        if not apart or place > 1.9 * apart[-1]:
            apart.append(place)
    axes.set_xticks(apart, [f"{p}" if p < 1000 else f"{p / 1000:.0f}k" for p in apart])
    axes.minorticks_off()


def scaling_plot(run: PaperRun) -> Any:
    figure, grid = panels(2, 3.2, sharey=True)
    titles = {"eq. 5": "eq. 5", "float16": "in float16, as the paper's program"}
    exact = next(e for e in run.effects if e.name == "exact")
    for axes, (name, title) in zip(grid, titles.items(), strict=True):
        effects = [e for e in run.effects if e.name == name]
        numbers = [e for e in effects if e.lowest == e.lowest]  # and not NaN
        label = "exact rule: draft tokens accepted"
        axes.axhline(exact.accepted, color=BLUE, linewidth=1, label=label)
        label = "distance of target and draft"
        axes.axhline(exact.to_draft, color=BLACK, linewidth=1, linestyle=":", label=label)
        for key, label, color, marker in (
            ("accepted", "draft tokens accepted", ORANGE, "s"),
            ("to_target", "distance of the output from the target", RED, "o"),
            ("to_draft", "distance of the output from the draft", GREEN, "^"),
        ):
            values = [getattr(e, key) for e in effects]
            scales = [e.scale for e in effects]
            axes.plot(scales, values, color=color, marker=marker, linestyle="")
            line = values[: len(numbers)]
            axes.plot(scales[: len(numbers)], line, color=color, marker=marker, label=label)
        axes.axvspan(1e3 / 1.6, 1e4 * 1.6, color="0.92", zorder=0, label="what the paper uses")
        if len(numbers) < len(effects):
            text = "±10⁵ is infinite in float16: all draft\ntokens rejected, the redraw uniform"
            axes.text(8e3, 0.2, text, ha="right", va="center", fontsize=7)
        axes.set(xscale="log", title=title, xlabel="β = −α, logits", ylim=(-0.03, 1.03))
    grid[0].set_ylabel("share, or total variation")
    legend(figure, grid[0], 2)
    return figure


def _of(plot: Callable[[PaperRun], Any]) -> Callable[[Mapping[str, Any]], Any]:
    return lambda results: plot(PaperRun.of(results))


PLOTS = {
    "time": _of(time_plot),
    "bandwidth": _of(bandwidth_plot),
    "memory": _of(memory_plot),
    "scaling": _of(scaling_plot),
}
