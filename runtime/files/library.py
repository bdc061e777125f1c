"""liboutrider: its location, and its operators, which `HOST_FILE` needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIBRARY = "liboutrider.so"
# In a wheel; in a checkout after `make plugins`.
FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2] / "build" / "lib")


def find_library() -> Path | None:
    """The library's path; None if it has not been compiled."""
    return next((path for folder in FOLDERS if (path := folder / LIBRARY).is_file()), None)


def add_operators(options: Any) -> bool:
    """Register the operators of plugins/onnxruntime with ONNX Runtime. Returns whether the library
    exists.

    options: a SessionOptions. Raises what ONNX Runtime raises if it cannot load the library or is
    too old for it.
    """
    library = find_library()
    if library is not None:
        options.register_custom_ops_library(str(library))
    return library is not None
