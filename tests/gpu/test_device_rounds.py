"""The scheduler of a GPU's rounds over a recorded stream: graphs, order and buffers.

The tests of rounds prove, with the sampler "device", that its tokens follow the definition; here
they are also bitwise those that the host's rounds draw with the same kernel. The driver is
`cuda_standin.FakeDriver`: work on the stream runs only when something waits for it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import device_standin
import numpy as np
import pytest
from cuda_standin import Error, FakeDriver
from device_standin import FakeDeviceEngine
from devices import WARM, decode_randomly, decoder_on, host, steps, text
from fakes import FakeEngine, script
from rounds import broken, cases, finish

from runtime.backends.device import DeviceCall
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.gpu.launch import FILTERS, PENALTIES, SEQUENCE
from runtime.gpu.rounds import DeviceRounds, flags_of
from runtime.sampling.warp import SamplingParams
from runtime.sequence import ActiveSequence, Request

BOOKKEEPING_KERNELS = ("outrider_begin", "outrider_feed", "outrider_commit")
REQUEST = Request([2, 3, 4], WARM, gamma=3, max_new_tokens=30)


# --- what is launched, and when -----------------------------------------------------------------


def test_a_round_is_one_launch_and_one_wait(driver: FakeDriver) -> None:
    decoder = decoder_on(driver)
    sequence = decoder.admit(REQUEST)
    first = steps(driver, lambda: decoder.round([sequence]))
    # Prepared, captured, launched for this round and the next; then a wait for the results.
    assert first == ["wait", "wait", "capture", "graph", "graph", "wait for event"]
    for _ in range(3):
        again = steps(driver, lambda: decoder.round([sequence]))
        assert again == ["graph", "wait for event"], "the next round comes before the results"


def test_nothing_is_launched_ahead_where_it_is_not_wanted(driver: FakeDriver) -> None:
    decoder = decoder_on(driver, ahead=False)
    sequence = decoder.admit(REQUEST)
    decoder.round([sequence])
    assert steps(driver, lambda: decoder.round([sequence])) == ["graph", "wait for event"]
    (length,) = state(decoder, driver, sequence)["length"]
    assert length == len(sequence.slot.tokens)


def test_a_graph_for_each_shape_and_only_once(driver: FakeDriver) -> None:
    decoder = decoder_on(driver, slots=2)
    request = Request([2, 3], WARM, gamma=2, max_new_tokens=9)

    def captured(request: Request) -> int:
        sequence = decoder.admit(request)
        found = steps(driver, lambda: decoder.round([sequence]))
        decoder.release(sequence)
        return found.count("capture")

    for change in ({}, {"gamma": 0}, {"gamma": 3}, {"params": replace(WARM, top_k=5)}):
        assert captured(replace(request, **change)) == 1
        assert captured(replace(request, **change)) == 0
    other = decoder.admit(request)  # in the first slot
    assert captured(request) == 1, "a graph for two slots"
    decoder.release(other)


def test_the_kernels_of_a_round_in_order(driver: FakeDriver) -> None:
    decoder = decoder_on(driver, graphs=False, ahead=False)
    sequence = decoder.admit(Request([2, 3, 4], SamplingParams(), gamma=2, max_new_tokens=40))
    driver.launched.clear()
    decoder.round([sequence])
    bookkeeping = [name for name, *_ in driver.launched if name in BOOKKEEPING_KERNELS]
    assert bookkeeping == ["outrider_begin", "outrider_feed", "outrider_feed", "outrider_commit"]
    assert driver.launched[0][0] == "outrider_begin"
    assert driver.launched[-1][0] == "outrider_commit"
    engines = (decoder.target.calls[-1], *decoder.draft.calls[-2:])
    assert [(call.width, call.outputs) for call in engines] == [(3, 3), (2, 1), (1, 1)]


def test_a_plain_text_asks_nothing_of_a_draft(driver: FakeDriver) -> None:
    decoder = decoder_on(driver)
    text(decoder, Request([2, 3, 4], WARM, gamma=0, max_new_tokens=9))
    assert decoder.draft.calls == []


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "options", "changing"),
    cases(
        [(2, {"graphs": False}, 0.0), (1, {"ahead": False}, 0.3)],  # see test_asynchrony.py
        [
            *product(range(6), [{}, {"graphs": False}, {"ahead": False}], [0.0]),
            *product(range(3), [{"ahead": False}], [0.3]),
        ],
    ),
    ids=str,
)
def test_the_hosts_tokens(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, seed: int, options: dict, changing: float
) -> None:
    """Requests come and go. changing: probability of another gamma before a round. A round keeps
    the gamma that it was launched with, so with changes no round is launched ahead."""
    found = decode_randomly(decoder_on(driver, slots=3, **options), seed, changing)
    assert found == decode_randomly(host(monkeypatch, slots=3), seed, changing)


def test_a_device_that_is_not_told_who_takes_part_is_noticed(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the sequences of the last round take part again."""
    expected = decode_randomly(host(monkeypatch, slots=2), 0)
    real = DeviceRounds._upload_gammas

    def upload(self: DeviceRounds, wanted: dict, batch: int) -> None:
        real(self, wanted or {r: g for r, g in last.items() if r.slot.index < batch}, batch)
        last.update(wanted)

    last: dict[ActiveSequence, int] = {}
    with broken("gpu.rounds.DeviceRounds._upload_gammas", upload):
        try:
            found = decode_randomly(decoder_on(driver, slots=2), 0)
        except (OutriderError, AssertionError):
            return
    assert found != expected


