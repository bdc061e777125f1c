"""The graph for the CPU, with Outrider's attention operator: it computes the same model, or it is
not kept, and its results are bitwise independent of how tokens are grouped into calls."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from checkpoints import WITH_ENCODER
from commands import CHECKOUT
from exported import edit_weights, graph, nodes, of_type, stored_as
from rounds import cases
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from workshop import MAX_LEN, Workshop

from export import compare
from export.host import attention, lowering, observing
from export.host.attention import WIDEST_HEAD, NotLowered
from export.host.checked import write_checked
from export.host.observing import BIAS_PADDING
from export.pair import export as export_pair
from runtime.backends.engine import Features
from runtime.backends.onnxruntime import OrtEngine
from runtime.files.errors import OutriderError
from runtime.files.graphs import GRAPH_FILE, HOST_FILE, read_pair
from runtime.sampling import kernel

CAPACITY = MAX_LEN + 16  # minimum number of rows per slot
# Plain; packed with biases; norms of queries and keys; a window; soft caps; products of flattened
# rows; three numbers per position; caches of other layers; biases by distance, an encoder; an audio
# encoder.
# Slow: scaled tables; learned positions; norms of transposed heads; sinks; latents; rotation of
# part of a head, and of neighbouring pairs.
LOWERED_ARCHITECTURES = cases(
    ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2", "qwen2.5-vl", "gemma4", "t5",
     "whisper"],
    [
        "phi3", "phi3-longrope", "opt", "gemma3", "gemma3n", "gpt-oss", "deepseek3", "gpt-neox",
        "cohere", "stablelm", "olmo2", "bloom", "codegen", "falcon", "gpt-neo", "mpt", "xglm",
        *(name for name in WITH_ENCODER if name != "t5"),
    ],
)  # fmt: skip
ROTATED_BY_OTHER_NODES = {"gpt-neox", "cohere", "deepseek3", "codegen", "falcon"}
TOO_WIDE = {"head_dim": 520}  # wider than the operator supports
# Experts and a fourth layer double the tracing time and add no new kind of attention.
SMALL_GEMMA4 = {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", *["full_attention"] * 2],
    "num_kv_shared_layers": 1, "enable_moe_block": False,
}  # fmt: skip


@pytest.mark.parametrize("name", LOWERED_ARCHITECTURES)
def test_attention_is_one_node_and_says_what_it_said(workshop: Workshop, name: str) -> None:
    shared_layers = int(name == "gemma4")
    source = workshop.checkpoint(name, **SMALL_GEMMA4) if shared_layers else workshop.example(name)
    folder = workshop.graphs(source)
    found, facts = nodes(folder, HOST_FILE), read_pair(folder).target
    assert found["outrider.Attention"] == len(facts.key_shapes) + shared_layers
    made = of_type(folder, "Attention", HOST_FILE)
    assert [len(node.output) for node in made].count(1) == shared_layers
    source_count = len(facts.encoder.key_shapes) if facts.encoder else 0
    assert found["outrider.SourceAttention"] == source_count
    assert not found.keys() & {".Attention", ".TensorScatter"}
    means = name in ("cohere", "gemma3n")  # the latter's are thresholds
    assert means or not found[".ReduceMean"]  # a norm is one node too
    assert name in ROTATED_BY_OTHER_NODES or not found.keys() & {".RotaryEmbedding", ".Neg"}
    # No other node reads all cache rows, in any backend.
    written = {node.output[0] for node in of_type(folder, "TensorScatter")}
    readers = {node.op_type for node in graph(folder).graph.node if written & {*node.input}}
    assert written and all(reader.endswith("Attention") for reader in readers)
    own, portable = (walk(engine(folder / "target", host=host)) for host in (True, False))
    np.testing.assert_allclose(own, portable, atol=2e-5 * (1 + np.abs(portable).max()), rtol=0)


def test_what_the_operator_cannot_do_has_no_such_graph(workshop: Workshop) -> None:
    folder = workshop.graphs(workshop.checkpoint("llama", **TOO_WIDE))
    assert not (folder / "target" / HOST_FILE).exists()
    assert HOST_FILE not in read_pair(folder).target.files


@pytest.mark.slow
def test_attention_that_stays_is_said(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products with weights of 16 bits are replaced all the same."""
    checkpoint = workshop.checkpoint("llama", **TOO_WIDE)
    source = stored_as(torch.bfloat16, checkpoint, tmp_path / "model")
    export_pair(str(source), None, tmp_path / "graphs", cache=tmp_path / "cache", max_len=64)
    assert nodes(tmp_path / "graphs", HOST_FILE)["outrider.HalfMatMul"]
    header = (CHECKOUT / "plugins" / "onnxruntime" / "outrider_attention.h").read_text()
    assert f"OUTRIDER_ATTENTION_WIDTH = {WIDEST_HEAD}," in header
    said = f"ONNX Runtime's attention (its heads are wider than {WIDEST_HEAD})"
    assert said in capsys.readouterr().err


