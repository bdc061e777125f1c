"""Who owns which length: the state of one sequence, and the table of cache slots.

A cache row is valid when it lies below its model's length; a length is an integer here and nothing
in the engines, so rolling back is making it smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .files.errors import OutriderError


@dataclass(slots=True)
class Slot:
    """One sequence and the committed rows of its two caches.

    Between rounds `tokens[-1]` is the pending token: emitted, in neither cache.
    """

    index: int
    tokens: list[int] = field(default_factory=list)  # all text so far, prompt included
    target_len: int = 0
    draft_len: int = 0

    @property
    def pending(self) -> int:
        return self.tokens[-1]

    def commit(self, tokens: Sequence[int], gamma: int) -> None:
        """Append the n accepted drafts and the token after them.

        gamma: how many were drafted. The target computed the rows of the old pending token and
        of every accepted draft. The draft fed itself x1..x(gamma-1), so after a fully accepted
        round it has not computed the row of x(gamma): its length stays one short.
        """
        before = len(self.tokens)
        accepted = len(tokens) - 1
        self.tokens.extend(tokens)
        self.target_len = before + accepted
        if gamma:
            self.draft_len = before + min(accepted, gamma - 1)

    def roll_back(self, length: int) -> None:
        """Keep the first `length` tokens; the last of them becomes pending again."""
        del self.tokens[length:]
        self.target_len = min(self.target_len, length - 1)
        self.draft_len = min(self.draft_len, length - 1)


class SlotTable:
    """Hands out slots, lowest index first, so that the busy ones stay close together."""

    def __init__(self, count: int):
        self._slots: list[Slot | None] = [None] * count

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        return self._slots.count(None)

    def acquire(self) -> Slot:
        """An empty slot. Raises OutriderError("busy") when all are taken."""
        for index, slot in enumerate(self._slots):
            if slot is None:
                self._slots[index] = slot = Slot(index)
                return slot
        raise OutriderError(
            "busy",
            f"all {len(self)} slots are in use",
            "Wait for a request to finish, or load the bundle with more slots.",
        )

    def release(self, slot: Slot) -> None:
        if self._slots[slot.index] is slot:
            self._slots[slot.index] = None

    def __getitem__(self, index: int) -> Slot | None:
        return self._slots[index]
