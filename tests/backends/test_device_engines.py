"""ONNX Runtime and AOTInductor on a GPU's addresses, without a GPU.

The device memory of `cuda_standin.FakeDriver` is host memory, so a bundle for the CPU runs in the
engines for GPUs: in stream order, over raw addresses, captured and replayed. The session and its
bindings, the package and its arguments, the logits, and the refusals are real. The CUDA provider
and torch.cuda are not tested.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_standin import FakeDriver, make_device
from devices import texts
from workshop import Workshop

from export.program import _write_tensors
from runtime import load
from runtime.backends import onnxruntime as ort_cuda
from runtime.backends.aotinductor import ALIGNMENT, AotiCudaEngine, TorchGpu, load_weights
from runtime.backends.device import DeviceCall, DeviceEngine
from runtime.backends.onnxruntime import OrtCudaEngine, unavailable_reason
from runtime.backends.registry import host_engine
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.files.graphs import GRAPH_FILE
from runtime.files.manifest import PACKAGE_FILE, read_bundle
from runtime.files.torch_files import WEIGHTS_FILE, find_holes, read_tensors
from runtime.gpu.rounds import DeviceRounds
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

SLOTS, GAMMA = 2, 4


class OrtOnHost(OrtCudaEngine):
    """The engine with the CPU provider; a run is enqueued on the stream like other work."""

    _provider, _device_type = "CPUExecutionProvider", "cpu"

    def _run(self, binding: Any) -> None:
        self.cuda._driver.enqueue(self.stream, lambda: OrtCudaEngine._run(self, binding))


class HostTorch(TorchGpu):
    """torch.cuda with the host as its device, and the stream of a `FakeDriver`."""

    def __init__(self, cuda: Any, stream: int):
        self.driver, self.stream = cuda._driver, stream
        self.index, self.device = -1, "cpu"
        self.captures = 0

    def bytes(self, address: int, size: int) -> torch.Tensor:
        memory = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def enqueue(self, work: Callable[[], object]) -> None:
        self.driver.enqueue(self.stream, work)

    def capturing(self) -> AbstractContextManager[None]:
        assert self.driver._recording is None
        self.captures += 1
        return nullcontext()


class AotiOnHost(AotiCudaEngine):
    """The engine for GPUs with a package that was compiled for the CPU."""

    _gpu_class = HostTorch


ENGINES: dict[str, type[DeviceEngine]] = {"onnxruntime": OrtOnHost, "aotinductor": AotiOnHost}


class OnDevice:
    """The models of a bundle on the fake device, and on the host."""

    def __init__(self, bundle: Path, driver: FakeDriver):
        self.bundle, self.driver, self.pair = bundle, driver, read_bundle(bundle).pair
        self.backend = read_bundle(bundle).backend
        self.cls = ENGINES[self.backend]
        self.device = make_device(driver)
        self.stream = self.device.create_stream()

    def engine(self, role: str = "target", slots: int = SLOTS, **change: Any) -> Any:
        facts = replace(getattr(self.pair, role), **change)
        return self.cls(
            self.device, self.stream, self.bundle / role, facts, slots=slots,
            max_outputs=self.pair.max_gamma + 1 if role == "target" else 1,
        )  # fmt: skip

    def decoder(self, **options: Any) -> Decoder:
        sizes: dict[str, Any] = {
            name: getattr(self.pair, name) for name in ("vocab_size", "max_len", "max_gamma")
        }  # fmt: skip
        engines = (self.engine(), self.engine("draft"))
        rounds = DeviceRounds(self.device, self.stream, *engines, **sizes, **options)
        return Decoder(rounds, **sizes)

    def on_host(self) -> Any:
        return host_engine(self.backend)(
            self.bundle / "target", self.pair.target, slots=SLOTS, max_outputs=GAMMA + 1, threads=1
        )

    def texts_on_host(self) -> list[list[int]]:
        return all_texts(load(self.bundle, slots=SLOTS, threads=1).decoder)


@pytest.fixture(scope="module")
def compiled(workshop: Workshop) -> Path:
    """Shared: tests must not modify it."""
    return workshop.bundle(*workshop.pair("aotinductor"), backend="aotinductor")


@pytest.fixture
def ort(llama_bundle: Path, driver: FakeDriver) -> OnDevice:
    return OnDevice(llama_bundle, driver)


@pytest.fixture
def aoti(compiled: Path, driver: FakeDriver) -> OnDevice:
    return OnDevice(compiled, driver)


@pytest.fixture(params=["ort", "aoti"])
def on_device(request: pytest.FixtureRequest) -> OnDevice:
    made: OnDevice = request.getfixturevalue(request.param)
    return made


# --- the same as on the host ----------------------------------------------------------------------


def walk(engine: Any) -> list[np.ndarray]:
    """Prefill two slots, the second in two pieces, then verify and step both, rolling rows back."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, engine.vocab_size, (SLOTS, engine.capacity))
    lengths, found = np.array([23, 40]), []
    for slot, start, end in ((0, 0, 23), (1, 0, 25), (1, 25, 40)):
        ids, last = tokens[slot : slot + 1, start:end], np.array([end - start - 1])
        found.append(engine.forward(ids, np.array([start]), last, slot).copy())
    while lengths.max() + GAMMA + 1 < engine.capacity:
        for width in (GAMMA + 1, 1):
            block = np.stack([tokens[s, n : n + width] for s, n in enumerate(lengths)])
            found.append(engine.forward(block, lengths, np.arange(width)).copy())
        lengths = lengths + np.array([5, 2])
    return found


