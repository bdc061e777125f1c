"""Engines for RTX GPUs, built without one: what is in the bundle, and what is refused in one line.

An engine cannot be loaded without a GPU. What it was made from can be looked at: the network that
the parser made of the graph, its profiles, the file's header and the names in it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import MAX_GAMMA, MAX_LEN, Workshop
from commands import CHECKOUT, command, environment, error_line, leftovers, run

import engines.__main__
from bench.suites.gpu import suite as gpu_check
from engines import bundle as bundles
from engines import gpus
from engines.bundle import build, check_backend, engine_plan, memory_plan
from engines.tensorrt import builder as tensorrt_builder
from engines.tensorrt import rtx as tensorrt_rtx_backend
from runtime import bundle as opening
from runtime import generate, load
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.manifest import (
    MANIFEST_FILE,
    PAIR_FILE,
    GraphFacts,
    Manifest,
    file_facts,
    read_bundle,
    read_pair,
)
from runtime.files.records import write_json

HERE = importlib.util.find_spec("tensorrt_rtx") is not None
needs_library = pytest.mark.skipif(not HERE, reason="tensorrt_rtx is not installed")
SM = "80,89,120"
CAPACITY = -(-(MAX_LEN + MAX_GAMMA + 1) // 8) * 8


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a machine that has one."""
    monkeypatch.setattr(tensorrt_rtx_backend, "present_gpus", dict)
    monkeypatch.setattr(bundles, "present_gpus", dict)


@pytest.fixture(scope="module")
def graphs(workshop: Workshop) -> Path:
    target, draft = workshop.checkpoint("llama"), workshop.checkpoint("llama", seed=7)
    return workshop.graphs(target, draft, dtype="float16")


@pytest.fixture(scope="module")
def bundle(graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: not to be damaged."""
    out = tmp_path_factory.mktemp("rtx") / "bundle"
    assert build(graphs, out, backend="tensorrt_rtx", slots=3, sm=SM)
    return out


def arguments(graphs: Path, out: Path, sm: str = "89") -> list[str]:
    return ["--graphs", str(graphs), "--out", str(out), "--backend", "tensorrt_rtx", "--sm", sm]


# What is built


@needs_library
def test_a_bundle_holds_engines_in_place_of_graphs(bundle: Path, graphs: Path) -> None:
    manifest, pair = read_bundle(bundle), read_pair(graphs)
    assert manifest.backend == "tensorrt_rtx" and manifest.pair == pair
    assert manifest.versions == tensorrt_rtx_backend.versions()
    names = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}
    tokenizer = {f"tokenizer/{name}" for name in pair.tokenizer.files}
    assert names == {MANIFEST_FILE, "target/engine.rtx", "draft/engine.rtx", *tokenizer}
    assert manifest.engines is not None
    assert manifest.engines.keys() == {"target", "draft"}
    for role, engine in manifest.engines.items():
        assert engine.targets == ["sm80", "sm89", "sm120"]
        decode, prefill = engine.profiles
        assert (decode.name, prefill.name) == ("decode", "prefill")
        usual = MAX_GAMMA + 1 if role == "target" else 1
        assert decode.slots == [1, 3, 3]
        assert decode.tokens == decode.outputs == [1, usual, MAX_GAMMA + 1]
        assert prefill.slots == [1, 1, 3]
        assert prefill.tokens == [1, CAPACITY, CAPACITY]  # a chunk of 512 is more than there are
        assert prefill.outputs == [1, 1, 1]
        assert all(profile.memory for profile in engine.profiles)


@needs_library
@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_file_is_an_engine_of_the_contract(bundle: Path, graphs: Path, role: str) -> None:
    """Its header's version, every input and output by name, and all of the weights."""
    facts = getattr(read_pair(graphs), role)
    content = (bundle / role / "engine.rtx").read_bytes()
    version = bytes(map(int, read_bundle(bundle).versions["tensorrt_rtx"].split(".")))
    assert version in content[:64]
    layers = range(len(facts.key_shapes))
    caches = [f"{part}_{i}" for part in ("key", "value") for i in layers]
    for name in ("input_ids", "position", "logits_index", "logits", *caches):
        assert name.encode() in content
    for name in caches:
        assert f"{name}_out".encode() in content
    assert len(content) > facts.files["weights.bin"].size


def network_of(graph: Path, facts: GraphFacts) -> Iterator[tuple[Any, Any]]:
    """The builder and the network that it compiles; everything lives as long as the generator."""
    import tensorrt_rtx as trt

    builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.INTERNAL_ERROR))
    fixed = tensorrt_builder.with_fixed_rows(str(graph), facts.capacity, "")
    assert parser.parse(fixed, str(graph))
    yield builder, network


