"""Find a C++ compiler whose code PyTorch can load."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from runtime.files.errors import OutriderError

STANDARD_LIBRARY = b"libstdc++.so"  # the one that PyTorch for Linux is linked with
REMEDY = "Install g++, set CXX to another compiler, or use BACKEND=onnxruntime."
PROGRAM = "#include <regex>\nbool f(const char* s) { return std::regex_match(s, std::regex(s)); }\n"


@lru_cache
def find_cpp_compiler() -> str:
    """The compiler for torch's generated code: $CXX or g++; with a notice another one, if the code
    of that one would crash.

    Compilers that were moved to another folder may find only the static C++ standard library. Code
    with a copy of its own ends in a segmentation fault as soon as torch loads it: in std::regex,
    the types of the two copies are taken for each other. Raises OutriderError "backend".
    """
    own = os.environ.get("CXX") or "g++"
    found = [name for name in dict.fromkeys((own, "g++", "clang++")) if shutil.which(name)]
    if own not in found:
        raise OutriderError(
            "backend",
            f"AOTInductor needs a C++ compiler, but {own} was not found",
            REMEDY,
        )
    cause = f"{own} does not link the shared C++ standard library, without which PyTorch crashes"
    for name in found:
        if _links_shared_library(name):
            if name != own:
                print(f"{cause}: using {name} instead", file=sys.stderr)
            return name
    raise OutriderError("backend", cause, REMEDY)


def _links_shared_library(compiler: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "f.cpp"), Path(folder, "f.so")
        source.write_text(PROGRAM)
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True)
        return not done.returncode and STANDARD_LIBRARY in made.read_bytes()
