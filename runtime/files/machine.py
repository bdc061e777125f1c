"""Which processor this is, since bits that were measured are those of one; and its memory."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

# What tells processors apart, in /proc/cpuinfo of x86 and ARM: its clock and its cores do not.
_KEYS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags",
         "CPU implementer", "CPU variant", "CPU part", "Features")  # fmt: skip


def processor() -> str:
    """Its name, and a hash of that and of the instructions that it knows."""
    try:
        block = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        block = ""
    pairs = (line.partition(":") for line in block.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in pairs if key.strip() in _KEYS}
    name = facts.get("model name") or facts.get("CPU part") or platform.processor()
    digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()[:8]
    return f"{platform.machine()} {name} {digest}"


def host_memory() -> int:
    """Bytes of memory that this machine has; 0 where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
