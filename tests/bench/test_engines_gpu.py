"""The benchmark of engines on a GPU, without one: its pairs, its checks and its times run to their
ends on the CPU, and the checks see what is wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Workshop
from cuda_standin import FakeDriver
from transformers import AutoModelForCausalLM

from bench.core.timed import Timed
from bench.suites.gpu import build, checks, constructed, engines, times
from bench.suites.gpu.build import BuiltPair
from bench.suites.gpu.constructed import PRESETS, write_pair
from runtime import load

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = PRESETS["tiny"]


# The constructed pair


def _logits(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        answer: torch.Tensor = model(ids[None]).logits[0].float()
    return answer


def test_noise_sets_the_acceptance(tmp_path: Path) -> None:
    """And without it the draft is the target: a bigram model, whatever its layers compute."""
    ids = torch.arange(200)
    at_0, at_1 = [], []
    for delta in (0.0, 0.1, 0.5):
        target, draft = write_pair(TINY, tmp_path / f"{delta}", delta=delta)
        p, q = (_logits(path, ids) for path in (target, draft))
        at_0.append((p.argmax(-1) == q.argmax(-1)).float().mean().item())
        at_1.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item())
        if not delta:
            assert (p - q).abs().max() <= 2**-3  # a rounding of the largest ones
            assert p.std() == pytest.approx(constructed.PEAK, rel=0.1)
            assert torch.equal(_logits(target, ids.flip(0)).flip(0), p)
    for rates in (at_0, at_1):
        assert rates == sorted(rates, reverse=True)
        assert rates[0] > 0.99 and 0.6 < rates[1] < 0.95 and rates[2] < 0.6


# Building


def test_it_builds_as_make_engines_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two rooms take these options."""
    import engines.command
    import export.__main__

    commands: list[list[str]] = []

    def run(*command: object) -> Timed:
        commands.append([*map(str, command)])
        return Timed(1.0, 0.0, 0)

    monkeypatch.setattr(build, "timed", run)
    for device, sm in (("cpu", "cpu"), ("cuda", "")):
        commands.clear()
        built = build.build("tiny", tmp_path, device)
        assert [command[0] for command in commands] == ["export", "engines"]
        assert BuiltPair.read(tmp_path) == built and built.reference is None
        given = export.__main__.parser().parse_args(commands[0][1:])
        assert (given.dtype, given.format, given.max_len) == ("bfloat16", "torch", TINY.max_len)
        made = engines.command.parser().parse_args(commands[1][1:])
        assert (made.backend, made.sm) == ("aotinductor", sm)


def test_the_bundled_weights_are_rounded(tmp_path: Path) -> None:
    """The reference has the numbers that the GPU computes with."""
    folder = build.rounded(build.BUNDLED / "draft", tmp_path / "draft")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, build.BUNDLED / "draft")
    )
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b.bfloat16().float()), name


# Checking


