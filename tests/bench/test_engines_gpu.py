"""The benchmark of engines on a GPU, without one: its pairs, its checks and its times run to their
ends on the CPU, and the checks see what is wrong."""

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

from bench.suites.gpu import checks, constructed, suite, times
from bench.suites.gpu.checks import Checks
from bench.suites.gpu.constructed import TARGET, write_pair
from bench.suites.gpu.engines import main, sections
from bench.suites.gpu.times import Times
from runtime import load

pytestmark = pytest.mark.filterwarnings("ignore")


def _model(checkpoint: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)


def _logits(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = _model(checkpoint)(ids[None]).logits[0].float()
    return answer


# The pairs


def test_noise_sets_the_acceptance(tmp_path: Path) -> None:
    """And without it the draft is the target: a bigram model, whatever its layers compute."""
    ids = torch.arange(200)
    at_0, at_1 = [], []
    for delta in (0.0, 0.1, 0.5):
        target, draft = write_pair("tiny", tmp_path / f"{delta}", delta=delta)
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


def test_the_bundled_weights_are_rounded(tmp_path: Path) -> None:
    """The reference has the numbers that the GPU computes with."""
    target, _ = write_pair("bundled", tmp_path)
    ours, theirs = (_model(path, torch.float32).named_parameters() for path in (target, TARGET))
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        assert torch.equal(a, b.bfloat16().float()), name


# Checking


def folder_of(folder: Path, target: Path, draft: Path, bundle: Path) -> Path:
    """As `suite.engines` makes it, with the bundle as its own reference."""
    for name, place in ("target", target), ("draft", draft), ("bundle", bundle):
        (folder / name).symlink_to(place)
    (folder / "reference").symlink_to(bundle)
    return folder


@pytest.fixture
def built(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pair whose texts depend on their caches, by ONNX Runtime in place of a GPU."""
    monkeypatch.setattr(checks, "BEYOND", -60)  # of 137 rows, which are one call of this bundle
    monkeypatch.setattr(times, "DTYPE", "float32")
    target, draft = workshop.checkpoint("llama"), workshop.checkpoint("llama", blur=0.02)
    return folder_of(tmp_path, target, draft, workshop.bundle(target, draft))


CHEAP = ["texts", "acceptance", "graphs", "long_prompt"]  # certificates have their own tests


def test_the_checks_pass(built: Path) -> None:
    report = sections(Checks(built, "cpu", quick=True), CHEAP, built / "new" / "check.json")
    assert report["passed"], report
    assert json.loads((built / "new" / "check.json").read_text()) == report
    assert report["graphs"]["passed"] is None and report["graphs"]["reason"] == "no GPU"
    assert report["texts"]["tokens"] == 96 and report["texts"]["worst"] == []
    assert report["acceptance"]["alpha"] == report["acceptance"]["on_the_cpu"] > 0.3
    assert report["long_prompt"]["prompt_tokens"] > 64


def negated(engine: Any, role: str) -> Any:
    """The engine, with another sign of one model's logits."""
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
    report = sections(Checks(built, "cpu", quick=True), CHEAP)
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
    agreed = ours.agree({"graphs": True}, {"graphs": False})
    assert not agreed["passed"] and {x["slots"] for x in agreed["differ"]} == {1, 2}


def test_near_ties() -> None:
    def passed(margins: list[float]) -> bool:
        return bool(checks.judged([{"margin": m} for m in margins], tokens=100)["passed"])

    assert passed([]) and passed([0.2] * 5)
    assert not passed([0.2] * 6), "too many"
    assert not passed([0.3]) and not passed([checks.FAR])


# Times


def test_the_times_run_to_their_end(built: Path) -> None:
    path = built / "times.json"
    assert main(["times", str(built), "--device", "cpu", "--quick", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["passed"] and set(Times.NAMES) < set(report)
    assert report["copy"]["reason"] == report["memory"]["reason"] == "no GPU"
    plain, row = (report["rounds"][f"temperature 0, gamma {gamma}"] for gamma in (0, 2))
    assert plain["tau"] == 1 and "ratio" not in plain and row["rounds"] >= 6
    assert row["bytes"] > plain["bytes"] > 0 and row["theorem_3_8"] > 0
    assert row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
    peers = [name for name in report["transformers"] if name.startswith("transformers")]
    assert len(peers) == 2
    assert all(report["transformers"][name]["same_first_tokens"] == 8 for name in peers)
    assert str(built) not in json.dumps(report)


def test_what_breaks_is_named_and_breaks_nothing_else(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check without what it is held against, a section that raises."""
    (built / "reference").unlink()
    checked = sections(Checks(built, "cpu", quick=True), ["texts", "graphs"])
    assert "reference" in checked["texts"]["reason"] and not checked["passed"]
    assert checked["graphs"]["passed"] is None

    def fails(*_: Any) -> Any:
        raise RuntimeError("no peers today")

    monkeypatch.setattr(times, "_peers", fails)
    report = sections(Times(built, "cpu", quick=True), ("transformers", "copy"))
    assert not report["passed"] and report["copy"]["reason"] == "no GPU"
    assert report["transformers"]["reason"] == "no peers today"


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    """As on a GPU, with AOTInductor on the CPU: the pair, its bundles, its checks."""
    limits, log = (600, 600, 600), (tmp_path / "log").open("w")
    for part in suite.engines("tiny", tmp_path, "check", limits, 600, device="cpu"):
        outcome = suite.run_part(part, part.seconds, log)
        assert outcome["status"] == "ok", (tmp_path / "log").read_text()
        if part.name == "tiny: check":
            assert outcome["result"]["long_prompt"]["passed"] is None  # a context of 256
    assert not (tmp_path / "tiny").exists()


# On a GPU


@pytest.mark.slow
def test_the_gpus_side(
    llama_bundle: Path, on_fake_gpu: FakeDriver, workshop: Workshop, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Draft and target are one fake, so all is accepted; the reference is another model."""
    monkeypatch.setattr("runtime.backends.cuda._driver", lambda: on_fake_gpu)
    monkeypatch.setattr("bench.suites.gpu.kernel.copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(times, "_peers", lambda *_: {})
    source, place = workshop.checkpoint("llama"), tmp_path / "pair"
    place.mkdir()
    folder_of(place, source, source, llama_bundle)
    timed = sections(Times(place, "cuda", quick=True), Times.NAMES)
    assert timed["passed"], timed
    row = timed["rounds"]["temperature 0, gamma 2"]
    assert row["alpha"] == 1 and 0 < row["host_share"] < 1 and row["of_copy_bandwidth"] > 0
    assert row["draft_ms"] > 0 and row["verify_ms"] > 0
    assert "temperature 0, gamma 2" in timed["without_graphs"]
    assert timed["rounds"]["goal"]["limit"] == 0.05 and timed["memory"]["goal"]["limit"] == 0.1
    assert 0 < timed["memory"]["used"]["loaded"] <= timed["memory"]["used"]["after_rounds"]

    names = [*Checks.NAMES, "loop"]
    found = sections(Checks(place, "cuda", quick=True), names)
    assert {name: found[name]["passed"] for name in names} == {
        "texts": False, "acceptance": False, "certificates": True, "graphs": True,
        "long_prompt": None, "loop": True,
    }, found  # fmt: skip
    assert found["texts"]["same_without_ahead"] and found["acceptance"]["alpha"] == 1
    assert {"loop", "round by round"} < set(found["loop"])
    assert "capture loop" in on_fake_gpu.log
