"""The plots of bench/report.py, by matplotlib (of the group `dev`); bench/report_data.py has their
numbers."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from runtime.theory.formulas import break_even, oracle, speedup

from . import plots
from .plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend, panels
from .report_data import (
    PARTS,
    Measurement,
    accepted_counts,
    by_length,
    by_position,
    capped_geometric,
    interval,
    parts,
    speed_ratios,
    traced,
    widths,
)

CROWDED = 12  # bars, from which on there is no room for their figures
COLORS = dict(zip(PARTS, (SKY, PURPLE, ORANGE, "0.7"), strict=True))


def _percent(value: float, _: int = 0) -> str:
    return f"{100 * value:.0f} %"


def _times(value: float, _: int = 0) -> str:
    return f"{value:g}x"


def _ticks(axes: Any, most: int, least: int = 0) -> None:
    """Whole numbers, at most some 16 of them."""
    step = max(1, round((most - least) / 16))
    axes.set_xticks(range(least, most + 1, step))
    axes.grid(axis="x", visible=False)


def positions_plot(m: Measurement) -> Any:
    figure, (axes,) = panels(1, 2.8)
    counts = by_position(m.rounds(*m.gammas))
    for i, (reached, accepted) in enumerate(counts, start=1):
        if not reached:
            continue
        share, (low, high) = accepted / reached, interval(accepted, reached)
        axes.bar(i, share, 0.65, color=SKY, label="accepted of reached" if i == 1 else None)
        axes.errorbar(
            i, share, [[share - low], [high - share]], color=BLACK, linewidth=1, capsize=2,
            label="95 % interval" if i == 1 else None,
        )  # fmt: skip
        if len(counts) <= CROWDED:
            axes.text(i, 0.03, _percent(share), ha="center", fontsize=8)
    alpha = f"α = {m.found.alpha:.3f}, all positions"
    axes.axhline(m.found.alpha, color=RED, linestyle="--", label=alpha)
    axes.set(xlabel="draft position of a round", ylabel="accepted of reached", ylim=(0, 1.05))
    axes.yaxis.set_major_formatter(_percent)
    _ticks(axes, len(counts), 1)
    legend(figure, axes, 3)
    return figure


def histogram_plot(m: Measurement) -> Any:
    gammas = sorted({m.shown, max(m.gammas)})
    figure, grid = panels(len(gammas), 2.9, sharey=True)
    for axes, gamma in zip(grid, gammas, strict=True):
        counts = accepted_counts(m.rounds(gamma), gamma)
        total = sum(counts)
        shares = [count / max(1, total) for count in counts]
        places = range(gamma + 1)
        axes.bar(places, shares, 0.65, color=SKY, label="rounds measured")
        axes.plot(
            places, capped_geometric(m.found.alpha, gamma), color=RED, marker="D", linestyle=":",
            label=f"equation (1)'s model: each draft accepted with α = {m.found.alpha:.3f}",
        )  # fmt: skip
        axes.set(xlabel="accepted drafts of a round", title=f"γ = {gamma}, {total:,} rounds")
        _ticks(axes, gamma)
    grid[0].set_ylabel("share of the rounds")
    grid[0].yaxis.set_major_formatter(_percent)
    legend(figure, grid[0], 2)
    return figure


def sweep_plot(m: Measurement) -> Any:
    found, gammas = m.found, m.gammas
    figure, (axes,) = panels(1, 3.4)
    bound = oracle(found.alpha, found.costs.draft)
    if isfinite(bound):
        label = f"oracle's bound, {bound:.2f}x"
        axes.axhline(bound, color=BLACK, linewidth=1, linestyle=":", label=label)
    theory = [speedup(found.alpha, g, found.costs.draft) for g in gammas]
    axes.plot(gammas, theory, color=ORANGE, marker="^", linestyle="--", label="Theorem 3.8")
    label = "Theorem 3.8 with the measured widths"
    axes.plot(gammas, [m.expected(g) for g in gammas], color=BLUE, marker="s", label=label)
    measured = list(found.measured.values())
    axes.plot(gammas, measured, color=RED, marker="o", label="measured, median of the prompts")
    ranges = [speed_ratios(m.texts, g) for g in gammas]
    axes.vlines(
        gammas, [min(r) for r in ranges], [max(r) for r in ranges], color=RED, alpha=0.35,
        linewidth=3, label="least and most of the prompts",
    )  # fmt: skip
    axes.axhline(1, color="0.4", linewidth=1, label="plain decoding")
    axes.set(xlabel="draft tokens γ", ylabel="speedup, without the prefill", ylim=(0, None))
    axes.yaxis.set_major_formatter(_times)
    _ticks(axes, max(gammas), 1)
    legend(figure, axes, 2)
    return figure


def widths_plot(m: Measurement) -> Any:
    figure, (axes,) = panels(1, 2.9)
    places = [g + 1 for g in m.texts]
    axes.plot(
        places, m.found.costs.verify, color=BLUE, marker="s",
        label="a round but for its draft: the target's call, sampling, host",
    )  # fmt: skip
    calls = [float("nan") if x is None else x for x in widths(m)]
    axes.plot(places, calls, color=PURPLE, marker="o", linestyle="--", label="the target's call")
    label = "floor: a plain step, which Theorem 3.8 takes for any width"
    axes.axhline(1, color=BLACK, linewidth=1, label=label)
    axes.set(xlabel="width: tokens verified at once, γ + 1", ylabel="plain steps", ylim=(0, None))
    _ticks(axes, max(places), 1)
    legend(figure, axes, 1)
    return figure


def shares_plot(m: Measurement) -> Any:
    figure, (axes,) = panels(1, 3.1)
    for gamma in m.texts:
        times = parts(m.stats(gamma))
        whole, below = sum(times.values()), 0.0
        for name, seconds in times.items():
            share = seconds / whole
            label = name if gamma == 0 else None
            axes.bar(gamma, share, 0.75, below, color=COLORS[name], label=label)
            if share >= 0.06 and len(m.texts) <= CROWDED:
                axes.text(
                    gamma, below + share / 2, _percent(share), ha="center", va="center", fontsize=7
                )
            below += share
        if len(m.texts) <= CROWDED:
            axes.text(gamma, 1.015, f"{1e3 * whole:.3g} ms", ha="center", fontsize=8)
    axes.set(xlabel="draft tokens γ", ylabel="share of a round", ylim=(0, 1.08))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(_percent)
    axes.grid(visible=False)
    _ticks(axes, max(m.texts))
    legend(figure, axes, 4)
    return figure


def lengths_plot(m: Measurement) -> Any:
    figure, (axes,) = panels(1, 3.0)
    points = by_length(m, m.shown)
    places = range(1, len(points) + 1)
    low, high = [p[1] for p in points], [p[2] for p in points]
    label = "least and most of the prompts"
    axes.fill_between(places, low, high, color=SKY, alpha=0.35, linewidth=0, label=label)
    label = f"γ = {m.shown}, median of the prompts"
    axes.plot(places, [p[0] for p in points], color=BLUE, label=label)
    axes.axhline(1, color="0.4", linewidth=1, label="plain decoding")
    pays = break_even(m.found.overhead, m.expected(m.shown))
    if pays <= len(points):
        label = f"break-even by the formula: {max(1, pays):.0f} tokens"
        axes.axvline(max(1, pays), color=RED, linestyle="--", label=label)
    axes.set(xlabel="output tokens", ylabel="speedup, prefill included", ylim=(0, None))
    axes.set_xlim(0, len(points) + 1)
    axes.yaxis.set_major_formatter(_times)
    legend(figure, axes, 2)
    return figure


def trace_plot(m: Measurement) -> Any:
    rows = traced(m)
    figure, (axes,) = panels(1, 0.9 + 0.75 * len(rows))
    named: set[str] = set()

    def block(row: int, left: float, seconds: float, color: str, what: str, count: int = 1) -> None:
        label = None if what in named else what
        named.add(what)
        for i in range(count):
            axes.barh(
                row, 1e3 * seconds / count, 0.5, 1e3 * (left + i * seconds / count), color=color,
                edgecolor="white", linewidth=0.5, label=label if i == 0 else None,
            )  # fmt: skip

    end = 0.0
    for row, (gamma, rounds) in enumerate(rows.items()):
        start = rounds[0].begin
        for x in rounds:
            left = x.begin - start
            for name, seconds, color, count in (
                ("draft's prefill", x.catch_up, GREEN, 1),
                ("draft call", x.draft, SKY, x.gamma),
                ("target call", x.verify, PURPLE, 1),
                ("sampling", x.sample, ORANGE, 1),
            ):
                if seconds and count:
                    block(row, left, seconds, color, name, count)
                if name == "target call":
                    middle = 1e3 * (left + seconds / 2)
                    if gamma:
                        axes.text(middle, row - 0.29, f"+{x.emitted}", ha="center", fontsize=7)
                left += seconds
        width = 1e3 * (rounds[-1].end - start)
        end = max(end, width)
        tokens = sum(x.emitted for x in rounds)
        axes.text(width, row, f"  {tokens} tokens, {width:.3g} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"γ = {g}" if g else "plain" for g in rows])
    axes.set(xlabel="ms from the first token on", xlim=(0, 1.3 * end), ylim=(len(rows) - 0.5, -0.6))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    legend(figure, axes, 4)
    return figure


PLOTS: dict[str, Callable[[Measurement], Any]] = {
    "positions": positions_plot,
    "histogram": histogram_plot,
    "sweep": sweep_plot,
    "widths": widths_plot,
    "shares": shares_plot,
    "lengths": lengths_plot,
    "trace": trace_plot,
}


def draw(m: Measurement) -> dict[str, Any]:
    """See `plots.draw`."""
    return plots.draw(PLOTS, m)
