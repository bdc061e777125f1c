"""The tables of bench/side.py, from its JSON object: as text, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shown = Callable[[Any], str]


def _number(digits: int) -> Shown:
    return lambda value: f"{value:,.{digits}f}"


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f}"


ONE, TWO = _number(1), _number(2)
SPEEDS: tuple[tuple[str, str, Shown], ...] = (
    ("tokens_per_second", "tok/s", ONE),
    ("tpot_ms", "TPOT ms", TWO),
    ("floor_ms", "floor ms", TWO),
    ("gb_s", "GB/s", ONE),
    ("ttft_ms", "TTFT ms", ONE),
    ("tau", "tau", TWO),
    ("accepted_of_examined", "of exam.", _percent),
    ("accepted_of_drafted", "of drafted", _percent),
    ("host", "host", lambda value: f"{value:.1%}"),
    ("over transformers plain", "x Transf.", TWO),
    ("over llama.cpp plain", "x llama", TWO),
    ("over outrider plain", "x own", TWO),
)
BATCHES: tuple[tuple[str, str, Shown], ...] = (
    ("size", "texts", str),
    ("tokens_per_second", "tok/s", ONE),
    ("each", "of each", ONE),
    ("whole", "with prefill", ONE),
    ("over_one", "x one text", TWO),
    ("over_transformers", "x Transf.", TWO),
)
MEMORY: tuple[tuple[str, str, Shown], ...] = (
    ("peak", "peak MiB", _mib),
    ("before", "libraries", _mib),
    ("weights", "weights", _mib),
    ("cache", "cache", _mib),
    ("ratio", "x needed", TWO),
    ("ratio_without_libraries", "without libraries", TWO),
)
LOADS = "Outrider's bundle has the draft too, except where one process decodes without it."
MARKED = " *"  # more than half of the texts lost over 2 % of their time to other processes


@dataclass(frozen=True)
class Table:
    """rows: of the first column, which names the row, and one for each heading after the first."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def text(self) -> str:
        lines = [self.heads, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.heads))]
        lined = [
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.title, *lined, *self.notes, ""])

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.heads) - 1)]
        lines = [f"| {' | '.join(line)} |" for line in (self.heads, rule, *self.rows)]
        notes = [line for note in self.notes for line in (note, "")]
        return "\n".join([f"### {self.title}", "", *lines, "", *notes])


def _row(
    name: str, values: Mapping[str, Any], columns: Iterable[tuple[str, str, Shown]]
) -> list[str]:
    cells = (show(values[key]) if values.get(key) is not None else "" for key, _, show in columns)
    mark = MARKED if values.get("disturbed", 0) > values.get("prompts", 0) // 2 else ""
    return [name + mark, *cells]


def _heads(columns: Iterable[tuple[str, str, Shown]]) -> list[str]:
    return ["", *(head for _, head, _ in columns)]


def _used(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[tuple[str, str, Shown]]
) -> list[tuple[str, str, Shown]]:
    """The columns in which some row has something."""
    found = list(rows)
    return [column for column in columns if any(row.get(column[0]) is not None for row in found)]


def speeds(title: str, cell: Mapping[str, Any]) -> Table:
    """Of a workload. cell: `systems`, and `theory` or None."""
    columns = _used(cell["systems"].values(), SPEEDS)
    notes = []
    if (t := cell.get("theory")) is not None:
        notes.append(
            f"Theorem 3.8 for outrider draft: measured {t['measured']:.2f} x "
            f"({t['measured_low']:.2f} to {t['measured_high']:.2f}), predicted "
            f"{t['predicted']:.2f} x, quotient {t['measured_over_predicted']:.2f}; alpha "
            f"{t['alpha']:.3f}, gamma {t['gamma']:.2f}, c {t['c']:.3f}, verify {t['verify']:.2f}; "
            f"tau {t['tau']:.2f}, expected {t['tau_expected']:.2f}"
        )
    rows = [_row(name, found, columns) for name, found in cell["systems"].items()]
    return Table(title, _heads(columns), rows, notes)


def _predictions(cells: Sequence[Mapping[str, Any]]) -> Table:
    keys = (
        ("alpha", "alpha", _number(3)), ("c", "c", _number(3)), ("verify", "verify", TWO),
        ("tau", "tau", TWO), ("tau_expected", "expected", TWO), ("predicted", "predicted", TWO),
        ("measured", "measured", TWO), ("measured_over_predicted", "quotient", TWO),
    )  # fmt: skip
    rows = [_row(cell["name"], cell["theory"], keys) for cell in cells if cell["theory"]]
    return Table("Speedup of outrider draft over plain, Theorem 3.8", _heads(keys), rows)


def _goals(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for goal in found:
        sign = "at most" if goal["at_most"] else "at least"
        spread = "not measured"
        if goal["found"] is not None:
            median, low, high, count = goal["found"]
            spread = f"{median:.2f}" + (f" ({low:.2f} to {high:.2f})" if count > 1 else "")
        met = {True: "yes", False: "no", None: ""}[goal["met"]]
        rows.append([goal["goal"], f"{sign} {goal['wanted']:g}", spread, met])
    heads = ["", "wanted", "median (quartiles)", "met"]
    return Table("Goals", heads, rows)


def tables(results: Mapping[str, Any]) -> list[Table]:
    """All of a run, the goals last."""
    made = [speeds(cell["name"], cell) for cell in results["cells"]]
    made += [speeds(f"all, temperature {t}", cell) for t, cell in results["all"].items()]
    made.append(_predictions(results["cells"]))
    batches = results["batches"]
    if batches:
        rows = [
            _row(entry["system"], {**entry, "prompts": entry["batches"]}, BATCHES)
            for entry in batches
        ]
        made.append(Table("Texts decoded together", _heads(BATCHES), rows))
    if results["memory"]:
        rows = [_row(name, found, MEMORY) for name, found in results["memory"].items()]
        made.append(Table("Memory, a process for each", _heads(MEMORY), rows))
    loads = [
        [name, f"{t['median']:.2f} ({t['low']:.2f} to {t['high']:.2f})", str(t["count"])]
        for name, t in results["loads"].items()
    ]
    heads = ["", "seconds (quartiles)", "times"]
    made.append(Table("Load of the target, from converted files", heads, loads, [LOADS]))
    if results["missing"]:
        missing = [[name, why] for name, why in results["missing"].items()]
        made.append(Table("Missing", ["", "why"], missing))
    return [*made, _goals(results["goals"])]


def heading(results: Mapping[str, Any]) -> str:
    """What the figures are of: the machine, the pair, the floor."""
    about, pair = results["machine"], results["pair"]
    rate = results["bytes_per_second"]
    return (
        f"{about['date']}, {about['threads']} threads of {about['cpu']}; a pair of shape "
        f"{pair['shape']}, acceptance wanted {pair['alpha_wanted']:g}, gamma {results['gamma']}; "
        f"memory reads at {rate / 1e9:.1f} GB/s, and the floor of a token is the time in which "
        "weights and cache of its round are read at that rate. Ratios are medians over prompts, "
        "each taken prompt by prompt. * other processes took over 2 % of the time of most texts."
    )


def markdown(results: Mapping[str, Any]) -> str:
    """The whole of side.md."""
    return "\n".join([heading(results), "", *(table.markdown() for table in tables(results))])
