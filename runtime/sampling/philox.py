"""Counter-based uniforms: Philox 4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy
as 1, 2, 3").

A draw is a pure function of (seed, position, purpose, lane): no state advances, so a request gets
the same numbers whatever its slot, its batch or its neighbours.

A number may be looked at once. Under the token rule a rejected round's later positions were never
looked at by the decision, so they may be drawn again in lane 0. Under the block rule the decision
looks at every position of the round: the next round must draw from another lane, for example
lane = the absolute position at which the round starts.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy.typing as npt

Word = TypeVar("Word", int, npt.NDArray[Any])
_WORD = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


class Purpose(IntEnum):
    """What a uniform decides; the second word of the counter."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    CHAIN = 3
    COUPLED = 4


def philox4x32(key: int, counter: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words from a 64-bit key (low word first) and a counter of four 32-bit words.

    Ten rounds, as in Random123; words beyond 32 bits are the caller's error. A word may be a uint64
    array of them.
    """
    key = int(key)  # a NumPy integer would wrap in the products
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = product_1 >> 32 ^ c1 ^ k0
        c1 = product_1 & _WORD
        c2 = product_0 >> 32 ^ c3 ^ k1
        c3 = product_0 & _WORD
        k0 = k0 + _WEYL_0 & _WORD
        k1 = k1 + _WEYL_1 & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
    """A uniform in [0, 1) with 53 bits: the first word and the top 21 bits of the second.

    seed: the request's, 64 bit. position: absolute index of the token that is decided, in
    [0, 2^32). lane: in [0, 2^32), separates numbers that share a position and a purpose.
    Raises ValueError outside these ranges.
    """
    if (position | lane) >> 32:  # also true where one of them is negative
        raise ValueError(f"position {position} and lane {lane} must lie in [0, 2^32)")
    high, low, _, _ = philox4x32(seed, (int(position), int(purpose), int(lane), 0))
    return (high << 21 | low >> 11) * 2.0**-53
