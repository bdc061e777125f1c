"""Compile the CUDA kernels: `python -m plugins.tools.cubins [--out build/cuda] [--arch sm_90 ...]`.

Uses NVRTC, so no toolkit, driver or GPU is needed: `pip install nvidia-cuda-nvrtc` suffices, which
PyTorch's CUDA builds also install. Produces one cubin per architecture, and PTX for other GPUs.
Prints each kernel's registers, spilled bytes, shared memory and stack, and writes them to a file.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .build import (
    PLUGINS_FOLDER,
    BuildError,
    exit_status,
    headers,
    include_options,
    write_atomically,
)

SOURCE = PLUGINS_FOLDER / "cuda" / "outrider_cuda.cu"
# A cubin also runs on later minor versions of its architecture's major version. PTX is for other
# major versions: the oldest one, since all newer GPUs run it and no kernel needs newer features.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "compute_80")
OPTIONS = [
    "--std=c++17",
    "--device-as-default-execution-space",  # the headers are also compiled for the host
    # For reproducible bits: fuse operations only where the source does.
    "--fmad=false",
    "--ptxas-options=-v",
]
# Bytes of register spill stores that a kernel may have: few, outside the loops over tiles.
SPILL_LIMIT = 64
RESOURCES = ("registers", "spill_stores", "spill_loads", "shared", "stack")
KernelResources = dict[str, dict[str, int]]  # by kernel and RESOURCES


# --- NVRTC ------------------------------------------------------------------------------------


class Nvrtc:
    """The NVRTC library, through its C interface. Raises BuildError if there is none."""

    def __init__(self) -> None:
        for candidate in _candidate_libraries():
            try:
                # NVRTC opens its builtins by bare name, which finds them only if loaded already.
                for builtins in sorted(candidate.parent.glob("libnvrtc-builtins.so*")):
                    ctypes.CDLL(str(builtins))
                self._library = ctypes.CDLL(str(candidate))
                break
            except OSError:
                continue
        else:
            raise BuildError(
                "NVRTC was not found. Install it: pip install nvidia-cuda-nvrtc, or set CUDA_HOME."
            )
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: Path, architecture: str) -> tuple[bytes, str]:
        """Compile for an architecture; returns (cubin or PTX, ptxas's log). Raises BuildError."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.read_bytes(),
            source.name.encode(), 0, None, None,
        )  # fmt: skip
        try:
            options = [*OPTIONS, f"--gpu-architecture={architecture}", *include_options()]
            encoded = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            failed = self._library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if failed:
                raise BuildError(
                    f"{source.name} does not compile for {architecture} with NVRTC {self.version}. "
                    f"Its log:\n{log}"
                )
            return self._read("PTX" if _is_ptx(architecture) else "CUBIN", program), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._library, name)(*arguments):
            text = self._library.nvrtcGetErrorString(error).decode()
            raise BuildError(f"{name} failed: {text}. Reinstall nvidia-cuda-nvrtc.")


