"""What all plots share: their look, and how they are written.

matplotlib is of the group `dev`; without it only the plots are missing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

MISSING = (
    "no plots: matplotlib is not installed. "
    "Type .venv/bin/pip install -c constraints.txt -e '.[dev]'."
)
# Okabe and Ito's palette: told apart with any colour vision, and by marker and dash without any.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
SETTINGS: Any = {  # its keys are literals to mypy
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "lines.markersize": 4,
    "lines.linewidth": 1.4, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 150,
}  # fmt: skip
WIDTH = 7.0  # inches
Report = TypeVar("Report")


def draw(plots: Mapping[str, Callable[[Report], Any]], report: Report) -> dict[str, Any]:
    """Figures by name, without those that the report has nothing for."""
    import matplotlib as mpl

    with mpl.rc_context(SETTINGS):
        figures = {name: plot(report) for name, plot in plots.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_or_explain(
    plots: Mapping[str, Callable[[Report], Any]], report: Report, out: Path
) -> list[str]:
    """Write the plots into `out`; a line for each, or the one that says why there is none."""
    if not plots:
        return []
    if importlib.util.find_spec("matplotlib") is None:
        return [MISSING]
    import matplotlib as mpl

    figures = draw(plots, report)
    with mpl.rc_context(SETTINGS):
        for name, figure in figures.items():
            figure.savefig(out / f"{name}.png")
    return [f"{name}.png" for name in figures]


def panels(count: int, height: float, **options: Any) -> tuple[Any, list[Any]]:
    """A figure of the page's width, and its axes side by side. height: inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


def legend(figure: Any, axes: Any, columns: int) -> None:
    """One for all panels, above them."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=columns)
