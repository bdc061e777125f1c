"""The engine over TensorRT's interface: contexts, profiles, addresses, and refusals.

The library runs only on a GPU. Here the names that are used are compared with TensorRT-RTX, if it
is installed, and the order of calls is checked by a stand-in.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import device_standin
import pytest
import tensorrt_standin
from cuda_standin import FakeDriver, make_device
from device_standin import facts_of
from devices import DRAFT, MODEL, text, texts
from fakes import FakeEngine
from rtx import needs_library
from tensorrt_standin import FakeTensorRt, FakeTensorRtx

from runtime.backends.device import DeviceCall
from runtime.backends.tensorrt import TensorRtEngine, _logger, load_library
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.files.manifest import EngineFacts, Profile
from runtime.gpu.rounds import DeviceRounds
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

NAMES = ["input_ids", "position", "logits_index", "key_0", "value_0", "logits"]
NAMES += ["key_0_out", "value_0_out"]
SLOTS, CAPACITY, GAMMA = 2, 128, 4
SIZES: dict[str, Any] = {"vocab_size": 32, "max_len": 64, "max_gamma": GAMMA}
PROFILES = [
    Profile("decode", [1, 2, SLOTS], [1, GAMMA + 1, GAMMA + 1], [1, GAMMA + 1, GAMMA + 1], 1000),
    Profile("prefill", [1, 1, SLOTS], [1, 16, 16], [1, 1, 1], 3000),
]


class Bench:
    """A fake driver, library and device, and engines built on them."""

    def __init__(self, folder: Path, library: type[FakeTensorRt] = FakeTensorRtx):
        self.folder = folder
        self.driver = FakeDriver()
        self.library = library(self.driver)
        self.library.profiles = [
            tuple((sizes[0], sizes[-1]) for sizes in (p.slots, p.tokens, p.outputs))
            for p in PROFILES
        ]
        self.device = make_device(self.driver)
        self.stream = self.device.create_stream()

    def engine(self, role: str, model: Any, *, slots: int = SLOTS, **file: Any) -> TensorRtEngine:
        fake = FakeEngine(model, slots=SLOTS, capacity=CAPACITY, order=None)
        self.library.fakes[role] = fake
        path = self.folder / f"{role}.rtx"
        path.write_text(json.dumps({"fake": role, "names": NAMES, **file}))
        kind = type("Engine", (TensorRtEngine,), {"module": self.library})
        made: TensorRtEngine = kind(
            self.device, self.stream, self.folder, facts_of(fake),
            EngineFacts("", path.name, ["sm90"], PROFILES),
            slots=slots, max_outputs=GAMMA + 1,
        )  # fmt: skip
        cache = made.caches["key_0"]
        self.library.cache_of[made._engine] = cache.address
        self.library.stride = cache.slot_bytes
        made.chunk = fake.chunk
        return made

    def decoder(self, **options: Any) -> Decoder:
        made = DeviceRounds(
            self.device, self.stream, self.engine("target", MODEL), self.engine("draft", DRAFT),
            **SIZES, **options,
        )  # fmt: skip
        return Decoder(made, **SIZES)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


WARM = SamplingParams(temperature=0.8, seed=3)
REQUESTS = [
    Request(list(range(2, 28)), WARM, gamma=3, max_new_tokens=20),
    Request([2, 3], SamplingParams(), gamma=GAMMA, max_new_tokens=20),
    Request([2, 3], WARM, gamma=0, max_new_tokens=5),
    Request([7], WARM, gamma=3, max_new_tokens=20),
]


@pytest.mark.parametrize("library", [FakeTensorRtx, FakeTensorRt])
@pytest.mark.parametrize("graphs", [True, False])
def test_the_tokens_of_the_fakes(tmp_path: Path, library: type[FakeTensorRt], graphs: bool) -> None:
    bench = Bench(tmp_path, library)
    decoder = bench.decoder(graphs=graphs)
    fakes = [FakeEngine(m, slots=SLOTS, capacity=CAPACITY, order=None) for m in (MODEL, DRAFT)]
    expected = Decoder(device_standin.make_rounds(*fakes, **SIZES), **SIZES)
    alone = [text(expected, request) for request in REQUESTS]
    assert [text(decoder, request) for request in REQUESTS] == alone
    assert texts(decoder, *REQUESTS[:2]) == alone[:2], "two slots at once"


def test_a_context_for_each_call_of_a_graph(bench: Bench) -> None:
    decoder = bench.decoder()
    text(decoder, Request([2, 3], WARM, gamma=3, max_new_tokens=4))
    target, draft = decoder.target, decoder.draft
    assert isinstance(target, TensorRtEngine) and isinstance(draft, TensorRtEngine)
    made = len(target._engine.contexts), len(draft._engine.contexts)
    # One for the prompt, one per step of a round with drafts, one for a round without.
    assert made == (1 + 1 + 1, 1 + 3)
    text(decoder, Request([2, 3, 4], WARM, gamma=3, max_new_tokens=9))
    assert made == (len(target._engine.contexts), len(draft._engine.contexts))
    assert len({context.config.cache for context in draft._engine.contexts}) == 1
    for context in (*target._engine.contexts, *draft._engine.contexts):
        assert context.config.strategy == tensorrt_standin.Strategy.USER_MANAGED
        assert context.config.cuda_graph_strategy == tensorrt_standin.GraphStrategy.DISABLED
        kept = any(captured for captured, _ in context.runs)
        eager = context.config.dynamic_shapes_kernel_specialization_strategy
        assert (eager == tensorrt_standin.Specialization.EAGER) == kept


def test_one_context_for_all_is_noticed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the stand-in detects it."""

    def shared(self: TensorRtEngine, call: DeviceCall, graph: object = None) -> None:
        context = self._contexts[0] = self._bind(self._contexts.get(0), call, for_graph=True)
        assert context.execute_async_v3(self.stream)

    monkeypatch.setattr(TensorRtEngine, "enqueue", shared)
    with pytest.raises((AssertionError, OutriderError)):
        text(bench.decoder(), REQUESTS[0])
    bench.driver.drop()  # otherwise another test would collect it


