"""The tables of the side-by-side benchmark, computed from its JSON object.

A row has the figures (`run.text_figures`) of one request, by system. Ratios are computed row by
row, and their median is shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...core.clock import LOST_LIMIT
from ...core.command import Results
from ...core.costs import describe_plain_steps
from ...core.fit import Spread
from ...core.machine import summary_line
from ...core.pair import SEQ2SEQ
from ...core.table import DISTURBED_MARK, Column, Table, make_table
from .run import DRAFT, PLAIN, SHARED, TOGETHER, TextFigures

BASE, LLAMA, Q4 = "transformers plain", "llama.cpp plain", "llama.cpp q4_0 plain"
CT2, CT2_INT8 = "ctranslate2 plain", "ctranslate2 int8 plain"
MIXED = "outrider mixed draft"  # a float32 target with an int8 draft
GENAI4 = "genai int4 plain"
EQUAL_BITS = {"int4": (Q4, GENAI4), "int8": ("llama.cpp q8_0 plain",)}  # by Outrider's format
OWN = "own plain"  # the same system's plain decoding in the same precision
Row = Mapping[str, TextFigures]
Goal = tuple[str, str, float, Sequence[float]]  # name, at "least" or "most", bound, measured values
F1, F2, F3 = ",.1f", ",.2f", ",.3f"
# Figures that are ratios of two sums over texts.
SHARES = {
    "tau": ("tokens", "rounds"), "of_examined": ("accepted", "examined"),
    "of_drafted": ("accepted", "drafted"), "host": ("host", "spent"), "read": ("bytes", "tokens"),
}  # fmt: skip
SPEEDS: tuple[Column, ...] = (
    ("speed", "tok/s", F1), ("floor", "floor ms", F2), ("first", "first token ms", F1),
    ("encode", "encoder ms", F1), ("whole", "whole text ms", F1),
    ("tau", "tau", F2), ("of_examined", "of exam.", ".0%"),
    ("of_drafted", "of drafted", ".0%"), ("host", "host", ".1%"),
    (BASE, "x Transf.", F2), (LLAMA, "x llama", F2), (Q4, "x q4_0", F2),
    (GENAI4, "x GenAI int4", F2), (CT2, "x CTr.", F2), (CT2_INT8, "x int8", F2),
    (PLAIN, "x Outrider f32", F2), (OWN, "x own plain", F2),
)  # fmt: skip
THEORY: tuple[Column, ...] = (
    ("alpha", "alpha", F3), ("c", "c", F3), ("verify", "verify", F2), ("given", "tau", F2),
    ("expected", "expected tau", F2), ("predicted", "predicted", F2),
    ("measured", "measured", F2), ("quotient", "ratio", F2),
)  # fmt: skip
BYTES = "peak", "before", "weights", "cache"
MEMORY: tuple[Column, ...] = (
    ("peak", "peak MiB", ",.0f"), ("before", "libraries", ",.0f"), ("weights", "weights", ",.0f"),
    ("cache", "cache", ",.0f"), ("ratio", "peak / needed", F2), ("own", "without libraries", F2),
)  # fmt: skip
LOADS: tuple[Column, ...] = (("seconds", "seconds (quartiles)", ""), ("count", "loads", ""))
GOAL: tuple[Column, ...] = (
    ("wanted", "goal", ""), ("found", "median (quartiles)", ""), ("met", "met", ""),
)  # fmt: skip


def ratios(rows: Iterable[Row], fast: str, slow: str, key: str = "token") -> list[float]:
    """The speed of system `fast` relative to system `slow`, for each request that both decoded.
    key: the figure to compare, in seconds."""
    return [
        row[slow][key] / row[fast][key]
        for row in rows
        if all(key in row.get(name, {}) for name in (fast, slow))
    ]


def figures_of(rows: Sequence[Row], name: str, rate: float) -> dict[str, Any]:
    """The figures of one system by column key; empty if no text has more than one round.

    rate: memory bandwidth in bytes per second.
    """
    texts = [row[name] for row in rows if "token" in row.get(name, {})]
    if not texts:
        return {}
    keys = [key for key in texts[0] if all(key in text for text in texts)]
    found: dict[str, Any] = {key: statistics.median(t[key] for t in texts) for key in keys}
    for key, parts in SHARES.items():
        part, whole = (sum(t.get(name, 0) for t in texts) for name in parts)
        found[key] = part / whole if whole and parts[0] in keys else None
    found |= {"speed": 1 / found["token"]}
    found |= {key: 1e3 * found[key] for key in ("first", "encode", "whole") if key in found}
    found["floor"] = 1e3 * found["read"] / rate if found["read"] else None
    found["disturbed"] = 2 * sum(t["lost"] > LOST_LIMIT for t in texts) > len(texts)
    bases = {base: base for base in (BASE, LLAMA, Q4, GENAI4, CT2, CT2_INT8, PLAIN)}
    bases[OWN] = f"{name.rpartition(' ')[0]} plain"
    gains = {key: ratios(rows, name, base) for key, base in bases.items()}
    return found | {base: statistics.median(some) for base, some in gains.items() if some}


def _speeds(group: str, cells: Sequence[Results], results: Results) -> list[Table]:
    """Tables of the workloads of a group at one temperature: the figures of every system on each
    workload. For the group that all systems decode: figures over all workloads, then a table with
    the speeds on each workload."""
    rate, title = results["bytes_per_second"], f"{group}, temperature {cells[0]['temperature']:g}"
    found = {
        cell["name"]: {name: figures_of(cell["rows"], name, rate) for name in results["systems"]}
        for cell in cells
    }
    if group != SHARED:
        all_figures = [(f"{w}, {n}", f) for w, some in found.items() for n, f in some.items() if f]
        return [make_table(title, all_figures, SPEEDS)]

    def speed(figure: Mapping[str, Any]) -> str | None:
        return f"{figure['speed']:,.1f}{DISTURBED_MARK * figure['disturbed']}" if figure else None

    rows = [row for cell in cells for row in cell["rows"]]
    whole = {name: figures_of(rows, name, rate) for name in results["systems"]}
    speeds = [(name, {w: speed(found[w][name]) for w in found}) for name in whole if whole[name]]
    return [
        make_table(title, [(name, whole[name]) for name, _ in speeds], SPEEDS),
        make_table(f"Tokens per second, temperature {cells[0]['temperature']:g}", speeds,
                 [(workload, workload, "") for workload in found]),
    ]  # fmt: skip


def tables(results: Results) -> list[Table]:
    """All tables of a run; the last one is the table of goals."""
    cells, rate = results["cells"], results["bytes_per_second"]
    groups: dict[tuple[str, float], list[Results]] = {}
    for cell in cells:
        groups.setdefault((cell["group"], cell["temperature"]), []).append(cell)
    group_tables = [
        table for (group, _), some in groups.items() for table in _speeds(group, some, results)
    ]
    theory = [
        (f"{name.removeprefix('outrider ')}, {cell['name']}, temperature {cell['temperature']:g}",
         found)
        for cell in cells
        for name in results["systems"]
        if "quotient" in (found := figures_of(cell["rows"], name, rate))
    ]  # fmt: skip
    loads = [
        (worker, {"seconds": Spread.of(times), "count": len(times)})
        for worker, times in results["loads"].items()
    ]
    memory = [
        (name, sizes | {part: sizes[part] / 2**20 for part in BYTES})
        for name, sizes in results["memory"].items()
    ]
    missing = [(name, {"why": why}) for name, why in results["missing"].items()]
    wanted = [] if results["pair"]["alpha_wanted"] is None else goals(results)
    all_tables = [
        *group_tables,
        make_table("Outrider's speedup over its plain decoding, and Theorem 3.8", theory, THEORY),
        make_table("Memory, one process each", memory, MEMORY),
        make_table("Time to load the target, from converted files", loads, LOADS,
                 ["For Outrider this includes the draft, unless the process decodes without it."]),
        make_table("Missing", missing, [("why", "reason", "")]),
        make_table("Goals", wanted, GOAL),
    ]  # fmt: skip
    return [table for table in all_tables if table.rows]


def goals(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """The project's goals, each with the measured median and whether it meets the goal."""
    alone = (cell for cell in results["cells"] if cell["group"] != TOGETHER)
    rows = [row for cell in alone for row in cell["rows"]]
    is_seq2seq = results["pair"]["shape"] in SEQ2SEQ
    wanted = _seq2seq_goals(rows) if is_seq2seq else _text_goals(rows, results)
    return [(name, _verdict(kind, bound, Spread.of(found))) for name, kind, bound, found in wanted]


