"""What the builder for RTX GPUs refuses in one line; interrupts, full disks, bundles not opened."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import MAX_GAMMA, MAX_LEN, Workshop
from commands import CHECKOUT, command, environment, error_line, leftovers, limited_files
from rounds import cases
from rtx import arguments, needs_library

import engines.__main__
from bench.suites.gpu import suite as gpu_check
from engines.bundle import build, check_backend
from engines.tensorrt import builder as tensorrt_builder
from engines.tensorrt import rtx as tensorrt_rtx_backend
from runtime import bundle as opening
from runtime import generate, load
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.manifest import (
    MANIFEST_FILE,
    PAIR_FILE,
    Manifest,
    file_facts,
    read_bundle,
    read_pair,
)
from runtime.files.records import write_json

CAPACITY = -(-(MAX_LEN + MAX_GAMMA + 1) // 8) * 8


# Before anything is built


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    status = engines.__main__.main([*options])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return status, said


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("backend", ["tensorrt_rtx", "tensorrt"])
def test_other_precisions(backend: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = refused(capsys, "--backend", backend, "--supports", dtype)
    assert status == EXIT_STATUS["backend"]
    assert dtype in error_line(said, "backend")
    assert said.endswith("Use DTYPE=float16 or bfloat16.\n")


@needs_library
@pytest.mark.parametrize("sm", ["90", "89,90", "sm89", "8.9", ",", "89,", "all", "-1"])
def test_unknown_architectures(sm: str, capsys: pytest.CaptureFixture[str]) -> None:
    option = f"--sm={sm}"
    status, said = refused(capsys, "--backend", "tensorrt_rtx", "--supports", "float16", option)
    assert status == EXIT_STATUS["option"]
    assert "does not build for SM=" in error_line(said, "option")
    assert "SM=75,80,86,89,120" in said


@pytest.mark.parametrize(
    ("backend", "level", "cause"),
    [
        ("onnxruntime", 3, "means nothing to the backend onnxruntime"),
        ("aotinductor", 0, "means nothing to the backend aotinductor"),
        ("tensorrt_rtx", 3, "means nothing to the backend tensorrt_rtx"),
        ("tensorrt", 6, "out of range"),
        ("tensorrt", -1, "out of range"),
    ],
)
def test_levels_that_there_are_not(backend: str, level: int, cause: str) -> None:
    with pytest.raises(OutriderError, match=cause) as caught:
        check_backend(backend, "bfloat16" if backend != "onnxruntime" else "float32", "", level)
    assert caught.value.kind == "option"


@needs_library
def test_the_level_reaches_the_builder(graphs: Path, tmp_path: Path) -> None:
    """And times are kept for the next build, whatever the file held."""
    import tensorrt_rtx as trt

    facts = read_pair(graphs).target
    planned = tensorrt_builder.plan("engine.rtx", {"target": facts}, 1, 4, ["sm89"], {}, 0)
    assert planned["target"].level == 0
    usual = tensorrt_builder.plan("engine.rtx", {"target": facts}, 1, 4, ["sm89"], {}, None)
    assert usual["target"].key != planned["target"].key
    manifest = Manifest("x", "tensorrt", {}, 1, read_pair(graphs), {}, planned)
    assert "OPT_LEVEL=0" in manifest.rebuild_command(tmp_path)
    told: list[Any] = []

    class Builder(trt.Builder):  # type: ignore[misc]
        def build_serialized_network(self, network: Any, config: Any) -> Any:
            told.append((config.builder_optimization_level, config.get_timing_cache() is not None))
            return super().build_serialized_network(network, config)

    timings = tmp_path / "cache" / "sm89.timings"
    request = {
        "product": "x", "graph": str(graphs / "target" / "graph.onnx"), "source": "x",
        "out": str(tmp_path / "engine"), "capacity": CAPACITY, "targets": ["sm89"],
        "profiles": [dataclasses.asdict(p) for p in planned["target"].profiles],
        "level": 0, "timings": str(timings),
    }  # fmt: skip
    library = SimpleNamespace(**{**vars(trt), "Builder": Builder})
    for known in (None, b"no timings"):
        if known is not None:
            timings.write_bytes(known)
        tensorrt_builder._compile(library, request, lambda **message: None)
        assert timings.stat().st_size > len(known or b"")
    assert told == [(0, True)] * 2
    timings.unlink()
    timings.parent.rmdir()
    timings.parent.write_text("in the way")
    tensorrt_builder._compile(library, request, lambda **message: None)


@needs_library
def test_which_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = tensorrt_rtx_backend.targets
    assert {"sm80", "sm86", "sm89", "sm120"} <= set(targets("", "float16"))
    assert "sm75" not in targets("", "float16")
    assert targets("75", "float16") == ["sm75"]
    assert targets("120, 80,80", "bfloat16") == ["sm80", "sm120"]
    with pytest.raises(OutriderError, match="bfloat16"):
        targets("75,80", "bfloat16")
    monkeypatch.setattr(tensorrt_rtx_backend, "present_gpus", lambda: {120: 0, 89: 0})
    assert targets("", "float16") == ["sm89", "sm120"]
    assert targets("80", "float16") == ["sm80"]
    monkeypatch.setattr(tensorrt_rtx_backend, "present_gpus", lambda: {90: 0})
    with pytest.raises(OutriderError, match="the GPU of this machine"):
        targets("", "float16")


def test_architectures_mean_nothing_to_the_cpu() -> None:
    with pytest.raises(OutriderError) as caught:
        check_backend("onnxruntime", "float32", "89")
    assert caught.value.kind == "option"


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "tensorrt"])
def test_a_missing_library(
    backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, backend, None)
    status, said = refused(capsys, "--backend", backend, "--supports", "float16")
    assert status == EXIT_STATUS["backend"]
    assert "is not installed" in error_line(said, "backend")


# By the library


def edited(graphs: Path, folder: Path, content: bytes) -> Path:
    """The graphs with another target graph, whose hash is right."""
    folder.mkdir()
    for name in ("draft", "tokenizer"):
        (folder / name).symlink_to(graphs / name)
    (folder / "target").mkdir()
    (folder / "target" / "weights.bin").symlink_to(graphs / "target" / "weights.bin")
    (folder / "target" / "graph.onnx").write_bytes(content)
    pair = read_pair(graphs)
    facts = {**pair.target.files, "graph.onnx": file_facts(folder / "target" / "graph.onnx")}
    target = dataclasses.replace(pair.target, files=facts)
    write_json(folder / PAIR_FILE, "pair", dataclasses.replace(pair, target=target))
    return folder


def softcap(model: Any) -> None:
    import onnx

    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute.append(onnx.helper.make_attribute("softcap", 50.0))


def unknown_operator(model: Any) -> None:
    next(n for n in model.graph.node if n.op_type == "Mul").op_type = "NoSuchOperator"


def no_such_input(model: Any) -> None:
    next(n for n in model.graph.node if n.op_type == "Mul").input[0] = "nowhere"


@needs_library
@pytest.mark.parametrize(
    ("edit", "cause"),
    cases(
        [(softcap, r"at node \S+ \(Attention\): .*softcap")],
        [
            (unknown_operator, r"at node \S+ \(NoSuchOperator\): "),
            (no_such_input, r"at node \S+ \(Mul\): "),
        ],
    ),
)
def test_a_graph_that_the_parser_refuses(
    graphs: Path, tmp_path: Path, edit: Any, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    import onnx

    model = onnx.load(graphs / "target" / "graph.onnx", load_external_data=False)
    edit(model)
    bad = edited(graphs, tmp_path / "bad", model.SerializeToString())
    status = engines.__main__.main(arguments(bad, tmp_path / "out"))
    said = capfd.readouterr().err
    assert status == EXIT_STATUS["backend"], said
    line = error_line(said, "backend")
    assert re.search(cause, line), line
    assert "cudaError" not in line and "/_src/" not in line
    assert "BACKEND=onnxruntime" in said
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


@needs_library
def test_a_file_that_is_no_graph(graphs: Path, tmp_path: Path) -> None:
    bad = edited(graphs, tmp_path / "bad", b"no protocol buffer")
    with pytest.raises(OutriderError, match="no ONNX file") as caught:
        build(bad, tmp_path / "out", backend="tensorrt_rtx", slots=1, sm="89")
    assert caught.value.kind == "backend"


@needs_library
def test_a_graph_that_the_builder_refuses(
    workshop: Workshop, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Heads of 8 have no attention kernel; the library also says so past its logger."""
    graphs = workshop.graphs(workshop.checkpoint("llama", head_dim=8), dtype="bfloat16")
    capfd.readouterr()
    status = engines.__main__.main(arguments(graphs, tmp_path / "out"))
    said = capfd.readouterr()
    assert status == EXIT_STATUS["backend"]
    cause = error_line(said.err, "backend")
    assert cause.endswith("Attention operation was not supported by a dedicated kernel")
    assert said.err.count("\n") == 2  # the memory plan, the error
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "kind", "cause"),
    [(-11, "backend", "signal 11 .*: last words"), (1, "backend", "status 1"), (-9, "memory", "")],
)
def test_a_library_that_dies(status: int, kind: str, cause: str) -> None:
    error = tensorrt_builder._ended("TensorRT", "model", status, "first\nlast words\n\n")
    assert error.kind == kind
    assert re.search(cause, str(error))