def same_logits(on_device: OnDevice, engine: Any) -> bool:
    """Equal except for rounding: the host's attention adds in another order."""
    pairs = zip(walk(engine), walk(on_device.on_host()), strict=True)
    return all(np.allclose(mine, theirs, atol=5e-5, rtol=0) for mine, theirs in pairs)


def test_the_logits_of_the_host(on_device: OnDevice) -> None:
    engine = on_device.engine()
    assert same_logits(on_device, engine)
    assert engine._prepared == {}, "only calls of CUDA graphs are kept"


def test_control_a_cache_at_the_wrong_place_shows(on_device: OnDevice) -> None:
    engine = on_device.engine()
    tensors, calls = engine.cache_tensors, count()
    spare = {name: engine.cuda.allocate(1 << 20) for name in engine.caches}
    engine.cache_tensors = lambda call: (
        (name, spare[name] if next(calls) % 7 == 3 else address, shape)
        for name, address, shape in tensors(call)
    )
    assert not same_logits(on_device, engine)


REQUESTS = [
    Request(list(range(2, 40)), SamplingParams(), gamma=GAMMA, max_new_tokens=30),
    Request([7, 9, 8], SamplingParams(), gamma=2, max_new_tokens=20),
    Request([5, 6], SamplingParams(), gamma=0, max_new_tokens=9),
]


def all_texts(decoder: Decoder) -> list[list[int]]:
    """Token ids of the requests, at most two at a time."""
    pairs = (REQUESTS[:2], REQUESTS[2:], REQUESTS[1::-1])
    return [text for pair in pairs for text in texts(decoder, *pair)]


def test_the_texts_of_the_host(ort: OnDevice, caplog: pytest.LogCaptureFixture) -> None:
    decoder = ort.decoder()
    with caplog.at_level(logging.WARNING):
        assert all_texts(decoder) == ort.texts_on_host()
    note = "without a CUDA graph, slower: ONNX Runtime does not support capturing its runs"
    assert note in caplog.text
    assert not ort.driver.log.count("capture"), "capturing might crash the process"
    target: Any = decoder.target
    kept = dict(target._prepared)  # only calls of rounds
    assert {(call.batch, call.tokens) for call in kept} == {(b, n) for b in (1, 2) for n in (1, 5)}
    all_texts(decoder)
    assert target._prepared == kept


@pytest.mark.parametrize("graphs", [True, False])
def test_the_texts_of_the_host_in_graphs(aoti: OnDevice, graphs: bool) -> None:
    decoder = aoti.decoder(graphs=graphs)
    assert all_texts(decoder) == aoti.texts_on_host()
    log = aoti.driver.log
    assert (log.count("graph") > log.count("capture") > 0) is graphs
    target, draft = decoder.target, decoder.draft
    assert target.gpu is draft.gpu, "one pool"
    assert target.gpu.captures == 2 * log.count("capture")


