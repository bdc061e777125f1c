"""Turn the traced decoder into an ONNX file: opset 24, fused norms and rotary embeddings.

Weights, transposed ones included, stay in the checkpoint's memory until they are written, so
exporting needs little more memory than the checkpoint itself.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from inspect import signature
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
)
from onnxscript.optimizer import optimize_ir
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from runtime.files.errors import OutriderError, first_line
from runtime.files.graphs import ENCODER_FILE, GRAPH_FILE
from runtime.files.torch_files import ENCODER_WEIGHTS_FILE, WEIGHTS_FILE

from .decoder import Example
from .functions import attention, recurrence
from .functions.own import OPSET, define
from .fusion import fuse_norms, fuse_rotary
from .weights.layers import PRODUCT
from .weights.operators import dequantise_linear, initializer, is_transpose, make_tables_dense

# A constant larger than this many elements is a weight, not shape arithmetic.
_FOLD_LIMIT = 4096


def trace(module: torch.nn.Module, example: Example) -> ir.Model:
    """Trace a `Decoder`, or another module that has an example."""
    with torch.no_grad(), quiet(), ConstantErfinv():
        program = torch.onnx.export(
            module,
            example.arguments,
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            dynamic_shapes=example.dynamic_shapes,
            input_names=example.inputs,
            output_names=example.outputs,
        )
    assert program is not None
    return program.model


class ConstantErfinv(TorchFunctionMode):
    """While tracing, computes erfinv of a constant, for which ONNX has no operator: Gemma 3n has a
    threshold that is the quantile of a number in its configuration."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        found: torch.Tensor = func(*args, **(kwargs or {}))
        if func is torch.erfinv and isinstance(found, FakeTensor) and found.constant is not None:
            return torch.full(found.shape, found.item(), dtype=found.dtype)
        return found


def simplify(model: ir.Model) -> None:
    """Fuse, fold and de-duplicate in place; weights are neither copied nor materialised."""
    traced = list(model.graph.initializers.values())
    with quiet():
        make_tables_dense(model)
        _keep_exact(model)
        optimize_ir(model, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT)
        fuse_norms(model)
        fuse_rotary(model)
        LiftConstantsToInitializersPass(lift_all_constants=False)(model)
        CommonSubexpressionEliminationPass()(model)
        _gather_positions(model)
        _transpose_weights(model)
        _merge_products(model)
        dequantise_linear(model)
        for kind in attention, recurrence:
            define(model, kind)
        RemoveUnusedNodesPass()(model)
        model.graph.sort()
    # The rewriter's rules keep a reference to the last graph. It must not keep weights alive:
    # replaced ones are released here, all others in `save`.
    kept = {id(value) for value in model.graph.initializers.values()}
    for value in traced:
        if id(value) not in kept:
            value.const_value = None


def _keep_exact(model: ir.Model) -> None:
    """Give scalars that are almost 0 or 1 a dimension.

    The optimizer replaces x + 1e-20 and x * 1.000001 by x if the constant is a scalar. Routers of
    experts divide by such a sum, and 0 / 1e-20 is not 0 / 0.
    """
    for node in model.graph:
        value = node.attributes.get("value") if node.op_type == "Constant" else None
        constant = value.as_tensor().numpy() if value else np.zeros(1)
        if constant.ndim or constant in (0, 1):
            continue
        if np.isclose(constant.astype(float), (0, 1)).any():  # by the optimizer's tolerances
            tensor = ir.tensor(constant.reshape(1))
            node.attributes["value"] = ir.AttrTensor("value", tensor)
            node.outputs[0].shape, node.outputs[0].const_value = ir.Shape([1]), tensor


