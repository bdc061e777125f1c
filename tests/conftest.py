"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"  # read on import: no test may wait for the network
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and workers share the cores
# A shell makes background jobs ignore SIGINT, and the commands that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import rounds
from cuda_standin import FakeDriver, make_device
from device_standin import FakeDeviceEngine
from fakes import FakeEngine, random_model

from runtime.files.graphs import GraphFacts
from runtime.files.manifest import Manifest
from runtime.gpu import opening
from runtime.gpu.launch import Device

if TYPE_CHECKING:
    from workshop import Workshop


def pytest_collection_finish() -> None:
    """Exclude the objects that imports created from garbage collection: the exporter runs several
    collections per model, and each took a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The workshop that all workers of a run share: an export takes seconds."""
    from workshop import Workshop  # torch and Transformers: seconds that most tests do not need

    base = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    return Workshop((base.parent if parallel else base) / "workshop")


@pytest.fixture(scope="session")
def llama_bundle(workshop: Workshop) -> Path:
    """A bundle of two small Llamas that disagree. Shared: do not modify it."""
    return workshop.bundle(*workshop.pair())


@pytest.fixture(scope="session")
def llama_graphs(workshop: Workshop) -> Path:
    """The graphs that `llama_bundle` was built from."""
    return workshop.graphs(*workshop.pair())


@pytest.fixture
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler of the decoders in rounds.py: "numpy" unless parametrized."""
    monkeypatch.setattr(rounds, "SAMPLER", getattr(request, "param", "numpy"))


@pytest.fixture
def driver() -> FakeDriver:
    """A fake GPU driver that runs the emulated kernels."""
    return FakeDriver()


@pytest.fixture
def on_fake_gpu(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Make `load(..., device="cuda")` open this fake GPU, with engines that compute fake logits."""
    monkeypatch.setattr(opening, "Device", lambda ordinal, **_: make_device(driver, ordinal))

    def open_engine(
        manifest: Manifest, path: Path, role: str, facts: GraphFacts, device: Device, stream: int,
        *, slots: int, max_outputs: int,
    ) -> FakeDeviceEngine:  # fmt: skip
        model = FakeEngine(
            random_model(3, facts.vocab_size, scale=4), vocab_size=facts.vocab_size, slots=slots,
            capacity=facts.capacity, chunk=64,
        )  # fmt: skip
        return FakeDeviceEngine(device, driver, stream, model)

    monkeypatch.setattr(opening, "open_engine", open_engine)
    return driver
