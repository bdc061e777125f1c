"""The interface through which the decoder samples a round.

`reference.NumpySampler` and `native.RoundSampler` implement it and give the same tokens: same
rules, same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .processors import LogitsProcessor, apply_processors
from .rules import Verdict
from .warp import SamplingParams

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """One slot's part of a round.

    gamma: number of draft tokens, 0..width; -1 if the slot does not take part. position: absolute
    index of the round's first token; the round must end below 2^32. index: the slot's number.
    context: int64 [n], all ids before the round, read for penalties and processors; None if there
    are none. output_start: index in `context` at which the output begins. suppress: int64 [n], ids
    with probability 0 in the round's rows 0 .. suppress_rows - 1. processors: change the logits in
    place. Raises ValueError for numbers outside their range.
    """

    params: SamplingParams
    gamma: int
    position: int
    index: int = 0
    context: Ids | None = None
    suppress: Ids | None = None
    suppress_rows: int = 0
    output_start: int = 0
    processors: tuple[LogitsProcessor, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.position <= self.position + max(self.gamma, 0) < 2**32:
            raise ValueError(f"a round from position {self.position} does not end below 2^32")
        if self.gamma < -1 or self.index < 0:
            raise ValueError(f"gamma={self.gamma} or index={self.index} is out of range")

    def text_with(self, drafted: Sequence[int] | Ids) -> Ids:
        """All ids before the row after `drafted`."""
        drafts = np.array(drafted, np.int64)
        return drafts if self.context is None else np.concatenate([self.context, drafts])

    def suppressed_after(self, drafted: Sequence[int] | Ids) -> Ids | Sequence[int]:
        """The ids with probability 0 in the row after `drafted`, apart from the processors'."""
        if self.suppress is None or len(drafted) >= self.suppress_rows:
            return ()
        return self.suppress

    def row_name(self, row: int, model: str) -> str:
        """The name, for errors, of the row after `row` drafts. model: "target" or "draft"."""
        return f"{model}, slot {self.index}, position {self.position + row}"

    def apply_processors(self, row: Array, drafted: Sequence[int] | Ids, model: str) -> None:
        """Apply the processors to this model's row [V] after `drafted`. Raises OutriderError
        "numeric" or "option"."""
        if self.processors:
            apply_processors(
                self.processors, row, self.params, self.text_with(drafted),
                self.suppressed_after(drafted), of_draft=model == "draft",
                where=self.row_name(len(drafted), model), output_start=self.output_start,
            )  # fmt: skip


class Sampler(Protocol):
    """Samples one round at a time: call `begin`, then `draw` for each draft step or `set_drafts`
    once, then `verify`.

    vocab_size: the width that target and draft share.
    """

    vocab_size: int

    def begin(self, slots: Sequence[SlotSampling]) -> None:
        """Start a round of these slots. All results are in this order."""

    def draw(self, logits: Array, step: int, *, first_slot: int = 0) -> Ids:
        """Draw the draft token of `step` for every slot with step < gamma.

        logits: [S, V] of the draft, for the slots from `first_slot` on. The caller does not change
        them before `verify`, and passes them to it again. Returns int64 [B], with undefined values
        where step >= gamma. Raises OutriderError("numeric") for a broken row.
        """

    def reduce_gamma(self, b: int, gamma: int) -> None:
        """Reduce the number of draft tokens of the b-th slot to gamma."""

    def set_drafts(self, drafts: Sequence[Sequence[int]], first_slot: int = 0) -> None:
        """Set the draft tokens of every slot, gamma each, in place of `draw`.

        Their distributions are those of the draft logits passed to `verify`, for the slots from
        `first_slot` on; without logits, or at temperature 0, they are point masses.
        """

    def verify(
        self, logits: Array, draft_logits: Sequence[Array] | None = None, *, first_slot: int = 0
    ) -> list[Verdict]:
        """The outcome of the round for every slot.

        logits: [S, K, V] of the target, K > gamma. draft_logits: the logits that the drafts were
        drawn from, step by step; None if there are none. Raises OutriderError("numeric") for a
        broken row.
        """
