"""A bundle on a GPU: the choice of the device, refusals before anything is loaded, and generations
through `load`, over a driver that runs the emulated kernels, with fakes in place of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import device_standin
import pytest
from cuda_standin import FakeDriver

from runtime import Options, load
from runtime.backends import onnxruntime as ort_cuda
from runtime.backends.device import DeviceEngine
from runtime.backends.registry import device_engine
from runtime.bundle import choose_device
from runtime.files.errors import OutriderError
from runtime.files.graphs import HOST_WEIGHTS_FILE, StateFacts
from runtime.files.manifest import EngineFacts, Manifest, Profile, read_bundle
from runtime.gpu import opening as gpu
from runtime.sampling import kernel

FOLDER = Path("build/some")


@pytest.fixture
def manifest(llama_bundle: Path) -> Manifest:
    return read_bundle(llama_bundle)


def compiled(manifest: Manifest, backend: str, *targets: str) -> Manifest:
    profiles = [Profile("decode", [1, 2, 2], [1, 5, 5], [1, 5, 5], 1000),
                Profile("prefill", [1, 1, 2], [1, 8, 8], [1, 1, 1], 5000)]  # fmt: skip
    engine = EngineFacts("key", "engine", list(targets), profiles)
    return replace(manifest, backend=backend, engines={"target": engine, "draft": engine})


@pytest.mark.parametrize(
    ("targets", "device", "expected"),
    [
        ([], "auto", None), ([], "cpu", None), ([], "cuda", 0), ([], "cuda:2", 2),
        (["sm89", "sm120"], "auto", 0), (["sm90"], "cuda", 0), (["sm90"], "cuda:1", 1),
        (["cpu", "x86_64"], "auto", None), (["cpu", "x86_64"], "cpu", None),
    ],
)  # fmt: skip
def test_which_device(
    manifest: Manifest, targets: list[str], device: str, expected: int | None
) -> None:
    made = compiled(manifest, "some", *targets) if targets else manifest
    assert choose_device(made, FOLDER, device) == expected


@pytest.mark.parametrize(
    ("targets", "device", "cause", "remedy"),
    [
        *(
            ([], name, "is unknown", "")
            for name in ("gpu", "", "cuda:", "cuda:x", "cpu:0", "cuda:-1", "cuda:99999999999")
        ),
        (["sm89", "sm120"], "cpu", "was compiled for sm89, sm120", "BACKEND=onnxruntime"),
        (["cpu", "x86_64", "avx2"], "cuda", "was compiled for the CPU", "GPU"),
    ],
)
def test_devices_that_are_refused(
    manifest: Manifest, targets: list[str], device: str, cause: str, remedy: str
) -> None:
    made = compiled(manifest, "some", *targets) if targets else manifest
    with pytest.raises(OutriderError, match=f"^option: .*{cause}.*{remedy}"):
        choose_device(made, FOLDER, device)


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ({}, "DRAFT_WEIGHTS=full"),
        ({"source": "the target's"}, "BACKEND=tensorrt_rtx"),  # DRAFT=self is never full
        ({"states": StateFacts([], 16, 0)}, "BACKEND=tensorrt_rtx"),
    ],
)
def test_what_makes_a_draft_run_on_a_gpu(
    manifest: Manifest, facts: dict[str, Any], remedy: str
) -> None:
    pair = manifest.pair
    assert pair.draft
    target = replace(pair.target, source="the target's")
    host_weights = {HOST_WEIGHTS_FILE: next(iter(pair.draft.files.values()))}
    draft = replace(pair.draft, files=host_weights, **facts)
    made = replace(manifest, pair=replace(pair, target=target, draft=draft))
    with pytest.raises(OutriderError, match=f"was compiled for the CPU.*{remedy}"):
        choose_device(made, FOLDER, "cuda")


def test_another_gpu(manifest: Manifest) -> None:
    made = compiled(manifest, "tensorrt_rtx", "sm80", "sm120")
    gpu.check_gpu(made, FOLDER, (12, 0))
    with pytest.raises(OutriderError) as caught:
        gpu.check_gpu(made, FOLDER, (8, 9))
    assert "was compiled for sm80, sm120, and this GPU is sm89" in caught.value.cause
    assert "SM=80,89,120" in caught.value.remedy, "the old targets and this GPU"
    gpu.check_gpu(manifest, FOLDER, (8, 9))  # portable graphs


@pytest.mark.parametrize(
    ("backend", "target", "gpu", "sm"),
    [
        ("tensorrt", "sm90", "sm89", ""),  # builds only where it runs
        ("aotinductor", "sm90", "sm89", " SM=89 "),
        ("aotinductor", "sm90", None, " SM=90 "),
        ("aotinductor", "cpu", None, " SM=cpu "),
    ],
)
def test_the_command_that_builds_for_another_gpu(
    manifest: Manifest, backend: str, target: str, gpu: str | None, sm: str
) -> None:
    command = compiled(manifest, backend, target).rebuild_command(FOLDER, gpu=gpu)
    assert f"BACKEND={backend}" in command and sm in command and ("SM=" in command) == bool(sm)


def test_threads_are_refused_on_a_gpu(llama_bundle: Path) -> None:
    with pytest.raises(OutriderError, match="threads=2 is out of range on a GPU"):
        load(llama_bundle, device="cuda", threads=2)


# Through `load`


def test_texts_through_load(llama_bundle: Path, on_fake_gpu: FakeDriver) -> None:
    engine = load(llama_bundle, device="cuda", slots=2)
    result = engine.generate("some words", max_new_tokens=24, gamma=4, ignore_eos=True)
    assert len(result.tokens) == 24 and result.stats.accepted
    assert on_fake_gpu.log.count("capture") >= 1
    plain = engine.generate("some words", max_new_tokens=24, gamma=0, ignore_eos=True)
    assert plain.token_ids == result.token_ids
    assert set(engine.memory) == {"target", "draft", "cache", "activations", "buffers"}
    requests = [
        (f"words {i}", Options(temperature=0.7, max_new_tokens=9 + i, seed=i)) for i in range(5)
    ]
    assert sorted(dict(engine.batch(requests))) == [0, 1, 2, 3, 4]


def test_without_the_draft_model(llama_bundle: Path, on_fake_gpu: FakeDriver) -> None:
    with load(llama_bundle, device="cuda") as engine:
        text = engine.generate("some words", max_new_tokens=9, ignore_eos=True).token_ids
        whole = engine.memory
    engine = load(llama_bundle, device="cuda", draft_model=False)
    plain = engine.generate("some words", max_new_tokens=9, ignore_eos=True)
    assert plain.token_ids == text and not plain.stats.drafted
    assert engine.memory.keys() == whole.keys() - {"draft"}
    assert all(engine.memory[name] < whole[name] for name in ("cache", "buffers"))
    with pytest.raises(OutriderError, match="draft=model needs the draft model"):
        engine.generate("some words", draft="model")


def test_without_graphs(llama_bundle: Path, on_fake_gpu: FakeDriver) -> None:
    engine = load(llama_bundle, device="cuda", graphs=False)
    assert len(engine.generate("some words", max_new_tokens=9, ignore_eos=True).tokens) == 9
    assert "capture" not in on_fake_gpu.log and "graph" not in on_fake_gpu.log


def test_what_is_used_is_what_was_planned(llama_bundle: Path, on_fake_gpu: FakeDriver) -> None:
    """Only caches and buffers: the fakes have no weights."""
    engine = load(llama_bundle, device="cuda", slots=2)
    engine.generate("some words", max_new_tokens=24, gamma=4, ignore_eos=True)
    used = sum(len(block) - 256 for block in on_fake_gpu.allocated.values())
    facts = device_standin.facts_of(engine.decoder.target.fake)
    planned = 2 * facts.cache_bytes(2) + engine.memory["buffers"]
    assert planned <= used <= 1.1 * planned


def test_a_gpu_that_is_too_small(llama_bundle: Path, on_fake_gpu: FakeDriver) -> None:
    on_fake_gpu._memory = 2**16
    cause = r"needs [\d.]+ MiB of the GPU's memory, but only 0\.1 MiB of 0\.1 MiB are free"
    with pytest.raises(OutriderError, match=f"^memory: .*{cause}"):
        load(llama_bundle, device="cuda")
    assert not on_fake_gpu.allocated, "nothing was loaded"


def test_memory_that_a_library_keeps_is_no_reason_to_refuse(
    llama_bundle: Path, on_fake_gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: memory of a closed engine, which torch keeps cached, counted as used."""
    room, on_fake_gpu._memory = on_fake_gpu._memory, 2**16
    monkeypatch.setattr(
        DeviceEngine,
        "release_unused_memory",
        classmethod(lambda _: setattr(on_fake_gpu, "_memory", room)),
    )
    assert load(llama_bundle, device="cuda").generate("some words", max_new_tokens=3).tokens


