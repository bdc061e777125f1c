"""The machine: its description, its memory bandwidth, the memory of a process."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from runtime.files.machine import host_memory

CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("numpy", "onnxruntime", "tokenizers", "torch", "transformers")
READ_BYTES = 1 << 29  # so that each thread's share is much larger than its caches


def describe(threads: int) -> dict[str, Any]:
    """A description of the machine, without host name or paths, because it is published."""
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    versions = {package: installed.get(package, "missing") for package in PACKAGES}
    return {
        "cpu": _cpu_name(), "cores": physical_cores(), "threads": threads,
        "memory_gib": round(host_memory() / 2**30, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
    }  # fmt: skip


def summary_line(description: dict[str, Any]) -> str:
    """Date, threads and CPU, from the result of `describe`."""
    return f"{description['date']}, {description['threads']} threads of {description['cpu']}"


def physical_cores() -> int:
    """Number of cores that this process may use; the hyper-threads of a core count as one."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    return len(cores)


def _cpu_name() -> str:
    # A virtual machine may hide the model's name; family and model number identify it.
    info = dict(re.findall(r"(.*?)\t*: (.*)", Path("/proc/cpuinfo").read_text()))
    name = info.get("model name", platform.machine())
    return f"{name} (family {info.get('cpu family', '?')}, model {info.get('model', '?')})"


class MemoryReader:
    """Reads an array much larger than the caches, one slice per thread, and writes nothing.

    A decoding step accesses memory in the same way. numpy's maximum uses vector registers and
    releases the interpreter lock, so the threads only wait for memory.
    """

    def __init__(self, threads: int, size: int = READ_BYTES):
        self.bytes = size
        self._slices = np.array_split(np.ones(size // 4, np.float32), threads)
        self._pool = ThreadPoolExecutor(threads)
        self._best = float("inf")

    def __call__(self) -> None:
        begin = time.perf_counter()
        # max instead of sum: float32 sums are pairwise, which adds arithmetic.
        list(self._pool.map(np.max, self._slices))
        self._best = min(self._best, time.perf_counter() - begin)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the fastest pass so far, because floors need the best case."""
        return self.bytes / self._best


def resident_memory() -> tuple[int, int]:
    """The current and the peak resident memory of this process, in bytes."""
    found = re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())
    sizes = {name: 1024 * int(size) for name, size in found}
    return sizes["VmRSS"], sizes["VmHWM"]
