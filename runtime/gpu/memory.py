"""The device memory of a round: all static buffers in one place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..backends.cuda import Cuda
from ..sampling import kernel
from .launch import SEQUENCE

MAX_END_IDS = 256  # end-of-text ids per request


def step_stride(slots: int, row_bytes: int) -> int:
    """Bytes from one draft step's logits to the next: TensorRT can write only to multiples of 256
    bytes."""
    return -(-slots * row_bytes // 256) * 256


@lru_cache(maxsize=64)
def results_dtype(batch: int, gamma: int) -> np.dtype[Any]:
    """The results of a round of B slots and gamma drafts for the host. clock: see
    outrider_bookkeeping."""
    each = (batch, gamma)
    return np.dtype([
        ("verdicts", kernel.VERDICT, (batch,)), ("ratios", "f8", each), ("drafts", "i8", each),
        ("clock", "u8", (3,)),
    ])  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """The sizes that the buffers are made for. target_row, draft_row: bytes of a row of the model's
    logits, 0 without a draft."""

    slots: int
    max_gamma: int
    max_len: int
    capacity: int
    target_row: int
    draft_row: int

    def bytes(self) -> dict[str, int]:
        """Bytes of each buffer, for B slots and G = max_gamma; a round of fewer slots or steps uses
        the front."""
        slots, gamma = self.slots, self.max_gamma
        texts = 8 * slots * self.max_len
        return {
            "sequences": slots * SEQUENCE.itemsize,
            "slots": slots * kernel.SLOT.itemsize,
            "gammas": 4 * slots,  # int32 [B]
            "tokens": texts,  # int64 [B, max_len]
            "draft_tokens": texts,
            "ends": 8 * slots * MAX_END_IDS,  # int64 [B, MAX_END_IDS]
            # int64 [capacity + 1]: 0, 1, 2 ...; positions and indices point into it
            "counting": 8 * (self.capacity + 1),
            "one": 8,  # int64 [1]: 1, the index of the second of two tokens
            "draft_ids": 16 * slots,  # int64 [B, 2]
            "draft_position": 8 * slots,  # int64 [B]
            "step_ids": 8 * slots,
            "step_position": 8 * slots,
            "target_ids": 8 * slots * (gamma + 1),  # int64 [B, G + 1]
            "target_position": 8 * slots,
            "rows": slots * gamma * kernel.ROW.itemsize,
            "results": results_dtype(slots, gamma).itemsize,
            # [G, B, V], one step after the other, and [B, G + 1, V]
            "draft_logits": gamma * step_stride(slots, self.draft_row),
            "target_logits": slots * (gamma + 1) * self.target_row,
        }


class Buffers(SimpleNamespace):
    """Device addresses by the names of `Sizes.bytes`, zeroed except for `counting` and `one`.
    Raises OutriderError "memory"."""

    def __init__(self, cuda: Cuda, sizes: Sizes, stream: int):
        super().__init__(**{name: cuda.allocate(n) for name, n in sizes.bytes().items()})
        cuda.upload(self.counting, np.arange(sizes.capacity + 1, dtype=np.int64), stream)
        cuda.upload(self.one, np.ones(1, np.int64), stream)
