"""The reproducibility that a build measures and a bundle promises: fake engines whose rounding
depends on width, neighbours, threads or rows, one at a time, and a real engine.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import CHECKOUT
from fakes import FakeEngine, make_manifest, random_model

from engines import bundle as bundles
from engines.bundle import build
from runtime import load
from runtime.backends import invariance
from runtime.backends.bits import promised_bits
from runtime.backends.engine import Ids, Logits
from runtime.backends.invariance import measure
from runtime.files.errors import OutriderError
from runtime.files.machine import processor
from runtime.files.manifest import CallBits, Invariance, Manifest, read_bundle

Fault = Callable[["FaultyEngine", Ids, Ids, int], bool]


class FaultyEngine(FakeEngine):
    """Logits are off by one ulp in the calls that `fault` selects. high: largest position."""

    fault: Fault = staticmethod(lambda *_: False)

    def __init__(self, folder: Path, facts: Any, *, slots: int, max_outputs: int, threads: int = 0):
        super().__init__(random_model(1), slots=slots, capacity=facts.capacity, chunk=256)
        self.threads, self.high = threads, 0
        self.cache[:] = 0  # as in real engines

    def forward(self, input_ids: Ids, position: Ids, logits_index: Ids, **more: Any) -> Logits:
        self.high = max(self.high, int(position.max()))
        logits = super().forward(input_ids, position, logits_index, **more)
        if self.fault(self, input_ids, position, len(logits_index)):
            logits[:] = np.nextafter(logits, np.float32(np.inf))
        return logits


WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 256]
ALL = ("gamma", "draft", "slot", "neighbour", "thread count")
EVERY = "the same for every gamma, draft, slot, neighbour and thread count"
NOT = "the same for every thread count; not for every gamma, draft, slot and neighbour"
# The fault, the fields that the measurement finds with several slots, and the remaining promise.
FAULTS: dict[str, tuple[Fault, dict[str, Any], str]] = {
    "none": (lambda *_: False, {}, EVERY),
    "one": (
        lambda engine, ids, *_: ids.shape[1] == 1, {"widths": WIDTHS[1:], "others": [1]},
        EVERY,
    ),
    "wide": (
        lambda engine, ids, *_: ids.shape[1] > 4,
        {"widths": [5, 6, 7, 8, 9, 16, 256], "others": [1, 2, 3, 4]},
        NOT,
    ),
    "neighbours": (
        lambda engine, ids, *_: len(ids) > 1, {"neighbours": False},
        "the same for every gamma, draft and thread count; not for every slot and neighbour",
    ),
    "threads": (
        lambda engine, *_: engine.threads == 1, {"threads": False},
        "the same for every gamma, draft, slot and neighbour; not for every thread count",
    ),
    "rows": (
        lambda engine, *_: engine.high > 300, {"rows": False},
        NOT,
    ),
    "slots": (
        lambda engine, *_: engine.slots > 1, {},
        f"{EVERY}; one slot and several differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_nothing_else(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, found, promise = FAULTS[name]
    monkeypatch.setattr(FaultyEngine, "fault", staticmethod(fault))
    monkeypatch.setattr(invariance, "host_engine", lambda _: FaultyEngine)
    manifest = make_manifest(slots=3, max_len=2048)
    facts = measure(Path(), manifest)
    usual = CallBits(WIDTHS, [], neighbours=True, threads=True, rows=True)
    assert facts.several == dataclasses.replace(usual, **found)
    assert facts.slots == (name != "slots")
    manifest = dataclasses.replace(manifest, invariance=facts)
    assert promised_bits(manifest, 3, 2).line() == f"bits: {promise}"


@pytest.mark.parametrize(
    ("dtype", "widths", "promise"),
    [("float16", WIDTHS[1:], (2, ALL)), ("bfloat16", WIDTHS[-2:], (1, ("thread count",)))],
)
def test_narrow_calls_are_not_trusted_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: str, widths: list[int], promise: tuple[int, Any]
) -> None:
    """Fault: they agreed on the measured text, and one token in ten differed in longer ones."""
    monkeypatch.setattr(invariance, "host_engine", lambda _: FaultyEngine)
    manifest = make_manifest(slots=3, max_len=2048)
    target = dataclasses.replace(manifest.pair.target, dtype=dtype)
    manifest = dataclasses.replace(manifest, pair=dataclasses.replace(manifest.pair, target=target))
    facts = measure(Path(), manifest)
    assert facts.one.widths == facts.several.widths == widths
    bits = promised_bits(dataclasses.replace(manifest, invariance=facts), 1, 1)
    assert (bits.min_width, bits.same) == promise


def manifest_with(**invariance: Any) -> Manifest:
    calls = CallBits([2, 3, 16], [1], neighbours=True, threads=True, rows=True)
    facts = {"processor": processor(), "one": calls, "several": calls, "slots": True}
    return dataclasses.replace(make_manifest(), invariance=Invariance(**facts | invariance))


def test_what_is_promised() -> None:
    """A promise is made only for measurements with these libraries on this processor."""
    bits = promised_bits(manifest_with(), 1, 1)
    assert (bits.min_width, bits.same, bits.other) == (2, ALL, ())
    bits = promised_bits(manifest_with(), 1, 1, plain_width=1)
    assert bits.min_width == 1 and bits.forgone
    assert bits.json_object() == {
        "same": ("thread count",), "other": ALL[:4], "narrowest_call": 1, "forgone": True,
        "slots": True,
    }  # fmt: skip
    assert bits.line().endswith("neighbour (plain steps of one token)")
    any_width = CallBits([1, 2, 3, 16], [], neighbours=True, threads=True, rows=True)
    bits = promised_bits(manifest_with(one=any_width), 1, 2)
    assert bits.min_width == 1, "no minimum width where it has no use"
    assert bits.independent_of_gamma
    for why, unknown in {
        "without MEASURE=0": promised_bits(make_manifest(), 1, 2),
        "with X 1, and 2 is installed; install": promised_bits(
            manifest_with(), 1, 2, "X 1, and 2 is installed"
        ),
        "another processor; build again": promised_bits(manifest_with(processor="another"), 1, 2),
    }.items():
        assert unknown.min_width == 2 and not unknown.same
        assert unknown.line().startswith("bits: nothing is promised: ") and why in unknown.line()


def test_a_real_engine(llama_graphs: Path, tmp_path: Path) -> None:
    """It is measured once per bundle."""
    out, options = tmp_path / "bundle", {"backend": "onnxruntime", "slots": 1}
    assert build(llama_graphs, out, measure=False, **options)
    assert read_bundle(out).invariance is None
    assert build(llama_graphs, out, **options) and not build(llama_graphs, out, **options)
    facts = read_bundle(out).invariance
    assert facts is not None and facts.processor == processor()
    for calls in (facts.one, facts.several):
        assert set(calls.widths) >= {2, 3, 4, 5, 6, 7, 8, 9, 16} and calls.rows
        assert calls.neighbours and calls.threads
    with load(out) as engine:
        assert engine.bits.independent_of_gamma and engine.decoder.target.min_width <= 2
        options = {"temperature": 0.7, "seed": 1, "verify": "coupled", "logprobs": 0}
        plain, drafted = (
            engine.generate("a", gamma=gamma, max_new_tokens=32, **options) for gamma in (0, 3)
        )
        assert plain.tokens[1:] and plain.logprobs == drafted.logprobs
    with load(out, plain_width=1) as engine:
        assert engine.decoder.target.min_width == 1
        if engine.bits.forgone:
            with pytest.raises(OutriderError, match="which plain_width=1 rules out"):
                engine.generate("a", verify="coupled", temperature=1.0)
    for odd in (3, 2.0, True):  # Fault: 2.0 is in (None, 1, 2)
        with pytest.raises(OutriderError, match=f"plain_width={odd} (is out|.* is not an int)"):
            load(out, plain_width=odd)


@pytest.mark.parametrize(
    ("where", "name", "value", "cause"),
    [
        (bundles.sys, "executable", "/bin/false", "exit status 1"),
        (bundles.sys, "executable", "/bin/echo", "invalid answer '-m runtime.backends.invariance"),
        (bundles, "INVARIANCE_TIMEOUT", 0, "it took more than 0 s"),
    ],
    ids=["it fails", "no answer", "too long"],
)
def test_what_cannot_be_measured_is_said(
    llama_graphs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any,
    where: Any, name: str, value: Any, cause: str,
) -> None:  # fmt: skip
    """The measurement is repeated by the next build, which rebuilds nothing else."""
    monkeypatch.setattr(where, name, value)
    out = tmp_path / "bundle"
    for first in (True, False):
        assert build(llama_graphs, out, backend="onnxruntime", slots=1) == first
        err = capfd.readouterr().err
        assert f"so the bundle promises no reproducibility: {cause}" in err
        assert "make engines MEASURE=0" in err
        assert read_bundle(out).invariance is None


def test_the_measurement_ends_with_who_asked_for_it() -> None:
    """A build that is killed can only close the pipe."""
    program = (
        "from runtime.backends.invariance import exit_when_stdout_closes as watch; import time; "
        "watch(); print('begun', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=CHECKOUT)
    assert child.stdout is not None and child.stdout.readline() == b"begun\n"
    assert child.poll() is None
    child.stdout.close()
    assert child.wait(timeout=60) == 1
