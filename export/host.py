"""The same model for ONNX Runtime on the CPU, with an attention of our own and the same weights.

graph.onnx is what every backend takes. ONNX Runtime runs its attention as six nodes a layer, over
all rows of the cache, and sums in an order that depends on the call. Here it is one node, the
operator of plugins/onnxruntime, which reads valid rows only and whose bits do not depend on the
call. What it has to be told - the rotary tables, and whether the mask is causal or a sliding
window - is not guessed from names: that part of graph.onnx is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from runtime.files.errors import first_line
from runtime.files.manifest import (
    GRAPH_FILE,
    HOST_FILE,
    HOST_WEIGHTS_FILE,
    SCALE_BYTES,
    Cache,
)

from .graph import initializer, saving
from .weights.operators import OWN_DOMAIN, own_operators, put

DOMAIN = "com.microsoft"  # of ONNX Runtime's own operators
SEEN = 16  # queries at each end of a slot whose masks are looked at


class NotLowered(Exception):
    """The graph has no such form; the text is the reason."""


@dataclass(frozen=True)
class _Rotary:
    """What a RotaryEmbedding node rotates by."""

    cos: ir.Value
    sin: ir.Value
    interleaved: int


@dataclass(frozen=True)
class _Layer:
    """Attention as graph.onnx has it. query, key, value: [B, N, H D], before the rotation."""

    node: ir.Node
    end: ir.Value  # [B, N, H D]
    query: ir.Value
    key: ir.Value
    value: ir.Value
    rotary: _Rotary | None
    writes: tuple[ir.Node, ir.Node]  # of keys and values into their caches
    mask: ir.Value
    heads: int
    key_heads: int


def write(folder: Path, capacity: int, cache: Cache | None = None) -> int:
    """Write the graph beside graph.onnx; returns how many nodes it has.

    capacity: rows of the longest text, for which the rotary tables are made. cache: the type of the
    rows, if not that of graph.onnx; what has quantised rows or weights has a weights file of its
    own. Raises NotLowered.
    """
    model = ir.load(folder / GRAPH_FILE)
    quantised = own_operators(model)
    try:
        layers = [_layer(node) for node in model.graph if node.op_type == "Attention"]
        if not layers:
            raise NotLowered("its attention is written out")
        tables, windows = _observe(folder, layers, capacity)
        for layer in layers:
            _replace(model, layer, tables, windows, cache)
    except NotLowered:
        if cache or not quantised:
            raise
    _fuse_sums(model)
    _fuse_transposed(model)
    RemoveUnusedNodesPass()(model)
    model.graph.sort()
    for domain in (DOMAIN, OWN_DOMAIN):
        model.graph.opset_imports[domain] = 1
    if cache or quantised:
        ir.save(model, folder / HOST_FILE, external_data=HOST_WEIGHTS_FILE, **saving())
    else:
        ir.save(model, folder / HOST_FILE)  # the weights stay where graph.onnx has them
    return len(model.graph)


def _layer(node: ir.Node) -> _Layer:
    if len(node.inputs) != 4 or set(node.attributes) != {"scale"}:
        raise NotLowered("its attention has options")
    query, key_cache, value_cache, mask = node.inputs
    writes = (_made_by(key_cache, "TensorScatter"), _made_by(value_cache, "TensorScatter"))
    swap = _only_use(node.outputs[0], "Transpose")
    if not _swaps(swap):
        raise NotLowered("its attention's output is not turned back")
    (query, rotary), (key, other), (value, none) = map(
        _rows, (query, writes[0].inputs[1], writes[1].inputs[1])
    )
    if rotary != other or none is not None:
        raise NotLowered("its queries and keys are not rotated alike")
    assert mask is not None
    return _Layer(
        node, _only_use(swap.outputs[0], "Reshape").outputs[0], query, key, value, rotary, writes,
        mask, _size(node.inputs[0], 1), _size(key_cache, 1),
    )  # fmt: skip


def _made_by(value: ir.Value | None, kind: str) -> ir.Node:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != kind:
        raise NotLowered(f"its attention is not fed by {kind}")
    return node


def _only_use(value: ir.Value, kind: str) -> ir.Node:
    uses = list(value.uses())
    if len(uses) != 1 or uses[0].node.op_type != kind:
        raise NotLowered(f"its attention does not end in {kind}")
    return uses[0].node


def _swaps(node: ir.Node) -> bool:
    """Between [B, N, H, D] and [B, H, N, D]."""
    return node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == (0, 2, 1, 3)


def _size(value: ir.Value | None, axis: int) -> int:
    assert value is not None and value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size


def _rows(value: ir.Value | None) -> tuple[ir.Value, _Rotary | None]:
    """What is turned, and perhaps rotated, to [B, H, N, D]; as [B, N, H, D] or [B, N, H D]."""
    rotary = None
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "RotaryEmbedding" and len(node.inputs) == 3:
        before, cos, sin = node.inputs
        assert before is not None and cos is not None and sin is not None
        rotary = _Rotary(cos, sin, node.attributes.get_int("interleaved", 0))
        node = before.producer()
    if node is None or not _swaps(node):
        raise NotLowered("its heads are not turned in the usual way")
    source = node.inputs[0]
    assert source is not None
    return source, rotary


# What the operator has to be told


def _observe(
    folder: Path, layers: Sequence[_Layer], capacity: int
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, int]]:
    """Rotary tables [capacity, D / 2] by the name of their value; by that of each mask its window,
    0 where it is causal without one. Names: values of the one graph are not those of another."""
    rotaries = [layer.rotary for layer in layers if layer.rotary is not None]
    angles = _names(value for rotary in rotaries for value in (rotary.cos, rotary.sin))
    masks = _names(layer.mask for layer in layers)
    turned = _run_part(folder, angles, positions=(0,), tokens=capacity, rows=1)
    tables = {name: np.ascontiguousarray(a.reshape(capacity, -1)) for name, a in turned.items()}
    tokens = min(capacity, SEEN)
    ends = 0, capacity - tokens
    queries = np.concatenate([np.arange(first, first + tokens) for first in ends])
    seen = _run_part(folder, masks, positions=ends, tokens=tokens, rows=capacity)
    windows = {
        name: _window(mask.reshape(len(queries), capacity), queries) for name, mask in seen.items()
    }
    return tables, windows


def _names(values: Iterable[ir.Value]) -> list[str]:
    return list(dict.fromkeys(str(value.name) for value in values))


def _window(mask: npt.NDArray[np.bool_], queries: npt.NDArray[np.int64]) -> int:
    """0 of a causal mask [T, S] for the queries [T] at these rows, w of one that lets them look at
    w rows, their own among them. Raises NotLowered."""
    ages = np.subtract.outer(queries, np.arange(mask.shape[1]))
    window = int(mask[-1].sum())
    for width, found in ((mask.shape[1], 0), (window, window)):
        if np.array_equal(mask, (ages >= 0) & (ages < width)):
            return found
    raise NotLowered("its mask is neither causal nor a sliding window")


def _run_part(
    folder: Path, names: Sequence[str], *, positions: Sequence[int], tokens: int, rows: int
) -> dict[str, npt.NDArray[Any]]:
    """These values of graph.onnx, [P, ...], for that many tokens from each of P rows on, in a cache
    of that many rows. Only what makes them is run."""
    import onnxruntime as ort

    if not names:
        return {}
    model = ir.load(folder / GRAPH_FILE)
    made = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [made[name] for name in names]
    RemoveUnusedNodesPass()(model)
    model.graph.inputs[:] = used = [value for value in model.graph.inputs if value.uses()]

    def feed(value: ir.Value, position: int) -> npt.NDArray[Any]:
        if value.name == "input_ids":
            return np.zeros((1, tokens), np.int64)
        if value.name == "position":
            return np.full(1, position)
        # A cache, for the number of its rows.
        return np.zeros((1, _size(value, 1), rows, _size(value, 3)), np.float32)

    file = folder / "part.onnx"
    ir.save(model, file)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        found = [
            session.run(list(names), {str(value.name): feed(value, p) for value in used})
            for p in positions
        ]
    except Exception as error:  # noqa: BLE001 - ONNX Runtime raises a dozen unrelated classes
        raise NotLowered(f"ONNX Runtime cannot run a part of it: {first_line(error)}") from None
    finally:
        file.unlink()
    return {name: np.stack(values) for name, *values in zip(names, *found, strict=True)}


# The new nodes


def _constant(model: ir.Model, name: str, array: npt.NDArray[Any]) -> ir.Value:
    found = model.graph.initializers.get(name)
    return initializer(model, ir.tensor(array, name=name)) if found is None else found


def _replace(
    model: ir.Model,
    layer: _Layer,
    tables: dict[str, npt.NDArray[np.float32]],
    windows: dict[str, int],
    cache: Cache | None,
) -> None:
    rotary = layer.rotary
    angles = []
    for value in (rotary.cos, rotary.sin) if rotary else ():
        angles.append(_constant(model, f"host.{value.name}", tables[str(value.name)]))
    attributes = {
        "heads": layer.heads,
        "key_heads": layer.key_heads,
        "scale": layer.node.attributes["scale"].as_float(),
        "window": windows[str(layer.mask.name)],
        "interleaved": rotary.interleaved if rotary else 0,
    }
    caches = [write.inputs[0] for write in layer.writes]
    position = next(value for value in model.graph.inputs if value.name == "position")
    node = ir.node(
        "QuantizedCacheAttention" if cache else "Attention",
        [*_together(model, layer), *caches, position, *angles],
        attributes,
        domain=OWN_DOMAIN,
        num_outputs=3,
    )
    model.graph.append(node)
    olds = [layer.end, *(write.outputs[0] for write in layer.writes)]
    for old, new in zip(olds, node.outputs, strict=True):
        put(old, new)
    for rows in (*caches, *node.outputs[1:]) if cache else ():
        assert rows is not None and rows.shape is not None
        *sizes, _ = rows.shape
        rows.dtype = ir.DataType.INT8
        rows.shape = ir.Shape([*sizes, _size(rows, 3) + SCALE_BYTES])


def _together(model: ir.Model, layer: _Layer) -> list[ir.Value | None]:
    """Queries, keys and values; the first alone where they are one product's."""
    parts = [_flat(model, value) for value in (layer.query, layer.key, layer.value)]
    splits = {part.producer() for part in parts}
    split = splits.pop()
    if not splits and split is not None and list(split.outputs) == parts:
        return [split.inputs[0], None, None]
    return [*parts]


