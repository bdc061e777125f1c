"""Shared by our model-local functions: their domain, and how they are added to a graph."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

import onnx
import onnx_ir as ir

DOMAIN = "outrider"
IMPLEMENTATION = "outrider"  # our name in Transformers' interfaces
OPSET = 24  # ONNX's, for graphs and for the bodies of the functions
HEADER = f'<domain: "{DOMAIN}", opset_import: ["": {OPSET}]>'  # of functions that call none of ours


def add_functions(model: ir.Model, functions: Iterable[onnx.FunctionProto]) -> None:
    for proto in functions:
        function = ir.serde.deserialize_function(proto)
        model.functions[function.identifier()] = function
        model.graph.opset_imports[DOMAIN] = 1


def define(model: ir.Model, kind: ModuleType) -> None:
    """Add the functions of this module, such as `attention`, that the graph's nodes call."""
    names = sorted({node.op_type for node in model.graph if kind.is_own(node)})
    add_functions(model, map(kind.function, names))
