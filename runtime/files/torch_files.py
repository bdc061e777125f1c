"""The files of a part in torch's format: `graph.pt2` and `weights.bin`, and those of an encoder.

torch is imported inside functions, because bundles of other backends do not need it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROGRAM_FILE, WEIGHTS_FILE = "graph.pt2", "weights.bin"
ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE = "encoder.pt2", "encoder.bin"
TENSOR_ALIGNMENT = 64  # bytes: a cache line, the widest vector
HOLE = "hole"  # marks a tensor in a weights file that was never written
# Key of a package's metadata: JSON that maps each weight that its code reads, but that is not in
# the weights file, to the names of the weights whose rows it concatenates.
JOINED = "outrider_joined"


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a weights file, memory-mapped: nothing is read before it is used.

    File format: the length of a JSON object as 8 bytes, little-endian; that object, which maps each
    name to a dtype, a shape, the offset of its bytes and, if they were never written, `HOLE`; then
    the tensors, from the next multiple of `TENSOR_ALIGNMENT` on, each at such a multiple. Tied
    tensors share one offset.
    """
    import torch

    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    index, start = _read_index(path)
    tensors = {}
    for name, (kind, shape, offset, *_) in index.items():
        dtype = getattr(torch, kind)
        raw = data[start + offset :][: math.prod(shape) * dtype.itemsize]
        tensors[name] = raw.view(dtype).reshape(shape)
    return tensors


def find_holes(path: Path) -> set[str]:
    """The tensors of a weights file that were never written. They read as zeros, but that takes as
    long as reading others, and as much memory."""
    return {name for name, (*_, last) in _read_index(path)[0].items() if last == HOLE}


def _read_index(path: Path) -> tuple[dict[str, list[Any]], int]:
    """The JSON object of a weights file, and where its tensors begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        index = json.loads(file.read(min(length, path.stat().st_size)))  # it may be damaged
    return index, -(-(8 + length) // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def read_program(folder: Path, *, encoder: bool = False) -> torch.export.ExportedProgram:
    """The torch.export program of a part, or of its encoder, with memory-mapped weights."""
    import torch

    file, weights = program_files(encoder)
    program = torch.export.load(folder / file)
    place_tensors(program, read_tensors(folder / weights))
    return program


def program_files(encoder: bool) -> tuple[str, str]:
    """The file names of a program and its weights."""
    return (ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE) if encoder else (PROGRAM_FILE, WEIGHTS_FILE)


def place_tensors(program: torch.export.ExportedProgram, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors into a program by name."""
    import torch

    for name, tensor in tensors.items():
        if name in program.state_dict:
            parameter = isinstance(program.state_dict[name], torch.nn.Parameter)
            program.state_dict[name] = (
                torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor
            )
        else:
            program.constants[name] = tensor


# Prefixes of the instruction sets that a compiler may use, among torch.cpu's names.
_INSTRUCTIONS = ("fma", "f16c", "avx2", "avx512", "amx", "neon", "asimd", "sve", "bf16")


def cpu_targets() -> list[str]:
    """ "cpu", the architecture, and the instruction sets that code compiled here may use."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    names = (
        n for n, present in capabilities.items() if present is True and n.startswith(_INSTRUCTIONS)
    )
    return ["cpu", str(capabilities["architecture"]), *sorted(names)]
