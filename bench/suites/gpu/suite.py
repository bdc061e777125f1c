"""make gpu-check: run all checks and measurements that need a GPU, within minutes.

Needs neither a network nor a virtual environment: a C++ compiler, PyTorch, Transformers,
cuda-bindings, the runtime's own dependencies, pytest and scipy are enough. Parts run one after the
other, each in its own process and with its own time limit; a part that fails or hangs does not stop
the others. Without a GPU, the parts that need one are skipped and listed with the reason. Writes
gpu-check-<call>.json and .log.

Three calls of less than ten minutes each run everything, the most important parts first.
`make gpu-check DRY=1` prints what each would do:

    make gpu-check CALL=1    # smoke, the kernel's goals, times of a small pair
    make gpu-check CALL=2    # times of a large pair, and of the kernel in every shape
    make gpu-check CALL=3    # checks, tests, sanitizer

The first two measure the figures of all goals, in a quarter of an hour if they run on the same
machine, which keeps what the first has compiled. GPU_SECONDS limits a call to what is left.

GPU_OUT=<folder> sets the output folder. The reports name the card, which should be the same in all
calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from runtime.files.errors import CommandParser, first_line, positive_int, run_command
from runtime.files.folders import replacing

from ...core import machine
from ...core.machine import CHECKOUT
from .constructed import DTYPE

KERNEL_TESTS = (
    "tests/sampling/test_kernel.py",
    "tests/sampling/test_kernel_edges.py",
    "tests/sampling/test_kernel_exact.py",
)
PYTHON = [sys.executable, "-m"]
KERNEL = [*PYTHON, "bench.suites.gpu.kernel"]
ENGINES = [*PYTHON, "bench.suites.gpu.engines"]
# Only Outrider's kernels, because instrumenting torch's takes minutes. API errors are raised where
# they occur anyway; reporting them would also count cuda-bindings' queries for driver functions
# that may be missing.
SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--report-api-errors", "no",
             "--kernel-name", "kns=outrider_"]  # fmt: skip
ENVIRONMENT = {
    # As much information on failures as possible: the machine may not be available again.
    "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OUTRIDER_TRACEBACK": "1",
    # Container images may lack compiled modules and set this. Compiling Transformers' takes 16
    # seconds, which only the first part should spend.
    "PYTHONDONTWRITEBYTECODE": "",
}  # fmt: skip
NO_GPU: dict[str, Any] = {"passed": None, "reason": "no GPU"}  # result of checks that need one
WORK_FOLDER = CHECKOUT / "build" / "gpu-engines"  # of bundles; the report's folder is copied
KILL_SECONDS = 10  # to wait for a killed process; the driver may hold it while a kernel runs


@dataclass(frozen=True)
class Part:
    """One command. limit: its time limit in seconds. expected: its expected time. call: the number
    of the ten-minute call that it belongs to; 0 if every call needs it. writes: the JSON file that
    it writes. needs: a file that another part makes. min_left: seconds that must be left to start
    it."""

    name: str
    command: Sequence[object]
    limit: float
    gpu: bool = True
    writes: Path | None = None
    needs: Path | None = None
    min_left: float = 5
    expected: float = 0
    call: int = 0


def parts(out: Path, architecture: str) -> list[Part]:
    """All parts in order of importance, because the end may be cut off."""
    only = ["--arch", architecture] if architecture else []  # without a GPU, compile for all
    quick, full = out / "kernel-quick.json", out / "kernel-gpu.json"
    first = [
        # The first part also reads torch's gigabytes from a cold disk.
        Part("smoke", KERNEL, 90, expected=10),
        Part(
            "kernel, quick", [*KERNEL, "--quick", "--times", quick], 90, writes=quick, expected=30
        ),
        *timed_pair_parts("1b+small", WORK_FOLDER, (220, 200), (135, 90)),
    ]
    second = [
        *timed_pair_parts("8b+1b", WORK_FOLDER, (300, 270), (210, 165), min_left=300),
        Part("kernel times", [*KERNEL, "--times", full], 180, writes=full, expected=95),
    ]
    third = [
        *bundled_pair_parts(WORK_FOLDER),
        Part("kernel tests", [*PYTHON, "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
                              "-k", "cuda", "-m", "not slow", f"--junitxml={out / 'kernel.xml'}",
                              *KERNEL_TESTS], 120, expected=60),
        *(Part(f"sanitizer: {tool}", [*SANITIZER, "--tool", tool, *KERNEL], 90, expected=20)
          for tool in ("memcheck", "racecheck", "synccheck")),
    ]  # fmt: skip
    return [
        Part("library", [*PYTHON, "plugins.tools.build"], 120, gpu=False, expected=10),
        Part("cubins", [*PYTHON, "plugins.tools.cubins", *only], 200, gpu=False, expected=15),
        *(
            replace(part, call=call)
            for call, chosen in enumerate((first, second, third), 1)
            for part in chosen
        ),
    ]


def timed_pair_parts(
    pair: str, parent: Path, limits: Sequence[float], expected: Sequence[float], *,
    device: str = "cuda", min_left: float = 60,
) -> list[Part]:  # fmt: skip
    """Parts that build a constructed pair without its weights, time it, and remove it.

    parent: folder for the pair and its report, which is also copied into the whole report. limits,
    expected: seconds for the build and for the times.
    """
    folder, bundle = parent / pair, parent / pair / "bundle" / "manifest.json"
    report, loop = (parent / f"{pair}-{what}.json" for what in ("times", "loop"))
    on_device = ["--device", device]
    return [
        Part(f"{pair}: build", [*ENGINES, "build", folder, "--pair", pair, *on_device], limits[0],
             min_left=min_left, expected=expected[0]),
        Part(f"{pair}: times", [*ENGINES, "times", folder, *on_device, "--json", report], limits[1],
             writes=report, needs=bundle, expected=expected[1]),
        # In a process of its own, which a loop that does not end is killed with.
        Part(f"{pair}: loop", [*ENGINES, "times", folder, *on_device, "--only", "loop", "--json",
             loop], 75, writes=loop, needs=bundle, expected=15),
        Part(f"{pair}: remove", ["rm", "-r", folder], 60, needs=folder, expected=5),
    ]  # fmt: skip


def bundled_pair_parts(parent: Path, *, device: str = "cuda") -> list[Part]:
    """Parts that build the bundled pair as `make engines` does, and compare it with ONNX Runtime on
    the CPU in float32. parent: see `timed_pair_parts`."""
    folder = parent / "bundled"
    target, graphs, reference = folder / "target", folder / "graphs", folder / "reference-graphs"
    models = ["--model", target, "--draft", folder / "draft"]
    export = [*PYTHON, "export", *models, "--cache", folder / "cache"]
    build = [*PYTHON, "engines", "--out"]
    compiled = ["--backend", "aotinductor", "--sm", "cpu" if device == "cpu" else ""]
    torch, config = ["--dtype", DTYPE, "--format", "torch"], target / "config.json"
    checked, loop = parent / "bundled-check.json", parent / "bundled-loop.json"
    check = [*ENGINES, "check", folder, "--device", device, "--json"]
    bundle = folder / "bundle" / "manifest.json"
    found = [
        Part("checkpoints", [*ENGINES, "checkpoints", folder], 60, expected=10),
        Part("export", [*export, *torch, "--out", graphs], 120, needs=config, expected=30),
        Part("build", [*build, folder / "bundle", "--graphs", graphs, *compiled], 200,
             needs=graphs / "pair.json", expected=60),
        Part("reference, export", [*export, "--out", reference], 120, needs=config, expected=30),
        Part("reference, build", [*build, folder / "reference", "--graphs", reference], 120,
             needs=reference / "pair.json", expected=20),
        Part("check", [*check, checked], 150, writes=checked, needs=bundle, expected=90),
        Part("loop", [*check, loop, "--only", "loop"], 75, writes=loop, needs=bundle, expected=20),
        Part("remove", ["rm", "-r", folder], 60, needs=folder, expected=5),
    ]  # fmt: skip
    return [replace(part, name=f"bundled: {part.name}") for part in found]


def run_part(part: Part, limit: float, log: TextIO) -> dict[str, Any]:
    """Run a part with a limit in seconds. Returns its outcome, {"status": "ok" | "failed" | "timed
    out" | "skipped", ...}."""
    command = [str(word) for word in part.command]
    if not shutil.which(command[0]):
        return {"status": "skipped", "reason": f"{command[0]} is not installed"}
    if part.needs and not part.needs.exists():
        return {"status": "skipped", "reason": f"there is no {part.needs.name}"}
    log.write(f"\n=== {part.name}: {' '.join(command)}\n")
    log.flush()
    begin = time.perf_counter()
    if part.writes:
        part.writes.unlink(missing_ok=True)
    # In its own session, so that its child processes are killed with it.
    process = subprocess.Popen(
        command, cwd=CHECKOUT, stdout=log, stderr=subprocess.STDOUT,
        env={**os.environ, **ENVIRONMENT}, start_new_session=True,
    )  # fmt: skip
    try:
        status = process.wait(limit)
        outcome: dict[str, Any] = {"status": "ok"}
        if status:
            outcome = {"status": "failed", "exit": status}
    except subprocess.TimeoutExpired:
        outcome = {"status": "timed out", "limit_s": limit}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)
    outcome["seconds"] = round(time.perf_counter() - begin, 1)
    if part.writes and part.writes.is_file():
        try:
            outcome["result"] = json.loads(part.writes.read_text())
        except ValueError as error:
            outcome |= {"status": "failed", "reason": f"{part.writes.name}: {first_line(error)}"}
    return outcome


