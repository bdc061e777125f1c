"""Importing the runtime writes no telemetry file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("imports", "left"), [("runtime, onnxruntime", 0), ("onnxruntime", 1)])
def test_onnx_runtime_reports_nothing(tmp_path: Path, imports: str, left: int) -> None:
    """Control: imported alone, it writes a device id into the home folder."""
    # A clean environment: CI variables, or another cache folder, would hide the file.
    env = {"HOME": str(tmp_path), "PATH": os.defpath}
    subprocess.run([sys.executable, "-c", f"import {imports}"], env=env, check=True)
    assert len([*tmp_path.iterdir()]) == left