def _text_goals(rows: Sequence[Row], results: Results) -> list[Goal]:
    quotients = [x["quotient"] for row in rows for x in row.values() if "quotient" in x]
    memory = results["memory"].items()
    peaks = [sizes["ratio"] for name, sizes in memory if name.startswith("outrider")]
    assisted, loads = "transformers assistant", results["loads"].get("outrider float32", [])
    return [
        ("plain decoding, speed vs. Transformers plain", "least", 3.0, ratios(rows, PLAIN, BASE)),
        (
            "plain decoding, speed vs. llama.cpp float32 plain",
            "least",
            1.0,
            ratios(rows, PLAIN, LLAMA),
        ),
        ("outrider draft, speed vs. Transformers plain", "least", 6.0, ratios(rows, DRAFT, BASE)),
        (f"{MIXED}, speed vs. Transformers plain", "least", 6.0, ratios(rows, MIXED, BASE)),
        (f"outrider draft, speed vs. {assisted}", "least", 3.0, ratios(rows, DRAFT, assisted)),
        ("outrider draft, speed vs. outrider plain", "least", 1.6, ratios(rows, DRAFT, PLAIN)),
        (f"{MIXED}, speed vs. outrider plain", "least", 1.6, ratios(rows, MIXED, PLAIN)),
        *_quantised_goals(rows),
        ("measured speedup / speedup predicted by Theorem 3.8", "least", 0.95, quotients),
        ("time to first token, speed vs. the best peer", "least", 1.0, _first_token_ratios(rows)),
        ("seconds to load the bundle", "most", 2.0, loads),
        ("peak memory / (weights + cache), per mode", "most", 1.2, peaks),
    ]


