"""The device memory of a round: every static buffer, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.cuda import Cuda
from ..files.manifest import MOST_GAMMA
from ..sampling import kernel
from .launch import SEQUENCE

MOST_ENDS = 256  # ids that end a text
CLOCKS = 3


def step_bytes(slots: int, width: int) -> int:
    """From one draft step's logits to the next: TensorRT writes to multiples of 256 bytes alone."""
    return -(-4 * slots * width // 256) * 256


@dataclass(frozen=True)
class Sizes:
    """What the buffers are for. widths: V of the two models' logits, 0 without a draft."""

    slots: int
    max_gamma: int
    max_len: int
    capacity: int
    target_width: int
    draft_width: int

    def __post_init__(self) -> None:
        assert 0 <= self.max_gamma <= MOST_GAMMA


@dataclass(frozen=True)
class Buffers:
    """Device addresses. B slots, G = max_gamma; a round of fewer slots or steps uses the front."""

    sequences: int  # SEQUENCE [B]
    slots: int  # kernel.SLOT [B]
    turns: int  # int32 [B]
    tokens: int  # int64 [B, max_len]
    draft_tokens: int  # int64 [B, max_len]
    ends: int  # int64 [B, MOST_ENDS]
    counting: int  # int64 [capacity + 1]: 0, 1, 2 ...; a position and an index is one of them
    one: int  # int64 [1]: which of two tokens gets logits
    draft_ids: int  # int64 [B, 2]
    draft_position: int  # int64 [B]
    step_ids: int  # int64 [B]
    step_position: int  # int64 [B]
    target_ids: int  # int64 [B, G + 1]
    target_position: int  # int64 [B]
    rows: int  # kernel.ROW [B, G]
    results: int  # see `Results`
    draft_logits: int  # float32 [G, B, V]: a step after the other, see `step_bytes`
    target_logits: int  # float32 [B, G + 1, V]

    @staticmethod
    def bytes(sizes: Sizes) -> dict[str, int]:
        """Of each buffer."""
        slots, gamma = sizes.slots, sizes.max_gamma
        texts = 8 * slots * sizes.max_len
        return {
            "sequences": slots * SEQUENCE.itemsize,
            "slots": slots * kernel.SLOT.itemsize,
            "turns": 4 * slots,
            "tokens": texts,
            "draft_tokens": texts,
            "ends": 8 * slots * MOST_ENDS,
            "counting": 8 * (sizes.capacity + 1),
            "one": 8,
            "draft_ids": 16 * slots,
            "draft_position": 8 * slots,
            "step_ids": 8 * slots,
            "step_position": 8 * slots,
            "target_ids": 8 * slots * (gamma + 1),
            "target_position": 8 * slots,
            "rows": slots * gamma * kernel.ROW.itemsize,
            "results": Results.size(slots, gamma),
            "draft_logits": gamma * step_bytes(slots, sizes.draft_width),
            "target_logits": 4 * slots * (gamma + 1) * sizes.target_width,
        }

    @staticmethod
    def allocate(cuda: Cuda, sizes: Sizes, stream: int) -> Buffers:
        """Zeroed, but for `counting`. Raises OutriderError "memory"."""
        made = Buffers(**{name: cuda.allocate(n) for name, n in Buffers.bytes(sizes).items()})
        cuda.upload(made.counting, np.arange(sizes.capacity + 1, dtype=np.int64), stream)
        cuda.upload(made.one, np.ones(1, np.int64), stream)
        return made


class Results:
    """What a round of B slots and gamma drafts tells the host, one piece of memory after the other:
    verdicts kernel.VERDICT [B], ratios float64 [B, gamma], drafts int64 [B, gamma], the clock of
    outrider_loop uint64 [3]."""

    def __init__(self, batch: int, gamma: int):
        self.batch, self.gamma = batch, gamma
        self.verdicts = 0
        self.ratios = batch * kernel.VERDICT.itemsize
        self.drafts = self.ratios + 8 * batch * gamma
        self.clock = self.drafts + 8 * batch * gamma
        self.end = self.clock + 8 * CLOCKS

    @staticmethod
    def size(batch: int, gamma: int) -> int:
        return Results(batch, gamma).end

    def views(self, memory: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[Any]]:
        """verdicts, ratios, drafts, clock as views of the memory."""
        shape = (self.batch, self.gamma)
        yield memory[: self.ratios].view(kernel.VERDICT)
        yield memory[self.ratios : self.drafts].view(np.float64).reshape(shape)
        yield memory[self.drafts : self.clock].view(np.int64).reshape(shape)
        yield memory[self.clock : self.end].view(np.uint64)
