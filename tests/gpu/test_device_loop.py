"""A generation as one launch: what is launched, when the loop ends, and whose results are whose.

The tests of rounds run on it with the sampler "loop"; here is what only a loop does.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace

import pytest
from devices import WARM, decoder_on, host, steps, text, wander
from fake_cuda import Error, FakeDriver
from fake_device import FakeDeviceEngine
from rounds import broken, ids

from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.gpu import loop as device_loop
from runtime.gpu.loop import LoopingRounds
from runtime.gpu.rounds import DeviceRounds
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

REQUEST = Request([2, 3, 4], WARM, gamma=3, max_new_tokens=30)


def looping(driver: FakeDriver, **options) -> Decoder:  # type: ignore[no-untyped-def]
    return decoder_on(driver, rounds=LoopingRounds, **options)


def test_a_text_is_one_launch(driver: FakeDriver) -> None:
    decoder = looping(driver)
    expected = text(decoder_on(driver), REQUEST)
    assert text(decoder, REQUEST) == expected
    sequence = decoder.admit(REQUEST)

    def rest() -> None:
        while sequence.finish_reason is None:
            decoder.round([sequence])

    again = steps(driver, rest)
    # The wait is the draft's prompt; the results are looked for where they appear.
    assert again == ["wait", "graph"]
    assert ids(sequence) == expected


@pytest.mark.parametrize("entries", [1, 2, 16])
def test_a_host_that_is_late(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    entries: int,
) -> None:
    """The loop waits for nobody: with the ring full it ends, and the host launches it again."""
    monkeypatch.setattr(device_loop, "ENTRIES", entries)
    expected = text(decoder_on(driver), REQUEST)
    decoder = looping(driver)
    sequence = decoder.admit(REQUEST)
    launches = 0
    while sequence.finish_reason is None:
        launches += steps(driver, lambda: decoder.round([sequence])).count("graph")
        driver.drain()  # it runs on for as long as it may
    assert ids(sequence) == expected
    rounds = sequence.stats.rounds
    assert {1: launches == rounds, 2: 1 < launches < rounds, 16: launches == 1}[entries]


def test_a_ring_of_another_size_is_noticed(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: a host that reads another round's results."""
    decoder, request = looping(driver), replace(REQUEST, max_new_tokens=55, gamma=1)
    expected = text(decoder, request)
    monkeypatch.setattr(device_loop, "ENTRIES", 8)
    assert text(decoder, request) != expected