def test_working_memory(manifest: Manifest) -> None:
    made = compiled(manifest, "tensorrt_rtx", "sm89")
    assert gpu.working_memory(made, 1)["activations"] == 2 * 5000
    assert gpu.working_memory(made.without_draft(), 1)["activations"] == 5000
    for each in (manifest, manifest.without_draft()):
        logits = each.pair.logits_bytes(4, gpu=True)
        buffers = gpu.working_memory(each, 4)["buffers"]
        assert logits < buffers < logits + 2**20


def test_half_of_the_activations_is_no_sum(manifest: Manifest) -> None:
    """Fault: the known activations of one profile were taken for those of both engines."""
    made = compiled(manifest, "aotinductor", "sm89")
    assert made.engines is not None and made.activation_bytes == 2 * 5000
    engine = made.engines["draft"]
    unknown = replace(
        engine, profiles=[engine.profiles[0], replace(engine.profiles[1], memory=None)]
    )
    for incomplete in (unknown, replace(engine, profiles=[])):
        partial = replace(made, engines={**made.engines, "draft": incomplete})
        assert partial.activation_bytes is None
        allowed = gpu.working_memory(partial, 1)["activations"]
        assert allowed == device_engine("aotinductor").allowance > 2 * 5000


@pytest.mark.parametrize(
    ("backend", "module"),
    [("onnxruntime", "onnxruntime"), ("aotinductor", "aotinductor"),
     ("tensorrt_rtx", "tensorrt"), ("tensorrt", "tensorrt")],
)  # fmt: skip
def test_each_backend_has_its_engine(
    manifest: Manifest, backend: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manifest if backend == "onnxruntime" else compiled(manifest, backend, "sm89")
    calls: list[tuple[Any, ...]] = []

    def record_call(self: object, *arguments: Any, **options: Any) -> None:
        calls.append((arguments, options))

    monkeypatch.setattr("runtime.backends.onnxruntime.unavailable_reason", lambda: None)
    engine = device_engine(backend)
    assert engine.__module__ == f"runtime.backends.{module}"
    monkeypatch.setattr(engine, "__init__", record_call)
    gpu.open_engine(made, FOLDER, "draft", manifest.pair.target, None, 7, slots=1, max_outputs=5)
    ((arguments, options),) = calls
    assert arguments[:4] == (None, 7, FOLDER, manifest.pair.target)
    assert getattr(engine, "module", backend) == backend
    assert options == {"slots": 1, "max_outputs": 5}


@pytest.mark.skipif(ort_cuda.unavailable_reason() is None, reason="onnxruntime-gpu is installed")
def test_the_onnxruntime_of_a_cpu(manifest: Manifest) -> None:
    with pytest.raises(OutriderError, match="has no CUDAExecutionProvider") as caught:
        gpu.open_engine(
            manifest, FOLDER, "target", manifest.pair.target, None, 7, slots=1, max_outputs=5
        )
    assert "onnxruntime-gpu" in caught.value.remedy


def test_the_kernel_is_needed(llama_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "unavailable_reason", lambda: "there is no compiler")
    with pytest.raises(OutriderError, match="GPU rounds need the kernel: there is no compiler"):
        load(llama_bundle, device="cuda")
