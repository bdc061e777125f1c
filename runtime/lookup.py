"""Drafts without a model: what followed the last time that the text ended like this.

Prompt lookup (Saxena 2023; Leviathan et al. 2023, section 3.6, "copies tokens from the context").
The proposal has no distribution: q is a point mass, so it is accepted with probability p(x), and
the output is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 4  # tokens that are compared; longer ones are found by the first of them


class Lookup:
    """The n-grams of a text that grows, for n = 1 .. longest; constant time for each token."""

    def __init__(self, longest: int = LONGEST):
        self._tokens: list[int] = []
        # By n-gram, where the text went on after its last occurrence.
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def read(self, tokens: Sequence[int]) -> None:
        """The whole text, of which the beginning was read before."""
        own = self._tokens
        for token in tokens[len(own) :]:
            # What the text ends with is entered when it goes on.
            for n, found in enumerate(self._next[: len(own)], start=1):
                found[tuple(own[-n:])] = len(own)
            own.append(token)

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens that may come next: after the longest n-gram that the text ends
        with and had before, at its last occurrence. What reaches the end goes on with itself."""
        own = self._tokens
        for n in range(min(len(self._next), len(own) - 1), 0, -1):
            start = self._next[n - 1].get(tuple(own[-n:]))
            if start is not None:
                proposed: list[int] = []
                for i in range(start, start + count):
                    proposed.append(own[i] if i < len(own) else proposed[i - len(own)])
                return proposed
        return []
