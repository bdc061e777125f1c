"""The tables of bench/paper.py, for a terminal and for docs/paper.md."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from runtime.files.errors import OutriderError

from . import overhead, sigmoid
from .overhead import Overhead
from .round_time import BLOCK, EXACT, FUNCTION, NUMPY, RAW, SIGMOID, TRANSFORMERS, Point
from .sigmoid import Outcome
from .timing import ENOUGH, Figure

TABLED = 1, 5, 8, 20  # gammas in the tables; the plots and the JSON object have all


@dataclass(frozen=True)
class Table:
    """name: of its place in docs/paper.md, between `<!-- name -->` and `<!-- end -->`."""

    name: str
    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def text(self, markdown: bool) -> str:
        lines = [self.head, *self.rows]
        if markdown:
            cells = ["| " + " | ".join(line) + " |" for line in lines]
            cells.insert(1, "|" + "---|" * len(self.head))
            return "\n".join([f"**{self.title}**", "", *cells, ""])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *cells, ""])


def _ms(figure: Figure) -> str:
    return f"{figure.ms:.3f}" + ("" if figure.kept >= ENOUGH else "*")


def _short(name: str) -> str:
    return name.removeprefix("kernel, ")


def _tabled(points: list[Point]) -> list[Point]:
    return [p for p in points if p.gamma in TABLED or len(points) <= len(TABLED)]


def time_table(points: list[Point], bandwidth: float) -> Table:
    wanted = (EXACT, RAW, BLOCK, SIGMOID, NUMPY, TRANSFORMERS, FUNCTION)
    names = [name for name in wanted if name in points[0].times]
    compared = TRANSFORMERS in names
    rows: list[tuple[str, ...]] = []
    for p in _tabled(points):
        floor = 1e3 * p.sizes[EXACT] / bandwidth
        row = [f"{p.vocab_size:,}", f"{p.gamma}"]
        row += [f"{p.accepted[EXACT]:.1f} / {p.accepted[SIGMOID]:.1f}", f"{floor:.3f}"]
        row += [_ms(p.times[name]) for name in names]
        row.append(f"{p.times[SIGMOID].ms / p.times[EXACT].ms:.2f}")
        if compared:
            for ours, theirs in ((EXACT, TRANSFORMERS), (RAW, FUNCTION)):
                row.append(f"{1 - p.times[ours].ms / p.times[theirs].ms:.1%}")
        rows.append(tuple(row))
    head: tuple[str, ...] = ("V", "γ", "stand, exact / sigmoid", "floor of exact")
    head += (*map(_short, names), "sigmoid / exact")
    if compared:
        head += ("exact: less time than Transformers", "q from logits: less than alone")
    title = "Sampling of a round, B = 1: ms (*: disturbed); the kernel unless named"
    return Table("time", title, head, rows)


def agreeing_table(points: list[Point]) -> Table:
    """Rounds in which target and draft say the same: either rule reads all rows once."""
    rows: list[tuple[str, ...]] = []
    for p in points:
        ratio = p.times[SIGMOID].ms / p.times[EXACT].ms
        times = (_ms(p.times[EXACT]), _ms(p.times[SIGMOID]))
        rows.append((f"{p.vocab_size:,}", f"{p.gamma}", *times, f"{ratio:.2f}"))
    head = ("V", "γ", "exact", "sigmoid", "sigmoid / exact")
    return Table("agreeing", "Rounds in which every draft token stands: ms", head, rows)


def bandwidth_table(points: list[Point], bandwidth: float) -> Table:
    names = [n for n in (EXACT, RAW, SIGMOID, NUMPY, TRANSFORMERS) if n in points[0].times]
    rows: list[tuple[str, ...]] = []
    for p in _tabled(points):
        shares = [f"{p.bandwidth(n) / 1e9:.2f} ({p.bandwidth(n) / bandwidth:.0%})" for n in names]
        size = f"{p.sizes[EXACT] / 1e6:.2f} / {p.sizes[SIGMOID] / 1e6:.2f}"
        rows.append((f"{p.vocab_size:,}", f"{p.gamma}", size, *shares))
    title = f"Realised bandwidth, GB/s (of the {bandwidth / 1e9:.1f} that memory gives)"
    head = ("V", "γ", "MB to read, exact / sigmoid", *map(_short, names))
    return Table("bandwidth", title, head, rows)


def memory_table(overheads: list[Overhead]) -> Table:
    places = list(dict.fromkeys((o.vocab_size, o.gamma, o.batch) for o in overheads))
    names = list(dict.fromkeys(o.name for o in overheads))
    found = {(o.name, o.vocab_size, o.gamma, o.batch): o for o in overheads}
    rows: list[tuple[str, ...]] = []
    for place in places:
        v, gamma, batch = place
        if gamma not in TABLED and len(places) > len(TABLED):
            continue
        cells = [
            f"{found[name, *place].extra / 1e6:.2f} ({found[name, *place].call / 1e6:.2f})"
            for name in names
        ]
        kept = overhead.kept(*place) / 1e6
        rows.append((f"{v:,}", f"{gamma}", f"{batch}", f"{kept:.2f}", *cells))
    return Table(
        "memory",
        "Memory of a verification beyond the draft's rows, MB (of that, allocated in the call)",
        ("V", "γ", "B", "the draft's rows", *names),
        rows,
    )


def scaling_table(outcomes: list[Outcome], documents: int, positions: int) -> Table:
    rows: list[tuple[str, ...]] = []
    for o in outcomes:
        name = o.name if o.scale == 0 else f"{o.name}, ±{o.scale:,.0f}"
        if o.scale in sigmoid.PUBLISHED:
            name += f" (the paper's, {sigmoid.PUBLISHED[o.scale]})"
        p_hat = "not a number" if math.isnan(o.lowest) else f"{o.lowest:.4f} to {o.highest:.4f}"
        values = (f"{o.accepted:.5f}", f"{o.to_target:.4f}", f"{o.to_draft:.2g}")
        more = (f"{o.unlikely:.2%}", p_hat if o.scale else "", f"{o.shifted:.5f}")
        rows.append((name, *values, *more))
    title = (
        f"alpha and beta, T = 1, {documents * positions} held-out positions of {documents} texts "
        f"(standard error up to {max(o.error for o in outcomes):.3f})"
    )
    unlikely = f"on tokens with p < {sigmoid.UNLIKELY:g}"
    shifted = f"accepted with draft logits + {sigmoid.SHIFT:g}"
    head = ("rule", "accepted", "TV to target", "TV to draft", unlikely, "p̂ from, to", shifted)
    return Table("scaling", title, head, rows)


def summary(points: list[Point], bandwidth: float) -> dict[str, tuple[float, float]]:
    """Lowest and highest over all points: shares of time saved, and of the memory's bandwidth."""
    found = {}
    for ours, theirs in ((EXACT, TRANSFORMERS), (RAW, FUNCTION), (SIGMOID, TRANSFORMERS)):
        if theirs in points[0].times:
            saved = [1 - p.times[ours].ms / p.times[theirs].ms for p in points]
            found[f"{_short(ours)}: less time than {theirs}"] = saved
    for name in points[0].times:
        found[f"{_short(name)}: share of the bandwidth"] = [
            p.bandwidth(name) / bandwidth for p in points
        ]
    return {name: (round(min(x), 4), round(max(x), 4)) for name, x in found.items()}


def update(text: str, tables: list[Table]) -> str:
    """A document with its tables replaced; one without a place for them all is an error."""
    for table in tables:
        place = re.compile(f"(<!-- {table.name} -->\n).*?(<!-- end -->)", re.DOTALL)
        new = table.text(markdown=True).replace("\\", r"\\")
        text, count = place.subn(rf"\g<1>{new}\n\g<2>", text)
        if count != 1:
            raise OutriderError(
                "option",
                f"the document has {count} places <!-- {table.name} --> ... <!-- end -->",
                "Add one, or leave --update out.",
            )
    return text
