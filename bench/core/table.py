"""Tables of figures, for terminals and for documents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Column = tuple[str, str, str]  # key of a row's values, heading, format specification
PAGE_WIDTH = 100  # text width of a document
DISTURBED_MARK = " *"  # appended to rows whose figures other processes disturbed


@dataclass(frozen=True)
class Table:
    """A title, one heading per column, rows of cells, and notes below."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self, markdown: bool = False) -> str:
        """The table as text with aligned columns (the first left-aligned), or as Markdown."""
        if markdown:
            rule = ["---", *["---:"] * (len(self.head) - 1)]
            lines = [f"| {' | '.join(line)} |" for line in (self.head, rule, *self.rows)]
            below = [line for note in self.notes for line in ("", textwrap.fill(note, PAGE_WIDTH))]
            return "\n".join([f"**{self.title}**", "", *lines, *below, ""])
        cells = [self.head, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                [line[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            ).rstrip()
            for line in cells
        ]
        return "\n".join([self.title, *lines, *self.notes, ""])


def make_table(
    title: str,
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    columns: Sequence[Column],
    notes: Sequence[str] = (),
) -> Table:
    """A table of named rows of values. Columns in which no row has a value are omitted.

    Rows whose values have a true "disturbed" are marked.
    """
    found = list(rows)
    used = [c for c in columns if any(values.get(c[0]) is not None for _, values in found)]
    cells = [
        [row + (DISTURBED_MARK if values.get("disturbed") else "")]
        + ["" if values.get(key) is None else format(values[key], spec) for key, _, spec in used]
        for row, values in found
    ]
    return Table(title, ["", *(head for _, head, _ in used)], cells, notes)
