"""What our functions share: their domain, and how a graph comes to have them."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
import onnx_ir as ir

DOMAIN = "outrider"
OPSET = 24  # ONNX's, of graphs and of the functions' bodies
HEADER = f'<domain: "{DOMAIN}", opset_import: ["": {OPSET}]>'  # of what calls no other of ours


def add(model: ir.Model, functions: Iterable[onnx.FunctionProto]) -> None:
    for proto in functions:
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
        model.graph.opset_imports[DOMAIN] = 1
