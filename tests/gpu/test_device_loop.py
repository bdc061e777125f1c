"""A generation as one launch: launches, the end of the loop, and the assignment of results.

On a GPU it was no faster than launching ahead, so it is an option and all tests are slow. The tests
of rounds run on it with the sampler "loop"; these are the tests specific to a loop.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from cuda_standin import Error, FakeDriver
from devices import WARM, decoder_on, steps, text
from rounds import broken, finish, ids

from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.gpu import loop as device_loop
from runtime.gpu.loop import LoopingRounds
from runtime.sequence import Request

pytestmark = pytest.mark.slow
REQUEST = Request([2, 3, 4], WARM, gamma=3, max_new_tokens=30)


def looping(driver: FakeDriver, **options) -> Decoder:
    return decoder_on(driver, rounds=LoopingRounds, **options)


def test_a_text_is_one_launch(driver: FakeDriver) -> None:
    decoder = looping(driver)
    expected = text(decoder_on(driver), REQUEST)
    assert text(decoder, REQUEST) == expected
    sequence = decoder.admit(REQUEST)
    again = steps(driver, lambda: finish(decoder, sequence))
    # The wait is for the draft's prompt; the host polls for results.
    assert again == ["wait", "graph"]
    assert ids(sequence) == expected


@pytest.mark.parametrize("entries", [1, 2, 16])
def test_a_host_that_is_late(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, entries: int
) -> None:
    """The loop does not wait for the host: if the ring is full it ends and is launched again."""
    monkeypatch.setattr(device_loop, "RING_ENTRIES", entries)
    expected = text(decoder_on(driver), REQUEST)
    decoder = looping(driver)
    sequence = decoder.admit(REQUEST)
    launches = 0
    while sequence.finish_reason is None:
        launches += steps(driver, lambda: decoder.round([sequence])).count("graph")
        driver.drain()  # the loop runs until it ends
    assert ids(sequence) == expected
    rounds = sequence.stats.rounds
    assert {1: launches == rounds, 2: 1 < launches < rounds, 16: launches == 1}[entries]


def test_a_ring_of_another_size_is_noticed(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: a host that reads another round's results."""
    decoder, request = looping(driver), replace(REQUEST, max_new_tokens=55, gamma=1)
    expected = text(decoder, request)
    monkeypatch.setattr(device_loop, "RING_ENTRIES", 8)
    assert text(decoder, request) != expected


def test_what_a_loop_left_is_read_before_anything_new(driver: FakeDriver) -> None:
    """Two requests in a loop that runs ahead; one leaves, the other continues where it was."""
    alone = text(decoder_on(driver), replace(REQUEST, prompt=[9, 8]))
    decoder = looping(driver, slots=2)
    leaves = decoder.admit(REQUEST)
    stays = decoder.admit(replace(REQUEST, prompt=[9, 8]))
    decoder.round([leaves, stays])
    driver.drain()  # many rounds of both
    decoder.release(leaves)
    joins = decoder.admit(replace(REQUEST, max_new_tokens=40))
    finish(decoder, stays, joins)
    assert ids(stays) == alone
    assert ids(joins) == text(decoder_on(driver), joins.request)
    assert not decoder.rounds._unread_rounds.get(leaves)


def test_leftovers_that_are_forgotten_are_noticed(driver: FakeDriver) -> None:
    """Control."""

    def end(self: LoopingRounds) -> None:
        real(self)
        self._unread_rounds.clear()

    real = LoopingRounds._end_loop
    with broken("gpu.loop.LoopingRounds._end_loop", end), pytest.raises(AssertionError):
        test_what_a_loop_left_is_read_before_anything_new(driver)


def test_log_probabilities_run_round_by_round(driver: FakeDriver) -> None:
    decoder = looping(driver)
    request = replace(REQUEST, logprobs=2)
    sequence = decoder.admit(request)
    found = steps(driver, lambda: decoder.round([sequence]))
    assert "capture loop" not in found and "wait for event" in found
    finish(decoder, sequence)
    assert ids(sequence) == text(decoder_on(driver), request)


def test_a_driver_without_loops(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    expected = text(decoder_on(driver), REQUEST)
    driver.loops = False
    decoder = looping(driver)
    with caplog.at_level(logging.WARNING):
        assert text(decoder, REQUEST) == expected
        assert text(decoder, REQUEST) == expected
    (record,) = caplog.records
    message = record.getMessage()
    assert "rounds of gamma=3 run without a CUDA loop, slower: " in message
    assert "CUDA_ERROR_NOT_SUPPORTED" in message


def test_a_loop_that_breaks(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = looping(driver)
    sequence = decoder.admit(REQUEST)
    monkeypatch.setattr(driver, "cuStreamQuery", lambda stream: (Error(700),))
    with pytest.raises(OutriderError, match="cuStreamQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        decoder.round([sequence])