def _flat(model: ir.Model, value: ir.Value) -> ir.Value:
    """[B, N, H D] from [B, N, H, D]: what that was made from, where it was just reshaped."""
    node = value.producer()
    if node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        return node.inputs[0]
    shape = _constant(model, "host.flat", np.array([0, 0, -1], np.int64))
    flat = ir.node("Reshape", [value, shape])
    model.graph.append(flat)
    return flat.outputs[0]


def _fuse_sums(model: ir.Model) -> None:
    """A sum and the norm of it in one node, which hands out both."""
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        x, scale = norm.inputs[:2]
        add = x.producer() if x is not None else None
        if add is None or add.op_type != "Add" or any(_is_weight(value) for value in add.inputs):
            continue
        epsilon = norm.attributes.get_float("epsilon", 1e-5)
        fused = ir.node(
            "SkipSimplifiedLayerNormalization", [*add.inputs, scale], {"epsilon": epsilon},
            domain=DOMAIN, num_outputs=4,
        )  # fmt: skip
        model.graph.append(fused)
        for old, new in ((norm.outputs[0], fused.outputs[0]), (add.outputs[0], fused.outputs[3])):
            put(old, new)
        model.graph.remove([norm, add], safe=True)


def _fuse_transposed(model: ir.Model) -> None:
    """The tied output matrix, read as it lies. What transposes it in a node of its own has ONNX
    Runtime make a transposed copy of it first whenever the graph is opened, which takes four times
    as long as preparing the matrix does (docs/LOG.md)."""
    for product in [node for node in model.graph if node.op_type == "MatMul"]:
        x, right = product.inputs
        turned = right.producer() if right is not None else None
        if turned is None or turned.op_type != "Transpose" or not _is_weight(turned.inputs[0]):
            continue
        weight = turned.inputs[0]
        if tuple(turned.attributes["perm"].as_ints()) != (1, 0):
            continue
        fused = ir.node("FusedMatMul", [x, weight], {"transB": 1}, domain=DOMAIN)
        model.graph.append(fused)
        put(product.outputs[0], fused.outputs[0])
        model.graph.remove(product, safe=True)


def _is_weight(value: ir.Value | None) -> bool:
    return value is None or value.is_initializer()
