"""Graphs with quantised weights: standard operators for all backends, Outrider's own operators for
the CPU, and results that do not depend on the call."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from checkpoints import FEATURES, SMALL, write
from exported import Refused, edit_json, edit_weights, graph, nodes, of_type
from rounds import cases
from safetensors.torch import load_file, save_file
from workshop import MAX_GAMMA, MAX_LEN, Workshop, traced_once

from engines.bundle import build
from export import compare
from export import part as parts
from export.checkpoint import find
from export.loading import load as load_original
from export.pair import ExportOptions, _default_draft_weights
from export.pair import export as export_pair
from export.weights import operators, quantising, whole
from export.weights.layers import Table
from export.weights.stored import load_as_stored
from export.weights.whole import quantise_model
from runtime.bundle import load
from runtime.certificate import check
from runtime.files.errors import OutriderError
from runtime.files.graphs import ENCODER_FILE, GRAPH_FILE, HOST_FILE, HOST_WEIGHTS_FILE, read_pair
from runtime.files.manifest import read_bundle
from runtime.files.torch_files import ENCODER_WEIGHTS_FILE, WEIGHTS_FILE
from runtime.sampling import kernel
from runtime.text.options import Options

INT4, INT8 = onnx.TensorProto.INT4, onnx.TensorProto.INT8
FLOAT8 = onnx.TensorProto.FLOAT8E4M3FN
BITS = {"int4": {INT4, INT8}, "int8": {INT8}}


@pytest.fixture(
    scope="module",
    params=[("llama", "int4"), ("qwen2", "int8"), ("llama", "int4", "int8")],
    ids="-".join,
)
def graphs(request: pytest.FixtureRequest, workshop: Workshop) -> tuple[Path, str]:
    """A tied output matrix; an untied one and biases; 8-bit cache rows too."""
    name, weights, *cache = request.param
    options = {"cache_type": cache[0]} if cache else {}
    return workshop.graphs(workshop.checkpoint(name), weights=weights, **options), weights


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_model_of_matrices_alone(workshop: Workshop, weights: str) -> None:
    """Fault: once all matrices were quantised, the dtype of the model could not be determined."""
    target = workshop.checkpoint("olmo", num_hidden_layers=1)
    assert read_pair(workshop.graphs(target, weights=weights)).target.quality


@pytest.mark.parametrize("name", cases(["t5"], ["llama"]))
def test_an_encoder_decoder_is_held_against_doubles(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """If roundings are large, as with T5's scores, the graph may differ from float64 as much as the
    original does. Fault: quantised weights were refused for an error allowed in full precision."""
    monkeypatch.setitem(compare.TOLERANCE, "float32", 1e-12)
    options = {"max_len": MAX_LEN, "weights": "int8", "cache": tmp_path / "cache"}
    layers = {"num_layers": 1} if name == "t5" else SMALL
    model = str(workshop.checkpoint(name, **layers))
    control = pytest.raises(OutriderError, match="differs from the original")
    with traced_once(), nullcontext() if name == "t5" else control:
        export_pair(model, None, tmp_path / "out", **options)


@pytest.fixture
def halves(workshop: Workshop, tmp_path: Path, request: pytest.FixtureRequest) -> list[Path]:
    """The same weights stored in 16 bits, and in 32."""
    folders = []
    source = workshop.checkpoint(request.param, **SMALL)
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype) / "checkpoint"
        folders.append(Path(shutil.copytree(source, folder)))
        edit_weights(
            folder, lambda w, to=dtype: w.update({k: v.bfloat16().to(to) for k, v in w.items()})
        )
        edit_json(folder / "config.json", dtype=str(dtype).removeprefix("torch."))
    return folders


@pytest.mark.parametrize(
    ("halves", "table_count"), cases([("qwen3-moe", 8)], [("gemma", 9)]), indirect=["halves"]
)
def test_sixteen_bits_stay_where_they_are_until_they_are_quantised(
    halves: list[Path], table_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The levels equal those made from 32-bit weights, written in pieces or at once. Gemma would
    round a factor if it was built in 16 bits. table_count: number of matrices that stay in 16 bits;
    the experts of a layer count as one."""
    table_counts: list[int] = []

    def counted(model: torch.nn.Module, *given: Any, **more: Any) -> Any:
        table_counts.append(sum(map(_is_narrow, model.parameters())))
        return quantise_model(model, *given, **more)

    monkeypatch.setattr(quantising, "quantise_model", counted)
    made = []
    for half, at_once in zip(halves, (1, 1 << 22), strict=True):
        monkeypatch.setattr(operators, "LARGE_SLICE", at_once)
        options = {"max_len": MAX_LEN, "weights": "int8", "cache": half.parent / "cache"}
        with traced_once():
            pair = export_pair(str(half), None, half.parent / "out", **options)
        made.append(pair.target.files)
    assert table_counts == [table_count, 0]
    for file in (WEIGHTS_FILE, HOST_WEIGHTS_FILE):
        assert made[0][file].sha256 == made[1][file].sha256