def _gather_positions(model: ir.Model) -> None:
    """Replace Transpose, GatherND, Transpose, which is torch's `x[:, index]`, by Gather.

    TensorRT-RTX fuses the transposition into the product with the output matrix, and then has no
    kernel that reads quantised weights: it made a dense copy of the matrix in each call.
    """
    for node in list(model.graph):
        if node.op_type != "GatherND":
            continue
        batch = node.attributes.get_int("batch_dims", 0)
        before, index = (value.producer() if value else None for value in node.inputs)
        after = [use.node for use in node.outputs[0].uses()]
        if batch or len(after) != 1 or index is None or index.op_type != "Unsqueeze":
            continue
        if not all(is_transpose(each, 1, 0, 2) for each in (before, *after)):
            continue
        assert before is not None
        gather = ir.node("Gather", [before.inputs[0], index.inputs[0]], {"axis": 1})
        old, new = after[0].outputs[0], gather.outputs[0]
        new.shape, new.type = old.shape, old.type
        model.graph.insert_before(after[0], gather)
        ir.convenience.replace_all_uses_with(old, new)
        model.graph.remove([after[0], node], safe=True)


def _transpose_weights(model: ir.Model) -> None:
    """Replace Transpose(weight) by a weight that is stored transposed.

    Every torch.nn.Linear is traced as MatMul(x, Transpose(W)). A weight that another node reads
    too (the embedding of a tied output matrix) keeps its Transpose: storing it twice would cost
    more than the transposition that a backend does once, when it loads the graph.
    """
    for node in list(model.graph):
        source = node.inputs[0] if node.op_type == "Transpose" else None
        if source is None or not source.is_initializer() or len(source.uses()) > 1:
            continue
        assert source.const_value is not None and source.name is not None
        permutation = node.attributes["perm"].as_ints()
        stored = _transposed(source.const_value, permutation, f"{source.name}.T")
        ir.convenience.replace_all_uses_with(node.outputs[0], initializer(model, stored))
        model.graph.remove(node, safe=True)
        del model.graph.initializers[source.name]


def _merge_products(model: ir.Model) -> None:
    """Replace products of one x with several weights (those for queries, keys and values, those
    for gate and up) by one product and a split.

    A backend pays for every node, and reads one wide matrix faster than three narrow ones.
    """
    products: dict[object, list[ir.Node]] = {}
    for node in model.graph:
        if _unshared_weights(node):
            products.setdefault((node.inputs[0], node.op_type), []).append(node)
    for nodes in products.values():
        if len(nodes) > 1:
            _merge(model, nodes)


def _unshared_weights(product: ir.Node) -> list[ir.TensorProtocol]:
    """The weight [K, N] of a MatMul, or the levels and scales [N, ..] of a quantised product; empty
    if another node reads them too."""
    inputs = {"MatMul": (1,), PRODUCT: (1, 2)}.get(product.op_type, ())
    weights = [_unshared_weight(product, i, dimensions=2) for i in inputs]
    unshared = [weight for weight in weights if weight is not None]
    return unshared if len(unshared) == len(weights) else []


def _merge(model: ir.Model, products: Sequence[ir.Node]) -> None:
    first = products[0]
    outputs = -1 if first.op_type == "MatMul" else 0  # the axis of N
    by_bits: dict[int, list[ir.Node]] = {}  # by bits: one matrix of 4 bits, one of 8
    for node in products:
        by_bits.setdefault(_bits(node), []).append(node)
    weights = [[_unshared_weights(node) for node in nodes] for nodes in by_bits.values()]
    products = [node for nodes in by_bits.values() for node in nodes]
    sizes = [each[0].shape.numpy()[outputs] for several in weights for each in several]
    ends = [node.outputs[0] for node in products]
    wide = [parts for several in weights for parts in zip(*several, strict=True)]
    packed = [_concatenated(model, parts, outputs) for parts in wide]
    bits = {"bits": list(by_bits)} if first.op_type == PRODUCT else {}
    new_nodes = [ir.node(first.op_type, [first.inputs[0], *packed], bits, domain=first.domain)]
    sums = [found for end in ends if (found := _sum_with_bias(end)) is not None]
    if [b.shape.numpy()[0] for _, b in sums] == sizes:
        # One sum too. If only some have a bias, the sums stay after the split.
        new_nodes.append(
            ir.node("Add", [new_nodes[0].outputs[0], _concatenated(model, [b for _, b in sums], 0)])
        )
        ends = [node.outputs[0] for node, _ in sums]
    widths = ir.tensor(sizes, name=f"{weights[0][0][0].name}.widths")
    inputs = [new_nodes[-1].outputs[0], initializer(model, widths)]
    new_nodes.append(ir.node("Split", inputs, {"axis": -1}, num_outputs=len(ends)))
    for end, part in zip(ends, new_nodes[-1].outputs, strict=True):
        part.shape, part.type = end.shape, end.type
        ir.convenience.replace_all_uses_with(end, part)
    for node in new_nodes[:-1]:
        node.outputs[0].type = ends[0].type
    model.graph.insert_before(first, new_nodes)


