"""Who owns which length: the state of one sequence, and the table of cache slots.

A cache row is valid when it lies below its model's length; a length is an integer here and nothing
in the engines, so rolling back is making it smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .backends.engine import HeldRows, Source
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

    @property
    def draft_lacks(self) -> int:
        """How many tokens the draft has to read before it drafts: of the prompt, or of rounds that
        went without it. The last two it feeds itself, in its first step."""
        return max(0, len(self.tokens) - 2 - self.draft_len)

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
    """Hands out slots.

    target, draft: what the rows of the two caches hold; without them nothing is used twice.
    """

    def __init__(self, count: int, target: HeldRows | None = None, draft: HeldRows | None = None):
        self._slots = [Slot(index) for index in range(count)]  # the free ones as they were left
        self._busy: set[int] = set()
        self._target, self._draft = target, draft

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        return len(self) - len(self._busy)

    def acquire(self, prompt: Sequence[int] = (), source: Source = ()) -> Slot:
        """A slot without text, whose lengths are those of the prompt's rows that it still holds;
        source: what the prompt's rows are of, where there is an encoder.

        The one in which the least is computed or lost: a text that goes on finds its rows again,
        and another one does not cost it them while there is an empty slot. Of equal ones the
        lowest, so that the busy ones stay close together.
        Raises OutriderError("busy") when all are taken.
        """
        free = [index for index in range(len(self)) if index not in self._busy]
        if not free:
            raise OutriderError(
                "busy",
                f"all {len(self)} slots are in use",
                "Wait for a request to finish, or load the bundle with more slots.",
            )
        index, held, rows = free[0], 0, self._target
        if rows is not None:
            # The last token's logits are wanted, and a call of one token may round otherwise than
            # wider ones: so at least two are computed, here and of the draft where it lacks any.
            most = max(0, len(prompt) - 2)
            common = {i: rows.resumes(i, min(most, rows.common(i, prompt, source))) for i in free}
            index = min(free, key=lambda i: rows.length(i) - 2 * common[i])
            held = common[index]
        slot = Slot(index, target_len=held)
        if self._draft is not None:
            drafted = self._draft.common(index, prompt, source)
            need = max(0, len(prompt) - 1)
            drafted = need if drafted >= need else max(0, min(drafted, need - 2))
            slot.draft_len = self._draft.resumes(index, drafted)
        self._slots[index] = slot
        self._busy |= {index}  # last, and no call: who is interrupted before has taken nothing
        return slot

    def release(self, slot: Slot) -> None:
        if self._slots[slot.index] is slot:
            self._busy.discard(slot.index)

    @property
    def target_lengths(self) -> list[int]:
        """How many of a slot's rows are worth keeping: those of its text, or of that it had."""
        return [slot.target_len for slot in self._slots]

    @property
    def draft_lengths(self) -> list[int]:
        """The same of the draft's."""
        return [slot.draft_len for slot in self._slots]