@pytest.mark.parametrize(
    ("name", "table_count", "file"),
    [("llama", 15, "model.safetensors"), ("qwen2.5-vl", 16, "pytorch_model.bin")],
)
def test_what_is_no_matrix_of_sixteen_bits_is_not_rounded(
    workshop: Workshop, tmp_path: Path, name: str, table_count: int, file: str
) -> None:
    """Norms beside the matrices have 32 bits, a table is read by rows, and the vision part is
    dropped. Fault: if a file had only the output matrix's name, the tied embedding was narrow."""
    folder = Path(shutil.copytree(workshop.checkpoint(name), tmp_path / "mixed"))
    stored_weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    mixed = {key: w.bfloat16() if w.dim() > 1 else w for key, w in stored_weights.items()}
    if name == "llama":
        mixed["lm_head.weight"] = mixed.pop("model.embed_tokens.weight")
        save_file(mixed, folder / file, {"format": "pt"})
    else:
        torch.save(mixed, folder / file)
    model, wide = load_as_stored(find(str(folder))), load_original(find(str(folder)), torch.float32)
    assert sum(map(_is_narrow, model.parameters())) == table_count
    assert model.dtype == torch.float32
    assert all(map(torch.equal, wide.parameters(), (w.float() for w in model.parameters())))
    tokens = torch.arange(9)[None]
    assert torch.equal(model(input_ids=tokens).logits, wide(input_ids=tokens).logits)


def _is_narrow(weight: torch.Tensor) -> bool:
    return isinstance(weight, Table) or weight.dtype == torch.bfloat16


def test_the_portable_graph_has_levels_and_standard_operators(graphs: tuple[Path, str]) -> None:
    folder, weights = graphs
    model = graph(folder)
    assert {opset.domain for opset in model.opset_import} == {""}
    made = {output: node for node in model.graph.node for output in node.output}
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    sources = [made[node.input[1]] for node in products]
    assert {node.op_type for node in sources} == {"DequantizeLinear"}
    assert {types[node.input[0]] for node in sources} == BITS[weights]
    # ONNX Runtime and TensorRT fuse a DequantizeLinear only if one product reads it.
    shared = Counter(name for node in sources for name in node.input)
    assert set(shared.values()) == {1}
    # 4 products in each of 2 layers: those that read the same input are concatenated.
    apart = sum(
        made.get(node.input[0]) in products for node in model.graph.node if node.op_type == "Concat"
    )
    assert len(products) == 4 * 2 + 1 + apart


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_that_are_the_same(workshop: Workshop, tmp_path: Path, weights: str) -> None:
    """Fault: torch deduplicates equal tensors, so their transposed copies had the same name."""
    checkpoint = Path(shutil.copytree(workshop.checkpoint("llama"), tmp_path / "same"))

    def repeat(tensors: dict[str, torch.Tensor]) -> None:
        for part, other in ((".0.", ".1."), ("k_proj", "v_proj")):
            same = {n.replace(part, other): w.clone() for n, w in tensors.items() if part in n}
            tensors.update(same)

    edit_weights(checkpoint, repeat)
    facts = read_pair(workshop.graphs(checkpoint, weights=weights)).target
    assert facts.has_host_weights and facts.max_difference is not None
    assert facts.max_difference <= facts.tolerance


def test_the_graph_for_the_cpu_has_the_operators_of_liboutrider(graphs: tuple[Path, str]) -> None:
    folder, _ = graphs
    found = nodes(folder, HOST_FILE)
    assert found["outrider.QuantizedMatMul"] == 9
    assert found["outrider.QuantizedGather"] == 1 and found[".Gather"] == 1  # rows that get logits
    assert not found[".MatMul"] and not found[".DequantizeLinear"]
    facts = read_pair(folder).target
    own = "QuantizedCacheAttention" if facts.cache else "Attention"
    assert found[f"outrider.{own}"] == len(facts.key_shapes)
    assert facts.has_host_weights and HOST_WEIGHTS_FILE in facts.files


