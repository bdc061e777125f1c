"""Concurrent use of one engine: threads, closed streams, endless batches, a closed engine."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import EOS, Context, FakeEngine, Logits, make_text_engine, near, random_model

from runtime import Options, OutriderError, Result, TextEngine
from runtime.drafts.draft import GuessedDraft
from runtime.drafts.registry import KINDS
from runtime.files.errors import attribute_errors_to
from runtime.sampling.processors import Ids
from runtime.sequence import ActiveSequence
from runtime.text import shared_rounds
from runtime.text.stream import Batch, Stream

MODEL = random_model(1, never=[EOS])


@pytest.fixture
def engine(tmp_path: Path) -> TextEngine:
    return make_text_engine(tmp_path, MODEL, near(MODEL, 2, 1.0), slots=2)


class Gate:
    """A model that blocks in the middle of a round while `closed` is set."""

    def __init__(self) -> None:
        self.closed, self.reached, self.opened = False, threading.Event(), threading.Event()

    def __call__(self, context: Context) -> Logits:
        if self.closed:
            self.reached.set()
            assert self.opened.wait(30)
        return MODEL(context)


def test_more_callers_than_slots(engine: TextEngine) -> None:
    """Callers wait for a slot, and each gets the tokens it gets alone. Fault: "busy" at once."""
    alone = engine.generate("abc", max_new_tokens=40).token_ids
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(engine.generate, "abc", max_new_tokens=40) for _ in range(12)]
        assert all(run.result(60).token_ids == alone for run in runs)
    assert engine.decoder.slots.free == engine.slot_queue.free == 2
    assert engine.stats()["requests"] == 13


@pytest.mark.parametrize("shared", [True, False])
def test_threads_share_rounds(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Sharing changes no output. In the control, the threads take turns."""
    alone = [engine.generate(text, max_new_tokens=40).token_ids for text in ("abc", "b")]
    sizes, real = [], engine.decoder.round

    def round(batch: Collection[ActiveSequence]) -> None:
        sizes.append(len(batch))
        threading.Event().wait(0.002)  # gives the other thread time to request a round
        real(batch)

    monkeypatch.setattr(engine.decoder, "round", round)
    monkeypatch.setattr(shared_rounds, "WAIT_SHARE", 1000.0)  # a round takes two milliseconds
    if not shared:
        monkeypatch.setattr(engine, "round", lambda some: engine._run_round(lambda: list(some)))
    begun = threading.Barrier(2)

    def text(prompt: str) -> list[int]:
        with engine.stream(prompt, max_new_tokens=40) as stream:
            ids = [*next(stream).token_ids]
            begun.wait(30)
            return ids + [token for event in stream for token in event.token_ids]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(text, ("abc", "b"))) == alone
    assert max(sizes) == 1 + shared
    if shared:
        assert sizes.count(2) > len(sizes) / 2


def test_options_are_an_object_or_keywords_which_win(engine: TextEngine) -> None:
    usual = Options(max_new_tokens=3, temperature=0.7, seed=5)
    same = engine.generate("abc", **vars(usual))
    assert engine.generate("abc", usual).token_ids == same.token_ids
    assert len(engine.generate("abc", usual, max_new_tokens=2).tokens) == 2
    both = dict(engine.batch(["abc", ("abc", Options(max_new_tokens=1))], usual))
    assert both[0].token_ids == same.token_ids and len(both[1].tokens) == 1
    with pytest.raises(TypeError, match=r"no option 'temprature'\. Use temperature, or leave"):
        engine.generate("abc", usual, temprature=1)
    for odd in ({"max_new_tokens": 3}, {}, 64):
        with pytest.raises(TypeError, match="options must be an Options"):
            engine.generate("abc", odd)
    for both in (engine.batch, engine.stream_batch):
        with pytest.raises(OutriderError, match="a single prompt"):
            both("ab")


