"""ONNX Runtime on a GPU's addresses, without a GPU: its CPU provider, on the fake driver's memory.

What is real here: the session, its bindings, the logits, what is refused. What is not: the CUDA
provider, which needs a GPU; a run stands on the fake driver's stream like any other work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_standin import FakeDriver
from device_standin import make_driver
from rounds import ids

from runtime.backends import onnxruntime as ort_cuda
from runtime.backends.onnxruntime import OrtCudaEngine, unavailable
from runtime.backends.registry import host_engine
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.files.manifest import read_bundle
from runtime.gpu.launch import Device
from runtime.gpu.rounds import DeviceRounds
from runtime.round import HostRounds
from runtime.sampling.reference import NumpySampler
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

SLOTS, GAMMA = 2, 4


class OnHost(OrtCudaEngine):
    """The engine with the provider that there is."""

    _provider, _place = "CPUExecutionProvider", "cpu"

    def _run(self, binding: Any) -> None:
        driver: FakeDriver = self.cuda._driver
        driver.enqueue(self.stream, lambda: OrtCudaEngine._run(self, binding))


class Bench:
    def __init__(self, bundle: Path, folder: Path):
        self.bundle, self.manifest = bundle, read_bundle(bundle)
        driver = make_driver()
        image = folder / "outrider_sm_90.cubin"
        image.write_bytes(b"code")
        self.device = Device(image=image, driver=driver)
        self.stream = self.device.stream()

    def engine(self, role: str = "target", cls: type[OrtCudaEngine] = OnHost) -> OrtCudaEngine:
        facts = dict(self.manifest.pair.models())[role]
        return cls(
            self.device, self.stream, self.bundle / role, facts, slots=SLOTS,
            widest=GAMMA + 1 if role == "target" else 1, buffers=GAMMA,
        )  # fmt: skip

    def decoder(self) -> Decoder:
        pair = self.manifest.pair
        made = DeviceRounds(
            self.device, self.stream, self.engine(), self.engine("draft"),
            vocab_size=pair.vocab_size, max_len=pair.max_len, max_gamma=GAMMA,
        )  # fmt: skip
        return Decoder(made, vocab_size=pair.vocab_size, max_len=pair.max_len, max_gamma=GAMMA)


@pytest.fixture
def bench(llama_bundle: Path, tmp_path: Path) -> Bench:
    return Bench(llama_bundle, tmp_path)


# What is computed


def walk(forward: Callable[..., np.ndarray], vocab_size: int, capacity: int) -> list[np.ndarray]:
    """Prompts of two slots, then verifications and steps of both, with rows rolled back."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (SLOTS, capacity))
    lengths = np.array([23, 40])
    found = [
        forward(tokens[s : s + 1, :n], np.array([0]), np.array([n - 1]), s).copy()
        for s, n in enumerate(lengths)
    ]
    while lengths.max() + GAMMA + 1 < capacity:
        for width in (GAMMA + 1, 1):
            block = np.stack([tokens[s, n : n + width] for s, n in enumerate(lengths)])
            found.append(forward(block, lengths, np.arange(width)).copy())
        lengths = lengths + np.array([5, 2])
    return found


