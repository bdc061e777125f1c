"""make gpu-check: everything that a GPU can tell about this project, in one call of minutes.

Needs no network and no environment of its own: a C++ compiler, PyTorch, Transformers,
cuda-bindings, the runtime's own dependencies, pytest and scipy are enough. Parts run one after the
other, each in a process and with a limit of its own; one that fails or hangs does not take the
others along. Where there is no GPU the parts that want one are skipped, by name and with the
reason. Writes gpu-check.json and gpu-check.log.

Two calls do all of it on a machine that is lent for ten minutes at a time:

    make gpu-check
    python -m bench gpu --only 8b+1b
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from runtime.files.errors import CommandParser, first_line, run_command

from ...core import machine

CHECKOUT = Path(__file__).parents[3]
KERNEL_TESTS = (
    "tests/sampling/test_kernel.py",
    "tests/sampling/test_kernel_edges.py",
    "tests/sampling/test_kernel_exact.py",
)
PYTHON = [sys.executable, "-m"]
KERNEL = [*PYTHON, "bench.suites.gpu.kernel"]
ENGINES = [*PYTHON, "bench.suites.gpu.engines"]
SANITIZER = ["compute-sanitizer", "--error-exitcode", "9"]
COUNTERS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
PROFILER = ["ncu", "--clock-control", "none", "--metrics", ",".join(COUNTERS), "-k",
            "regex:outrider_verify", "-s", "4", "-c", "8"]  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One command. seconds: its limit. least: it is not begun with less left than that. tool: a
    program that it needs. reads: its JSON file, from the report's folder."""

    name: str
    command: list[str]
    seconds: float
    gpu: bool = True
    tool: str | None = None
    reads: str | None = None
    least: float = 5


def parts(out: Path, architecture: str) -> list[Part]:
    """In the order of their worth: what is cut off at the end is what can be missed best."""
    only = ["--arch", architecture] if architecture else []  # without a GPU all are compiled
    place = workplace(1)
    loop = str(place / "bundled-loop.json")
    return [
        Part("library", [*PYTHON, "plugins.tools.build"], 120, gpu=False),
        Part("cubins", [*PYTHON, "plugins.tools.cubins", *only], 200, gpu=False),
        Part("gpu", [*KERNEL, "--describe", str(out / "gpu.json")], 60, reads="gpu.json"),
        *engines("bundled", 1, 240, "check", 200),
        Part("kernel tests", [*PYTHON, "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
                              "-k", "cuda", *KERNEL_TESTS], 150),
        *engines("1b+small", 8, 260, "times", 130),
        Part("bundled: loop", [*ENGINES, "check", "--out", str(place / "bundled"), "--json", loop,
                               "--only", "loop"], 75, reads=loop),
        Part("kernel times", [*KERNEL, "--times", str(out / "kernel-gpu.json")], 180,
             reads="kernel-gpu.json"),
        *engines("8b+1b", 42, 480, "times", 200),
        *(Part(f"sanitizer: {tool}", [*SANITIZER, "--tool", tool, *KERNEL], 60,
               tool="compute-sanitizer")
          for tool in ("memcheck", "racecheck", "synccheck")),
        *(Part(f"counters: V {v:,} gamma {g} B {b}",
               [*PROFILER, *KERNEL, "--profile", str(v), str(g), str(b)], 45, tool="ncu")
          for v, g, b in ((128_256, 5, 1), (128_256, 8, 32))),
    ]  # fmt: skip


def engines(pair: str, gib: float, build: float, what: str, use: float) -> Iterator[Part]:
    """Bundles of a pair, and their checks or times. gib: of files. build, use: limits in seconds.

    Hashing, writing and compiling 8e9 weights takes minutes: begun with less left, they are lost.
    Reports lie beside the bundles, for gpu-check.json repeats them.
    """
    place = workplace(gib)
    for name, seconds, least, more in (
        ("build", build, 0.75 * build, ["--pair", pair]),
        (what, use, 30, ["--remove"] if what == "times" else []),
    ):
        reads = str(place / f"{pair}-{name}.json")
        command = [*ENGINES, name, "--out", str(place / pair), "--json", reads, *more]
        yield Part(f"{pair}: {name}", command, seconds, reads=reads, least=least)


