"""Run the checkout's commands as a user does, and check their exit status and output."""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime import generate
from runtime.cli import command as command_line
from runtime.files.errors import EXIT_STATUS

CHECKOUT = Path(__file__).parents[2]
# The folder with TensorRT's include/: the real headers if available, otherwise the stand-in's.
TENSORRT = os.environ.get("TENSORRT_ROOT") or str(CHECKOUT / "tests" / "standins" / "tensorrt")
# USERS.md's promise: one line for the cause, one for the remedy, here joined by a full stop.
ERROR = re.compile(r"error: (?P<kind>[a-z]+): (?P<cause>[^\n]+)\. (?P<remedy>[^\n]+\.)\n\Z")
PLAIN_ERROR = re.compile(r"error: [a-z]+: [^\n]+\. [^\n]+\n")


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`python -m` with these arguments."""
    return subprocess.run(
        command(*arguments),
        cwd=CHECKOUT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


@contextmanager
def limited_files(largest: int) -> Iterator[None]:
    """Limit the size of files in bytes, here and in child processes: a larger write fails, as on a
    full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the SIGINT and SIGTERM handlers on exit: a command run in this process replaces them
    for good."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def error_line(stderr: str, kind: str) -> str:
    """Return the cause from the error line of stderr, which must be the only report of the
    failure."""
    assert "Traceback" not in stderr, stderr
    found = ERROR.search(stderr)
    assert found, stderr
    assert found["kind"] == kind, stderr
    assert stderr.count("error: ") == 1, stderr
    return found["cause"]


def leftovers(folder: Path) -> list[str]:
    """Temporary folders of unfinished writes below this one."""
    return [
        str(path)
        for path in folder.rglob("*")
        if ".partial-" in path.name or ".replaced-" in path.name
    ]


class Cli:
    """Runs `main` in this process on a fake engine, and records how it was loaded."""

    def __init__(self, engine, capsys, monkeypatch):
        self.engine, self.capsys, self.monkeypatch = engine, capsys, monkeypatch
        self.loaded = None
        monkeypatch.setattr(command_line, "load", self.load)

    def load(self, folder, **options):
        self.loaded = {"folder": folder, **options}
        return self.engine

    def __call__(self, *argv, stdin=None):
        if stdin is not None:
            content = stdin if isinstance(stdin, bytes) else stdin.encode()
            self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        status = generate.main(["--engines", "bundle", *argv])
        return status, *self.capsys.readouterr()

    def refused(self, *argv, kind="option", loaded=False, stdin=None):
        """Expect an error, and return its text; the engine must not have run."""
        status, out, err = self(*argv, stdin=stdin)
        assert status == EXIT_STATUS[kind], err
        assert out == ""
        assert PLAIN_ERROR.fullmatch(err), err
        assert err.startswith(f"error: {kind}: ")
        assert (self.loaded is not None) == loaded
        assert not self.engine.decoder.target.calls
        return err
