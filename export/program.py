"""Turn a module into a torch.export program: the same graph in torch's own operators.

This is the second format of a part besides ONNX (`--format torch`), for backends that compile
torch's graphs. It consists of two files: the program, without weights, and the weights as they will
be used, so that a bundle links to them and holds no second copy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from runtime.files.torch_files import HOLE, TENSOR_ALIGNMENT, place_tensors, program_files

from .decoder import Decoder, Example
from .graph import ConstantErfinv, quiet

EXAMPLE_ROWS = 16  # small, as S is dynamic and the file contains the example


class _InPlace(torch.nn.Module):
    """`Decoder` that returns only logits: here the caches are updated in place."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, *arguments: Any) -> torch.Tensor:
        logits: torch.Tensor = self.decoder(*arguments)[0]
        return logits


def trace(module: torch.nn.Module, example: Example) -> torch.export.ExportedProgram:
    """As `graph.trace`. Inputs are in the contract's order, all keys before all values; a `Decoder`
    has one output."""
    sizes = example.dynamic_shapes
    if isinstance(module, Decoder):
        module, sizes = _InPlace(module), (sizes,)
    with torch.no_grad(), quiet(), ConstantErfinv():
        program = torch.export.export(
            module.eval(), example.arguments, dynamic_shapes=sizes, strict=False
        )
    _prune(program)
    return program


def _prune(program: torch.export.ExportedProgram) -> None:
    """Drop nodes that no result needs, and weights that nothing reads any more: the encoder in a
    decoder's graph, and the decoder's further computations in an encoder's graph."""
    graph, inputs = program.graph, program.graph_signature.input_specs
    asserts = torch.ops.aten._assert_tensor_metadata.default  # types are those of the trace
    graph.eliminate_dead_code(
        lambda node: node.target is not asserts and node.is_impure(impure_random=False)
    )
    for node, spec in list(zip(graph.find_nodes(op="placeholder"), inputs, strict=True)):
        if spec.target is not None and not node.users:
            graph.erase_node(node)
            inputs.remove(spec)
            program.state_dict.pop(spec.target, None)
            program.constants.pop(spec.target, None)
    program.graph_module.recompile()


def save(
    program: torch.export.ExportedProgram,
    folder: Path,
    *,
    encoder: bool = False,
    holes: bool = False,
) -> None:
    """Write `graph.pt2` and `weights.bin` to `folder`, and release the program's weights.

    encoder: whether to use the encoder's file names. holes: leave holes in the file in place of
    parameters, which read as zeros and take no disk space.
    """
    file, weights = program_files(encoder)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            for trace_of_this_machine in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                node.meta.pop(trace_of_this_machine, None)
    tensors = {
        name: tensor
        for name, tensor in (*program.state_dict.items(), *program.constants.items())
        if isinstance(tensor, torch.Tensor)
    }
    _write_tensors(tensors, folder / weights, holes)
    # The format requires a tensor of each name and shape: a single stored number will do.
    stubs = {n: torch.zeros((), dtype=t.dtype).expand(t.shape) for n, t in tensors.items()}
    tensors.clear()
    place_tensors(program, stubs)
    with quiet():
        torch.export.save(program, folder / file)


def _write_tensors(tensors: dict[str, torch.Tensor], path: Path, holes: bool = False) -> None:
    """Write tensors for `read_tensors`, one at a time; tied ones share their bytes. See `save`."""

    def aligned(size: int) -> int:
        return -(-size // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT

    index: dict[str, tuple[object, ...]] = {}
    offsets: dict[tuple[object, ...], int] = {}
    distinct_tensors: list[tuple[int, torch.Tensor]] = []
    end = 0
    for name, tensor in tensors.items():
        hole = holes and isinstance(tensor, torch.nn.Parameter)
        tensor = tensor.detach().contiguous()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape)
        if identity not in offsets or tensor.numel() == 0:
            offsets[identity] = end
            if not hole:
                distinct_tensors.append((end, tensor))
            end += aligned(tensor.nbytes)
        index[name] = (
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            offsets[identity],
            *([HOLE] if hole else []),
        )
    header = json.dumps(index).encode()
    start = aligned(8 + len(header))
    assert sys.byteorder == "little"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for offset, tensor in distinct_tensors:
            file.seek(start + offset)
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.truncate(start + end)
