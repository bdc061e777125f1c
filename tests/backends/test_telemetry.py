"""Nothing is written where nobody asked for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("imports", "left"), [("runtime, onnxruntime", 0), ("onnxruntime", 1)])
def test_onnx_runtime_reports_nothing(tmp_path: Path, imports: str, left: int) -> None:
    """It would write a device's id into the home folder as it is imported: the control."""
    env = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    command = [sys.executable, "-c", f"import {imports}"]
    subprocess.run(command, env={**env, "HOME": str(tmp_path)}, check=True)
    assert len([*tmp_path.iterdir()]) == left
