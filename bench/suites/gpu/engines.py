"""python -m bench.suites.gpu.engines: engines for the GPU of this machine, checked and timed.

`build` makes a folder of bundles, `check` and `times` take it. Each prints as it goes and writes
one JSON file. With --device cpu all of it runs without a GPU, and what only
one can say is null. `constructed` says what the pairs are.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from runtime.files.errors import CommandParser, OutriderError, run_command

from . import build, checks, constructed, times
from .suite import save


def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="python -m bench.suites.gpu.engines", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    for name in ("build", "check", "times"):
        add = commands.add_parser(name).add_argument
        add("--json", type=Path, help="write the report there")
        add("--out", type=Path, required=True, help="the folder of the bundles")
        add("--device", default="cuda", choices=["cuda", "cpu"])
        if name == "build":
            add("--pair", required=True, choices=build.PAIRS)
            add("--delta", type=float, default=constructed.DELTA, help="noise on the draft")
            add("--checks", action="store_true", help="also what `check` wants")
        else:
            add("--quick", action="store_true", help="a little of everything")
        if name == "check":
            add("--only", action="append", choices=[*checks.NAMES, "loop"])
        if name == "times":
            add("--remove", action="store_true", help="remove the folder afterwards: it is large")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before Transformers is imported
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    out = args.out.resolve()

    def write(report: dict[str, Any]) -> None:
        if args.json is not None:
            save(args.json, report)

    if args.command == "build":
        given = {"delta": args.delta, "checks": args.checks}
        built = build.build(args.pair, out, args.device, **given)
        write({"pair": built.name, "seconds": built.seconds, "failures": built.failures})
        return 0
    if not (out / build.FACTS_FILE).is_file():
        raise OutriderError("bundle", f"{out} was not built", "Run build first.")
    built = build.BuiltPair.read(out)
    if args.command == "check":
        size = checks.QUICK if args.quick else checks.FULL
        only = args.only or checks.NAMES
        return 0 if checks.check(built, args.device, size, write, only)["passed"] else 1
    timing = times.QUICK if args.quick else times.FULL
    report = times.times(built, args.device, timing, write)
    if args.remove:
        shutil.rmtree(out)
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
