"""The graph follows the contract (docs/graph.md) and computes what the model computes.

The reference is the eager model on the whole text, without a cache.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from checkpoints import VOCAB_SIZE, write, write_any
from commands import CHECKOUT, limited_files
from exported import LAYERS, SHORT, SHORT_DRAFT, TIED, UNTIED, eager, graph, random_ids, type_of
from rounds import cases
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration
from workshop import CAPACITY, MAX_GAMMA, MAX_LEN, Workshop

from export import graph as simplified
from export.checkpoint import find
from export.decoder import Decoder, Example, example_caches
from export.functions import attention, recurrence
from export.functions.own import define
from export.functions.replaced import patched_layers
from export.loading import cache_shapes, load
from export.pair import export as export_pair
from runtime.backends.onnxruntime import OrtEngine
from runtime.files.errors import OutriderError
from runtime.files.graphs import GRAPH_FILE, HOST_FILE, read_pair
from runtime.files.torch_files import WEIGHTS_FILE


@pytest.mark.parametrize("name", cases([TIED, UNTIED, "gpt2", "gemma2"], ["mixtral"]))
def test_inputs_and_outputs(workshop: Workshop, name: str) -> None:
    folder = workshop.graphs(workshop.example(name))
    model = graph(folder)
    onnx.checker.check_model(folder / "target" / GRAPH_FILE)
    own = {"gemma2": "CappedAttention"}.get(name)
    assert {o.domain: o.version for o in model.opset_import} == {"": 24} | (
        {"outrider": 1} if own else {}
    )
    assert [function.name for function in model.functions] == ([own] if own else [])
    facts = read_pair(folder).target
    assert facts.files.keys() <= {GRAPH_FILE, HOST_FILE, WEIGHTS_FILE}
    caches = {
        f"{side}_{i}": (["slots", heads, "rows", width], onnx.TensorProto.FLOAT)
        for side, shapes in (("key", facts.key_shapes), ("value", facts.value_shapes))
        for i, (heads, width) in enumerate(shapes)
    }
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
        assert {value.name: type_of(value) for value in values} == expected
    assert facts.capacity == CAPACITY


@pytest.mark.parametrize("name", cases([TIED, UNTIED], ["mixtral"]))
def test_nodes_and_weights(workshop: Workshop, name: str) -> None:
    """Norms, rotations and attention are single nodes; weights are stored once, beside the graph,
    in the layout that is read, and only a tied matrix is transposed at run time."""
    folder = workshop.graphs(workshop.example(name))
    facts, described = read_pair(folder).target, graph(folder).graph
    nodes, layers = Counter(node.op_type for node in described.node), len(facts.key_shapes)
    assert nodes["RMSNormalization"] == 2 * layers + 1
    assert nodes["RotaryEmbedding"] == nodes["TensorScatter"] == 2 * layers
    assert nodes["Attention"] == layers
    primitives = {"Pow", "ReduceMean", "Sqrt", "Reciprocal", "Neg", "Slice", "Softmax"}
    assert name == "mixtral" or not primitives & nodes.keys()  # its router uses some of them
    weights = {tensor.name: tensor for tensor in described.initializer}
    transposed = [
        node.input[0]
        for node in described.node
        if node.op_type == "Transpose" and node.input[0] in weights
    ]
    assert len(transposed) == (name == TIED)
    for weight in transposed:  # the embedding, which is looked up as well
        readers = [node.op_type for node in described.node if weight in node.input]
        assert sorted(readers) == ["Gather", "Transpose"]
    # ONNX Runtime would transpose it into a copy whenever it loads the graph.
    host = graph(folder, HOST_FILE).graph
    kept = {node.input[0] for node in host.node if node.op_type == "Transpose"}
    assert not kept & {tensor.name for tensor in host.initializer}
    external = [t for t in weights.values() if t.data_location == t.EXTERNAL]
    places = {entry.value for t in external for entry in t.external_data if entry.key == "location"}
    assert places == {WEIGHTS_FILE}
    size = (folder / "target" / WEIGHTS_FILE).stat().st_size
    size += sum(len(tensor.raw_data) for tensor in weights.values())
    assert 4 * facts.parameters * 0.98 < size < 4 * facts.parameters * 1.05


@pytest.mark.parametrize("name", cases([TIED, "gemma2"], ["mixtral"]))
def test_the_file_says_nothing_of_the_machine_that_made_it(workshop: Workshop, name: str) -> None:
    source = workshop.example(name)
    folder = workshop.graphs(source)
    model = graph(folder)
    described = [model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output]
    described += [*model.graph.value_info, *model.graph.initializer]
    assert not any(d.doc_string or d.metadata_props for d in described)
    content = (folder / "target" / GRAPH_FILE).read_bytes()
    for trace in (CHECKOUT, source.parent, sys.prefix, "site-packages", ".py", "torch/"):
        assert str(trace).encode() not in content


def test_two_exports_are_the_same_files(workshop: Workshop, tmp_path: Path) -> None:
    """A hash thus identifies a bundle, and a damaged part can simply be exported again."""
    source = str(workshop.example("gpt2"))
    options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, "cache": tmp_path / "cache"}
    first = export_pair(source, None, tmp_path / "out", **options)
    damaged = tmp_path / "cache" / first.target.key[:16] / WEIGHTS_FILE
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert export_pair(source, None, tmp_path / "out", **options) == first
    assert damaged.stat().st_size == first.target.files[WEIGHTS_FILE].size


@pytest.mark.parametrize("value", [0.95, 0.1])
def test_the_quantile_of_a_constant_is_a_constant(value: float) -> None:
    """Fault: Gemma 3n, which derives a threshold from it, was refused: ONNX has no erfinv."""

    class Threshold(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - torch.distributions.Normal(0, 1).icdf(torch.tensor(value))

    x = torch.zeros(3)
    made = simplified.trace(Threshold(), Example((x,), (None,), ["x"], ["y"]))
    session = ort.InferenceSession(ir.to_proto(made).SerializeToString())
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], Threshold()(x), rtol=1e-6)


WALKED = cases([TIED, UNTIED, "gpt2", "gemma2", "mistral"], ["mixtral", "phi3-longrope"])


def test_weights_that_numpy_cannot_write(tmp_path: Path) -> None:
    """Fault: a full disk ended in a traceback, because NumPy's error has no errno."""
    array = ir.tensor(np.ones(1 << 16, np.float32), name="w")
    made = ir.Graph([], [], nodes=[], initializers=[ir.Value(name="w", const_value=array)])
    model = ir.Model(made, ir_version=10)
    simplified.write_model(model, tmp_path / GRAPH_FILE, WEIGHTS_FILE)
    with limited_files(65536), pytest.raises(OutriderError, match="bin cannot be written") as error:
        simplified.write_model(model, tmp_path / "again.onnx", "again.bin")
    assert error.value.kind == "disk"


