"""Fixtures shared by the tests of `python -m export`."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import error_line
from exported import Refused, nothing_left, run_export

from runtime.files.errors import EXIT_STATUS


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run an export that must be refused and return the error line. No file may be left behind."""

    def export_refused(model: Path | str, *options: str, kind: str = "checkpoint") -> str:
        status, output = run_export(capsys, tmp_path, model, *options)
        assert status == EXIT_STATUS[kind], output
        error_line(output, kind)
        assert nothing_left(tmp_path)
        return output.splitlines()[-1]

    return export_refused