def _seq2seq_goals(rows: Sequence[Row]) -> list[Goal]:
    """The goals of encoder-decoders. Encoders are excluded unless the name mentions them."""
    own = "outrider"
    wanted: list[tuple[str, str, str, float]] = [
        (f"{own} draft", f"{own} plain", "token", 1.5),
        (MIXED, f"{own} plain", "token", 1.5),
        (f"{own} plain", BASE, "token", 1.0),
        (f"{own} draft", BASE, "token", 2.0),
        (MIXED, BASE, "token", 2.0),
        (f"{own} plain", CT2, "token", 1.0),
        (f"{own} draft", CT2, "token", 1.0),
        (f"{own} int8 draft", f"{own} int8 plain", "token", 1.5),
        (f"{own} int8 plain", CT2_INT8, "token", 1.0),
        (f"{own} plain", BASE, "encode", 1.0),
        (f"{own} draft", BASE, "whole", 1.0),
    ]
    parts = {"token": "", "encode": "encoder: ", "whole": "whole text: "}
    return [
        (f"{parts[key]}{fast}, speed vs. {slow}", "least", bound, ratios(rows, fast, slow, key))
        for fast, slow, key, bound in wanted
    ]


def _quantised_goals(rows: Sequence[Row]) -> list[Goal]:
    found: list[Goal] = []
    for bits, peers in EQUAL_BITS.items():
        plain, draft = (f"outrider {bits} {mode}" for mode in ("plain", "draft"))
        pairs = [pair for peer in peers for pair in ((plain, peer, 1.0), (draft, peer, 1.5))]
        for fast, slow, bound in (*pairs, (draft, plain, 1.5)):
            found.append((f"{fast}, speed vs. {slow}", "least", bound, ratios(rows, fast, slow)))
    return found


def _verdict(kind: str, bound: float, spread: Spread | None) -> dict[str, Any]:
    met = "not measured"
    if spread is not None:
        missed = spread.median < bound if kind == "least" else spread.median > bound
        met = "no" if missed else "yes"
    return {"wanted": f"at {kind} {bound:g}", "found": spread and str(spread), "met": met}


def _first_token_ratios(rows: Iterable[Row]) -> list[float]:
    """The shortest time to the first token of the peers' plain decoding over that of Outrider's,
    each in its fastest precision, for each row."""
    found = []
    for row in rows:
        firsts = {name: x["first"] for name, x in row.items() if name.endswith(" plain")}
        own = [first for name, first in firsts.items() if name.startswith("outrider ")]
        others = [first for name, first in firsts.items() if not name.startswith("outrider ")]
        if own and others:
            found.append(min(others) / min(own))
    return found


def heading(results: Results) -> str:
    """The conditions of the figures: the machine, the pair, the floor."""
    pair, rate = results["pair"], results["bytes_per_second"]
    widths = (facts.get("plain_width", 0) for facts in results["facts"].values())
    plain = "".join(f"; {describe_plain_steps(width)}" for width in {*widths} - {0})
    models: str = pair["shape"]
    if pair["alpha_wanted"] is not None:
        models = f"a pair of shape {models}, requested acceptance rate {pair['alpha_wanted']:g}"
    return (
        f"{summary_line(results['machine'])}; {models}, gamma {results['gamma']}{plain}; memory is "
        f"read at {rate / 1e9:.1f} GB/s; the floor of a token is the time to read all weights and "
        "the cache of its round at that rate: less is read of mixtures of experts, of embeddings "
        "that are not tied, and of caches with windows. Ratios are computed prompt by prompt; the "
        "median is given. * other processes took over 2 % of the time of most texts: do not quote "
        "ratios to or of such rows, because systems lose very different shares of their speed."
    )
