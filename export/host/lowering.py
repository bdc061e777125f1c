"""Write host.onnx, a rewritten graph.onnx for ONNX Runtime on the CPU.

graph.onnx runs on every backend. ONNX Runtime runs its attention as six nodes per layer, over all
rows of the cache, and sums in an order that depends on the shape of the call. Here it is one node,
an operator of plugins/onnxruntime, which reads only valid rows and gives bitwise the same results
in every call.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from runtime.files.graphs import (
    ENCODER_FILE,
    GRAPH_FILE,
    HOST_FILE,
    HOST_WEIGHTS_FILE,
    SCALE_BYTES,
    Cache,
)
from runtime.files.torch_files import ENCODER_WEIGHTS_FILE

from ..functions import recurrence
from ..graph import write_model
from ..weights import halves
from ..weights.operators import (
    OWN_DOMAIN,
    constant,
    find_producer,
    is_transpose,
    replace_value,
    use_own_operators,
)
from .attention import Layer, NotLowered, SourceLayer, layers_of, size
from .experts import compute_only_chosen
from .observing import Observed, check_source_masks, observe

DOMAIN = "com.microsoft"  # ONNX Runtime's own operators


def write(folder: Path, capacity: int, cache: Cache | None = None) -> str:
    """Write the graph beside graph.onnx; returns a summary, with the reason if attention stays as
    it is there.

    capacity: rows of the longest sequence, which determine the size of the rotary tables. cache:
    the type of the cache rows, if not that of graph.onnx. A graph with quantised rows or weights
    gets its own weights file. Raises NotLowered.
    """
    model = ir.load(folder / GRAPH_FILE)
    quantised = use_own_operators(model)
    products = quantised + halves.use_own_operators(model)
    compute_only_chosen(model)
    try:
        layers, source_layers = layers_of(model)
        observed = observe(folder, layers, capacity)
        check_source_masks(folder, source_layers)
        for layer in layers:
            _replace_attention(model, layer, observed, cache)
        for source_layer in source_layers:
            _replace_source_attention(model, source_layer)
        _replace_recurrent(model)
        kept = ""
    except NotLowered as reason:
        if cache or not products:
            raise
        kept = f", ONNX Runtime's attention ({reason})"
    _fuse_sums(model)
    _fuse_transposed(model)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    model.graph.sort()
    for domain in (DOMAIN, OWN_DOMAIN):
        model.graph.opset_imports[domain] = 1
    if cache or quantised:
        write_model(model, folder / HOST_FILE, HOST_WEIGHTS_FILE)
        if (folder / ENCODER_FILE).exists():
            _rewrite_encoder(folder)
    else:
        ir.save(model, folder / HOST_FILE)  # the weights stay where graph.onnx has them
    return f"{len(model.graph):,} nodes{kept}"


def _rewrite_encoder(folder: Path) -> None:
    """Rewrite the encoder to use our products, in place, as no other backend reads it."""
    model = ir.load(folder / ENCODER_FILE)
    use_own_operators(model)
    RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[OWN_DOMAIN] = 1
    with TemporaryDirectory(dir=folder) as temporary:
        rewritten = Path(temporary) / ENCODER_FILE
        write_model(model, rewritten, ENCODER_WEIGHTS_FILE)
        for name in (ENCODER_WEIGHTS_FILE, ENCODER_FILE):
            rewritten.with_name(name).replace(folder / name)


# The new nodes


def _replace_attention(
    model: ir.Model, layer: Layer, observed: Observed, cache: Cache | None
) -> None:
    rotary, mask = layer.rotary, str(layer.mask.name)
    tables = [(value, observed.tables) for value in ((rotary.cos, rotary.sin) if rotary else ())]
    inputs: list[ir.Value | None] = [
        constant(model, f"host.{value.name}", found[str(value.name)]) for value, found in tables
    ]
    inputs += [None] * (2 - len(inputs))
    bias = observed.biases.get(mask)
    inputs.append(None if bias is None else constant(model, f"host.{mask}", bias))
    # If another layer has written these rows already, its outputs, which replaced the writes, are
    # read.
    reads = layer.node.inputs[1] is not layer.cache_writes[0].outputs[0]
    caches = layer.node.inputs[1:3] if reads else [write.inputs[0] for write in layer.cache_writes]
    node = ir.node(
        "QuantizedCacheAttention" if cache else "Attention",
        [
            *([_flatten(model, layer.query), None, None] if reads else _qkv(model, layer)),
            *caches,
            _graph_input(model, "position"),
            *inputs,
            *_score_inputs(model, layer),
        ],
        {
            **_attributes(layer),
            "window": observed.windows[mask],
            "interleaved": rotary.interleaved if rotary else 0,
        },
        domain=OWN_DOMAIN,
        num_outputs=1 if reads else 3,
    )
    model.graph.append(node)
    _replace_output(model, layer, node)
    if reads:
        return
    for write, new in zip(layer.cache_writes, node.outputs[1:], strict=True):
        replace_value(write.outputs[0], new)
    for rows in (*caches, *node.outputs[1:]) if cache else ():
        assert rows is not None and rows.shape is not None
        *sizes, _ = rows.shape
        rows.dtype = ir.DataType.INT8
        rows.shape = ir.Shape([*sizes, size(rows, 3) + SCALE_BYTES])


def _replace_source_attention(model: ir.Model, layer: SourceLayer) -> None:
    inputs = [
        _flatten(model, layer.query),
        *layer.node.inputs[1:3],
        _graph_input(model, "source_length"),
    ]
    inputs += _score_inputs(model, layer)
    attributes = {**_attributes(layer), "window": 0, "interleaved": 0}
    node = ir.node("SourceAttention", inputs, attributes, domain=OWN_DOMAIN)
    model.graph.append(node)
    _replace_output(model, layer, node)


def _replace_recurrent(model: ir.Model) -> None:
    """Replace the functions of layers that carry a state by one operator each."""
    for node in [node for node in model.graph if recurrence.is_own(node)]:
        inputs = [*node.inputs]
        if node.op_type == recurrence.RECURRENCE:
            inputs.insert(4, None)  # beta
        kind = "ShortConvolution" if node.op_type == recurrence.CONVOLUTION else "Recurrence"
        own = ir.node(kind, inputs, domain=OWN_DOMAIN, num_outputs=2)
        model.graph.append(own)
        for old, new in zip(node.outputs, own.outputs, strict=True):
            replace_value(old, new)


def _replace_output(model: ir.Model, layer: SourceLayer, node: ir.Node) -> None:
    """Replace the layer's result by that of the node, [B, N, H D]."""
    result, shape = node.outputs[0], layer.output.shape
    if shape is not None and len(shape) == 2:  # Gemm accepts only two dimensions
        rows = constant(model, "host.rows", np.array([-1, shape[1]], np.int64))
        flat = ir.node("Reshape", [result, rows])
        model.graph.append(flat)
        result = flat.outputs[0]
    replace_value(layer.output, result)


