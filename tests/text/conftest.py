"""An encoder-decoder bundle for each backend that runs encoders, and the sources they encode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from encoders import COMPILED, bundle_of
from workshop import Workshop

from runtime.backends.engine import Ids
from runtime.backends.host import HostEngine
from runtime.backends.registry import host_engine


@pytest.fixture(scope="module", params=["onnxruntime", COMPILED])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def t5(workshop: Workshop, backend: str) -> tuple[Path, Path]:
    return bundle_of(workshop, "t5", backend=backend)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch, backend: str) -> list[int]:
    """The length, in tokens, of each source that an encoder has run on."""
    lengths: list[int] = []
    engine = host_engine(backend)
    real = engine._encode

    def encode(self: HostEngine[Any], source: Ids, names: Sequence[str]) -> dict[str, Any]:
        if source.ndim == 2:
            lengths.append(source.shape[1])
        return real(self, source, names)

    monkeypatch.setattr(engine, "_encode", encode)
    return lengths
