"""Plain decoding of given texts: teacher-forced through a model one token at a time.

This uses no code of the round: rows, contexts and warping arguments are put together independently,
so that a fault of the round cannot hide itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..backends.engine import Engine, Logits
from ..calls import pad_to_narrowest, prefill, replace_unknown_ids
from ..sampling.distribution import Distribution
from ..sampling.philox import Purpose, uniform
from ..sampling.processors import apply_processors
from ..sampling.warp import warp
from ..sequence import Request
from ..slots import Slot
from ..text.engine import TextEngine

COMPARED_LOGITS = 16  # number of largest logits of a row on which rounding is measured
# The round draws in lane 0 or in the lane of a position in the text; no text is this long.
CERTIFICATE_LANE = 2**32 - 1


@dataclass(frozen=True)
class Mismatch:
    """An emitted token that plain decoding would not have emitted in its place.

    position: index in the output of text `run`. best: plain decoding's choice (at temperature
    above 0, the best of the tokens that it never emits). margin: logits by which best is ahead.
    """

    run: int
    position: int
    token: int
    best: int
    margin: float


class TeacherForced:
    """One model on a slot, with source and prompt in its caches, to which given texts are fed."""

    def __init__(self, engine: Engine, slot: Slot, request: Request, max_len: int = 2**31):
        engine.encode(slot.index, request.source)
        self._engine, self._slot, self._prompt = engine, slot.index, request.prompt
        self._prompt_length = len(request.prompt)
        self._max_fed = max_len - self._prompt_length  # tokens that may be fed
        self._first_logits = self._prefill_prompt()

    def _prefill_prompt(self) -> Logits:
        """Prefill the prompt. Returns the logits [V] after it."""
        return prefill(self._engine, self._slot, self._prompt, 0).copy()

    def rows(self, text: Sequence[int], width: int = 1) -> Iterator[Logits]:
        """The logits [V] that predict text[0], text[1], ...: each valid until the next.

        width: number of tokens per call; 1 is plain decoding. The rows end early if the model's
        context does.
        """
        held = self._engine.cached_rows.resume_position(self._slot, self._prompt_length)
        if held != self._prompt_length:
            self._prefill_prompt()  # a recurrent state has advanced, with another text
        yield self._first_logits
        fed_count = min(len(text) - 1, self._max_fed)
        for begin in range(0, fed_count, width):
            block = list(text[begin : begin + width])
            # Pad a short block, so that all calls have the same shape; its last rows are not used.
            padded = block + [0] * (width - len(block))
            ids = np.array([replace_unknown_ids(self._engine, padded)])
            ids = pad_to_narrowest(self._engine, ids)  # as in a round
            position = np.array([self._prompt_length + begin])
            (logits,) = self._engine.forward(ids, position, np.arange(width), first_slot=self._slot)
            yield from logits[: fed_count - begin]


class Replay:
    """Warps rows as a request does, as a function of the text alone, and checks tokens with it."""

    def __init__(self, engine: TextEngine, request: Request):
        self._request, self._vocab_size = request, engine.decoder.vocab_size
        # Lenience does not change the point mass; below 1, `warp` keeps the processed logits too.
        self._greedy = replace(request.params, temperature=0, verify="token", lenience=0.5)

    def warp(
        self, row: Logits, text: Sequence[int], model: str, *, greedy: bool = False
    ) -> Distribution:
        """The distribution of the token after `text`."""
        request = self._request
        params = self._greedy if greedy else request.params
        row, context = row[: self._vocab_size], np.array([*request.prompt, *text])
        suppress = tuple(request.eos_token_ids) if len(text) < request.min_new_tokens else ()
        where = f"{model}, teacher-forced, output token {len(text)}"
        if request.processors:
            row = row.copy()  # the plain row is read again
            apply_processors(
                request.processors, row, params, context, suppress, of_draft=model == "draft",
                where=where, output_start=len(request.prompt),
            )  # fmt: skip
        return warp(
            row,
            params,
            context if params.reads_context else (),
            suppress=suppress,
            where=where,
            output_start=len(request.prompt),
        )

    def not_argmax(self, rows: Iterator[Logits], text: Sequence[int]) -> Iterator[Mismatch]:
        """The tokens of a text that plain decoding at temperature 0 would not have chosen."""
        for i, (token, row) in enumerate(zip(text, rows, strict=True)):
            p = self.warp(row, text[:i], "target", greedy=True)
            assert p.point_mass is not None
            if token != p.point_mass:
                yield Mismatch(0, i, token, p.point_mass, -p.margin(token))

    def integral_transforms(
        self,
        p_rows: Iterator[Logits],
        q_rows: Iterator[Logits],
        text: Sequence[int],
        seed: int,
        run: int,
        mismatches: list[Mismatch],
    ) -> Iterator[tuple[float, float]]:
        """The U of a text's tokens; tokens of probability 0 are appended to `mismatches`.

        q_rows: the draft's rows, may end early. Without a row, tokens are in order of their ids.
        """
        for i, (token, p_row) in enumerate(zip(text, p_rows, strict=True)):
            p = self.warp(p_row, text[:i], "target").probs()
            q = np.zeros(len(p))
            if (q_row := next(q_rows, None)) is not None:
                known = self.warp(q_row, text[:i], "draft").probs()[: len(p)]
                q[: len(known)] = known
            v = uniform(seed, i, Purpose.RESIDUAL, CERTIFICATE_LANE)
            if not 0 <= token < len(p) or p[token] == 0:
                best, margin = self._best_removed(p_row, text[:i], token, p)
                mismatches.append(Mismatch(run, i, token, best, margin))
                yield v, v  # it has no U, and counts as a mismatch instead
                continue
            # Compare p_i / q_i with p_x / q_x, without dividing.
            by_ratio = _comes_before(p * q[token], p[token] * q, token)
            by_p = _comes_before(p, p[token : token + 1], token)
            yield float(p[by_ratio].sum() + v * p[token]), float(p[by_p].sum() + v * p[token])

    def _best_removed(
        self, row: Logits, before: Sequence[int], token: int, p: npt.NDArray[np.float64]
    ) -> tuple[int, float]:
        """The best of the tokens that top-k, top-p or min-p remove, and its margin over this token.
        Rounding may move a filter's edge by one token, so the best one itself is a near-tie."""
        greedy = self.warp(row, before, "target", greedy=True)
        assert greedy.processed is not None
        removed = np.where(p > 0, -np.inf, greedy.processed)
        best = int(removed.argmax())
        here = removed.item(token) if 0 <= token < len(removed) else -math.inf
        return best, removed.item(best) - here if math.isfinite(here) else math.inf