@pytest.fixture
def built(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> BuiltPair:
    """A pair whose texts depend on their caches, by ONNX Runtime in place of a GPU."""
    monkeypatch.setattr(checks, "BEYOND", -60)  # of 137 rows, which are one call of this bundle
    monkeypatch.setattr(times, "DTYPE", "float32")
    target, draft = workshop.checkpoint("llama"), workshop.checkpoint("llama", blur=0.1)
    bundle = str(workshop.bundle(target, draft))
    same = str(workshop.bundle(target, target))
    return BuiltPair("test", str(target), str(draft), bundle, bundle, same)


CHEAP = ["texts", "draft_is_target", "graphs", "long_prompt"]  # certificates have their own tests


def test_the_checks_pass(built: BuiltPair) -> None:
    saved: list[str] = []
    report = checks.check(
        built, "cpu", checks.QUICK, lambda report: saved.append(json.dumps(report)), CHEAP
    )
    assert report["passed"], report
    assert len(saved) == len(CHEAP) and json.loads(saved[-1]) == report
    assert report["graphs"] == {**report["graphs"], "passed": None, "reason": "no GPU"}
    assert report["draft_is_target"]["acceptance"] == 1
    assert report["draft_is_target"]["rounds"] >= checks.QUICK.rounds
    assert report["long_prompt"]["prompt_tokens"] > 64
    assert report["texts"]["logprobs_differ_by"] < 1e-3


def test_control_engines_that_say_something_else(
    built: BuiltPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The logits of the reference, of the draft that is the target, and of graphs have another
    sign."""
    reference = tmp_path / "reference"
    reference.symlink_to(built.bundle)

    def loaded(folder: str, *, graphs: bool = False, **options: Any) -> Any:
        engine = load(folder, **options)
        decoder = engine.decoder
        altered: Any = {built.same: decoder.draft, str(reference): decoder.target}.get(folder)
        if graphs:
            altered = decoder.target
        if altered is not None:
            forward = altered.forward
            altered.forward = lambda *a, **o: forward(*a, **o) * -1
        return engine

    monkeypatch.setattr(checks, "load", loaded)
    wrong = replace(built, reference=str(reference))
    report = checks.check(wrong, "cpu", checks.QUICK, only=CHEAP)
    failed = {name for name in CHEAP if report[name]["passed"] is False}
    assert failed == {"texts", "draft_is_target", "long_prompt"} and not report["passed"]
    ours = checks.Checks(built, "cpu", checks.CheckSize(8, 1, (2,)))
    agreed = ours.agree({"graphs": True}, {"graphs": False})
    assert not agreed["passed"] and {x["slots"] for x in agreed["differ"]} == {1, 2}


def test_near_ties() -> None:
    def judge(margins: list[float], tokens: int = 100) -> dict[str, Any]:
        return checks.judged([checks.Tie(i, 1, 2, m) for i, m in enumerate(margins)], tokens)

    assert judge([])["passed"] and judge([0.2] * 5)["passed"]
    assert not judge([0.2] * 6)["passed"], "too many"
    assert not judge([0.3])["passed"]
    never = judge([math.inf])
    assert not never["passed"] and never["largest_margin"] is None
    json.loads(json.dumps(never, allow_nan=False))


# Times


def test_the_times_run_to_their_end(built: BuiltPair, tmp_path: Path) -> None:
    built.write(tmp_path)
    path = tmp_path / "report" / "times.json"
    options = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--json", str(path)]
    assert engines.main(["times", *options]) == 0
    report = json.loads(path.read_text())
    assert report["failed"] == [] and set(times.SECTIONS) < set(report)
    assert report["copy"]["reason"] == report["memory"]["reason"] == "no GPU"
    assert report["goals"] == {}
    plain, row = (report["rounds"][f"temperature 0, gamma {gamma}"] for gamma in (0, 2))
    assert plain["tau"] == 1 and "ratio" not in plain and row["rounds"] >= 6
    weights = report["weights_read"]
    assert 0 < row["bytes"] - weights["target"] - 2 * weights["draft"] < 0.2 * row["bytes"]
    assert row["theorem_3_8"] > row["with_measured_width"] > 0
    peers = [name for name in report["transformers"] if name.startswith("transformers")]
    assert len(peers) == 3
    assert all(report["transformers"][name]["same_first_tokens"] == 8 for name in peers)
    assert str(tmp_path) not in json.dumps(report)


def test_what_breaks_is_named_and_breaks_nothing_else(
    built: BuiltPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A check without what it is held against, a section that raises, a folder without a bundle."""
    without = replace(built, reference=None, failures=["reference: why"])
    checked = checks.check(without, "cpu", checks.QUICK, only=["texts", "draft_is_target"])
    assert "why" in checked["texts"]["reason"] and checked["draft_is_target"]["passed"]
    assert not checked["passed"]

    def fails(*_: Any) -> Any:
        raise RuntimeError("no peers today")

    monkeypatch.setattr(times, "_peers", fails)
    monkeypatch.setattr(times, "SECTIONS", ("transformers", "copy"))
    report = times.times(built, "cpu", times.QUICK)
    assert report["failed"] == ["transformers"] and report["copy"]["reason"] == "no GPU"
    assert report["transformers"]["reason"] == "no peers today"
    assert engines.main(["check", "--device", "cpu", "--out", str(tmp_path)]) == 7


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    """As on a GPU, with AOTInductor: build, check with draft = target from the twin, times."""
    out, report = tmp_path / "tiny", tmp_path / "report.json"
    common = ["--device", "cpu", "--out", str(out), "--json", str(report)]
    assert engines.main(["build", *common, "--pair", "tiny", "--checks"]) == 0
    assert json.loads(report.read_text())["failures"] == []
    assert engines.main(["check", *common, "--quick"]) == 0
    assert json.loads(report.read_text())["long_prompt"]["passed"] is None  # a context of 256
    assert engines.main(["times", *common, "--quick", "--remove"]) == 0
    assert not out.exists()


# On a GPU


@pytest.mark.slow
def test_the_gpus_side(
    llama_bundle: Path, on_fake_gpu: FakeDriver, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft and target are one fake, so all is accepted; the reference is another model."""
    monkeypatch.setattr("runtime.backends.cuda._driver", lambda: on_fake_gpu)
    monkeypatch.setattr("bench.suites.gpu.kernel.copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(times, "_peers", lambda *_: {})
    source, path = str(workshop.checkpoint("llama")), str(llama_bundle)
    built = BuiltPair("fake", source, source, path, path, path)
    timed = times.times(built, "cuda", times.QUICK)
    assert timed["failed"] == [], timed
    row = timed["rounds"]["temperature 0, gamma 2"]
    assert row["alpha"] == 1 and 0 < row["host_share"] < 1 and row["of_copy_bandwidth"] > 0
    assert row["draft_ms"] > 0 and row["verify_ms"] > 0
    assert "temperature 0, gamma 2" in timed["without_graphs"]
    assert set(timed["goals"]) == {"host_share", "memory_over_plan"}
    assert 0 < timed["memory"]["used"]["loaded"] <= timed["memory"]["used"]["after_rounds"]

    found = checks.check(built, "cuda", checks.QUICK)
    assert {name: found[name]["passed"] for name in checks.NAMES} == {
        "texts": False, "draft_is_target": True, "certificates": True, "graphs": True,
        "long_prompt": None,
    }, found  # fmt: skip
    assert found["texts"]["same_without_ahead"]
    assert found["draft_is_target"]["acceptance"] == 1

    loop = checks.check(built, "cuda", checks.QUICK, only=["loop"])
    assert loop["passed"] and {"loop", "round by round"} < set(loop["loop"])
    assert "capture loop" in on_fake_gpu.log
