"""The plots of the side-by-side benchmark, from its JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.command import Results
from ...core.plot import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend, panels

COLORS = {"outrider": BLUE, "transformers": RED, "genai": ORANGE, "llama.cpp": GREEN}
SHADES = {"plain": 0.45, "draft": 1.0}  # of a peer's colour; other modes lie between
MARKERS = {"plain": "o", "draft": "s", "auto": "^", "assistant": "D", "lookup": "v"}


def _plain(axes: Any) -> None:
    """Figures, not powers of ten, and some between those."""
    axes.yaxis.set_major_formatter(lambda value, _=0: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(
        lambda value, _=0: f"{value:,.0f}" if f"{value:e}"[0] in "25" else ""
    )


def _style(name: str) -> dict[str, Any]:
    """Of a system as a line: a colour for the peer, a marker for the mode."""
    peer, mode = name.split()[0], name.split()[-1]
    quantised = len(name.split()) > 2
    return {
        "color": COLORS.get(peer, PURPLE),
        "marker": MARKERS.get(mode, "o"),
        "linestyle": ":" if quantised else "-" if mode == "plain" else "--",
    }


def speeds_plot(results: Results) -> Any:
    """Tokens a second of every system on the workloads that all of them had, T = 0."""
    cells = [cell for cell in results["cells"] if cell["temperature"] == 0]
    most = max((len(cell["systems"]) for cell in cells), default=0)
    cells = [cell for cell in cells if len(cell["systems"]) == most]
    if not most:
        return None
    names = list(cells[0]["systems"])
    figure, grid = panels(len(cells), 0.9 + 0.2 * most, sharey=True, sharex=True)
    for axes, cell in zip(grid, cells, strict=True):
        found = [cell["systems"].get(name, {}).get("tokens_per_second", 0) for name in names]
        bars = axes.barh(
            range(most), found, 0.7,
            color=[
                (COLORS.get(name.split()[0], PURPLE), SHADES.get(name.split()[-1], 0.7))
                for name in names
            ],
        )  # fmt: skip
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}  # of the line below
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=2, bbox=behind)
        label = "weights read once a token, float32"
        axes.axvline(1e3 / results["floor_ms"], color=BLACK, linewidth=1, label=label)
        axes.set(
            title=f"{cell['kind']}\n{cell['prompt']} + {cell['new_tokens']}", xlabel="tokens/s"
        )
        axes.set_yticks(range(most), names)
        axes.margins(x=0.2)
        axes.grid(axis="y", visible=False)
    grid[0].invert_yaxis()
    legend(figure, grid[0], 1)
    return figure


def theory_plot(results: Results) -> Any:
    """Our drafts' speedup by workload, measured and predicted."""
    cells = [cell for cell in results["cells"] if cell["theory"]]
    if not cells:
        return None
    found = [cell["theory"] for cell in cells]
    figure, (axes,) = panels(1, 1.3 + 0.26 * len(cells))
    places = range(len(cells))
    measured = [t["measured"] for t in found]
    reach = [
        [t["measured"] - t["measured_low"] for t in found],
        [t["measured_high"] - t["measured"] for t in found],
    ]
    axes.barh(places, measured, 0.6, color=SKY, label="measured, median of the prompts")
    axes.errorbar(
        measured, places, xerr=reach, fmt="none", ecolor="0.4", linewidth=1, capsize=2,
        label="quartiles",
    )  # fmt: skip
    axes.plot(
        [t["predicted"] for t in found], places, "D", color=RED,
        label="Theorem 3.8 with measured acceptance and costs",
    )  # fmt: skip
    axes.axvline(1, color=BLACK, linewidth=1)
    names = [cell["name"].replace(", temperature ", ", T = ") for cell in cells]
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(xlabel="times as fast as our plain decoding, without the prefill", xlim=(0, None))
    axes.grid(axis="y", visible=False)
    legend(figure, axes, 2)
    return figure


def first_plot(results: Results) -> Any:
    """Time to the first token of plain decoding by the length of the prompt."""
    points: dict[str, dict[int, list[float]]] = {}
    for cell in results["cells"]:
        for name, found in cell["systems"].items():
            if name.endswith("plain") and cell["temperature"] == 0:
                lengths = points.setdefault(name, {})
                lengths.setdefault(cell["prompt"], []).append(found["ttft_ms"])
    figure, (axes,) = panels(1, 2.9)
    for name, lengths in points.items():
        places = sorted(lengths)
        means = [sum(lengths[x]) / len(lengths[x]) for x in places]
        axes.plot(places, means, label=name, **_style(name))
    axes.set(xlabel="tokens of the prompt", ylabel="time to the first token, ms")
    if len({x for lengths in points.values() for x in lengths}) > 1:
        axes.set(xscale="log", yscale="log")
        ticks = sorted({x for lengths in points.values() for x in lengths})
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks], minor=False)
        axes.set_xticks([], minor=True)
    _plain(axes)
    legend(figure, axes, 3)
    return figure


def batches_plot(results: Results) -> Any:
    """Tokens a second of all texts together by how many they are."""
    entries: Sequence[Mapping[str, Any]] = results["batches"]
    if not entries:
        return None
    figure, (axes,) = panels(1, 2.9)
    sizes = sorted({entry["size"] for entry in entries})
    for name in dict.fromkeys(entry["system"] for entry in entries):
        mine = [entry for entry in entries if entry["system"] == name]
        axes.plot(
            [e["size"] for e in mine], [e["tokens_per_second"] for e in mine], label=name,
            **_style(name),
        )  # fmt: skip
    axes.plot(
        sizes, [1e3 * size / results["floor_ms"] for size in sizes], color=BLACK, linewidth=1,
        label="weights read once a step",
    )  # fmt: skip
    axes.set(
        xlabel="texts decoded together", ylabel="tokens/s, all texts", xscale="log", yscale="log"
    )
    axes.set_xticks(sizes, [str(size) for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    _plain(axes)
    legend(figure, axes, 3)
    return figure


PLOTS: dict[str, Callable[[Results], Any]] = {
    "speeds": speeds_plot,
    "theory": theory_plot,
    "first": first_plot,
    "batches": batches_plot,
}
