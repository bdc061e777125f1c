"""The comparison with the original detects a graph that computes another model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from checkpoints import WINDOW
from exported import UNTIED, Refused, edit_weights
from originals import original_of
from workshop import CAPACITY, MAX_LEN, Workshop, traced_once

from export import checkpoint, compare, graph, loading, part
from export.pair import export as export_pair
from runtime.files.graphs import HOST_FILE, Cache
from runtime.files.torch_files import WEIGHTS_FILE


@pytest.mark.slow
def test_float32_decides_where_the_original_rounds_badly(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Granite's scores are not scaled down: two float16 computations differ by twice the bound."""
    source = workshop.checkpoint("granite")
    copy = shutil.copytree(workshop.graphs(source, dtype="float16") / "target", tmp_path / "target")

    def reference(dtype: torch.dtype) -> compare.Reference:
        found = loading.load(checkpoint.find(str(source)), dtype)
        return compare.reference(found, CAPACITY)

    rough, exact = reference(torch.float16), reference(torch.float32)
    assert not compare.compare(copy, rough, "float16").passed
    decided = compare.compare(copy, rough, "float16", lambda: exact)
    assert decided.passed
    assert "from the original in float32" in decided.summary
    # Controls: the graph is not accepted merely by a looser bound, and a changed model fails.
    rounding = np.abs(rough.logits - exact.logits).max(-1).mean()
    assert decided.mean is not None and decided.mean[0] < 1.1 * rounding
    weights = np.fromfile(copy / WEIGHTS_FILE, np.float16)
    weights[len(weights) // 2 :: 7] = 0
    (copy / WEIGHTS_FILE).unlink()
    weights.tofile(copy / WEIGHTS_FILE)
    assert not compare.compare(copy, rough, "float16", lambda: exact).passed


@pytest.mark.slow
def test_float64_decides_where_layers_make_roundings_large(
    workshop: Workshop, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two float32 computations of such a model differ by ten times the bound."""
    source = Path(shutil.copytree(workshop.checkpoint("bart"), tmp_path / "checkpoint"))

    def amplify(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            weight.mul_(8 if ".layers." in name and weight.dim() > 1 else 1)

    edit_weights(source, amplify)
    with traced_once(), monkeypatch.context() as control:
        control.setattr(part, "_precise_reference", lambda *_: None)
        refused(source, "--max-len", str(MAX_LEN), kind="difference")
    with traced_once():
        pair = export_pair(str(source), None, tmp_path / "out", max_len=MAX_LEN, cache=tmp_path)
    assert "from the original in float64" in pair.target.comparison
    assert HOST_FILE in pair.target.files


@pytest.mark.parametrize(
    ("factor", "dtype", "remedy"),
    [(1e5, "float16", "Build with another DTYPE"), (float("nan"), "bfloat16", "Check the weights")],
)
def test_an_original_that_overflows_is_refused(
    workshop: Workshop, tmp_path: Path, refused: Refused, factor: float, dtype: str, remedy: str
) -> None:
    """A bound derived from infinite logits would accept any graph. Fault: NaN in the weights was
    taken for an overflow of bfloat16."""
    source = Path(shutil.copytree(workshop.checkpoint(UNTIED), tmp_path / "checkpoint"))
    edit_weights(source, lambda weights: weights["lm_head.weight"].mul_(factor))
    message = refused(source, "--dtype", dtype)
    assert f"returns NaN or infinity in {dtype}. {remedy}" in message


def test_a_lost_window_fails_the_build(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """A graph that ignores the architecture's mask is right only for short inputs."""
    simplify = graph.simplify

    def widen_window(traced: ir.Model) -> None:
        constants = [node for node in traced.graph if "value" in node.attributes]
        values = [node.attributes["value"].as_tensor().numpy() for node in constants]
        (window,) = [i for i, value in enumerate(values) if value.size == 1 and value == WINDOW]
        endless = ir.AttrTensor("value", ir.tensor(np.int64(10**6)))
        constants[window].attributes["value"] = endless
        simplify(traced)

    monkeypatch.setattr(graph, "simplify", widen_window)
    with traced_once():
        message = refused(workshop.example("mistral"), "--max-len", str(MAX_LEN), kind="difference")
    assert "differs from the original" in message


@pytest.mark.parametrize(
    ("kinds", "remark"), [(["local"], "; its window of 100 was not reached"), (["global"], "")]
)
def test_a_window_of_gpt_neo_is_known(workshop: Workshop, kinds: list[str], remark: str) -> None:
    """Fault: it has another name, so texts were compared that were shorter than the window, and
    nothing said so."""
    options = {"attention_types": [[kinds, 2]], "window_size": 100}
    found = checkpoint.find(str(workshop.checkpoint("gpt-neo", **options)))
    reference = compare.reference(loading.load(found, torch.float32), 40)
    assert reference.remark == remark


@pytest.mark.parametrize(
    ("form", "value"),
    [("onnx", 0.0), ("onnx", 1.0), ("onnx", np.nan), ("onnx", np.inf), ("torch", 0), ("torch", 1)],
)
def test_one_wrong_weight_is_seen(
    workshop: Workshop, tmp_path: Path, form: str, value: float
) -> None:
    """The value 0 is the control. Fault: one position that rounded activations change a lot, as
    they change the second one in some trained models, raised the bound for all the others."""
    pair = workshop.pair("aotinductor" if form == "torch" else "onnxruntime")
    graphs = workshop.graphs(*pair, **({"form": "torch"} if form == "torch" else {}))
    copy = Path(shutil.copytree(graphs / "target", tmp_path / "target"))
    model = original_of(pair[0]).model
    original = compare.reference(model, CAPACITY)
    assert (original.ids[:, 0] == loading.first_token(model)).all()
    weights = np.fromfile(copy / WEIGHTS_FILE, np.float32)
    weights[len(weights) // 2] += value
    weights.tofile(copy / WEIGHTS_FILE)
    assert compare.compare(copy, original, "float32").passed == (value == 0)
    distorted = original.logits.copy()
    distorted[0, 5] += 2
    distorted[1, -1] += 1e3  # a position that is not computed
    rounded = replace(original, logits=distorted)
    found = compare.compare(copy, original, "float32", rounded=rounded)
    assert found.passed == (value == 0)


@pytest.mark.parametrize("positions", [3, 4])
def test_a_mixtures_near_ties_are_few(workshop: Workshop, positions: int) -> None:
    """For a mixture of experts, and only if roundings are allowed for, 3 of the 77 computed
    positions may be far off; the bound on the mean applies all the same. Fault: with rounded cache
    rows and full weights a single position refused the mixture."""
    pair = workshop.pair("onnxruntime")
    folder = workshop.graphs(*pair) / "target"
    original = compare.reference(original_of(pair[0]).model, CAPACITY)
    assert not original.mixture
    assert compare.reference(original_of(workshop.checkpoint("mixtral")).model, CAPACITY).mixture

    step = original.ids.shape[1] // 2 + 5  # of the first slot; a call of one token

    def compare_with_error(
        off: float, mixture: bool = True, at: int = 3, cache: Cache | None = None
    ) -> compare.Comparison:
        logits = original.logits.copy()
        logits[0, at : at + (1 if at == step else positions)] += off
        distorted = replace(original, logits=logits, mixture=mixture)
        rounded = None if cache else replace(distorted, logits=logits + 0.5)
        return compare.compare(folder, distorted, "float32", rounded=rounded, cache=cache)

    assert compare_with_error(10).passed == (positions == 3)
    assert ("at 3 positions of a mixture" in compare_with_error(10).describe()) == (positions == 3)
    assert not compare_with_error(10, mixture=False).passed
    assert not compare_with_error(100).passed
    assert not compare_with_error(10, at=step).passed and compare_with_error(0.9, at=step).passed
    assert compare_with_error(0.9, mixture=False).passed
    assert compare_with_error(10, cache="int8").passed == (positions == 3)
    assert not compare_with_error(10, mixture=False, cache="int8").passed
