"""The machine: what it is, how fast it reads memory, how much of that a process holds."""

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
READ_BYTES = 1 << 29  # for each thread's share to be far beyond any cache of its own


def describe(threads: int) -> dict[str, Any]:
    """No host name, no path: this goes into public text."""
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    versions = {package: installed.get(package, "missing") for package in PACKAGES}
    return {
        "cpu": _cpu_name(), "cores": physical_cores(), "threads": threads,
        "memory_gib": round(host_memory() / 2**30, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
    }  # fmt: skip


def sentence(about: dict[str, Any]) -> str:
    """When and where, of what `describe` gave."""
    return f"{about['date']}, {about['threads']} threads of {about['cpu']}"


def physical_cores() -> int:
    """Cores that this process may use; the hyper-threads of a core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    return len(cores)


def _cpu_name() -> str:
    # A virtual machine may hide the model's name; its family and model number tell.
    info = dict(re.findall(r"(.*?)\t*: (.*)", Path("/proc/cpuinfo").read_text()))
    name = info.get("model name", platform.machine())
    return f"{name} (family {info.get('cpu family', '?')}, model {info.get('model', '?')})"


class MemoryReader:
    """Reads an array far larger than the caches, one slice a thread, and writes nothing.

    That is what a decoding step does to memory. numpy's maximum runs in vector registers and gives
    the interpreter's lock back, so the threads only wait for memory.
    """

    def __init__(self, threads: int, size: int = READ_BYTES):
        self.bytes = size
        self._slices = np.array_split(np.ones(size // 4, np.float32), threads)
        self._pool = ThreadPoolExecutor(threads)
        self._best = float("inf")

    def __call__(self) -> None:
        begin = time.perf_counter()
        # max, not sum: sums of float32 are pairwise, which is arithmetic on top.
        list(self._pool.map(np.max, self._slices))
        self._best = min(self._best, time.perf_counter() - begin)

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the fastest pass so far: a floor wants the best that there is."""
        return self.bytes / self._best


def resident() -> tuple[int, int]:
    """Bytes of this process: what it holds, and the most that it has held."""
    found = re.findall(r"(\w+):\s+(\d+) kB", Path("/proc/self/status").read_text())
    sizes = {name: 1024 * int(size) for name, size in found}
    return sizes["VmRSS"], sizes["VmHWM"]
