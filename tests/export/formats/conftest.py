"""Fixtures for the tests of checkpoint formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from dense import SIZES
from workshop import Workshop


@pytest.fixture
def source(workshop: Workshop) -> Path:
    return workshop.checkpoint("llama", **SIZES)
