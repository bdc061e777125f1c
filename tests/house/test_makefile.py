"""Variables given to make reach commands unchanged; invalid requests are refused before any work.

The Makefile runs in a separate folder, where the environment's Python only records its arguments.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CHECKOUT

RECORDER = f"""#!{sys.executable} -IS
import json, os, sys
with open(os.environ["NOTED"], "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if "--supports" in sys.argv:
    print("full int8")
    sys.exit(int(os.environ.get("FAILS", 0)))
"""
HOSTILE = """it's "a" $(touch pwned) $HOME `touch pwned` ${x} \\ * ; touch pwned"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(CHECKOUT / "Makefile", tmp_path)
    for name in ("constraints.txt", "pyproject.toml", ".venv/stamp"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)
    return tmp_path


def make(folder: Path, *arguments: str, **environment: str) -> tuple[int, list[list[str]], str]:
    """Exit status, the arguments of each command except the kernel's build, and stderr."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    process = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        env={**kept, "NOTED": str(folder / "noted"), **environment},
        capture_output=True,
        text=True,
    )
    lines = (folder / "noted").read_text().splitlines() if (folder / "noted").exists() else []
    (folder / "noted").unlink(missing_ok=True)
    ran = [json.loads(line) for line in lines]
    return process.returncode, [r for r in ran if "plugins.tools.build" not in r], process.stderr


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_what_is_given_is_not_looked_into(checkout: Path, how: str) -> None:
    """The only test that detects a variable spliced into shell code."""

    def given(name: str, target: str) -> list[list[str]]:
        if how == "argument":
            status, ran, err = make(checkout, target, f"{name}={HOSTILE}")
        else:
            status, ran, err = make(checkout, target, **{name: HOSTILE})
        assert status == 0, err
        assert not (checkout / "pwned").exists()
        return ran

    assert f"--prompt={HOSTILE}" in given("PROMPT", "demo")[-2]
    assert f"--engines={HOSTILE}" in given("ENGINES", "report")[0]
    assert f"--out={HOSTILE}" in given("GPU_OUT", "gpu-check")[0]
    _, export, _ = given("MODEL", "engines")
    assert f"--model={HOSTILE}" in export


def test_engines_runs_its_three_commands(checkout: Path) -> None:
    options = ("MODEL=a/b", "DRAFT=c", "SM=80", "BACKEND=aotinductor", "MAX_LEN=64", "FORCE=1")
    status, (supports, export, build), _ = make(checkout, "engines", *options)
    assert status == 0
    same = ["-m", "engines", "--out=build/b", "--backend=aotinductor", "--slots=1", "--sm=80"]
    assert supports == [*same, "--supports", "float32", "full", "full"]
    assert export[:5] == ["-m", "export", "--model=a/b", "--draft=c", "--dtype=float32"]
    given = {"--format=torch", "--max-len=64", "--force", "--backend-runs=full int8"}
    assert given < set(export)
    graphs = next(a.removeprefix("--out=") for a in export if a.startswith("--out="))
    assert build == [*same, f"--graphs={graphs}", "--force"]
    _, (*_, unmeasured), _ = make(checkout, "engines", *options, "FORCE=0", "MEASURE=0")
    assert unmeasured == [*same, f"--graphs={graphs}", "--no-measure"]
    bits = ("WEIGHTS=int4", "DRAFT_WEIGHTS=full", "CACHE=int8", "TEXT=a b.txt")
    _, (supports, export, _), _ = make(checkout, "engines", *options, *bits)
    assert supports == [*same, "--supports", "float32", "int4", "full", "--cache-type=int8"]
    given = {"--weights=int4", "--draft-weights=full", "--cache-type=int8", "--text=a b.txt"}
    assert given < set(export)
    # Without OUT, for any spelling of MODEL.
    for model in ("a/b", "a/b/.", "a/../a/b/"):
        _, (*_, named), _ = make(checkout, "engines", f"MODEL={model}", "DRAFT=c")
        assert "--out=build/b" in named
    # The same graphs for any spelling of OUT, and other graphs for another OUT.
    for out, equal in (("build/../build/b", True), ("build/c", False)):
        _, (_, other, _), _ = make(checkout, "engines", *options, f"OUT={out}")
        assert (f"--out={graphs}" in other) == equal


def test_what_is_refused_is_refused_before_the_export(checkout: Path) -> None:
    """make itself exits with 2, and prints the command's status."""
    status, ran, err = make(checkout, "engines", "MODEL=m", FAILS="12")
    assert status == 2 and err.rstrip().endswith("Error 12")
    assert len(ran) == 1
    for wrong in (["MODEL="], ["MODEL=m", "FORCE=yes"], ["MODEL=m", "MEASURE=no"]):
        status, ran, err = make(checkout, "engines", *wrong)
        assert status == 2 and ran == []
        assert err.startswith("error: option: ")
