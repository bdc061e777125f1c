"""The files of a part in torch's format: `graph.pt2` and `weights.bin`, and those of an encoder.

torch is imported by what is called, since a bundle of another backend needs none.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PROGRAM_FILE, WEIGHTS_FILE = "graph.pt2", "weights.bin"
ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE = "encoder.pt2", "encoder.bin"
TENSOR_ALIGNMENT = 64  # bytes: a cache line, the widest vector
# In a package's metadata: JSON that gives of each weight which its code reads, and the weights file
# lacks, the names of those that it is made of, one below the other.
JOINED = "outrider_joined"


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a weights file, mapped: nothing is read before it is used.

    The file: the length of a JSON object as 8 bytes, little-endian; that object, which gives for
    each name a dtype, a shape and the offset of its bytes; then these, from the next multiple of
    `TENSOR_ALIGNMENT` on, each tensor at such a multiple. Tied tensors have one place.
    """
    import torch

    size = path.stat().st_size
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    length = int.from_bytes(data[:8].numpy().tobytes(), "little")
    index = json.loads(data[8 : 8 + length].numpy().tobytes())
    start = -(-(8 + length) // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    tensors = {}
    for name, (kind, shape, offset) in index.items():
        dtype = getattr(torch, kind)
        raw = data[start + offset :][: math.prod(shape) * dtype.itemsize]
        tensors[name] = raw.view(dtype).reshape(shape)
    return tensors


def read_program(folder: Path, *, encoder: bool = False) -> torch.export.ExportedProgram:
    """The torch.export program of a part, with its weights mapped; or that of its encoder."""
    import torch

    file, weights = program_files(encoder)
    program = torch.export.load(folder / file)
    place_tensors(program, read_tensors(folder / weights))
    return program


def program_files(encoder: bool) -> tuple[str, str]:
    """A program and its weights."""
    return (ENCODER_PROGRAM_FILE, ENCODER_WEIGHTS_FILE) if encoder else (PROGRAM_FILE, WEIGHTS_FILE)


def place_tensors(program: torch.export.ExportedProgram, tensors: dict[str, torch.Tensor]) -> None:
    """Put tensors into a program by their names."""
    import torch

    for name, tensor in tensors.items():
        if name in program.state_dict:
            parameter = isinstance(program.state_dict[name], torch.nn.Parameter)
            program.state_dict[name] = (
                torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor
            )
        else:
            program.constants[name] = tensor


# What a compiler may use of a processor; of torch.cpu's names.
_INSTRUCTIONS = ("fma", "f16c", "avx2", "avx512", "amx", "neon", "asimd", "sve", "bf16")


def cpu_targets() -> list[str]:
    """ "cpu", its architecture, and the instruction sets that code compiled for it may use."""
    import torch

    has = torch.cpu.get_capabilities()
    names = (n for n, is_there in has.items() if is_there is True and n.startswith(_INSTRUCTIONS))
    return ["cpu", str(has["architecture"]), *sorted(names)]
