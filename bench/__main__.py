"""python -m bench SUITE [options]: run a benchmark; prints tables, then one line of JSON."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name: (module of bench/ with a `main`, description)
SUITES = {
    "side": ("suites.side.suite", "speed and memory of Outrider and of its alternatives"),
    "growth": ("suites.growth", "how time and memory grow with prompt, batch and model size"),
    "clients": ("suites.clients", "what clients that share one engine cost each other"),
    "drafts": ("suites.drafts", "acceptance and speedup of each kind of draft on a bundle"),
    "policies": ("suites.policies.suite", "speed of the policies that choose gamma per round"),
    "kernel": ("suites.kernel.suite", "the sampling kernel, with the analyses of its paper"),
    "report": ("report.page", "an HTML page about the speedup of speculation on a bundle"),
    "quality": ("suites.quality", "quality loss from quantisation, Outrider's and llama.cpp's"),
    "embed": ("suites.embed", "the same request in a C++ program and in a Python program"),
    "gpu": ("suites.gpu.suite", "everything that must be checked and measured on a GPU"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Imported here because the worker processes of bench.systems import this module too, and their
    # memory is measured.
    from runtime.files.errors import run_command

    return run_command(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    from runtime.files.errors import OutriderError

    if arguments[:1] in (["--help"], ["-h"]):
        print("usage: python -m bench SUITE [options]; SUITE --help lists the options\n")
        for name, (_, about) in SUITES.items():
            print(f"  {name:<9} {about}")
        return 0
    name = arguments[0] if arguments else ""
    if name not in SUITES:
        cause = f"there is no suite {name}" if name else "no suite was given"
        raise OutriderError("option", cause, f"Choose one of {', '.join(SUITES)}.")
    status: int = importlib.import_module(f"bench.{SUITES[name][0]}").main(arguments[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