def test_a_library_that_dies_at_once(graphs: Path, tmp_path: Path) -> None:
    """Even before it reads what it is asked."""
    facts = read_pair(graphs).target
    to = tensorrt_builder.plan("e", {"target": facts}, 1, 8, ["sm89"], {}, None)["target"]
    with pytest.raises(
        OutriderError, match=r"ended with status 1 .*: ModuleNotFoundError"
    ) as caught:
        tensorrt_builder.compile(
            "no_such_module", "TensorRT", "target", graphs / "target", tmp_path, facts, to
        )
    assert caught.value.kind == "backend"
    assert list(tmp_path.iterdir()) == []


# Interrupted


@needs_library
def test_a_full_disk(
    rtx_bundle: Path, graphs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A limit on the size of a file stands in for it: the older rtx_bundle survives."""
    out = Path(shutil.copytree(rtx_bundle, tmp_path / "out"))
    before = {path: path.stat().st_ino for path in out.rglob("*")}
    with limited_files(65536):  # the process that compiles inherits it
        status = engines.__main__.main(arguments(graphs, out, sm="80"))
    assert status == EXIT_STATUS["disk"]
    assert "engine.rtx" in error_line(capfd.readouterr().err, "disk")
    assert {path: path.stat().st_ino for path in out.rglob("*")} == before
    assert leftovers(tmp_path) == []
    read_bundle(out)


@needs_library
@pytest.mark.parametrize("delay", cases([0.4], [0.0]))
def test_ctrl_c_while_compiling(graphs: Path, tmp_path: Path, delay: float) -> None:
    """The process that compiles ends too, and nothing is left."""
    process = subprocess.Popen(
        command("engines", *arguments(graphs, tmp_path / "out")),
        cwd=CHECKOUT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not (children := _children(process.pid)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert said.endswith("interrupted\n") and "Traceback" not in said
    deadline = time.monotonic() + 10  # one that had no request yet ends by itself
    while any(map(_runs, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def _children(process: int) -> list[int]:
    try:
        listed = Path(f"/proc/{process}/task/{process}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in listed.split()]


def _runs(process: int) -> bool:
    """Not where only its entry is left, which nobody may have collected."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Opened


@needs_library
@pytest.mark.skipif(not gpu_check.find_gpu()[1], reason="there is a GPU")
def test_opening_without_a_gpu(rtx_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutriderError, match=r"cuda-bindings|no CUDA driver") as caught:
        load(rtx_bundle)
    assert caught.value.kind == "backend"
    status = generate.main(["--engines", str(rtx_bundle), "--prompt", "x"])
    assert status == EXIT_STATUS["backend"]
    error_line(capsys.readouterr().err, "backend")


@needs_library
def test_the_cpu_is_refused(rtx_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = generate.main(["--engines", str(rtx_bundle), "--prompt", "x", "--device", "cpu"])
    assert status == EXIT_STATUS["option"]
    line = error_line(capsys.readouterr().err, "option")
    assert "was compiled for sm80, sm89, sm120" in line


@needs_library
def test_an_engine_of_another_version(rtx_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is the command that builds it again."""
    monkeypatch.setattr(opening, "_installed", lambda package: "1.8.0")
    with pytest.raises(OutriderError, match=r"built with tensorrt_rtx 1\.\S+, and 1\.8\.0 is") as e:
        load(rtx_bundle)
    assert "BACKEND=tensorrt_rtx DTYPE=float16 SM=80,89,120" in e.value.remedy
    assert f"SLOTS=3 OUT={rtx_bundle}" in e.value.remedy


@needs_library
def test_files_and_manifest_must_agree(rtx_bundle: Path, tmp_path: Path) -> None:
    manifest = read_bundle(rtx_bundle)
    assert manifest.engines is not None
    strange: list[Manifest] = [
        dataclasses.replace(manifest, engines=None),
        dataclasses.replace(manifest, engines={"target": manifest.engines["target"]}),
        dataclasses.replace(manifest, files=manifest.pair.all_files()),
    ]
    for i, wrong in enumerate(strange):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name in ("target", "draft", "tokenizer"):
            (folder / name).symlink_to(rtx_bundle / name)
        write_json(folder / MANIFEST_FILE, "manifest", wrong)
        with pytest.raises(OutriderError, match="contradicts itself"):
            read_bundle(folder)
