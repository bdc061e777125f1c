"""Sampling of a round by liboutrider, the native library (`kernel` has its interface)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from . import kernel
from .kernel import ROW, SLOT, VERDICT, Logits, status_text
from .rules import Verdict
from .sampler import Array, Ids, SlotSampling

# Indices into `kernel.DTYPES`: looking up a dtype's name would take 3 us in each draw of a round.
_DTYPES = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.uint16): 2}


class RoundSampler:
    """See `sampler.Sampler`.

    vocab_size: the width that target and draft share; columns beyond it are not read. slots, width:
    maximum number of slots and of draft tokens in a round. threads: maximum; used only where they
    pay. All memory is allocated once, here. Only one thread at a time may use a sampler.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        slots: int = 1,
        threads: int = 1,
        draft_vocab_size: int | None = None,
        library: ctypes.CDLL | None = None,
    ):
        self.vocab_size, self.width, self.threads = vocab_size, width, threads
        self.draft_vocab_size = draft_vocab_size or vocab_size
        self._library = library or kernel.load()
        size = self._library.outrider_workspace_size(
            max(vocab_size, self.draft_vocab_size), width, threads
        )
        if size == 0:
            raise ValueError(f"no workspace for V={vocab_size}, width={width}, threads={threads}")
        self._workspace = np.empty(size, np.uint8)
        self._slots = np.zeros(slots, SLOT)
        self._verdicts = np.zeros(slots, VERDICT)
        self._ratios = np.zeros((slots, width))
        self._drafts_drawn, self._draft_slot = False, 0  # the first slot of the draft's logits
        self._samplings: list[SlotSampling] = []
        self._referenced: list[object] = []  # objects that the slots point to, besides the ids
        self.drafts = np.zeros((slots, width), np.int64)
        self.rows = np.zeros((slots, width), ROW)
        # Kept, because `array.ctypes` costs a microsecond each time.
        self._at_slots, self._at_drafts, self._at_rows, self._at_verdicts, self._at_ratios = (
            array.ctypes.data
            for array in (self._slots, self.drafts, self.rows, self._verdicts, self._ratios)
        )
        self._memory = self._workspace.ctypes.data, size

    def begin(self, slots: Sequence[SlotSampling]) -> None:
        self._samplings, self._drafts_drawn, self._draft_slot = list(slots), False, 0
        self._referenced = [kernel.fill_slot(self._slots, b, slot) for b, slot in enumerate(slots)]

    def draw(
        self, logits: Array, step: int, uniforms: Array | None = None, first_slot: int = 0
    ) -> Ids:
        """See `Sampler.draw`. uniforms: float64 [B, width] in place of Philox."""
        count = len(self._samplings)
        self._drafts_drawn, self._draft_slot = True, first_slot
        rows = self._checked_logits(logits[:, None], self.draft_vocab_size, first_slot, 1, step + 1)
        for b, slot in enumerate(self._samplings):
            if slot.processors and step < slot.gamma:
                row = logits[slot.index - first_slot, : self.draft_vocab_size]
                slot.apply_processors(row, self.drafts[b, :step], "draft")
        status = self._library.outrider_draw(
            ctypes.addressof(rows), self._at_slots, count, self.width, step,
            _uniforms_address(uniforms, (count, self.width)), self._at_drafts, self._at_rows,
            self._at_verdicts, *self._memory, self.threads,
        )  # fmt: skip
        self._raise_for_status(status)
        return self.drafts[:count, step]

    def reduce_gamma(self, b: int, gamma: int) -> None:
        self._samplings[b] = replace(self._samplings[b], gamma=gamma)
        self._slots["gamma"][b] = gamma

    def set_drafts(self, drafts: Sequence[Sequence[int]], first_slot: int = 0) -> None:
        self._drafts_drawn, self._draft_slot = False, first_slot
        for b, (slot, tokens) in enumerate(zip(self._samplings, drafts, strict=True)):
            if len(tokens) != max(0, slot.gamma):
                raise ValueError(f"{len(tokens)} drafts for slot {slot.index}, not {slot.gamma}")
            self.drafts[b, : len(tokens)] = tokens

    def verify(
        self,
        logits: Array,
        draft_logits: Array | Sequence[Array] | None = None,
        uniforms: Array | None = None,
        first_slot: int = 0,
    ) -> list[Verdict]:
        """See `Sampler.verify`. uniforms: float64 [B, width + 1] in place of Philox.

        draft_logits: may also be one array [S, >= gamma, V]. If None, the draft has no distribution
        (n-gram lookup): see `set_drafts`. Raises ValueError if it is None after `draw`, and
        OutriderError("option") for the sigmoid rule and a draft without logits.
        """
        if self._drafts_drawn and draft_logits is None:
            raise ValueError("draft_logits must be the logits that the drafts were drawn from")
        count, gamma = len(self._samplings), max((p.gamma for p in self._samplings), default=-1)
        target = self._checked_logits(logits, self.vocab_size, first_slot, gamma + 1, 0)
        self._process_rows(logits, self.vocab_size, first_slot, "target")
        draft = Logits(None, 0, 0, 1, 0)
        if draft_logits is not None and len(draft_logits):
            steps = (
                draft_logits if isinstance(draft_logits, np.ndarray) else _stack_steps(draft_logits)
            )
            draft = self._checked_logits(steps, self.draft_vocab_size, self._draft_slot, gamma, 1)
            if not self._drafts_drawn:
                self._process_rows(steps, self.draft_vocab_size, self._draft_slot, "draft")
        status = self._library.outrider_verify(
            ctypes.addressof(target), ctypes.addressof(draft), self._at_slots, count, self.width,
            _uniforms_address(uniforms, (count, self.width + 1)), self._at_drafts,
            self._at_rows if self._drafts_drawn else None, self._at_verdicts, self._at_ratios,
            *self._memory, self.threads,
        )  # fmt: skip
        self._raise_for_status(status)
        return [
            Verdict(accepted, token, tuple(ratios[:examined]))
            for (token, accepted, examined, *_), ratios in zip(
                self._verdicts[:count].tolist(), self._ratios[:count].tolist(), strict=True
            )
        ]

    def _process_rows(self, logits: Array, vocab_size: int, first_slot: int, model: str) -> None:
        """Apply the processors to a round's rows [S, K, V]: one row less for the draft than for the
        target."""
        for b, slot in enumerate(self._samplings):
            count = slot.gamma + (model == "target")
            if slot.processors and count > 0:
                rows = logits[slot.index - first_slot, :count, :vocab_size]
                for i, row in enumerate(rows):
                    slot.apply_processors(row, self.drafts[b, :i], model)

    def _checked_logits(
        self, array: Array, vocab_size: int, first_slot: int, rows: int, gamma: int
    ) -> Logits:
        """The array as `Logits`. Checks that it has `rows` rows for every slot with at least
        `gamma` drafts, which the library cannot check."""
        if array.ndim == 3 and array.shape[1] < rows:
            raise ValueError(f"{array.shape[1]} rows of logits are too few; {rows} are needed")
        covered = range(first_slot, first_slot + len(array))
        for slot in self._samplings:
            if slot.gamma >= gamma and slot.index not in covered:
                raise ValueError(f"the logits of slots {covered} do not include slot {slot.index}")
        return _logits(array, vocab_size, first_slot)

    def _raise_for_status(self, status: int) -> None:
        if status == 0:
            return
        if status != kernel.SLOT_FAILED:
            raise ValueError(status_text(self._library, status))
        b = next(b for b in range(len(self._samplings)) if self._verdicts[b]["status"])
        verdict, slot = self._verdicts[b], self._samplings[b]
        raise kernel.verdict_error(self._library, verdict, slot)