def run_parts(
    out: Path,
    seconds: float,
    make_parts: Callable[[Path, str], list[Part]] = parts,
    call: int | None = None,
) -> tuple[dict[str, Any], bool]:
    """Run the parts; returns the report, and whether nothing failed. seconds: limit for all parts
    together. call: run only the parts of this call, and those that every call needs. The report and
    the log are `out`/`name_of(call)`.json and .log."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + seconds
    architecture, no_gpu = find_gpu()
    report: dict[str, Any] = {
        "machine": machine.describe(os.cpu_count() or 1), "gpu": architecture or None,
        "card": query_card(), "parts": {},
    }  # fmt: skip
    path = out / f"{name_of(call)}.json"
    with path.with_suffix(".log").open("w") as log:
        for part in make_parts(out, architecture):
            if part.call and call not in (None, part.call):
                continue
            left = deadline - time.perf_counter()
            reason = no_gpu if part.gpu else None
            if reason is None and left < part.min_left:
                reason = f"only {left:.0f} of {seconds:.0f} s are left, too few to start"
            if reason is None:
                outcome = run_part(part, min(part.limit, left), log)
            else:
                outcome = {"status": "skipped", "reason": reason}
            report["parts"][part.name] = outcome
            more = outcome.get("reason") or f"{outcome['seconds']:.0f} s"
            print(f"{part.name}: {outcome['status']} ({more})", flush=True)
            save_report(path, report)
    report["card_at_the_end"] = query_card()
    save_report(path, report)
    failed = {"failed", "timed out"}
    return report, not any(o["status"] in failed for o in report["parts"].values())


def name_of(call: int | None) -> str:
    """The name of a call's report: calls into the same folder must keep each other's figures."""
    return f"gpu-check-{call}" if call else "gpu-check"


def describe_calls(out: Path) -> list[str]:
    """Each call's command, its parts, their usual times and their limits, as lines."""
    lines = []
    every = parts(out, "sm_90")
    for call in (1, 2, 3):
        chosen = [part for part in every if part.call in (0, call)]
        expected = sum(part.expected for part in chosen)
        lines.append(
            f"make gpu-check CALL={call}    # about {expected:.0f} s; "
            f"writes {name_of(call)}.json and .log after each part"
        )
        for part in chosen:
            writes = f", {part.writes.name}" if part.writes else ""
            least = f", needs {part.min_left:.0f} s left to start" if part.min_left > 5 else ""
            name, limit = part.name, part.limit
            lines.append(f"  {name:<28} {part.expected:4.0f} s, at most {limit:.0f}{least}{writes}")
    return [
        *lines,
        "Later calls on the same machine have the library and the cubins. If the machine is lent",
        "for a limited time, give the next call what is left of it: GPU_SECONDS=<seconds>.",
    ]


