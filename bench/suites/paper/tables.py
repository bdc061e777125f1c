"""What a run of the paper's analyses found, and its tables for a terminal and for docs/paper.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...core.clock import ENOUGH, Figure
from ...core.table import Table
from ..kernel.times import FUNCTION, NUMPY, RAW, TRANSFORMERS, VERIFY, Point, call
from . import sigmoid
from .memory import Overhead, kept
from .sigmoid import RuleEffect

TABLED = 1, 5, 8, 20  # gammas in the tables; the plots and the JSON object have all
EXACT, BLOCK, SIGMOID = (call(rule, VERIFY) for rule in ("token", "block", "sigmoid"))
FROM_LOGITS, REFERENCE = call("token", RAW), call("token", NUMPY)
THEIRS, ALONE = call("token", TRANSFORMERS), call("token", FUNCTION)
NAMES = {
    EXACT: "exact", FROM_LOGITS: "exact, q from logits", BLOCK: "block", SIGMOID: "sigmoid",
    REFERENCE: "NumPy, exact", THEIRS: TRANSFORMERS, ALONE: FUNCTION,
}  # fmt: skip
COMPARED = (EXACT, THEIRS), (FROM_LOGITS, ALONE), (SIGMOID, THEIRS)


@dataclass(frozen=True)
class PaperRun:
    """bandwidth: of the memory, bytes a second. points: B = 1. agreeing: of rounds in which target
    and draft say the same. base: V, gamma, B, of which one at a time is varied in `overheads`.
    effects: over `positions` of each of `documents`. bonus: see `sigmoid.released_bonus`."""

    bandwidth: float
    points: Sequence[Point]
    agreeing: Sequence[Point]
    base: tuple[int, int, int]
    overheads: Sequence[Overhead]
    effects: Sequence[RuleEffect]
    bonus: float
    documents: int
    positions: int

    @classmethod
    def of(cls, results: Mapping[str, Any]) -> PaperRun:
        """From a JSON object with a `json_object` in it."""
        lists: dict[str, tuple[str, Callable[[Any], Any]]] = {
            "points": ("points", Point.of), "agreeing": ("agreeing", Point.of),
            "overheads": ("memory", Overhead.of), "effects": ("scaling", RuleEffect.of),
        }  # fmt: skip
        made = {name: [of(x) for x in results[key]] for name, (key, of) in lists.items()}
        return cls(
            bandwidth=1e9 * results["bandwidth_gb_s"], base=tuple(results["memory_base"]),
            bonus=results["released_bonus"], documents=results["documents"],
            positions=results["positions"], **made,
        )  # fmt: skip

    def json_object(self) -> dict[str, Any]:
        return {
            "bandwidth_gb_s": round(self.bandwidth / 1e9, 2),
            "points": [p.json_object() for p in self.points],
            "agreeing": [p.json_object() for p in self.agreeing],
            "memory_base": self.base,
            "memory": [asdict(o) for o in self.overheads],
            "scaling": [e.json_object() for e in self.effects],
            "released_bonus": round(self.bonus, 4),
            "documents": self.documents,
            "positions": self.positions,
        }

    @property
    def calls(self) -> list[str]:
        return [name for name in NAMES if name in self.points[0].times]

    def tabled(self) -> list[Point]:
        return [p for p in self.points if p.gamma in TABLED or len(self.points) <= len(TABLED)]


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Those of docs/paper.md, by the names of their places there, and what the text cites."""
    run = PaperRun.of(results)
    makers = time_table, agreeing_table, bandwidth_table, memory_table, scaling_table, ranges_table
    return [make(run) for make in makers]


def _ms(figure: Figure) -> str:
    return f"{figure.ms:.3f}" + ("" if figure.kept >= ENOUGH else "*")


def time_table(run: PaperRun) -> Table:
    compared = [pair for pair in COMPARED[:2] if pair[1] in run.calls]
    rows = [
        (
            f"{p.vocab_size:,}", f"{p.gamma}",
            f"{p.accepted['token']:.1f} / {p.accepted['sigmoid']:.1f}",
            f"{1e3 * p.bytes[EXACT] / run.bandwidth:.3f}",
            *(_ms(p.times[name]) for name in run.calls),
            f"{p.times[SIGMOID].ms / p.times[EXACT].ms:.2f}",
            *(f"{p.saved(*pair):.1%}" for pair in compared),
        )
        for p in run.tabled()
    ]  # fmt: skip
    head = (
        "V", "γ", "stand, exact / sigmoid", "floor of exact", *(NAMES[c] for c in run.calls),
        "sigmoid / exact",
        *("exact: less time than Transformers", "q from logits: less than alone")[: len(compared)],
    )  # fmt: skip
    title = "Sampling of a round, B = 1: ms (*: disturbed); the kernel unless named"
    return Table(title, head, rows, name="time")


