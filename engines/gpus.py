"""The GPUs of this machine, as its driver's tool lists them, and CUDA's toolkit."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

# PyPI's packages come in pieces: torch brings the first, and not those that it includes.
HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h", "nv/target")


def present_gpus() -> dict[int, int]:
    """By compute capability, 89 for 8.9, the bytes of memory of the smallest such GPU."""
    command = [
        "nvidia-smi", "--query-gpu=compute_cap,memory.total", "--format=csv,noheader,nounits"
    ]  # fmt: skip
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[int, int] = {}
    for line in listed.splitlines():
        capability, _, mebibytes = line.partition(",")
        digits, size = capability.strip().replace(".", ""), mebibytes.strip()
        if digits.isdecimal():
            total = int(size) * 2**20 if size.isdecimal() else 0  # some share the host's memory
            found[int(digits)] = min(found.get(int(digits), total), total)
    return found


def cuda_toolkit(named: str | None) -> str | None:
    """The folder of a toolkit that has `HEADERS`: `named`, where it does."""
    nvidia = find_spec("nvidia")
    packages = nvidia.submodule_search_locations if nvidia else None
    homes = [named, _home_of_nvcc(), "/usr/local/cuda"]
    homes += [str(home) for place in packages or () for home in Path(place).glob("cu*")]
    return next((home for home in homes if home and _has_headers(Path(home, "include"))), None)


def _has_headers(folder: Path) -> bool:
    return all((folder / name).is_file() for name in HEADERS)


def _home_of_nvcc() -> str | None:
    """As it says itself: what the PATH has may be a script that starts another."""
    command = ["nvcc", "--dryrun", "-E", "-x", "cu", "/dev/null"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = said.splitlines()
    homes = [line.removeprefix("#$ TOP=") for line in lines if line.startswith("#$ TOP=")]
    return str(Path(homes[0]).resolve()) if homes else None
