"""Counter-based uniforms: Philox 4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy
as 1, 2, 3").

A draw is a pure function of (seed, position, purpose, lane): no state advances, so a request gets
the same numbers whatever its slot, its batch or its neighbours.

A number may be used only once. Under the token rule the decision never uses the numbers of the
positions after a rejection, so the next round may draw them in lane 0. Under the block rule the
decision uses those of every position of the round: the next round must draw from another lane, for
example lane = the absolute position at which the round starts.
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
    """What a uniform is used for; the second word of the counter."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    CHAIN = 3
    COUPLED = 4


def philox4x32(key: int, counter: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words from a 64-bit key (low word first) and a counter of four 32-bit words.

    Ten rounds, as in Random123. The caller ensures that words have at most 32 bits. A word may also
    be a uint64 array of words.
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

    seed: of the request, 64 bits. position: absolute index of the token to be decided, in
    [0, 2^32). lane: in [0, 2^32), distinguishes numbers with the same position and purpose.
    Raises ValueError outside these ranges.
    """
    if (position | lane) >> 32:  # also true where one of them is negative
        raise ValueError(f"position {position} and lane {lane} must lie in [0, 2^32)")
    high, low, _, _ = philox4x32(seed, (int(position), int(purpose), int(lane), 0))
    return (high << 21 | low >> 11) * 2.0**-53
