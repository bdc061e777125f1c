"""Half precision: as far from the original as the comparison allows, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from checkpoints import (
    ARCHITECTURES,
    MAX_LEN,
    Workshop,
)
from commands import error_line
from exported import (
    LAYERS,
    TIED,
    command,
    eager,
    graph,
    nothing_left,
    text,
    type_of,
)

import export.__main__
import export.graph
from engines.bundle import build
from export import compare
from export.pair import export as export_pair
from runtime import load
from runtime.backends.onnxruntime import OrtEngine
from runtime.files.errors import EXIT_STATUS, OutriderError
from runtime.files.manifest import read_pair


def test_float16(workshop: Workshop, tmp_path: Path) -> None:
    source = workshop.checkpoint(TIED)
    folder = workshop.graphs(source, dtype="float16")
    facts = read_pair(folder).target
    assert facts.max_difference is not None
    assert 0 < facts.max_difference <= facts.tolerance
    types = {
        v.name: type_of(v)[1] for v in [*graph(folder).graph.input, *graph(folder).graph.output]
    }
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


FLOAT = ir.DataType.FLOAT
NO_GRAPH = {"falcon", "bloom", "gptj", "mamba", "t5"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in {TIED, *NO_GRAPH}])
def test_architectures_in_float16(workshop: Workshop, name: str) -> None:
    source = workshop.checkpoint(name)
    facts = read_pair(workshop.graphs(source, dtype="float16")).target
    assert facts.max_difference is not None
    assert 0 < facts.max_difference <= facts.tolerance
    engine = load(workshop.bundle(source, dtype="float16"), slots=1, threads=1)
    assert len(engine.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True).token_ids) == 8


def test_a_norm_reads_the_type_of_its_scale() -> None:
    """Gemma scales in float32; ONNX Runtime multiplies no float16 by that."""
    x, scale = (
        ir.val(name, dtype, [4]) for name, dtype in (("x", ir.DataType.FLOAT16), ("scale", FLOAT))
    )
    norm = ir.node("RMSNormalization", [x, scale])
    model = ir.Model(ir.Graph([x, scale], norm.outputs, nodes=[norm]), ir_version=11)
    export.graph._match_norms(model)
    assert [node.op_type for node in model.graph] == ["Cast", "RMSNormalization"]
    assert norm.inputs[0] is not None and norm.inputs[0].dtype == FLOAT
    export.graph._match_norms(model)
    assert len(model.graph) == 2, "once is enough"


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_bfloat16_is_exported_unchecked_and_not_for_this_backend(
    workshop: Workshop, tmp_path: Path
) -> None:
    folder = workshop.graphs(workshop.checkpoint(TIED, head_dim=8), dtype="bfloat16")
    facts = read_pair(folder).target
    assert facts.max_difference is None
    assert facts.comparison.startswith("not run")
    types = {v.name: type_of(v)[1] for v in graph(folder).graph.input}
    assert types["key_0"] == onnx.TensorProto.BFLOAT16
    with pytest.raises(OutriderError, match="bfloat16") as caught:
        build(folder, tmp_path / "bundle", backend="onnxruntime", slots=1)
    assert caught.value.kind == "backend"
    assert list(tmp_path.iterdir()) == []
