"""Fixtures that several test files share."""

from __future__ import annotations

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported: no test may wait for a network
# A shell that runs the tests in the background has them ignore Ctrl-C, and the commands they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import rounds
from checkpoints import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """One for all workers of a run: an export takes seconds."""
    base = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    return Workshop((base.parent if parallel else base) / "workshop")


@pytest.fixture
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the decoders of rounds.py sample with: "numpy", or "kernel" where it is asked for."""
    monkeypatch.setattr(rounds, "SAMPLER", getattr(request, "param", "numpy"))
