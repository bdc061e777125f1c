"""Half precision: within the tolerance of the comparison, or refused in one line. And weights that
keep their 16 bits in graphs of float32."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from checkpoints import ARCHITECTURES, NO_GRAPH, RECURRENT, SMALL, WITH_ENCODER
from commands import CHECKOUT
from exported import (
    LAYERS,
    TIED,
    UNTIED,
    Refused,
    eager,
    edit_weights,
    graph,
    nodes,
    of_type,
    random_ids,
    stored_as,
    type_of,
)
from rounds import cases
from workshop import MAX_GAMMA, MAX_LEN, Workshop

import export.fusion
from engines.bundle import build
from export import compare
from export.pair import export as export_pair
from export.weights import halves
from export.weights.blocks import row_slices
from export.weights.operators import OWN_DOMAIN
from runtime import load
from runtime.backends.onnxruntime import FOLD_ANY_SIZE
from runtime.backends.registry import host_engine
from runtime.files.errors import OutriderError
from runtime.files.graphs import GRAPH_FILE, HOST_FILE, read_pair
from runtime.files.library import add_operators
from runtime.files.torch_files import WEIGHTS_FILE
from runtime.sampling import kernel


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    cases(
        [(TIED, "onnxruntime", "float16")],
        [(UNTIED, "aotinductor", "float16"), (UNTIED, "aotinductor", "bfloat16")],
    ),
)
def test_logits_and_text(workshop: Workshop, name: str, backend: str, dtype: str) -> None:
    source = workshop.checkpoint(name, **SMALL)
    bundle = workshop.bundle(source, backend=backend, dtype=dtype)
    form = {"form": "torch"} if backend == "aotinductor" else {}
    facts = read_pair(workshop.graphs(source, dtype=dtype, **form)).target
    assert facts.max_difference is not None
    assert 0 < facts.max_difference <= facts.tolerance
    engine = host_engine(backend)(bundle / "target", facts, slots=1, max_outputs=1, threads=1)
    ids = random_ids(1, 40)
    expected = eager(source, ids)
    difference = 0.0
    for i in range(40):
        logits = engine.forward(ids[:, i : i + 1], np.array([i]), np.array([0]))
        difference = max(difference, float(np.abs(logits[0, 0] - expected[0, i]).max()))
    assert 1e-5 < difference < facts.tolerance  # and it really is half precision
    result = load(bundle).generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
    assert len(result.token_ids) == 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_of_the_graph(workshop: Workshop, tmp_path: Path, dtype: str) -> None:
    """ONNX Runtime has no bfloat16 on the CPU: the graph is exported without a comparison, and this
    backend refuses it."""
    # The checkpoint that tests/engines uses too: TensorRT-RTX refuses its heads of 8.
    of = {"head_dim": 8} if dtype == "bfloat16" else {}
    folder = workshop.graphs(workshop.checkpoint(TIED, **of, **SMALL), dtype=dtype)
    facts, model = read_pair(folder).target, graph(folder)
    types = {v.name: type_of(v)[1] for v in (*model.graph.input, *model.graph.output)}
    half = getattr(onnx.TensorProto, dtype.upper())
    assert types["key_0"] == types["value_0_out"] == half
    assert types["logits"] == onnx.TensorProto.FLOAT
    if dtype == "float16":
        full = read_pair(workshop.graphs(workshop.checkpoint(TIED))).target
        assert full.cache_bytes(3) == 2 * LAYERS * facts.cache_bytes(3)  # SMALL has one layer
    else:
        assert facts.max_difference is None
        assert facts.comparison.startswith("not run")
        with pytest.raises(OutriderError, match=r"^backend: .*bfloat16"):
            build(folder, tmp_path / "bundle", backend="onnxruntime", slots=1)
        assert list(tmp_path.iterdir()) == []


FLOAT = ir.DataType.FLOAT


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", sorted({*ARCHITECTURES} - {TIED, *NO_GRAPH, *RECURRENT, *WITH_ENCODER, "whisper"})
)
def test_architectures_in_float16(workshop: Workshop, name: str) -> None:
    source = workshop.checkpoint(name)
    facts = read_pair(workshop.graphs(source, dtype="float16")).target
    assert facts.max_difference is not None
    assert 0 < facts.max_difference <= facts.tolerance
    engine = load(workshop.bundle(source, dtype="float16"), slots=1, threads=1)
    assert len(engine.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True).token_ids) == 8


def test_a_norm_reads_the_type_of_its_scale() -> None:
    """Gemma's norms have a float32 scale, which ONNX Runtime does not apply to float16 inputs."""
    x, scale = (
        ir.val(name, dtype, [4]) for name, dtype in (("x", ir.DataType.FLOAT16), ("scale", FLOAT))
    )
    norm = ir.node("RMSNormalization", [x, scale])
    model = ir.Model(ir.Graph([x, scale], norm.outputs, nodes=[norm]), ir_version=11)
    export.fusion._match_norm_types(model)
    assert [node.op_type for node in model.graph] == ["Cast", "RMSNormalization"]
    assert norm.inputs[0] is not None and norm.inputs[0].dtype == FLOAT
    export.fusion._match_norm_types(model)
    assert len(model.graph) == 2, "a second pass adds no cast"


