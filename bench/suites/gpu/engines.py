"""python -m bench.suites.gpu.engines: build, check and time a pair on the GPU of this machine.

`checkpoints` writes the bundled pair to FOLDER/target and FOLDER/draft, from which
`parts.build_parts` makes FOLDER/bundle and FOLDER/reference; `build` writes the FOLDER/bundle of a
constructed pair. `check` and `times` use these. Each command prints its progress and writes one
JSON file. With --device cpu (and --sm cpu) everything runs without a GPU, and results that need one
are null. `constructed` describes the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.files.errors import CommandParser, first_line, print_tracebacks, run_command

from .checks import Checks
from .constructed import SHAPES, write_bundled
from .suite import save_report
from .times import Times
from .unwritten import build

KINDS: dict[str, Any] = {"check": Checks, "times": Times}


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m bench.suites.gpu.engines", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("checkpoints", "build", *KINDS):
        add = commands.add_parser(name).add_argument
        add("folder", type=Path, metavar="FOLDER")
        if name == "build":
            add("--pair", required=True, choices=list(SHAPES))
            add("--sm", default="", help="as in make engines")
        if name not in KINDS:
            continue
        add("--device", default="cuda", choices=["cuda", "cpu"])
        add("--json", type=Path, metavar="FILE", help="write the report to this file")
        add("--quick", action="store_true", help="fewer settings and shorter texts")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before Transformers is imported
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    if args.command == "checkpoints":
        write_bundled(args.folder)
        return 0
    if args.command == "build":
        build(args.pair, args.folder, args.sm)
        return 0
    kind = KINDS[args.command]
    subject = kind(args.folder, args.device, args.quick)
    report = run_sections(subject, kind.NAMES, args.json)
    return 0 if report["passed"] else 1


def run_sections(
    checks: Checks | Times, names: Sequence[str], path: Path | None = None
) -> dict[str, Any]:
    """Run the methods with these names. Returns their results, and "passed": whether none failed. A
    method that raises has failed, and the others still run. path: file that is written after each
    method."""
    report: dict[str, Any] = {"device": checks.device, "passed": True}
    for name in names:
        begin = time.perf_counter()
        try:
            result: dict[str, Any] = getattr(checks, name)()
        except Exception as error:  # noqa: BLE001 - the other methods must still run
            print_tracebacks(error, always=True)
            result = {"passed": False, "reason": first_line(error)}
        report[name] = {**result, "section_s": round(time.perf_counter() - begin, 1)}
        report["passed"] &= result.get("passed") is not False
        print(f"{name}: {json.dumps(report[name])}", flush=True)
        if path is not None:
            save_report(path, report)
    return report


if __name__ == "__main__":
    sys.exit(main())
