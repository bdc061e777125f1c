"""The GPUs of this machine, as listed by nvidia-smi, and the CUDA toolkit."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

# On PyPI the toolkit is split into packages: torch installs the first header, but not the ones
# that it includes.
HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h", "nv/target")
CCCL = "cccl"  # the folder within include/ where CUDA 13 has the last one


def present_gpus() -> dict[int, int]:
    """The GPUs by compute capability (89 for 8.9): memory in bytes, of the smallest one of each."""
    command = [
        "nvidia-smi", "--query-gpu=compute_cap,memory.total", "--format=csv,noheader,nounits"
    ]  # fmt: skip
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    gpus: dict[int, int] = {}
    for line in output.splitlines():
        capability, _, mebibytes = line.partition(",")
        digits, size = capability.strip().replace(".", ""), mebibytes.strip()
        if digits.isdecimal():
            total = int(size) * 2**20 if size.isdecimal() else 0  # some share the host's memory
            gpus[int(digits)] = min(gpus.get(int(digits), total), total)
    return gpus


def cuda_toolkit(preferred: str | None) -> str | None:
    """The folder of a toolkit that has all `HEADERS`: `preferred` if it has them, otherwise the
    first that is found."""
    nvidia = find_spec("nvidia")
    packages = nvidia.submodule_search_locations if nvidia else None
    homes = [preferred, _home_of_nvcc(), "/usr/local/cuda"]
    homes += [str(home) for place in packages or () for home in Path(place).glob("cu*")]
    return next((home for home in homes if home and _has_headers(Path(home, "include"))), None)


def _has_headers(folder: Path) -> bool:
    return all((folder / name).is_file() or (folder / CCCL / name).is_file() for name in HEADERS)


def _home_of_nvcc() -> str | None:
    """The toolkit that nvcc itself reports: the nvcc on the PATH may be a wrapper script."""
    command = ["nvcc", "--dryrun", "-E", "-x", "cu", "/dev/null"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = output.splitlines()
    homes = [line.removeprefix("#$ TOP=") for line in lines if line.startswith("#$ TOP=")]
    return str(Path(homes[0]).resolve()) if homes else None
