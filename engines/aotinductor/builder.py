"""AOTInductor: torch compiles its own graph to a package of machine code.

The package contains only code. The weights stay in the graph's file, which the bundle links to and
the runtime maps: there is no second copy on disk or in memory, and compile time does not grow with
the weights. The code runs only with the version of torch that compiled it, and only on GPUs of the
capability it was compiled for or, for the CPU, on processors with the instruction sets it uses.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from runtime.files.errors import OutriderError, first_line, importing
from runtime.files.graphs import Format, GraphFacts
from runtime.files.manifest import ENCODER_DECODERS, ENCODER_PACKAGE_FILE, PACKAGE_FILE, EngineFacts
from runtime.files.progress import stage
from runtime.files.torch_files import JOINED, WEIGHTS_FILE, cpu_targets, read_program

from ..gpus import CCCL, cuda_toolkit
from ..keys import engine_key
from . import absent_gpu
from .cpp_compiler import find_cpp_compiler, full_disk_errno
from .program import adapt_to_gpu

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
GPU_CONFIG: dict[str, Any] = {
    # The kernel that applies rotary embeddings to the queries also computes angles, cosines and
    # sines: more than the 30 operations after which Inductor ends a kernel. By default a second
    # kernel in each layer would only rearrange the queries.
    "realize_opcount_threshold": 64,
    # What would read a tensor's numbers, compute on the device, time kernels there, or load them.
    "always_keep_tensor_constants": True,
    "coordinate_descent_tuning": False,
    "joint_graph_constant_folding": False,
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "shape_padding": False,
    "use_static_cuda_launcher": False,
    "compile_threads": 1,  # other processes would look for a GPU
    "cpp.simdlen": 1,  # no instruction sets in the code that launches the kernels
}


def versions() -> dict[str, str]:
    _torch()
    return {"torch": metadata.version("torch")}  # with the variant, such as +cpu, if it is named


def _torch() -> Any:
    remedy = "Install it: pip install torch, or use BACKEND=onnxruntime."
    with importing("torch", remedy, "PyTorch"):
        import torch
    return torch


def targets(sm: str, dtype: str, weights: Sequence[str] = ()) -> list[str]:
    """The GPU to compile for, such as sm90, or the instruction sets of this machine's processor.

    sm: a compute capability such as "90", "cpu" for the CPU, or empty for the GPU of this machine
    if there is one. Raises OutriderError "option", and "backend" if a compiler is missing.
    """
    torch = _torch()
    find_cpp_compiler()
    if not sm and torch.cuda.is_available():
        sm = "{}{}".format(*torch.cuda.get_device_capability())
    if sm in ("", "cpu"):
        return cpu_targets()
    if sm not in map(str, absent_gpu.GPUS):
        known = ", ".join(map(str, absent_gpu.GPUS))
        cause = f"BACKEND=aotinductor compiles for one GPU or the CPU, not for SM={sm}"
        raise OutriderError("option", cause, f"Use one of SM={known}, or SM=cpu.")
    if int(sm) < 80 and dtype == "bfloat16":
        cause = f"GPUs of compute capability {int(sm) / 10} do not support bfloat16"
        raise OutriderError("option", cause, "Use DTYPE=float16.")
    _check_gpu_tools()
    return [f"sm{sm}"]


def _check_gpu_tools() -> None:
    """Check for Triton, which generates the kernels, and for the CUDA headers, which the code that
    launches them needs. Raises OutriderError "backend"."""
    from torch.utils.cpp_extension import CUDA_HOME

    for what, found in (
        ("Triton", find_spec("triton")),
        ("the CUDA headers", cuda_toolkit(CUDA_HOME)),
    ):
        if not found:
            cause = f"AOTInductor needs {what} to compile for a GPU; not found on this machine"
            remedy = "pip install -c constraints.txt -e '.[aotinductor]'"
            raise OutriderError("backend", cause, f"Run {remedy}, or use SM=cpu.")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        cause = "TRITON_INTERPRET is set, and Triton then compiles nothing"
        raise OutriderError("option", cause, "Unset it.")


def plan(
    models: dict[str, GraphFacts], slots: int, max_gamma: int, targets: list[str], level: int | None
) -> dict[str, EngineFacts]:
    """One engine for all shapes: B, N and K are dynamic, on the CPU S too."""
    config = CONFIG | ({} if targets[0] == "cpu" else GPU_CONFIG)
    return {
        role: EngineFacts(
            key=engine_key(
                graph=dataclasses.asdict(facts), targets=targets, versions=versions(), config=config
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
    target = to.targets[0]
    if any(map(str.isspace, str(out.resolve()))):
        cause = f"PyTorch cannot compile in {out.resolve().parent}, whose path has a space"
        raise OutriderError("option", cause, "Use an OUT without spaces.")
    try:
        with (
            stage(role, f"compile, {target}") as progress,
            _private_cache(out),
            nullcontext() if target == "cpu" else _for_gpu(int(target.removeprefix("sm")), out),
        ):
            for file in to.compiled_files:
                program = read_program(graph, encoder=file == to.encoder)
                options = _compile_options(target != "cpu")
                options |= {"cpp.cxx": (None, find_cpp_compiler())}
                if target != "cpu":
                    program, joined = _move_to_gpu(program, facts.capacity)
                    options["aot_inductor.metadata"] = {JOINED: json.dumps(joined)}
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(out / file), inductor_configs=options
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


def _move_to_gpu(
    program: torch.export.ExportedProgram, capacity: int
) -> tuple[torch.export.ExportedProgram, dict[str, list[str]]]:
    """See `adapt_to_gpu`; the program's tensors are fake."""
    from torch.export import passes

    names = {*program.state_dict, *program.constants}
    absent_gpu.hollow(program)
    moved = passes.move_to_device_pass(program, absent_gpu.DEVICE)
    adapted, joined = adapt_to_gpu(moved, capacity)
    absent_gpu.hollow(adapted)
    new = {*adapted.state_dict, *adapted.constants} - names - {*joined}
    assert not new, f"new tensors: {', '.join(new)}"
    return adapted, joined


def _compile_options(gpu: bool) -> dict[str, Any]:
    """A copy, because torch adds to it. torch 2.11 lacks some options of CONFIG, which concern CPU
    code: a GPU package works without them, but a CPU package would not match `targets`."""
    if not gpu:
        return dict(CONFIG)
    known = _torch()._inductor.list_options()
    return {name: value for name, value in CONFIG.items() if name in known} | GPU_CONFIG


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
def _for_gpu(capability: int, out: Path) -> Iterator[None]:
    """Let torch compile for a GPU, find the CUDA headers, and link without a driver.

    torch assumes that the folder above nvcc is the toolkit, which is not always so, and that all
    headers are directly in its include folder, which CUDA 13 has changed.
    """
    from torch.utils import cpp_extension

    with tempfile.TemporaryDirectory(dir=out, prefix=".stubs-") as folder:
        absent_gpu.link_stubs(Path(folder))
        toolkit = cuda_toolkit(cpp_extension.CUDA_HOME)
        searched = {"LIBRARY_PATH": folder, "CPATH": f"{toolkit}/include/{CCCL}"}
        for name, first in searched.items():
            searched[name] = os.pathsep.join(filter(None, (first, os.environ.get(name))))
        with (
            patch.dict(os.environ, searched),
            patch.object(cpp_extension, "CUDA_HOME", toolkit),
            absent_gpu.pretend(capability),
        ):
            yield