def test_a_withdrawn_sequence_is_not_in_the_round(engine: TextEngine) -> None:
    """Fault: the round writes to a released slot, which another sequence may be using by then."""
    first, second = (engine.decoder.admit(engine.request(p, Options())) for p in ("abc", "b"))
    seen: list[list[ActiveSequence]] = []
    running, leaving = threading.Event(), threading.Event()

    def run(wanted: Callable[[], list[ActiveSequence]]) -> None:
        if not seen:
            running.set()
            assert leaving.wait(30)
        seen.append(wanted())

    shared = shared_rounds.RoundSharer()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(shared.round, [first], run)
        assert running.wait(30)
        two = pool.submit(shared.round, [second], run)
        while len(shared._waiting) < 1:
            threading.Event().wait(0.001)
        (waiting,) = shared._waiting
        assert shared.is_used_by(waiting.thread)
        waiting.withdrawn = True  # as `round` records an interrupt
        assert not shared.is_used_by(waiting.thread), "its thread can use the engine again"
        leaving.set()
        one.result(30)
        two.result(30)
    assert seen == [[first], []]


@pytest.mark.parametrize("at", ["_changed.notify_all", "_wait_for_last_participants", "_run_round"])
def test_an_interrupted_round_leaves_nothing_to_the_next(engine: TextEngine, at: str) -> None:
    """Fault: the next round writes to a released slot, or waits for a round that never ends."""
    first, second = (engine.decoder.admit(engine.request(p, Options())) for p in ("abc", "b"))
    seen: list[list[ActiveSequence]] = []

    def run(wanted: Callable[[], list[ActiveSequence]]) -> None:
        seen.append(wanted())

    shared = shared_rounds.RoundSharer()
    with interrupted_once(shared, at), pytest.raises(KeyboardInterrupt):
        shared.round([first], run)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(shared.round, [second], run).result(30)
    assert seen == [[second]]