def agreeing_table(run: PaperRun) -> Table:
    """Either rule reads all rows once."""
    rows = [
        (
            f"{p.vocab_size:,}", f"{p.gamma}", _ms(p.times[EXACT]), _ms(p.times[SIGMOID]),
            f"{p.times[SIGMOID].ms / p.times[EXACT].ms:.2f}",
        )
        for p in run.agreeing
    ]  # fmt: skip
    head = ("V", "γ", "exact", "sigmoid", "sigmoid / exact")
    title = "Rounds in which every draft token stands: ms"
    return Table(title, head, rows, name="agreeing")


def bandwidth_table(run: PaperRun) -> Table:
    calls = [name for name in run.calls if name not in (BLOCK, ALONE)]
    rows = [
        (
            f"{p.vocab_size:,}", f"{p.gamma}",
            f"{p.bytes[EXACT] / 1e6:.2f} / {p.bytes[SIGMOID] / 1e6:.2f}",
            *(f"{p.bandwidth(c) / 1e9:.2f} ({p.bandwidth(c) / run.bandwidth:.0%})" for c in calls),
        )
        for p in run.tabled()
    ]  # fmt: skip
    title = f"Realised bandwidth, GB/s (of the {run.bandwidth / 1e9:.1f} that memory gives)"
    head = ("V", "γ", "MB to read, exact / sigmoid", *(NAMES[name] for name in calls))
    return Table(title, head, rows, name="bandwidth")


def memory_table(run: PaperRun) -> Table:
    found = {(o.name, o.size): o for o in run.overheads}
    names, sizes = (list(dict.fromkeys(keys)) for keys in zip(*found, strict=True))
    rows = []
    for size in sizes:
        if size[1] in TABLED or len(sizes) <= len(TABLED):
            here = [found[name, size] for name in names]
            rows.append(
                (
                    *(f"{n:,}" for n in size), f"{kept(*size) / 1e6:.2f}",
                    *(f"{o.extra / 1e6:.2f} ({o.call / 1e6:.2f})" for o in here),
                )
            )  # fmt: skip
    title = "Memory of a verification beyond the draft's rows, MB (of that, allocated in the call)"
    return Table(title, ("V", "γ", "B", "the draft's rows", *names), rows, name="memory")


def scaling_table(run: PaperRun) -> Table:
    rows = []
    for e in run.effects:
        name = e.name if e.scale == 0 else f"{e.name}, ±{e.scale:,.0f}"
        if e.scale in sigmoid.PUBLISHED:
            name += f" (the paper's, {sigmoid.PUBLISHED[e.scale]})"
        p_hat = "not a number" if math.isnan(e.lowest) else f"{e.lowest:.4f} to {e.highest:.4f}"
        rows.append(
            (
                name, f"{e.accepted:.5f}", f"{e.to_target:.4f}", f"{e.to_draft:.2g}",
                f"{e.unlikely:.2%}", p_hat if e.scale else "", f"{e.shifted:.5f}",
            )
        )  # fmt: skip
    title = (
        f"alpha and beta, T = 1, {run.documents * run.positions} held-out positions of "
        f"{run.documents} texts (standard error up to {max(e.error for e in run.effects):.3f})"
    )
    head = (
        "rule", "accepted", "TV to target", "TV to draft",
        f"on tokens with p < {sigmoid.UNLIKELY:g}", "p̂ from, to",
        f"accepted with draft logits + {sigmoid.SHIFT:g}",
    )  # fmt: skip
    return Table(title, head, rows, name="scaling")


def ranges_table(run: PaperRun) -> Table:
    """Of all points: shares of time saved, and of the memory's bandwidth."""
    shares = {
        f"{NAMES[ours]}: less time than {NAMES[theirs]}": [
            p.saved(ours, theirs) for p in run.points
        ]
        for ours, theirs in COMPARED
        if theirs in run.calls
    }
    for name in run.calls:
        of_all = [p.bandwidth(name) / run.bandwidth for p in run.points]
        shares[f"{NAMES[name]}: share of the bandwidth"] = of_all
    rows = [(name, f"{min(x):.1%}", f"{max(x):.1%}") for name, x in shares.items()]
    note = f"TV of the released program's bonus token to the target: {run.bonus:.3f}"
    return Table("Least and most of all V and γ", ("", "least", "most"), rows, [note])
