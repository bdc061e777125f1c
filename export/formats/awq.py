"""AWQ as written by AutoAWQ ("gemm"): int32 words along N, with a permuted order of outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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

# The place of each of eight outputs in a word.
_OUTPUT_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def packed(name: str, folder: Path, config: dict[str, Any]) -> Packed:
    """config: quantization_config of config.json. Raises OutriderError "checkpoint" for another
    layout or width."""
    bits = config.get("bits", config.get("w_bit"))
    layout = str(config.get("version", "gemm")).lower()
    if bits != 4:
        raise unsupported(name, f"AWQ with bits = {bits!r}")
    if layout != "gemm":
        raise unsupported(name, f"AWQ in the layout {layout!r}")
    size = config.get("group_size", config.get("q_group_size", -1))
    details = "4 bits, " + ("whole rows" if size == -1 else f"groups of {size}")
    return Packed("AWQ", 4, details, lambda: read_packed(name, folder, {"qweight": _weight}))


def _weight(module: PackedModule) -> Lazy:
    """Read qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N]."""
    words, zeros, scales = map(module.take, ("qweight", "qzeros", "scales"))
    (width, _), (count, rows) = words.sizes(2), scales.sizes(2)
    module.expect("qweight", words, {"I32"}, width, rows // 8)
    module.expect("qzeros", zeros, {"I32"}, count, rows // 8)
    module.expect_scales("scales", scales, count, rows)
    if not count or width % count:
        raise module.damaged(f"scales has {count} groups for {width} columns")

    def make() -> Levels:
        return make_levels(
            _unpack_outputs(words[...]).T, scales[...].T, _unpack_outputs(zeros[...]).T
        )

    return Lazy(make, (rows, width))


def _unpack_outputs(words: torch.Tensor) -> torch.Tensor:
    """Unpack [..., N / 8] words to [..., N]."""
    permuted = unpack(words, 4)
    return permuted.reshape(-1, 8)[:, _OUTPUT_ORDER].reshape(permuted.shape)