def test_the_logits_of_the_host(bench: Bench) -> None:
    engine = bench.engine()
    got = walk(engine.forward, engine.vocab_size, engine.capacity)
    for mine, theirs in zip(got, expected(bench), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def expected(bench: Bench) -> list[np.ndarray]:
    facts = bench.manifest.pair.target
    host = host_engine("onnxruntime")(
        bench.bundle / "target", facts, slots=SLOTS, widest=GAMMA + 1, threads=1
    )
    return walk(host.forward, facts.vocab_size, facts.capacity)


def forget_the_slot(engine: OrtCudaEngine) -> None:
    address = engine.cache_address
    engine.cache_address = lambda name, first_slot: address(name, 0)  # type: ignore[method-assign]


def write_elsewhere(engine: OrtCudaEngine) -> None:
    address, calls = engine.cache_address, count()
    spare = {name: engine.cuda.allocate(1 << 20) for name in engine.caches}
    engine.cache_address = (  # type: ignore[method-assign]
        lambda name, first_slot: spare[name] if next(calls) % 7 == 3 else address(name, first_slot)
    )


@pytest.mark.parametrize("broken", [forget_the_slot, write_elsewhere])
def test_a_cache_at_the_wrong_place_is_noticed(
    bench: Bench, broken: Callable[[OrtCudaEngine], None]
) -> None:
    """The control."""
    engine = bench.engine()
    broken(engine)
    got = walk(engine.forward, engine.vocab_size, engine.capacity)
    pairs = zip(got, expected(bench), strict=True)
    assert not all(np.allclose(mine, theirs, atol=1e-5) for mine, theirs in pairs)


REQUESTS = [
    Request(list(range(2, 40)), SamplingParams(), gamma=GAMMA, max_new_tokens=30),
    Request([7], SamplingParams(), gamma=2, max_new_tokens=20),
    Request([5, 6], SamplingParams(), gamma=0, max_new_tokens=9),
]


def texts(decoder: Decoder) -> list[list[int]]:
    """Of the requests, two at a time."""
    found = []
    for pair in (REQUESTS[:2], REQUESTS[2:], REQUESTS[1::-1]):
        both = [decoder.admit(request) for request in pair]
        while unfinished := [sequence for sequence in both if sequence.finish_reason is None]:
            decoder.round(unfinished)
        for sequence in both:
            decoder.release(sequence)
        found += [ids(sequence) for sequence in both]
    return found


def test_the_texts_of_the_host(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    pair, decoder = bench.manifest.pair, bench.decoder()
    engines = [
        host_engine("onnxruntime")(
            bench.bundle / role, facts, slots=SLOTS, widest=GAMMA + 1,
            buffers=GAMMA, threads=1,
        )
        for role, facts in pair.models()
    ]  # fmt: skip
    host = Decoder(
        HostRounds(engines[0], engines[1], NumpySampler(pair.vocab_size)),
        vocab_size=pair.vocab_size, max_len=pair.max_len, max_gamma=GAMMA,
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        assert texts(decoder) == texts(host)
    said = "without a CUDA graph, slower: ONNX Runtime does not let others capture its runs"
    assert said in caplog.text
    assert not bench.device._driver.log.count("capture"), "it might end the process"


def test_bindings_are_kept_for_rounds_alone(bench: Bench) -> None:
    decoder = bench.decoder()
    target = decoder.target
    assert isinstance(target, OrtCudaEngine)
    texts(decoder)
    kept = dict(target._prepared)
    assert {(call.batch, call.tokens) for call in kept} == {(b, n) for b in (1, 2) for n in (1, 5)}
    texts(decoder)
    assert target._prepared == kept


# What is refused


def test_a_kernel_that_is_missing(bench: Bench) -> None:
    """A provider that takes no node at all, so that the CPU gets what is not for it."""
    import onnxruntime

    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no provider that takes nothing")

    class Nothing(OrtCudaEngine):
        _provider = "AzureExecutionProvider"

    with pytest.raises(OutriderError, match=r"no CUDA kernel for Attention, .*TensorScatter") as e:
        bench.engine(cls=Nothing)
    assert e.value.kind == "backend"
    assert e.value.remedy == ort_cuda.NEWER
    assert "Concat" not in e.value.cause, "of shapes, which the CPU makes by choice"


def test_a_version_that_does_not_tell(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxruntime.capi.onnxruntime_inference_collection import Session

    monkeypatch.delattr(Session, "get_provider_graph_assignment_info")
    with pytest.raises(OutriderError, match=r"older than 1\.24") as caught:
        bench.engine()
    assert caught.value.remedy == ort_cuda.NEWER


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.skipif(unavailable() is None, reason="the provider is here")
def test_a_provider_that_does_not_start(bench: Bench) -> None:
    with pytest.raises(OutriderError, match="cannot start on this GPU") as caught:
        bench.engine(cls=OrtCudaEngine)
    assert caught.value.remedy == ort_cuda.LIBRARIES


def test_a_graph_that_cannot_be_loaded(bench: Bench, tmp_path: Path) -> None:
    bench.bundle = tmp_path
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "graph.onnx").write_bytes(b"no graph")
    with pytest.raises(OutriderError, match=r"ONNX Runtime .* cannot load"):
        bench.engine()


def test_a_call_that_fails(bench: Bench) -> None:
    engine = bench.engine()
    engine._place = "nowhere"
    with pytest.raises(OutriderError, match="ONNX Runtime failed on 1 slots x 2 tokens: ") as e:
        engine.forward(np.zeros((1, 2), np.int64), np.array([0]), np.array([1]))
    assert e.value.kind == "backend"


def test_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "onnxruntime-gpu has" in str(unavailable())
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [ort_cuda.PROVIDER])
    assert unavailable() is None
