"""python -m bench.engines_gpu: engines for the GPU of this machine, checked and timed.

`build` makes a folder of bundles, `check` and `times` take it, `rtx` asks TensorRT-RTX. Each prints
as it goes and writes one JSON file. With --device cpu all of it runs without a GPU, and what only
one can say is null. bench/constructed.py says what the pairs are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from runtime.files.errors import OutriderError, run_command

from . import constructed, engines_build, engines_check, engines_times
from .engines_build import Built


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engines_gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "check", "times", "rtx"):
        add = commands.add_parser(name).add_argument
        add("--json", type=Path, help="write the report there")
        add("--out", type=Path, required=True, help="the folder of the bundles")
        if name == "rtx":
            continue
        add("--device", default="cuda", choices=["cuda", "cpu"])
        if name == "build":
            add("--pair", required=True, choices=engines_build.PAIRS)
            add("--delta", type=float, default=constructed.DELTA, help="noise on the draft")
            add("--checks", action="store_true", help="also what `check` wants")
        else:
            add("--quick", action="store_true", help="a little of everything")
        if name == "check":
            add("--only", action="append", choices=[*engines_check.NAMES, "loop"])
        if name == "times":
            add("--remove", action="store_true", help="remove the folder afterwards: it is large")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before Transformers is imported

    def save(report: dict[str, Any]) -> None:
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            fresh = arguments.json.with_suffix(".partial")
            fresh.write_text(json.dumps(report, indent=1) + "\n")
            fresh.replace(arguments.json)

    def command() -> int:
        out, good = arguments.out.resolve(), True
        if arguments.command == "build":
            built = engines_build.build(
                arguments.pair, out, arguments.device, delta=arguments.delta,
                checks=arguments.checks,
            )  # fmt: skip
            save({"pair": built.name, "seconds": built.seconds, "failures": built.failures})
            return 0
        if arguments.command == "rtx":
            report = engines_build.tensorrt_rtx(out)
            save(report)
            print(json.dumps(report))
            return 0
        if not (out / engines_build.FACTS_FILE).is_file():
            raise OutriderError("bundle", f"{out} was not built", "Run build first.")
        built = Built.read(out)
        if arguments.command == "check":
            scale = engines_check.QUICK if arguments.quick else engines_check.Scale()
            only = arguments.only or engines_check.NAMES
            good = engines_check.check(built, arguments.device, scale, save, only)["passed"]
        else:
            quick = engines_times.QUICK if arguments.quick else engines_times.Scale()
            good = not engines_times.times(built, arguments.device, quick, save)["failed"]
            if arguments.remove:
                shutil.rmtree(out)
        return 0 if good else 1

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
