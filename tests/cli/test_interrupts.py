"""Ctrl-C and SIGTERM at any moment: one line, status 130 or 143. And missing libraries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.backends import onnxruntime as ort_backend
from runtime.files.errors import OutriderError, importing, interrupts_wait, run_command

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "module", "entry"),
    [
        ("SIGINT", "tokenizers", "runtime.generate --engines x --prompt x"),
        ("SIGTERM", "tokenizers", "runtime --engines x --prompt x"),
        ("SIGINT", "transformers", "export --model x --out x"),
        ("SIGTERM", "transformers", "export.ngram --tokenizer x --out x x"),
        ("SIGTERM", "hashlib", "engines --graphs x --out x"),
        ("SIGINT", "torch", "engines --backend aotinductor --supports float32"),
    ],
)
def test_while_it_imports(tmp_path: Path, module: str, entry: str, name: str) -> None:
    """Fault: a traceback, or "PyTorch is not installed"."""
    # Signals itself, and makes an ImportError of it as NumPy's native modules do.
    (tmp_path / f"{module}.py").write_text(
        "import os, signal\n"
        "try:\n"
        f"    os.kill(os.getpid(), signal.{name})\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", *entry.split()], cwd=CHECKOUT,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    status = 128 + signal.Signals[name]
    assert (run.returncode, run.stdout, run.stderr) == (status, "", "\ninterrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_an_import(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    done = []

    def command() -> int:
        with importing("fractions", "Install Python."):
            with interrupts_wait():
                os.kill(os.getpid(), number)
            done.append("import")
        done.append("more")
        return 0

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert run_command(command) == 128 + number
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert done == ["import"]
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_library_that_is_missing_and_one_that_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a broken install is said to be none."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_one.py").write_text("import what_it_needs")
    with (
        pytest.raises(OutriderError, match=r"X is not installed\. Install it\.") as error,
        importing("nowhere.inside", "Install it", "X"),
    ):
        import nowhere.inside  # noqa: F401
    assert error.value.kind == "backend"
    with (
        pytest.raises(OutriderError, match="cannot be imported: No module named 'what_it_needs'"),
        importing("broken_one", "Install it"),
    ):
        import broken_one  # noqa: F401


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("Exception during initialization: std::bad_alloc", "memory"),
        ("Failed to allocate memory for requested buffer of size 9", "memory"),
        ("Load model failed: Protobuf parsing failed.", "backend"),
    ],
)
def test_a_session_that_does_not_open(
    said: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fault: "install the pinned onnxruntime" where memory is short, under its own log."""
    import onnxruntime

    def session(_file: str, options: onnxruntime.SessionOptions, **_: object) -> None:
        assert options.log_severity_level == 4
        raise RuntimeError(said)

    class Facts:
        dtype = "float32"

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    with pytest.raises(OutriderError) as error:
        ort_backend.open_session(tmp_path, Facts(), [], 1)  # type: ignore[arg-type]
    assert error.value.kind == kind