def engine(folder: Path, *, host: bool = True, slots: int = 1, threads: int = 1) -> OrtEngine:
    facts = read_pair(folder.parent).target
    files = {name: file for name, file in facts.files.items() if host or name != HOST_FILE}
    facts = replace(facts, files=files)
    made = OrtEngine(folder, facts, slots=slots, max_outputs=48, threads=threads)
    for slot in range(slots) if facts.encoder else ():
        rng = np.random.default_rng(slots - slot)  # the last slot's source is the same in all
        if features := facts.encoder.features:
            shape = features.feature_size, features.frames
            made.encode(slot, Features(rng.standard_normal(shape, np.float32)))
        else:
            made.encode(slot, tuple(rng.integers(0, 99, 5 + 7 * (slots - slot)).tolist()))
    return made


def walk(engine: OrtEngine) -> npt.NDArray[np.float32]:
    """Logits of a prefill, rejected drafts, a step, and a call that ends with the slot."""
    rng = np.random.default_rng(0)
    found = []
    for position, width in (
        (0, 40),
        (40, 5),
        (38, 5),
        (43, 1),
        (44, 2),
        (engine.capacity - 30, 30),
    ):
        ids = rng.integers(0, engine.vocab_size, (1, width))
        index = np.arange(width)[-5:]
        found.append(engine.forward(ids, np.array([position]), index).copy())
    return np.concatenate(found, axis=1)


def logits_in_calls(
    engine: OrtEngine, width: int, neighbours: int = 0, rows: int = 0
) -> npt.NDArray[np.float32]:
    """Logits [48, V] of one text in calls of this width, in the last slot of a block. The texts in
    the other slots have other lengths. rows: minimum number of rows the slots start with."""
    rng = np.random.default_rng(0)
    text, others = rng.integers(0, engine.vocab_size, 48), rng.integers(0, 99, (neighbours, 48))
    engine._reserve([rows], 0)
    found = []
    for start in range(0, len(text), width):
        ids = np.concatenate([others, text[None]])[:, start : start + width]
        position = np.array([max(0, start - 5 * n) for n in range(neighbours, 0, -1)] + [start])
        index = np.arange(ids.shape[1])
        found.append(engine.forward(ids, position, index)[-1].copy())
    return np.concatenate(found)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *cases(
            [(name, {}) for name in ("llama", "qwen2", "qwen3", "mistral", "t5", "whisper")],
            [("phi3", {}), ("opt", {}), ("bart", {})],
        ),
        ("llama", {"cache_type": "int8"}),
        ("llama", {"weights": "int4"}),
        ("qwen2", {"weights": "int8"}),
        ("llama", {"weights": "int4", "cache_type": "int8"}),
    ],
)
def test_bits_do_not_depend_on_the_call(
    workshop: Workshop, name: str, options: dict[str, Any]
) -> None:
    """The logits do not depend on width, chunks, neighbours, threads or the number of rows."""
    folder = workshop.graphs(workshop.example(name), **options) / "target"
    want = logits_in_calls(engine(folder), 16)
    for width in (1, 2, 3, 5, 9, 48):
        assert (logits_in_calls(engine(folder), width) == want).all(), f"width {width}"
    assert (logits_in_calls(engine(folder, slots=4), 5, neighbours=3) == want).all()
    assert (
        logits_in_calls(engine(folder, slots=4, threads=2), 16, neighbours=3, rows=140) == want
    ).all()
    if not options:  # control: another order of the same sums differs
        assert (logits_in_calls(engine(folder, host=False), 16) != want).any()


