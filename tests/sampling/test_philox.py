"""Philox 4x32-10 against the published known answers, and the uniforms made from it."""

import itertools

import pytest

from runtime.sampling.philox import Purpose, philox4x32, uniform

# Random123 (D. E. Shaw Research), tests/kat_vectors, "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(counter, key, answer):
    assert philox4x32(key[1] << 32 | key[0], counter) == answer


def test_uniform_takes_53_bits_of_the_first_two_words():
    # Zero key and counter: the first known answer.
    assert uniform(0, 0, Purpose.DRAFT) == (0x6627E8D5E169C58D >> 11) / 2**53
    words = philox4x32(2**64 - 1, (7, 2, 9, 0))
    assert (
        uniform(2**64 - 1, 7, Purpose.RESIDUAL, lane=9)
        == ((words[0] << 32 | words[1]) >> 11) / 2**53
    )


def test_every_coordinate_matters_and_nothing_else():
    coordinates = list(itertools.product((0, 1, 2**63), (0, 5, 2**32 - 1), Purpose, (0, 3)))
    values = [uniform(*c) for c in coordinates]
    assert len(set(values)) == len(coordinates)
    assert values == [uniform(*c) for c in coordinates]


@pytest.mark.parametrize(("position", "lane"), [(-1, 0), (2**32, 0), (0, -1), (0, 2**32)])
def test_counter_words_out_of_range_are_refused(position, lane):
    with pytest.raises(ValueError, match="must lie in"):
        uniform(0, position, Purpose.ACCEPT, lane)
