"""liboutrider: where it is, and its operators for whoever opens `HOST_FILE`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LIBRARY = "liboutrider.so"
# Of the wheel; of `make plugins` in a checkout.
FOLDERS = (Path(__file__).parents[1], Path(__file__).parents[2] / "build" / "lib")


def find_library() -> Path | None:
    """The library's path; None where it was not compiled."""
    return next((path for folder in FOLDERS if (path := folder / LIBRARY).is_file()), None)


def add_operators(options: Any) -> bool:
    """Tell ONNX Runtime of the operators of plugins/onnxruntime, where the library is there.

    options: its SessionOptions. Raises what ONNX Runtime raises where it cannot load the library
    or is too old for it.
    """
    library = find_library()
    if library is not None:
        options.register_custom_ops_library(str(library))
    return library is not None
