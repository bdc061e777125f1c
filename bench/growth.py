"""python -m bench.growth: how time and memory grow with what is asked for.

With the length of the output, of the prompt, with slots, tokens of the vocabulary, drafts of a
round and the size of the model. Each curve gets an exponent with its interval and, as far as there
are points for it, the exponent of what grows beside a constant (bench/growth_fit.py). Each time
gets the floor that memory sets: the bytes that have to be read, over the bandwidth measured in this
run. A model that fits into the processor's caches can be faster; a prefill is bound by arithmetic.
Memory is that of processes of their own, and its floor the weights, the rows written and what the
process had before it loaded anything. Exports, builds and memory are measured once, all else
several times; a star says that other processes disturbed a figure.

Progress goes to stderr, tables to stdout, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.corpus import collect
from runtime.files.errors import CommandParser, OutriderError, run_command

from . import growth_plot, inflate, machine, side_pair
from .estimates import rounded
from .growth_curves import SECTIONS, Bench, Curves, Point, Scale, Sizes, build
from .growth_fit import marginal, power
from .ways import Clock

READS = 8  # passes over memory, for its bandwidth
BUSY = "* {} of {} points were disturbed by other processes: no exponent of theirs should be quoted"


def larger(hidden: int, inter: int, layers: int, heads: int, vocab: int) -> Sizes:
    return {
        "hidden_size": hidden, "intermediate_size": inter, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocab,
    }  # fmt: skip


FULL = Scale(
    "full", "smollm-135m", outputs=(8, 24, 64, 192, 512), contexts=(16, 64, 192, 448, 960, 1500),
    slots=(1, 2, 3, 4, 6, 8), vocab=(4096, 16_384, 49_152, 151_936), hidden=side_pair.DRAFT_HIDDEN,
    gammas=tuple(range(9)),
    sizes={
        "bundled": {}, "16m": larger(384, 1024, 8, 6, 8192),
        "46m": larger(512, 1408, 12, 8, 24_576),
        **{name: asdict(inflate.SHAPES[name]) for name in ("smollm-135m", "0.5b")},
    },
    rounds=5, loads=3, patience=30,
)  # fmt: skip
QUICK = Scale(
    "quick", None, outputs=(8, 24, 64, 192, 512), contexts=(16, 64, 192, 448, 960, 1500),
    slots=(1, 2, 3, 4, 6, 8), vocab=(4096, 16_384, 49_152), hidden=side_pair.DRAFT_HIDDEN,
    gammas=tuple(range(9)),
    sizes={
        "bundled": {}, "13m": larger(384, 1024, 6, 6, 8192), "34m": larger(512, 2048, 6, 8, 24_576)
    },
    rounds=5, loads=2, patience=2, read_bytes=1 << 27,
)  # fmt: skip


def run(
    scale: Scale, target: Path, draft: Path | None, source: Path, documents: Sequence[str],
    *, threads: int, work: Path, clock: Clock,
) -> dict[str, Any]:  # fmt: skip
    """All sections; the object of the JSON line. target, draft: the pair. source: what is grown."""
    work.mkdir(parents=True, exist_ok=True)
    bundle = build(target, draft, work, scale, threads)
    bench = Bench(scale, threads, work, source, bundle, documents, clock)
    results: dict[str, Any] = {
        "benchmark": "growth", "scale": scale.name, "machine": machine.describe(threads),
        "pair": bundle.name, "sections": {},
    }  # fmt: skip
    for name, section in SECTIONS.items():
        clock.note(name)
        begin = clock.seconds
        for _ in range(READS):
            bench.reader()
        curves = section.measure(bench)
        for line in table(f"{name}: {section.axis}", curves):
            print(line, flush=True)
        results["sections"][name] = {
            "axis": section.axis, "seconds": round(clock.seconds - begin, 1),
            "curves": {curve: json_of(points) for curve, points in curves.items()},
        }  # fmt: skip
    figures = [
        point["quiet"]
        for section in results["sections"].values()
        for curve in section["curves"].values()
        for point in curve["points"]
    ]
    if not all(figures):
        print(BUSY.format(figures.count(False), len(figures)), flush=True)
    results["bytes_per_second"] = round(bench.reader.bandwidth)
    results["seconds"] = round(clock.seconds, 1)
    return results


def json_of(points: Sequence[Point]) -> dict[str, Any]:
    """A curve: its points, and what was fitted to them; seconds or bytes."""
    x, y = [p.x for p in points], [p.y for p in points]
    fits = {"power": power(x, y), "marginal": marginal(x, y)}
    return {
        "points": [
            {**{key: _short(value) for key, value in asdict(p).items()}, "x": p.x} for p in points
        ],
        **{
            name: {key: _short(value) for key, value in asdict(fit).items()} if fit else None
            for name, fit in fits.items()
        },
    }


def _short(value: float | bool | None) -> float | bool | None:
    return value if value is None or isinstance(value, bool) else rounded(value)


def unit(curve: str, most: float) -> tuple[str, float]:
    """What to print a curve in, and how much of it one second or byte is."""
    if growth_plot.in_bytes(curve):
        return "MiB", 2**-20
    return ("s", 1.0) if most >= 10 else ("ms", 1e3)


def table(title: str, curves: Curves) -> Iterator[str]:
    """A row of values for each curve, one of floors, and the fits."""
    yield title
    axis: list[float] = []
    for name, points in curves.items():
        x = [p.x for p in points]
        if x != axis:
            axis = x
            yield f"{'':<24}" + "".join(f"{_axis(value):>10}" for value in x)
        what, factor = unit(name, max(p.y for p in points))
        marks = ["" if p.quiet else "*" for p in points]
        values = [_number(p.y * factor) + mark for p, mark in zip(points, marks, strict=True)]
        yield f"{name + ', ' + what:<24}" + "".join(f"{value:>10}" for value in values)
        if any(p.floor for p in points):
            floors = [_number(p.floor * factor) if p.floor else "" for p in points]
            yield f"{'  floor':<24}" + "".join(f"{value:>10}" for value in floors)
        yield "  " + fits(points, what, factor)
    yield ""


def fits(points: Sequence[Point], what: str, factor: float) -> str:
    """The exponents of a curve, in words."""
    x, y = [p.x for p in points], [p.y for p in points]
    line, beyond = power(x, y), marginal(x, y)
    text = "no fit: too few points" if line is None else str(line)
    if beyond is None:
        return text
    if not beyond.bounded:
        return f"{text} | a constant cannot be told from it"
    constant = f"{_number(beyond.constant * factor)} {what}" if beyond.constant else "no constant"
    interval = f"({beyond.low:.2f} to {beyond.high:.2f})"
    return f"{text} | beyond {constant}: x^{beyond.exponent:.2f} {interval}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _axis(x: float) -> str:
    return f"{x / 1e6:.1f} M" if x >= 1e6 else f"{x:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="python -m bench.growth", description=__doc__,
                         formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = made.add_argument
    add("--quick", action="store_true",
        help="the bundled pair, smaller sizes: a minute and a half once they are made")  # fmt: skip
    add("--threads", type=int, default=machine.physical_cores(), metavar="N",
        help="default: the machine's cores")  # fmt: skip
    add("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="where checkpoints and bundles are kept; default build/side")  # fmt: skip
    add("--out", type=Path, metavar="DIR", help="write growth.json and plots there too")
    return made


def _main(args: argparse.Namespace) -> int:
    if args.threads < 1:
        raise OutriderError("option", "threads must be at least 1", "Leave it out for all.")
    clock, scale, bundled = Clock(), QUICK if args.quick else FULL, side_pair.BUNDLED
    target, draft = bundled, bundled.with_name("draft")
    args.work.mkdir(parents=True, exist_ok=True)
    if scale.shape is not None:
        pair = side_pair.make(scale.shape, scale.alpha, args.work)
        target, draft = pair.target, pair.draft
    clock.note("the text that prompts are cut from")
    results = run(
        scale, target, draft, bundled, collect().held_out,
        threads=args.threads, work=args.work, clock=clock,
    )  # fmt: skip
    line = json.dumps(results, separators=(",", ":"))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / growth_plot.FILE).write_text(line + "\n")
        for text in growth_plot.draw_or_explain(results, args.out):
            clock.note(text)
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