@pytest.mark.parametrize("name", WALKED)
def test_two_slots_of_any_lengths_with_rejected_drafts(workshop: Workshop, name: str) -> None:
    """A random walk: calls of any width, any output positions, garbage rows beyond the length,
    roll-back."""
    source = workshop.example(name)
    folder = workshop.graphs(source)
    facts = read_pair(folder).target
    engine = OrtEngine(folder / "target", facts, slots=3, max_outputs=MAX_GAMMA + 1, threads=1)
    ids = random_ids(2, 60)
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
        call = random_ids(2, width, seed=int(rng.integers(1 << 30)))
        right = max(1, width - garbage)  # the number of tokens that belong to the text
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


def test_learned_positions_to_the_end_of_the_table(workshop: Workshop) -> None:
    """Drafted rows may lie beyond the table; those within it are still right."""
    source = workshop.checkpoint("gpt2", **SHORT_DRAFT)
    folder = workshop.graphs(workshop.checkpoint(TIED), source)
    facts = read_pair(folder).draft
    assert facts is not None and (facts.max_len, facts.capacity) == (SHORT, CAPACITY)
    engine = OrtEngine(folder / "draft", facts, slots=1, max_outputs=MAX_GAMMA + 1, threads=1)
    ids = random_ids(1, SHORT)
    expected = eager(source, ids)
    start = SHORT - 3
    engine.forward(ids[:, :start], np.array([0]), np.array([0]))
    call = np.concatenate([ids[:, start:], random_ids(1, MAX_GAMMA - 2)], axis=1)
    logits = engine.forward(call, np.array([start]), np.arange(3))
    assert np.abs(logits[0] - expected[0, start:]).max() < 1e-5 * (1 + np.abs(expected).max())


