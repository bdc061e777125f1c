"""python -m bench SUITE [options]: measure, print tables, and a line of JSON last."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name: module with a `main`, and what it measures
SUITES = {
    "side": ("bench.suites.side", "Outrider and what a user would pick instead, side by side"),
    "growth": ("bench.suites.growth", "how time and memory grow with what is asked for"),
    "drafts": ("bench.suites.drafts", "what each kind of draft brings on a bundle"),
    "policies": ("bench.suites.policies", "what choosing gamma for each round brings"),
    "kernel": ("bench.suites.kernel", "the sampling kernel against NumPy and Transformers"),
    "paper": ("bench.suites.paper", "the kernel paper's analyses, done again"),
    "report": ("bench.report", "a page with a plot of what speculation gains on a bundle"),
    "quality": ("bench.suites.quality", "what quantised weights cost, ours and llama.cpp's"),
    "embed": ("bench.suites.embed", "the same request by a C++ program and by a Python one"),
    "gpu": ("bench.suites.gpu", "all that a GPU can tell about this project"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--help"], ["-h"]):
        print("usage: python -m bench SUITE [options]; SUITE --help lists them\n")
        for name, (_, about) in SUITES.items():
            print(f"  {name:<9} {about}")
        return 0
    # Here, because the processes of bench.systems import this module too, and their memory is told.
    from runtime.files.errors import run_command

    return run_command(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    from runtime.files.errors import OutriderError

    name = arguments[0] if arguments else ""
    if name not in SUITES:
        cause = f"there is no suite {name}" if name else "no suite was named"
        raise OutriderError("option", cause, f"Name one of {', '.join(SUITES)}.")
    status: int = importlib.import_module(SUITES[name][0]).main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
