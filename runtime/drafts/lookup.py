"""Drafts without a model: the tokens that followed the last occurrence of the text's ending.

Prompt lookup (Saxena 2023; Leviathan et al. 2023, section 3.6, "copies tokens from the context").
At most as many tokens are proposed as match, because after a short match few are accepted
(SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975, bounds them by a multiple of the match). The
proposal has no distribution: q is a point mass, so x is accepted with probability p(x), and the
output has the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..backends.engine import source_ids
from ..sequence import ActiveSequence
from .draft import GuessedDraft, Sources

MAX_NGRAM = 4  # longest n-gram searched; a longer repetition is found after its first 4 tokens
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that products lose nothing but the carry


class NgramDraft(GuessedDraft):
    """Tokens found by a `Lookup`, one for each sequence."""

    help = (
        "what followed the same tokens earlier in source, prompt or output, no more tokens than "
        "match (needs no model; good for text that repeats itself)"
    )
    reads_corpus = True

    def __init__(self, sources: Sources):
        super().__init__(sources)
        self._lookups: dict[ActiveSequence, Lookup] = {}

    def searched_tokens(self, sequence: ActiveSequence) -> Sequence[int]:
        """The tokens to search: `sequence.copyable_tokens`, or the beginning of it."""
        return sequence.copyable_tokens

    def guess(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
        lookup = self._lookups.get(sequence)
        if lookup is None:
            self._lookups[sequence] = lookup = Lookup(corpus=self.sources.corpus)
        searched_tokens = self.searched_tokens(sequence)
        lookup.update(searched_tokens)
        return lookup.propose(count, [*sequence.copyable_tokens[len(searched_tokens) :], *drafts])

    def forget(self, sequence: ActiveSequence) -> None:
        self._lookups.pop(sequence, None)


class CopyDraft(NgramDraft):
    help = "the same, but in source and prompt only"

    def searched_tokens(self, sequence: ActiveSequence) -> Sequence[int]:
        request = sequence.request
        source = source_ids(request.source)
        return [*source, *request.prompt] if source else request.prompt


class Lookup:
    """An index of the n-grams of a growing text, for n = 1 .. MAX_NGRAM; constant time per token.

    corpus: a second text to search, for n-grams longer than those found in the text itself.
    """

    def __init__(self, corpus: Corpus | None = None):
        self._tokens: list[int] = []
        # By n-gram, the position after its last occurrence.
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(MAX_NGRAM)]
        self._corpus = corpus

    def update(self, tokens: Sequence[int]) -> None:
        """Add the new tokens of the text. tokens: the whole text, including those read before."""
        own = self._tokens
        for token in tokens[len(own) :]:
            # The n-grams at the end of the text are added when the text continues.
            for n, found in enumerate(self._next[: len(own)], start=1):
                found[tuple(own[-n:])] = len(own)
            own.append(token)

    def propose(self, count: int, after: Sequence[int] = ()) -> list[int]:
        """At most `count` tokens that may come next: those after the last earlier occurrence of the
        longest n-gram that the text ends with, no more than match before it. A continuation that
        reaches the end of the text is continued with itself.

        after: tokens that follow the text that was read; they are not searched.
        """
        own, reach = self._tokens, max(MAX_NGRAM, count)
        ending = [*own[-reach:], *after][-reach:]
        for n in range(min(MAX_NGRAM, len(ending)), 0, -1):
            start = self._next[n - 1].get(tuple(ending[-n:]))
            if start is not None:
                count = min(count, _match_length(own, start, ending, n))
                text = [*own[start : start + count], *after]
                while len(text) < count:
                    text.append(text[len(text) - (len(own) - start + len(after))])
                return text[:count]
            if self._corpus is not None and (found := self._corpus.after(ending, n, count)):
                return found
        return []


def _match_length(
    text: Sequence[int] | npt.NDArray[np.int32], position: int, ending: Sequence[int], known: int
) -> int:
    """How many of the last tokens of `ending` stand in `text` before `position`; the last `known`
    do."""
    n = known
    while n < min(position, len(ending)) and text[position - 1 - n] == ending[-1 - n]:
        n += 1
    return n


class Corpus:
    """An index of the n-grams of a fixed text, for n = 1 .. MAX_NGRAM, in sorted arrays: 12 bytes
    per n-gram, searched by bisection.

    tokens: int [N].
    """

    def __init__(self, tokens: Sequence[int]):
        self._tokens = np.array(tokens, np.int32)
        self._keys: list[npt.NDArray[np.uint64]] = []
        self._ends: list[npt.NDArray[np.int32]] = []  # position after the last occurrence of each
        keys = np.zeros(len(self._tokens), np.uint64)
        for n in range(1, min(MAX_NGRAM, len(self._tokens) - 1) + 1):
            # An n-gram's key extends that of its first n - 1 tokens; nothing follows the last one.
            keys = _extend(keys[: len(self._tokens) - n], self._tokens[n - 1 : -1])
            found, last = np.unique(keys[::-1], return_index=True)
            self._keys.append(found)
            self._ends.append((len(keys) - 1 - last + n).astype(np.int32))

    def after(self, ending: Sequence[int], n: int, count: int) -> list[int]:
        """At most `count` tokens after the last occurrence of the last n of these tokens, no more
        than match before it; empty if they do not occur."""
        if n > len(self._keys):
            return []
        key, end = np.zeros(1, np.uint64), list(ending[-n:])
        for token in end:
            key = _extend(key, np.array([token]))
        i = int(np.searchsorted(self._keys[n - 1], key[0]))
        if i == len(self._keys[n - 1]) or self._keys[n - 1][i] != key[0]:
            return []
        start = int(self._ends[n - 1][i])
        if self._tokens[start - n : start].tolist() != end:
            return []  # a different n-gram with the same key
        count = min(count, _match_length(self._tokens, start, ending, n))
        return self._tokens[start : start + count].tolist()  # type: ignore[no-any-return]


def _extend(
    keys: npt.NDArray[np.uint64], tokens: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    mixed = (keys + tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
    return mixed ^ (mixed >> np.uint64(29))
