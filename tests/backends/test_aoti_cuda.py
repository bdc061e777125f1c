"""AOTInductor on a GPU, without one: what is built, and the engine over a recorded stream.

The device memory of `cuda_standin.FakeDriver` is host memory, so the package that was compiled for
the CPU (the bundle of test_aoti.py) runs in `AotiCudaEngine` as one compiled for a GPU does: on the
stream's turn, over raw addresses, captured and replayed. What torch.cuda does is not tested here.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, Workshop
from commands import CHECKOUT
from cuda_standin import FakeDriver
from rounds import ids

from engines import aotinductor as aotinductor_backend
from runtime import load
from runtime.backends.aotinductor import (
    ALIGNMENT,
    AotiCudaEngine,
    AotiEngine,
    TorchGpu,
    load_weights,
)
from runtime.backends.device import DeviceCall
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.files.manifest import PACKAGE_FILE, EngineFacts, GraphFacts, read_bundle, read_pair
from runtime.files.torch_files import WEIGHTS_FILE, cpu_targets, read_tensors
from runtime.gpu.launch import Device
from runtime.gpu.rounds import DeviceRounds
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

GREEDY = SamplingParams()
PROMPTS = ([5, 6, 7, 8], list(range(30, 53)))


@pytest.fixture(scope="module")
def bundle(workshop: Workshop) -> Path:
    """Shared: not to be damaged."""
    return workshop.bundle(*workshop.compiled_parts(), backend="aotinductor")


@pytest.fixture(scope="module")
def graphs(workshop: Workshop) -> Path:
    return workshop.graphs(*workshop.compiled_parts(), form="torch")


# --- what is built, for which GPU -----------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int] | None], None]:
    """Makes this a machine with a GPU of that capability, and what compiles for it."""

    def make(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
        monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/usr/local/cuda")

    return make


@pytest.mark.parametrize(
    ("capability", "sm", "dtype", "expected"),
    [
        ((9, 0), "", "bfloat16", ["sm90"]),
        ((9, 0), "90", "float32", ["sm90"]),
        ((12, 0), "120", "bfloat16", ["sm120"]),
        ((7, 5), "", "float16", ["sm75"]),
        ((9, 0), "cpu", "bfloat16", None),
        ((7, 5), "cpu", "bfloat16", None),
        (None, "", "float32", None),
        (None, "cpu", "float32", None),
    ],
)
def test_it_builds_for_the_gpu_that_is_there(  # type: ignore[no-untyped-def]
    machine, capability, sm: str, dtype: str, expected: list[str] | None
) -> None:
    machine(capability)
    assert aotinductor_backend.targets(sm, dtype) == (expected or cpu_targets())


@pytest.mark.parametrize(
    ("capability", "sm", "dtype", "cause"),
    [
        ((9, 0), "89", "float16", r"SM=89 .* builds for this GPU \(SM=90\)"),
        ((9, 0), "90,89", "float16", "SM=90,89 is another"),
        ((9, 0), "x", "float16", "SM=x is another"),
        (None, "90", "float16", "builds for this CPU"),
        ((7, 5), "", "bfloat16", r"\(SM=75\) has no bfloat16"),
        ((7, 5), "75", "bfloat16", r"\(SM=75\) has no bfloat16"),
    ],
)
def test_other_gpus_are_refused(machine, capability, sm: str, dtype: str, cause: str) -> None:  # type: ignore[no-untyped-def]
    machine(capability)
    with pytest.raises(OutriderError, match=cause) as caught:
        aotinductor_backend.targets(sm, dtype)
    assert caught.value.kind == "option"


@pytest.mark.parametrize(
    ("name", "nothing", "what"),
    [
        ("torch.utils._triton.has_triton", lambda: False, "Triton"),
        ("torch.utils.cpp_extension.CUDA_HOME", None, "CUDA_HOME"),
    ],
)
def test_what_compiles_for_a_gpu_is_missing(  # type: ignore[no-untyped-def]
    machine, monkeypatch: pytest.MonkeyPatch, name: str, nothing: object, what: str
) -> None:
    machine((9, 0))
    monkeypatch.setattr(name, nothing)
    with pytest.raises(OutriderError, match=f"AOTInductor needs .*{what}.* SM=cpu") as caught:
        aotinductor_backend.targets("", "float16")
    assert caught.value.kind == "backend"
    assert aotinductor_backend.targets("cpu", "float16") == cpu_targets()


def devices_of(program: torch.export.ExportedProgram) -> set[str]:
    """Where its weights, its example, and everything that its graphs compute or name are."""
    found: list[object] = [*program.state_dict.values(), *program.constants.values()]
    found += torch.utils._pytree.tree_leaves(program.example_inputs)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            found += torch.utils._pytree.tree_leaves(node.meta.get("val"))
            if "device" in node.kwargs:
                found.append(torch.empty(0, device=node.kwargs["device"]))
    return {tensor.device.type for tensor in found if isinstance(tensor, torch.Tensor)}


def attention_kernels() -> dict[str, bool]:
    return {
        kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")()
        for kind in ("math", "flash", "mem_efficient", "cudnn")
    }


@pytest.mark.parametrize("target", ["sm90", "cpu"])
def test_what_is_compiled(
    graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    seen: dict[str, Any] = {}

    def compile(program: Any, *, package_path: str, inductor_configs: dict[str, Any]) -> None:
        seen.update(devices=devices_of(program), config=inductor_configs, **attention_kernels())
        Path(package_path).write_bytes(b"code")

    def move(program: Any, to: str, real: Any = aotinductor_backend._move) -> Any:
        # The meta device takes a GPU's place: it is the other one that torch has everywhere.
        return real(program, {"cuda": "meta"}[to])

    monkeypatch.setattr(aotinductor_backend, "_move", move)
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile)
    role, facts = "target", read_pair(graphs).target
    to = EngineFacts("key", PACKAGE_FILE, [target], [], WEIGHTS_FILE)
    before = attention_kernels()
    assert aotinductor_backend.compile(role, graphs / role, tmp_path, facts, to) == to
    assert seen.pop("config") == aotinductor_backend.CONFIG
    on_gpu = target == "sm90"
    assert seen.pop("devices") == {"meta" if on_gpu else "cpu"}
    assert seen == (dict.fromkeys(before, False) | {"math": True} if on_gpu else before)
    assert attention_kernels() == before


def test_an_older_torch_compiles_for_a_gpu_and_for_no_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch._inductor.list_options", lambda: ["cpp.dynamic_threads", "x"])
    assert aotinductor_backend._config(gpu=True) == {"cpp.dynamic_threads": True}
    assert aotinductor_backend._config(gpu=False) == aotinductor_backend.CONFIG


# --- the engine, over a recorded stream -----------------------------------------------------------


class StandIn(TorchGpu):
    """torch.cuda, where the device is the host and its stream that of a `FakeDriver`."""

    def __init__(self, cuda: Any, stream: int):
        self.driver, self.stream = cuda._driver, stream
        self.index, self.device = -1, "cpu"
        self.captures = 0

    def bytes(self, address: int, size: int) -> torch.Tensor:
        memory = (ctypes.c_char * size).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def enqueue(self, work: Callable[[], object]) -> None:
        self.driver.enqueue(self.stream, work)

    def capturing(self) -> AbstractContextManager[object]:
        assert self.driver._recording is None
        self.captures += 1
        return nullcontext()


class OnHost(AotiCudaEngine):
    _gpu = StandIn


class OnDevice:
    """The engines of a bundle on a device that is none."""

    def __init__(self, bundle: Path, driver: FakeDriver, slots: int):
        with tempfile.NamedTemporaryFile(prefix="outrider_sm_90", suffix=".cubin") as image:
            self.device = Device(image=Path(image.name), driver=driver)
        self.bundle, self.driver, self.slots = bundle, driver, slots
        self.stream = self.device.stream()
        self.pair = read_bundle(bundle).pair

    def engine(self, role: str, **change: Any) -> AotiCudaEngine:
        facts = replace(getattr(self.pair, role), **change)
        widest = {"target": self.pair.max_gamma + 1, "draft": 1}[role]
        return OnHost(
            self.device, self.stream, self.bundle / role, facts, slots=self.slots, widest=widest,
            buffers=2,
        )  # fmt: skip

    def decoder(self, **options: Any) -> Decoder:
        sizes: dict[str, Any] = {
            "vocab_size": self.pair.vocab_size,
            "max_len": self.pair.max_len,
            "max_gamma": self.pair.max_gamma,
        }
        engines = (self.engine("target"), self.engine("draft"))
        rounds = DeviceRounds(self.device, self.stream, *engines, **sizes, **options)
        return Decoder(rounds, **sizes)


def texts(decoder: Decoder, gamma: int) -> list[list[int]]:
    """Both prompts at a time."""
    request = Request([], GREEDY, gamma=gamma, max_new_tokens=40, ignore_eos=True)
    all_running = [decoder.admit(replace(request, prompt=prompt)) for prompt in PROMPTS]
    while left := [sequence for sequence in all_running if sequence.finish_reason is None]:
        decoder.round(left)
    for sequence in all_running:
        decoder.release(sequence)
    return [ids(sequence) for sequence in all_running]


def test_the_logits_of_the_host(bundle: Path, driver: FakeDriver) -> None:
    """A prompt in pieces, then steps; two slots at a time, and the second one alone."""
    on_device = OnDevice(bundle, driver, slots=2)
    engine = on_device.engine("target")
    facts = on_device.pair.target
    host = AotiEngine(bundle / "target", facts, slots=2, widest=9, buffers=2, threads=1)
    random = np.random.default_rng(3)
    lengths = np.zeros(2, np.int64)
    for first, batch, width, outputs in ((0, 2, 7, 1), (1, 1, 40, 2), (0, 2, 1, 1), (0, 2, 5, 5)):
        tokens = random.integers(0, VOCAB_SIZE, (batch, width))
        position = lengths[first : first + batch].copy()
        index = np.arange(width - outputs, width)
        for buffer in (1, 0):
            expected = host.forward(tokens, position, index, first, buffer)
            found = engine.forward(tokens, position, index, first, buffer)
            assert found.shape == (batch, outputs, VOCAB_SIZE)
            np.testing.assert_allclose(found, expected, atol=1e-5)
        lengths[first : first + batch] += width
    assert engine._prepared == {}, "the calls of no graph are not kept"


@pytest.mark.parametrize("options", [{}, {"graphs": False}], ids=str)
@pytest.mark.parametrize("gamma", [4, 0])
def test_the_texts_of_the_host(
    bundle: Path, driver: FakeDriver, gamma: int, options: dict[str, bool]
) -> None:
    decoder = OnDevice(bundle, driver, slots=2).decoder(**options)
    assert texts(decoder, gamma) == texts(load(bundle, slots=2, threads=1).decoder, gamma)
    replayed = driver.log.count("graph") > driver.log.count("capture") > 0
    assert replayed is options.get("graphs", True)
    for engine in (decoder.target, decoder.draft):
        assert isinstance(engine, AotiCudaEngine) and isinstance(engine.gpu, StandIn)
        assert engine.gpu.captures == driver.log.count("capture")


def test_control_a_slot_at_the_place_of_another_shows(bundle: Path, driver: FakeDriver) -> None:
    decoder = OnDevice(bundle, driver, slots=2).decoder()
    target = decoder.target
    assert isinstance(target, AotiCudaEngine)
    address = target.cache_address
    target.cache_address = lambda name, _: address(name, 0)  # type: ignore[assignment, method-assign]
    assert texts(decoder, 4) != texts(load(bundle, slots=2, threads=1).decoder, 4)


class Loader:
    """Of a package, with what it is asked to run."""

    def __init__(self, engine: AotiCudaEngine):
        self._loader, engine._loader = engine._loader, self
        self.capturing, self.addresses = 0, set[int]()
        self._gpu = engine.gpu

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        assert isinstance(self._gpu, StandIn)
        self.capturing += self._gpu.driver._recording is not None
        self.addresses |= {tensor.data_ptr() for tensor in inputs}
        return self._loader.run(inputs)  # type: ignore[no-any-return]


def test_calls_are_prepared_once_and_recorded(bundle: Path, driver: FakeDriver) -> None:
    decoder = OnDevice(bundle, driver, slots=2).decoder()
    draft = decoder.draft
    assert isinstance(draft, AotiCudaEngine)
    loader = Loader(draft)
    texts(decoder, 4)
    prepared = dict(draft._prepared)
    texts(decoder, 4)
    assert loader.capturing == 0, "a capture records, and runs nothing"
    # 4 steps of a round with both slots, of one with the first alone, and none of a prefill.
    assert len(prepared) in (4, 8)
    assert draft._prepared.keys() == prepared.keys()
    assert all(draft._prepared[call] is prepared[call] for call in prepared)


def test_the_package_is_given_aligned_memory(bundle: Path, driver: FakeDriver) -> None:
    """Otherwise it copies by itself, and says so on stderr at each call."""
    decoder = OnDevice(bundle, driver, slots=2).decoder()
    draft = decoder.draft
    assert isinstance(draft, AotiCudaEngine)
    loader, calls, real = Loader(draft), [], draft.enqueue

    def enqueue(call: DeviceCall, graph: object = None) -> None:
        calls.append(call)
        real(call, graph)

    draft.enqueue = enqueue  # type: ignore[method-assign]
    texts(decoder, 4)
    assert {address % ALIGNMENT for address in loader.addresses} == {0}
    assert {call.logits_index % ALIGNMENT for call in calls} == {0, 8}, "the control"


def test_slots_that_would_be_copied_are_refused(bundle: Path, driver: FakeDriver) -> None:
    odd = [[1, 3]]
    with pytest.raises(OutriderError, match="no multiple of 16 bytes") as caught:
        OnDevice(bundle, driver, slots=2).engine("draft", key_shapes=odd, capacity=137)
    assert caught.value.kind == "backend"
    OnDevice(bundle, driver, slots=1).engine("draft", key_shapes=odd, capacity=137)


def test_tied_weights_are_loaded_once(graphs: Path) -> None:
    path = graphs / "draft" / WEIGHTS_FILE
    names = list(read_tensors(path))
    loaded = load_weights(path, names, "meta")
    assert {weight.device.type for weight in loaded.values()} == {"meta"}
    embedding = loaded.pop("decoder.model.lm_head.weight")
    assert embedding is loaded["decoder.model.model.embed_tokens.weight"]
    assert len({id(weight) for weight in loaded.values()}) == len(loaded), "the control"


def test_half_precision_and_its_memory(driver: FakeDriver) -> None:
    """The bytes of a bfloat16 cache, which no array interface has a name for."""
    gpu = StandIn(SimpleNamespace(_driver=driver), 0)
    address = driver.cuMemAlloc(64)[1]
    driver.cuMemsetD8(address, 0, 64)
    driver.cuStreamSynchronize(0)
    engine: Any = SimpleNamespace(gpu=gpu)
    view = AotiCudaEngine._view(engine, address, torch.bfloat16, 2, 3)
    view[1, 2] = 1.0
    assert ctypes.string_at(address, 12) == bytes(10) + b"\x80\x3f"


def test_failures_have_a_cause(bundle: Path, driver: FakeDriver, tmp_path: Path) -> None:
    on_device = OnDevice(bundle, driver, slots=1)
    engine = on_device.engine("draft")

    def run(inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    engine._loader = SimpleNamespace(run=run)
    engine.gpu.enqueue = lambda work: work()  # type: ignore[assignment, method-assign, return-value]
    ones = np.ones((1, 3), np.int64)
    with pytest.raises(OutriderError, match="failed on 1 slots x 3 tokens: CUDA out") as caught:
        engine.forward(ones, np.zeros(1, np.int64), np.array([2]))
    assert (caught.value.kind, "\n" in str(caught.value)) == ("backend", False)

    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / PACKAGE_FILE).write_bytes(bytes(1000))
    on_device.bundle = tmp_path
    with pytest.raises(OutriderError, match=r"cannot load .*Build the bundle again") as caught:
        on_device.engine("draft")
    assert (caught.value.kind, "\n" in str(caught.value)) == ("backend", False)


def test_a_call_that_cannot_be_captured_still_runs(
    bundle: Path, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = OnDevice(bundle, driver, slots=2).decoder()
    target = decoder.target
    assert isinstance(target, AotiCudaEngine)
    enqueue = target.gpu.enqueue

    def refusing(work: Callable[[], object]) -> None:
        if driver._recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        enqueue(work)

    target.gpu.enqueue = refusing  # type: ignore[method-assign]
    assert texts(decoder, 4) == texts(load(bundle, slots=2, threads=1).decoder, 4)
    assert "not permitted when stream is capturing" in caplog.text


# --- torch ---------------------------------------------------------------------------------------


def test_what_torch_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own device and stream are those of `Cuda`, before anything is allocated."""
    asked: list[object] = []

    def log(name: str, answer: object = None) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            asked.append((name, *arguments))
            return answer

        return called

    for name in ("init", "ExternalStream", "MemPool"):
        monkeypatch.setattr(torch.cuda, name, log(name, name.lower()))
    for name in ("stream", "use_mem_pool"):
        monkeypatch.setattr(torch.cuda, name, log(name, nullcontext()))
    cuda: Any = SimpleNamespace(use=log("use"), ordinal=1)
    gpu = TorchGpu(cuda, 7)
    gpu.enqueue(log("work"))
    with gpu.capturing():
        pass
    assert asked == [
        ("use",), ("init",), ("ExternalStream", 7, "cuda:1"), ("MemPool",),
        ("stream", "externalstream"), ("work",), ("use_mem_pool", "mempool"),
    ]  # fmt: skip
    assert (gpu.index, gpu.device) == (1, "cuda:1")
    monkeypatch.setattr(torch, "as_tensor", lambda memory, device: (memory, device))
    memory, device = gpu.bytes(4096, 24)
    assert device == "cuda:1"
    expected = {"data": (4096, False), "shape": (24,), "typestr": "|u1", "version": 2}
    assert memory.__cuda_array_interface__ == expected


def test_torch_is_imported_by_who_opens_one() -> None:
    script = "import sys, runtime.backends.aotinductor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, check=True)


@pytest.mark.slow
def test_attention_of_every_size_is_the_same_attention(
    bundle: Path, graphs: Path, driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a GPU's build does otherwise, but for the device."""
    monkeypatch.setattr(aotinductor_backend, "_move", lambda program, _: program)
    facts: GraphFacts = read_pair(graphs).draft  # type: ignore[assignment]
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / WEIGHTS_FILE).hardlink_to(graphs / "draft" / WEIGHTS_FILE)
    to = EngineFacts("key", PACKAGE_FILE, ["sm90"], [], WEIGHTS_FILE)
    aotinductor_backend.compile("draft", graphs / "draft", tmp_path / "draft", facts, to)
    on_device = OnDevice(bundle, driver, slots=1)
    usual = on_device.engine("draft")
    on_device.bundle = tmp_path
    products = on_device.engine("draft")
    tokens = np.random.default_rng(2).integers(0, VOCAB_SIZE, (1, 33))
    zero, index = np.zeros(1, np.int64), np.array([32])
    found, expected = (engine.forward(tokens, zero, index) for engine in (products, usual))
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert (found != expected).any(), "the control: another kernel"
