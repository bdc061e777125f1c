"""Style and output of plots. matplotlib comes with the extra `dev`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

# Okabe and Ito's palette: distinguishable with any colour vision. Markers and dashes differ too.
ORANGE, BLUE, RED = "#E69F00", "#0072B2", "#D55E00"
SETTINGS: Any = {  # mypy expects literal keys
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "lines.markersize": 4,
    "lines.linewidth": 1.4, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 150,
}  # fmt: skip
SIZE = 7.0, 3.4  # inches


def render_png(draw: Callable[[Any], object]) -> bytes:
    """A plot as a PNG file. draw: draws on the axes that it is given. The legend goes above."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    image = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        figure.savefig(image)
    return image.getvalue()
