"""Drafts without a model: what followed the last time that the text ended like this.

Prompt lookup (Saxena 2023; Leviathan et al. 2023, section 3.6, "copies tokens from the context").
The proposal has no distribution: q is a point mass, so it is accepted with probability p(x), and
the output is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..backends.engine import source_ids
from ..sequence import ActiveSequence
from .draft import GuessedDraft, Sources

LONGEST = 4  # tokens that are compared; longer ones are found by the first of them
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that products lose nothing but the carry


class NgramDraft(GuessedDraft):
    """See `Lookup`; one for each sequence."""

    help = (
        "what followed the same tokens earlier in source, prompt or output (needs no model; good "
        "for text that repeats itself)"
    )
    reads_corpus = True

    def __init__(self, sources: Sources):
        super().__init__(sources)
        self._lookups: dict[ActiveSequence, Lookup] = {}

    def known(self, sequence: ActiveSequence) -> Sequence[int]:
        """What is looked into: the beginning of what was seen, or all of it."""
        return sequence.seen

    def guess(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
        lookup = self._lookups.get(sequence)
        if lookup is None:
            self._lookups[sequence] = lookup = Lookup(corpus=self.sources.corpus)
        known = self.known(sequence)
        lookup.read(known)
        return lookup.propose(count, [*sequence.seen[len(known) :], *drafts])

    def forget(self, sequence: ActiveSequence) -> None:
        self._lookups.pop(sequence, None)


class CopyDraft(NgramDraft):
    help = "the same, but in source and prompt only"

    def known(self, sequence: ActiveSequence) -> Sequence[int]:
        request = sequence.request
        source = source_ids(request.source)
        return [*source, *request.prompt] if source else request.prompt


class Lookup:
    """The n-grams of a text that grows, for n = 1 .. longest; constant time for each token.

    corpus: another text to look into, for n-grams longer than those that the own one has.
    """

    def __init__(self, longest: int = LONGEST, corpus: Corpus | None = None):
        self._tokens: list[int] = []
        # By n-gram, where the text went on after its last occurrence.
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]
        self._corpus = corpus

    def read(self, tokens: Sequence[int]) -> None:
        """The whole text, of which the beginning was read before."""
        own = self._tokens
        for token in tokens[len(own) :]:
            # What the text ends with is entered when it goes on.
            for n, found in enumerate(self._next[: len(own)], start=1):
                found[tuple(own[-n:])] = len(own)
            own.append(token)

    def propose(self, count: int, after: Sequence[int] = ()) -> list[int]:
        """At most `count` tokens that may come next: after the longest n-gram that the text ends
        with and had before, at its last occurrence. What reaches the end goes on with itself.

        after: tokens that follow what was read; nothing is looked for in them.
        """
        own, longest = self._tokens, len(self._next)
        end = tuple([*own[-longest:], *after[-longest:]][-longest:])
        for n in range(len(end), 0, -1):
            start = self._next[n - 1].get(end[-n:])
            if start is not None:
                text = [*own[start : start + count], *after]
                while len(text) < count:
                    text.append(text[len(text) - (len(own) - start + len(after))])
                return text[:count]
            if self._corpus is not None and (found := self._corpus.after(end[-n:], count)):
                return found
        return []


class Corpus:
    """The n-grams of a text that does not change, for n = 1 .. longest, in sorted arrays: 12 bytes
    for each n-gram, found by bisection.

    tokens: int [N].
    """

    def __init__(self, tokens: Sequence[int], longest: int = LONGEST):
        self._tokens = np.array(tokens, np.int32)
        self._keys: list[npt.NDArray[np.uint64]] = []
        self._ends: list[npt.NDArray[np.int32]] = []  # where the text goes on after each
        keys = np.zeros(len(self._tokens), np.uint64)
        for n in range(1, min(longest, len(self._tokens) - 1) + 1):
            # An n-gram's key from that of its beginning; the last one of the text has no sequel.
            keys = _extend(keys[: len(self._tokens) - n], self._tokens[n - 1 : -1])
            found, last = np.unique(keys[::-1], return_index=True)
            self._keys.append(found)
            self._ends.append((len(keys) - 1 - last + n).astype(np.int32))

    def after(self, end: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens after the last occurrence of this n-gram; none if it has none."""
        n = len(end)
        if n > len(self._keys):
            return []
        key = np.zeros(1, np.uint64)
        for token in end:
            key = _extend(key, np.array([token]))
        i = int(np.searchsorted(self._keys[n - 1], key[0]))
        if i == len(self._keys[n - 1]) or self._keys[n - 1][i] != key[0]:
            return []
        start = int(self._ends[n - 1][i])
        if self._tokens[start - n : start].tolist() != list(end):
            return []  # another n-gram of the same key
        return self._tokens[start : start + count].tolist()  # type: ignore[no-any-return]


def _extend(
    keys: npt.NDArray[np.uint64], tokens: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    mixed = (keys + tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_MULTIPLIER)
    return mixed ^ (mixed >> np.uint64(29))
