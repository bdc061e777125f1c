"""Sampling of a round in NumPy: the reference, and the fallback without the native library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from .coupled import select_by_noise
from .distribution import Distribution
from .philox import Purpose, uniform
from .rules import Verdict, verify
from .sampler import Array, Ids, SlotSampling
from .warp import warp


class NumpySampler:
    """The reference: `warp`, `draw` and `verify`, row by row. See `Sampler`.

    vocab_size: the width that target and draft share; columns beyond it are not read.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._samplings: list[SlotSampling] = []
        self._drafts: list[list[int]] = []
        self._q: list[list[Distribution]] | None = []
        self._draft_slot = 0

    def begin(self, slots: Sequence[SlotSampling]) -> None:
        self._samplings = list(slots)
        self._drafts, self._q = [[] for _ in slots], [[] for _ in slots]

    def draw(self, logits: Array, step: int, *, first_slot: int = 0) -> Ids:
        assert self._q is not None, "draw comes before set_drafts"
        tokens = np.zeros(len(self._samplings), np.int64)
        for b, slot in enumerate(self._samplings):
            if step < slot.gamma:
                row = logits[slot.index - first_slot]
                q = self._warp(slot, self._drafts[b], row, "draft")
                tokens[b] = q.draw(self._uniform(slot, step, Purpose.DRAFT))
                self._drafts[b].append(int(tokens[b]))
                self._q[b].append(q)
        return tokens

    def reduce_gamma(self, b: int, gamma: int) -> None:
        self._samplings[b] = replace(self._samplings[b], gamma=gamma)

    def set_drafts(self, drafts: Sequence[Sequence[int]], first_slot: int = 0) -> None:
        self._drafts, self._q = [list(tokens) for tokens in drafts], None
        self._draft_slot = first_slot

    def verify(
        self, logits: Array, draft_logits: Sequence[Array] | None = None, *, first_slot: int = 0
    ) -> list[Verdict]:
        verdicts = []
        all_q = self._q or [
            self._draft_distributions(slot, drafts, draft_logits)
            for slot, drafts in zip(self._samplings, self._drafts, strict=True)
        ]
        for slot, drafts, q in zip(self._samplings, self._drafts, all_q, strict=True):
            if slot.gamma < 0:
                verdicts.append(Verdict(0, -1, ()))
                continue
            rows = logits[slot.index - first_slot]
            p = _LazyRows(partial(self._target_row, slot, drafts, rows), slot.gamma + 1)
            accept_u = [self._uniform(slot, i, Purpose.ACCEPT) for i in range(slot.gamma)]
            # One draw per round, numbered by the round's start whatever position it decides.
            final_u = self._uniform(slot, 0, Purpose.RESIDUAL)
            verdicts.append(verify(p, q, drafts, accept_u, final_u, slot.params))
        return verdicts

    def _target_row(
        self, slot: SlotSampling, drafts: Sequence[int], rows: Array, i: int
    ) -> Distribution:
        return self._warp(slot, drafts[:i], rows[i], "target")

    def _draft_distributions(
        self, slot: SlotSampling, drafts: Sequence[int], draft_logits: Sequence[Array] | None
    ) -> list[Distribution]:
        if draft_logits is None or slot.params.is_deterministic:
            return [Distribution.point(token, self.vocab_size) for token in drafts]
        row = slot.index - self._draft_slot
        return [
            self._warp(slot, drafts[:i], draft_logits[i][row], "draft") for i in range(len(drafts))
        ]

    def _warp(
        self, slot: SlotSampling, drafted: Sequence[int], row: Array, model: str
    ) -> Distribution:
        """The distribution of the token after `drafted`, computed in the same way for p and q."""
        row = row[: self.vocab_size]
        slot.apply_processors(row, drafted, model)
        warped = warp(
            row,
            slot.params,
            slot.text_with(drafted) if slot.params.reads_context else (),
            suppress=slot.suppressed_after(drafted),
            where=slot.row_name(len(drafted), model),
            output_start=slot.output_start,
        )
        if slot.params.verify == "coupled":
            return select_by_noise(warped, slot.params.seed, slot.position + len(drafted))
        return warped

    def _uniform(self, slot: SlotSampling, step: int, purpose: Purpose) -> float:
        """The uniform of the token `step` positions ahead; 0 if point masses ignore it."""
        params = slot.params
        if params.is_deterministic:
            return 0.0
        # Block verification uses all uniforms of its round, so no later round may use them again.
        lane = slot.position if params.verify == "block" else 0
        return uniform(params.seed, slot.position + step, purpose, lane)


class _LazyRows(Sequence[Distribution]):
    """p1..p(gamma+1) of one slot, each warped when the rule first reads it.

    Rows after the first rejection are conditioned on rejected tokens; most are never computed.
    """

    def __init__(self, warp_row: Callable[[int], Distribution], count: int):
        self._row, self._count = cache(warp_row), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i):  # type: ignore[no-untyped-def, override]
        return self._row(i)
