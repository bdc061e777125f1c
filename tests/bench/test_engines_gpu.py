"""The benchmark of engines on a GPU, run without one: its pairs, checks and timings complete on the
CPU, and the checks detect faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_standin import FakeDriver
from transformers import AutoModelForCausalLM
from workshop import Workshop

from bench.suites.gpu import (
    checks,
    constructed,
    parts,
    profiling,
    suite,
    times,
    unwritten,
)  # fmt: skip
from bench.suites.gpu.checks import Checks
from bench.suites.gpu.constructed import SHAPES, TARGET, check_bigram, fill_weights, write_bundled
from bench.suites.gpu.engines import main, run_sections
from bench.suites.gpu.profiling import Kernel
from bench.suites.gpu.times import Times
from engines.aotinductor.program import adapt_to_gpu
from runtime import load
from runtime.files.torch_files import WEIGHTS_FILE, read_program

pytestmark = pytest.mark.filterwarnings("ignore")


def _model(checkpoint: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)


# The pairs

ROLES = "target", "draft"
IDS = torch.arange(200)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Graphs of the tiny pair, without weights. Shared: do not modify."""
    folder, pair = tmp_path_factory.mktemp("unwritten"), SHAPES["tiny"]
    for role in ROLES:
        unwritten.write_graph(pair.shape(role), 256, 272, folder / role, "", folder / "config")
    return folder


def programs(folder: Path) -> dict[str, torch.export.ExportedProgram]:
    return {role: read_program(folder / role) for role in ROLES}


def program_logits(program: torch.export.ExportedProgram, ids: torch.Tensor) -> torch.Tensor:
    """The program's logits [N, V]."""
    assert program.example_inputs is not None
    (*_, keys, values), _ = program.example_inputs
    caches = [[x.new_zeros(1, x.shape[1], 272, x.shape[3]) for x in s] for s in (keys, values)]
    with torch.no_grad():
        answer: torch.Tensor = program.module()(
            ids[None], torch.tensor([0]), torch.arange(len(ids)), *caches
        )
    return answer[0]


def test_a_graph_without_its_weights_takes_no_room(graphs: Path) -> None:
    """The weight file is sparse: it has the size of the weights and takes almost no disk space. The
    few constants that are not weights are there."""
    for role, program in programs(graphs).items():
        facts = (graphs / role / WEIGHTS_FILE).stat()
        assert 512 * facts.st_blocks < 2**16 < 2**20 < facts.st_size
        assert not any(weight.any() for weight in program.parameters())
        rotary = next(value for name, value in program.constants.items() if "inv_freq" in name)
        assert rotary[0] == 1 and (rotary > 0).all()


@pytest.mark.slow
def test_noise_sets_the_acceptance(graphs: Path) -> None:
    """Without noise the draft equals the target: a bigram model, whatever its layers compute, whose
    output NumPy can predict."""
    at_0, at_1 = [], []
    for delta in (0.0, 0.1, 0.5):
        made = programs(graphs)
        with torch.no_grad():
            fill_weights(made["target"].state_dict, made["draft"].state_dict, delta)
        p, q = (program_logits(made[role], IDS) for role in ROLES)
        at_0.append((p.argmax(-1) == q.argmax(-1)).float().mean().item())
        at_1.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item())
        for role, logits in (("target", p), ("draft", q)):
            best = logits.argmax(-1).tolist()
            found = check_bigram(made[role].state_dict, IDS.tolist(), best)
            assert found["passed"] and found["as_expected"] >= 198, found
            # The control: six wrong tokens of 200.
            wrong = [*best[:-6], *(token ^ 1 for token in best[-6:])]
            assert not check_bigram(made[role].state_dict, IDS.tolist(), wrong)["passed"]
        if not delta:
            assert (p - q).abs().max() <= 2**-3  # the rounding of the largest logits
            assert p.std() == pytest.approx(constructed.LOGIT_STD, rel=0.1)
            assert torch.equal(program_logits(made["target"], IDS.flip(0)).flip(0), p)
    for rates in (at_0, at_1):
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > 0.99 and 0.6 < rates[1] < 0.95 and rates[2] < 0.6