def test_rows_of_eight_bits(workshop: Workshop) -> None:
    """The same model except for the rounding of cache rows. test_quantised.py checks its texts."""
    full = workshop.graphs(workshop.checkpoint("llama"))
    folder = workshop.graphs(workshop.checkpoint("llama"), cache_type="int8")
    facts, more = read_pair(folder).target, read_pair(full).target
    assert facts.cache == "int8" and facts.has_host_weights
    assert nodes(folder, HOST_FILE)["outrider.QuantizedCacheAttention"] == len(facts.key_shapes)
    assert 2 * facts.cache_bytes(3) < more.cache_bytes(3)
    own, portable = walk(engine(folder / "target")), walk(engine(full / "target"))
    difference = np.abs(own - portable).max() / (1 + np.abs(portable).max())
    assert 1e-4 < difference < 0.1, "only the cache rows are rounded"


def test_rows_that_eight_bits_cannot_hold_are_refused(workshop: Workshop, tmp_path: Path) -> None:
    """One element of each value row is 10,000 times the others, and the model ignores it."""
    source = Path(shutil.copytree(workshop.checkpoint("llama"), tmp_path / "outliers"))

    def stretch(weights: dict[str, Any]) -> None:
        for name, weight in weights.items():
            if name.endswith("v_proj.weight"):
                weight[::16] *= 1e4  # the first element of each head of 16
            if name.endswith("o_proj.weight"):
                weight *= 10
                weight[:, ::16] = 0

    edit_weights(source, stretch)
    with pytest.raises(OutriderError, match="int8 cache rows change a logit"):
        workshop.graphs(source, cache_type="int8")


@pytest.mark.parametrize(
    ("changes", "options", "cause"),
    [
        ({}, {"dtype": "float16"}, "is supported only by ONNX Runtime on the CPU"),
        ({}, {"form": "torch"}, "is supported only by ONNX Runtime on the CPU"),
        (TOO_WIDE, {}, "needs the graph for the CPU"),
    ],
)
def test_rows_of_eight_bits_are_for_this_graph_alone(
    workshop: Workshop, changes: dict[str, Any], options: dict[str, Any], cause: str
) -> None:
    with pytest.raises(OutriderError, match=f"CACHE=int8 {cause}"):
        workshop.graphs(workshop.checkpoint("llama", **changes), cache_type="int8", **options)


