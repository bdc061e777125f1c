"""The GPUs of this machine, as its driver's tool lists them."""

from __future__ import annotations

import subprocess


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
