"""What is made once and kept, such as a bundle or a converted checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path


def kept(folder: Path, sources: Iterable[Path], make: Callable[[], object]) -> Path:
    """`folder`, filled by `make`, unless it has been since these folders' files changed."""
    files = sorted(path for source in sources for path in source.rglob("*") if _counts(path))
    wanted = json.dumps([[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in files])
    stamp = folder.with_name(f"{folder.name}.made-of.json")
    if folder.is_dir() and stamp.is_file() and stamp.read_text() == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make()
    stamp.write_text(wanted)  # last: what is half made is made again
    return folder


def _counts(path: Path) -> bool:
    """Whether what is made may depend on it: Python's compiled files are its own affair."""
    return path.is_file() and "__pycache__" not in path.parts
