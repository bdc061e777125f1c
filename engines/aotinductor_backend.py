"""AOTInductor: torch compiles its own graph to a package of machine code.

The package holds code alone. The weights stay the graph's file, which the bundle links to and the
runtime maps: no second copy on disk or in memory, and a compile that does not grow with them.
The code belongs to one version of torch and to processors that have what it was compiled for.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.manifest import (
    PACKAGE_FILE,
    WEIGHTS_FILE,
    EngineFacts,
    Format,
    GraphFacts,
    OutriderError,
    cpu_targets,
    first_line,
    read_program,
    stage,
)

from .keys import engine_key

DTYPES = ("float32", "float16", "bfloat16")
FORMAT: Format = "torch"
CONFIG: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    # What `targets` says, not all that this processor happens to have.
    "cpp.march": "",
    # As many threads as the runtime asks for, not as the build had.
    "cpp.dynamic_threads": True,
    "aot_inductor.enable_line_tables": False,  # paths of this machine
    # A header compiled in advance is for many compiles; here it is used for two files.
    "aot_inductor.precompile_headers": False,
}


def versions() -> dict[str, str]:
    return {"torch": str(_torch().__version__)}


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise OutriderError(
            "backend",
            f"PyTorch is not installed ({error})",
            "Install it: pip install torch, or use BACKEND=onnxruntime.",
        ) from None
    return torch


def targets(sm: str, dtype: str) -> list[str]:
    """What this processor has. Raises OutriderError "option" for GPUs, "backend" without g++."""
    if sm:
        raise OutriderError(
            "option",
            f"SM={sm} is for GPUs, and BACKEND=aotinductor builds for this CPU",
            "Leave SM out, or use BACKEND=tensorrt_rtx.",
        )
    _torch()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise OutriderError(
            "backend",
            f"AOTInductor needs a C++ compiler, and there is no {os.environ.get('CXX', 'g++')}",
            "Install g++ or name one in CXX, or use BACKEND=onnxruntime.",
        ) from None
    return cpu_targets()


def plan(
    models: dict[str, GraphFacts], slots: int, max_gamma: int, sm: str
) -> dict[str, EngineFacts]:
    """One engine takes all shapes: B, N, K and S are open in it."""
    has = targets(sm, models["target"].dtype)
    keys = {
        role: engine_key(
            graph=dataclasses.asdict(facts), targets=has, versions=versions(), config=CONFIG
        )
        for role, facts in models.items()
    }
    return {
        role: EngineFacts(key, PACKAGE_FILE, has, [], WEIGHTS_FILE) for role, key in keys.items()
    }


def compile(
    role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
) -> EngineFacts:
    """Compile, beside the weights. Prints a line on stderr. Raises OutriderError "backend", and
    OSError where the disk is full."""
    assert to is not None
    torch = _torch()
    package = out / to.file
    try:
        with stage(role, f"compile, {to.targets[0]}") as said, _workplace(out):
            program = read_program(graph)
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(package),
                inductor_configs=dict(CONFIG),  # it adds to them
            )
            said.note = f"{package.stat().st_size / 2**20:,.1f} MiB of code"
    except Exception as error:  # noqa: BLE001 - a dozen compilers in a row, each with its own
        if full := _full_disk(error):
            raise OSError(full, os.strerror(full), str(package)) from None
        raise OutriderError(
            "backend",
            f"AOTInductor of torch {torch.__version__} cannot compile the graph of "
            f"{facts.source}: {first_line(error)}",
            "Use BACKEND=onnxruntime, and please report the architecture.",
        ) from None
    return to


@contextmanager
def _workplace(out: Path) -> Iterator[None]:
    """Inductor's own files go where the engine goes, and with it if that is not finished."""
    from torch._inductor.utils import fresh_cache

    logger = logging.getLogger("torch._inductor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it advises; what fails raises
    try:
        with warnings.catch_warnings(), fresh_cache(dir=str(out.resolve())):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _full_disk(error: BaseException | None) -> int:
    """The errno, where that is what went wrong: here, or in a compiler that says so in words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error.errno
        for number in _FULL:
            if os.strerror(number) in str(error):
                return number
        error = error.__cause__ or error.__context__
    return 0


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
