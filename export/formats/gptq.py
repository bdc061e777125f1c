"""GPTQ as written by AutoGPTQ and GPTQModel: int32 words along K, zero points minus one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from .packed import (
    Lazy,
    Levels,
    Packed,
    PackedModule,
    make_levels,
    read_packed,
    unpack,
    unsupported,
)

# By file layout: the first one stores a zero point z as z - 1.
_ZERO_POINT_OFFSET = {"gptq": 1, "gptq_v2": 0}


def packed(name: str, folder: Path, config: dict[str, Any]) -> Packed:
    """config: quantization_config of config.json. Raises OutriderError "checkpoint" for another
    layout or width."""
    bits, layout = config.get("bits"), config.get("checkpoint_format", "gptq")
    if bits not in (4, 8):
        raise unsupported(name, f"GPTQ with bits = {bits!r}")
    if layout not in _ZERO_POINT_OFFSET or config.get("is_marlin_format"):
        raise unsupported(name, f"GPTQ in the layout {layout!r}")
    size = config.get("group_size", -1)
    details = f"{bits} bits, " + ("whole rows" if size == -1 else f"groups of {size}")
    return Packed(
        "GPTQ",
        bits,
        details + (", columns out of order" if config.get("desc_act") else ""),
        lambda: read_packed(
            name, folder, {"qweight": partial(_weight, _ZERO_POINT_OFFSET[layout])}
        ),
    )


def _weight(offset: int, module: PackedModule) -> Lazy:
    """Read qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], scales [G, N], and
    g_idx int32 [K], the group of each column of W. Layers of one model may have 4 or 8 bits."""
    words, zeros, scales, order = map(module.take, ("qweight", "qzeros", "scales", "g_idx"))
    (height, rows), (count, _), (width,) = words.sizes(2), scales.sizes(2), order.sizes(1)
    bits = 32 * height // max(width, 1)
    if bits not in (4, 8):
        raise module.damaged(f"qweight has {bits} bits per weight")
    module.expect("qweight", words, {"I32"}, width * bits // 32, rows)
    module.expect("qzeros", zeros, {"I32"}, count, rows * bits // 32)
    module.expect_scales("scales", scales, count, rows)
    module.expect("g_idx", order, {"I32", "I64"}, width)
    group = module.groups("g_idx", order, count)

    def make() -> Levels:
        zero = (unpack(zeros[...], bits) + offset) & (2**bits - 1)
        return make_levels(unpack(words[...].T, bits), scales[...].T, zero.T, group)

    return Lazy(make, (rows, width))
