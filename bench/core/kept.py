"""What is made once and kept, such as a bundle or a converted checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from .machine import CHECKOUT


def kept(folder: Path, sources: Iterable[Path], make: Callable[[], object]) -> Path:
    """`folder`, filled by `make`, unless it has been since these folders' files changed."""
    files = sorted(path for source in sources for path in source.rglob("*") if _counts(path))
    wanted = json.dumps([[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files])
    stamp = folder.with_name(f"{folder.name}.made-of.json")
    if folder.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return folder
    stamp.unlink(missing_ok=True)  # and it is written last: what is half made is made again
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make()
    stamp.write_text(wanted)
    return folder


def run_module(module: str, *arguments: object) -> str | None:
    """`python -m module` in a process of its own, whose words go to stderr. How it ended: with
    which status and what last words; None where all is well."""
    texts = [str(a.resolve()) if isinstance(a, Path) else str(a) for a in arguments]
    last = "nothing said"
    with subprocess.Popen(
        [sys.executable, "-m", module, *texts], cwd=CHECKOUT, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL, stdout=2,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            last = line.strip() or last
    return f"ended with status {process.returncode}: {last}" if process.returncode else None


def _counts(path: Path) -> bool:
    """Whether what is made may depend on it: Python's compiled files are its own affair."""
    return path.is_file() and "__pycache__" not in path.parts