def test_a_call_that_cannot_be_captured_still_runs(
    aoti: OnDevice, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = aoti.decoder()
    gpu: Any = decoder.target.gpu
    enqueue = gpu.enqueue

    def refusing(work: Callable[[], object]) -> None:
        if aoti.driver._recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        enqueue(work)

    gpu.enqueue = refusing
    assert all_texts(decoder) == aoti.texts_on_host()
    assert "not permitted when stream is capturing" in caplog.text


# --- what a call costs ----------------------------------------------------------------------------


class Loader:
    """Wraps the loader of a package and records its runs."""

    def __init__(self, engine: AotiCudaEngine):
        self._loader, engine._loader = engine._loader, self
        self.capturing, self.addresses = 0, set[int]()
        self._driver = engine.cuda._driver

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.capturing += self._driver._recording is not None
        self.addresses |= {tensor.data_ptr() for tensor in inputs}
        return self._loader.run(inputs)


def test_calls_are_prepared_once_and_recorded(aoti: OnDevice) -> None:
    decoder = aoti.decoder()
    draft: Any = decoder.draft
    loader, calls, real = Loader(draft), [], draft.enqueue

    def enqueue(call: DeviceCall, graph: object = None) -> None:
        calls.append(call)
        real(call, graph)

    draft.enqueue = enqueue
    all_texts(decoder)
    prepared = dict(draft._prepared)
    all_texts(decoder)
    assert loader.capturing == 0, "a capture records, and runs nothing"
    assert draft._prepared.keys() == prepared.keys()
    assert all(draft._prepared[call] is prepared[call] for call in prepared)
    assert {call.tokens for call in prepared} == {1, 2}, "no call of a prefill"
    # The package copies misaligned inputs, and prints a warning to stderr at each call.
    assert {address % ALIGNMENT for address in loader.addresses} == {0}
    assert {call.logits_index % ALIGNMENT for call in calls} == {0, 8}, "control"


def test_tied_weights_are_loaded_once(tmp_path: Path) -> None:
    one, other = torch.ones(2, 3), torch.zeros(2, 3)
    _write_tensors({"head": one, "embedding": one, "other": other}, tmp_path / WEIGHTS_FILE)
    # The meta device stands in for a GPU: torch has it on every machine.
    loaded, read = load_weights(tmp_path / WEIGHTS_FILE, ["head", "embedding", "other"], {}, "meta")
    assert read == loaded
    assert {weight.device.type for weight in loaded.values()} == {"meta"}
    assert loaded["head"] is loaded["embedding"]
    assert loaded["head"] is not loaded["other"], "control"


def test_weights_that_the_code_reads_as_one_are_views_of_it(tmp_path: Path) -> None:
    parts = {"k": torch.randn(2, 3), "q": torch.randn(4, 3)}
    _write_tensors({**parts, "norm": torch.ones(3)}, tmp_path / WEIGHTS_FILE)
    joined = {"joined_0": ["q", "k"]}
    loaded, read = load_weights(tmp_path / WEIGHTS_FILE, ["norm", "joined_0"], joined, "cpu")
    assert set(loaded) == {"norm", "q", "k"} and set(read) == {"norm", "joined_0"}
    assert torch.equal(read["joined_0"], torch.cat([parts["q"], parts["k"]]))
    loaded["k"].fill_(7)  # as the benchmarks do
    assert (read["joined_0"][4:] == 7).all()


def test_weights_that_were_never_written_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: 19 GB of zeros were copied from a file to the GPU to load a constructed pair of 8B."""
    tensors: dict[str, torch.Tensor] = {
        name: torch.nn.Parameter(torch.ones(2, 3), False) for name in ("weight", "q", "k")
    }
    tensors["angles"] = torch.arange(3)
    path = tmp_path / WEIGHTS_FILE
    # Whoever reads a tensor gets ones.
    monkeypatch.setattr("runtime.backends.aotinductor.read_tensors", lambda path: tensors)
    for holes in (False, True):
        _write_tensors(tensors, path, holes)
        assert find_holes(path) == ({"weight", "q", "k"} if holes else set())
        names = ["weight", "joined_0", "angles"]
        loaded, read = load_weights(path, names, {"joined_0": ["q", "k"]}, "cpu")
        assert all(loaded[name].eq(not holes).all() for name in ("weight", "q", "k"))
        assert read["joined_0"].eq(not holes).all() and read["angles"].tolist() == [0, 1, 2]
    written = {name: tensor.tolist() for name, tensor in read_tensors(path).items()}
    assert written == {**dict.fromkeys(("weight", "q", "k"), [[0] * 3] * 2), "angles": [0, 1, 2]}
    path.write_bytes(b"\0\0\0\0\0\1\0\0" + path.read_bytes()[8:])
    with pytest.raises(ValueError):  # not a MemoryError, for the length of a damaged index
        find_holes(path)


def test_half_precision_and_its_memory(driver: FakeDriver) -> None:
    """Views of a bfloat16 cache, a type without a name in the array interface."""
    address = driver.cuMemAlloc(64)[1]
    driver.cuMemsetD8(address, 0, 64)
    driver.cuStreamSynchronize(0)
    engine: Any = SimpleNamespace(gpu=HostTorch(SimpleNamespace(_driver=driver), 0))
    view = AotiCudaEngine._view(engine, address, torch.bfloat16, 2, 3)
    view[1, 2] = 1.0
    assert ctypes.string_at(address, 12) == bytes(10) + b"\x80\x3f"


# --- what is refused ------------------------------------------------------------------------------


def refused(action: Callable[[], object], cause: str, remedy: str = "") -> OutriderError:
    with pytest.raises(OutriderError, match=cause) as caught:
        action()
    assert caught.value.kind == "backend"
    assert remedy in caught.value.remedy and "\n" not in str(caught.value)
    return caught.value


def test_a_call_that_fails(on_device: OnDevice) -> None:
    engine = on_device.engine()
    if on_device.backend == "onnxruntime":
        engine._device_type, library = "nowhere", "ONNX Runtime"
    else:
        library = "AOTInductor"
        cause = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
        engine._loader = SimpleNamespace(run=lambda _: (_ for _ in ()).throw(cause))
        engine.gpu.enqueue = lambda work: work()
    call = np.zeros((1, 2), np.int64), np.array([0]), np.array([1])
    refused(lambda: engine.forward(*call), f"{library} failed on 1 slots x 2 tokens: ")


def test_a_file_that_cannot_be_loaded(on_device: OnDevice, tmp_path: Path) -> None:
    on_device.bundle = tmp_path
    (tmp_path / "target").mkdir()
    for name in (GRAPH_FILE, PACKAGE_FILE):
        (tmp_path / "target" / name).write_bytes(bytes(1000))
    refused(on_device.engine, "cannot load ")


def test_slots_that_would_be_copied(aoti: OnDevice) -> None:
    odd = {"key_shapes": [[1, 3]], "capacity": 137}
    refused(lambda: aoti.engine("draft", **odd), "not a multiple of 16 bytes")
    aoti.engine("draft", slots=1, **odd)


def test_a_kernel_that_is_missing(ort: OnDevice) -> None:
    """A provider that takes no node at all, so the CPU gets nodes that it must not run."""
    import onnxruntime

    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no provider that takes nothing")
    ort.cls = type("Nothing", (OrtCudaEngine,), {"_provider": "AzureExecutionProvider"})
    cause = r"no CUDA kernel for Attention, .*TensorScatter"
    error = refused(ort.engine, cause, ort_cuda.UPGRADE_REMEDY)
    assert "Concat" not in error.cause, "nodes of shapes, which are placed on the CPU on purpose"


def test_a_version_that_does_not_tell(ort: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxruntime.capi.onnxruntime_inference_collection import Session

    monkeypatch.delattr(Session, "get_provider_graph_assignment_info")
    refused(ort.engine, r"older than 1\.24", ort_cuda.UPGRADE_REMEDY)


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.skipif(unavailable_reason() is None, reason="the provider is here")
def test_a_provider_that_does_not_start(ort: OnDevice) -> None:
    ort.cls = OrtCudaEngine
    refused(ort.engine, "cannot start on this GPU", ort_cuda.LIBRARIES_REMEDY)


def test_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    assert "part of onnxruntime-gpu" in str(unavailable_reason())
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [ort_cuda.PROVIDER])
    assert unavailable_reason() is None


# --- torch ----------------------------------------------------------------------------------------


def test_what_torch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch uses the device and stream of `Cuda` before anything is allocated."""
    calls: list[object] = []

    def log(name: str, answer: object = None) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            calls.append((name, *arguments))
            return answer

        return called

    for name in ("init", "ExternalStream", "MemPool"):
        monkeypatch.setattr(torch.cuda, name, log(name, name.lower()))
    for name in ("stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, log(name, nullcontext()))
    cuda: Any = SimpleNamespace(make_current=log("make_current"), ordinal=1)
    gpu = TorchGpu(cuda, 7)
    gpu.enqueue(log("work"))
    for _ in range(2):
        with gpu.capturing(), gpu.capturing():  # the target's and the draft's
            pass
    assert calls == [
        ("make_current",), ("init",), ("ExternalStream", 7, "cuda:1"), ("MemPool",),
        ("stream", "externalstream"), ("work",), *[("use_mem_pool", "mempool")] * 2,
    ]  # fmt: skip
    assert (gpu.index, gpu.device) == (1, "cuda:1")
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: (memory, device))
    memory, device = gpu.bytes(4096, 24)
    assert device == "cuda:1"
    expected = {"data": (4096, False), "shape": (24,), "typestr": "|u1", "version": 2}
    assert memory.__cuda_array_interface__ == expected