@needs_library
def test_the_network_is_the_contract(bundle: Path, graphs: Path) -> None:
    import tensorrt_rtx as trt

    facts, engines = read_pair(graphs).target, read_bundle(bundle).engines
    assert engines is not None
    for builder, network in network_of(graphs / "target" / "graph.onnx", facts):
        inputs = {t.name: t for t in map(network.get_input, range(network.num_inputs))}
        outputs = {t.name: t for t in map(network.get_output, range(network.num_outputs))}
        layers = range(len(facts.key_shapes))
        heads, width = facts.key_shapes[0]
        for name in ("input_ids", "position", "logits_index"):
            assert inputs.pop(name).dtype == trt.int64
        logits = outputs.pop("logits")
        assert tuple(logits.shape) == (-1, -1, facts.vocab_size)
        assert logits.dtype == trt.float32
        assert list(inputs) == [f"{part}_{i}" for part in ("key", "value") for i in layers]
        assert {f"{name}_out" for name in inputs} == outputs.keys()
        for tensor in (*inputs.values(), *outputs.values()):
            assert tuple(tensor.shape) == (-1, heads, CAPACITY, width)  # B open, S fixed
            assert tensor.dtype == trt.float16
        updates = [
            layer
            for layer in map(network.get_layer, range(network.num_layers))
            if layer.type == trt.LayerType.KV_CACHE_UPDATE
        ]
        # An update writes into its input's memory: what the engine reports as aliased.
        pairs = {layer.get_output(0).name: layer.get_input(0).name for layer in updates}
        assert pairs == {f"{name}_out": name for name in inputs}
        for shapes in engines["target"].profiles:
            profile = tensorrt_builder.make_profile(builder, network, dataclasses.asdict(shapes))
            assert [tuple(s) for s in profile.get_shape("input_ids")] == [
                *zip(shapes.slots, shapes.tokens, strict=True)
            ]
            assert [tuple(s) for s in profile.get_shape("logits_index")] == [
                (n,) for n in shapes.outputs
            ]
            assert [tuple(s) for s in profile.get_shape("position")] == [(n,) for n in shapes.slots]
            assert [tuple(s) for s in profile.get_shape("value_1")] == [
                (n, heads, CAPACITY, width) for n in shapes.slots
            ]


