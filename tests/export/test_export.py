"""The graph is the contract's, computes what the model computes, or is not written.

The contract is docs/architecture.md's; "what the model computes" is the eager model on the whole
text, without a cache. Everything that cannot be exported is refused by name, with the reason.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from checkpoints import (
    ARCHITECTURES,
    CONTEXT,
    MAX_GAMMA,
    MAX_LEN,
    TOKENS,
    VOCAB_SIZE,
    Workshop,
    tokenizer,
    write,
)
from commands import CHECKOUT, environment, error_line, leftovers, run
from safetensors.torch import load_file, save_file
from transformers import AttentionMaskInterface, AutoModelForCausalLM, masking_utils

import export.__main__
import export.graph
from engines.bundle import build
from export import checkpoint, compare, decoder, loading, part, vocabulary
from export.pair import DEFAULT_MAX_LEN
from export.pair import export as export_pair
from runtime import load
from runtime.backends.onnxruntime import OrtEngine
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.manifest import GRAPH_FILE, ONE_SLOT_FILE, PART_FILE, Pair, read_pair
from runtime.files.torch_files import WEIGHTS_FILE

LAYERS = 2
CAPACITY = -(-(MAX_LEN + MAX_GAMMA + 1) // 8) * 8
TIED, UNTIED = "llama", "qwen2"


def graph(folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / "target" / GRAPH_FILE, load_external_data=False)


def eager(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [2, T, V] of the original, in float32."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids), use_cache=False).logits.numpy()


def text(rows: int, length: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, (rows, length))


# The contract


@pytest.mark.parametrize("name", [TIED, UNTIED, "gpt2", "gemma2", "mixtral"])
def test_inputs_and_outputs(workshop: Workshop, tmp_path: Path, name: str) -> None:
    folder = workshop.graphs(workshop.checkpoint(name))
    model = graph(folder)
    # A copy: ONNX's own tools refuse weights that have a second name, as ours have in the cache.
    copy = shutil.copytree(folder / "target", tmp_path / "target")
    onnx.checker.check_model(copy / GRAPH_FILE)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
    assert not model.functions
    facts = read_pair(folder).target
    caches = {
        f"{side}_{i}": (["slots", heads, "rows", width], onnx.TensorProto.FLOAT)
        for side, shapes in (("key", facts.key_shapes), ("value", facts.value_shapes))
        for i, (heads, width) in enumerate(shapes)
    }
    assert len(caches) == 2 * LAYERS
    inputs = {
        "input_ids": (["slots", "tokens"], onnx.TensorProto.INT64),
        "position": (["slots"], onnx.TensorProto.INT64),
        "logits_index": (["outputs"], onnx.TensorProto.INT64),
        **caches,
    }
    outputs = {
        "logits": (["slots", "outputs", VOCAB_SIZE], onnx.TensorProto.FLOAT),
        **{f"{cache}_out": shape for cache, shape in caches.items()},
    }
    for values, expected in ((model.graph.input, inputs), (model.graph.output, outputs)):
        assert {value.name: _type(value) for value in values} == expected
    assert facts.capacity == CAPACITY


def _type(value: onnx.ValueInfoProto) -> tuple[list[str | int], int]:
    tensor = value.type.tensor_type
    return [d.dim_param or d.dim_value for d in tensor.shape.dim], tensor.elem_type


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_norms_and_rotary_embeddings_are_single_nodes(workshop: Workshop, name: str) -> None:
    nodes = Counter(n.op_type for n in graph(workshop.graphs(workshop.checkpoint(name))).graph.node)
    assert nodes["RMSNormalization"] == 2 * LAYERS + 1
    assert nodes["RotaryEmbedding"] == 2 * LAYERS
    assert nodes["Attention"] == LAYERS
    assert nodes["TensorScatter"] == 2 * LAYERS
    primitives = {"Pow", "ReduceMean", "Sqrt", "Reciprocal", "Neg", "Slice", "Softmax"}
    assert not primitives & nodes.keys()


@pytest.mark.parametrize("name", [TIED, UNTIED, "mistral", "mixtral"])
def test_only_a_tied_weight_is_transposed_when_it_runs(workshop: Workshop, name: str) -> None:
    model = graph(workshop.graphs(workshop.checkpoint(name)))
    weights = {tensor.name for tensor in model.graph.initializer}
    transposed = [
        n.input[0] for n in model.graph.node if n.op_type == "Transpose" and n.input[0] in weights
    ]
    assert len(transposed) == (name == TIED)
    for weight in transposed:  # the embedding, which is looked up as well
        readers = [node.op_type for node in model.graph.node if weight in node.input]
        assert sorted(readers) == ["Gather", "Transpose"]


@pytest.mark.parametrize("name", [TIED, UNTIED, "mixtral"])
def test_every_weight_is_stored_once_beside_the_graph(workshop: Workshop, name: str) -> None:
    folder = workshop.graphs(workshop.checkpoint(name))
    facts = read_pair(folder).target
    assert facts.files.keys() <= {GRAPH_FILE, ONE_SLOT_FILE, WEIGHTS_FILE}
    external = [t for t in graph(folder).graph.initializer if t.data_location == t.EXTERNAL]
    places = {entry.value for t in external for entry in t.external_data if entry.key == "location"}
    assert places == {WEIGHTS_FILE}
    weights = (folder / "target" / WEIGHTS_FILE).stat().st_size
    small = sum(len(t.raw_data) for t in graph(folder).graph.initializer)
    assert 4 * facts.parameters * 0.98 < weights + small < 4 * facts.parameters * 1.05


@pytest.mark.parametrize("name", [TIED, "gemma2", "mixtral"])
def test_the_file_says_nothing_of_the_machine_that_made_it(workshop: Workshop, name: str) -> None:
    source = workshop.checkpoint(name)
    folder = workshop.graphs(source)
    model = graph(folder)
    described = [model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output]
    described += [*model.graph.value_info, *model.graph.initializer]
    assert not any(d.doc_string for d in described)
    assert not any(d.metadata_props for d in described)
    content = (folder / "target" / GRAPH_FILE).read_bytes()
    for trace in (CHECKOUT, source.parent, sys.prefix, "site-packages", ".py", "torch/"):
        assert str(trace).encode() not in content


def test_two_exports_are_the_same_files(workshop: Workshop, tmp_path: Path) -> None:
    """So that a bundle can be told from its hash, and a damaged part is simply made again."""
    options = {"max_len": 64, "cache": tmp_path / "cache"}
    source = str(workshop.checkpoint("gpt2"))
    first = export_pair(source, None, tmp_path / "out", **options)
    damaged = next((tmp_path / "cache").glob(f"*/{WEIGHTS_FILE}"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    second = export_pair(source, None, tmp_path / "out", **options)
    assert first == second
    assert damaged.stat().st_size == second.target.files[WEIGHTS_FILE].size


# What it computes


WALKED = [TIED, UNTIED, "gpt2", "gemma2", "mistral", "phi3-longrope", "mixtral"]


@pytest.mark.parametrize("name", WALKED)
def test_two_slots_of_any_lengths_with_rejected_drafts(workshop: Workshop, name: str) -> None:
    """A random walk: calls of any width and any outputs, garbage beyond the length, roll-back."""
    source = workshop.checkpoint(name)
    folder = workshop.graphs(source)
    facts = read_pair(folder).target
    engine = OrtEngine(folder / "target", facts, slots=3, widest=MAX_GAMMA + 1, threads=1)
    ids = text(2, 60)
    expected = eager(source, ids)
    bound = 1e-5 * (1 + np.abs(expected).max())
    rng = np.random.default_rng(9)
    length = np.array([17, 4])
    for slot, n in enumerate(length):  # slots 1 and 2: slot 0 is never touched
        last = np.array([n - 1])
        logits = engine.forward(ids[slot : slot + 1, :n], np.array([0]), last, slot + 1)
        assert np.abs(logits[0, 0] - expected[slot, n - 1]).max() < bound
    seen = set()
    while length.max() + MAX_GAMMA + 1 < ids.shape[1]:
        width, garbage = int(rng.integers(1, MAX_GAMMA + 2)), int(rng.integers(0, MAX_GAMMA + 1))
        length = np.maximum(length - rng.integers(0, 4, 2), 0)  # roll-back, into the prompt too
        call = text(2, width, seed=int(rng.integers(1 << 30)))
        right = max(1, width - garbage)  # the tokens that are of the text
        for slot in range(2):
            call[slot, :right] = ids[slot, length[slot] : length[slot] + right]
        index = np.sort(rng.permutation(right)[: rng.integers(1, right + 1)])
        logits = engine.forward(call, length, index, first_slot=1)
        for slot in range(2):
            difference = np.abs(logits[slot] - expected[slot, length[slot] + index]).max()
            assert difference < bound, f"width {width}, lengths {length}"
        length = length + right
        seen.add(width)
    assert len(seen) > 4
    assert all(not array[0].any() for array in engine._cache.values())


def test_soft_caps(workshop: Workshop) -> None:
    """Written out, not as the operator's attribute, which TensorRT-RTX refuses."""
    source = workshop.checkpoint("gemma2")
    model = graph(workshop.graphs(source))
    nodes = Counter(node.op_type for node in model.graph.node)
    assert (nodes["Tanh"], nodes["Attention"]) == (LAYERS + 1, 0)
    # Both caps bend what this checkpoint computes: without one of them it is another model.
    ids = text(1, 20)
    capped = eager(source, ids)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        other = AutoModelForCausalLM.from_pretrained(
            source, attn_implementation="eager", **{cap: 1e6}
        )
        with torch.no_grad():
            free = other(torch.from_numpy(ids), use_cache=False).logits.numpy()
        assert np.abs(free - capped).max() > 1e-2


