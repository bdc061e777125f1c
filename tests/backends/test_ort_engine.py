"""The slots of an OrtEngine grow with the text, and nobody sees it but the clock."""

import numpy as np
import pytest
from checkpoints import Workshop

from runtime.backends import host as host_engine
from runtime.backends import registry
from runtime.files.manifest import read_bundle

LENGTH = 700


@pytest.fixture(scope="module")
def bundle(workshop: Workshop):
    source = workshop.checkpoint("llama", max_position_embeddings=4096, num_hidden_layers=1)
    return workshop.bundle(source, max_len=None)


def open_target(bundle, slots):
    manifest = read_bundle(bundle)
    facts = manifest.pair.target
    return registry.host_engine(manifest.backend)(
        bundle / "target", facts, slots=slots, widest=5, threads=1
    )


def walk(engine, slots):
    """Prefill, steps and verifications of texts of different lengths, past 256 and 512 rows."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.vocab_size, (slots, LENGTH + 8))
    lengths = np.array([200, 247, 130][:slots])
    for slot, length in enumerate(lengths):
        yield engine.forward(ids[slot : slot + 1, :length], np.array([0]), [length - 1], slot)
    while lengths.max() + 5 < LENGTH:
        block = np.stack([ids[s, n : n + 5] for s, n in enumerate(lengths)])
        yield engine.forward(block, lengths, np.arange(5))
        lengths = lengths + np.array([5, 3, 4][:slots])  # some of it rolled back


@pytest.mark.parametrize("slots", [1, 3])
def test_growing_changes_nothing(bundle, monkeypatch, slots):
    growing = open_target(bundle, slots)
    seen = set()
    got = []
    for logits in walk(growing, slots):
        seen.add(growing.rows)
        got.append(logits.copy())
    assert seen == {256, 512, 1024}
    monkeypatch.setattr(host_engine, "FIRST_ROWS", growing.capacity)
    for mine, whole in zip(got, walk(open_target(bundle, slots), slots), strict=True):
        np.testing.assert_allclose(mine, whole, atol=1e-5)


def test_growing_that_forgets_the_rows_is_noticed(bundle, monkeypatch):
    """The control."""
    forgetful, whole = open_target(bundle, 1), open_target(bundle, 1)
    reserve = type(forgetful)._reserve

    def forget(self, position, width):
        before = self.rows
        reserve(self, position, width)
        if self is forgetful and 0 < before < self.rows:
            for array in self._cache.values():
                array[:] = 0

    monkeypatch.setattr(type(forgetful), "_reserve", forget)
    with pytest.raises(AssertionError):  # noqa: PT012 - at one of the calls
        for mine, theirs in zip(walk(forgetful, 1), walk(whole, 1), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_one_slot_starts_small_again(bundle):
    engine = open_target(bundle, 1)
    first = [logits.copy() for logits in walk(engine, 1)]
    assert engine.rows == 1024
    again = walk(engine, 1)
    np.testing.assert_array_equal(next(again), first[0])
    assert engine.rows == 256


@pytest.mark.parametrize("start", [200, 0])
def test_an_interrupt_while_the_rows_are_replaced(bundle, monkeypatch, start):
    """Prepared calls once kept the addresses of arrays that were gone, and the account its rows."""
    engine, whole = open_target(bundle, 1), open_target(bundle, 1)
    ids = np.arange(600)[None] % engine.vocab_size
    length = 250 if start else 600
    for n in range(0, length, 50):
        engine.forward(ids[:, n : n + 50], np.array([n]), np.array([0]))
    step = ids[:, length - 5 : length], np.array([length - 5]), np.arange(5)
    engine.forward(*step)
    arrays, real = list(engine._cache.values()), engine._zeros

    def interrupted(*shape):
        monkeypatch.setattr(engine, "_zeros", stopped)
        return real(*shape)

    def stopped(*shape):
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_zeros", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.forward(ids[:, start : start + 100], np.array([start]), np.array([0]))
    monkeypatch.undo()
    assert all(a is b for a, b in zip(engine._cache.values(), arrays, strict=True))
    assert engine.held.length(0) == length
    for n in range(0, length, 50):
        whole.forward(ids[:, n : n + 50], np.array([n]), np.array([0]))
    np.testing.assert_allclose(engine.forward(*step), whole.forward(*step), atol=1e-5)


def test_a_row_beyond_the_capacity_is_refused(bundle):
    engine = open_target(bundle, 1)
    with pytest.raises(ValueError, match="beyond the capacity"):
        engine.forward(np.zeros((1, 2), np.int64), np.array([engine.capacity - 1]), np.array([0]))


@pytest.mark.parametrize("cleared", [True, False])
def test_a_slot_that_held_nan(bundle, cleared):
    """Rows beyond a text are masked, and NaN all the same: what failed must not fail the next."""
    engine = open_target(bundle, 2)
    ids, index = np.full((1, 2), 5, np.int64), np.array([1])
    expected = engine.forward(ids, np.array([0]), index, first_slot=1).copy()
    for cache in engine._cache.values():
        cache[1, :, 9] = np.nan
    if cleared:
        engine.clear(1)
        assert engine.held.length(1) == 0
    found = engine.forward(ids, np.array([0]), index, first_slot=1)
    assert np.array_equal(found, expected) == cleared