def test_logits_on_a_gpu_keep_the_type_they_are_computed_in(graphs: Path) -> None:
    """Their values are unchanged too."""
    made = programs(graphs)
    with torch.no_grad():
        fill_weights(made["target"].state_dict, made["draft"].state_dict)
    usual = program_logits(made["draft"], IDS)
    kept = program_logits(adapt_to_gpu(made["draft"], 272)[0], IDS)
    assert (usual.dtype, kept.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(kept.float(), usual)


def test_layers_compute_and_add_nothing(graphs: Path) -> None:
    """No matrix is zero, which a GPU would multiply faster; what a layer adds is lost when the sum
    is rounded. Control: 64 times as much is not lost."""
    made = programs(graphs)
    weights = made["target"].state_dict
    with torch.no_grad():
        fill_weights(weights, made["draft"].state_dict)
        assert all((x != 0).float().mean() > 0.99 for x in weights.values())
        before = program_logits(made["target"], IDS)
        lost = [x for n, x in weights.items() if n.endswith(("o_proj.weight", "down_proj.weight"))]
        assert len(lost) == 2 * SHAPES["tiny"].target.num_hidden_layers
        for factor, same in ((-1, True), (64, False)):
            for matrix in lost:
                matrix *= factor
            assert torch.equal(program_logits(made["target"], IDS), before) is same


def test_the_bundled_weights_are_rounded(tmp_path: Path) -> None:
    """The reference has the same rounded weights as the GPU."""
    write_bundled(tmp_path)
    paths = tmp_path / "target", TARGET
    ours, theirs = (_model(path, torch.float32).named_parameters() for path in paths)
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b.bfloat16().float()), name


# Checking


def folder_of(folder: Path, target: Path, draft: Path, bundle: Path) -> Path:
    """A folder as `suite.bundled_pair_parts` makes it, with the bundle as its own reference."""
    for name, place in ("target", target), ("draft", draft), ("bundle", bundle):
        (folder / name).symlink_to(place)
    (folder / "reference").symlink_to(bundle)
    return folder


