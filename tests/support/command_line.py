"""`python -m runtime.generate` in this process, on an engine of fakes."""

from __future__ import annotations

import io
import re
import sys

from runtime import generate
from runtime.cli import command
from runtime.files.errors import EXIT_STATUS

PLAIN_ERROR = re.compile(r"error: [a-z]+: [^\n]+\. [^\n]+\n")


class Cli:
    """Runs `main` in this process on an engine of fakes, and remembers how it was loaded."""

    def __init__(self, engine, capsys, monkeypatch):
        self.engine, self.capsys, self.monkeypatch = engine, capsys, monkeypatch
        self.loaded = None
        monkeypatch.setattr(command, "load", self.load)

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
        """The line of the error; nothing may have run."""
        status, out, err = self(*argv, stdin=stdin)
        assert status == EXIT_STATUS[kind], err
        assert out == ""
        assert PLAIN_ERROR.fullmatch(err), err
        assert err.startswith(f"error: {kind}: ")
        assert (self.loaded is not None) == loaded
        assert not self.engine.decoder.target.calls
        return err