@needs_library
def test_memory_is_told_before_and_after(
    graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engines.__main__.main(arguments(graphs, tmp_path / "out")) == 0
    said = capsys.readouterr().err
    lines = said.splitlines()
    assert len(lines) == 5
    assert re.match(r"bundle +memory .* KV [\d.]+ MiB \+ logits [\d.]+ MiB$", lines[0])
    for role, line in zip(("target", "draft"), lines[1:3], strict=True):
        assert re.match(
            rf"{role} +compile for sm89 +[\d.]+ s  [\d.]+ MiB, decode .*, prefill", line
        )
    assert re.match(r"bundle +memory .* \+ activations [\d.]+ MiB$", lines[3])
    manifest = read_bundle(tmp_path / "out")
    plan = engine_plan(manifest)
    assert plan is not None
    activations = plan.pop("activations")
    assert plan == memory_plan(manifest.pair, 1)
    assert activations > 2**20


@needs_library
def test_memory_that_no_gpu_here_has(
    graphs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Said before anything is compiled, and only of a GPU that it is built for."""

    def status(gpus_here: dict[int, int]) -> int:
        monkeypatch.setattr(bundles, "present_gpus", lambda: gpus_here)
        return engines.__main__.main(arguments(graphs, tmp_path / "out"))

    assert status({89: 2**16}) == EXIT_STATUS["memory"]
    said = capsys.readouterr().err
    assert "the bundle needs" in error_line(said, "memory")
    assert "compile" not in said and list(tmp_path.iterdir()) == []
    assert status({89: 2**16, 90: 2**40}) == EXIT_STATUS["memory"]
    assert status({80: 2**16}) == 0, "of a GPU that is elsewhere nothing is known"


@pytest.mark.parametrize(
    ("listed", "found"),
    [
        ("8.9, 24564\n9.0, 143771\n", {89: 24564 * 2**20, 90: 143771 * 2**20}),
        ("8.9, 24564\n8.9, 8188\n", {89: 8188 * 2**20}),
        ("12.1, [N/A]\n", {121: 0}),
        ("No devices were found\n", {}),
        ("", {}),
    ],
)
def test_the_gpus_of_a_machine(
    listed: str, found: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listed}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpus.present_gpus() == found
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.present_gpus() == {}


@needs_library
def test_building_twice_compiles_nothing_twice(
    bundle: Path, graphs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def again(graphs: Path = graphs, **options: Any) -> list[str] | None:
        """Which models were compiled; None where nothing was done."""
        capfd.readouterr()
        options = {"slots": 1, "sm": "89", **options}
        built = build(graphs, out, backend="tensorrt_rtx", **options)
        said = re.findall(r"^(\w+) +compile", capfd.readouterr().err, re.MULTILINE)
        return said if built else None

    assert again() == ["target", "draft"]
    made = (out / MANIFEST_FILE).stat().st_ino
    assert again() is None
    assert (out / MANIFEST_FILE).stat().st_ino == made
    assert again(sm="89,80") == ["target", "draft"]
    assert again(sm="80,89,80") is None
    assert again(force=True, sm="80,89") == ["target", "draft"]
    pair = read_pair(graphs)
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("target", "tokenizer"):
        (alone / name).symlink_to(graphs / name)
    write_json(alone / PAIR_FILE, "pair", dataclasses.replace(pair, draft=None))
    assert again(alone, sm="80,89") == []  # the target's engine stays
    read_bundle(out)
    (out / "target" / "engine.rtx").write_bytes(b"")
    assert again(alone, sm="80,89") == ["target"]
    read_bundle(out)


def test_a_manifest_without_engines_reads_and_writes_as_before(
    workshop: Workshop, tmp_path: Path
) -> None:
    bundle = workshop.bundle(workshop.checkpoint("llama"), workshop.checkpoint("llama", seed=7))
    text = (bundle / MANIFEST_FILE).read_text()
    assert '"engines"' not in text
    manifest = read_bundle(bundle)
    assert manifest.engines is None
    write_json(tmp_path / "again.json", "manifest", manifest)
    assert (tmp_path / "again.json").read_text() == text


# What is refused before anything is built


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


# What the library refuses


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
    [
        (softcap, r"at node \S+ \(Attention\): .*softcap"),
        (unknown_operator, r"at node \S+ \(NoSuchOperator\): "),
        (no_such_input, r"at node \S+ \(Mul\): "),
    ],
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
def test_a_full_disk(graphs: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands in for it: the older bundle survives."""
    out = tmp_path / "out"
    first = run("engines", *arguments(graphs, out))
    assert first.returncode == 0, first.stderr
    before = {path: path.stat().st_ino for path in out.rglob("*")}
    failed = run("engines", *arguments(graphs, out, sm="80"), largest_file=65536)
    assert failed.returncode == EXIT_STATUS["disk"], failed.stderr
    assert "engine.rtx" in error_line(failed.stderr, "disk")
    assert {path: path.stat().st_ino for path in out.rglob("*")} == before
    assert leftovers(tmp_path) == []
    read_bundle(out)


@needs_library
@pytest.mark.parametrize("delay", [0.0, 0.4])
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
def test_opening_without_a_gpu(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutriderError, match=r"cuda-bindings|no CUDA driver") as caught:
        load(bundle)
    assert caught.value.kind == "backend"
    status = generate.main(["--engines", str(bundle), "--prompt", "x"])
    assert status == EXIT_STATUS["backend"]
    error_line(capsys.readouterr().err, "backend")


@needs_library
def test_the_cpu_is_refused(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = generate.main(["--engines", str(bundle), "--prompt", "x", "--device", "cpu"])
    assert status == EXIT_STATUS["option"]
    line = error_line(capsys.readouterr().err, "option")
    assert "was compiled for sm80, sm89, sm120" in line


@needs_library
def test_an_engine_of_another_version(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is the command that builds it again."""
    monkeypatch.setattr(opening, "_installed", lambda package: "1.8.0")
    with pytest.raises(OutriderError, match=r"built with tensorrt_rtx 1\.\S+, and 1\.8\.0 is") as e:
        load(bundle)
    assert "BACKEND=tensorrt_rtx DTYPE=float16 SM=80,89,120" in e.value.remedy
    assert f"SLOTS=3 OUT={bundle}" in e.value.remedy


@needs_library
def test_files_and_manifest_must_agree(bundle: Path, tmp_path: Path) -> None:
    manifest = read_bundle(bundle)
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
            (folder / name).symlink_to(bundle / name)
        write_json(folder / MANIFEST_FILE, "manifest", wrong)
        with pytest.raises(OutriderError, match="contradicts itself"):
            read_bundle(folder)


# Many architectures

BUILT = [
    "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi", "phi3",
    "phi3-longrope", "gpt2", "opt", "gpt-neox", "olmo2", "stablelm", "granite", "cohere", "smollm3",
    "starcoder2", "mixtral", "qwen3-moe", "gpt-oss",
]  # fmt: skip


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("name", [*BUILT, "deepseek3"])
def test_architectures(workshop: Workshop, name: str, tmp_path: Path) -> None:
    """bfloat16, which the export does not run: ONNX Runtime fails at some of the float16 graphs."""
    graphs = workshop.graphs(workshop.checkpoint(name), dtype="bfloat16")
    options: dict[str, Any] = {"backend": "tensorrt_rtx", "slots": 2, "sm": SM}
    if name == "deepseek3":  # values narrower than keys
        with pytest.raises(OutriderError, match="Key and Value must have the same shape") as caught:
            build(graphs, tmp_path / "out", **options)
        assert caught.value.kind == "backend"
    else:
        assert build(graphs, tmp_path / "out", **options)
