"""A cache of folders that are built once, such as bundles and converted checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from .machine import CHECKOUT


def cached_folder(folder: Path, sources: Iterable[Path], make: Callable[[], object]) -> Path:
    """`folder`, filled by `make` unless it is up to date with the files below `sources`."""
    files = sorted(path for source in sources for path in source.rglob("*") if _is_source(path))
    wanted = json.dumps([[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files])
    stamp = folder.with_name(f"{folder.name}.made-of.json")
    if folder.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return folder
    stamp.unlink(missing_ok=True)  # written last, so that an interrupted build is repeated
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make()
    stamp.write_text(wanted)
    return folder


def run_module(module: str, *arguments: object) -> None:
    """Run `python -m module` in a separate process, with its output on stderr. Raises
    OutriderError("backend") with its exit status and last line of output if it fails."""
    texts = [str(a.resolve()) if isinstance(a, Path) else str(a) for a in arguments]
    last = "no output"
    with subprocess.Popen(
        [sys.executable, "-m", module, *texts], cwd=CHECKOUT, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdin=subprocess.DEVNULL, stdout=2,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            last = line.strip() or last
    if process.returncode:
        # Imported here so that it does not add to the memory of other systems' workers.
        from runtime.files.errors import OutriderError

        cause = f"python -m {module} ended with status {process.returncode}: {last}"
        raise OutriderError("backend", cause, "See its output above.")


def _is_source(path: Path) -> bool:
    """Whether the result may depend on this file; Python's compiled files do not count."""
    return path.is_file() and "__pycache__" not in path.parts
