"""The command line shared by all suites: options, progress, tables, the line of JSON.

A suite measures and returns a JSON object; its tables are computed from that object only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bundle import max_threads
from runtime.files.errors import (
    CommandParser,
    OutriderError,
    check_stdout,
    positive_int,
    run_command,
)
from runtime.files.folders import replacing

from . import machine
from .clock import Clock
from .table import PAGE_WIDTH, Table

Results = Mapping[str, Any]


def check_writable(folder: Path, option: str = "--out") -> None:
    """Check, before anything is measured, that `folder` can be written. option: the one that names
    it. Raises OutriderError("disk") if it cannot."""
    above = next(place for place in (folder, *folder.parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        cause = f"{above} is not a writable folder"
        raise OutriderError("disk", cause, f"Choose another {option}.")


@dataclass(frozen=True)
class Suite:
    """A benchmark as a command.

    about: its help text; the first paragraph summarises what it measures. quick: help text of
    --quick. options: adds further options. measure: takes the options and a clock for progress
    notes, and returns the JSON object. tables, heading: output computed from that object. threads:
    whether there is an option --threads. Tables go to stdout, progress to stderr. Unless stdout is
    a terminal, its last line is the JSON object.
    """

    name: str
    about: str
    quick: str
    measure: Callable[[argparse.Namespace, Clock], dict[str, Any]]
    tables: Callable[[Results], Sequence[Table]]
    heading: Callable[[Results], str] = lambda results: machine.summary_line(results["machine"])
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    threads: bool = True

    def parser(self) -> argparse.ArgumentParser:
        parser = CommandParser(prog=f"python -m bench {self.name}", description=self.about)
        add = parser.add_argument
        add("--quick", action="store_true", help=self.quick)
        parser.set_defaults(threads=machine.physical_cores())
        if self.threads:
            add("--threads", type=positive_int, metavar="N",
                help="number of CPU threads (default: %(default)s)")  # fmt: skip
        add("--out", type=Path, metavar="DIR",
            help=f"also write {self.name}.json and {self.name}.md to this folder")  # fmt: skip
        self.options(parser)
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the command line; returns the exit status."""
        return run_command(lambda: self._main(self.parser().parse_args(argv)))

    def _main(self, args: argparse.Namespace) -> int:
        clock = Clock()
        check_stdout()
        for name in "out", "work":
            if (folder := getattr(args, name, None)) is not None:
                check_writable(folder, f"--{name}")
        if args.threads > max_threads():
            remedy = f"Use 1 to {max_threads()}."
            raise OutriderError("option", f"--threads={args.threads} is out of range", remedy)
        results = self.measure(args, clock)
        results = {"benchmark": self.name, **results, "seconds": round(clock.seconds, 1)}
        heading, tables = self.heading(results), self.tables(results)
        print("\n".join([heading, "", *(table.text() for table in tables)]))
        line = json.dumps(results, separators=(",", ":"))
        if not sys.stdout.isatty():  # before files are written, as that may fail
            print(line, flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            blocks = (table.text(markdown=True) for table in tables)
            page = "\n".join([textwrap.fill(heading, PAGE_WIDTH), "", *blocks])
            for suffix, text in ("json", line + "\n"), ("md", page):
                with replacing(args.out / f"{self.name}.{suffix}") as new:
                    new.write_text(text)
        return 0


def bundle_option(parser: argparse.ArgumentParser) -> None:
    """Add --engines, for suites that measure a bundle."""
    parser.add_argument(
        "--engines", default="build/demo", metavar="DIR", help="bundle (default: %(default)s)"
    )
