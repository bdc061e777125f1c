"""Compare the same request in a C++ program and in a Python program.

examples/embed.cpp, which is compiled here, and an equivalent Python program run in alternation with
the same token ids. Each run is a new process that opens the bundle, generates and exits. The table
shows the time of the whole process, of the first token, of a round, and of the host part of a
round, which is the time outside ONNX Runtime's calls: sampling and host.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plugins.tools.build import PLUGINS_FOLDER, BuildError, find_compiler
from runtime.cmake import onnxruntime
from runtime.files.errors import OutriderError
from runtime.files.library import find_library

from ..core import machine
from ..core.clock import Clock, order
from ..core.command import Results, Suite, bundle_option
from ..core.table import Table

PROMPT = [11, 42, 7, 100, 3, 9, 27, 81]
TIME_NAMES = ("process", "first token", "round", "host part of a round")
# Does the same as examples/embed.cpp, and prints the ids and the times in the same way.
PYTHON_PROGRAM = """
import sys, time
from runtime import load
spent = 0.0
def timed(engine):
    run = engine._run
    def within(call):
        global spent
        begin = time.perf_counter()
        run(call)
        spent += time.perf_counter() - begin
    engine._run = within
with load(sys.argv[1]) as engine:
    for model in filter(None, (engine.decoder.target, engine.decoder.draft)):
        timed(model)
    options = dict(max_new_tokens=48, temperature=0.8, seed=3, verify="coupled")
    with engine.stream([int(word) for word in sys.argv[2:]], **options) as stream:
        ids, before = list(next(stream).token_ids), spent
        for event in stream:
            ids += event.token_ids
    stats = event.result.stats
    rounds = stats.time_rounds + stats.time_draft_prefill
    print(*ids)
    print(*(f"{1e3 * seconds:.4f} ms" for seconds in (
        stats.ttft, rounds / stats.rounds, (rounds - (spent - before)) / stats.rounds)))
"""


def compile_program(folder: Path) -> Path:
    """Compile examples/embed.cpp into `folder`. Raises OutriderError("backend") if the library or
    the compiler is missing."""
    library = find_library()
    if library is None:
        raise OutriderError("backend", "liboutrider was not found", "Run `make plugins`.")
    program = folder / "embed"
    source = PLUGINS_FOLDER.parent / "examples" / "embed.cpp"
    flags = ["-std=c++17", "-O2", f"-I{PLUGINS_FOLDER / 'include'}", f"-Wl,-rpath,{library.parent}"]
    try:
        compiler = find_compiler()
    except BuildError as error:
        cause, _, remedy = str(error).partition(". ")
        raise OutriderError("backend", cause, remedy) from None
    command = [*compiler, *flags, str(source), str(library), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run_program(command: Sequence[str | Path]) -> tuple[list[int], list[float]]:
    """Run one program; returns its token ids, and milliseconds in the order of TIME_NAMES."""
    begin = time.perf_counter()
    done = subprocess.run([*command], capture_output=True, text=True, cwd=PLUGINS_FOLDER.parent)
    seconds = time.perf_counter() - begin
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
        cause, _, remedy = (last or f"it ended with status {done.returncode}").partition(". ")
        raise OutriderError("bundle", cause, remedy or "Please report this.")
    line, times_line = done.stdout.splitlines()
    ids = [int(word) for word in line.split()]
    times = [float(number) for number in re.findall(r"[\d.]+(?= ms| of them outside)", times_line)]
    return ids, [1e3 * seconds, *times]


def measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    bundle, turns = Path(args.engines).resolve(), 5 if args.quick else 25
    words = [str(token) for token in PROMPT]
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, list[str | Path]] = {
            "C++": [compile_program(Path(folder)), bundle, onnxruntime(), *words],
            "Python": [sys.executable, "-c", PYTHON_PROGRAM, bundle, *words],
        }
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        texts = {name: run_program(way)[0] for name, way in ways.items()}  # also caches the files
        if texts["C++"] != texts["Python"]:
            raise OutriderError(
                "certificate",
                "the C++ and the Python program generated different tokens",
                "Please report this.",
            )
        for turn in range(turns):
            clock.note(f"turn {turn + 1} of {turns}")
            for name in order(list(ways), turn):
                found[name].append(run_program(ways[name])[1])
    times = {
        name: dict(zip(TIME_NAMES, map(statistics.median, zip(*rows, strict=True)), strict=True))
        for name, rows in found.items()
    }
    # Both programs use the engines' default number of threads.
    return {"machine": machine.describe(args.threads), "bundle": bundle.name, "turns": turns,
            "tokens": len(texts["C++"]), "times": times}  # fmt: skip


def tables(results: Results) -> list[Table]:
    ours, python = results["times"]["C++"], results["times"]["Python"]
    rows = [
        [what, f"{ours[what]:,.2f}", f"{python[what]:,.2f}", f"{ours[what] / python[what]:,.2f}"]
        for what in TIME_NAMES
    ]
    title = f"The same request in C++ and Python: {results['bundle']}"
    notes = [
        f"Medians of {results['turns']} processes each; both generate the same "
        f"{results['tokens']} tokens."
    ]
    head = ["ms", "C++", "Python", "ratio"]
    return [Table(title, head, rows, notes)]


SUITE = Suite(
    "embed",
    __doc__ or "",
    "5 processes each instead of 25",
    measure,
    tables,
    options=bundle_option,
    threads=False,
)
main = SUITE.main
