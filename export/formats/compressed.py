"""compressed-tensors: packed integers, plain int8 and float8, each with scales."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from .packed import (
    Lazy,
    Levels,
    Make,
    Packed,
    PackedModule,
    make_levels,
    read_packed,
    unpack,
    unsupported,
)

_LAYOUTS = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"}
# Parameters for quantising activations and cache, which this export does not use.
_ACTIVATION_SUFFIXES = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point",
    ".q_scale", ".k_scale", ".v_scale", ".q_zero_point", ".k_zero_point", ".v_zero_point",
)  # fmt: skip


def packed(name: str, folder: Path, config: dict[str, Any]) -> Packed:
    """config: quantization_config of config.json. Raises OutriderError "checkpoint" for another
    layout or width."""
    schemes = config.get("config_groups")
    if not isinstance(schemes, dict) or not all(isinstance(s, dict) for s in schemes.values()):
        raise unsupported(name, f"compressed-tensors with config_groups = {str(schemes)[:40]}")
    layouts = {config.get("format"), *(scheme.get("format") for scheme in schemes.values())}
    if unknown := sorted(map(str, layouts - _LAYOUTS - {None, "mixed-precision"})):
        raise unsupported(name, f"compressed-tensors in the layout {unknown[0]!r}")
    sparse = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparse != "dense":
        raise unsupported(name, f"compressed-tensors in the layout {sparse!r}")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise unsupported(name, "compressed-tensors with rotations (transform_config)")
    weights = [scheme["weights"] for scheme in schemes.values() if scheme.get("weights")]
    for scheme in weights:
        if (scheme.get("type", "int"), scheme.get("num_bits")) not in _DETAILS:
            what = f"{scheme.get('type', 'int')} of {scheme.get('num_bits')!r} bits"
            raise unsupported(name, f"compressed-tensors with {what}")
    if not weights:
        raise unsupported(name, "compressed-tensors whose weights are not quantised")
    has_other_schemes = config.get("kv_cache_scheme") or any(
        scheme.get(part) for scheme in schemes.values() for part in _ACTIVATIONS
    )
    blocks = next((s["block_structure"] for s in weights if s.get("block_structure")), None)
    readers: dict[str, Make] = {"weight_packed": _unpacked, "weight_scale": partial(_plain, blocks)}
    return Packed(
        "compressed-tensors",
        min(int(scheme["num_bits"]) for scheme in weights),
        " and ".join(dict.fromkeys(map(_details, weights))),
        lambda: read_packed(name, folder, readers, ignored=_ACTIVATION_SUFFIXES),
        "quantisation of its activations or cache is not carried over" if has_other_schemes else "",
    )


_ACTIVATIONS = ("input_activations", "output_activations")
_DETAILS = {("int", 4): "4 bits", ("int", 8): "8 bits", ("float", 8): "float8"}


def _details(scheme: dict[str, Any]) -> str:
    size, strategy = scheme.get("group_size"), scheme.get("strategy")
    kind = _DETAILS[scheme.get("type", "int"), scheme["num_bits"]]
    where = f"groups of {size}" if size and size > 0 else f"a scale for each {strategy or 'tensor'}"
    return f"{kind}, {where}" + ("" if scheme.get("symmetric", True) else ", with zero points")


def _unpacked(module: PackedModule) -> Lazy:
    """Read weight_packed int32 [N, ceil(K * bits / 32)], weight_scale [N, G], weight_shape int64
    [2], and optionally weight_zero_point int32 [ceil(N * bits / 32), G] and weight_g_idx [K]. All
    integers are stored with 2 ** (bits - 1) added."""
    words, scales, shape = map(module.take, ("weight_packed", "weight_scale", "weight_shape"))
    zeros = module.take_optional("weight_zero_point")
    order = module.take_optional("weight_g_idx")
    rows, width = (*map(int, shape[...].flatten()), 0, 0)[:2]
    scales = _as_columns(scales)
    bits = next((b for b in (4, 8) if words.shape == (rows, -(-width * b // 32))), 0)
    if not bits:
        raise module.damaged(f"weight_packed is {list(words.shape)} for {rows} x {width}")
    module.expect("weight_packed", words, {"I32"}, *words.shape)
    count = scales.shape[-1]
    _expect_groups(module, scales, rows, width, ordered=order is not None)
    if zeros is not None:
        zeros = _as_columns(zeros)
        several = -(-rows * bits // 32) if zeros.dtype == "I32" else rows
        module.expect("weight_zero_point", zeros, {"I32", "I8"}, several, count)
    group = None
    if order is not None:
        module.expect("weight_g_idx", order, {"I32", "I64"}, width)
        if not bool((order[...] < 0).any()):  # -1 means that the columns are in order
            group = module.groups("weight_g_idx", order, count)
    zero_level = 2 ** (bits - 1)

    def make() -> Levels:
        zero = None if zeros is None else zeros[...]
        if zero is not None and zero.dtype == torch.int32:
            zero = unpack(zero.T, bits).T[:rows] - zero_level
        levels = unpack(words[...], bits)[:, :width] - zero_level
        return make_levels(levels, scales[...], zero, group)

    return Lazy(make, (rows, width))


def _plain(blocks: list[int] | None, module: PackedModule) -> Lazy:
    """Read weight int8 or float8 [N, K], weight_scale [N, G], [N], [1], or [ceil(N / b), K / c] for
    blocks of b x c, and optionally weight_zero_point int8, of the scale's shape."""
    weight, scales = map(module.take, ("weight", "weight_scale"))
    zeros = module.take_optional("weight_zero_point")
    module.expect("weight", weight, {"I8", "F8_E4M3"}, *weight.sizes(2))
    rows, width = weight.shape
    scales = _as_columns(scales)
    if zeros is not None:
        zeros = _as_columns(zeros)
        module.expect("weight_zero_point", zeros, {"I8", "F8_E4M3"}, *scales.shape)
    if blocks and scales.shape[0] == -(-rows // blocks[0]):
        rows_per_scale = blocks[0]
    else:
        rows_per_scale = rows if scales.shape[0] == 1 else 1

    def repeat_rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(rows_per_scale, 0)[:rows]

    group = None  # block of each column; the last block may be partial
    if blocks and scales.shape[1] == -(-width // blocks[1]):
        group = torch.arange(width) // blocks[1]
    elif blocks and scales.shape[1] > 1:
        what = f"compressed-tensors with {width} columns in blocks of {blocks[1]}"
        raise unsupported(module.checkpoint, what)
    scales_by_row = Lazy(
        lambda: repeat_rows(scales[...]),
        (min(rows, scales.shape[0] * rows_per_scale), scales.shape[1]),
    )
    _expect_groups(module, scales_by_row, rows, width, ordered=group is not None)

    def make() -> Levels:
        zero = None if zeros is None else repeat_rows(zeros[...])
        return make_levels(weight[...], scales_by_row[...], zero, group)

    return Lazy(make, (rows, width))


def _as_columns(tensor: Lazy) -> Lazy:
    """[N] or a scalar as [N, 1]."""
    if len(tensor.shape) > 1:
        return tensor
    shape = (*tensor.shape, 1, 1)[:2]
    return Lazy(lambda: tensor[...].reshape(shape), shape, tensor.dtype)


def _expect_groups(
    module: PackedModule, scales: Lazy, rows: int, width: int, *, ordered: bool
) -> None:
    """Check the shape of the scales. ordered: whether the group of each column is given."""
    count = scales.shape[-1]
    module.expect_scales("weight_scale", scales, rows, count)
    if not count or (width % count and not ordered):
        raise module.damaged(f"weight_scale has {count} groups for {width} columns")
