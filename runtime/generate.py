"""The command line: the text goes to stdout, everything else to stderr.

It is `outrider` if installed, and `python -m runtime.generate` in the checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .files.errors import defer_interrupts, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (`--help` lists them)."""

    def command() -> int:
        with defer_interrupts():
            from .cli.command import run  # imported here, so that Ctrl-C ends it with one line
        return run(argv)

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
