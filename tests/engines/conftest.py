"""Engines for RTX GPUs, built without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from workshop import Workshop

from engines import bundle as bundles
from engines.bundle import build
from engines.tensorrt import rtx as tensorrt_rtx_backend


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a GPU that this machine may have."""
    monkeypatch.setattr(tensorrt_rtx_backend, "present_gpus", dict)
    monkeypatch.setattr(bundles, "present_gpus", dict)


@pytest.fixture(scope="session")
def graphs(workshop: Workshop) -> Path:
    return workshop.graphs(*workshop.small_pair(), dtype="float16")


@pytest.fixture(scope="session")
def rtx_bundle(graphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: tests must not modify it."""
    out = tmp_path_factory.mktemp("rtx") / "bundle"
    assert build(graphs, out, backend="tensorrt_rtx", slots=3, sm="89,120")
    return out