@pytest.mark.parametrize(
    ("name", "options", "apart"),
    [("qwen2", {}, 0), ("llama", {"head_dim": 12}, 2)],
    ids=["biases", "rows that fill no panel"],
)
def test_products_of_one_input_are_one_node_whatever_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: Any, apart: int
) -> None:
    """8 bits: the first layer's values, the second's keys, and all other matrices but the gates."""
    eight = ["0.self_attn.v", "1.self_attn.k", "o_proj", "up_proj", "down_proj"]

    def choose(costs: dict[str, float], *_: Any) -> list[str]:
        return [name for name in costs if any(part in name for part in eight)]

    monkeypatch.setattr(whole, "choose_costliest", choose)
    write(tmp_path / "model", name, **options)
    with traced_once():
        export_pair(
            str(tmp_path / "model"), None, tmp_path / "graphs", cache=tmp_path / "cache",
            max_len=MAX_LEN, max_gamma=MAX_GAMMA, weights="int4",
        )  # fmt: skip
    found = nodes(tmp_path / "graphs", HOST_FILE)
    assert found["outrider.QuantizedMatMul"] == 9 + apart and found[".Concat"] == apart
    products = of_type(tmp_path / "graphs", "QuantizedMatMul", HOST_FILE)
    assert sum(len(node.input) == 5 for node in products) == 4 - apart
    assert nodes(tmp_path / "graphs", GRAPH_FILE)[".MatMul"] == 9 + 4
    # Attention reads queries, keys and values as one input in the first layer, apart in the second.
    attention = of_type(tmp_path / "graphs", "Attention", HOST_FILE)
    assert [bool(node.input[1]) for node in attention] == [False, True]