def test_an_interrupt_loses_no_tokens_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the end of a round that one thread ran for two sequences. Fault: the other sequence
    lost the tokens of that round."""
    engine = make_text_engine(tmp_path, MODEL, slots=2)
    prompts, options = ("abc", "b"), Options(max_new_tokens=60, ignore_eos=True)
    alone = [engine.generate(prompt, options).token_ids for prompt in prompts]
    shared, real, interrupted = engine._round_sharer, engine.decoder.round, list[int]()

    def round(batch: Collection[ActiveSequence]) -> None:
        while len(batch) < 2 and not interrupted and not shared._waiting:
            threading.Event().wait(0.001)  # until both threads take part
        real(batch)
        if len(batch) == 2 and not interrupted:
            interrupted.append(threading.get_ident())
            raise KeyboardInterrupt

    streams = [engine.stream(prompt, options) for prompt in prompts]
    assert all(next(stream).tokens for stream in streams)  # each now has its slot
    monkeypatch.setattr(engine.decoder, "round", round)
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(list, stream) for stream in streams]
        failed = [isinstance(each.exception(30), KeyboardInterrupt) for each in readers]
    assert sorted(failed) == [False, True]
    other = failed.index(False)
    events = readers[other].result()
    assert [token.id for event in events for token in event.tokens] == alone[other][1:]


@pytest.mark.parametrize(
    "at",
    [
        "slot_queue._try_grant", "_round_sharer._join", "_round_sharer._run_round",
        "_round_sharer.forget", "decoder.release", "count",
    ],
)  # fmt: skip
def test_an_interrupt_leaves_no_slot_taken(tmp_path: Path, at: str) -> None:
    engine = make_text_engine(tmp_path, MODEL)
    text = engine.generate("abc").text
    once = interrupted_once(engine, at, after=at != "decoder.release")
    with once, pytest.raises(KeyboardInterrupt):
        engine.generate("abc")
    with ThreadPoolExecutor(1) as pool:  # a round that is not over would stop it
        assert pool.submit(engine.generate, "abc").result(30).text == text
    assert engine.decoder.slots.free == engine.slot_queue.free == 1


def test_a_dropped_stream_whose_draft_fails_harms_no_other(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its error is logged, or raised if the stream is closed. Fault: the next caller got it."""

    class Unforgetting(GuessedDraft):
        def guess(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
            return []

        def forget(self, sequence: ActiveSequence) -> None:
            raise KeyError("lost")

    monkeypatch.setitem(KINDS, "unforgetting", Unforgetting)
    text = engine.generate("abc").text
    stream = engine.stream("abc", draft="unforgetting")
    assert next(stream).tokens and next(stream).tokens
    del stream
    gc.collect()
    assert engine.generate("abc").text == text
    (message,) = caplog.messages
    assert message.startswith("a stream was closed, but option: draft=unforgetting raised KeyError")
    with pytest.raises(OutriderError, match="draft=unforgetting raised KeyError"):
        engine.generate("abc", draft="unforgetting")
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


def test_an_interrupt_leaves_no_slot_to_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each line of `Batch._start_next` in turn. Fault: a slot was lost if the interrupt came
    after a text had taken it and before the batch had recorded that."""
    engine = make_text_engine(tmp_path, MODEL)
    start, lines = Batch._start_next, 0

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code is not start.__code__:
            return None
        lines += event == "line"
        if lines == at:
            raise KeyboardInterrupt
        return interrupt

    def traced(batch: Batch) -> None:
        monkeypatch.setattr(Batch, "_start_next", start)  # the first prompt only
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            start(batch)
        finally:
            sys.settrace(before)

    for at in range(1, 100):
        lines = 0
        monkeypatch.setattr(Batch, "_start_next", traced)
        with suppress(KeyboardInterrupt):
            list(engine.batch(["abc"]))
        assert engine.decoder.slots.free == engine.slot_queue.free == 1, at
        if lines < at:
            break
    assert at > 5


@contextmanager
def interrupted_once(thing: Any, at: str, *, after: bool = False) -> Iterator[None]:
    """Raise KeyboardInterrupt in the first call of the method `at` of `thing`: before it runs, or
    after."""
    *owners, name = at.split(".")
    for owner in owners:
        thing = getattr(thing, owner)
    call, calls = getattr(thing, name), []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(name)
        result = call(*args, **options) if after or len(calls) > 1 else None
        if len(calls) == 1:
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thing, name, interrupted)
        yield


def test_a_stream_is_closed_by_another_thread(tmp_path: Path) -> None:
    """Fault: "generator already executing", and the generation continues to its end."""
    gate = Gate()
    engine = make_text_engine(tmp_path, gate)
    stream = engine.stream("abc")
    next(stream)
    gate.closed = True
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        assert gate.reached.wait(30)  # the other thread is in a round
        stream.close()
        assert engine.slot_queue.free == 0
        gate.opened.set()
        assert len(rest.result(30)) <= 1
    assert stream.result is None
    assert engine.decoder.slots.free == engine.slot_queue.free == 1
    stream.close()
    assert list(stream) == []


def test_a_stream_that_waits_is_closed(tmp_path: Path) -> None:
    engine = make_text_engine(tmp_path, MODEL)
    with engine.stream("abc") as first, ThreadPoolExecutor(1) as pool:
        next(first)
        second = engine.stream("abc")
        rest = pool.submit(list, second)
        while not engine.slot_queue._waiting:
            threading.Event().wait(0.001)
        second.close()
        assert rest.result(30) == []
    assert engine.slot_queue.free == 1


@pytest.mark.parametrize("by", ["read_prompt", "read_ahead"])
def test_a_stream_is_closed_while_its_prompt_is_read(engine: TextEngine, by: str) -> None:
    """By the target or the draft. Fault: a client that has gone holds the engine until then. And
    without that: each event has tokens."""
    options, rounds, reads = Options(max_new_tokens=9), engine.decoder.rounds, list[Any]()
    assert all(event.token_ids for event in engine.stream("abc" * 20, options))
    stream, read = engine.stream("bca" * 20, options), getattr(rounds, by)
    if by == "read_ahead":
        next(stream)

    def recorded(sequence: ActiveSequence) -> Any:
        reads.append(read(sequence))
        engine.slot_queue.cancel(stream._caller)
        return reads[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, by, recorded)
        assert list(stream) == [] and len(reads) == 1
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


def test_the_texts_of_a_batch_go_on_while_it_reads_a_prompt(engine: TextEngine) -> None:
    """Fault: they stood still until the whole prompt was read."""
    prompts, round, lengths = ["b", "abc" * 20], engine.decoder.round, list[int]()  # 4 chunks of 16

    def recorded(batch: Collection[ActiveSequence]) -> None:
        round(batch)
        if any(sequence.is_reading for sequence in batch):
            lengths.append(sum(len(sequence.output) for sequence in batch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.decoder, "round", recorded)
        results = dict(engine.batch(prompts, max_new_tokens=40))
    for number, prompt in enumerate(prompts):
        alone = engine.generate(prompt, max_new_tokens=40)
        assert results[number].token_ids == alone.token_ids
    assert len(lengths) >= 3 and lengths == sorted({*lengths})


def test_a_new_text_takes_part_in_the_next_round(tmp_path: Path) -> None:
    """Fault: it waited for the engine's lock, which the next round of another thread took first."""
    gate, batches = Gate(), list[int]()
    engine = make_text_engine(tmp_path, gate, slots=2)
    other, round = engine.stream("b", max_new_tokens=20), engine.decoder.round
    next(other)

    def recorded(batch: Collection[ActiveSequence]) -> None:
        batches.append(len(batch))
        round(batch)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(engine.decoder, "round", recorded)
        gate.closed = True
        rest = pool.submit(list, other)
        assert gate.reached.wait(30)
        new = pool.submit(next, engine.stream("abc"))
        for _ in range(5000):
            if not engine._round_sharer._waiting:
                threading.Event().wait(0.001)
        gate.closed = False
        gate.opened.set()
        assert new.result(30).tokens and rest.result(30)
    assert batches[:2] == [1, 2]


def test_a_text_ends_without_waiting_for_a_round(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: its last event came after the next round of another thread, to free the slot."""
    count, running, ended = engine.count, threading.Event(), threading.Event()

    def run() -> None:
        def run_round(wanted: Any) -> None:
            with engine._decoder_lock:
                running.set()
                assert ended.wait(10)

        engine._round_sharer.round([], run_round)

    def count_while_a_round_runs(result: Result) -> None:
        other.append(pool.submit(run))
        assert running.wait(10)
        count(result)

    other = list[Future[None]]()
    monkeypatch.setattr(engine, "count", count_while_a_round_runs)
    with ThreadPoolExecutor(1) as pool:
        assert engine.generate("abc", max_new_tokens=1).tokens
        assert other[0].running() and engine.slot_queue.free == 2
        ended.set()
    monkeypatch.undo()
    assert engine.generate("abc").tokens and engine.decoder.slots.free == 2


def test_the_first_of_two_errors_is_raised(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: the second one, of clearing the slot; and then the stream began anew."""
    for name in ("read_prompt", "clear"):

        def failing(sequence: ActiveSequence, name: str = name) -> None:
            raise OutriderError("backend", name, "Restart.")

        monkeypatch.setattr(engine.decoder.rounds, name, failing)
    stream = engine.stream("abc")
    with pytest.raises(OutriderError, match="read_prompt"):
        next(stream)
    assert list(stream) == []
    assert caplog.messages == ["a stream was closed, but backend: clear. Restart"]
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


def test_results_come_before_what_follows_them(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a result was lost with an error of the engine in the same round; a batch of prompts
    that are refused returned nothing before their end."""
    refused = engine.batch(itertools.repeat(""))
    assert [next(refused)[1].error.kind for _ in range(3)] == ["prompt"] * 3
    read = engine.decoder.rounds.read_prompt

    def failing(sequence: ActiveSequence) -> Any:
        if len(sequence.request.prompt) == 3:
            raise OutriderError("backend", "lost", "Restart.")
        return read(sequence)

    monkeypatch.setattr(engine.decoder.rounds, "read_prompt", failing)
    for prompts in (["ab", "abc"], ["abc", "ab"]):
        batch = engine.batch(itertools.chain(prompts, "b"), max_new_tokens=1)
        assert next(batch)[1].finish_reason == "length"
        with pytest.raises(OutriderError, match="lost"):
            next(batch)
        assert next(batch, None) is None
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


@pytest.mark.parametrize("kind", ["backend", "option", "busy"])
def test_an_engine_that_fails_ends_a_batch(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Not a request that does. Fault: each of its prompts, of which there may be no end, got the
    engine's error as its result."""
    lost = OutriderError(kind, "lost", "Find it.")

    def failing(sequence: ActiveSequence) -> None:
        raise lost

    monkeypatch.setattr(engine.decoder.rounds, "read_prompt", failing)
    batch = engine.batch(["ab"] * 2)
    if kind == "backend":
        with pytest.raises(OutriderError, match="lost"):
            next(batch)
    else:
        assert [result.error for _, result in batch] == [lost] * 2
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


def test_a_stream_that_nobody_refers_to(engine: TextEngine) -> None:
    for _ in range(5):
        next(engine.stream("abc"))
        next(engine.batch(["abc"] * 3, max_new_tokens=3))
    assert engine.slot_queue.free == 2
    with engine.exclusive_access():
        assert engine.decoder.slots.free == 2


def test_a_stream_is_collected_anywhere(engine: TextEngine) -> None:
    """Fault: `__del__`, run by the garbage collector during a round, needed the queue's lock, and
    during a wait in the queue the round's lock: a deadlock."""
    stream = engine.stream("abc")
    next(stream)
    with engine._decoder_lock, engine.slot_queue._changed, ThreadPoolExecutor(1) as pool:
        pool.submit(stream.__del__).result(30)
    stream._ended = True  # as if it had been collected
    assert engine.slot_queue.free == 2


# Batches


def test_a_batch_is_closed_by_another_thread(tmp_path: Path) -> None:
    """Fault: the batch continues until its next sequence is finished."""
    gate = Gate()
    engine = make_text_engine(tmp_path, gate, slots=2)

    def prompts() -> Iterator[str]:
        yield "abc"
        gate.closed = True  # every prompt has been read; only rounds follow

    batch = engine.batch(prompts(), max_new_tokens=40, gamma=0)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, batch)
        assert gate.reached.wait(30)
        batch.close()
        gate.opened.set()
        assert rest.result(30) == []
    assert engine.stats()["requests"] == 0
    assert engine.slot_queue.free == 2


def test_a_batch_reads_as_slots_free(engine: TextEngine) -> None:
    """Fault: an endless iterable is read to its end before anything runs."""
    read = 0

    def prompts() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "abc"

    with engine.batch(prompts(), max_new_tokens=5) as batch:
        for done, (number, result) in enumerate(itertools.islice(batch, 20), start=1):
            assert (result.finish_reason, number < read) == ("length", True)
            assert read <= done + len(engine.decoder.slots)
    assert engine.slot_queue.free == 2


def test_one_bad_request_of_a_batch(engine: TextEngine) -> None:
    """Fault: the other requests of the batch, half done, are lost with it."""
    prompts = ["ab", ("ab", Options(gamma=99)), [], 7, ("ab", Options(seed=-1)), "cd", [True],
               np.array([[5, 6]])]  # fmt: skip
    results = dict(engine.batch(prompts, max_new_tokens=5))
    errors = [results[i].error for i in range(8)]
    kinds = [None if error is None else error.kind for error in errors]
    assert kinds == [None, "option", "prompt", "prompt", "option", None, "prompt", "prompt"]
    assert {results[i].finish_reason for i in (1, 2, 3, 4, 6, 7)} == {"error"}
    assert results[5].token_ids == engine.generate("cd", max_new_tokens=5).token_ids
    assert engine.slot_queue.free == 2


@pytest.mark.parametrize("made_here", [True, False])
def test_a_thread_of_a_pool_waits_for_a_stream_that_others_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_here: bool
) -> None:
    """Because they made it, or have advanced it too. Fault: the thread had advanced the stream
    once, and was told that it waited for itself."""
    monkeypatch.setattr("runtime.text.slot_queue.GRACE", 0.01)
    engine, options = make_text_engine(tmp_path, MODEL, slots=1), {"gamma": 0, "ignore_eos": True}
    make = partial(engine.stream, "abc", max_new_tokens=9, **options)
    with ThreadPoolExecutor(1) as pool:
        first = make() if made_here else pool.submit(make).result(30)
        pool.submit(next, first).result(30)
        if not made_here:
            next(first)
        waiting = pool.submit(list, make())
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        list(first)
        assert waiting.result(30)[-1].result is not None


@pytest.mark.parametrize("closes", [False, True])
def test_a_generator_of_prompts_and_its_batch(engine: TextEngine, closes: bool) -> None:
    """It may close the batch. Fault: if it advanced the batch, its thread waited for itself."""

    def prompts() -> Iterator[str]:
        yield "ab"
        batch.close() if closes else next(batch)
        yield "cd"

    batch = engine.batch(prompts(), max_new_tokens=3)
    if closes:
        assert list(batch) == []
    else:
        with pytest.raises(OutriderError, match="advanced the batch that it belongs to"):
            next(batch)
    assert engine.slot_queue.free == engine.decoder.slots.free == 2


def test_texts_of_a_batch_as_they_come(engine: TextEngine) -> None:
    """The events of each prompt are those of its stream, and two texts advance together."""
    prompts: list[Any] = ["ab", 7, "cd", "abcd"]
    events = list(engine.stream_batch(prompts, max_new_tokens=5))
    for number, prompt in enumerate(prompts):
        own = [event for index, event in events if index == number]
        result = own[-1].result
        assert result is not None and all(event.result is None for event in own[:-1])
        if prompt == 7:
            assert result.error is not None and result.error.kind == "prompt" and len(own) == 1
            continue
        alone = list(engine.stream(prompt, max_new_tokens=5))
        assert [event.text for event in own] == [event.text for event in alone]
        assert result.text == "".join(event.text for event in own)
    order = [index for index, event in events if event.tokens]
    assert order != sorted(order)
    assert engine.slot_queue.free == 2


class Broken(GuessedDraft):
    """Drafts `guessed` for sequences that begin with 7, once they have 8 tokens."""

    guessed: ClassVar[list[Any]] = []

    def guess(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
        first, *others = sequence.slot.tokens
        return self.guessed if first == 7 and len(others) > 6 else []


@pytest.mark.parametrize("what", ["a processor", "a draft", "floats"])
def test_what_a_hosts_own_code_raises_ends_one_text_alone(
    engine: TextEngine, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an exception in one request's processor or draft ended every sequence."""
    raised = {"a processor": "IndexError", "a draft": "KeyError", "floats": "TypeError"}[what]
    monkeypatch.setitem(KINDS, "broken", Broken)
    monkeypatch.setattr(Broken, "guessed", [1.5])
    if what == "a draft":
        monkeypatch.setattr(Broken, "guess", lambda *_: {}["no text"])

    def processor(scores: Logits, text: Ids, begin: int) -> None:
        if len(text) > begin + 3:
            raise IndexError("from the caller's code")

    own = {"processors": [processor]} if what == "a processor" else {"draft": "broken"}
    limits = {"max_new_tokens": 12, "ignore_eos": True}
    prompts = [[5, 5, 5, 5], ([7, 5, 5, 5], Options(**limits, **own)), [6, 5, 5, 5]]
    results = dict(engine.batch(prompts, **limits))
    error = results[1].error
    assert error is not None and error.kind == "option" and raised in error.cause
    assert 1 <= len(results[1].tokens) <= 4 and results[1].text, "the output until then is kept"
    for i in (0, 2):
        assert results[i].token_ids == engine.generate(prompts[i], **limits).token_ids
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(engine.generate, prompts[0], **{**limits, "max_new_tokens": 200})
        with pytest.raises(OutriderError, match=raised):
            engine.generate(prompts[1][0], options=prompts[1][1])
        assert len(other.result(60).token_ids) == 200
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


def test_an_exit_is_an_error_of_its_request_unless_a_signal_handler_made_it() -> None:
    """Fault: a SystemExit of one request's callback was raised in the thread of another one, which
    happened to run the round. Signal handlers run in the main thread."""

    def leave() -> None:
        with attribute_errors_to("a processor"):
            sys.exit(3)

    with pytest.raises(SystemExit):
        leave()
    with ThreadPoolExecutor(1) as pool, pytest.raises(OutriderError, match="raised SystemExit: 3"):
        pool.submit(leave).result(30)


@pytest.mark.parametrize("call", ["generate", "next", "exclusive"])
def test_a_callback_cannot_use_its_engine(engine: TextEngine, call: str) -> None:
    """Fault: its thread waited for itself, and all others for that."""
    stream: Stream

    def processor(scores: Logits, text: Ids, begin: int) -> None:
        if len(text) > begin + 3:
            if call == "generate":
                engine.generate("b", max_new_tokens=2)
            elif call == "next":
                next(stream)
            else:
                with engine.exclusive_access(1):
                    pass

    stream = engine.stream("abc", processors=[processor], max_new_tokens=9)
    errors: list[OutriderError] = []

    def run() -> None:
        try:
            list(stream)
        except OutriderError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # without the check it waits for ever
    thread.start()
    thread.join(30)
    assert [error.cause.startswith("a callback or signal") for error in errors] == [True]
    assert engine.generate("abc", max_new_tokens=9).token_ids
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


def test_what_interrupts_a_wait_cannot_use_the_engine(
    engine: TextEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler, while its thread waits for another's round. Fault: the handler runs a round
    of the sequence that its thread has already asked for."""
    stream, shared = engine.stream("abc", max_new_tokens=9), engine._round_sharer

    def interrupted() -> None:
        shared._runner = None  # by now
        engine.generate("b" * 40, max_new_tokens=9)

    monkeypatch.setattr(shared, "_runner", shared_rounds._RoundRequest([]))
    monkeypatch.setattr(shared._changed, "wait", interrupted)
    with pytest.raises(OutriderError, match="a callback or signal handler"):
        list(stream)
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


@pytest.mark.parametrize("lost", [KeyError("lost"), OutriderError("prompt", "lost", "Find it.")])
def test_what_the_source_raises_is_raised(engine: TextEngine, lost: Exception) -> None:
    """Fault: an error of the iterable is taken for an error of one request."""

    def prompts() -> Iterator[str]:
        raise lost
        yield "ab"

    with pytest.raises(type(lost), match="lost"):
        list(engine.batch(prompts(), max_new_tokens=5))
    assert engine.decoder.slots.free == engine.slot_queue.free == 2


def test_a_batch_leaves_slots_to_who_waits(engine: TextEngine) -> None:
    """Fault: an endless batch never leaves a slot to another caller."""
    with (
        ThreadPoolExecutor(1) as pool,
        engine.batch(itertools.repeat("ab"), max_new_tokens=9) as batch,
    ):
        next(batch)
        other = pool.submit(engine.generate, "abc", max_new_tokens=5)
        while not other.done():
            next(batch)
        assert len(other.result().tokens) == 5


# Closing


def test_a_closed_engine(engine: TextEngine) -> None:
    with engine:
        stream = engine.stream("abc")
        next(stream)
        weights = weakref.ref(engine.decoder.target)
    assert weights() is None, "the memory is released although a stream is open"
    for use in (
        lambda: next(stream),
        lambda: engine.generate("abc"),
        lambda: next(engine.batch(["abc"])),
        lambda: engine.decoder,
    ):
        with pytest.raises(OutriderError, match="bundle: the engine is closed"):
            use()
    engine.close()
    assert engine.stats()["requests"] == 0


def test_memory_is_given_back_without_the_garbage_collector(tmp_path: Path) -> None:
    """Fault: a reference cycle keeps gigabytes until the garbage collector happens to run."""
    engine = make_text_engine(tmp_path, MODEL, near(MODEL, 2, 1.0))
    engine.generate("abc", max_new_tokens=9, gamma="auto", stop="x", logprobs=2)
    list(engine.batch(["abc"], max_new_tokens=5))
    with pytest.raises(OutriderError):
        engine.generate([])
    assert isinstance(engine.decoder.target, FakeEngine)
    weights = weakref.ref(engine.decoder.target)
    gc.disable()
    try:
        del engine
        assert weights() is None
    finally:
        gc.enable()


def test_a_queue_of_length_zero(engine: TextEngine) -> None:
    full = TextEngine(engine.manifest, engine.tokenizer, engine.decoder, queue=0)
    held = [full.stream("abc") for _ in range(2)]
    for stream in held:
        next(stream)
    with ThreadPoolExecutor(1) as pool, pytest.raises(OutriderError, match="all slots are in use"):
        pool.submit(full.generate, "abc").result(30)
