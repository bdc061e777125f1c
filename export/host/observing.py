"""Determine the operators' tables, windows and biases by running graph.onnx, not from names."""

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
from runtime.files.graphs import GRAPH_FILE

from .attention import Layer, NotLowered, SourceLayer, size

Floats = npt.NDArray[np.float32]
EXAMINED_QUERIES = 16  # queries at each end of a slot whose masks are examined
# A key is masked if a value below this is added to its score.
MASKED_BELOW = float(np.finfo(np.float32).min) / 2
# OUTRIDER_ATTENTION_KEYS: padding of a bias for keys after the query, which are masked.
BIAS_PADDING = 64


@dataclass(frozen=True)
class Observed:
    """By the names of values in graph.onnx, as value objects belong to one graph only.

    tables: rotary tables, [capacity, D / 2]. windows: of each mask, 0 if it is purely causal.
    biases: of masks that are added to scores, [H, capacity + BIAS_PADDING], farthest key first.
    """

    tables: dict[str, Floats]
    windows: dict[str, int]
    biases: dict[str, Floats]


def observe(folder: Path, layers: Sequence[Layer], capacity: int) -> Observed:
    """Run the parts of graph.onnx that compute these. Raises NotLowered."""
    rotaries = [layer.rotary for layer in layers if layer.rotary is not None]
    angles = _names(value for rotary in rotaries for value in (rotary.cos, rotary.sin))
    angle_values = _run_part(folder, angles, positions=(0,), tokens=capacity, rows=1)
    tables = {
        name: np.ascontiguousarray(a.reshape(capacity, -1)) for name, a in angle_values.items()
    }
    tokens = min(capacity, EXAMINED_QUERIES)
    ends = 0, capacity - tokens
    queries = np.concatenate([np.arange(first, first + tokens) for first in ends])
    masks = _names(layer.mask for layer in layers)
    windows, biases = {}, {}
    for name, mask in _run_part(
        folder, masks, positions=ends, tokens=tokens, rows=capacity
    ).items():
        # [P, 1, H or 1, N, S] to [H, P N, S]
        scores = mask[:, 0].swapaxes(0, 1).reshape(-1, len(queries), capacity)
        visible = scores if scores.dtype == bool else scores > MASKED_BELOW
        windows[name] = window_of(visible[0], queries)
        if scores.dtype != bool:
            biases[name] = bias_of(scores, queries)
    return Observed(tables, windows, biases)


def check_source_masks(folder: Path, layers: Sequence[SourceLayer]) -> None:
    """Raise NotLowered unless each query sees exactly the rows of its source, without a bias."""
    masks = _names(layer.mask for layer in layers if layer.mask is not None)
    rows, length = 7, 5
    for mask in _run_part(
        folder, masks, positions=(0, 2), tokens=3, rows=rows, length=length
    ).values():
        visible = mask if mask.dtype == bool else mask > MASKED_BELOW
        has_no_bias = mask.dtype == bool or not mask[visible].any()
        if not has_no_bias or (visible != (np.arange(rows) < length)).any():
            raise NotLowered("its mask of the source does not cover exactly the source's rows")


def window_of(mask: npt.NDArray[np.bool_], queries: npt.NDArray[np.int64]) -> int:
    """The window of a mask [T, S] for the queries [T] at these rows: 0 if it is causal, w if each
    query sees w rows, its own included. Raises NotLowered for other masks."""
    ages = np.subtract.outer(queries, np.arange(mask.shape[1]))
    window = int(mask[-1].sum())
    for width, result in ((mask.shape[1], 0), (window, window)):
        if np.array_equal(mask, (ages >= 0) & (ages < width)):
            return result
    raise NotLowered("its mask is neither causal nor a sliding window")


def bias_of(scores: Floats, queries: npt.NDArray[np.int64]) -> Floats:
    """The bias by distance, [H, S + BIAS_PADDING], from what is added to scores [H, T, S] for the
    queries [T] at these rows, the last of which is the last row. Raises NotLowered if it does not
    depend on the distance alone."""
    rows = np.arange(scores.shape[2])
    table = np.pad(scores[:, -1], ((0, 0), (0, BIAS_PADDING)))
    for row, found in zip(queries, scores.swapaxes(0, 1), strict=True):
        behind = rows[: row + 1]
        if not np.array_equal(found[:, behind], table[:, len(rows) - 1 + behind - row]):
            raise NotLowered("its bias does not depend on the distance alone")
    return np.ascontiguousarray(table)


def _names(values: Iterable[ir.Value]) -> list[str]:
    return list(dict.fromkeys(str(value.name) for value in values))


def _run_part(
    folder: Path,
    names: Sequence[str],
    *,
    positions: Sequence[int],
    tokens: int,
    rows: int,
    length: int = 1,
) -> dict[str, npt.NDArray[Any]]:
    """These values of graph.onnx, [P, ...], for `tokens` tokens from each of P positions on, in a
    cache of `rows` rows, with a source of `length` rows. Only the nodes that compute them are
    run."""
    import onnxruntime as ort

    if not names:
        return {}
    model = ir.load(folder / GRAPH_FILE)
    values_by_name = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs[:] = [values_by_name[name] for name in names]
    RemoveUnusedNodesPass()(model)
    model.graph.inputs[:] = used = [value for value in model.graph.inputs if value.uses()]

    def feed(value: ir.Value, position: int) -> npt.NDArray[Any]:
        if value.name == "input_ids":
            return np.zeros((1, tokens), np.int64)
        if value.name in ("position", "source_length"):
            return np.full(1, position if value.name == "position" else length)
        # A cache, of which only the number of rows matters.
        assert value.shape is not None
        own_rows = value.shape[2] if isinstance(value.shape[2], int) else rows
        return np.zeros((1, size(value, 1), own_rows, size(value, 3)), np.float32)

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
