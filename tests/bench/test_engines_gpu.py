"""The benchmark of engines on a GPU, without one: its pairs, its checks and its times run to their
ends on the CPU, and the checks see what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Workshop
from fake_cuda import FakeDriver
from transformers import AutoModelForCausalLM

from bench import constructed, engines_build, engines_check, engines_gpu, engines_times
from bench.constructed import PRESETS, write_pair
from bench.engines_build import Built
from runtime import load

pytestmark = pytest.mark.filterwarnings("ignore")
TINY = PRESETS["tiny"]


# The constructed pair


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[float, tuple[Path, Path]]:
    """Checkpoints by the noise on the draft."""
    root = tmp_path_factory.mktemp("constructed")
    return {delta: write_pair(TINY, root / str(delta), delta=delta) for delta in (0.0, 0.1, 0.5)}


def _logits(checkpoint: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        answer: torch.Tensor = model(ids[None]).logits[0].float()
    return answer


def test_without_noise_the_draft_is_the_target(pairs: dict[float, tuple[Path, Path]]) -> None:
    ids = torch.arange(200)
    target, draft = (_logits(path, ids) for path in pairs[0.0])
    assert (target - draft).abs().max() <= 2**-3  # a rounding of the largest ones
    assert target.std() == pytest.approx(constructed.PEAK, rel=0.1)
    # A bigram model, whatever its layers compute.
    assert torch.equal(_logits(pairs[0.0][0], ids.flip(0)).flip(0), target)


def test_noise_sets_the_acceptance(pairs: dict[float, tuple[Path, Path]]) -> None:
    ids = torch.arange(200)
    at_0, at_1 = [], []
    for target, draft in pairs.values():
        p, q = (_logits(path, ids) for path in (target, draft))
        at_0.append((p.argmax(-1) == q.argmax(-1)).float().mean().item())
        at_1.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item())
    assert at_0[0] > 0.99 and at_1[0] > 0.99
    for rates in (at_0, at_1):
        assert rates == sorted(rates, reverse=True)
        assert 0.6 < rates[1] < 0.95
        assert rates[2] < 0.6


@pytest.mark.parametrize(
    ("shape", "parameters"), [(constructed.LLAMA_8B, 8.03e9), (constructed.LLAMA_1B, 1.498e9)]
)
def test_the_shapes_are_the_published_ones(shape: Any, parameters: float) -> None:
    """Llama 3 8B has 8.03e9 weights, Llama 3.2 1B 1.236e9 with a tied embedding."""
    kv = shape.hidden_size // shape.num_attention_heads * shape.num_key_value_heads
    layer = 2 * shape.hidden_size**2 + 2 * shape.hidden_size * kv
    layer += 3 * shape.hidden_size * shape.intermediate_size
    total = shape.num_hidden_layers * layer + 2 * shape.vocab_size * shape.hidden_size
    assert total == pytest.approx(parameters, rel=2e-3)


# Building


def test_it_builds_as_make_engines_does(
    pairs: dict[float, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        engines_build,
        "_run",
        lambda step, arguments, built: commands.append([*map(str, arguments)]),
    )
    for device, sm in (("cpu", "cpu"), ("cuda", "")):
        commands.clear()
        built = engines_build.build("tiny", tmp_path, device)
        assert [command[0] for command in commands] == ["export", "engines"]
        assert commands[1][-2:] == ["--sm", sm]
        assert Built.read(tmp_path) == built and built.reference is None
        engines_build_parsers(commands)


def engines_build_parsers(commands: list[list[str]]) -> None:
    """The two rooms take these options."""
    import engines.__main__
    import export.__main__

    given = export.__main__.parser().parse_args(commands[0][1:])
    assert (given.dtype, given.format, given.max_len) == ("bfloat16", "torch", TINY.max_len)
    assert engines.__main__.parser().parse_args(commands[1][1:]).backend == "aotinductor"


def test_the_bundled_weights_are_rounded(tmp_path: Path) -> None:
    folder = engines_build.rounded(engines_build.BUNDLED / "draft", tmp_path / "draft")
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        engines_build.BUNDLED / "draft", dtype=torch.float32
    )
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b.bfloat16().float()), name


# Checking


@pytest.fixture(scope="module")
def built(workshop: Workshop) -> Built:
    """A pair whose texts depend on their caches, by ONNX Runtime in place of a GPU."""
    options = {"max_len": 700}
    target = workshop.checkpoint("llama", seed=0, max_position_embeddings=1024)
    draft = workshop.checkpoint("llama", seed=0, blur=0.2, max_position_embeddings=1024)
    bundle = str(workshop.bundle(target, draft, **options))
    same = str(workshop.bundle(target, target, **options))
    return Built("test", str(target), str(draft), bundle, bundle, same)


def test_the_checks_pass(built: Built, tmp_path: Path) -> None:
    saved: list[str] = []
    report = engines_check.check(
        built, "cpu", engines_check.QUICK, lambda report: saved.append(json.dumps(report))
    )
    assert report["passed"], report
    assert len(saved) == len(engines_check.NAMES) and json.loads(saved[-1]) == report
    assert report["draft_is_target"]["acceptance"] == 1
    assert report["draft_is_target"]["rounds"] >= engines_check.QUICK.rounds
    assert report["long_prompt"]["prompt_tokens"] > 512
    assert report["texts"]["logprobs_differ_by"] < 1e-3


def test_control_another_model_fails(built: Built, workshop: Workshop) -> None:
    """In place of the bundle; and as a draft that is not the target."""
    other = workshop.checkpoint("llama", seed=0, blur=0.2, max_position_embeddings=1024)
    bundle = str(workshop.bundle(other, None, max_len=700))
    report = engines_check.check(
        Built("test", built.target, built.draft, built.bundle, bundle, built.bundle),
        "cpu", engines_check.QUICK,
    )  # fmt: skip
    assert not report["passed"]
    failed = {name for name in engines_check.NAMES if report[name]["passed"] is False}
    assert failed == {"texts", "draft_is_target", "long_prompt"}
    assert report["draft_is_target"]["acceptance"] < 0.5
    assert report["certificates"]["passed"] and report["graphs"]["passed"]


def test_control_a_graph_that_says_something_else(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*arguments: Any, graphs: bool = True, **options: Any) -> Any:
        engine = load(*arguments, **options)
        if graphs:
            target = engine.decoder.target
            forward = target.forward
            target.forward = lambda *a, **o: forward(*a, **o) * -1  # type: ignore[method-assign]
        return engine

    checks = engines_check.Checks(built, "cpu", engines_check.QUICK)
    monkeypatch.setattr(engines_check, "load", other)
    result = checks.graphs()
    assert not result["passed"]
    assert result["differ"][0]["slots"] == 1 and result["differ"][-1]["slots"] == 2


def test_what_breaks_has_failed_and_breaks_nothing_else(built: Built) -> None:
    without = Built("test", built.target, built.draft, built.bundle, failures=["reference: why"])
    report = engines_check.check(without, "cpu", engines_check.QUICK)
    assert not report["passed"]
    assert "why" in report["texts"]["reason"]
    assert report["graphs"]["passed"] and report["certificates"]["passed"]


def test_near_ties() -> None:
    def judge(margins: list[float], tokens: int = 100) -> dict[str, Any]:
        return engines_check.judged(
            [engines_check.Tie(i, 1, 2, margin) for i, margin in enumerate(margins)], tokens
        )

    assert judge([])["passed"] and judge([0.2] * 5)["passed"]
    assert not judge([0.2] * 6)["passed"], "too many"
    assert not judge([0.3])["passed"]
    never = judge([math.inf])
    assert not never["passed"] and never["largest_margin"] is None
    json.loads(json.dumps(never, allow_nan=False))


# Times


def test_the_times_run_to_their_end(
    pairs: dict[float, tuple[Path, Path]], workshop: Workshop, tmp_path: Path
) -> None:
    target, draft = pairs[0.1]
    bundle = workshop.bundle(target, draft, max_len=TINY.max_len)
    Built("tiny", str(target), str(draft), str(bundle)).write(tmp_path)
    path = tmp_path / "report" / "times.json"
    options = ["--device", "cpu", "--quick", "--out", str(tmp_path), "--json", str(path)]
    assert engines_gpu.main(["times", *options]) == 0
    report = json.loads(path.read_text())
    assert report["failed"] == [] and set(engines_times.SECTIONS) < set(report)
    assert report["copy"]["reason"] == report["memory"]["reason"] == "no GPU"
    assert report["goals"] == {}
    rounds = report["of_rounds"]
    assert rounds["gamma 0"]["tau"] == 1 and rounds["gamma 2"]["rounds"] >= 6
    weights, rest = report["weights_read"], rounds["gamma 2"]["bytes"]
    assert 0 < rest - weights["target"] - 2 * weights["draft"] < 0.2 * rest, "the caches"
    assert report["speedup"]["temperature 0, gamma 2"]["alpha"] > 0.5
    peers = [name for name in report["transformers"] if name.startswith("transformers")]
    assert len(peers) == 3
    assert all(report["transformers"][name]["same_first_tokens"] == 8 for name in peers)
    assert str(tmp_path) not in json.dumps(report)


def test_a_section_that_breaks_is_named(
    pairs: dict[float, tuple[Path, Path]], workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pairs[0.1]
    bundle = workshop.bundle(target, draft, max_len=TINY.max_len)

    def fails(*_: Any) -> Any:
        raise RuntimeError("no peers today")

    monkeypatch.setattr(engines_times, "_peers", fails)
    built = Built("tiny", str(target), str(draft), str(bundle))
    report = engines_times.times(built, "cpu", engines_times.QUICK)
    assert report["failed"] == ["transformers"]
    assert report["transformers"]["reason"] == "no peers today"


# The command line


def test_what_was_not_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert engines_gpu.main(["check", "--device", "cpu", "--out", str(tmp_path)]) == 7
    assert "was not built" in capsys.readouterr().err


def test_without_tensorrt_rtx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = tmp_path / "rtx.json"
    assert engines_gpu.main(["rtx", "--out", str(tmp_path / "rtx"), "--json", str(path)]) == 0
    assert json.loads(path.read_text())["reason"] == "tensorrt_rtx is not installed"


@pytest.mark.slow
def test_all_of_it(tmp_path: Path) -> None:
    """As on a GPU, with AOTInductor: build, check with draft = target from the twin, times."""
    out, report = tmp_path / "tiny", tmp_path / "report.json"
    common = ["--device", "cpu", "--out", str(out), "--json", str(report)]
    assert engines_gpu.main(["build", *common, "--pair", "tiny", "--checks"]) == 0
    assert json.loads(report.read_text())["failures"] == []
    assert engines_gpu.main(["check", *common, "--quick"]) == 0
    assert json.loads(report.read_text())["long_prompt"]["passed"] is None  # a context of 256
    assert engines_gpu.main(["times", *common, "--quick", "--remove"]) == 0
    assert not out.exists()


# On a GPU


def test_the_gpus_side(
    llama_bundle: Path, on_fake_gpu: FakeDriver, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft and target are one fake, so all is accepted; the reference is another model."""
    monkeypatch.setattr("runtime.backends.cuda._driver", lambda: on_fake_gpu)
    monkeypatch.setattr("bench.kernel_gpu.copy_bandwidth", lambda: 1e9)
    monkeypatch.setattr(engines_times, "_peers", lambda *_: {})
    source, path = str(workshop.checkpoint("llama")), str(llama_bundle)
    built = Built("fake", source, source, path, path, path)
    times = engines_times.times(built, "cuda", engines_times.QUICK)
    assert times["failed"] == [], times
    row = times["of_rounds"]["gamma 2"]
    assert row["alpha"] == 1 and 0 < row["host_share"] < 1 and row["of_copy_bandwidth"] > 0
    assert row["draft_ms"] > 0 and row["verify_ms"] > 0
    assert set(times["without_graphs"]) == {"gamma 0", "gamma 2", "section_s"}
    assert set(times["goals"]) == {"host_share", "memory_over_plan"}
    assert 0 < times["memory"]["used"]["loaded"] <= times["memory"]["used"]["after_rounds"]

    checks = engines_check.check(built, "cuda", engines_check.QUICK)
    found = {name: checks[name]["passed"] for name in engines_check.NAMES}
    assert found == {
        "texts": False, "draft_is_target": True, "certificates": True, "graphs": True,
        "long_prompt": None,
    }, checks  # fmt: skip
    assert checks["texts"]["same_without_ahead"]
    assert checks["draft_is_target"]["acceptance"] == 1

    loop = engines_check.check(built, "cuda", engines_check.QUICK, only=["loop"])
    assert loop["passed"] and {"loop", "round by round"} < set(loop["loop"])
    assert "capture loop" in on_fake_gpu.log
