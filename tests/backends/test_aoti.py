"""Bundles of AOTInductor on the CPU: exact, and refused where they do not fit.

test_transformers.py tests generations at temperature 0 with the same bundle, test_host_engines.py
what AOTInductor has in common with ONNX Runtime, and tests/engines/test_aotinductor.py the builds.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE
from commands import CHECKOUT, error_line
from fakes import edited
from workshop import Workshop

from engines.bundle import build
from runtime import load
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.graphs import read_pair
from runtime.files.manifest import PACKAGE_FILE, read_bundle
from runtime.files.torch_files import PROGRAM_FILE, WEIGHTS_FILE, cpu_targets, read_tensors


@pytest.fixture(scope="module")
def bundle(workshop: Workshop) -> Path:
    """Shared: tests must not modify it."""
    return workshop.bundle(*workshop.pair("aotinductor"), backend="aotinductor")


@pytest.fixture(scope="module")
def graphs(workshop: Workshop) -> Path:
    """The graphs that the bundle was built from."""
    return workshop.graphs(*workshop.pair("aotinductor"), form="torch")


# The interface between export/ and engines/


def test_the_program_has_no_weights_and_no_traces_of_its_maker(
    workshop: Workshop, graphs: Path
) -> None:
    facts = read_pair(graphs).target
    assert (facts.format, facts.files.keys()) == ("torch", {PROGRAM_FILE, WEIGHTS_FILE})
    assert facts.max_difference is not None
    content = (graphs / "target" / PROGRAM_FILE).read_bytes()
    source = workshop.pair("aotinductor")[0]
    for trace in (CHECKOUT, source.parent, sys.prefix, "site-packages", ".py"):
        assert str(trace).encode() not in content
    tensors = read_tensors(graphs / "target" / WEIGHTS_FILE)
    weight = tensors["decoder.model.model.layers.0.self_attn.k_proj.weight"]
    assert weight.data_ptr() % 64 == 0
    assert not any(weight.numpy().tobytes()[i : i + 64] in content for i in range(0, 4096, 64))


def test_tied_weights_are_stored_once(graphs: Path) -> None:
    tensors = read_tensors(graphs / "draft" / WEIGHTS_FILE)
    matrices = [tensor for tensor in tensors.values() if tensor.shape == (VOCAB_SIZE, 64)]
    assert len({matrix.data_ptr() for matrix in matrices}) == 1


def test_graphs_of_the_other_format_are_refused(
    workshop: Workshop, graphs: Path, tmp_path: Path
) -> None:
    for folder, backend, wants in (
        (workshop.graphs(workshop.checkpoint("llama")), "aotinductor", "torch"),
        (graphs, "onnxruntime", "onnx"),
    ):
        with pytest.raises(OutriderError, match=f"^backend: .*with --format {wants}"):
            build(folder, tmp_path / "out", backend=backend, slots=1)
    assert list(tmp_path.iterdir()) == []


# The bundle


def test_the_weights_are_the_graphs_and_the_engine_is_code(bundle: Path, graphs: Path) -> None:
    manifest = read_bundle(bundle)
    assert manifest.engines is not None
    for role in ("target", "draft"):
        assert {path.name for path in (bundle / role).iterdir()} == {PACKAGE_FILE, WEIGHTS_FILE}
        weights = (graphs / role / WEIGHTS_FILE).read_bytes()
        assert (bundle / role / WEIGHTS_FILE).read_bytes() == weights
        assert weights[-4096:] not in (bundle / role / PACKAGE_FILE).read_bytes()
        assert manifest.engines[role].targets == cpu_targets()
    assert manifest.versions == {"torch": metadata.version("torch")}
    # Nothing changed.
    assert not build(graphs, bundle, backend="aotinductor", slots=1, measure=False)


def test_threads_are_those_asked_for_and_given_back(bundle: Path) -> None:
    before, seen = torch.get_num_threads(), set[int]()
    for threads in (before + 1, 0):
        engine = load(bundle, threads=threads)
        target: Any = engine.decoder.target
        loader = target._loader

        def run(inputs: Any, loader: Any = loader) -> Any:
            seen.add(torch.get_num_threads())
            return loader.run(inputs)

        target._loader = SimpleNamespace(run=run)
        engine.generate([5, 6, 7], max_new_tokens=4)
        assert seen == {threads or before}
        assert torch.get_num_threads() == before
        seen.clear()


def test_who_closes_an_engine_gives_its_weights_back(bundle: Path) -> None:
    """Fault: the loader keeps a reference to each tensor that it was given, forever."""

    def mapped() -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(line.endswith(WEIGHTS_FILE) for line in lines)

    gc.collect()  # engines of earlier tests
    before = mapped()
    with load(bundle) as engine:
        engine.generate([5, 6, 7], max_new_tokens=4)
        assert mapped() > before, "control"
    gc.collect()
    assert mapped() == before


# Bundles that are refused when they are opened


def for_another(role: str) -> Callable[[Path], None]:
    return edited(lambda c: c["facts"]["engines"][role]["targets"].append("sve9"))


def no_code(folder: Path) -> None:
    path = folder / "target" / PACKAGE_FILE
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (edited(lambda c: c["facts"]["versions"].update(torch="2.9")), "was built with torch 2.9"),
        (for_another("draft"), "with sve9, which"),
        (for_another("target"), "with sve9, which"),
        (no_code, "cannot load"),
    ],
)
def test_a_bundle_that_does_not_fit(
    bundle: Path, tmp_path: Path, damage: Callable[[Path], None], cause: str
) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    damage(copy)
    with pytest.raises(OutriderError, match=cause) as caught:
        load(copy, verify=False)
    assert caught.value.kind == "backend" and "\n" not in str(caught.value)
    remedy = caught.value.remedy
    rebuilt = "BACKEND=aotinductor DTYPE=float32" in remedy and f"SLOTS=1 OUT={copy}" in remedy
    assert rebuilt or cause == "cannot load"


def test_another_build_of_the_same_torch(bundle: Path, tmp_path: Path) -> None:
    """Fault: a bundle compiled with PyTorch for the CPU is refused by PyTorch for CUDA."""
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    other = torch.__version__.partition("+")[0] + "+cu999"
    edited(lambda c: c["facts"]["versions"].update(torch=other))(copy)
    with load(copy, verify=False) as engine:
        assert engine.generate([5, 6, 7], max_new_tokens=4).token_ids


def test_without_torch(bundle: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from runtime import generate\n"
        f"sys.exit(generate.main(['--engines', {str(bundle)!r}, '--prompt', 'x']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert process.returncode == EXIT_STATUS["backend"]
    assert "PyTorch is not installed" in error_line(process.stderr, "backend")
    assert f"pip install torch=={torch.__version__.partition('+')[0]}," in process.stderr
