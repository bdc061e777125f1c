"""Logits processors: they forbid tokens depending on the text before them, for target and draft.

A request carries its processors. They modify the logits in place before anything else reads them:
distributions, verification and log-probabilities all use the processed logits. So p and q are
processed in the same way, each row with the text before it, and any processor is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from ..files.errors import OutriderError, attribute_errors_to
from .distribution import FloatRow
from .warp import SamplingParams, TokenIds, check_row, edit_scores, forbid_ids

Ids = npt.NDArray[np.int64]


class LogitsProcessor(Protocol):
    """Forbids tokens, like a logits processor of Transformers. Any callable with this signature."""

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        """Set the scores of the tokens that may not follow `text` to -inf, in place, and no others.

        scores: float32 [V], the logits after bias, penalties and the processors before this one. V
            is the target's vocabulary size, or that of a draft with a smaller one. Not to be kept:
            the array serves other rows after the call. text: int64 [n], all ids before the row:
            prompt, output, and the round's drafts. output_start: index in `text` at which the
            output begins, so n = output_start for the first new token.

        It is called for each row of each round, so it must be cheap. The result must depend on the
        arguments alone, since a round also processes rows of continuations that are rejected, in
        any order. It may be called again on scores that it has processed, and must not change them
        then. It must leave at least one token of a target's row (otherwise OutriderError
        "numeric"). If it would leave none of a draft's row, that row is used unprocessed and the
        target rejects the token drawn from it.
        """


class SuppressTokens:
    """Forbids these tokens, and those in `at_begin` as the first token of the output: Transformers'
    `suppress_tokens` and `begin_suppress_tokens`. Ids beyond the row are ignored."""

    def __init__(self, tokens: Sequence[int], at_begin: Sequence[int] = ()):
        self._tokens, self._at_begin = np.array(tokens, np.int64), np.array(at_begin, np.int64)

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        forbid_ids(scores, self._tokens)
        if len(text) == output_start:
            forbid_ids(scores, self._at_begin)


@dataclass(frozen=True, eq=False)
class NoRepeatNgram:
    """Forbids n-grams of `size` tokens that occurred before: Transformers' `no_repeat_ngram_size`.
    source: forbid its n-grams instead of those of the text (`encoder_no_repeat_ngram_size`)."""

    size: int
    source: Sequence[int] | None = None

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        searched = text if self.source is None else np.array(self.source, np.int64)
        begin = len(text) + 1 - self.size
        if begin >= 0 and len(searched) >= self.size:
            ngrams = np.lib.stride_tricks.sliding_window_view(searched, self.size)
            matches = (ngrams[:, :-1] == text[begin:]).all(axis=1)
            forbid_ids(scores, ngrams[matches, -1])


class BadWords:
    """Forbids these sequences of tokens: Transformers' `bad_words_ids`."""

    def __init__(self, words: Sequence[Sequence[int]]):
        self._single_tokens = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._longer_words: dict[int, list[list[int]]] = {}  # by their last token but one
        for word in words:
            if len(word) > 1:
                self._longer_words.setdefault(word[-2], []).append(list(word))

    def __call__(self, scores: FloatRow, text: Ids, output_start: int, /) -> None:
        forbid_ids(scores, self._single_tokens)
        words = self._longer_words.get(int(text[-1]), []) if len(text) else []
        for *before, last in words:
            if text[-len(before) :].tolist() == before:
                forbid_ids(scores, [last])


@dataclass(frozen=True)
class ForcedLastToken:
    """Forces `token` at index `position` of the text, as Transformers' `forced_eos_token_id` does,
    and sets its score to 0, as in Transformers. At all other positions applies `processors`, which
    have no effect at that one."""

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


def apply_processors(
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
    """Apply the processors to `row` [V], in place; the other arguments are those of `warp`.

    As in Transformers, they see the logits after bias, penalties and `suppress`; but only the -inf
    that they set is written to `row`. Raises OutriderError "numeric" as `warp` does, for a row that
    was broken before, and "option" if a processor raises.
    """
    check_row(float(row.max()), where)
    before = row.copy() if of_draft else row
    edited = params.reads_context or params.logit_bias or len(suppress) > 0
    scores = edit_scores(row.copy(), params, text, suppress, output_start) if edited else row
    for processor in processors:
        name = getattr(processor, "__name__", None) or type(processor).__name__
        with attribute_errors_to(f"{where}: a logits processor ({name})"):
            returned = cast(Callable[..., object], processor)(scores, text, output_start)
        if isinstance(returned, np.ndarray) and returned is not scores:
            cause = f"{where}: a logits processor ({name}) returned an array, which is not read"
            raise OutriderError("option", cause, "Have it edit the scores in place.")
        if not (peak := float(scores.max())) < np.inf:
            cause = f"{where}: a logits processor ({name}) wrote {peak}"
            raise OutriderError("option", cause, "Have it write finite numbers, or -inf.")
    if edited:
        row[np.isneginf(scores)] = -np.inf
    if of_draft and not np.isfinite(row.max()):
        row[:] = before
