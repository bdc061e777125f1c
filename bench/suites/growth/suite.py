"""How time and memory grow with what is asked for.

With the length of the output, of the prompt, with slots, tokens of the vocabulary, drafts of a
round and the size of the model. Each curve gets an exponent with its interval and, as far as there
are points for it, the exponent of what grows beside a constant (bench.core.fit). Each time gets the
floor that memory sets: the bytes that have to be read, over the bandwidth measured in this run. A
model that fits into the processor's caches can be faster; a prefill is bound by arithmetic. Memory
is that of processes of their own, and its floor the weights, the rows written and what the process
had before it loaded anything. Exports and builds are measured once, all else several times; a star
says that other processes disturbed a figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.corpus import collect

from ...core import machine, pair
from ...core.clock import Clock
from ...core.command import Results, Suite
from ...core.fit import marginal, power, rounded
from ...core.prompts import Prompts
from ...core.table import Table
from . import plots
from .curves import SECTIONS, CurvePoint, Growing, GrowthScale, Sizes

READS = 8  # passes over memory, for its bandwidth
ALPHA = 0.8  # of the pair that is made


def larger(hidden: int, inter: int, layers: int, heads: int, vocab: int) -> Sizes:
    return {
        "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocab,
    }  # fmt: skip


FULL = GrowthScale(
    "full", "smollm-135m", vocab=(4096, 16_384, 49_152, 151_936),
    sizes={
        "bundled": {}, "16m": larger(384, 1024, 8, 6, 8192),
        "46m": larger(512, 1408, 12, 8, 24_576),
        **{name: asdict(shape) for name, shape in pair.SHAPES.items()},
    },
    loads=3, patience=30,
)  # fmt: skip
QUICK = GrowthScale(
    "quick", None, vocab=(4096, 16_384, 49_152),
    sizes={
        "bundled": {}, "13m": larger(384, 1024, 6, 6, 8192), "34m": larger(512, 2048, 6, 8, 24_576)
    },
    loads=2, patience=2, read_bytes=1 << 27,
)  # fmt: skip


def run(growing: Growing) -> dict[str, Any]:
    """Measure all sections; the JSON object."""
    sections, clock = {}, growing.clock
    for name, section in SECTIONS.items():
        clock.note(name)
        begin = clock.seconds
        for _ in range(READS):
            growing.reader()
        curves = section.measure(growing)
        sections[name] = {
            "axis": section.axis, "seconds": round(clock.seconds - begin, 1),
            "curves": {curve: json_of(points) for curve, points in curves.items()},
        }  # fmt: skip
    return {
        "scale": growing.scale.name, "machine": machine.describe(growing.threads),
        "pair": f"{growing.target.name} and {growing.draft.name}", "sections": sections,
        "bytes_per_second": round(growing.reader.bandwidth),
    }  # fmt: skip


def json_of(points: Sequence[CurvePoint]) -> dict[str, Any]:
    """A curve: its points, and what was fitted to them; seconds or bytes."""
    x, y = [p.x for p in points], [p.y for p in points]
    return {
        "points": [
            {**{key: _short(value) for key, value in asdict(p).items()}, "x": p.x} for p in points
        ],
        **{
            name: {key: _short(value) for key, value in asdict(fit).items()} if fit else None
            for name, fit in (("power", power(x, y)), ("marginal", marginal(x, y)))
        },
    }


def _short(value: float | bool | None) -> float | bool | None:
    return value if value is None or isinstance(value, bool) else rounded(value)


def heading(results: Results) -> str:
    """What the figures are of, and how many of them count."""
    quiet = [
        point["quiet"]
        for section in results["sections"].values()
        for curve in section["curves"].values()
        for point in curve["points"]
    ]
    text = (
        f"{machine.sentence(results['machine'])}; {results['pair']}; memory reads at "
        f"{results['bytes_per_second'] / 1e9:.1f} GB/s"
    )
    if all(quiet):
        return text
    return (
        f"{text}. * {quiet.count(False)} of {len(quiet)} points were disturbed by other "
        "processes: no exponent of theirs should be quoted"
    )


def tables(results: Results) -> list[Table]:
    """A table for each section: values and floors of each curve, and its exponents below."""
    made = []
    for name, section in results["sections"].items():
        rows: list[list[str]] = []
        notes = []
        for curve, content in section["curves"].items():
            points = content["points"]
            what, factor = plots.unit(curve, max(p["y"] for p in points))
            values = [_number(p["y"] * factor) + ("" if p["quiet"] else "*") for p in points]
            rows.append([f"{curve}, {what}", *values])
            if any(p["floor"] for p in points):
                floors = [_number(p["floor"] * factor) if p["floor"] else "" for p in points]
                rows.append(["  floor", *floors])
            notes.append(f"{curve}: {fits(content, what, factor)}")
        places = [_axis(p["x"]) for p in points]
        made.append(Table(f"{name}: {section['axis']}", ["", *places], rows, notes))
    return made


def fits(content: Mapping[str, Any], what: str, factor: float) -> str:
    """The exponents of a curve, in words."""
    line, beyond = content["power"], content["marginal"]
    if line is None:
        return "no fit: too few points"
    text = (
        f"x^{line['exponent']:.2f} ±{line['error']:.2f} ({line['low']:.2f} to "
        f"{line['high']:.2f}), off by {line['worst']:.0%} at most"
    )
    if beyond is None:
        return text
    if beyond["low"] is None or beyond["high"] is None:
        return f"{text} | a constant cannot be told from it"
    constant = f"{_number(beyond['constant'] * factor)} {what}"
    interval = f"({beyond['low']:.2f} to {beyond['high']:.2f})"
    return f"{text} | beyond {constant}: x^{beyond['exponent']:.2f} {interval}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _axis(x: float) -> str:
    return f"{x / 1e6:.1f} M" if x >= 1e6 else f"{x:,.0f}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="where checkpoints and bundles are kept; default build/side")  # fmt: skip


def _measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    scale, target, draft = QUICK if args.quick else FULL, pair.TARGET, pair.DRAFT
    args.work.mkdir(parents=True, exist_ok=True)
    if scale.shape is not None:
        made = pair.make(scale.shape, ALPHA, args.work)
        target, draft = made.target, made.draft
    clock.note("the text that prompts are cut from")
    prompts = Prompts(collect().held_out, *pair.encoder(target))
    return run(Growing(scale, args.threads, args.work, target, draft, prompts, clock))


SUITE = Suite(
    name="growth",
    about=__doc__ or "",
    quick="the bundled pair, smaller sizes: two minutes once they are made",
    measure=_measure,
    tables=tables,
    heading=heading,
    options=_options,
    plots=plots.PLOTS,
)
main = SUITE.main