def _candidate_libraries() -> list[Path]:
    """Candidate paths of NVRTC: PyPI packages, newest first, then a toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(f) for f in spec.submodule_search_locations or ()] if spec else []
    found = [p for f in folders for p in f.glob("*/lib/libnvrtc.so.*")]
    found.sort(key=lambda path: int(path.suffix[1:]), reverse=True)
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if nvcc := shutil.which("nvcc"):
        homes.append(Path(nvcc).resolve().parents[1])
    found += [p for home in homes for p in sorted(home.glob("lib*/libnvrtc.so"))]
    if name := ctypes.util.find_library("nvrtc"):
        found.append(Path(name))
    return found


@cache
def nvrtc() -> Nvrtc:
    return Nvrtc()


def _is_ptx(architecture: str) -> bool:
    return architecture.startswith("compute_")


# --- outputs ----------------------------------------------------------------------------------


def build(
    out: Path,
    architectures: Sequence[str] = ARCHITECTURES,
    source: Path = SOURCE,
    name: str = "outrider",
) -> dict[str, Path]:
    """Compile for each architecture: `out`/<name>_sm_90.cubin, <name>_compute_80.ptx and so on.

    Recompiles only if sources, options or NVRTC have changed. `out`/<name>.json contains, by
    architecture, a digest of those and the kernels' resources. Returns the files by architecture.
    Raises BuildError, also for too many spills.
    """
    compiler = nvrtc()
    digest = hashlib.sha256(repr((compiler.version, OPTIONS)).encode())
    for path in sorted((source, *headers())):
        digest.update(path.name.encode() + path.read_bytes())
    current_digest = digest.hexdigest()[:16]
    record = read_record(out, name)
    made: dict[str, Path] = {}
    for architecture in architectures:
        suffix = ".ptx" if _is_ptx(architecture) else ".cubin"
        made[architecture] = path = out / f"{name}_{architecture}{suffix}"
        if path.is_file() and record.get(architecture, {}).get("digest") == current_digest:
            continue
        print(f"compile {source.name} for {architecture}", file=sys.stderr)
        code, log = compiler.compile(source, architecture)
        resources = parse_log(log)
        write_atomically(path, code)
        # Read again: another process may have compiled other architectures meanwhile.
        record = read_record(out, name)
        record[architecture] = {"digest": current_digest, "kernels": resources}
        write_atomically(
            out / f"{name}.json", json.dumps(record, indent=1, sort_keys=True).encode()
        )
    for architecture in architectures:
        for kernel, used in record[architecture]["kernels"].items():
            if used["spill_stores"] > SPILL_LIMIT:
                raise BuildError(
                    f"{kernel} spills {used['spill_stores']} bytes on {architecture}, more than "
                    f"{SPILL_LIMIT}. Give it more registers (__launch_bounds__)."
                )
    return made


def read_record(out: Path, name: str = "outrider") -> dict[str, Any]:
    """The contents of `out`/<name>.json, or an empty record."""
    try:
        record: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    return record


def parse_log(log: str) -> KernelResources:
    """Each kernel's resources, from ptxas's log, including the spills of functions it calls."""
    kernels: KernelResources = {}
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            kernels[entry[1]] = dict.fromkeys(RESOURCES, 0)
        if not kernels:
            continue
        resources = kernels[list(kernels)[-1]]
        if spilt := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            resources["spill_stores"] += int(spilt[1])
            resources["spill_loads"] += int(spilt[2])
        if used := re.search(r"Used (\d+) registers", line):
            resources["registers"] = int(used[1])
            for key, pattern in (("shared", r"(\d+) bytes smem"), ("stack", r"(\d+) bytes cumul")):
                if found := re.search(pattern, line):
                    resources[key] = int(found[1])
    return kernels


def resource_table(record: dict[str, Any], architectures: Sequence[str]) -> str:
    """A table kernel x architecture of registers/spill stores/spill loads/shared memory/stack."""
    columns = [a for a in architectures if record.get(a, {}).get("kernels")]
    names = sorted({name for a in columns for name in record[a]["kernels"]})
    cells = [["registers/stores/loads/shared/stack", *columns]]
    for name in names:
        resources = (record[a]["kernels"].get(name) for a in columns)
        cells.append(
            [name, *("/".join(str(n[k]) for k in RESOURCES) if n else "" for n in resources)]
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels with NVRTC.")
    parser.add_argument("--out", type=Path, default=PLUGINS_FOLDER.parent / "build" / "cuda")
    parser.add_argument(
        "--arch", nargs="+", default=ARCHITECTURES, metavar="sm_90",
        help="architectures to compile for (default: all)",
    )  # fmt: skip
    arguments = parser.parse_args()

    def work() -> None:
        made = build(arguments.out, arguments.arch)
        print(resource_table(read_record(arguments.out), arguments.arch))
        print(*made.values(), sep="\n")

    return exit_status(work)


if __name__ == "__main__":
    sys.exit(main())
