"""A quantised matrix: whole levels, and a scale for each block of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Bits = Literal[4, 8]
BLOCK = 32  # weights along K that share a scale
# Lowest and highest level.
RANGE: dict[int, tuple[int, int]] = {4: (-8, 7), 8: (-127, 127)}


@dataclass(frozen=True)
class Quantised:
    """W [N, K] = level * scale.

    levels: int8 [N, K], of `RANGE[bits]`. scales: float16 [N, ceil(K / 32)], finite, of either
    sign; one that is 0 has only levels 0.
    """

    levels: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float16]
    bits: Bits

    def dense(self) -> npt.NDArray[np.float32]:
        """float32 [N, K], exact: a level has 8 bits, a scale 11, and float32 24."""
        scales = self.scales.astype(np.float32).repeat(BLOCK, axis=1)
        return self.levels * scales[:, : self.levels.shape[1]]