@pytest.mark.slow
def test_control_a_norm_of_two_types_is_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Gemma's norms have a float32 scale. Any graph that ONNX Runtime refuses ends in this line."""
    source = workshop.checkpoint("gemma2")
    norms = of_type(workshop.graphs(source, dtype="float16"), "RMSNormalization")
    assert len(norms) == 4 * LAYERS + 1
    monkeypatch.setattr(export.fusion, "_match_norm_types", lambda model: None)
    message = refused(source, "--dtype", "float16", "--max-len", str(MAX_LEN), kind="backend")
    assert "ONNX Runtime cannot run the float16 graph" in message


@pytest.mark.slow
def test_control_a_graph_that_crashes_onnx_runtime(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all optimisers on, ONNX Runtime 1.31 crashes on this graph on Intel processors. The
    export survives and reports that nothing was compared; this backend refuses the graph."""
    monkeypatch.setattr(compare, "ORT_LEFT_OUT", {})
    folder = tmp_path / "graphs"
    options = {"dtype": "float16", "max_len": MAX_LEN, "cache": tmp_path / "cache"}
    pair = export_pair(str(workshop.checkpoint("gpt2")), None, folder, **options)
    if not compare._crashes(folder / "target"):
        pytest.skip("ONNX Runtime loads this graph on this processor")
    assert pair.target.max_difference is None
    assert pair.target.comparison.startswith("not run: ONNX Runtime crashes")
    with pytest.raises(OutriderError, match="crashes when it loads this float16 graph") as caught:
        build(folder, tmp_path / "bundle", backend="onnxruntime", slots=1)
    assert caught.value.kind == "backend"
    assert not (tmp_path / "bundle").exists()


# Weights that a checkpoint stores in 16 bits, in graphs of float32

N, K = 24, 20
WEIGHT = torch.randn(N, K, generator=torch.manual_seed(0)).bfloat16().float().numpy()
PRODUCT, LOOKUP = {"outrider.HalfMatMul"}, {"outrider.HalfGather"}


def rounded_but_one(row: int) -> npt.NDArray[np.float32]:
    weight = WEIGHT.copy()
    weight[row, -1] = 1 + 2**-20
    return weight


# What computes y from x and ids with a matrix w, and the operators that replace it.
GRAPHS: dict[str, tuple[str, npt.NDArray[Any], set[str]]] = {
    "product": ("y = MatMul (x, w)", WEIGHT, PRODUCT),
    "float16": ("y = MatMul (x, w)", (WEIGHT / 1000).astype(np.float16), PRODUCT),
    "linear": ("y = Gemm <transB = 1> (x, w, b)", WEIGHT, PRODUCT),
    "lookup": ("y = Gather (w, ids)", WEIGHT, LOOKUP),
    "tied": (
        "z = Gather (w, ids) t = Transpose <perm = [1, 0]> (w) y = MatMul (z, t)",
        WEIGHT, PRODUCT | LOOKUP,
    ),
    "in two layouts": ("z = Gather (w, ids) y = MatMul (z, w)", WEIGHT[:K], set()),
    "scaled": ("y = Gemm <alpha = 2.0> (x, w)", WEIGHT, set()),
    "x transposed": ("y = Gemm <transA = 1> (x, w)", WEIGHT[:3], set()),
    "lookup of columns": ("y = Gather <axis = 1> (w, ids)", WEIGHT, set()),
    "ids of 32 bits": ("i = Cast <to = 6> (ids) y = Gather (w, i)", WEIGHT, set()),
    "three dimensions": ("y = MatMul (x, w)", WEIGHT[None], set()),
    "empty": ("y = MatMul (x, w)", WEIGHT[:0], set()),
    "24 bits first": ("y = MatMul (x, w)", rounded_but_one(0), set()),
    "24 bits last": ("y = MatMul (x, w)", rounded_but_one(N - 1), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_matrices_of_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Both graphs compute what the original does, from the same bytes."""
    monkeypatch.setattr("export.weights.halves.row_slices", partial(row_slices, numbers=K))
    text, weight, expected = GRAPHS[name]
    weight = weight.astype(np.float32)
    size = weight.shape[-1 if "transB" in text else -2]
    parsed = onnx.parser.parse_graph(
        f"g (float[3, {size}] x, int64[2] ids) => (float[1] y) {{ {text} }}"
    )
    parsed.output[0].type.tensor_type.ClearField("shape")
    for known, value in (("w", weight), ("b", np.float32([1] * N))):
        parsed.initializer.append(onnx.numpy_helper.from_array(value, known))
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(OWN_DOMAIN, 1)]
    made = onnx.helper.make_model(parsed, opset_imports=opsets, ir_version=10)
    model = ir.from_proto(onnx.shape_inference.infer_shapes(made))
    x = np.random.default_rng(1).normal(size=(3, size)).astype(np.float32)

    def y(file: str) -> npt.NDArray[np.float32]:
        options = ort.SessionOptions()
        add_operators(options)
        session = ort.InferenceSession(str(tmp_path / file), options)
        return np.asarray(session.run(None, {"x": x, "ids": np.array([1, 0])})[0])

    ir.save(model, tmp_path / "original.onnx")
    halves.store_in_16_bits(model)
    ir.save(model, tmp_path / "graph.onnx", external_data="w")
    host = ir.load(tmp_path / "graph.onnx")
    halves.use_own_operators(host)
    host.graph.sort()
    ir.save(host, tmp_path / "host.onnx")
    assert {f"{node.domain}.{node.op_type}" for node in host.graph if node.domain} == expected
    assert (y("graph.onnx") == y("original.onnx")).all()
    assert np.allclose(y("host.onnx"), y("original.onnx"), atol=1e-5)
    words = [value.const_value for key, value in host.graph.initializers.items() if "words" in key]
    assert len(words) == bool(expected) and all(isinstance(w, ir.ExternalTensor) for w in words)