def _score_inputs(model: ir.Model, layer: SourceLayer) -> list[ir.Value | None]:
    """The operator's inputs for sinks and soft cap."""
    cap = np.array([layer.softcap], np.float32)
    return [layer.sinks, constant(model, f"host.softcap.{cap[0]}", cap) if cap else None]


def _attributes(layer: SourceLayer) -> dict[str, Any]:
    return {
        "heads": layer.heads,
        "key_heads": layer.key_heads,
        "scale": layer.node.attributes["scale"].as_float(),
    }


def _graph_input(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.inputs if value.name == name)


def _qkv(model: ir.Model, layer: Layer) -> list[ir.Value | None]:
    """Queries, keys and values; a single packed value if one product computes all of them."""
    parts = [_flatten(model, value) for value in (layer.query, layer.key, layer.value)]
    splits = {part.producer() for part in parts}
    split = splits.pop()
    if not splits and split is not None and list(split.outputs) == parts:
        return [split.inputs[0], None, None]
    return [*parts]


def _flatten(model: ir.Model, value: ir.Value) -> ir.Value:
    """[B, N, H, D] as [B, N, H D]: the input of a preceding Reshape, or the value reshaped."""
    node = value.producer()
    before = node.inputs[0] if node is not None and node.op_type == "Reshape" else None
    if before is not None and before.shape is not None and len(before.shape) == 3:
        return before
    shape = constant(model, "host.flat", np.array([0, 0, -1], np.int64))
    flat = ir.node("Reshape", [value, shape])
    model.graph.append(flat)
    return flat.outputs[0]


def _fuse_sums(model: ir.Model) -> None:
    """Fuse a sum and its norm into one node, which outputs both. ONNX Runtime's operator takes at
    most three dimensions, so sums of rotated heads, which NanoChat norms, are not fused."""
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        x, scale = norm.inputs[:2]
        add = find_producer(x, "Add")
        if add is None or any(_is_weight(value) for value in add.inputs):
            continue
        if (shape := add.outputs[0].shape) is not None and len(shape) > 3:
            continue
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
        fused = ir.node(
            "SkipSimplifiedLayerNormalization", [*add.inputs, scale], {"epsilon": epsilon},
            domain=DOMAIN, num_outputs=4,
        )  # fmt: skip
        model.graph.append(fused)
        for old, new in ((norm.outputs[0], fused.outputs[0]), (add.outputs[0], fused.outputs[3])):
            replace_value(old, new)
        model.graph.remove([norm, add], safe=True)


def _fuse_transposed(model: ir.Model) -> None:
    """Read the tied output matrix without transposing it. With a Transpose node, ONNX Runtime makes
    a transposed copy whenever the graph is loaded, which takes four times as long as preparing the
    matrix (docs/LOG.md)."""
    for product in [node for node in model.graph if node.op_type == "MatMul"]:
        x, right = product.inputs
        turned = find_producer(right, "Transpose")
        if turned is None or not is_transpose(turned, 1, 0) or not _is_weight(turned.inputs[0]):
            continue
        fused = ir.node("FusedMatMul", [x, turned.inputs[0]], {"transB": 1}, domain=DOMAIN)
        model.graph.append(fused)
        replace_value(product.outputs[0], fused.outputs[0])
        model.graph.remove(product, safe=True)


def _is_weight(value: ir.Value | None) -> bool:
    return value is None or value.is_initializer()
