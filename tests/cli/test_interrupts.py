"""Commands that end early: by Ctrl-C or SIGTERM at any moment, with one line and status 130 or 143;
by missing libraries, lack of memory, closed streams or a full disk."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from commands import CHECKOUT, PLAIN_ERROR, handlers_kept

from export.checkpoint import find
from runtime.backends import onnxruntime as ort_backend
from runtime.cli import command
from runtime.files.errors import (
    EXIT_STATUS,
    OutriderError,
    Terminated,
    defer_interrupts,
    first_line,
    importing,
    run_command,
)


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
    # Sends itself the signal, and turns it into an ImportError as NumPy's native modules do.
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

    def work() -> int:
        with importing("fractions", "Install Python."):
            with defer_interrupts():
                os.kill(os.getpid(), number)
            done.append("import")
        done.append("more")
        return 0

    with handlers_kept():
        assert run_command(work) == 128 + number
    assert done == ["import"]
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_a_library_swallows(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: "torch.export cannot follow its code (... failed to unpack the object ...)"."""
    checkpoint = find(str(CHECKOUT / "models" / "draft"))

    def work() -> int:
        with suppress(KeyboardInterrupt, Terminated):
            os.kill(os.getpid(), number)
        raise checkpoint.refused("failed to unpack the object")

    with handlers_kept():
        assert run_command(work) == 128 + number
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_library_that_is_missing_and_one_that_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a broken installation is reported as missing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_one.py").write_text("import what_it_needs")
    with (
        pytest.raises(OutriderError, match=r"^backend: .*X is not installed\. Install it\."),
        importing("nowhere.inside", "Install it", "X"),
    ):
        import nowhere.inside  # noqa: F401
    with (
        pytest.raises(OutriderError, match="cannot be imported: No module named 'what_it_needs'"),
        importing("broken_one", "Install it"),
    ):
        import broken_one  # noqa: F401


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Exception during initialization: std::bad_alloc", "memory"),
        ("Failed to allocate memory for requested buffer of size 9", "memory"),
        ("Load model failed: Protobuf parsing failed.", "backend"),
    ],
)
def test_a_session_that_does_not_open(
    message: str, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Faults: "install the pinned onnxruntime" although memory was short; log lines of ONNX Runtime
    before the error."""
    import onnxruntime

    def session(_file: str, options: onnxruntime.SessionOptions, **_: object) -> None:
        assert options.log_severity_level == 4
        raise RuntimeError(message)

    class Facts:
        dtype = "float32"

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    with pytest.raises(OutriderError, match=f"^{kind}: "):
        ort_backend.open_session(tmp_path, Facts(), [], 1)


# Failures while running


def test_an_error_in_the_middle_keeps_the_text(cli):
    class Broken(type(cli.engine.decoder.target)):
        def forward(self, *arguments, **options):
            if len(self.calls) > 5:
                raise OutriderError("numeric", "NaN in the logits", "Build it again.")
            return super().forward(*arguments, **options)

    cli.engine.decoder.target.__class__ = Broken
    status, out, err = cli("--prompt", "hello")
    assert status == EXIT_STATUS["numeric"]
    assert len(out) > 5
    assert out.endswith("\n")
    assert err == "error: numeric: NaN in the logits. Build it again.\n"
    assert cli.engine.decoder.slots.free == 2


def test_memory(cli, monkeypatch):
    def load(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr(command, "load", load)
    status, _, err = cli("--prompt", "a")
    assert status == EXIT_STATUS["memory"] and PLAIN_ERROR.fullmatch(err)


SLOW = """
    import pathlib, signal, sys, time
    sys.path[:0] = [{root!r}, {tests!r}]
    from fakes import make_text_engine, random_model
    from runtime import generate
    from runtime.cli import command
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = random_model(1, never=[1])
    def slow(context):
        time.sleep({pause})
        return model(context)
    engine = make_text_engine(pathlib.Path({folder!r}), slow)
    command.load = lambda *_, **__: engine
    sys.exit(generate.main(["--engines", "x", "--prompt", "a", *sys.argv[1:]]))
"""


def process(folder, *argv, pause=0.0, **streams):
    tests = CHECKOUT / "tests" / "support"
    code = SLOW.format(root=str(CHECKOUT), tests=str(tests), folder=str(folder), pause=pause)
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *argv], stderr=subprocess.PIPE, **streams
    )


def test_ctrl_c_keeps_what_was_streamed(tmp_path):
    with process(tmp_path, pause=0.01, stdout=subprocess.PIPE) as child:
        first = child.stdout.read(3)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    assert child.returncode == 130
    assert err == b"\ninterrupted\n"
    assert len(first + out) >= 3


def test_a_closed_pipe_ends_quietly(tmp_path):
    with process(tmp_path, pause=0.005, stdout=subprocess.PIPE) as child:
        child.stdout.read(3)
        child.stdout.close()
        err = child.stderr.read()
        child.wait(timeout=20)
    assert (child.returncode, err) == (0, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(tmp_path, cli, monkeypatch):
    with open("/dev/full", "w") as full, process(tmp_path, stdout=full) as child:
        _, err = child.communicate(timeout=20)
    assert child.returncode == EXIT_STATUS["disk"]
    last = err.decode().splitlines()[-1]
    assert last.startswith("error: disk: cannot write to stdout: No space left on device. ")
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert cli("--prompt", "a", "--json")[0] == EXIT_STATUS["disk"]


class PartialWriter(io.FileIO):
    """A raw file, which may write only a part and return how much."""

    def write(self, data):
        return super().write(bytes(data)[:3])


def test_a_stream_without_a_buffer_loses_nothing(tmp_path, cli, monkeypatch):
    """Fault: with PYTHONUNBUFFERED, an almost full disk received only a part, with status 0."""
    path = tmp_path / "out"
    with monkeypatch.context() as patch:
        raw = io.TextIOWrapper(PartialWriter(path, "w"), write_through=True)
        patch.setattr(sys, "stdout", raw)
        assert cli("--prompt", "a", "--max-new-tokens", "9")[0] == 0
    assert path.read_text() == cli.engine.generate("a", max_new_tokens=9).text + "\n"


def test_pipes_that_do_not_block(cli, monkeypatch):
    """Faults: a TypeError if nothing had been written to stdin yet; output that did not fit the
    pipe."""
    prompts, given = os.pipe()
    answers, output = os.pipe()
    for end in (prompts, output):
        os.set_blocking(end, False)
    with (
        open(prompts) as stdin, open(output, "w") as stdout, monkeypatch.context() as patch,
        ThreadPoolExecutor() as pool, open(given, "w") as writer, open(answers) as reader,
    ):  # fmt: skip
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "stdout", stdout)
        many = pool.submit(cli, "--batch", "-", "--max-new-tokens", "99")
        lines = ('{"prompt": "a", "logprobs": 9}\n') * 20
        time.sleep(0.05)  # if too short, a fault may go unnoticed; never a false alarm
        writer.write(lines)
        writer.close()
        time.sleep(0.05)
        found = pool.submit(reader.read)
        assert many.result(20)[0] == 0
        stdout.close()
        assert found.result(20).count("\n") == 20


def test_a_line_that_only_announces():
    """Fault: "cannot read the tokenizer: … one of. Give …", because a space followed the colon."""
    message = "from one of: \n(1) a file, \n(2) an instance"
    assert first_line(ValueError(message)) == "from one of: (1) a file"
    assert first_line(ValueError()) == "ValueError"


def test_a_package_that_is_not_installed(capsys):
    """Fault: a traceback if the environment is not activated."""

    def work() -> int:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    with handlers_kept():
        assert run_command(work) == EXIT_STATUS["backend"]
    assert (
        "numpy is not installed. Install it; in a checkout, source .venv/bin/activate"
        in capsys.readouterr().err
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["a full disk", "a closed pipe"])
def test_what_print_left_in_the_buffer(name, monkeypatch):
    """Fault: the write failed only as the interpreter exited, with "Exception ignored" and status
    120."""
    reader, writer = os.pipe()
    os.close(reader)
    expected = 0 if name == "a closed pipe" else EXIT_STATUS["disk"]
    with (
        open(writer, "w") as pipe, open("/dev/full", "w") as full,
        handlers_kept(), monkeypatch.context() as patch,
    ):  # fmt: skip
        patch.setattr(sys, "stdout", full if expected else pipe)
        assert run_command(lambda: print("a") or 0) == expected


def test_closed_streams(cli, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert cli("--prompt", "a")[0] == EXIT_STATUS["disk"]
    monkeypatch.setattr(sys, "stderr", None)
    status, out, _ = cli("--prompt", "a", "--max-new-tokens", "5")
    assert (status, out) == (0, cli.engine.generate("a", max_new_tokens=5).text + "\n")
