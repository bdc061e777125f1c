"""Find a C++ compiler whose code PyTorch can load."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from runtime.files.errors import OutriderError

STANDARD_LIBRARY = b"libstdc++.so"  # the one that PyTorch for Linux is linked with
PROGRAM = "#include <regex>\nbool f(const char* s) { return std::regex_match(s, std::regex(s)); }\n"
# What a compiler says of itself or of its child, by errno.
FULL_DISK = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
FILE_LIMIT = signal.strsignal(signal.SIGXFSZ) or "SIGXFSZ"
REMEDY = "Install g++, set CXX to the name of another compiler, or use BACKEND=onnxruntime."


@lru_cache
def find_cpp_compiler() -> str:
    """The compiler for torch's generated code: $CXX or g++; with a notice another one, if the code
    of that one would crash.

    Compilers that were moved to another folder may find only the static C++ standard library. Code
    with a copy of its own ends in a segmentation fault as soon as torch loads it: in std::regex,
    the types of the two copies are taken for each other. Raises OutriderError "backend", and
    OSError if the disk is full.
    """
    own = os.environ.get("CXX") or "g++"
    if not shutil.which(own):
        raise OutriderError(
            "backend", f"AOTInductor needs a C++ compiler, but {own} was not found", REMEDY
        )
    cause = None
    for name in dict.fromkeys((own, "g++", "clang++")):
        if not shutil.which(name):
            continue
        defect = _find_defect(name)
        cause = cause or f"{name} {defect}"
        if defect is None:
            if name != own:
                print(f"{cause}: using {name} instead", file=sys.stderr)
            return name
    assert cause is not None
    raise OutriderError("backend", cause, REMEDY)


def _find_defect(compiler: str) -> str | None:
    """Why torch cannot use this compiler, if it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "f.cpp"), Path(folder, "f.so")
        source.write_text(PROGRAM)
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        except OSError as error:  # a script without its interpreter, say
            return f"cannot be run ({error.strerror})"
        if number := full_disk_errno(RuntimeError(done.stderr)):
            raise OSError(number, os.strerror(number), folder)
        if done.returncode or not made.is_file():
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            return f"cannot compile a library ({lines[0] if lines else 'no message'})"
        if STANDARD_LIBRARY not in made.read_bytes():
            return "does not link the shared C++ standard library, without which PyTorch crashes"
    return None


def full_disk_errno(error: BaseException | None) -> int:
    """The errno if a full disk caused the error, in this process or, judging by the message, in a
    compiler; otherwise 0."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            return error.errno
        for number, message in (*FULL_DISK.items(), (errno.EFBIG, FILE_LIMIT)):
            if message in str(error):
                return number
        error = error.__cause__ or error.__context__
    return 0
