"""Engines for RTX GPUs, built without one: what is in the bundle, and what is refused in one line.

An engine cannot be loaded without a GPU. What it was made from can be looked at: the network that
the parser made of the graph, its profiles, the file's header and the names in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import MAX_GAMMA, MAX_LEN, Workshop
from commands import error_line
from rtx import SM, arguments, needs_library

import engines.__main__
from engines import bundle as bundles
from engines import gpus
from engines.bundle import build, engine_plan, memory_plan
from engines.tensorrt import builder as tensorrt_builder
from engines.tensorrt import rtx as tensorrt_rtx_backend
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.manifest import (
    MANIFEST_FILE,
    PAIR_FILE,
    GraphFacts,
    read_bundle,
    read_pair,
)
from runtime.files.records import write_json

CAPACITY = -(-(MAX_LEN + MAX_GAMMA + 1) // 8) * 8


@needs_library
def test_a_bundle_holds_engines_in_place_of_graphs(rtx_bundle: Path, graphs: Path) -> None:
    manifest, pair = read_bundle(rtx_bundle), read_pair(graphs)
    assert manifest.backend == "tensorrt_rtx" and manifest.pair == pair
    assert manifest.versions == tensorrt_rtx_backend.versions()
    names = {str(path.relative_to(rtx_bundle)) for path in rtx_bundle.rglob("*") if path.is_file()}
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
def test_the_file_is_an_engine_of_the_contract(rtx_bundle: Path, graphs: Path, role: str) -> None:
    """Its header's version, every input and output by name, and all of the weights."""
    facts = getattr(read_pair(graphs), role)
    content = (rtx_bundle / role / "engine.rtx").read_bytes()
    version = bytes(map(int, read_bundle(rtx_bundle).versions["tensorrt_rtx"].split(".")))
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
def test_the_network_is_the_contract(rtx_bundle: Path, graphs: Path) -> None:
    import tensorrt_rtx as trt

    facts, engines = read_pair(graphs).target, read_bundle(rtx_bundle).engines
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

    def compile(*_: object) -> None:
        raise OutriderError("difference", "far enough", "Stop.")

    monkeypatch.setattr(tensorrt_rtx_backend, "compile", compile)
    # Of a GPU that is elsewhere nothing is known.
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
    """And what memory it takes is told before and after what is compiled."""
    out = tmp_path / "out"

    def again(graphs: Path, sm: str = "89", *more: str) -> tuple[list[str], str]:
        """Which models were compiled; all that was said."""
        capfd.readouterr()
        assert engines.__main__.main([*arguments(graphs, out, sm), *more]) == 0
        said = capfd.readouterr().err
        return re.findall(r"^(\w+) +compile", said, re.MULTILINE), said

    compiled, said = again(graphs)
    assert compiled == ["target", "draft"]
    lines = said.splitlines()
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
    assert plan == memory_plan(manifest.pair, 1)
    assert activations > 2**20

    made = (out / MANIFEST_FILE).stat().st_ino
    assert again(graphs)[0] == []
    assert (out / MANIFEST_FILE).stat().st_ino == made
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("target", "tokenizer"):
        (alone / name).symlink_to(graphs / name)
    write_json(alone / PAIR_FILE, "pair", dataclasses.replace(read_pair(graphs), draft=None))
    assert again(alone)[0] == []  # the target's engine stays
    assert not (out / "draft").exists()
    (out / "target" / "engine.rtx").write_bytes(b"")
    assert again(alone)[0] == ["target"]
    read_bundle(out)
    assert again(alone, "89,80")[0] == ["target"]
    made = (out / MANIFEST_FILE).stat().st_ino
    assert again(alone, "80,89,80")[0] == []
    assert (out / MANIFEST_FILE).stat().st_ino == made
    assert again(alone, "80,89", "--force")[0] == ["target"]


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
