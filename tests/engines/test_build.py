"""Builds that cannot succeed are refused in one line, before minutes of work."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from commands import error_line
from rtx import needs_library
from workshop import MAX_LEN, Workshop

import engines.__main__
from engines import bundle as bundles
from engines.bundle import memory_plan
from runtime.files.errors import EXIT_STATUS
from runtime.files.graphs import PAIR_FILE, read_pair
from runtime.files.machine import host_memory
from runtime.files.manifest import FIRST_ROWS, MAX_SLOTS, read_bundle
from runtime.files.records import write_json


@pytest.fixture
def graphs(workshop: Workshop, tmp_path: Path) -> Path:
    """Graphs for longer texts: a graph does not fix the length."""
    folder = Path(shutil.copytree(workshop.graphs(*workshop.pair()), tmp_path / "graphs"))
    pair = read_pair(folder)
    long = {"max_len": 2048, "capacity": 2064}
    models = {role: dataclasses.replace(facts, **long) for role, facts in pair.models()}
    write_json(folder / PAIR_FILE, "pair", dataclasses.replace(pair, **long, **models))
    return folder


def refused(capsys: pytest.CaptureFixture[str], kind: str, *options: str) -> str:
    assert engines.__main__.main([*options]) == EXIT_STATUS[kind]
    err = capsys.readouterr().err
    error_line(err, kind)
    return err


def test_a_folder_whose_path_leads_through_a_missing_one(graphs: Path, tmp_path: Path) -> None:
    """Fault: an error after the bundle was written, whose files were still those of the graphs."""
    out = tmp_path / "missing" / ".." / "bundle"
    arguments = ["--graphs", str(graphs), "--out", str(out), "--no-measure"]
    assert engines.__main__.main(arguments) == 0
    weights = tmp_path / "bundle" / "target" / "weights.bin"
    assert weights.stat().st_nlink == 1 and not (tmp_path / "missing").exists()
    assert read_bundle(tmp_path / "bundle").name == "bundle"


HALF = ("--supports", "float16")
AOTI = ("--backend=aotinductor", "--sm=cpu")
NO_LEVEL = "OPT_LEVEL={} does not apply to the backend "


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        *(
            ((f"--slots={n}", "--supports", "float32"), "option", f"SLOTS={n} is out of range")
            for n in (-1, 0, MAX_SLOTS + 1)
        ),
        (("--slots=0", "--graphs", "nowhere"), "option", "SLOTS=0 is out of range"),
        (("--backend=openvino", *HALF), "backend", "cannot build for the backend openvino"),
        (("--supports", "float32", "--sm=89"), "option", "SM=89 names GPUs"),
        (("--supports", "float32", "--opt-level=3"), "option", NO_LEVEL.format(3) + "onnxruntime"),
        (("--backend=aotinductor", *HALF, "--opt-level=0"), "option", NO_LEVEL.format(0)),
        (("--backend=tensorrt_rtx", *HALF, "--opt-level=3"), "option", NO_LEVEL.format(3)),
        *(
            ((f"--backend={backend}", "--supports", dtype), "backend", f" {dtype} in this version.")
            for backend, dtype in (("tensorrt_rtx", "int4"), ("tensorrt", "float32"))
        ),
        (("--supports", "float16", "int4"), "backend", "not run WEIGHTS=int4 with DTYPE=float16"),
        ((*HALF, "full", "int8"), "backend", "not run DRAFT_WEIGHTS=int8 with DTYPE=float16"),
        (("--supports", "float32", "fp8"), "backend", "Use WEIGHTS=full or int8 or int4, or"),
        ((*AOTI, "--supports", "float32", "int8"), "backend", "Use WEIGHTS=full, or"),
        (
            (*AOTI, "--supports", "float32", "--cache-type", "int8"), "backend",
            "Leave CACHE out, or use BACKEND=onnxruntime",
        ),
        *(
            (("--backend=tensorrt", *HALF, f"--opt-level={level}"), "option", "is out of range")
            for level in (6, -1)
        ),
        *(
            pytest.param(
                ("--backend=tensorrt_rtx", *HALF, f"--sm={sm}"), "option",
                "any of SM=75,80,86,89,120", marks=needs_library,
            )
            for sm in ("90", "89,90", "sm89", "8.9", ",", "-1")
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_what_no_machine_builds(
    options: tuple[str, ...], kind: str, words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also with --supports, which `make engines` runs first, so nothing is exported in vain."""
    assert words in refused(capsys, kind, *options, "--out", str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [
        (
            ("float32", "full", "int4", "--cache-type", "int8"),
            "full int8 int4 encoder-decoders recurrent-states",
        ),
        (("float16",), "full"),
        (("float32", *AOTI), "full encoder-decoders"),
    ],
)
def test_what_this_machine_builds(
    asked: tuple[str, ...], kinds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engines.__main__.main(["--supports", *asked]) == 0
    assert capsys.readouterr().out == f"{kinds}\n"


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "tensorrt"])
def test_a_missing_library(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, backend, None)
    assert "is not installed" in refused(capsys, "backend", f"--backend={backend}", *HALF)


def test_memory_of_this_machine(
    graphs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slots start with few rows. A bundle that could not be opened is refused; if its slots could
    not all be filled, a note is printed."""
    assert host_memory() > 2**28
    pair, out = read_pair(graphs), tmp_path / "out"
    assert pair.max_len > 4 * FIRST_ROWS > MAX_LEN
    least, most = (sum(memory_plan(pair, 2, [], rows).values()) for rows in (FIRST_ROWS, None))
    assert least < most
    options = ["--graphs", str(graphs), "--out", str(out), "--slots", "2"]

    def machine_of(memory: int) -> None:
        monkeypatch.setattr(bundles, "host_memory", lambda: memory)

    machine_of(least - 1)
    assert "the bundle needs" in refused(capsys, "memory", *options)
    assert not out.exists()
    for memory, enough in ((most - 1, False), (most, True), (0, True)):  # 0: unknown
        machine_of(memory)
        assert engines.__main__.main(options) == 0
        assert ("not enough for 2 texts of 2048 tokens" in capsys.readouterr().err) is not enough
