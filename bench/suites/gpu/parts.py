"""The parts of make gpu-check: their commands, limits and order."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

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
WORK_FOLDER = CHECKOUT / "build" / "gpu-engines"  # of bundles; the report's folder is copied
PREPARING_SECONDS = 1800  # limit of each part; on two cores, a pair of 8 B takes three minutes
PREPARED = CHECKOUT / "build" / "gpu-prepared"  # of packed pairs


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
        *pair_parts("1b+small", architecture, 135),
        *times_parts("1b+small", WORK_FOLDER, 200, 90),
    ]
    second = [
        *pair_parts("8b+1b", architecture, 210, min_left=300),
        *times_parts("8b+1b", WORK_FOLDER, 270, 165),
        Part("kernel times", [*KERNEL, "--times", full], 180, writes=full, expected=70),
    ]
    third = [
        *pair_parts("bundled", architecture, 120),
        *check_parts(WORK_FOLDER),
        Part("kernel tests", [*PYTHON, "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
                              "-k", "cuda", "-m", "not slow", f"--junitxml={out / 'kernel.xml'}",
                              *KERNEL_TESTS], 120, expected=60),
        *(Part(f"sanitizer: {tool}", [*SANITIZER, "--tool", tool, *KERNEL], 90, expected=20)
          for tool in ("memcheck", "racecheck", "synccheck")),
    ]  # fmt: skip
    return [
        *library_parts(only),
        *(
            replace(part, call=call)
            for call, chosen in enumerate((first, second, third), 1)
            for part in chosen
        ),
    ]


def library_parts(only: Sequence[str]) -> list[Part]:
    return [
        Part("library", [*PYTHON, "plugins.tools.build"], 120, gpu=False, expected=10),
        Part("cubins", [*PYTHON, "plugins.tools.cubins", *only], 200, gpu=False, expected=15),
    ]


def prepared(pair: str, architecture: str) -> Path:
    """The archive of a pair that was compiled before, from these sources. Its code needs that
    version of PyTorch."""
    version = ""
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("torch").partition("+")[0]
    digest = hashlib.sha256()
    for room in ("export", "engines", "bench/suites/gpu"):
        for path in sorted((CHECKOUT / room).rglob("*.py")):
            digest.update(path.read_bytes())
    name = f"{pair}-{architecture}-torch-{version}-{digest.hexdigest()[:8]}.tar.gz"
    return PREPARED / name


def pair_parts(
    pair: str, architecture: str, expected: float, *, min_left: float = 60
) -> list[Part]:
    """Parts that unpack a pair if it is prepared, and build it otherwise, into `WORK_FOLDER`."""
    archive = prepared(pair, architecture)
    if not archive.is_file():
        return build_parts(pair, WORK_FOLDER, "", expected, min_left=min_left)
    # What an archive that is cut off leaves must not be measured.
    script = (
        'rm -rf "$1/$2" && mkdir -p "$1" && tar -xzSf "$0" -C "$1" || { rm -rf "$1/$2"; false; }'
    )
    unpack = ["sh", "-c", script, archive, WORK_FOLDER, pair]
    return [Part(f"{pair}: unpack", unpack, 60, min_left=60, expected=5)]


def preparing_parts(architecture: str) -> list[Part]:
    """Parts that compile the library, the kernels and all pairs for an architecture and pack them.
    They need no GPU."""
    found = library_parts(["--arch", architecture])
    for pair in ("1b+small", "8b+1b", "bundled"):
        contents = ["bundle", "target", "draft", *(["reference"] if pair == "bundled" else [])]
        script = 'tar -czSf "$0.part" -C "$@" && mv "$0.part" "$0"'
        pack = ["sh", "-c", script, prepared(pair, architecture), WORK_FOLDER]
        folder = WORK_FOLDER / pair
        found += [
            Part(f"{pair}: remove what is old", ["rm", "-rf", folder], 60),
            *build_parts(pair, WORK_FOLDER, architecture.removeprefix("sm_"), 300),
            Part(
                f"{pair}: pack", [*pack, *(f"{pair}/{name}" for name in contents)], 120,
                needs=folder / "bundle" / "manifest.json",
            ),
            remove_part(pair, WORK_FOLDER),
        ]  # fmt: skip
    return [replace(part, gpu=False, limit=PREPARING_SECONDS) for part in found]


def build_parts(
    pair: str, parent: Path, sm: str, expected: float, *, min_left: float = 60
) -> list[Part]:
    """Parts that build a pair into a folder of `parent`: a constructed one without its weights; the
    bundled one as `make engines` does, and also for ONNX Runtime on the CPU in float32.

    sm: as in `make engines`. expected: seconds that all take.
    """
    folder = parent / pair
    if pair != "bundled":
        command = [*ENGINES, "build", folder, "--pair", pair, "--sm", sm]
        return [Part(f"{pair}: build", command, 300, min_left=min_left, expected=expected)]
    target, graphs, reference = folder / "target", folder / "graphs", folder / "reference-graphs"
    models = ["--model", target, "--draft", folder / "draft"]
    export = [*PYTHON, "export", *models, "--cache", folder / "cache"]
    build = [*PYTHON, "engines", "--out"]
    compiled = ["--backend", "aotinductor", "--sm", sm]
    torch, config = ["--dtype", DTYPE, "--format", "torch"], target / "config.json"
    found = [
        Part("checkpoints", [*ENGINES, "checkpoints", folder], 60),
        Part("export", [*export, *torch, "--out", graphs], 120, needs=config),
        Part("build", [*build, folder / "bundle", "--graphs", graphs, *compiled], 200,
             needs=graphs / "pair.json"),
        Part("reference, export", [*export, "--out", reference], 120, needs=config),
        Part("reference, build", [*build, folder / "reference", "--graphs", reference], 120,
             needs=reference / "pair.json"),
    ]  # fmt: skip
    return [replace(p, name=f"bundled: {p.name}", expected=expected / len(found)) for p in found]


def times_parts(
    pair: str, parent: Path, limit: float, expected: float, *, device: str = "cuda"
) -> list[Part]:
    """Parts that time a constructed pair and remove it. parent: folder for its report, which is
    also copied into the whole report. limit, expected: seconds for the times."""
    folder, bundle = parent / pair, parent / pair / "bundle" / "manifest.json"
    report = parent / f"{pair}-times.json"
    times = [*ENGINES, "times", folder, "--device", device, "--json"]
    return [
        Part(f"{pair}: times", [*times, report], limit, writes=report, needs=bundle,
             expected=expected),
        remove_part(pair, parent),
    ]  # fmt: skip


def check_parts(parent: Path, *, device: str = "cuda") -> list[Part]:
    """Parts that compare the bundled pair with its reference and remove it. parent: see
    `times_parts`."""
    folder = parent / "bundled"
    bundle = folder / "bundle" / "manifest.json"
    checked = parent / "bundled-check.json"
    check = [*ENGINES, "check", folder, "--device", device, "--json"]
    return [
        Part("bundled: check", [*check, checked], 150, writes=checked, needs=bundle, expected=90),
        remove_part("bundled", parent),
    ]  # fmt: skip


def remove_part(pair: str, parent: Path) -> Part:
    return Part(f"{pair}: remove", ["rm", "-r", parent / pair], 60, needs=parent / pair, expected=5)