def test_a_model_that_computes_the_logits_of_all_positions(tmp_path: Path) -> None:
    """Some models ignore `logits_to_keep`, or pass it to their attention. Fault: refused."""
    assert write_any(tmp_path, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration) is None
    checkpoint, ids = find(str(tmp_path)), torch.from_numpy(random_ids(2, 5))
    model = load(checkpoint, torch.float32)
    with torch.no_grad():
        every = model(input_ids=ids).logits
    shapes, index = cache_shapes(model, checkpoint), torch.tensor([3, 0])
    rows = [example_caches(side, 5, torch.float32) for side in (shapes.keys, shapes.values)]
    with torch.no_grad():
        logits, *_ = Decoder(model, None)(ids, torch.zeros(2, dtype=torch.int64), index, *rows)
    torch.testing.assert_close(logits, every[:, index])


@pytest.mark.parametrize(
    ("name", "overrides", "kv_heads"),
    [
        ("bloom", {"n_head": 6, "hidden_size": 96}, 6),
        ("falcon", {"multi_query": False, "bias": True, "parallel_attn": False}, 4),
        ("falcon-40b", {"bias": True, "num_ln_in_parallel_attn": 1}, 2),
        ("gpt-neo", {"attention_types": [[["local"], 2]]}, 4),
        ("mpt", {"n_heads": 6, "d_model": 96}, 6),
        ("mpt", {"attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.5}}, 4),
        ("xglm", {"scale_embedding": False, "attention_heads": 1}, 1),
    ],
)
def test_options_of_older_layers(
    tmp_path: Path, name: str, overrides: dict[str, Any], kv_heads: int
) -> None:
    """As the decoder computes them in torch, in two calls. Fault: Falcon's caches had a row for
    each head, 16 times those of its checkpoint of 40 B."""
    checkpoint, ids = find(str(write(tmp_path, name, **overrides))), random_ids(2, 30)
    model = load(checkpoint, torch.float32)
    shapes = cache_shapes(model, checkpoint)
    assert [heads for heads, _ in shapes.keys + shapes.values] == [kv_heads] * 2 * LAYERS
    rows = [example_caches(side, 40, torch.float32) for side in (shapes.keys, shapes.values)]
    index, calls = torch.arange(15), []
    for start in (0, 15):
        part, position = torch.from_numpy(ids[:, start : start + 15]), torch.tensor([start, start])
        with torch.no_grad():
            calls.append(Decoder(model, 256)(part, position, index, *rows)[0])
    np.testing.assert_allclose(torch.cat(calls, 1), eager(tmp_path, ids), atol=1e-4)


@pytest.mark.parametrize(
    ("operator", "constant", "left"),
    [("Add", 0, 0), ("Add", 1e-20, 1), ("Mul", 1, 0), ("Mul", 1.000001, 1)],
)
def test_constants_that_are_nearly_nothing_stay(operator: str, constant: float, left: int) -> None:
    """Without such a constant a router of experts divides 0 by 0."""
    x = ir.val("x", ir.DataType.FLOAT, [4])
    number = ir.node("Constant", [], {"value": ir.tensor(np.float32(constant))})
    node = ir.node(operator, [x, number.outputs[0]])
    absolute = ir.node("Abs", node.outputs)
    nodes = [number, node, absolute]
    imports = {"": simplified.OPSET}
    made = ir.Graph([x], absolute.outputs, nodes=nodes, opset_imports=imports, name="made")
    model = ir.Model(made, ir_version=11)
    simplified.simplify(model)
    assert [each.op_type for each in model.graph].count(operator) == left


@pytest.mark.parametrize(
    ("name", "softcap", "sunk"),
    [
        ("UnevenAttention", None, False), ("CappedAttention", 1.5, False),
        ("SinkAttention", None, True), ("CappedSinkAttention", 1.5, True),
    ],
)  # fmt: skip
def test_attention_that_the_operator_lacks(name: str, softcap: float | None, sunk: bool) -> None:
    """The ONNX function, with two query heads per key head, and values narrower than keys."""
    rng = np.random.default_rng(0)
    given = {
        "query": rng.normal(size=(2, 4, 3, 16)), "key": rng.normal(size=(2, 2, 7, 16)),
        "value": rng.normal(size=(2, 2, 7, 8)), "mask": np.tri(3, 7, 2, bool)[None, None],
    } | ({"sinks": rng.normal(1, 1, 4)} if sunk else {})  # fmt: skip
    given = {k: v.astype("f4") if v.dtype == float else v for k, v in given.items()}
    inputs = [ir.val(k, ir.DataType.from_numpy(v.dtype), v.shape) for k, v in given.items()]
    attributes = {"scale": 0.5, "lowest": -3e38} | ({"softcap": softcap} if softcap else {})
    node = ir.node(name, inputs, attributes, domain="outrider")
    imports = {"": simplified.OPSET}
    made = ir.Model(
        ir.Graph(inputs, node.outputs, nodes=[node], opset_imports=imports), ir_version=10
    )
    node.outputs[0].name, node.outputs[0].type = "out", ir.TensorType(ir.DataType.FLOAT)
    define(made, attention)
    session = ort.InferenceSession(ir.to_proto(made).SerializeToString())
    scores = np.einsum("bhnd,bhsd->bhns", given["query"], given["key"].repeat(2, 1)) * 0.5
    scores = np.where(
        given["mask"], softcap * np.tanh(scores / softcap) if softcap else scores, -np.inf
    )
    weights, sinks = np.exp(scores), np.exp(given["sinks"])[:, None, None] if sunk else 0
    want = weights / (weights.sum(-1, keepdims=True) + sinks) @ given["value"].repeat(2, 1)
    np.testing.assert_allclose(session.run(None, given)[0], want, rtol=1e-5, atol=1e-6)


def test_pairs_of_real_tensors_are_complex_numbers() -> None:
    def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        turn = (torch.polar(torch.full_like(angle, 2.0), angle) * 0.5).unsqueeze(1)
        return torch.view_as_real(torch.view_as_complex(x) * turn.to(x.device)).flatten(2)

    x, angle = torch.randn(2, 3, 4, 2), torch.randn(2, 4)
    expected = rotated(x, angle)
    with patched_layers(torch.nn.Identity()):
        program = torch.export.export(Module(rotated), (x, angle))
    assert torch.allclose(program.module()(x, angle), expected, atol=1e-6)
    values = [node.meta.get("val") for node in program.graph.nodes]
    assert not any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)
    assert torch.polar(angle, angle).is_complex(), "torch is as it was"


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]):
        super().__init__()
        self.forward = function


def test_functions_stand_in_one_order() -> None:
    """The order does not depend on Python's string hashes: the same model is the same file."""
    for kind, names in (
        (attention,
         ["UnevenAttention", "SinkAttention", "CappedSinkAttention", "CappedAttention"]),
        (recurrence, [recurrence.RECURRENCE, recurrence.DELTA, recurrence.CONVOLUTION]),
    ):  # fmt: skip
        nodes = [ir.node(name, [], domain="outrider") for name in names]
        imports = {"": simplified.OPSET}
        made = ir.Model(ir.Graph([], [], nodes=nodes, opset_imports=imports), ir_version=10)
        define(made, kind)
        assert [name for _, name, _ in made.functions] == sorted(names)