@pytest.mark.parametrize(
    ("weights", "levels"), cases([], [("fp8", [FLOAT8] * 9), ("int4", [INT4] * 8 + [INT8])])
)
def test_a_graph_for_gpus_has_8_bits_with_a_scale_an_output(
    workshop: Workshop, weights: str, levels: list[int]
) -> None:
    folder = workshop.graphs(workshop.checkpoint("llama"), weights=weights, dtype="float16")
    facts = read_pair(folder).target
    assert facts.weights == weights and facts.quality is not None and facts.quality.kl > 0
    assert facts.max_difference is not None and facts.max_difference <= facts.tolerance
    model = graph(folder)
    made = {output: node for node in model.graph.node for output in node.output}
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    sources = [made[node.input[1]] for node in products]
    assert [stored[node.input[0]].data_type for node in sources] == levels
    for node in sources:
        matrix, scales = (stored[name] for name in node.input)
        axis = {attribute.name: attribute.i for attribute in node.attribute}
        rows, outputs = matrix.dims
        if matrix.data_type == INT4:
            assert axis == {"axis": 0, "block_size": 32} and scales.dims == [rows // 32, outputs]
        else:
            assert axis == {"axis": 1} and scales.dims == [outputs]
    # The output matrix reads gathered positions, not transposed ones (`_gather_positions`).
    assert made[products[-1].input[0]].op_type == "Gather"


def test_a_bundle_for_the_cpu_carries_the_quantised_weights_alone(
    graphs: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.certificate.TEST_TOKENS", 128)
    folder, weights = graphs
    bundle = tmp_path / "bundle"
    build(folder, bundle, backend="onnxruntime", slots=1)
    assert {path.name for path in (bundle / "target").iterdir()} == {HOST_FILE, HOST_WEIGHTS_FILE}
    manifest = read_bundle(bundle)
    assert manifest.pair.target.weights == weights
    again = manifest.rebuild_command(bundle)
    assert f"WEIGHTS={weights}" in again
    assert ("CACHE=int8" in again) == bool(manifest.pair.target.cache)
    with load(bundle) as text_engine:
        plain = text_engine.generate("abc", max_new_tokens=24, gamma=0)
        fast = text_engine.generate("abc", max_new_tokens=24, draft="ngram")
        assert fast.token_ids == plain.token_ids
        drawn = Options(temperature=0.9, top_p=0.95, seed=2, max_new_tokens=24, draft="ngram")
        certificate = check(text_engine, "abc abc", drawn)
        assert certificate.passed and certificate.identical
    with pytest.raises(OutriderError, match="compiled for the CPU"):
        load(bundle, device="cuda")
    monkeypatch.setattr(kernel, "find_library", lambda: None)
    monkeypatch.setattr(kernel, "load", kernel.load.__wrapped__)  # without its cache
    with pytest.raises(OutriderError, match=r"need liboutrider: liboutrider\.so was not") as caught:
        load(bundle)
    assert caught.value.remedy.count("make plugins") == 1


@pytest.mark.parametrize(
    ("name", "weights"),
    cases(
        [("gpt-oss", "int8")], [("qwen3-moe", "int4"), ("mixtral", "int8"), ("deepseek3", "int4")]
    ),
)
def test_experts_that_are_not_chosen_are_not_asked(
    workshop: Workshop, name: str, weights: str
) -> None:
    """The graph for the CPU skips them; the portable graph computes all experts. gpt-oss has
    biases, and its matrices are transposed."""
    bundle = workshop.bundle(workshop.checkpoint(name), weights=weights)
    found = nodes(bundle, HOST_FILE)
    layers = 1 if name == "deepseek3" else 2  # its first layer has no experts
    assert found["outrider.QuantizedExperts"] == 2 * layers
    assert not found[".DequantizeLinear"] and not found[".OneHot"] and not found[".Equal"]
    facts = read_bundle(bundle).pair.target
    assert facts.quality is not None and 0 < facts.quality.kl < 0.3
    with load(bundle, threads=1) as engine:
        for options in (Options(), Options(temperature=0.9, seed=2)):
            drawn = replace(options, max_new_tokens=24, ignore_eos=True, draft="ngram")
            certificate = check(engine, "abc abc", drawn)
            assert certificate.passed and not certificate.rounding


@pytest.mark.parametrize(
    ("name", "weights", "draft"),
    cases(
        [("bart", "int8", None)],
        [("t5", "int8", "self"), ("bart", "int4", None), ("whisper", "int4", None)],
    ),
)
def test_an_encoder_decoder(workshop: Workshop, name: str, weights: str, draft: str | None) -> None:
    """Both of its graphs use QuantizedMatMul, and its texts do not depend on gamma."""
    small = {"num_layers": 1} if name == "t5" else {"encoder_layers": 1, "decoder_layers": 1}
    drafter = Path(draft) if draft else None
    bundle = workshop.bundle(workshop.checkpoint(name, **small), drafter, weights=weights)
    files = {HOST_FILE, HOST_WEIGHTS_FILE, ENCODER_FILE, ENCODER_WEIGHTS_FILE}
    assert {path.name for path in (bundle / "target").iterdir()} == files
    for file in (HOST_FILE, ENCODER_FILE):
        found = nodes(bundle, file)
        assert found["outrider.QuantizedMatMul"] > 3
        assert not found[".MatMul"] and not found[".DequantizeLinear"]
    facts = read_bundle(bundle).pair.target
    assert facts.weights == weights and facts.quality is not None
    assert 0 < facts.quality.kl < 0.2

    with load(bundle, threads=1) as engine:
        source: Any = np.random.default_rng(0).standard_normal(FEATURES).astype("f4")
        source = "what it reads" if name != "whisper" else source
        drafted, plain = (
            Options(source=source, max_new_tokens=24, ignore_eos=True, draft=kind, gamma=gamma)
            for kind, gamma in (("model" if draft else "ngram", 4), (None, 0))
        )
        (_, one), (_, other) = sorted(engine.batch([(None, drafted), (None, plain)]))
        assert one.token_ids == other.token_ids
        drawn = Options(
            source=source, temperature=0.9, seed=2, max_new_tokens=24, draft=drafted.draft
        )
        certificate = check(engine, None, drawn)
        assert certificate.passed and not certificate.rounding


def test_quality_is_measured_with_the_rows_that_run(workshop: Workshop) -> None:
    checkpoint = workshop.checkpoint("llama")
    full, rows = (
        read_pair(workshop.graphs(checkpoint, weights="int4", **options)).target.quality
        for options in ({}, {"cache_type": "int8"})
    )
    assert full and rows
    assert full.full_perplexity == rows.full_perplexity, "the same texts"
    assert full.kl != rows.kl


def test_a_build_from_the_cache_says_the_quality_too(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = workshop.checkpoint("llama")
    options = {"max_len": MAX_LEN, "max_gamma": MAX_GAMMA, "cache": workshop.cache}
    for weights in ("int4", None):
        workshop.graphs(checkpoint, **({"weights": weights} if weights else {}))
        capsys.readouterr()
        export_pair(str(checkpoint), None, tmp_path / "out", weights=weights, **options)
        output = capsys.readouterr().err
        assert "cached" in output and ("nats, top-1" in output) == bool(weights)


def test_a_draft_of_the_target_itself_has_fewer_bits(workshop: Workshop, refused: Refused) -> None:
    pair = read_pair(workshop.graphs(workshop.checkpoint("llama"), Path("self")))
    assert (pair.target.weights, pair.draft and pair.draft.weights) == (None, "int4")
    options = ["--draft", "self", "--weights", "int4"]
    message = refused(workshop.checkpoint("llama"), *options, kind="option")
    assert "hardly cheaper than the target" in message


def test_the_draft_of_a_full_target_on_the_cpu_has_8_bits(
    workshop: Workshop, on_fake_gpu: object
) -> None:
    bundle = workshop.bundle(*workshop.pair(), draft_weights=None)
    manifest = read_bundle(bundle)
    assert [facts.weights for _, facts in manifest.pair.models()] == [None, "int8"]
    assert "DRAFT_WEIGHTS=int8" in manifest.rebuild_command(bundle)
    with load(bundle) as text_engine:
        texts = [
            text_engine.generate("abc", max_new_tokens=24, ignore_eos=True, gamma=gamma)
            for gamma in (4, 0)
        ]
    assert texts[0].token_ids == texts[1].token_ids and texts[0].stats.drafted
    with pytest.raises(OutriderError, match=r"compiled for the CPU.*DRAFT_WEIGHTS=full"):
        load(bundle, device="cuda")
    with load(bundle, device="cuda", draft_model=False) as text_engine:
        assert text_engine.generate("abc", max_new_tokens=3, ignore_eos=True).token_ids


def test_a_draft_that_cannot_have_8_bits_is_full_unless_they_were_asked_for(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where there is no compiler for liboutrider, or if rounding breaks the draft. Fault: such a
    pair was refused although nobody had set DRAFT_WEIGHTS."""
    real, pair = parts.make, workshop.small_pair()

    def fail(kind: str) -> None:
        def make(request: parts.PartRequest, *where: Any) -> Any:
            if request.weights:
                raise OutriderError(kind, "no liboutrider", "Install a C++ compiler.")
            return real(request, *where)

        monkeypatch.setattr(parts, "make", make)

    fail("backend")
    made = read_pair(workshop.graphs(*pair, draft_weights=None, max_gamma=3))
    assert made.draft is not None and made.draft.weights is None
    assert "note: DRAFT_WEIGHTS is full: no liboutrider" in capsys.readouterr().err
    with pytest.raises(OutriderError, match="no liboutrider"):
        workshop.graphs(*pair, draft_weights="int8", max_gamma=4)
    for other in ("option", "disk"):  # a TEXT that is too short is not ignored; a disk stays full
        fail(other)
        with pytest.raises(OutriderError, match="no liboutrider"):
            workshop.graphs(*pair, draft_weights=None, max_gamma=4)


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        ({}, "int4", "int4"),
        ({"dtype": "float16"}, "full", "full"),
        ({"form": "torch"}, "full", "full"),
        ({"backend_runs": ["full"]}, "full", "full"),
    ],
)
def test_the_draft_has_the_weights_of_the_target(
    options: dict[str, Any], target: str, draft: str
) -> None:
    chosen = ExportOptions("target", "draft", Path("out"), **options)
    assert _default_draft_weights(chosen, target) == draft


def test_a_text_to_measure_on_is_read_before_the_export(
    workshop: Workshop, tmp_path: Path, refused: Refused
) -> None:
    options = ["--weights", "int8", "--text", str(tmp_path / "text.txt")]
    assert "cannot read" in refused(workshop.checkpoint("llama"), *options, kind="option")
    endless = [*options[:3], "/dev/zero"]
    assert "/dev/zero is a device" in refused(workshop.checkpoint("llama"), *endless, kind="option")
    (tmp_path / "text.txt").write_text("")
    message = refused(workshop.checkpoint("llama"), *options, kind="option")
    assert "has fewer than 2 tokens: 0" in message


@pytest.mark.parametrize(
    ("options", "kind", "cause", "remedy"),
    [
        (
            "--format torch --weights int8", "option", "WEIGHTS=int8 requires graphs in ONNX",
            "Build with WEIGHTS=full, or --format onnx.",
        ),
        (
            "--weights fp8", "option", "WEIGHTS=fp8 is only for GPUs",
            "Build with DTYPE=float16 or bfloat16.",
        ),
        (
            "--backend-runs full --draft self", "backend",
            "DRAFT_WEIGHTS=int4, the default here, is not supported by the backend",
            "Build with another DRAFT, or another BACKEND",
        ),
        (
            "--backend-runs full --draft {model} --draft-weights int8", "backend",
            "DRAFT_WEIGHTS=int8 is not supported by the backend",
            "Build with DRAFT_WEIGHTS=full, or another BACKEND",
        ),
    ],
)  # fmt: skip
def test_the_export_refuses_first_what_nobody_runs(
    workshop: Workshop, refused: Refused, options: str, kind: str, cause: str, remedy: str
) -> None:
    model = workshop.checkpoint("llama")
    message = refused(model, *options.format(model=model).split(), kind=kind)
    assert cause in message and remedy in message
