"""Effects of a missing wait: the fake device makes progress at random, not only when waited for.

The tests of rounds run with one order of events; here are others, and tests that leave out each
wait once.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuda_standin import FakeDriver, make_device
from devices import DRAFT, MODEL, decode_randomly, decoder_on, host, steps
from rounds import broken

from runtime.backends import cuda
from runtime.backends.cuda import Cuda
from runtime.files.errors import OutriderError

SEEDS = range(3)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_hosts_tokens_whenever_things_happen(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With so little page-locked memory that uploads have to wait for it."""
    monkeypatch.setattr(cuda, "STAGING_PIECES", 2)
    driver = FakeDriver(seed=seed)
    found = decode_randomly(decoder_on(driver, slots=3), seed)
    assert found == decode_randomly(host(monkeypatch, slots=3), seed)


def test_results_that_are_read_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: no wait for the results."""
    expected = decode_randomly(host(monkeypatch, slots=3), 0)
    noticed = 0
    with broken("backends.cuda.Cuda.wait_for_event", lambda self, event: None):
        for seed in SEEDS:
            try:
                decoder = decoder_on(FakeDriver(seed=seed), slots=3)
                noticed += decode_randomly(decoder, 0) != expected
            except (OutriderError, AssertionError, ValueError, IndexError):
                noticed += 1
    assert noticed


def test_what_is_uploaded_is_not_overwritten_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Page-locked memory is reused. Control: without checking whether it is free."""
    monkeypatch.setattr(cuda, "STAGING_PIECES", 2)

    def crossed(seed: int) -> list[int]:
        device = make_device(FakeDriver(seed=seed))
        stream, found = device.create_stream(), np.zeros(9, np.int64)
        address = device.allocate(found.nbytes)
        for i in range(len(found)):
            device.upload(address + 8 * i, np.array([i]), stream)
        device.wait_for_stream(stream)
        device.read(found.ctypes.data, address, found.nbytes)
        return found.tolist()

    assert all(crossed(seed) == list(range(9)) for seed in range(8))
    with broken("backends.cuda.Cuda.is_event_done", lambda self, event: True):
        assert any(crossed(seed) != list(range(9)) for seed in range(8))


def test_memory_is_zero_before_anybody_has_it() -> None:
    """On any stream. Control: without the wait some streams read the old contents."""

    def first_bytes(seed: int) -> list[int]:
        device = make_device(FakeDriver(seed=seed))
        stream, found = device.create_stream(), device.allocate_pinned(8)
        device.download(found, device.allocate(8), stream)
        device.wait_for_stream(stream)
        return found.tolist()

    assert all(first_bytes(seed) == [0] * 8 for seed in range(8))
    with pytest.MonkeyPatch.context() as patch:
        real = Cuda._call
        patch.setattr(
            Cuda, "_call",
            lambda self, name, *given: None
            if (name, given) == ("cuStreamSynchronize", (0,))
            else real(self, name, *given),
        )  # fmt: skip
        assert any(first_bytes(seed) != [0] * 8 for seed in range(8))


def test_uploads_wait_for_nothing(driver: FakeDriver) -> None:
    """Not even long ones; the array may change at once. Control: a copy from pageable memory."""
    device = make_device(driver)
    stream = device.create_stream()
    array = np.arange(20_000)
    address, expected = device.allocate(array.nbytes), array.copy()
    assert steps(driver, lambda: device.upload(address, array, stream)) == []
    array[:] = 0
    device.wait_for_stream(stream)
    device.read(array.ctypes.data, address, array.nbytes)
    np.testing.assert_array_equal(array, expected)
    direct = (address, array.ctypes.data, 8, stream)
    assert steps(driver, lambda: driver.cuMemcpyHtoDAsync(*direct)) == ["wait"]


def test_logits_of_half_the_bytes(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 logits give the same tokens as equal float32 logits, in half of the memory."""
    kept = np.uint32(0xFFFF0000)

    def rounded(model):
        return lambda *given: (model(*given).astype(np.float32).view(np.uint32) & kept).view(
            np.float32
        )

    monkeypatch.setattr("devices.MODEL", rounded(MODEL))
    monkeypatch.setattr("devices.DRAFT", rounded(DRAFT))
    half = decoder_on(driver, slots=3, dtype="bfloat16")
    whole = decoder_on(FakeDriver(), slots=3)
    assert decode_randomly(half, 0) == decode_randomly(whole, 0)
    half_bytes, bytes_ = (x.rounds._sizes.bytes()["target_logits"] for x in (half, whole))
    assert 2 * half_bytes == bytes_
