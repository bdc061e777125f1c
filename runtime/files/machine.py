"""Identifies the processor, because bitwise results are measured per processor; and its memory."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

# Fields of /proc/cpuinfo on x86 and ARM that identify a processor; clock and core do not.
_KEYS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags",
         "CPU implementer", "CPU variant", "CPU part", "Features")  # fmt: skip


def processor() -> str:
    """The processor's name, and a hash of the name and the instruction sets."""
    try:
        block = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        block = ""
    pairs = (line.partition(":") for line in block.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in pairs if key.strip() in _KEYS}
    name = facts.get("model name") or facts.get("CPU part") or ""
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]
    return f"{platform.machine()} {name} {digest}"


def host_memory() -> int:
    """Bytes of memory of this machine; 0 if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
