"""python -m engines: a folder of graphs becomes a bundle for one backend."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from runtime.files.errors import CommandParser, OutriderError, run_command
from runtime.files.manifest import read_bundle, read_pair
from runtime.files.progress import size_text

from .bundle import build, check_backend, check_memory, engine_plan, memory_plan
from .registry import BACKENDS


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m engines",
        description="Build a bundle from what `python -m export` wrote. `make engines` runs both.",
        epilog="example:\n  python -m engines --graphs build/graphs/demo --out build/demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--graphs", type=Path, help="folder that `python -m export` wrote")
    add("--out", type=Path, help="bundle to write")
    add(
        "--backend",
        default="onnxruntime",
        help=f"what runs the engines: {', '.join(BACKENDS)} (default: onnxruntime)",
    )
    add("--slots", type=int, default=1, help="sequences at a time (default: 1)")
    add(
        "--sm",
        default="",
        help="GPUs that tensorrt_rtx builds for, such as 80,89 (default: the present one, or all)",
    )
    add(
        "--opt-level",
        type=int,
        help="how long TensorRT looks for faster kernels, 0 to 5 (default: the library's own)",
    )
    add(
        "--supports",
        metavar="DTYPE",
        help="build nothing; say whether the backend runs graphs of this precision",
    )
    add("--force", action="store_true", help="build again even what did not change")
    return parser


def main(argv: list[str] | None = None) -> int:
    def command() -> int:
        arguments = parser().parse_args(argv)
        if arguments.slots < 1:
            raise OutriderError(
                "option", f"SLOTS={arguments.slots} is out of range", "Use at least 1."
            )
        if arguments.supports:
            check_backend(arguments.backend, arguments.supports, arguments.sm, arguments.opt_level)
            return 0
        if arguments.graphs is None or arguments.out is None:
            parser().error("the following arguments are required: --graphs, --out")
        begin = time.perf_counter()
        pair = read_pair(arguments.graphs)
        plan = memory_plan(pair, arguments.slots)
        _say_memory(plan)
        check_memory(plan, check_backend(arguments.backend, pair.target.dtype, arguments.sm))
        built = build(
            arguments.graphs,
            arguments.out,
            backend=arguments.backend,
            slots=arguments.slots,
            sm=arguments.sm,
            level=arguments.opt_level,
            force=arguments.force,
        )
        if made := engine_plan(read_bundle(arguments.out, verify=False)):
            _say_memory(made)
        seconds = time.perf_counter() - begin
        note = arguments.backend if built else "cached: nothing changed"
        print(f"{'bundle':<9} {arguments.out!s:<34} {seconds:6.1f} s  {note}", file=sys.stderr)
        return 0

    return run_command(command)


def _say_memory(plan: dict[str, int]) -> None:
    parts = " + ".join(f"{part} {size_text(size)}" for part, size in plan.items())
    print(f"{'bundle':<9} memory {size_text(sum(plan.values()))} = {parts}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
