"""What the tests of `python -m export` share."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import error_line
from exported import Refused, command, nothing_left

from runtime.files.errors import EXIT_STATUS


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Asks for an export that must be refused, and gives the line that says so. Nothing is left."""

    def ask(model: Path | str, *options: str, kind: str = "checkpoint") -> str:
        status, said = command(capsys, tmp_path, model, *options)
        assert status == EXIT_STATUS[kind], said
        error_line(said, kind)
        assert nothing_left(tmp_path)
        return said.splitlines()[-1]

    return ask