def test_a_stream_that_cannot_be_captured(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    expected = text(bench.decoder(), REQUESTS[1])
    bench.library.capturable = False
    with caplog.at_level(logging.WARNING):
        assert text(bench.decoder(), REQUESTS[1]) == expected
    assert "without a CUDA graph, slower: TensorRT-RTX cannot capture calls of 2 tokens" in "".join(
        record.getMessage() for record in caplog.records
    )


def test_activations_are_the_largest_profiles(bench: Bench) -> None:
    assert bench.engine("target", MODEL).activations == 3000


# What is refused


def refused(bench: Bench, cause: str, kind: str = "backend", **options: Any) -> None:
    with pytest.raises(OutriderError, match=f"^{kind}: .*{cause}"):
        bench.engine("target", MODEL, **options)


@pytest.mark.parametrize(
    ("library", "file", "cause"),
    [
        (
            {"invalid": 3}, {},
            "cannot load .*target.rtx: VERSION_MISMATCH, UNSUPPORTED_CC. Build the bundle again, "
            "for this GPU",
        ),
        (
            {}, {"error": "magic tag does not match\nat line 7"},
            "TensorRT-RTX 1.2.3 cannot load .*: magic tag does not match",
        ),
        ({}, {"names": [*NAMES, "pixels"]}, r"it was built from another graph \(tensor pixels\)"),
        ({"in_place": False}, {}, "it does not update key_0 in place"),
    ],
    ids=["another version", "no engine", "another graph", "a cache that is copied"],
)  # fmt: skip
def test_files_that_are_refused(
    bench: Bench, library: dict[str, Any], file: dict[str, Any], cause: str
) -> None:
    vars(bench.library).update(library)
    refused(bench, cause, **file)


def test_more_slots_than_it_was_built_for(bench: Bench) -> None:
    refused(bench, "slots=3 is over the 2 that the bundle was built for", "option", slots=3)


def test_slots_at_odd_places(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is not aligned to 256 bytes. Control: the stand-in notices it."""
    monkeypatch.setattr("test_trt_engine.CAPACITY", 73)
    refused(bench, "slots of 73 rows of 1 x 1 float32 in key_0 are not a multiple of 256 bytes")
    monkeypatch.setattr(TensorRtEngine, "alignment", 1)
    decoder = bench.decoder()
    decoder.admit(REQUESTS[0])
    with pytest.raises(AssertionError, match="key_0 at"):
        decoder.admit(REQUESTS[0])


def test_a_context_that_cannot_be_made(bench: Bench) -> None:
    decoder = bench.decoder()
    bench.library.no_context = True
    with pytest.raises(OutriderError, match="cannot make a context: no reason was given") as caught:
        decoder.admit(REQUESTS[0])
    assert caught.value.kind == "memory"


def test_a_call_that_fails(bench: Bench) -> None:
    decoder = bench.decoder()
    bench.library.broken = "CUDA error 700"
    with pytest.raises(OutriderError, match="failed on 1 slots x 16 tokens: CUDA error 700"):
        decoder.admit(REQUESTS[0])
    assert decoder.slots.free == SLOTS


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed"
)
def test_a_library_that_is_not_installed() -> None:
    with pytest.raises(OutriderError, match="TensorRT is not installed") as caught:
        load_library("tensorrt")
    assert "10.16" in caught.value.remedy


# The real interface


@needs_library
def test_the_stand_in_has_only_what_the_library_has() -> None:
    """Every public name of the fake classes exists in the real ones."""
    trt = load_library("tensorrt_rtx")
    numbers = {
        tensorrt_standin.Strategy: trt.ExecutionContextAllocationStrategy,
        tensorrt_standin.Specialization: trt.DynamicShapesKernelSpecializationStrategy,
        tensorrt_standin.Validity: trt.EngineValidity,
    }
    classes = {
        tensorrt_standin.Context: trt.IExecutionContext,
        tensorrt_standin.Engine: trt.ICudaEngine,
        tensorrt_standin.Runtime: trt.Runtime,
        tensorrt_standin.Config: trt.IRuntimeConfig,
        tensorrt_standin.Logger: trt.ILogger,
        tensorrt_standin.GraphStrategy: trt.CudaGraphStrategy,
        tensorrt_standin.Diagnostics: trt.EngineInvalidityDiagnostics,
        FakeTensorRt: trt,
        FakeTensorRtx: trt,
    }
    own = {"say", "run", "strategy", "cache"}  # names of the stand-in alone
    for fake, actual in (numbers | classes).items():
        names = {name for name in vars(fake) if not name.startswith("_")} - own
        missing = {name for name in names if not hasattr(actual, name)}
        assert names and not missing, f"{actual.__name__} has no {missing}"
    for fake, actual in numbers.items():
        assert all(int(getattr(actual, member.name)) == member for member in fake)


@needs_library
def test_the_real_librarys_logger() -> None:
    trt = load_library("tensorrt_rtx")
    logger = _logger(trt)
    logger.log(trt.ILogger.ERROR, "one")
    logger.log(trt.ILogger.WARNING, "two")
    assert logger.errors == ["one"]
