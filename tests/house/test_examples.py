"""Each example runs, as it stands. Fault: an interface changes and they do not."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from fakes import make_text_engine, near, random_model

import runtime

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(
    name: str, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    monkeypatch.setattr(sys, "argv", [name, *argv])
    monkeypatch.setitem(sys.modules, "outrider", runtime)  # its name once it is installed
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = random_model(1)

    def load(_folder: str, slots: int = 1) -> runtime.TextEngine:
        return make_text_engine(tmp_path, model, near(model, 2, 1.0), slots=slots)

    monkeypatch.setattr(runtime, "load", load, raising=False)
    return tmp_path


def test_generate(bundle, monkeypatch, capsys) -> None:
    out = run("generate.py", [str(bundle), "hello"], monkeypatch, capsys)
    assert out.startswith("hello")
    assert "tokens came from each look" in out


def test_stream(bundle, monkeypatch, capsys) -> None:
    out = run("stream.py", [str(bundle), "hello"], monkeypatch, capsys)
    assert out.endswith("Choose gamma from 0 to 8, or build with MAX_GAMMA.\n")


def test_batch(bundle, monkeypatch, capsys) -> None:
    files = [bundle / f"{name}.txt" for name in "abc"]
    for file in files:
        file.write_text(file.stem)
    out = run("batch.py", [str(bundle), *map(str, files)], monkeypatch, capsys)
    assert sorted(line.split(":")[0] for line in out.splitlines()[:-1]) == sorted(map(str, files))
