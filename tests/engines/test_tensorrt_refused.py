"""The builder for RTX GPUs: refusals in one line, interrupts, full disks, bundles not opened."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from checkpoints import SMALL
from commands import CHECKOUT, command, environment, error_line, leftovers, limited_files
from rounds import cases
from rtx import arguments, needs_library
from workshop import Workshop

import engines.__main__
from bench.suites.gpu import suite as gpu_check
from engines.tensorrt import builder
from runtime import generate
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.graphs import PAIR_FILE, file_facts, read_pair
from runtime.files.manifest import read_bundle
from runtime.files.records import write_json

# Refused by the library


def edited(graphs: Path, folder: Path, content: bytes) -> Path:
    """Copy the graphs with another target graph and its correct hash."""
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


Edit = Callable[[Any], None]


def softcap(model: Any) -> None:
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
        [(softcap, r"at node \S+ \(Attention\): .*softcap"), (None, "not an ONNX file")],
        [
            (unknown_operator, r"at node \S+ \(NoSuchOperator\): "),
            (no_such_input, r"at node \S+ \(Mul\): "),
        ],
    ),
)
def test_a_graph_that_the_parser_refuses(
    graphs: Path, tmp_path: Path, edit: Edit | None, cause: str, capfd: pytest.CaptureFixture[str]
) -> None:
    content = b"no protocol buffer"
    if edit is not None:
        model = onnx.load(graphs / "target" / "graph.onnx", load_external_data=False)
        edit(model)
        content = model.SerializeToString()
    bad = edited(graphs, tmp_path / "bad", content)
    status = engines.__main__.main(arguments(bad, tmp_path / "out"))
    err = capfd.readouterr().err
    assert status == EXIT_STATUS["backend"], err
    line = error_line(err, "backend")
    assert re.search(cause, line), line
    assert "cudaError" not in line and "/_src/" not in line
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


@needs_library
def test_a_graph_that_the_builder_refuses(
    workshop: Workshop, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Heads of 8 have no attention kernel; the library also prints this past its logger."""
    graphs = workshop.graphs(workshop.checkpoint("llama", head_dim=8, **SMALL), dtype="bfloat16")
    capfd.readouterr()
    status = engines.__main__.main(arguments(graphs, tmp_path / "out"))
    output = capfd.readouterr()
    assert status == EXIT_STATUS["backend"]
    cause = error_line(output.err, "backend")
    assert cause.endswith("Attention operation was not supported by a dedicated kernel")
    assert output.err.count("\n") == 2  # the memory plan, the error
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "kind", "cause"),
    [(-11, "backend", "signal 11 .*: last words"), (1, "backend", "status 1"), (-9, "memory", "")],
)
def test_a_library_that_dies(status: int, kind: str, cause: str) -> None:
    error = builder._crash_error("TensorRT", "model", status, "first\nlast words\n\n")
    assert error.kind == kind
    assert re.search(cause, str(error))


def test_a_library_that_dies_at_once(graphs: Path, tmp_path: Path) -> None:
    """Even before it reads its request."""
    facts = read_pair(graphs).target
    to = builder.plan("e", {"target": facts}, 1, 8, ["sm89"], {}, None)["target"]
    with pytest.raises(
        OutriderError, match=r"ended with status 1 .*: ModuleNotFoundError"
    ) as caught:
        builder.compile(
            "no_such_module", "TensorRT", "target", graphs / "target", tmp_path, facts, to
        )
    assert caught.value.kind == "backend"
    assert list(tmp_path.iterdir()) == []


# Interrupted


@needs_library
def test_a_full_disk(
    rtx_bundle: Path, graphs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Simulated by a limit on file sizes: the old bundle survives."""
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
    """The compiling process ends too, and no files are left."""
    process = subprocess.Popen(
        command("engines", *arguments(graphs, tmp_path / "out")),
        cwd=CHECKOUT, env=environment(), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not (children := _children(process.pid)):
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.endswith("interrupted\n") and "Traceback" not in err
    deadline = time.monotonic() + 10  # one without a request yet ends on its own
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
    """Whether the process runs; False for a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# Opened


@needs_library
@pytest.mark.skipif(not gpu_check.find_gpu()[1], reason="there is a GPU")
def test_opening_where_it_cannot_run(rtx_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = generate.main(["--engines", str(rtx_bundle), "--prompt", "x"])
    assert status == EXIT_STATUS["backend"]
    cause = error_line(capsys.readouterr().err, "backend")
    assert re.search(r"cuda-bindings|no CUDA driver", cause)
