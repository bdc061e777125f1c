"""Logits processors: what forbids tokens by the text before them, of target and draft alike.

A request carries them, and they act on the logits in place before anything else sees those: the
distributions, the rule and the log-probabilities are all of what a processor left. So p and q are
processed as one, each row with the text before it, and any processor stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..files.errors import blaming
from .distribution import FloatRow
from .warp import SamplingParams, TokenIds, check_row, edit, within

Ids = npt.NDArray[np.int64]


class LogitsProcessor(Protocol):
    """Forbids tokens, as a logits processor of Transformers does. Any callable of this form."""

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        """Set the scores of what may not come after `text` to -inf, in place, and no others.

        scores: float32 [V], the logits after bias and penalties, and after the processors before
            this one; V is that of target and draft together. text: int64 [n], all ids before the
            row: prompt, output, and the round's drafts. output_start: where in it the output
            begins, so the row of the first new token has n = output_start.

        It is called for each row of each round, so it is cheap; and it is a function of its
        arguments alone, since the round looks at rows of texts that are given up, in any order.
        What it is given may be what it left before: then it changes nothing more. Something has to
        be left of a target's row (else OutriderError "numeric"); a draft's row of which nothing
        would be left is drawn from as it was, and the target rejects what comes.
        """


@dataclass(frozen=True, eq=False)
class SuppressTokens:
    """Never these tokens, and those `at_begin` not as the first of the output: Transformers'
    `suppress_tokens` and `begin_suppress_tokens`. Ids beyond the row are ignored."""

    tokens: Sequence[int]
    at_begin: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "at_begin"):
            object.__setattr__(self, name, np.array(getattr(self, name), np.int64))

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        scores[within(self.tokens, len(scores))] = -np.inf
        if len(text) == output_start:
            scores[within(self.at_begin, len(scores))] = -np.inf


@dataclass(frozen=True, eq=False)
class NoRepeatNgram:
    """No `size` tokens twice in a row: Transformers' `no_repeat_ngram_size`. source: of whose
    n-grams none is said, in place of the text's own (`encoder_no_repeat_ngram_size`)."""

    size: int
    source: Sequence[int] | None = None

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        said = text if self.source is None else np.array(self.source, np.int64)
        begin = len(text) + 1 - self.size
        if begin >= 0 and len(said) >= self.size:
            ngrams = np.lib.stride_tricks.sliding_window_view(said, self.size)
            again = (ngrams[:, :-1] == text[begin:]).all(axis=1)
            scores[within(ngrams[again, -1], len(scores))] = -np.inf


class BadWords:
    """None of these sequences of tokens: Transformers' `bad_words_ids`."""

    def __init__(self, words: Sequence[Sequence[int]]):
        self._always = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._after: dict[int, list[list[int]]] = {}  # the longer ones, by their last but one
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(list(word))

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        scores[within(self._always, len(scores))] = -np.inf
        for *before, last in self._after.get(int(text[-1]), ()) if len(text) else ():
            if text[-len(before) :].tolist() == before:
                scores[within([last], len(scores))] = -np.inf


@dataclass(frozen=True)
class LastToken:
    """`token` in row `position` of the text, Transformers' `forced_eos_token_id`; in all others
    what these `processors` leave, which have no say there. Its score becomes 0, as in
    Transformers."""

    position: int
    token: int
    processors: Sequence[LogitsProcessor] = ()

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        if len(text) == self.position:
            scores[: self.token] = scores[self.token + 1 :] = -np.inf
            scores[self.token : self.token + 1] = 0
            return
        for processor in self.processors:
            processor(scores, text, output_start)


def process(
    processors: Sequence[LogitsProcessor],
    row: FloatRow,
    params: SamplingParams,
    text: Ids,
    suppress: TokenIds = (),
    *,
    of_draft: bool,
    where: str,
    output_start: int,
) -> None:
    """Let them forbid tokens in `row` [V], in place; the other arguments are those of `warp`.

    In the order of Transformers: they see the logits after bias, penalties and `suppress`, of which
    the row itself gets nothing but their -inf. Raises OutriderError "numeric" as `warp`, for a row
    that was broken before, and "option" for what a processor raises.
    """
    check_row(float(row.max()), where)
    before = row.copy() if of_draft else row
    edited = params.reads_context or params.logit_bias or len(suppress) > 0
    scores = edit(row.copy(), params, text, suppress, output_start) if edited else row
    for processor in processors:
        name = getattr(processor, "__name__", None) or type(processor).__name__
        with blaming(f"{where}: a logits processor ({name})"):
            processor(scores, text, output_start)
    if edited:
        row[np.isneginf(scores)] = -np.inf
    if of_draft and not np.isfinite(row.max()):
        row[:] = before