def find_gpu() -> tuple[str, str | None]:
    """(architecture such as sm_90, None), or ("", the reason why there is no GPU).

    Only the driver decides. If anything else is missing on a machine with a GPU, that is a failure
    and not a reason to skip parts.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "", "there is no CUDA driver"
    device, value = ctypes.c_int(), ctypes.c_int()
    if status := driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return "", f"there is no GPU: the driver returned {status}"
    architecture = "sm_"
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        architecture += str(value.value)
    return architecture, None


CARD = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem",
        "power.limit", "temperature.gpu", "pstate")  # fmt: skip


def query_card() -> dict[str, str] | None:
    """Properties of the card, because calls may run on different cards, and clocks change."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(CARD)}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = found.stdout.strip().split(", ")
    if found.returncode or len(values) != len(CARD):
        return {"nvidia-smi": first_line(OSError(found.stdout + found.stderr))}
    return dict(zip(CARD, values, strict=True))


def goal(value: float, limit: float, *, at_least: bool = False) -> dict[str, Any]:
    """A goal for the GPU: a value that should be at most, or at least, `limit`."""
    met = value >= limit if at_least else value <= limit
    return {"value": round(value, 4), "limit": limit, "met": met}


def save_report(path: Path, report: dict[str, Any]) -> None:
    """Write the report atomically, so that later failures do not lose it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as new:
        new.write_text(json.dumps(report, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = CommandParser(prog="python -m bench gpu", description=__doc__)
    add = parser.add_argument
    place = CHECKOUT / "build" / "gpu-check"
    add("--out", type=Path, default=place, metavar="DIR",
        help="output folder (default: build/gpu-check)")  # fmt: skip
    add("--seconds", type=positive_int, default=540,
        help="time limit for all parts together (default: 540)")  # fmt: skip
    add("--call", type=int, choices=(1, 2, 3), help="run only the parts of this call")
    add("--dry", action="store_true", help="print what each call would do, and exit")

    def command() -> int:
        arguments = parser.parse_args(argv)
        out = arguments.out.resolve()
        if arguments.dry:
            print("\n".join(describe_calls(out)))
            return 0
        _, good = run_parts(out, arguments.seconds, call=arguments.call)
        print(arguments.out / f"{name_of(arguments.call)}.json")
        return 0 if good else 1

    return run_command(command)
