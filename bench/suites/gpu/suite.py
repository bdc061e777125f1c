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

The pairs can be compiled before, on a machine without a GPU: PREPARE=90 does so for GPUs of compute
capability 9.0, and packs them into build/gpu-prepared. On the machine with the GPU, calls that find
them there build nothing, if it has the same version of PyTorch. GPU_SECONDS limits a call.

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
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from engines.aotinductor.absent_gpu import GPUS
from runtime.files.errors import CommandParser, OutriderError, first_line, positive_int, run_command
from runtime.files.folders import replacing

from ...core import machine
from ...core.machine import CHECKOUT
from .parts import PREPARED, Part, parts, preparing_parts

ENVIRONMENT = {
    # As much information on failures as possible: the machine may not be available again.
    "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "OUTRIDER_TRACEBACK": "1",
    # Container images may lack compiled modules and set this. Compiling Transformers' takes 16
    # seconds, which only the first part should spend.
    "PYTHONDONTWRITEBYTECODE": "",
}  # fmt: skip
NO_GPU: dict[str, Any] = {"passed": None, "reason": "no GPU"}  # result of checks that need one
KILL_SECONDS = 10  # to wait for a killed process; the driver may hold it while a kernel runs


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
    add("--prepare", metavar="SM", type=int, choices=[sm for sm in GPUS if sm >= 80],
        help="compile all pairs for GPUs of this compute capability, such as 90, and pack them; "
             "needs no GPU")  # fmt: skip
    add("--dry", action="store_true", help="print what each call would do, and exit")

    def command() -> int:
        arguments = parser.parse_args(argv)
        out = arguments.out.resolve()
        if arguments.prepare:
            others = ("call", "dry", "out", "seconds")
            if any(getattr(arguments, n) != parser.get_default(n) for n in others):
                cause = "--prepare (PREPARE) was given with other options, which do not concern it"
                raise OutriderError("option", cause, "Leave them out.")
            chosen = preparing_parts(f"sm_{arguments.prepare}")
            _, good = run_parts(PREPARED, sum(part.limit for part in chosen), lambda *_: chosen)
            print(PREPARED)
            return 0 if good else 1
        if arguments.dry:
            print("\n".join(describe_calls(out)))
            return 0
        _, good = run_parts(out, arguments.seconds, call=arguments.call)
        print(arguments.out / f"{name_of(arguments.call)}.json")
        return 0 if good else 1

    return run_command(command)