def test_it_is_run_wherever_the_library_is(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = workshop.graphs(workshop.checkpoint("llama"))
    shutil.copytree(source, tmp_path / "graphs")
    folder = tmp_path / "graphs" / "target"
    (folder / GRAPH_FILE).rename(folder / "aside")
    engine(folder, slots=2)
    monkeypatch.setattr(kernel, "available", lambda: False)
    with pytest.raises(OutriderError, match=GRAPH_FILE):
        engine(folder)
    (folder / "aside").rename(folder / GRAPH_FILE)
    engine(folder)


@pytest.mark.parametrize(
    ("name", "function", "wrong"),
    [
        ("mistral", "window_of", lambda mask, queries: 0),
        (
            "t5",
            "bias_of",
            lambda scores, queries: np.zeros((4, CAPACITY + BIAS_PADDING), np.float32),
        ),
    ],
)
def test_what_is_told_wrong_is_found_out(
    workshop: Workshop,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    function: str,
    wrong: Any,
) -> None:
    """Control: the graph is kept only if it agrees with the original."""
    source = workshop.example(name)
    folder = Path(shutil.copytree(workshop.graphs(source) / "target", tmp_path / "target"))
    kind = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    model = kind.from_pretrained(source, attn_implementation="eager").eval()
    reference = compare.reference(model, CAPACITY)
    assert "nodes, largest difference" in write_checked(folder, reference, None, None, CAPACITY)
    assert (folder / HOST_FILE).exists()
    monkeypatch.setattr(observing, function, wrong)
    assert "none: it would differ by" in write_checked(folder, reference, None, None, CAPACITY)
    assert not (folder / HOST_FILE).exists()


@pytest.mark.parametrize(("scale", "moved"), [([16], True), ([4, 1, 16], False)])
def test_a_norm_of_each_head_stays_behind_the_turn(scale: list[int], moved: bool) -> None:
    """Fault: a scale [H, 1, D] was moved to multiply [B, N, H, D]."""
    rows = ir.Value(name="rows", shape=ir.Shape([1, 5, 4, 16]))
    weight = ir.Value(name="scale", shape=ir.Shape(scale))
    turn = ir.node("Transpose", [rows], {"perm": (0, 2, 1, 3)})
    norm = ir.node("RMSNormalization", [turn.outputs[0], weight])
    whole = ir.Graph([rows, weight], norm.outputs, nodes=[turn, norm], opset_imports={"": 24})
    found = attention._untransposed_rows(ir.Model(whole, ir_version=10), norm.outputs[0])
    assert (found is not None) == moved


@pytest.mark.parametrize(("sizes", "fused"), [([1, 5, 64], True), ([1, 4, 5, 16], False)])
def test_a_sum_of_heads_is_not_fused_with_its_norm(sizes: list[int], fused: bool) -> None:
    """Fault: NanoChat with quantised weights was refused: ONNX Runtime did not run its graph."""
    rows, weight = ir.Value(name="rows", shape=ir.Shape(sizes)), ir.Value(name="scale")
    add = ir.node("Add", [rows, rows])
    add.outputs[0].shape = rows.shape
    norm = ir.node("RMSNormalization", [add.outputs[0], weight])
    whole = ir.Graph([rows, weight], norm.outputs, nodes=[add, norm], opset_imports={"": 24})
    lowering._fuse_sums(ir.Model(whole, ir_version=10))
    assert ("SkipSimplifiedLayerNormalization" in {node.op_type for node in whole}) == fused


@pytest.mark.parametrize(
    ("rows", "window"),
    [("1000 1100 1110 1111", 0), ("1000 1100 0110 0011", 2), ("1000 0100 0010 0001", 1)],
)
def test_windows_are_read_off_masks(rows: str, window: int) -> None:
    mask = np.array([[c == "1" for c in row] for row in rows.split()])
    assert observing.window_of(mask, np.arange(4)) == window


@pytest.mark.parametrize("rows", ["1000 1100 0010 0011", "1111 1111 1111 1111"])
def test_other_masks_are_left_to_the_other_graph(rows: str) -> None:
    mask = np.array([[c == "1" for c in row] for row in rows.split()])
    with pytest.raises(NotLowered):
        observing.window_of(mask, np.arange(4))


def test_other_biases_are_left_to_the_other_graph() -> None:
    """A bias is recognised if it depends on the distance alone, not if it depends on the row."""
    ages = np.subtract.outer(np.arange(4), np.arange(4))
    table = observing.bias_of(np.stack([-1.0 * ages, 2.0 * ages]), np.arange(4))
    assert table[:, :4].tolist() == [[-3, -2, -1, 0], [6, 4, 2, 0]]
    with pytest.raises(NotLowered):
        observing.bias_of(-1.0 * ages[None] * np.arange(1, 5)[:, None], np.arange(4))
