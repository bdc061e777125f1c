"""The command line of `python -m engines`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import get_args

from runtime.files.errors import CommandParser, OutriderError
from runtime.files.folders import check_writable, resolve_links
from runtime.files.graphs import Cache, read_pair
from runtime.files.manifest import MANIFEST_FILE, MAX_SLOTS, read_bundle
from runtime.files.progress import size_text

from .bundle import build, check_backend, check_memory, engine_plan, memory_plan, supported_features
from .registry import BACKENDS


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m engines",
        description="Build a bundle from the graphs that `python -m export` wrote. `make engines` "
        "runs both commands.",
        epilog="example:\n  python -m engines --graphs build/graphs/demo --out build/demo",
    )
    add = parser.add_argument
    # fmt: off
    add("--graphs", type=Path, help="folder of graphs that `python -m export` wrote")
    add("--out", type=Path, help="folder of the bundle to write")
    add("--backend", default="onnxruntime",
        help=f"library that runs the engines: {', '.join(BACKENDS)} (default: onnxruntime)")
    add("--slots", type=int, default=1, help="number of concurrent sequences (default: 1)")
    add("--sm", default="",
        help="GPU architectures that tensorrt_rtx builds for, such as 80,89 (default: those of "
        "this machine's GPUs, or all that are supported if it has none); the one that aotinductor "
        "builds for, or cpu (default: that of this machine's GPU, or cpu if it has none)")
    add("--opt-level", type=int,
        help="TensorRT's optimisation level, 0 to 5: how long it searches for faster kernels "
        "(default: the library's own)")
    add("--supports", nargs="+", metavar=("DTYPE", "WEIGHTS"),
        help="build nothing; check that the backend runs graphs of this precision, with these "
        "weight types of target and draft, and with --out that the bundle can be written there; "
        "print all weight types that the backend runs, and whether it runs encoder-decoders and "
        "recurrent states")
    add("--cache-type", choices=["full", *get_args(Cache)],
        help="with --supports, also check this type of the keys and values")
    add("--no-measure", action="store_false", dest="measure",
        help="do not measure what the bitwise results depend on; the bundle then promises no "
        "reproducibility")
    add("--force", action="store_true", help="rebuild even if nothing changed")
    # fmt: on
    return parser


def run(argv: list[str] | None) -> int:
    """Parse the command line and run it; returns the exit status. Raises OutriderError."""
    arguments = parser().parse_args(argv)
    if not 1 <= arguments.slots <= MAX_SLOTS:
        raise OutriderError(
            "option", f"SLOTS={arguments.slots} is out of range", f"Use 1 to {MAX_SLOTS}."
        )
    if arguments.supports:
        dtype, *weights = arguments.supports
        if len(weights) > 2:
            parser().error(f"--supports: unexpected {' '.join(weights[2:])}")
        cache = None if arguments.cache_type == "full" else arguments.cache_type
        check_backend(arguments.backend, dtype, arguments.sm, arguments.opt_level, weights, cache)
        if arguments.out is not None:
            check_writable(arguments.out, MANIFEST_FILE)
        print(*supported_features(arguments.backend, dtype, arguments.sm))
        return 0
    missing = [name for name in ("graphs", "out") if getattr(arguments, name) is None]
    if missing:
        names = ", ".join(f"--{name}" for name in missing)
        parser().error(f"the following arguments are required: {names}")
    begin = time.perf_counter()
    out = arguments.out
    if ".." in out.parts:  # which may cease to exist: of a folder that does not exist yet
        out = resolve_links(out)
    pair = read_pair(arguments.graphs)
    facts = pair.target
    targets = check_backend(arguments.backend, facts.dtype, arguments.sm, cache=facts.cache)
    _print_memory(memory_plan(pair, arguments.slots, targets))
    check_memory(pair, arguments.slots, targets)
    built = build(
        arguments.graphs,
        out,
        backend=arguments.backend,
        slots=arguments.slots,
        sm=arguments.sm,
        level=arguments.opt_level,
        force=arguments.force,
        measure=arguments.measure,
    )
    if plan := engine_plan(read_bundle(out, verify=False)):
        _print_memory(plan)
    seconds = time.perf_counter() - begin
    note = arguments.backend if built else "cached: nothing changed"
    print(f"{'bundle':<9} {out!s:<34} {seconds:6.1f} s  {note}", file=sys.stderr)
    return 0


def _print_memory(plan: dict[str, int]) -> None:
    parts = " + ".join(f"{part} {size_text(size)}" for part, size in plan.items())
    print(f"{'bundle':<9} memory {size_text(sum(plan.values()))} = {parts}", file=sys.stderr)
