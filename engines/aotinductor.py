"""AOTInductor: torch compiles its own graph to a package of machine code.

The package contains only code. The weights stay in the graph's file, which the bundle links to and
the runtime maps: there is no second copy on disk or in memory, and compile time does not grow with
the weights. The code runs only with the version of torch that compiled it, and only on the GPU
model present at compile time or, for the CPU, on processors with the instruction sets it uses.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from runtime.files.errors import OutriderError, first_line, importing
from runtime.files.graphs import Format, GraphFacts
from runtime.files.manifest import ENCODER_DECODERS, ENCODER_PACKAGE_FILE, PACKAGE_FILE, EngineFacts
from runtime.files.progress import stage
from runtime.files.torch_files import (
    JOINED,
    WEIGHTS_FILE,
    cpu_targets,
    find_holes,
    place_tensors,
    program_files,
    read_program,
)

from . import gpu_program
from .cpp_compiler import find_cpp_compiler, full_disk_errno
from .gpus import CCCL, cuda_toolkit
from .keys import engine_key

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "float16", "bfloat16")
# No quantised weights: each call would write a dense copy of them.
RUNS = {ENCODER_DECODERS: ("float32", "bfloat16")}
FORMAT: Format = "torch"
LEVELS = range(0)
CONFIG: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    # Only the instruction sets in `targets`, not everything this processor happens to support.
    "cpp.march": "",
    # Use the number of threads the runtime asks for, not the number at build time.
    "cpp.dynamic_threads": True,
    "aot_inductor.enable_line_tables": False,  # they contain paths of this machine
    # Precompiled headers pay off over many compiles; here there are two files.
    "aot_inductor.precompile_headers": False,
    # Skip the check that the compiler supports AVX2 and AVX-512: torch compiles its own headers for
    # each, a third of the build time, and every C++20 compiler supports both. Newer extensions
    # (AMX, VNNI) are still checked.
    "cpp.vec_isa_ok": True,
}
# The kernel that applies rotary embeddings to the queries also computes angles, cosines and sines:
# more than the 30 operations after which Inductor ends a kernel. By default a second kernel in each
# layer would only rearrange the queries.
GPU_CONFIG: dict[str, Any] = {"realize_opcount_threshold": 64}


def versions() -> dict[str, str]:
    _torch()
    return {"torch": metadata.version("torch")}  # without the build suffix of __version__


def _torch() -> Any:
    remedy = "Install it: pip install torch, or use BACKEND=onnxruntime."
    with importing("torch", remedy, "PyTorch"):
        import torch
    return torch


def targets(sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
    """The GPU of this machine, such as sm90, or the instruction sets of its processor.

    sm: empty for the GPU if there is one, "cpu" for the CPU; a number such as "90" must match the
    GPU of this machine, because kernels are timed on it and chosen.
    Raises OutriderError "option", and "backend" if a compiler is missing.
    """
    torch = _torch()
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    present = "{}{}".format(*capability) if capability else "cpu"
    if sm not in ("", "cpu", present):
        raise OutriderError(
            "option",
            f"SM={sm} does not match this machine: BACKEND=aotinductor builds only for its "
            + (f"GPU (SM={present}) or CPU" if capability else "CPU"),
            "Build on a machine with that GPU, leave SM out, or use BACKEND=tensorrt_rtx.",
        )
    find_cpp_compiler()
    if capability is None or sm == "cpu":
        return cpu_targets()
    if capability < (8, 0) and dtype == "bfloat16":
        cause = f"the GPU of this machine (SM={present}) does not support bfloat16"
        raise OutriderError("option", cause, "Use DTYPE=float16.")
    _check_gpu_tools()
    return [f"sm{present}"]


def _check_gpu_tools() -> None:
    """Check for Triton, which generates the kernels, and for the CUDA headers, which the code that
    launches them needs. Raises OutriderError "backend"."""
    import torch
    from torch.utils._triton import has_triton
    from torch.utils.cpp_extension import CUDA_HOME

    packages = f"pip install 'cuda-toolkit[crt,cccl]=={torch.version.cuda}.*'"
    headers = f"Set CUDA_HOME to a toolkit, run {packages}"
    for what, found, remedy in (
        ("Triton", has_triton(), "Install it"),
        ("the CUDA headers", cuda_toolkit(CUDA_HOME), headers),
    ):
        if not found:
            cause = f"AOTInductor needs {what} to compile for a GPU; not found on this machine"
            raise OutriderError("backend", cause, f"{remedy}, or build for the CPU with SM=cpu.")


def plan(
    models: dict[str, GraphFacts], slots: int, max_gamma: int, targets: list[str], level: int | None
) -> dict[str, EngineFacts]:
    """One engine for all shapes: B, N, K and S are dynamic."""
    return {
        role: EngineFacts(
            key=engine_key(
                graph=dataclasses.asdict(facts), targets=targets, versions=versions(), config=CONFIG
            ),
            file=PACKAGE_FILE,
            targets=targets,
            profiles=[],
            weights=WEIGHTS_FILE,
            encoder=ENCODER_PACKAGE_FILE if facts.encoder else None,
        )
        for role, facts in models.items()
    }


def compile(
    role: str, graph: Path, out: Path, facts: GraphFacts, to: EngineFacts | None
) -> EngineFacts:
    """Compile the graph; the package goes next to the weights. Prints a line to stderr. Raises
    OutriderError "backend", and OSError if the disk is full."""
    assert to is not None
    torch = _torch()
    from torch.export import passes

    gpu = to.targets[0] != "cpu"
    try:
        with (
            stage(role, f"compile, {to.targets[0]}") as progress,
            _private_cache(out),
            _toolchain(out) if gpu else nullcontext(),
        ):
            for file in to.compiled_files:
                encoder = file == to.encoder
                program = read_program(graph, encoder=encoder)
                compile_options = _compile_options(gpu) | {"cpp.cxx": (None, find_cpp_compiler())}
                if gpu:
                    _fill_holes(program, graph / program_files(encoder)[1])
                    program, joined = gpu_program.adapt_to_gpu(
                        passes.move_to_device_pass(program, "cuda"), facts.capacity
                    )
                    compile_options["aot_inductor.metadata"] = {JOINED: json.dumps(joined)}
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(out / file), inductor_configs=compile_options
                )
            size = sum((out / file).stat().st_size for file in to.compiled_files)
            progress.note = f"{size / 2**20:,.1f} MiB of code"
    except Exception as error:  # noqa: BLE001 - each compiler in the chain has its own exceptions
        if full_disk := full_disk_errno(error):
            raise OSError(full_disk, os.strerror(full_disk), str(out / to.file)) from None
        raise OutriderError(
            "backend",
            f"AOTInductor of torch {torch.__version__} cannot compile the graph of "
            f"{facts.source}: {first_line(error)}",
            "Use BACKEND=onnxruntime, and please report the architecture.",
        ) from None
    return to


def _fill_holes(program: torch.export.ExportedProgram, weights: Path, device: str = "cuda") -> None:
    """Put zeros on the device in place of the tensors that are holes of the weights file."""
    tensors = {**program.state_dict, **program.constants}
    place_tensors(
        program,
        {
            name: tensors[name].new_zeros(tensors[name].shape, device=device)
            for name in find_holes(weights)
        },
    )


def _compile_options(gpu: bool) -> dict[str, Any]:
    """A copy of CONFIG, because torch adds to it. torch 2.11 lacks some of the options. All of them
    concern CPU code: a GPU package works without them, but a CPU package would not match
    `targets`."""
    if not gpu:
        return dict(CONFIG)
    known = _torch()._inductor.list_options()
    return {name: value for name, value in (CONFIG | GPU_CONFIG).items() if name in known}


@contextmanager
def _private_cache(out: Path) -> Iterator[None]:
    """Keep Inductor's cache in the engine's folder, so that an aborted build removes both."""
    from torch._inductor.utils import fresh_cache

    logger = logging.getLogger("torch._inductor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs only advice; failures raise
    try:
        with warnings.catch_warnings(), fresh_cache(dir=str(out.resolve())):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _toolchain(out: Path) -> Iterator[None]:
    """Let torch find the CUDA headers, and the linker the CUDA driver under the name it expects.

    torch assumes that the folder above nvcc is the toolkit, which is not always so, and that all
    headers are directly in its include folder, which CUDA 13 has changed; and it links with -lcuda,
    although a machine without the toolkit's stubs has only libcuda.so.1.
    """
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=out, prefix=".driver-") as folder:
        if (driver := _loaded_driver()) is not None:
            Path(folder, "libcuda.so").symlink_to(driver)
        toolkit = cuda_toolkit(cpp_extension.CUDA_HOME)
        searched = {"LIBRARY_PATH": folder, "CPATH": f"{toolkit}/include/{CCCL}"}
        for name, first in searched.items():
            searched[name] = os.pathsep.join(filter(None, (first, os.environ.get(name))))
        with patch.dict(os.environ, searched), patch.object(cpp_extension, "CUDA_HOME", toolkit):
            yield


def _loaded_driver() -> str | None:
    """The file that the dynamic loader finds for libcuda.so.1."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line.split()[-1] for line in lines if "/libcuda.so" in line), None)
