"""What the round asks of a model, whatever backend runs it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class Engine(Protocol):
    """One model with its cache slots.

    A slot's length is the caller's integer, not the engine's: rows at or beyond the position of a
    call are overwritten by it or masked in it, so rolling back is calling with a lower position.

    slots: how many sequences it holds. capacity: rows S of each. chunk: the largest N of a call.
    vocab_size: V of the logits. buffers: how many calls' logits it can hold, evenly spaced in
    memory where the calls have one shape.
    """

    slots: int
    capacity: int
    chunk: int
    vocab_size: int
    buffers: int

    def forward(
        self,
        input_ids: Ids,
        position: Ids,
        logits_index: Ids,
        first_slot: int = 0,
        buffer: int = 0,
    ) -> Logits:
        """Run N consecutive tokens for each of the B slots that start at `first_slot`.

        input_ids: int64 [B, N]. position: int64 [B], the row that the first of them goes to;
        position + N <= capacity is the caller's duty. logits_index: int64 [K], which of the N
        get logits. Returns float32 [B, K, V], a view of that buffer: valid until the next call
        with it.
        """
        ...
