"""python -m bench SUITE [options]: measure, print tables, and a line of JSON last."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name: module of bench/ with a `main`, and what it measures
SUITES = {
    "side": ("suites.side.suite", "Outrider and what a user would pick instead, side by side"),
    "growth": ("suites.growth", "how time and memory grow with what is asked for"),
    "drafts": ("suites.drafts", "what each kind of draft brings on a bundle"),
    "policies": ("suites.policies.suite", "what choosing gamma for each round brings"),
    "kernel": ("suites.kernel.suite", "the sampling kernel, and its paper's analyses again"),
    "report": ("report.page", "a page with a plot of what speculation gains on a bundle"),
    "quality": ("suites.quality", "what quantised weights cost, ours and llama.cpp's"),
    "embed": ("suites.embed", "the same request by a C++ program and by a Python one"),
    "gpu": ("suites.gpu.suite", "all that a GPU can tell about this project"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Here, because the processes of bench.systems import this module too, and their memory is told.
    from runtime.files.errors import run_command

    return run_command(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    from runtime.files.errors import OutriderError

    if arguments[:1] in (["--help"], ["-h"]):
        print("usage: python -m bench SUITE [options]; SUITE --help lists them\n")
        for name, (_, about) in SUITES.items():
            print(f"  {name:<9} {about}")
        return 0
    name = arguments[0] if arguments else ""
    if name not in SUITES:
        cause = f"there is no suite {name}" if name else "no suite was named"
        raise OutriderError("option", cause, f"Name one of {', '.join(SUITES)}.")
    status: int = importlib.import_module(f"bench.{SUITES[name][0]}").main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
