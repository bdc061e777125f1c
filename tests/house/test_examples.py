"""What a user copies runs. Only here is the public interface used as the README shows it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from runtime.drafts.registry import KINDS

SERVERS = {"openai_answers", "openai_requests", "ray_serve"}  # tests/serving/
MODULES = {path.stem for path in (Path(__file__).parents[2] / "examples").glob("*.py")}
EXAMPLES = sorted(MODULES - SERVERS)


def test_there_are_examples() -> None:
    assert EXAMPLES == ["batch", "generate", "own_draft", "stream"] and MODULES > SERVERS


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str, llama_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {*KINDS}
    try:
        import_module(f"examples.{name}").main([str(llama_bundle)])
    finally:
        for kind in {*KINDS} - before:  # of the next test's process too
            del KINDS[kind]
    out = capsys.readouterr().out
    assert out.strip()
    if name == "own_draft":
        assert "the same text as without: True" in out
