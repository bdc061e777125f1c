"""Random calls of the C interface under sanitizers: no fault, and every guarantee is kept."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from samplers import LIBRARIES

from plugins.tools.build import PLUGINS_FOLDER, BuildError, build_fuzz

SANITIZERS = {
    "address,undefined": ["-fsanitize=address,undefined,float-divide-by-zero,float-cast-overflow"],
    "thread": ["-fsanitize=thread"],
}
ROUNDS = {"address,undefined": "1500", "thread": "500"}


def fuzz(sanitizer, seed, folder=LIBRARIES, sources=PLUGINS_FOLDER):
    flags = [*SANITIZERS[sanitizer], "-fno-sanitize-recover=all", "-O1", "-g"]
    flags += ["-DOUTRIDER_LOGITS_PER_THREAD=1"]  # or such small rounds would use only one thread
    try:
        program = build_fuzz(folder, sources, flags)
    except BuildError as error:
        pytest.skip(f"no sanitizer here: {error}")
    command = [program, ROUNDS[sanitizer], str(seed)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_no_fault_and_no_broken_promise(sanitizer):
    for seed in range(3):
        done = fuzz(sanitizer, seed)
        assert done.returncode == 0, done.stderr[-3000:]
        # Both kinds of calls occurred: completed rounds and refused calls.
        accepted, refused = re.findall(r"\d+", done.stdout)[1:]
        assert int(accepted) > 100 and int(refused) > 20


FAULTS = {
    "a tile read past its end": (
        "address,undefined", "core/outrider_row.h", "count(k) == TILE", "true",
        "Sanitizer|runtime error",
    ),
    "an id out of range": (
        "address,undefined", "core/outrider_round.h", "if (!p_row_.has(token)) return;", "",
        "Sanitizer|runtime error",
    ),
    "threads that share a workspace": (
        "thread", "cpu/outrider_cpu.cpp", "static_cast<size_t>(thread) * size",
        "0 * size * static_cast<size_t>(thread)", "data race",
    ),
}  # fmt: skip


def mutated(folder, name, old, new):
    """A copy of plugins/ in this folder, with the only occurrence of `old` in a file replaced."""
    sources = folder / "sources"
    shutil.copytree(PLUGINS_FOLDER, sources, ignore=shutil.ignore_patterns("__pycache__"))
    text = (sources / name).read_text()
    assert text.count(old) == 1, f"{name} holds {text.count(old)} times: {old}"
    (sources / name).write_text(text.replace(old, new))
    return sources


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizer", "name", "old", "new", "pattern"), FAULTS.values(), ids=FAULTS
)
def test_faults_are_found(tmp_path, sanitizer, name, old, new, pattern):
    done = fuzz(sanitizer, 0, tmp_path, mutated(tmp_path, name, old, new))
    assert done.returncode != 0 and re.search(pattern, done.stderr), done.stderr[-2000:]
