"""The engines for the CPU: slots grow with the text, which changes the time and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CHECKOUT, environment
from workshop import Workshop

from runtime.backends import host
from runtime.backends.onnxruntime import OrtEngine
from runtime.backends.registry import host_engine
from runtime.files.manifest import read_bundle

both = pytest.mark.parametrize("bundle", ["onnxruntime", "aotinductor"], indirect=True)


@pytest.fixture
def bundle(
    workshop: Workshop, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A bundle with 144 rows per slot, which starts with 16."""
    monkeypatch.setattr(host, "FIRST_ROWS", 16)
    backend = getattr(request, "param", "onnxruntime")
    return workshop.bundle(*workshop.pair(backend), backend=backend)


def open_target(bundle: Path, slots: int = 1, buffers: int = 1) -> Any:
    manifest = read_bundle(bundle)
    return host_engine(manifest.backend)(
        bundle / "target",
        manifest.pair.target,
        slots=slots,
        max_outputs=5,
        buffers=buffers,
        threads=1,
    )


def walk(engine: Any) -> Iterator[np.ndarray]:
    """Prefills and verifications of texts of different lengths."""
    slots, end = engine.slots, engine.capacity
    ids = np.random.default_rng(0).integers(0, engine.vocab_size, (slots, end))
    lengths = np.array([12, 15, 8][:slots])
    for slot, length in enumerate(lengths):
        yield engine.forward(ids[slot : slot + 1, :length], np.array([0]), [length - 1], slot)
    while lengths.max() + 5 < end:
        block = np.stack([ids[s, n : n + 5] for s, n in enumerate(lengths)])
        yield engine.forward(block, lengths, np.arange(5))
        lengths = lengths + np.array([5, 3, 4][:slots])  # some rows are rolled back


def same(engine: Any, other: Any) -> bool:
    pairs = zip(walk(engine), walk(other), strict=True)
    return all(np.allclose(mine, theirs, atol=1e-5, rtol=0) for mine, theirs in pairs)


@both
@pytest.mark.parametrize("slots", [1, 3])
def test_growing_changes_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    """Control: an engine that loses its rows when it grows."""
    growing, forgetful = open_target(bundle, slots), open_target(bundle, slots)
    rows, real = [], growing._reserve
    monkeypatch.setattr(growing, "_reserve", lambda *a: (real(*a), rows.append(growing.row_count)))
    reserve = forgetful._reserve

    def forget(starts: list[int], width: int) -> None:
        before = forgetful.row_count
        reserve(starts, width)
        if 0 < before < forgetful.row_count:
            for array in forgetful._cache.values():
                array[:] = 0

    monkeypatch.setattr(forgetful, "_reserve", forget)
    whole = [open_target(bundle, slots) for _ in range(2)]
    for engine in whole:
        engine._reserve([engine.capacity - 1] * slots, 1)
        monkeypatch.setattr(engine, "_reserve", lambda *_: None)
    assert same(growing, whole[0])
    assert list(dict.fromkeys(rows)) == [16, 32, 64, 128, 144]
    assert not same(forgetful, whole[1])


def test_one_slot_starts_small_again(bundle: Path) -> None:
    engine = open_target(bundle)
    first = [logits.copy() for logits in walk(engine)]
    assert engine.row_count == engine.capacity
    again = walk(engine)
    np.testing.assert_array_equal(next(again), first[0])
    assert engine.row_count == 16


@pytest.mark.parametrize("start", [12, 0])
def test_an_interrupt_while_the_rows_are_replaced(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    """Fault: prepared calls and the record of cached rows referred to arrays that were gone."""
    engine, whole = open_target(bundle), open_target(bundle)
    ids = np.arange(100)[None] % engine.vocab_size
    length = 15 if start else 100
    engine.forward(ids[:, :length], np.array([0]), np.array([0]))
    step = ids[:, length - 5 : length], np.array([length - 5]), np.arange(5)
    engine.forward(*step)
    arrays, real = list(engine._cache.values()), engine._zeros

    def interrupted(*shape: int) -> Any:
        monkeypatch.setattr(engine, "_zeros", stopped)
        return real(*shape)

    def stopped(*shape: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_zeros", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.forward(ids[:, start : start + 7], np.array([start]), np.array([0]))
    monkeypatch.setattr(engine, "_zeros", real)
    assert all(a is b for a, b in zip(engine._cache.values(), arrays, strict=True))
    assert engine.cached_rows.length(0) == length
    whole.forward(ids[:, :length], np.array([0]), np.array([0]))
    np.testing.assert_allclose(engine.forward(*step), whole.forward(*step), atol=1e-5)


def test_a_row_beyond_the_capacity_is_refused(bundle: Path) -> None:
    engine = open_target(bundle)
    with pytest.raises(ValueError, match="beyond the capacity"):
        engine.forward(np.zeros((1, 2), np.int64), np.array([engine.capacity - 1]), np.array([0]))


@both
@pytest.mark.parametrize("cleared", [True, False])
def test_a_slot_that_held_nan(bundle: Path, cleared: bool) -> None:
    """NaN in masked rows beyond a text still spreads, so a failed request could break the next one.
    Control: PyTorch's attention; Outrider's own does not read these rows."""
    engine = open_target(bundle, 2)
    ids, index = np.full((1, 2), 5, np.int64), np.array([1])
    expected = engine.forward(ids, np.array([0]), index, first_slot=1).copy()
    for cache in engine._cache.values():
        cache[1, :, 9] = np.nan
    if cleared:
        engine.clear(1)
        assert engine.cached_rows.length(1) == 0
    found = engine.forward(ids, np.array([0]), index, first_slot=1)
    assert np.array_equal(found, expected) == (cleared or isinstance(engine, OrtEngine))


def test_not_every_shape_s_call_is_kept(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: with many slots there are thousands of shapes, each of which kept its memory."""
    monkeypatch.setattr(host, "MAX_PREPARED_CALLS", 4)
    engine, ids = open_target(bundle, 3), np.arange(5)[None]
    first, again = (
        [
            engine.forward(ids[:, :width], np.array([0]), [0], slot).copy()
            for width in range(1, 6)
            for slot in range(3)
        ]
        for _ in range(2)
    )
    assert 0 < len(engine._prepared) <= 4
    np.testing.assert_array_equal(first, again)


@both
def test_buffers_are_views_that_stay(bundle: Path) -> None:
    """Logits of consecutive calls are evenly spaced, and a call does not change the others'."""
    engine = open_target(bundle, 2, buffers=4)
    ids, start = np.arange(6).reshape(2, 3), np.zeros(2, np.int64)
    views = [engine.forward(ids + i, start, [2], buffer=i) for i in range(3)]
    kept = [view.copy() for view in views]
    engine.forward(ids + 9, start, [2], buffer=3)
    assert all((view == copy).all() for view, copy in zip(views, kept, strict=True))
    addresses = [view.ctypes.data for view in views]
    assert addresses[1] - addresses[0] == addresses[2] - addresses[1] > 0


@both
def test_the_cache_is_updated_in_place(bundle: Path) -> None:
    """See protected_cache.py: a step writes its own row of the cache and no other page. Control: in
    the end its own row is protected too."""
    script = [sys.executable, CHECKOUT / "tests" / "standins" / "protected_cache.py", bundle]
    process = subprocess.run(script, env=environment(), capture_output=True, text=True)
    assert process.returncode == -signal.SIGSEGV and process.stdout, process.stderr
    report = json.loads(process.stdout)
    assert report["growth"] < report["steps"] * report["cache"] / 10, "no copy of the cache is kept"