def workplace(gib: float) -> Path:
    """Where bundles go: not into the report's folder, which is copied. To memory where files of
    that size leave most of it free, for a disk may write no faster than 0.2 GB/s."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        files = os.statvfs(memory)
        if min(files.f_bavail * files.f_frsize, available * 1024 / 2) > gib * 2**30:
            return memory / "outrider-gpu-check"
    return CHECKOUT / "build" / "gpu-engines"


def run_part(part: Part, out: Path, log: TextIO, no_gpu: str | None) -> dict[str, Any]:
    """Its outcome: {"status": "ok" | "failed" | "timed out" | "skipped", ...}."""
    if part.gpu and no_gpu:
        return {"status": "skipped", "reason": no_gpu}
    if part.tool and not shutil.which(part.tool):
        return {"status": "skipped", "reason": f"{part.tool} is not installed"}
    log.write(f"\n=== {part.name}: {' '.join(part.command)}\n")
    log.flush()
    begin = time.perf_counter()
    if part.reads:
        (out / part.reads).unlink(missing_ok=True)
    try:
        # A session of its own, so that a limit ends what it started too.
        process = subprocess.Popen(
            part.command, cwd=CHECKOUT, stdout=log, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return {"status": "failed", "reason": first_line(error)}
    try:
        status = process.wait(part.seconds)
        outcome: dict[str, Any] = {"status": "failed" if status else "ok"}
        if status:
            outcome["exit"] = status
    except subprocess.TimeoutExpired:
        outcome = {"status": "timed out", "limit_s": part.seconds}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome["seconds"] = round(time.perf_counter() - begin, 1)
    if part.reads and (out / part.reads).is_file():
        try:
            outcome["result"] = json.loads((out / part.reads).read_text())
        except ValueError as error:
            outcome |= {"status": "failed", "reason": f"{part.reads}: {first_line(error)}"}
    return outcome


def check(
    out: Path,
    seconds: float,
    chosen: Callable[[Path, str], list[Part]] = parts,
    only: Sequence[str] = (),
) -> tuple[dict[str, Any], bool]:
    """The report, and whether nothing failed. seconds: for all parts together. only: the parts
    whose name contains one of these, after those that need no GPU, on which they rest."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + seconds
    report: dict[str, Any] = {"machine": machine.describe(os.cpu_count() or 1), "parts": {}}
    architecture, no_gpu = find_gpu()
    report["gpu"] = architecture or None
    with (out / "gpu-check.log").open("w") as log:
        for part in chosen(out, architecture):
            if part.gpu and only and not any(text in part.name for text in only):
                continue
            left = deadline - time.perf_counter()
            if left < part.least and not (part.gpu and no_gpu):
                reason = f"{left:.0f} of the {seconds:.0f} s are left, too few to begin"
                outcome = {"status": "skipped", "reason": reason}
            else:
                limit = min(part.seconds, left)
                outcome = run_part(replace(part, seconds=limit), out, log, no_gpu)
            report["parts"][part.name] = outcome
            more = outcome.get("reason") or f"{outcome['seconds']:.0f} s"
            print(f"{part.name}: {outcome['status']} ({more})", flush=True)
            save(out / "gpu-check.json", report)
    failed = {"failed", "timed out"}
    return report, not any(o["status"] in failed for o in report["parts"].values())


def find_gpu() -> tuple[str, str | None]:
    """(architecture such as sm_90, None), or ("", why there is no GPU in one line).

    By the driver alone: what else is missing on a machine with a GPU is a failure, not a reason to
    skip.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "", "there is no CUDA driver"
    if status := driver.cuInit(0):
        return "", f"cuInit failed with {status}"
    device = ctypes.c_int()
    if status := driver.cuDeviceGet(ctypes.byref(device), 0):
        return "", f"there is no GPU (cuDeviceGet: {status})"
    capability = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(str(value.value))
    return "sm_" + "".join(capability), None


def save(path: Path, report: dict[str, Any]) -> None:
    """In one step: what breaks later does not lose what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".partial")
    fresh.write_text(json.dumps(report, indent=1) + "\n")
    fresh.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = CommandParser(
        prog="python -m bench gpu", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--out", type=Path, default=CHECKOUT / "build" / "gpu-check", metavar="DIR")
    add("--seconds", type=float, default=570, help="for all parts; default 570")
    add("--only", action="append", default=[], metavar="TEXT",
        help="of the parts that need a GPU only those whose name contains this; may be repeated",
    )  # fmt: skip

    def command() -> int:
        arguments = parser.parse_args(argv)
        _, good = check(arguments.out.resolve(), arguments.seconds, only=arguments.only)
        print(arguments.out / "gpu-check.json")
        return 0 if good else 1

    return run_command(command)
