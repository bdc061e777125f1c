"""`python -m outrider.cmake`: where a C++ build finds Outrider.

Prints the folder for CMake's outrider_DIR; with --onnxruntime the path of the installed onnxruntime
package's shared library, which a session opens at run time.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..files.errors import PACKAGE, CommandParser, OutriderError, run_command
from ..files.library import LIBRARY, find_library

CONFIG = "outriderConfig.cmake"
PLACES = (Path(__file__).parent, Path(__file__).parents[2] / "plugins" / "cmake")


def folder() -> Path:
    """The folder that contains `CONFIG`. Raises OutriderError "backend"."""
    found = next((place for place in PLACES if (place / CONFIG).is_file()), None)
    if found is None or find_library() is None:
        raise OutriderError(
            "backend",
            f"{LIBRARY} was not found",
            "Run make plugins in a checkout, or install a wheel that was built with a compiler.",
        )
    return found


def onnxruntime() -> Path:
    """The shared library of the installed package. Raises OutriderError "backend"."""
    spec = find_spec("onnxruntime")
    libraries = (Path(spec.origin).parent / "capi") if spec and spec.origin else Path()
    found = next(libraries.glob("libonnxruntime.so*"), None)
    if spec is None or found is None:
        raise OutriderError(
            "backend",
            "the onnxruntime package is not installed, or has no shared library",
            "Install it: pip install onnxruntime. Or give the session the path of another library.",
        )
    return found


def main() -> int:
    return run_command(_main)


def _main() -> int:
    parser = CommandParser(
        prog=f"python -m {PACKAGE}.cmake",
        description="Print the folder in which CMake finds Outrider.",
        epilog=f'example: cmake -S . -B build -Doutrider_DIR="$(python -m {PACKAGE}.cmake)"',
    )
    parser.add_argument(
        "--onnxruntime", action="store_true",
        help="print the path of the installed onnxruntime's shared library instead, for a session",
    )  # fmt: skip
    print(onnxruntime() if parser.parse_args().onnxruntime else folder())
    return 0
