"""Helpers that the tests of RTX engines share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = importlib.util.find_spec("tensorrt_rtx") is not None
needs_library = pytest.mark.skipif(not HERE, reason="tensorrt_rtx is not installed")
SM = "80,89,120"


def arguments(graphs: Path, out: Path, sm: str = "89") -> list[str]:
    """Arguments of `python -m engines`."""
    return ["--graphs", str(graphs), "--out", str(out), "--backend", "tensorrt_rtx", "--sm", sm]
