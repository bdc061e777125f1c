"""Cache slots: the state of the sequence in a slot, and the table of slots.

A cache row is valid if it lies below its model's length. Lengths are integers kept here and not in
the engines, so rolling back means reducing a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .backends.engine import CachedRows, Source
from .files.errors import OutriderError

NO_SLOT = -1  # the index of a `Slot` that is in no table
MIN_COPIED_ROWS = 16  # copying fewer takes as long as computing them


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
    def draft_unread(self) -> int:
        """How many tokens the draft must read before it drafts: of the prompt, or of rounds without
        it. The last two are not counted: the draft reads them in its first step."""
        return max(0, len(self.tokens) - 2 - self.draft_len)

    def commit(self, tokens: Sequence[int], gamma: int) -> None:
        """Append the n accepted drafts and the token after them.

        gamma: how many were drafted. The target has computed the rows of the old pending token and
        of every accepted draft. The draft has read x1..x(gamma-1), so after a fully accepted round
        it has not computed the row of x(gamma): its length stays one short.
        """
        before = len(self.tokens)
        accepted = len(tokens) - 1
        self.target_len = before + accepted
        if gamma:
            self.draft_len = before + min(accepted, gamma - 1)
        self.tokens.extend(tokens)  # last: a text without them shows that there was an interrupt

    def roll_back(self, length: int) -> None:
        """Keep the first `length` tokens; the last of them becomes pending again."""
        del self.tokens[length:]
        self.target_len = min(self.target_len, length - 1)
        self.draft_len = min(self.draft_len, length - 1)


class SlotTable:
    """Hands out slots.

    target, draft: what the rows of the two caches hold; without them no rows are reused. copies:
    whether rows of one slot can be copied to another.
    """

    def __init__(
        self,
        count: int,
        target: CachedRows | None = None,
        draft: CachedRows | None = None,
        *,
        copies: bool = False,
    ):
        self._slots = [Slot(index) for index in range(count)]  # free ones keep their last state
        self._busy: set[int] = set()
        self._target, self._draft, self.copies = target, draft, copies

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def free(self) -> int:
        return len(self) - len(self._busy)

    def acquire(self, prompt: Sequence[int] = (), source: Source = ()) -> Slot:
        """A slot without text, whose lengths count the rows of the prompt that it still holds.
        source: the source that these rows belong to, if there is an encoder.

        Takes the free slot in which the fewest rows are computed or lost: a continued text finds
        its rows again, and a new text does not overwrite them while there is an empty slot, to
        which rows that any slot holds can be copied (`calls.copy_prefix`). A few lost rows, such as
        those of rejected drafts, are not worth a copy. Among equal slots the lowest is taken, so
        that busy ones stay close together.
        Raises OutriderError("busy") if all are taken.
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
            # The last token's logits are needed, and a call of one token may round differently from
            # wider ones: so at least two tokens are computed, and by the draft two if it lacks any.
            most = max(0, len(prompt) - 2)
            common = {
                i: rows.resume_position(i, min(most, rows.common_prefix(i, prompt, source)))
                for i in range(len(self))
            }
            copyable, few = (max(common.values()), MIN_COPIED_ROWS) if self.copies else (0, 0)
            lost = {i: rows.length(i) - common[i] for i in free}
            index = min(
                free,
                key=lambda i: (max(few, lost[i]) - max(common[i], copyable), -common[i], lost[i]),
            )
            held = common[index]
        slot = Slot(index, target_len=held)
        if self._draft is not None:
            drafted = self._draft.common_prefix(index, prompt, source)
            need = max(0, len(prompt) - 1)
            drafted = need if drafted >= need else max(0, min(drafted, need - 2))
            slot.draft_len = self._draft.resume_position(index, drafted)
        self._slots[index] = slot
        self._busy |= {index}  # last, and not a call: an interrupt before it takes no slot
        return slot

    def release(self, slot: Slot) -> None:
        if self._slots[slot.index] is slot:
            self._busy.discard(slot.index)

    @property
    def target_lengths(self) -> list[int]:
        """For each slot, the number of rows to keep: those of its text, or of its last text."""
        return [slot.target_len for slot in self._slots]

    @property
    def draft_lengths(self) -> list[int]:
        """The same for the draft."""
        return [slot.draft_len for slot in self._slots]