def test_rows_that_the_next_round_overwrites_are_noticed(driver: FakeDriver) -> None:
    """Control: log-probabilities while the next round is launched ahead."""
    request = Request([2, 3, 4], WARM, gamma=2, max_new_tokens=12, logprobs=3)

    def tops(decoder: Decoder) -> list[object]:
        sequence = decoder.admit(request)
        finish(decoder, sequence)
        return [token.alternatives for token in sequence.output]

    right = tops(decoder_on(driver))

    def run(self: DeviceRounds, turns: list):
        for turn in turns:
            turn.sequence.request = replace(turn.sequence.request, logprobs=None)
        outcome = real(self, turns)
        for turn in turns:
            turn.sequence.request = request
        return outcome

    real = DeviceRounds.run
    with broken("gpu.rounds.DeviceRounds.run", run):
        assert tops(decoder_on(driver)) != right


# --- captures that fail ---------------------------------------------------------------------------


def enqueueing(patch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Call `before` ahead of each call of a model."""
    real = FakeDeviceEngine.enqueue

    def enqueue(self: FakeDeviceEngine, call: DeviceCall, graph: object = None) -> None:
        before()
        real(self, call, graph)

    patch.setattr(FakeDeviceEngine, "enqueue", enqueue)


@pytest.mark.parametrize("how", ["refused", "raises", "invalidates"])
def test_a_failed_capture_is_said_and_costs_no_token(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    expected = text(decoder_on(driver), REQUEST)
    decoder = decoder_on(driver)

    def fail() -> None:
        if driver._recording is not None and how == "raises":
            raise OutriderError("backend", "an engine allocates memory", "Do without.")
        driver.break_capture()

    refused: list[object] = []
    if how == "refused":
        monkeypatch.setattr(
            driver, "cuStreamBeginCapture", lambda *call: (Error(900), refused.append(call))[:1]
        )
    else:
        enqueueing(monkeypatch, fail)
    with caplog.at_level(logging.WARNING):
        found = steps(driver, lambda: text(decoder, REQUEST))
        assert "graph" not in found
        tries = found.count("capture") + len(refused)
        assert tries == 1, "a shape is tried once, not every round"
        assert text(decoder, REQUEST) == expected
    (record,) = caplog.records
    message = "rounds of gamma=3 run without a CUDA graph, slower: "
    assert message in record.getMessage()


def test_what_is_no_error_of_a_capture_is_raised(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_on(driver)
    sequence = decoder.admit(REQUEST)

    def fail() -> None:
        raise OutriderError("backend", "the engine is broken", "Build it again.")

    enqueueing(monkeypatch, fail)
    with pytest.raises(OutriderError, match="the engine is broken"):
        decoder.round([sequence])
    monkeypatch.undo()
    decoder.release(sequence)
    assert len(text(decoder, replace(REQUEST, max_new_tokens=9))) == 9


# --- the device's state ---------------------------------------------------------------------------


def state(decoder: Decoder, driver: FakeDriver, sequence: ActiveSequence) -> np.ndarray:
    """The sequence's structure after all launched work has run."""
    driver.drain()
    address = decoder.rounds._buffers.sequences + sequence.slot.index * SEQUENCE.itemsize
    return np.frombuffer(ctypes.string_at(address, SEQUENCE.itemsize), SEQUENCE)


@pytest.mark.parametrize("ahead", [True, False])
def test_the_text_on_the_device_is_the_hosts(driver: FakeDriver, ahead: bool) -> None:
    decoder = decoder_on(driver, slots=2, ahead=ahead)
    both = [
        decoder.admit(REQUEST),
        decoder.admit(Request([9], SamplingParams(), gamma=2, max_new_tokens=25)),
    ]
    while unfinished := [sequence for sequence in both if sequence.finish_reason is None]:
        decoder.round(unfinished)
        for sequence in unfinished:
            own = state(decoder, driver, sequence)
            (length,), (address,) = own["length"], own["tokens"]
            tokens = np.frombuffer(ctypes.string_at(int(address), 8 * int(length)), np.int64)
            assert length >= len(sequence.slot.tokens)
            assert ahead or length == len(sequence.slot.tokens)
            assert tokens[: len(sequence.slot.tokens)].tolist() == sequence.slot.tokens
            assert bool(own["ended"][0]) >= (sequence.finish_reason is not None)


def test_texts_allocate_nothing(driver: FakeDriver) -> None:
    """Everything is allocated once each shape has been captured, as the memory plan assumes."""
    decoder = decoder_on(driver)
    text(decoder, REQUEST)
    before = len(driver.allocated)
    for _ in range(3):
        text(decoder, REQUEST)
    sequence = decoder.admit(REQUEST)
    decoder.round([sequence])
    decoder.release(sequence)  # while a round is running
    text(decoder, REQUEST)
    assert len(driver.allocated) == before
    assert len(driver.pinned) <= 3


def test_more_ends_than_there_is_room_for(driver: FakeDriver) -> None:
    decoder = decoder_on(driver)
    request = Request([2], WARM, gamma=0, eos_token_ids=frozenset(range(300)))
    with pytest.raises(OutriderError, match=r"^option: .*300 end-of-text ids; a GPU supports 256"):
        decoder.admit(request)
    assert decoder.slots.free == 1


def test_ends_that_are_not_known_to_the_device(driver: FakeDriver) -> None:
    """A stop string: the host ends the text although the device has continued."""
    model = script("ab.cd.ef", period=True, start=1)
    made = device_standin.make_rounds(
        FakeEngine(model, capacity=73, order=None), FakeEngine(model, capacity=73, order=None),
        driver=driver, vocab_size=32, max_len=64, max_gamma=8,
    )  # fmt: skip
    decoder = Decoder(made, vocab_size=32, max_len=64, max_gamma=8)
    seen: list[int] = []

    def stop(token: int) -> str | None:
        seen.append(token)
        return "stop" if len(seen) == 6 else None

    request = Request([2], SamplingParams(), gamma=3, max_new_tokens=40, stop=stop)
    assert len(text(decoder, request)) == 6
    seen.clear()
    assert len(text(decoder, replace(request, gamma=2))) == 6


@pytest.mark.parametrize(
    ("params", "early", "expected"),
    [
        (SamplingParams(), 0, 0),
        (SamplingParams(top_k=5, verify="block"), 0, 0),  # nothing is filtered at temperature 0
        (SamplingParams(repetition_penalty=1.1), 0, PENALTIES),
        (SamplingParams(), 3, PENALTIES),
        (SamplingParams(temperature=1.0), 0, 0),
        (SamplingParams(temperature=1.0, top_k=5), 0, FILTERS),
        (SamplingParams(temperature=1.0, top_p=0.5), 0, FILTERS),
        (SamplingParams(temperature=1.0, min_p=0.5), 0, FILTERS),
    ],
)
def test_flags(params: SamplingParams, early: int, expected: int) -> None:
    request = Request([2], params, gamma=0, min_new_tokens=early, eos_token_ids=frozenset([1]))
    assert flags_of(request) == expected