@pytest.mark.parametrize("seed", range(6))
def test_the_hosts_tokens_whoever_comes_and_goes(
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    assert wander(looping(driver, slots=3), seed) == wander(host(monkeypatch, slots=3), seed)


def test_what_a_loop_left_is_read_before_anything_new(driver: FakeDriver) -> None:
    """Two texts in a loop that runs ahead; one leaves, the other goes on where it was."""
    alone = text(decoder_on(driver), replace(REQUEST, prompt=[9, 8]))
    decoder = looping(driver, slots=2)
    leaves = decoder.admit(REQUEST)
    stays = decoder.admit(replace(REQUEST, prompt=[9, 8]))
    decoder.round([leaves, stays])
    driver.drain()  # many rounds of both
    decoder.release(leaves)
    joins = decoder.admit(replace(REQUEST, max_new_tokens=40))
    both = [stays, joins]
    while unfinished := [sequence for sequence in both if sequence.finish_reason is None]:
        decoder.round(unfinished)
    assert ids(stays) == alone
    assert ids(joins) == text(decoder_on(driver), joins.request)
    assert not decoder.rounds._unread.get(leaves)  # type: ignore[attr-defined]


def test_leftovers_that_are_forgotten_are_noticed(driver: FakeDriver) -> None:
    """Control."""

    def end(self: LoopingRounds) -> None:
        real(self)
        self._unread.clear()

    real = LoopingRounds._end
    with broken("gpu.loop.LoopingRounds._end", end), pytest.raises(AssertionError):
        test_what_a_loop_left_is_read_before_anything_new(driver)


def test_log_probabilities_run_round_by_round(driver: FakeDriver) -> None:
    decoder = looping(driver)
    request = replace(REQUEST, logprobs=2)
    sequence = decoder.admit(request)
    found = steps(driver, lambda: decoder.round([sequence]))
    assert "capture loop" not in found and "wait for event" in found
    while sequence.finish_reason is None:
        decoder.round([sequence])
    assert ids(sequence) == text(decoder_on(driver), request)


def test_a_driver_without_loops(
    driver: FakeDriver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = text(decoder_on(driver), REQUEST)
    driver.loops = False
    decoder = looping(driver)
    with caplog.at_level(logging.WARNING):
        assert text(decoder, REQUEST) == expected
        assert text(decoder, REQUEST) == expected
    (record,) = caplog.records
    said = record.getMessage()
    assert "rounds of gamma=3 run without a CUDA loop, slower: " in said
    assert "CUDA_ERROR_NOT_SUPPORTED" in said


def test_a_loop_that_breaks(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = looping(driver)
    sequence = decoder.admit(REQUEST)
    monkeypatch.setattr(driver, "cuStreamQuery", lambda stream: (Error(700),))
    with pytest.raises(OutriderError, match="cuStreamQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
        decoder.round([sequence])


@pytest.mark.parametrize("rounds", [DeviceRounds, LoopingRounds])
def test_leaving_asks_nothing_of_the_driver(
    driver: FakeDriver,
    rounds: type[DeviceRounds],
) -> None:
    """A closed stream leaves in any thread, beside a round of others."""
    decoder = decoder_on(driver, rounds=rounds, slots=2)
    both = [decoder.admit(REQUEST), decoder.admit(replace(REQUEST, prompt=[9, 8]))]
    decoder.round(both)
    device, asked = decoder.rounds._device, []  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device), "_call", lambda self, name, *rest: asked.append(name))
        decoder.release(both[0])
    assert asked == []
    while both[1].finish_reason is None:
        decoder.round(both[1:])
    assert ids(both[1]) == text(decoder_on(driver), both[1].request)


@pytest.mark.parametrize("rounds", [DeviceRounds, LoopingRounds])
def test_all_memory_is_given_back(driver: FakeDriver, rounds: type[DeviceRounds]) -> None:
    decoder = decoder_on(driver, rounds=rounds)
    text(decoder, REQUEST)
    assert driver.allocated and driver.pinned
    del decoder
    gc.collect()
    assert not driver.allocated and not driver.pinned


@pytest.mark.parametrize("rounds", [DeviceRounds, LoopingRounds])
@pytest.mark.parametrize("midst", ["of a capture", "of the stream's work"])
def test_an_engine_ends(
    driver: FakeDriver,
    rounds: type[DeviceRounds],
    midst: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When nobody may wait for the GPU, or while its work is half done."""
    old = [decoder_on(driver, rounds=rounds)]
    expected = text(old[0], REQUEST)
    decoder = decoder_on(driver, rounds=rounds)
    caplog.clear()
    driver.log.clear()
    name = "enqueue" if midst == "of a capture" else "_run"
    real, owned = getattr(FakeDeviceEngine, name), len(driver.allocated)

    def ending(*arguments) -> None:  # type: ignore[no-untyped-def]
        if old and (name == "_run" or driver._recording is not None):
            assert gc.isenabled() == (name == "_run"), "libraries have objects of their own"
            old.clear()
            gc.collect()
        real(*arguments)

    monkeypatch.setattr(FakeDeviceEngine, name, ending)
    assert text(decoder, REQUEST) == expected
    assert gc.isenabled()
    assert not old and len(driver.allocated) < owned, "the old one was given back"
    captured = "capture" if rounds is DeviceRounds else "capture loop"
    assert captured in driver.log and not caplog.messages


class Trying:
    """Asks for another gamma once in a while."""

    def __init__(self, usual: int, other: int):
        self.usual, self.other, self.asked, self.got = usual, other, 0, list[int]()

    def next(self, batch: int) -> int:
        self.asked += 1
        return self.usual if self.asked % 5 else self.other

    def observe(self, gamma: int, examined: int, accepted: int, all_accepted: bool) -> None:
        self.got.append(gamma)


@pytest.mark.parametrize("rounds", [DeviceRounds, LoopingRounds])
@pytest.mark.parametrize(("usual", "other"), [(2, 3), (0, 1), (3, 0)])
def test_a_gamma_that_is_asked_for_once(
    driver: FakeDriver,
    rounds: type[DeviceRounds],
    usual: int,
    other: int,
) -> None:
    """It is tried, although a round of the usual one was ahead; once each time."""
    policy = Trying(usual, other)
    plain = Request([2, 3, 4], SamplingParams(temperature=0), gamma=0, max_new_tokens=50)
    request = replace(plain, policy=policy, gamma=max(usual, other))
    assert text(decoder_on(driver, rounds=rounds), request) == text(decoder_on(driver), plain)
    early = policy.got[:-2]  # the last ones are short
    assert 1 <= early.count(other) <= policy.asked // 5
    assert set(early) == {usual, other}


def test_an_engine_ends_while_another_gpu_is_in_use(driver: FakeDriver) -> None:
    decoder = decoder_on(driver)
    assert text(decoder, REQUEST)
    driver.current = ["another"]
    del decoder
    gc.collect()
    assert not driver.allocated and driver.current == ["another"]


@pytest.mark.parametrize("rounds", [DeviceRounds, LoopingRounds])
def test_an_interrupt_ends_the_capture(
    driver: FakeDriver,
    rounds: type[DeviceRounds],
) -> None:
    decoder = decoder_on(driver, rounds=rounds)
    sequence = decoder.admit(REQUEST)
    engine = type(decoder.target)
    real = engine.enqueue

    def interrupted(self, call, graph=None):  # type: ignore[no-untyped-def]
        if driver._recording is not None:
            raise KeyboardInterrupt
        real(self, call, graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "enqueue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.round([sequence])
    assert driver._recording is None
    decoder.release(sequence)
    assert text(decoder, REQUEST) == text(decoder_on(driver), REQUEST)