def logits(bundle: Path) -> npt.NDArray[np.float32]:
    facts = read_pair(bundle.parent / "graphs").target
    engine = host_engine("onnxruntime")(bundle / "target", facts, slots=1, max_outputs=40)
    options = engine._session.get_session_options()
    assert options.get_session_config_entry(FOLD_ANY_SIZE) == "0"
    assert FOLD_ANY_SIZE in (CHECKOUT / "plugins" / "engines" / "ort_model.cpp").read_text()
    return np.array(engine.forward(random_ids(1, 40), np.array([0]), np.array([0])))


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases([(TIED, torch.bfloat16)], [(UNTIED, torch.float16), ("gpt2", torch.bfloat16)]),
)
def test_weights_of_16_bits_are_kept(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Both graphs compute with them, up to the order of sums; with liboutrider's products a text is
    the same for every gamma."""
    source = stored_as(dtype, workshop.checkpoint(name, **SMALL), tmp_path / "checkpoint")
    export_pair(
        str(source), None, tmp_path / "graphs", cache=tmp_path / "cache", max_len=MAX_LEN,
        max_gamma=MAX_GAMMA,
    )  # fmt: skip
    bundle = tmp_path / "bundle"
    build(tmp_path / "graphs", bundle, backend="onnxruntime", slots=1)
    kinds = nodes(tmp_path / "graphs", HOST_FILE)
    assert kinds["outrider.HalfMatMul"] >= 5 and kinds["outrider.HalfGather"] >= 1
    assert not kinds[".MatMul"] and not kinds["com.microsoft.FusedMatMul"]
    files = {path.name: path.stat().st_size for path in (bundle / "target").iterdir()}
    assert files.keys() == {GRAPH_FILE, HOST_FILE, WEIGHTS_FILE}
    parameters = read_pair(tmp_path / "graphs").target.parameters
    assert files[WEIGHTS_FILE] < 2.4 * parameters
    with load(bundle) as engine:
        texts = [
            engine.generate([5, 6, 7], max_new_tokens=12, ignore_eos=True, gamma=gamma, draft=draft)
            for gamma, draft in ((0, None), (4, "ngram"), (2, "random"))
        ]
        assert {"gamma", "draft"} <= {*engine.bits.same} and engine.bits.min_width == 1
        assert engine.memory["target"] == files[WEIGHTS_FILE]
    assert texts[1].token_ids == texts[2].token_ids == texts[0].token_ids
    host = logits(bundle)
    monkeypatch.setattr(kernel, "available", lambda: False)
    with load(bundle) as engine:
        assert engine.memory["target"] == 4 * parameters
    (bundle / "target" / HOST_FILE).unlink()
    assert np.abs(logits(bundle) - host).max() < 1e-4 * np.abs(host).max()


def test_a_matrix_that_16_bits_cannot_hold_stays_as_it_is(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = stored_as(torch.bfloat16, workshop.checkpoint(UNTIED, **SMALL), tmp_path / "model")
    changed = "model.layers.0.mlp.down_proj.weight"
    edit_weights(source, lambda w: w.update({changed: w[changed].float() + 1e-7}))
    export_pair(str(source), None, tmp_path / "graphs", cache=tmp_path / "cache", max_len=MAX_LEN)
    assert nodes(tmp_path / "graphs", HOST_FILE)[".MatMul"] == 1
    [share] = re.findall(r"(\d+)% of its weights in 16 bits", capsys.readouterr().err)
    assert 50 < int(share) < 100
