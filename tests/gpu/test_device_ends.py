"""How requests, engines and captures end on a GPU: memory is freed, and nothing blocks."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from cuda_standin import FakeDriver
from device_standin import FakeDeviceEngine
from devices import WARM, decoder_on, text
from rounds import finish, ids

from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

REQUEST = Request([2, 3, 4], WARM, gamma=3, max_new_tokens=30)


def test_leaving_asks_nothing_of_the_driver(driver: FakeDriver) -> None:
    """A closed stream is released in any thread, even during a round of others."""
    decoder = decoder_on(driver, slots=2)
    both = [decoder.admit(REQUEST), decoder.admit(replace(REQUEST, prompt=[9, 8]))]
    decoder.round(both)
    device, calls = decoder.rounds._device, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device), "_call", lambda self, name, *rest: calls.append(name))
        decoder.release(both[0])
    assert calls == []
    finish(decoder, both[1])
    assert ids(both[1]) == text(decoder_on(driver), both[1].request)


@pytest.mark.parametrize("current", ["context", "another"])
def test_all_memory_is_given_back(driver: FakeDriver, current: str) -> None:
    """Also while another GPU's context is current."""
    decoder = decoder_on(driver)
    text(decoder, REQUEST)
    assert driver.allocated and driver.pinned
    driver.current = [current]
    del decoder
    gc.collect()
    assert not driver.allocated and not driver.pinned
    assert driver.current == [current]


@pytest.mark.parametrize("midst", ["of a capture", "of the stream's work"])
def test_an_engine_ends(
    driver: FakeDriver,
    midst: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """During a capture, when waiting for the GPU is forbidden, or while work is in progress."""
    old = [decoder_on(driver)]
    expected = text(old[0], REQUEST)
    decoder = decoder_on(driver)
    caplog.clear()
    driver.log.clear()
    name = "enqueue" if midst == "of a capture" else "_run"
    real, owned = getattr(FakeDeviceEngine, name), len(driver.allocated)

    def ending(*arguments) -> None:
        if old and (name == "_run" or driver._recording is not None):
            assert gc.isenabled() == (name == "_run"), "no collection in a capture"
            old.clear()
            gc.collect()
        real(*arguments)

    monkeypatch.setattr(FakeDeviceEngine, name, ending)
    assert text(decoder, REQUEST) == expected
    assert gc.isenabled()
    assert not old and len(driver.allocated) < owned, "the old engine was freed"
    assert "capture" in driver.log and not caplog.messages


class OccasionalGamma:
    """A policy that asks for another gamma in every fifth round."""

    def __init__(self, usual: int, other: int):
        self.usual, self.other, self.calls, self.gammas = usual, other, 0, list[int]()

    def next(self) -> int:
        self.calls += 1
        return self.usual if self.calls % 5 else self.other

    def observe(self, gamma: int, examined: int, accepted: int) -> None:
        self.gammas.append(gamma)


@pytest.mark.parametrize(("usual", "other"), [(2, 3), (0, 1), (3, 0)])
def test_a_gamma_that_is_asked_for_once(driver: FakeDriver, usual: int, other: int) -> None:
    """It is used exactly once per request for it, although a round with the usual gamma has already
    been launched."""
    policy = OccasionalGamma(usual, other)
    plain = Request([2, 3, 4], SamplingParams(temperature=0), gamma=0, max_new_tokens=50)
    request = replace(plain, policy=policy, gamma=max(usual, other))
    assert text(decoder_on(driver), request) == text(decoder_on(driver), plain)
    early = policy.gammas[:-2]  # the last rounds are shorter
    assert 1 <= early.count(other) <= policy.calls // 5
    assert set(early) == {usual, other}


def test_an_interrupt_ends_the_capture(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_on(driver)
    sequence = decoder.admit(REQUEST)
    real = FakeDeviceEngine.enqueue

    def interrupted(*arguments: object) -> None:
        if driver._recording is not None:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(FakeDeviceEngine, "enqueue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.round([sequence])
    assert driver._recording is None
    monkeypatch.undo()
    decoder.release(sequence)
    assert text(decoder, REQUEST) == text(decoder_on(driver), REQUEST)