@pytest.fixture
def built(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair whose output depends on its caches, on ONNX Runtime in place of a GPU."""
    monkeypatch.setattr(checks, "EXTRA_TOKENS", -60)  # of 137 rows, one call of this bundle
    monkeypatch.setattr(times, "DTYPE", "float32")
    target, draft = workshop.checkpoint("llama"), workshop.checkpoint("llama", blur=0.02)
    return folder_of(tmp_path, target, draft, workshop.bundle(target, draft))


CHEAP = ["texts", "acceptance", "graphs", "long_prompt"]  # certificates have their own tests


def test_the_checks_pass(built: Path) -> None:
    report = run_sections(Checks(built, "cpu", quick=True), CHEAP, built / "new" / "check.json")
    assert report["passed"], report
    assert json.loads((built / "new" / "check.json").read_text()) == report
    assert report["graphs"]["passed"] is None and report["graphs"]["reason"] == "no GPU"
    assert report["texts"]["tokens"] == 96 and report["texts"]["worst"] == []
    assert report["acceptance"]["alpha"] == report["acceptance"]["on_the_cpu"] > 0.3
    assert report["long_prompt"]["prompt_tokens"] > 64


def negated(engine: Any, role: str) -> Any:
    """The engine, with one model's logits negated."""
    model = getattr(engine.decoder, role)
    forward = model.forward

    def other(*arguments: Any, **options: Any) -> Any:
        logits = forward(*arguments, **options)
        return np.negative(logits, out=logits)

    model.forward = other
    return engine


@pytest.mark.parametrize(
    ("folder", "role", "failed"),
    [("reference", "target", {"texts", "acceptance", "long_prompt"}),
     ("bundle", "draft", {"acceptance"})],
)  # fmt: skip
def test_control_engines_that_say_something_else(
    built: Path, monkeypatch: pytest.MonkeyPatch, folder: str, role: str, failed: set[str]
) -> None:
    def loaded(path: Path, **options: Any) -> Any:
        return negated(load(path, **options), role) if path.name == folder else load(path)

    monkeypatch.setattr(checks, "load", loaded)
    report = run_sections(Checks(built, "cpu", quick=True), CHEAP)
    assert {name for name in CHEAP if report[name]["passed"] is False} == failed
    assert not report["passed"]


def test_control_graphs_that_say_something_else(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(path: Path, *, graphs: bool = False, **options: Any) -> Any:
        return negated(load(path, **options), "target") if graphs else load(path, **options)

    monkeypatch.setattr(checks, "load", loaded)
    ours = Checks(built, "cpu", quick=True)
    ours.gammas, ours.tokens = (2,), 8
    agreed = ours.compare({"graphs": True}, {"graphs": False})
    assert not agreed["passed"] and {x["slots"] for x in agreed["differ"]} == {1, 2}


def test_near_ties() -> None:
    def passed(margins: list[float]) -> bool:
        return bool(checks.judge_ties([{"margin": m} for m in margins], tokens=100)["passed"])

    assert passed([]) and passed([0.2] * 5)
    assert not passed([0.2] * 6), "too many"
    assert not passed([0.3]) and not passed([checks.MAX_MARGIN])


# Times


def test_the_times_run_to_their_end(built: Path) -> None:
    path = built / "times.json"
    assert main(["times", str(built), "--device", "cpu", "--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["passed"] and set(Times.NAMES) < set(report)
    for name in ("copy", "memory", "profile", "without_graphs"):
        assert report[name]["reason"] == "no GPU"
    assert report["bigram"]["reason"] == "the pair is not constructed"
    plain, row = (report["rounds"][f"temperature 0, gamma {gamma}"] for gamma in (0, 2))
    assert plain["tau"] == 1 and "ratio" not in plain and row["rounds"] >= 6
    assert row["bytes"] > plain["bytes"] > 0 and row["theorem_3_8"] > 0
    assert row["ratio"]["median"] > 0
    # A CPU leaves no rounds in flight.
    assert row["ratio_with_rounds_left"] == row["ratio"]["median"]
    both = {**report["transformers"], **report["transformers_static"]}
    peers = [found for name, found in both.items() if name.startswith("transformers")]
    assert [peer["same_first_tokens"] for peer in peers] == [8, 8, 8]
    assert str(built) not in json.dumps(report)


def test_a_growing_cache_needs_no_plan_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: torch prefers cuDNN's attention on Hopper, which prepares one for each length."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    subject: Any = Times.__new__(Times)
    subject._peer = lambda role: None
    subject._compare = lambda peers: {"cudnn": enabled()}
    assert subject.transformers() == {"cudnn": False}
    assert subject.transformers_static() == {"cudnn": True} and enabled()


def test_what_breaks_is_named_and_breaks_nothing_else(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check whose reference is missing, and a section that raises."""
    (built / "reference").unlink()
    checked = run_sections(Checks(built, "cpu", quick=True), ["texts", "graphs"])
    assert "reference" in checked["texts"]["reason"] and not checked["passed"]
    assert checked["graphs"]["passed"] is None

    def fails(*_: Any) -> Any:
        raise RuntimeError("no peers today")

    monkeypatch.setattr(times, "transformers_model", fails)
    report = run_sections(Times(built, "cpu", quick=True), ("transformers", "copy"))
    assert not report["passed"] and report["copy"]["reason"] == "no GPU"
    assert report["transformers"]["reason"] == "no peers today"


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    """All of the benchmark, with AOTInductor on the CPU: the pairs, their bundles, timings and
    checks."""
    log = (tmp_path / "log").open("w")
    every = [
        *parts.build_parts("tiny", tmp_path, "cpu", 0),
        *parts.times_parts("tiny", tmp_path, 600, 0, device="cpu"),
        *parts.build_parts("bundled", tmp_path, "cpu", 0),
        *parts.check_parts(tmp_path, device="cpu"),
    ]
    results = {}
    for part in every:
        outcome = suite.run_part(part, 600, log)
        assert outcome["status"] == "ok", (tmp_path / "log").read_text()
        results[part.name] = outcome.get("result", {})
    found = results["tiny: times"]
    assert found["bigram"]["passed"] and found["bigram"]["tokens"] > 1000, found
    same = [x["same_first_tokens"] for n, x in found["transformers"].items() if "rs" in n]
    assert min(same) > 20, found
    assert {path.name for path in tmp_path.iterdir()} == {
        "log", "tiny-times.json", "bundled-check.json",
    }  # fmt: skip


# Profile of a round


def a_round(models: int, begin: float = 0.0) -> list[Kernel]:
    """`models` kernels of 3 us between a first and a last kernel of 1 us, all 1 us apart."""
    starts = [begin + 2 + 4 * i for i in range(models + 1)]
    inner = [Kernel("gemm", at, at + 3) for at in starts[:-1]]
    last = Kernel(profiling.LAST, starts[-1], starts[-1] + 1)
    return [Kernel(profiling.FIRST, begin, begin + 1), *inner, last]


def test_a_round_from_inside() -> None:
    every = [k for n, t in ((0, 0), (4, 50), (4, 100), (1, 150)) for k in a_round(n, t)]
    every += [Kernel("prefill", 40, 49), *a_round(9, 200)[:-1]]  # the last one is cut off
    found = profiling.longest_round(every[::-1])
    assert found[0].begin == 100 and len(found) == 6
    facts = profiling.summarise(found)
    assert (facts["kernels"], facts["span_us"], facts["mean_gap_us"]) == (6, 19, 1)
    assert facts["gap_share"] == round(5 / 19, 4)
    assert facts["largest"][0] == {"name": "gemm", "count": 4, "us": 12, "share": 0.6316}
    assert profiling.longest_round([]) == []


# On a GPU


@pytest.mark.slow
def test_the_gpus_side(
    llama_bundle: Path, on_fake_gpu: FakeDriver, workshop: Workshop, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Draft and target are the same fake, so all tokens are accepted; the reference is another
    model."""
    monkeypatch.setattr("runtime.backends.cuda._driver", lambda: on_fake_gpu)
    monkeypatch.setattr("bench.suites.gpu.kernel.copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(times, "transformers_model", lambda *_: None)
    monkeypatch.setattr(times, "hf_generate", lambda _, prompt, tokens, **options: [0] * tokens)
    monkeypatch.setattr(times, "profile_kernels", lambda work: work() and a_round(3))
    source, place = workshop.checkpoint("llama"), tmp_path / "pair"
    place.mkdir()
    folder_of(place, source, source, llama_bundle)
    timed = run_sections(Times(place, "cuda", quick=True), Times.NAMES)
    assert timed["passed"], timed
    row = timed["rounds"]["temperature 0, gamma 2"]
    assert row["alpha"] == 1 and 0 < row["host_share"] < 1 and row["of_copy_bandwidth"] > 0
    assert row["draft_ms"] > 0 and row["verify_ms"] > 0
    assert row["ratio_with_rounds_left"] < row["ratio"]["median"]
    assert "temperature 0, gamma 2" in timed["without_graphs"]
    assert timed["rounds"]["goal"]["limit"] == 0.05 and timed["rounds"]["bandwidth_goal"]
    assert timed["rounds"]["graph_nodes"]["gamma 2"] > timed["rounds"]["graph_nodes"]["gamma 0"]
    assert timed["profile"]["gamma 2"]["kernels"] == 5
    assert timed["memory"]["goal"]["limit"] == 0.1
    assert 0 < timed["memory"]["used"]["loaded"] <= timed["memory"]["used"]["after_rounds"]

    found = run_sections(Checks(place, "cuda", quick=True), Checks.NAMES)
    assert {name: found[name]["passed"] for name in Checks.NAMES} == {
        "texts": False, "acceptance": False, "certificates": True, "graphs": True,
        "long_prompt": None,
    }, found  # fmt: skip
    assert found["texts"]["same_without_ahead"] and found["acceptance"]["alpha"] == 1