class Rounding:
    """How much calls of several tokens differ from plain steps, on each row's largest logits; and
    whether all logits are bitwise the same."""

    def __init__(self, vocab_size: int, penalty: float):
        self._vocab_size = vocab_size
        self._difference_scale = max(penalty, 1 / penalty)  # the penalty scales differences too
        self.largest = 0.0
        self.scale = 0.0  # the largest logit
        self.identical = True
        self._plain_logits: list[tuple[npt.NDArray[np.intp], Logits, bytes]] = []

    def record(self, rows: Iterator[Logits]) -> Iterator[Logits]:
        """Yield plain rows, and store what `compare` will need."""
        self._plain_logits.clear()
        for row in rows:
            known = row[: self._vocab_size]
            best = np.argpartition(known, -min(COMPARED_LOGITS, len(known)))[-COMPARED_LOGITS:]
            best = best[np.isfinite(known[best])]
            self._plain_logits.append((best, known[best], _digest(known)))
            self.scale = max(self.scale, float(np.abs(known[best]).max(initial=0.0)))
            yield row

    def compare(self, rows: Iterator[Logits]) -> None:
        """Compare the same rows from wider calls with the plain ones."""
        for (best, plain, digest), row in zip(self._plain_logits, rows, strict=True):
            self.identical &= _digest(row[: self._vocab_size]) == digest
            difference = float(np.abs(row[best] - plain).max(initial=0.0)) * self._difference_scale
            self.largest = max(self.largest, difference)


def _digest(row: Logits) -> bytes:
    return hashlib.blake2b(row.tobytes()).digest()


def _comes_before(
    values: npt.NDArray[np.float64], others: npt.NDArray[np.float64], token: int
) -> npt.NDArray[np.bool_]:
    """Which tokens come before `token` in an order; equal ones are ordered by their ids."""
    below: npt.NDArray[np.bool_] = values < others
    below[:token] |= (values == others)[:token]
    return below