def test_learned_positions_to_the_end_of_the_table(workshop: Workshop) -> None:
    """Drafted rows may lie beyond the table; those before are right all the same."""
    source = workshop.checkpoint("gpt2")
    folder = workshop.graphs(source, max_len=None)
    facts = read_pair(folder).target
    assert (facts.max_len, facts.capacity) == (CONTEXT, 272)
    engine = OrtEngine(folder / "target", facts, slots=1, widest=MAX_GAMMA + 1, threads=1)
    ids = text(1, CONTEXT)
    expected = eager(source, ids)
    start = CONTEXT - 3
    engine.forward(ids[:, :start], np.array([0]), np.array([0]))
    call = np.concatenate([ids[:, start:], text(1, MAX_GAMMA - 2)], axis=1)
    logits = engine.forward(call, np.array([start]), np.arange(3))
    assert np.abs(logits[0] - expected[0, start:]).max() < 1e-5 * (1 + np.abs(expected).max())


def test_float16(workshop: Workshop, tmp_path: Path) -> None:
    source = workshop.checkpoint(UNTIED)
    folder = workshop.graphs(source, dtype="float16")
    facts = read_pair(folder).target
    assert facts.max_difference is not None
    assert 0 < facts.max_difference <= facts.tolerance
    types = {v.name: _type(v)[1] for v in [*graph(folder).graph.input, *graph(folder).graph.output]}
    assert types["key_0"] == types["value_1_out"] == onnx.TensorProto.FLOAT16
    assert types["logits"] == onnx.TensorProto.FLOAT
    engine = OrtEngine(folder / "target", facts, slots=1, widest=1, threads=1)
    ids = text(1, 40)
    expected = eager(source, ids)
    difference = 0.0
    for i in range(40):
        logits = engine.forward(ids[:, i : i + 1], np.array([i]), np.array([0]))
        difference = max(difference, float(np.abs(logits[0, 0] - expected[0, i]).max()))
    assert 1e-5 < difference < 2e-2 * (1 + np.abs(expected).max())  # and it really is float16
    assert build(folder, tmp_path / "bundle", backend="onnxruntime", slots=1)
    result = load(tmp_path / "bundle").generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
    assert len(result.token_ids) == 8
    full = read_pair(workshop.graphs(source)).target
    assert full.cache_bytes(3) == 2 * facts.cache_bytes(3)


