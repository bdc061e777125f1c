"""Engines for RTX GPUs, built without one: the contents of the bundle, and refusals in one line.

An engine cannot be loaded without a GPU. Its sources can be inspected: the network that the parser
made of the graph, its profiles, the header of the file and the names in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from commands import error_line
from rtx import SM, arguments, needs_library
from workshop import CAPACITY, MAX_GAMMA, Workshop

import engines.__main__
from engines import bundle as bundles
from engines import gpus
from engines.bundle import build, engine_plan, memory_plan
from engines.tensorrt import builder, rtx
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.graphs import PAIR_FILE, GraphFacts, read_pair
from runtime.files.manifest import MANIFEST_FILE, Manifest, read_bundle
from runtime.files.records import write_json


@needs_library
def test_a_bundle_holds_engines_in_place_of_graphs(rtx_bundle: Path, graphs: Path) -> None:
    manifest, pair = read_bundle(rtx_bundle), read_pair(graphs)
    assert manifest.backend == "tensorrt_rtx" and manifest.pair == pair
    assert manifest.versions == rtx.versions()
    names = {str(path.relative_to(rtx_bundle)) for path in rtx_bundle.rglob("*") if path.is_file()}
    tokenizer = {f"tokenizer/{name}" for name in pair.tokenizer.files}
    assert names == {MANIFEST_FILE, "target/engine.rtx", "draft/engine.rtx", *tokenizer}
    assert manifest.engines is not None and manifest.engines.keys() == {"target", "draft"}
    for role, facts in pair.models():
        engine = manifest.engines[role]
        size = (rtx_bundle / role / "engine.rtx").stat().st_size
        assert size > facts.files["weights.bin"].size, "all weights are in it"
        assert engine.targets == ["sm89", "sm120"]
        assert all(profile.memory for profile in engine.profiles)
        usual = MAX_GAMMA + 1 if role == "target" else 1
        widths = [1, usual, MAX_GAMMA + 1]
        prefill = [1, CAPACITY, CAPACITY]  # the chunk of 512 exceeds the capacity
        assert [(p.name, p.slots, p.tokens, p.outputs) for p in engine.profiles] == [
            ("decode", [1, 3, 3], widths, widths), ("prefill", [1, 1, 3], prefill, [1, 1, 1])
        ]  # fmt: skip


def network_of(graph: Path, facts: GraphFacts) -> Iterator[tuple[Any, Any]]:
    """Yield the builder and the network that it compiles; the generator keeps them alive."""
    import tensorrt_rtx as trt

    compiler = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    network = compiler.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.INTERNAL_ERROR))
    fixed = builder.with_fixed_rows(str(graph), facts.capacity, "")
    assert parser.parse(fixed, str(graph))
    yield compiler, network


@needs_library
def test_the_network_is_the_contract(rtx_bundle: Path, graphs: Path) -> None:
    import tensorrt_rtx as trt

    facts, engines = read_pair(graphs).target, read_bundle(rtx_bundle).engines
    assert engines is not None
    for compiler, network in network_of(graphs / "target" / "graph.onnx", facts):
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
        # An update writes into its input's memory; the engine reports the pair as aliased.
        pairs = {layer.get_output(0).name: layer.get_input(0).name for layer in updates}
        assert pairs == {f"{name}_out": name for name in inputs}
        for shapes in engines["target"].profiles:
            profile = builder.make_profile(compiler, network, dataclasses.asdict(shapes))
            expected = {
                "input_ids": list(zip(shapes.slots, shapes.tokens, strict=True)),
                "logits_index": [(n,) for n in shapes.outputs],
                "position": [(n,) for n in shapes.slots],
                "value_0": [(n, heads, CAPACITY, width) for n in shapes.slots],
            }
            found = {name: [tuple(s) for s in profile.get_shape(name)] for name in expected}
            assert found == expected


@needs_library
def test_memory_that_no_gpu_here_has(
    graphs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before anything is compiled, and only if the GPU is one of the targets."""

    def status(gpus_here: dict[int, int]) -> int:
        monkeypatch.setattr(bundles, "present_gpus", lambda: gpus_here)
        return engines.__main__.main(arguments(graphs, tmp_path / "out"))

    assert status({89: 2**16}) == EXIT_STATUS["memory"]
    err = capsys.readouterr().err
    assert "the bundle needs" in error_line(err, "memory")
    assert "compile" not in err and list(tmp_path.iterdir()) == []
    assert status({89: 2**16, 90: 2**40}) == EXIT_STATUS["memory"]

    def compile(*_: object) -> None:
        raise OutriderError("difference", "far enough", "Stop.")

    monkeypatch.setattr(rtx, "compile", compile)
    # The memory of a GPU in another machine is unknown.
    assert status({80: 2**16}) == EXIT_STATUS["difference"]


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
    graphs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The memory plan is printed before and after the compilation."""
    out = tmp_path / "out"

    def again(graphs: Path, sm: str = "89", *more: str) -> tuple[list[str], str]:
        """Return which models were compiled, and the whole output."""
        capfd.readouterr()
        assert engines.__main__.main([*arguments(graphs, out, sm), *more]) == 0
        lines = capfd.readouterr().err.splitlines(keepends=True)
        output = "".join(line for line in lines if " s ..." not in line)  # on a slow machine
        return re.findall(r"^(\w+) +compile", output, re.MULTILINE), output

    compiled, output = again(graphs)
    assert compiled == ["target", "draft"]
    lines = output.splitlines()
    assert len(lines) == 5
    assert re.match(r"bundle +memory .* KV [\d.]+ MiB \+ logits [\d.]+ MiB$", lines[0])
    for role, line in zip(compiled, lines[1:3], strict=True):
        assert re.match(
            rf"{role} +compile for sm89 +[\d.]+ s  [\d.]+ MiB, decode .*, prefill", line
        )
    assert re.match(r"bundle +memory .* \+ activations [\d.]+ MiB$", lines[3])
    manifest = read_bundle(out)
    plan = engine_plan(manifest)
    assert plan is not None
    activations = plan.pop("activations")
    assert plan == memory_plan(manifest.pair, 1, ["sm89"])
    assert activations > 2**20

    def made() -> int:
        return (out / MANIFEST_FILE).stat().st_ino

    before = made()
    assert again(graphs)[0] == [] and made() == before
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("target", "tokenizer"):
        (alone / name).symlink_to(graphs / name)
    write_json(alone / PAIR_FILE, "pair", dataclasses.replace(read_pair(graphs), draft=None))
    assert again(alone)[0] == []  # the target's engine is kept
    assert not (out / "draft").exists()
    (out / "target" / "engine.rtx").write_bytes(b"")
    assert again(alone)[0] == ["target"]
    read_bundle(out)
    assert again(alone, "89,80")[0] == ["target"]
    before = made()
    assert again(alone, "80,89,80")[0] == [] and made() == before
    assert again(alone, "80,89", "--force")[0] == ["target"]


@needs_library
def test_the_level_reaches_the_builder(graphs: Path, tmp_path: Path) -> None:
    """Also, timings are cached for the next build, whatever the cache file contained."""
    import tensorrt_rtx as trt

    facts = read_pair(graphs).target
    planned = builder.plan("engine.rtx", {"target": facts}, 1, 4, ["sm89"], {}, 0)
    assert planned["target"].level == 0
    usual = builder.plan("engine.rtx", {"target": facts}, 1, 4, ["sm89"], {}, None)
    assert usual["target"].key != planned["target"].key
    manifest = Manifest("x", "tensorrt", {}, 1, read_pair(graphs), {}, planned)
    assert "OPT_LEVEL=0" in manifest.rebuild_command(tmp_path)
    settings: list[Any] = []

    class Builder(trt.Builder):
        def build_serialized_network(self, network: Any, config: Any) -> Any:
            cached = config.get_timing_cache() is not None
            settings.append((config.builder_optimization_level, cached))
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
        builder._compile(library, request, lambda **message: None)
        assert timings.stat().st_size > len(known or b"")
    assert settings == [(0, True)] * 2
    timings.unlink()
    timings.parent.rmdir()
    timings.parent.write_text("in the way")
    builder._compile(library, request, lambda **message: None)


@needs_library
def test_which_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = rtx.targets
    assert {"sm80", "sm86", "sm89", "sm120"} <= set(targets("", "float16"))
    assert "sm75" not in targets("", "float16")
    assert targets("75", "float16") == ["sm75"]
    assert targets("120, 80,80", "bfloat16") == ["sm80", "sm120"]
    assert targets("", "float16", ["fp8"]) == ["sm89", "sm120", "sm121"]
    assert targets("89", "float16", ["full", "fp8"]) == ["sm89"]
    assert targets("80", "bfloat16", ["int8", "int4"]) == ["sm80"]
    for sm, dtype, weights, cause, remedy in (
        ("75,80", "bfloat16", [], "SM=75 has no bfloat16, .* SM=80", "DTYPE.* leave 75 out"),
        ("75", "float16", ["int4"], "SM=75 has no int4, .* SM=80", "WEIGHTS"),
        ("89,86,80", "float16", ["fp8", "int8"], "SM=86 has no fp8, .* SM=89", "leave 86 out"),
    ):
        with pytest.raises(OutriderError, match=f"^option: .*{cause}.*{remedy}"):
            targets(sm, dtype, weights)
    monkeypatch.setattr(rtx, "present_gpus", lambda: {120: 0, 89: 0})
    assert targets("", "float16") == ["sm89", "sm120"]
    assert targets("80", "float16") == ["sm80"]
    monkeypatch.setattr(rtx, "present_gpus", lambda: {90: 0})
    with pytest.raises(OutriderError, match="the GPU of this machine"):
        targets("", "float16")


# Weights of 8 bits


def in_blocks(model: onnx.ModelProto) -> None:
    """Replace the scales per output by scales per block of 32 inputs, all of them 1."""
    sizes = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for i, node in enumerate(model.graph.node):
        if node.op_type == "DequantizeLinear":
            rows, outputs = sizes[node.input[0]]
            ones = np.ones((rows // 32, outputs), np.float16)
            model.graph.initializer.append(onnx.numpy_helper.from_array(ones, f"ones.{i}"))
            inputs, outputs = [node.input[0], f"ones.{i}"], list(node.output)
            made = onnx.helper.make_node(node.op_type, inputs, outputs, axis=0, block_size=32)
            node.CopyFrom(made)


@pytest.mark.slow
@needs_library
def test_no_product_makes_a_dense_copy_of_levels_of_8_bits(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Compares the memory of a step with that of the full model and, as a control, of levels in
    blocks, which are copied."""
    checkpoint = workshop.checkpoint("llama", intermediate_size=2048, num_hidden_layers=1)
    steps: dict[str, int] = {}
    for name in ("full", "fp8", "in blocks"):
        kind = {} if name == "full" else {"weights": "fp8"}
        folder = workshop.graphs(checkpoint, dtype="float16", **kind) / "target"
        facts = read_pair(folder.parent).target
        model = onnx.load(folder / "graph.onnx", load_external_data=False)
        if name == "in blocks":
            in_blocks(model)
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.bin").symlink_to(folder / "weights.bin")
        onnx.save(model, tmp_path / name / "graph.onnx")
        to = builder.plan("e", {"target": facts}, 1, MAX_GAMMA, ["sm89"], {}, None)["target"]
        made = builder.compile(
            "tensorrt_rtx", "x", "target", tmp_path / name, tmp_path / "out", facts, to
        )
        steps[name] = made.profiles[0].memory or 0
    assert steps["fp8"] <= steps["full"] < steps["in blocks"], steps


# Many architectures

BUILT = [
    "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma4", "phi",
    "phi3", "phi3-longrope", "gpt2", "opt", "gpt-neox", "olmo2", "stablelm", "granite", "cohere",
    "smollm3", "starcoder2", "mixtral", "qwen3-moe", "gpt-oss", "deepseek3",
]  # fmt: skip


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_architectures(workshop: Workshop, name: str, tmp_path: Path) -> None:
    """In bfloat16, which the export does not run: ONNX Runtime fails on some float16 graphs."""
    graphs = workshop.graphs(workshop.checkpoint(name), dtype="bfloat16")
    assert build(graphs, tmp_path / "out", backend="tensorrt_rtx", slots=2, sm=SM)