def _bits(product: ir.Node) -> int:
    return product.attributes["bits"].as_ints()[0] if product.op_type == PRODUCT else 0


def _unshared_weight(node: ir.Node, index: int, *, dimensions: int) -> ir.TensorProtocol | None:
    """The weight at this input, if no other node reads it."""
    value = node.inputs[index]
    if value is None or not value.is_initializer() or len(value.uses()) > 1:
        return None
    tensor = value.const_value
    return tensor if tensor is not None and len(tensor.shape) == dimensions else None


def _sum_with_bias(product: ir.Value) -> tuple[ir.Node, ir.TensorProtocol] | None:
    """The node that adds a bias to the product, and the bias, if nothing else reads either."""
    uses = list(product.uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    bias = _unshared_weight(uses[0].node, 1 - uses[0].idx, dimensions=1)
    return None if bias is None else (uses[0].node, bias)


def _concatenated(model: ir.Model, parts: Sequence[ir.TensorProtocol], axis: int) -> ir.Value:
    """The weights concatenated along `axis`, materialised only while they are written."""

    def materialise() -> ir.TensorProtocol:
        whole, end = np.empty(shape.numpy(), dtype.numpy()), 0
        along_axis = np.moveaxis(whole, axis, 0)
        for part in parts:  # one at a time: a transposed part is a temporary copy
            begin, end = end, end + part.shape.numpy()[axis]
            along_axis[begin:end] = np.moveaxis(part.numpy(), axis, 0)
        return ir.tensor(whole, dtype=dtype)

    dtype = parts[0].dtype
    sizes = list(parts[0].shape.numpy())
    sizes[axis] = sum(part.shape.numpy()[axis] for part in parts)
    shape = ir.Shape(sizes)
    name = f"{parts[0].name}.packed"
    return initializer(model, ir.LazyTensor(materialise, dtype=dtype, shape=shape, name=name))


def _transposed(tensor: ir.TensorProtocol, permutation: Sequence[int], name: str) -> ir.LazyTensor:
    """The transposed tensor, materialised only while it is written."""

    def materialise() -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().transpose(permutation).copy(), dtype=tensor.dtype)

    shape = tensor.shape.numpy()
    return ir.LazyTensor(
        materialise, dtype=tensor.dtype, shape=ir.Shape([shape[i] for i in permutation]), name=name
    )


def save(model: ir.Model, folder: Path, *, encoder: bool = False) -> None:
    """Write the graph and its external data to `folder`, and release the model's weights.

    encoder: whether to use the encoder's file names.
    """
    file, weights = GRAPH_FILE, WEIGHTS_FILE
    if encoder:
        file, weights = ENCODER_FILE, ENCODER_WEIGHTS_FILE
    for node in model.graph:
        node.metadata_props.clear()  # stack traces with paths of this machine
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.clear()
    write_model(model, folder / file, weights)
    for value in model.graph.initializers.values():
        value.const_value = None


def write_model(model: ir.Model, file: Path, weights: str) -> None:
    """Write the graph and, beside it, its weights: one tensor at a time, so that a transposed copy
    exists only while it is written. (onnx-ir 1.0 always does so, and has no option.)

    Raises OutriderError "disk" if NumPy cannot write: its error does not include the system's.
    """
    more = "max_workers" in signature(ir.save).parameters
    options: dict[str, Any] = {"max_workers": 1, "alignment": 64} if more else {}
    try:
        ir.save(model, file, external_data=weights, **options)
    except OSError as error:
        if error.errno is not None:
            raise
        raise OutriderError(
            "disk",
            f"{file.with_name(weights)} cannot be written: {first_line(error)}",
            "Free some space or raise the file size limit (ulimit -f), or write to another disk.",
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's progress output and deprecation warnings; errors are still raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch._subclasses", "torch.fx")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), redirect_stdout(StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