def _logits(array: Array, vocab_size: int, first_slot: int = 0) -> Logits:
    """`Logits` of an array [slots, rows, V], V contiguous, of the slots from `first_slot` on.

    bfloat16 may be passed as uint16.
    """
    strides, dtype = array.strides, array.dtype
    if array.ndim != 3 or array.shape[-1] < vocab_size:
        raise ValueError(f"logits {array.shape} are narrower than V={vocab_size}")
    if strides[-1] != dtype.itemsize:
        raise ValueError("the logits of a row must be contiguous")
    code = _DTYPES.get(dtype)
    if code is None:
        if dtype.name != "bfloat16":
            raise ValueError(f"logits of type {dtype.name}, not float32, float16 or bfloat16")
        code = 2
    address = array.__array_interface__["data"][0] - first_slot * strides[0]
    return Logits(address, strides[0], strides[1], vocab_size, code)


def _stack_steps(rows: Sequence[Array]) -> Array:
    """The rows [S, V] of each step as one view [S, steps, V]. An engine's buffers are evenly
    spaced."""
    first = rows[0]
    addresses = [row.__array_interface__["data"][0] for row in rows]
    spacing = addresses[1] - addresses[0] if len(rows) > 1 else 0
    if any(row.strides != first.strides for row in rows) or any(
        address != addresses[0] + i * spacing for i, address in enumerate(addresses)
    ):
        raise ValueError("the draft's logits of a round are not evenly spaced in memory")
    shape = (first.shape[0], len(rows), first.shape[1])
    strides = (first.strides[0], spacing, first.strides[1])
    return np.lib.stride_tricks.as_strided(first, shape, strides)


def _uniforms_address(uniforms: Array | None, shape: tuple[int, ...]) -> int | None:
    if uniforms is None:
        return None
    if uniforms.dtype != np.float64 or not uniforms.flags.c_contiguous or uniforms.shape != shape:
        raise ValueError(f"uniforms must be contiguous float64 {shape}")
    return int(uniforms.ctypes.data)
