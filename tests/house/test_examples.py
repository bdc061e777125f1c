"""What a user copies runs. Only here is the public interface used as the README shows it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SERVERS = {"openai_answers", "openai_requests", "ray_serve"}  # tests/serving/
FOLDER = Path(__file__).parents[2] / "examples"
MODULES = {path.stem for path in FOLDER.glob("*.py")}
EXAMPLES = sorted(MODULES - SERVERS)


def test_there_are_examples() -> None:
    assert EXAMPLES == ["batch", "generate", "own_draft", "stream"] and MODULES > SERVERS


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, llama_bundle: Path, tmp_path: Path) -> None:
    """Elsewhere, as a user's own."""
    copy = shutil.copy(FOLDER / f"{name}.py", tmp_path)
    command = [sys.executable, copy, str(llama_bundle)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    if name == "own_draft":
        assert "the same text as without: True" in done.stdout