HALF = ["gemma2", "gpt2", "granite"]  # one of each kind of trouble: see the controls below
HALF_SLOW = [
    name
    for name in ARCHITECTURES
    if name not in {*HALF, UNTIED, "falcon", "bloom", "gptj", "mamba", "t5"}
]


@pytest.mark.parametrize(
    "name", [*HALF, *(pytest.param(name, marks=pytest.mark.slow) for name in HALF_SLOW)]
)
def test_architectures_in_float16(workshop: Workshop, name: str) -> None:
    source = workshop.checkpoint(name)
    facts = read_pair(workshop.graphs(source, dtype="float16")).target
    assert facts.max_difference is not None
    assert 0 < facts.max_difference <= facts.tolerance
    engine = load(workshop.bundle(source, dtype="float16"), slots=1, threads=1)
    assert len(engine.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True).token_ids) == 8


def test_control_a_norm_of_two_types_is_refused(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Gemma scales in float32. The one line is for any graph that ONNX Runtime refuses."""
    source = workshop.checkpoint("gemma2")
    norms = [
        node
        for node in graph(workshop.graphs(source, dtype="float16")).graph.node
        if node.op_type == "RMSNormalization"
    ]
    assert len(norms) == 4 * LAYERS + 1
    monkeypatch.setattr(export.graph, "_match_norms", lambda model: None)
    options = ["--dtype", "float16", "--max-len", str(MAX_LEN)]
    status, err = command(capsys, tmp_path, source, *options)
    assert status == EXIT_STATUS["backend"]
    assert "ONNX Runtime cannot run the float16 graph" in error_line(err, "backend")
    assert nothing_left(tmp_path)


def test_control_a_graph_that_crashes_onnx_runtime(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of its optimisers ONNX Runtime 1.31 dies of this graph; the export survives, says
    that it compared nothing, and this backend wants no such graph."""
    monkeypatch.setattr(compare, "ORT_LEFT_OUT", {})
    folder = tmp_path / "graphs"
    pair = export_pair(
        str(workshop.checkpoint("gpt2")),
        None,
        folder,
        dtype="float16",
        max_len=MAX_LEN,
        cache=tmp_path / "cache",
    )
    assert pair.target.max_difference is None
    assert pair.target.comparison.startswith("not run: ONNX Runtime crashes")
    with pytest.raises(OutriderError, match="crashes when it loads this float16 graph") as caught:
        build(folder, tmp_path / "bundle", backend="onnxruntime", slots=1)
    assert caught.value.kind == "backend"
    assert not (tmp_path / "bundle").exists()


def test_float32_decides_where_the_original_rounds_badly(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Granite's scores are not scaled down: two float16 computations are two bounds apart."""
    source = workshop.checkpoint("granite")
    copy = shutil.copytree(workshop.graphs(source, dtype="float16") / "target", tmp_path / "target")

    def reference(dtype: torch.dtype) -> compare.Reference:
        found = loading.load(checkpoint.find(str(source)), dtype)
        return compare.reference(found, CAPACITY, VOCAB_SIZE)

    rough, exact = reference(torch.float16), reference(torch.float32)
    assert not compare.compare(copy, rough, "float16").passed
    decided = compare.compare(copy, rough, "float16", lambda: exact)
    assert decided.passed
    assert "from the original in float32" in decided.what
    # Controls: it is not the rougher yardstick alone that passes, and another model does not.
    rounding = np.abs(rough.logits - exact.logits).max()
    assert decided.max_difference is not None
    assert decided.max_difference < rounding
    weights = np.fromfile(copy / WEIGHTS_FILE, np.float16)
    weights[len(weights) // 2 :: 7] = 0
    (copy / WEIGHTS_FILE).unlink()  # a link, like the cache's
    weights.tofile(copy / WEIGHTS_FILE)
    assert not compare.compare(copy, rough, "float16", lambda: exact).passed


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_an_original_that_overflows_is_refused(
    workshop: Workshop, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bound made of infinite logits would hold for anything; float32 is the control."""
    source = Path(shutil.copytree(workshop.checkpoint(UNTIED), tmp_path / "checkpoint"))
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] *= 1e5
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    status, err = command(capsys, tmp_path, source, "--dtype", dtype, "--max-len", "64")
    if dtype == "float32":
        assert status == 0
    else:
        assert status == EXIT_STATUS["checkpoint"]
        assert "says NaN or infinity in float16" in error_line(err, "checkpoint")
        assert nothing_left(tmp_path)


def test_bfloat16_is_exported_unchecked_and_not_for_this_backend(
    workshop: Workshop, tmp_path: Path
) -> None:
    folder = workshop.graphs(workshop.checkpoint("gpt2"), dtype="bfloat16")
    facts = read_pair(folder).target
    assert facts.max_difference is None
    assert facts.comparison.startswith("not run")
    types = {v.name: _type(v)[1] for v in graph(folder).graph.input}
    assert types["key_0"] == onnx.TensorProto.BFLOAT16
    with pytest.raises(OutriderError, match="bfloat16") as caught:
        build(folder, tmp_path / "bundle", backend="onnxruntime", slots=1)
    assert caught.value.kind == "backend"
    assert list(tmp_path.iterdir()) == []


# The comparison with the original


def test_a_lost_window_fails_the_build(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph that ignores the architecture's mask: right on short texts, wrong on long ones."""

    def causal_only(**kwargs: object) -> torch.Tensor:
        return decoder._mask(**{**kwargs, "mask_function": masking_utils.causal_mask_function})

    source = workshop.checkpoint("mistral")
    AttentionMaskInterface.register(decoder.NAME, causal_only)
    try:
        status, err = command(capsys, tmp_path, source)
    finally:
        AttentionMaskInterface.register(decoder.NAME, decoder._mask)
    assert status == EXIT_STATUS["difference"]
    assert "differs from the original" in error_line(err, "difference")
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("value", [0.0, 1.0, np.nan, np.inf])
def test_one_wrong_weight_is_seen(workshop: Workshop, tmp_path: Path, value: float) -> None:
    source = workshop.checkpoint(UNTIED)
    copy = Path(shutil.copytree(workshop.graphs(source) / "target", tmp_path / "target"))
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    original = compare.reference(model, CAPACITY, VOCAB_SIZE)
    sound = compare.compare(copy, original, "float32")
    assert sound.passed
    assert sound.max_difference is not None
    weights = np.fromfile(copy / WEIGHTS_FILE, np.float32)
    if value:  # 0 stands for the control
        weights[len(weights) // 2] += value
    weights.tofile(copy / WEIGHTS_FILE)
    assert compare.compare(copy, original, "float32").passed == (value == 0)


# Refusals


def command(
    capsys: pytest.CaptureFixture[str], folder: Path, model: Path | str, *more: str
) -> tuple[int, str]:
    """Status and stderr of `python -m export`, in this process, with everything below `folder`."""
    places = ["--out", str(folder / "out"), "--cache", str(folder / "cache")]
    capsys.readouterr()
    status = export.__main__.main(["--model", str(model), *places, *more])
    return status, capsys.readouterr().err


def nothing_left(folder: Path) -> bool:
    parts = list((folder / "cache").iterdir()) if (folder / "cache").exists() else []
    return not (folder / "out").exists() and not parts and not leftovers(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("falcon", "attention does not go through Transformers' attention interface"),
        ("bloom", "attention does not go through Transformers' attention interface"),
        ("gptj", "attention does not go through Transformers' attention interface"),
        ("mamba", "not all of its layers keep a KV cache"),
        ("t5", "it is an encoder-decoder model"),
    ],
)
def test_architectures_that_the_graph_cannot_express(
    workshop: Workshop, tmp_path: Path, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = workshop.checkpoint(name)
    status, err = command(capsys, tmp_path, source, "--max-len", "64")
    assert status == EXIT_STATUS["architecture"]
    cause = error_line(err, "architecture")
    assert reason in cause
    assert ARCHITECTURES[name]().__class__.__name__.removesuffix("Config").lower() in cause.lower()
    assert nothing_left(tmp_path)


def test_attention_that_the_graph_cannot_express() -> None:
    """Architectures not written yet: a bias, a mask of their own."""
    rows = torch.zeros(1, 2, 3, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(decoder.UnsupportedArchitecture, match="its attention takes alibi"):
        decoder._attention(torch.nn.Identity(), rows, rows, rows, mask, alibi=torch.zeros(2))
    with pytest.raises(decoder.UnsupportedArchitecture, match="outside the mask interface"):
        decoder._attention(torch.nn.Identity(), rows, rows, rows, None)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_rope_that_changes_with_the_length(
    workshop: Workshop, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within the original context they are exact: see the random walk, and test_transformers."""
    source = workshop.checkpoint(name)
    status, err = command(capsys, tmp_path, source, "--max-len", str(CONTEXT // 2 + 1))
    assert status == EXIT_STATUS["architecture"]
    assert f"Build with MAX_LEN={CONTEXT // 2}." in err
    assert "position embeddings" in error_line(err, "architecture")
    assert nothing_left(tmp_path)


def test_max_len(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def make(role: str, found: object, dtype: str, max_len: int, *_: object, **__: object) -> None:
        asked.append(max_len)
        raise OutriderError("disk", "far enough", "Stop.")

    monkeypatch.setattr(part, "make", make)
    small = workshop.checkpoint(TIED)
    large = workshop.checkpoint(TIED, max_position_embeddings=4096)
    for source, options in ((small, []), (large, []), (small, ["--max-len", "99"])):
        command(capsys, tmp_path, source, *options)
    assert asked == [CONTEXT, DEFAULT_MAX_LEN, 99]
    for wrong in (CONTEXT + 1, 31):
        status, err = command(capsys, tmp_path, small, "--max-len", str(wrong))
        assert status == EXIT_STATUS["option"]
        assert f"MAX_LEN={wrong}" in error_line(err, "option")
    assert len(asked) == 3


def _drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _misshape_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name][:-1].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a tensor is missing": (_drop_a_tensor, "checkpoint", "lacks 1 of its weights"),
    "a tensor of another shape": (_misshape_a_tensor, "checkpoint", "weights"),
    "truncated weights": (_truncate, "checkpoint", "cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "checkpoint", "has no weights"),
    "no config": (lambda f: (f / "config.json").unlink(), "checkpoint", "has no config.json"),
    "config is no JSON": (
        lambda f: (f / "config.json").write_text("{'model_type': "),
        "checkpoint",
        "config.json",
    ),
    "config of an unknown model": (
        lambda f: (f / "config.json").write_text('{"model_type": "steam-engine"}'),
        "architecture",
        "steam-engine",
    ),
    "no tokenizer": (_no_tokenizer, "checkpoint", "tokenizer"),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        "checkpoint",
        "tokenizer",
    ),
    "broken generation_config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "checkpoint",
        "generation_config.json",
    ),
    "no folder": (shutil.rmtree, "checkpoint", "is not a folder"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damaged_checkpoints(
    workshop: Workshop, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, kind, cause = DAMAGE[what]
    copy = Path(shutil.copytree(workshop.checkpoint(UNTIED), tmp_path / "checkpoint"))
    damage(copy)
    status, err = command(capsys, tmp_path, copy, "--max-len", "64")
    assert status == EXIT_STATUS[kind], err
    assert cause in error_line(err, kind)
    assert nothing_left(tmp_path)


def test_a_foreign_folder_is_refused_before_the_work(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.md").write_text("years of work")
    status, err = command(capsys, tmp_path, workshop.checkpoint(TIED))
    assert status == EXIT_STATUS["disk"]
    assert "cannot be replaced" in error_line(err, "disk")
    assert err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_a_name_on_the_hub_without_a_network(tmp_path: Path) -> None:
    failed = run("export", "--model", "nobody/nothing", "--out", tmp_path / "out", timeout=120)
    assert failed.returncode == EXIT_STATUS["checkpoint"]
    assert "nobody/nothing" in error_line(failed.stderr, "checkpoint")
    assert list(tmp_path.iterdir()) == []


# The pair


def test_a_pair_of_different_tokenizers(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is exported, naming the first id and how many there are."""
    other = [*TOKENS]
    other[139], other[140], other[141] = TOKENS[141], TOKENS[139], TOKENS[140]
    draft = workshop.checkpoint(TIED, tokens=tuple(other))
    target = workshop.checkpoint(UNTIED)
    status, err = command(capsys, tmp_path, target, "--draft", str(draft), "--max-len", "64")
    assert status == EXIT_STATUS["vocabulary"]
    assert error_line(err, "vocabulary") == (
        f"id 139 is {TOKENS[139]!r} in the target and {TOKENS[141]!r} in the draft (first of 3)"
    )
    assert nothing_left(tmp_path)
    assert "trace" not in err


def test_a_narrower_draft_and_padding(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    """Widths padded differently, and tokens that the draft lacks (traps 15 and 16).

    The target has 264 tokens in 320 columns, the draft 257 in 260.
    """
    tokens = (*TOKENS, *(f"<extra {i}>" for i in range(7)))
    target = workshop.checkpoint(TIED, tokens=tokens, vocab_size=320)
    draft = workshop.checkpoint(TIED, seed=7, vocab_size=260)
    bundle = workshop.bundle(target, draft)
    pair = read_pair(workshop.graphs(target, draft))
    assert pair.draft is not None
    assert (pair.vocab_size, pair.target.vocab_size, pair.draft.vocab_size) == (264, 320, 260)
    said = vocabulary.check_same_tokens(tokenizer(tokens), tokenizer(), 260)
    assert said.startswith("7 of the target's tokens")
    engine = load(bundle, slots=1)
    # Greedy over the common part: what the eager model says, padding left out.
    prompt = [263, *text(1, 9)[0].tolist()]
    result = engine.generate(prompt, max_new_tokens=60, gamma=4, ignore_eos=True)
    logits = eager(target, np.array([prompt + result.token_ids]))[0, len(prompt) - 1 : -1]
    assert result.token_ids == logits[:, :264].argmax(-1).tolist()
    # Controls: padding would have been chosen, and tokens that the draft lacks are said.
    assert (logits.argmax(-1) >= 264).any()
    sampled = engine.generate(prompt, max_new_tokens=110, temperature=5.0, seed=1, ignore_eos=True)
    assert any(token >= 257 for token in sampled.token_ids)
    assert max(sampled.token_ids) < 264


def test_a_draft_of_a_shorter_context(workshop: Workshop) -> None:
    """Trap 18: the draft rides as far as it can, the target goes on alone."""
    target, draft = workshop.checkpoint(TIED), workshop.checkpoint("gpt2", n_positions=48)
    pair = read_pair(workshop.graphs(target, draft))
    assert pair.draft is not None
    assert (pair.max_len, pair.draft.max_len, pair.draft.capacity) == (MAX_LEN, 48, CAPACITY)
    engine = load(workshop.bundle(target, draft), slots=1)
    prompt = text(1, 10)[0].tolist()
    result = engine.generate(prompt, max_new_tokens=100, gamma=4, ignore_eos=True)
    logits = eager(target, np.array([prompt + result.token_ids]))[0, len(prompt) - 1 : -1]
    assert result.token_ids == logits.argmax(-1).tolist()
    assert result.tokens[-1].origin == "plain"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([5, 3, 5], 9, [3, 5]),  # the list that `generate` stops at
        (7, 9, [7]),
        (None, [9, 4], [4, 9]),
        (None, None, [0]),  # the tokenizer's
    ],
)
def test_end_of_text_ids(
    tmp_path: Path, generation: object, config: object, expected: list[int]
) -> None:
    folder = write(tmp_path / "checkpoint", TIED)
    for name, ids in (("config.json", config), ("generation_config.json", generation)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": ids}))
    found = checkpoint.find(str(folder))
    assert vocabulary.end_of_text_ids(found, vocabulary.load_tokenizer(found)) == expected
    if generation is None:
        (folder / "generation_config.json").unlink()
        assert vocabulary.end_of_text_ids(found, vocabulary.load_tokenizer(found)) == expected


def test_tokenizer_and_chat_template_travel_along(workshop: Workshop, tmp_path: Path) -> None:
    plain = read_pair(workshop.graphs(workshop.checkpoint(TIED))).tokenizer
    assert (plain.chat_template, plain.vocab_size) == (False, VOCAB_SIZE)
    copy = Path(shutil.copytree(workshop.checkpoint(TIED), tmp_path / "checkpoint"))
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ eos_token }}"
    words = tokenizer()
    words.chat_template = template
    words.save_pretrained(copy)
    out = tmp_path / "out"
    # The graph is the cached one: words are no part of it.
    pair = export_pair(
        str(copy), None, out, max_len=MAX_LEN, max_gamma=MAX_GAMMA, cache=workshop.cache
    )
    assert pair.tokenizer.chat_template
    assert (out / "tokenizer" / "chat_template.jinja").read_text() == template
    assert pair.tokenizer.key != plain.key
    assert pair.tokenizer.special_tokens == {"eos_token": TOKENS[0]}
    build(out, tmp_path / "bundle", backend="onnxruntime", slots=1)
    engine = load(tmp_path / "bundle")
    assert engine.tokenizer.render_chat([{"role": "user", "content": "hi"}]) == f"<hi>{TOKENS[0]}"
    assert engine.tokenizer.encode("hi") == words.encode("hi", add_special_tokens=False)


# The cache


def test_parts_are_found_again_by_what_they_are_made_from(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "cache"
    source = Path(shutil.copytree(workshop.checkpoint(TIED), tmp_path / "checkpoint"))
    shutil.copytree(workshop.graphs(workshop.checkpoint(TIED)), tmp_path / "first")
    key = read_pair(tmp_path / "first").target.key
    shutil.copytree(workshop.cache / key[:16], cache / key[:16])
    made: list[str] = []

    class Again(Exception):
        """It would be exported."""

    def again(*arguments: object) -> None:
        made.append(str(arguments[-1]))
        raise Again

    monkeypatch.setattr(part, "_export", again)

    def export_again(**options: object) -> Pair | None:
        options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, "cache": cache, **options}
        try:
            return export_pair(str(source), None, tmp_path / "out", **options)
        except Again:
            return None

    assert export_again() == read_pair(tmp_path / "first")
    assert made == []
    assert f"cached (key {key[:8]})" in capsys.readouterr().err
    for changed in ({"max_len": MAX_LEN - 1}, {"max_gamma": 4}, {"dtype": "float16"}):
        assert export_again(**changed) is None
        assert "cached" not in capsys.readouterr().err
    assert len({key, *made}) == 4
    assert export_again(force=True) is None
    assert made[3:] == [key]
    # One weight less precise than it was.
    weights = bytearray((source / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (source / "model.safetensors").write_bytes(weights)
    assert export_again() is None
    weights[-1] ^= 1
    (source / "model.safetensors").write_bytes(weights)
    assert export_again() is not None
    # Parts that are not what they were.
    for name in (GRAPH_FILE, WEIGHTS_FILE, PART_FILE):
        intact = (cache / key[:16] / name).read_bytes()
        for damaged in (intact[:-2], b"\0" + intact[1:], None):
            path = cache / key[:16] / name
            path.unlink()  # a new file: `out` holds links to the old one
            if damaged is not None:
                path.write_bytes(damaged)
            assert export_again() is None, name
            path.write_bytes(intact)
    assert export_again() is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "pickle"])
def test_other_ways_to_store_weights(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    source = workshop.checkpoint(TIED)
    copy = Path(shutil.copytree(source, tmp_path / "checkpoint"))
    model = AutoModelForCausalLM.from_pretrained(source)
    (copy / "model.safetensors").unlink()
    if kind == "shards":
        model.save_pretrained(copy, max_shard_size="100KB")
        assert len(list(copy.glob("*.safetensors"))) > 2
    else:
        torch.save(model.state_dict(), copy / "pytorch_model.bin")
    options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, "cache": tmp_path / "cache"}
    pair = export_pair(str(copy), None, tmp_path / "out", **options)
    assert pair.target.files == read_pair(workshop.graphs(source)).target.files


# Memory


PEAK = """
import sys, threading
from pathlib import Path
import export.pair, onnxruntime, transformers.models.qwen2.modeling_qwen2

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

before = peak = resident("RssAnon")
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, resident("RssAnon"))

watcher = threading.Thread(target=watch)
watcher.start()
folder = Path(sys.argv[2])
export.pair.export(sys.argv[1], None, folder / "out", max_len=64, cache=folder / "cache")
done.set()
watcher.join()
print(peak - before, resident("VmHWM") - before)
"""


@pytest.mark.slow
def test_exporting_takes_little_memory_beside_the_files(tmp_path: Path) -> None:
    """Weights are read and written through mapped files, which the system can drop at any time;
    what it cannot drop is a fraction of them, though the graph is run as well."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
    source = write(tmp_path / "checkpoint", UNTIED, num_attention_heads=16, **sizes)
    size = (source / "model.safetensors").stat().st_size
    assert size > 350e6
    process = subprocess.run(
        [sys.executable, "-c", PEAK, str(source), str(tmp_path)],
        cwd=CHECKOUT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    anonymous, everything = map(int, process.stdout.split())
    assert anonymous < 0.5 * size
    # Mapped pages included: 1.5 x the checkpoint, beside what tracing makes PyTorch load.
    assert everything < 1.5 * size + 128 * 2**20
