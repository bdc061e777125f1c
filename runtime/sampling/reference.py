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
        self._places: list[SlotSampling] = []
        self._drafts: list[list[int]] = []
        self._q: list[list[Distribution]] | None = []
        self._draft_slot = 0

    def begin(self, places: Sequence[SlotSampling]) -> None:
        self._places = list(places)
        self._drafts, self._q = [[] for _ in places], [[] for _ in places]

    def draw(self, logits: Array, step: int, *, first_slot: int = 0) -> Ids:
        assert self._q is not None, "draw comes before give"
        tokens = np.zeros(len(self._places), np.int64)
        for b, place in enumerate(self._places):
            if step < place.gamma:
                row = logits[place.index - first_slot]
                q = self._warp(place, self._drafts[b], row, "draft")
                tokens[b] = q.draw(self._uniform(place, step, Purpose.DRAFT))
                self._drafts[b].append(int(tokens[b]))
                self._q[b].append(q)
        return tokens

    def stop(self, b: int, gamma: int) -> None:
        self._places[b] = replace(self._places[b], gamma=gamma)

    def give(self, drafts: Sequence[Sequence[int]], first_slot: int = 0) -> None:
        self._drafts, self._q = [list(tokens) for tokens in drafts], None
        self._draft_slot = first_slot

    def verify(
        self, logits: Array, draft_logits: Sequence[Array] | None = None, *, first_slot: int = 0
    ) -> list[Verdict]:
        verdicts = []
        all_q = self._q or [
            self._given(place, drafts, draft_logits)
            for place, drafts in zip(self._places, self._drafts, strict=True)
        ]
        for place, drafts, q in zip(self._places, self._drafts, all_q, strict=True):
            if place.gamma < 0:
                verdicts.append(Verdict(0, -1, ()))
                continue
            rows = logits[place.index - first_slot]
            p = _LazyRows(partial(self._target_row, place, drafts, rows), place.gamma + 1)
            accept_u = [self._uniform(place, i, Purpose.ACCEPT) for i in range(place.gamma)]
            # One draw per round, numbered by the round's start whatever position it decides.
            final_u = self._uniform(place, 0, Purpose.RESIDUAL)
            verdicts.append(verify(p, q, drafts, accept_u, final_u, place.params))
        return verdicts

    def _target_row(
        self, place: SlotSampling, drafts: Sequence[int], rows: Array, i: int
    ) -> Distribution:
        return self._warp(place, drafts[:i], rows[i], "target")

    def _given(
        self, place: SlotSampling, drafts: Sequence[int], draft_logits: Sequence[Array] | None
    ) -> list[Distribution]:
        if draft_logits is None or place.params.is_deterministic:
            return [Distribution.point(token, self.vocab_size) for token in drafts]
        row = place.index - self._draft_slot
        return [
            self._warp(place, drafts[:i], draft_logits[i][row], "draft") for i in range(len(drafts))
        ]

    def _warp(
        self, place: SlotSampling, drafted: Sequence[int], row: Array, model: str
    ) -> Distribution:
        """The distribution of the token after `drafted`, computed in the same way for p and q."""
        row = row[: self.vocab_size]
        place.apply_processors(row, drafted, model)
        warped = warp(
            row,
            place.params,
            place.text_with(drafted) if place.params.reads_context else (),
            suppress=place.suppressed_after(drafted),
            where=place.row_name(len(drafted), model),
            output_start=place.output_start,
        )
        if place.params.verify == "coupled":
            return select_by_noise(warped, place.params.seed, place.position + len(drafted))
        return warped

    def _uniform(self, place: SlotSampling, step: int, purpose: Purpose) -> float:
        """The uniform of the token `step` positions ahead; 0 if point masses ignore it."""
        params = place.params
        if params.is_deterministic:
            return 0.0
        # Block verification uses all uniforms of its round, so no later round may use them again.
        lane = place.position if params.verify == "block" else 0
        return uniform(params.seed, place.position + step, purpose, lane)


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
