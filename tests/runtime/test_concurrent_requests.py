"""Requests that share slots and rounds: each has the same output as alone, down to the
log-probabilities.

They are admitted when a slot is free or later, skip rounds, end, are abandoned, and get slots that
hold the beginning of their prompt, so that only the rest is computed. The controls are faults by
which random numbers, rows or lengths depend on the other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rounds
from fakes import EOS, VOCAB_SIZE, Context, make_text_engine, near, random_model
from rounds import broken, cases, check_rows, finish, ids, make_decoder, outcome, run

from runtime.backends.engine import CachedRows, Engine, Ids, Source
from runtime.beam.text import beam_texts
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.sampling.philox import Purpose, uniform
from runtime.sampling.reference import NumpySampler
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams
from runtime.sequence import ActiveSequence, Request
from runtime.slots import Slot, SlotTable

pytestmark = pytest.mark.usefixtures("sampler")

MODEL = random_model(1)
DRAFT = near(MODEL, 2, 1.0)
STORY = np.random.default_rng(0).integers(0, VOCAB_SIZE, 40).tolist()
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0)
BLOCK = replace(SAMPLED, verify="block")


def decoder(slots: int) -> Decoder:
    return make_decoder(MODEL, DRAFT, slots=slots, max_len=96)


def a_request(
    rng: np.random.Generator, texts: list[list[int]], params: SamplingParams, draft: str
) -> Request:
    """A request whose prompt continues an earlier sequence, or branches off from it."""
    base = texts[rng.integers(len(texts))][: rng.integers(1, 60)]
    params = replace(params, seed=int(rng.integers(99)))
    if params.temperature:
        params = replace(params, temperature=float(rng.choice([0.6, 1.0, 1.3])))
    return Request(
        [*base, *rng.integers(0, VOCAB_SIZE, rng.integers(0, 3)).tolist()], params,
        gamma=int(rng.integers(0, 9)), draft=draft, max_new_tokens=int(rng.integers(1, 20)),
        eos_token_ids=[5, 9], logprobs=[None, 0][rng.integers(2)],
    )  # fmt: skip


def check_concurrent(
    slots: int, params: SamplingParams, seeds: range = range(4), chains: bool = False
) -> tuple[int, int]:
    """Returns how many tokens were reused, and how many sequences reached end-of-text."""
    reused, ended = 0, 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        used, texts = decoder(slots), [STORY]
        active: list[ActiveSequence] = []
        for _ in range(60):
            if used.slots.free and rng.random() < 0.5:
                draft = ("model", "chain")[len(texts) % 2] if chains else "model"
                active.append(used.begin(a_request(rng, texts, params, draft)))
                reused += active[-1].stats.reused_tokens
            batch = [x for x in active if x.finish_reason is None and rng.random() < 0.7]
            if batch:
                used.round(batch)
            for sequence in active[:]:
                check_rows(used, sequence)
                if sequence.finish_reason is not None or rng.random() < 0.05:
                    texts.append(list(sequence.slot.tokens))
                    alone = run(decoder(1), sequence.request)
                    assert outcome(sequence) == outcome(alone)[: len(sequence.output)]
                    ended += sequence.finish_reason == "eos"
                    used.release(sequence)
                    active.remove(sequence)
        assert used.slots.free == slots - len(active)
    return reused, ended


@pytest.mark.parametrize(
    ("sampler", "slots", "params"),
    cases(
        [("numpy", 3, GREEDY), ("kernel", 1, SAMPLED), ("device", 3, GREEDY),
         ("numpy", 3, SAMPLED), ("kernel", 3, BLOCK), ("device", 3, SAMPLED)],
        [(sampler, slots, params) for sampler in ("numpy", "kernel", "device")
         for slots in (1, 3) for params in (GREEDY, SAMPLED, BLOCK)],
    ),
    indirect=["sampler"],
)  # fmt: skip
def test_each_as_if_it_were_alone(slots: int, params: SamplingParams) -> None:
    on_device = rounds.SAMPLER == "device"  # slow, because emulated; and reuses no rows
    reused, ended = check_concurrent(slots, params, range(1 if on_device else 4), not on_device)
    assert (reused > 200) != on_device and ended > 0


# The controls


def idle_at_the_start(engine: object, lengths: list[int], width: int) -> list[int]:
    return [0] * len(lengths)


def keeps_lengths(self: SlotTable, *prompt: object) -> Slot:
    """The next owner of a slot inherits its lengths, so that the draft skips the prompt."""
    index = min({0, 1, 2} - self._busy)
    slot = self.__dict__.setdefault("all", {}).setdefault(index, Slot(index))
    self._busy.add(index)
    self._slots[index] = slot
    slot.tokens.clear()
    slot.target_len = 0
    return slot


def says_it_copied(
    engine: Engine, slot: int, tokens: Sequence[int], held: int, source: Source
) -> int:
    return max(held, len(tokens) // 2)


def keeps_what_was_overwritten(
    self: CachedRows, first_slot: int, input_ids: Ids, position: Ids
) -> None:
    for slot, (new, start) in enumerate(
        zip(input_ids.tolist(), position.tolist(), strict=True), first_slot
    ):
        held = self._tokens[slot]
        held[start:] = new if start + len(new) > len(held) else held[start:]


def misses_calls_of_several_slots(
    self: CachedRows,
    first_slot: int,
    input_ids: Ids,
    position: Ids,
    real: Any = CachedRows.end_call,
) -> None:
    if len(input_ids) == 1:
        real(self, first_slot, input_ids, position)


def number_of_a_slot(self: NumpySampler, place: SlotSampling, step: int, purpose: Purpose) -> float:
    return uniform(place.params.seed, place.position + step, purpose, 1 + place.index)


@pytest.mark.parametrize(
    ("name", "fault", "params"),
    [
        ("calls.idle_positions", idle_at_the_start, GREEDY),
        ("slots.SlotTable.acquire", keeps_lengths, GREEDY),
        ("calls.copy_prefix", says_it_copied, GREEDY),
        ("backends.engine.CachedRows.end_call", keeps_what_was_overwritten, GREEDY),
        ("backends.engine.CachedRows.end_call", misses_calls_of_several_slots, GREEDY),
        ("sampling.reference.NumpySampler._uniform", number_of_a_slot, SAMPLED),
    ],
)
def test_a_fault_is_noticed(name: str, fault: Callable[..., Any], params: SamplingParams) -> None:
    with broken(name, fault), pytest.raises(AssertionError):
        check_concurrent(3, params)


def test_slots_run_out_and_come_back() -> None:
    used, request = decoder(2), Request([2, 3], gamma=0)
    first, second = used.admit(request), used.admit(request)
    assert (first.slot.index, second.slot.index, used.slots.free) == (0, 1, 0)
    with pytest.raises(OutriderError, match="busy: all 2 slots are in use"):
        used.admit(request)
    used.release(first)
    third = used.admit(request)
    assert third.slot.index == 0
    used.release(first)  # released again by its former owner: the new owner keeps it
    assert used.slots.free == 0


# What is computed


def test_the_rest_is_all_that_is_computed() -> None:
    used = decoder(1)
    first = run(used, Request(STORY[:30], gamma=2, max_new_tokens=6))
    talk = [*STORY[:30], *ids(first), 9, 9]
    used.target.calls.clear()
    used.draft.calls.clear()
    second = run(used, Request(talk, gamma=2, max_new_tokens=6))
    # The last token of the first sequence was not in any cache yet.
    assert second.stats.reused_tokens == 35
    prefill = used.target.calls[0]
    assert (prefill.position, prefill.width) == ((35,), 3)
    assert used.draft.calls[0].position[0] >= 30
    assert first.stats.reused_tokens == 0
    again = run(used, Request(talk, gamma=2, max_new_tokens=6))
    assert outcome(again) == outcome(second)
    assert again.stats.reused_tokens == len(talk) - 2, "two are recomputed, for equal rounding"


def test_a_prompt_of_several_slots_is_computed_once() -> None:
    """Also while it is being computed: each slot copies the others' chunks. And then all of them
    begin at once."""
    prompt = STORY + STORY[5:]

    def computed(used: Decoder) -> list[int]:
        active = [used.begin(Request(prompt, gamma=2, max_new_tokens=9)) for _ in range(3)]
        left = list[int]()
        while reading := [sequence for sequence in active if sequence.is_reading]:
            used.round(reading)
            left.append(len(reading))
        assert left == [3, 3, 3, 3, 3, 1] or not used.slots.copies
        counts = [sum(call.width for call in used.target.calls)]
        finish(used, *active)
        for sequence in active:
            check_rows(used, sequence)
            assert outcome(sequence) == outcome(alone)
        return [*counts, sum(call.width for call in used.draft.calls if call.width > 2)]

    alone = run(decoder(1), Request(prompt, gamma=2, max_new_tokens=9))
    target, draft = computed(decoder(3))
    assert target < 75 + 2 * 16 and draft < 74 + 16  # the others compute their last few tokens
    control = decoder(3)
    control.slots.copies = False
    assert computed(control) == [3 * 75, 3 * 74]


def test_a_second_token_to_be_chosen_is_not_copied() -> None:
    """Fault: rows of a neighbour's text with the placeholder in its place."""
    prompt, texts = [5, 9, *STORY], list[list[int]]()
    for beside in (False, True):
        used = decoder(2)
        if beside:
            used.admit(Request(prompt, gamma=0))
        chosen = used.admit(Request(prompt, gamma=0, second_token_candidates=(7, 8, 10)))
        texts.append(chosen.slot.tokens)
    assert texts[0] == texts[1] and texts[0][1] != 9


def test_prompts_are_read_in_turns() -> None:
    """A chunk (16 tokens) in each round: of a long one, or of several short ones. Fault: other
    texts wait for the whole prompt, or a short prompt for all chunks of a long one."""
    used = decoder(6)
    other = used.admit(Request([5], gamma=0))
    active = [used.begin(Request(STORY[:-1] * 2, gamma=0))]  # 5 chunks
    later, reading, counts = [16, 8, 8, 1], list[list[int]](), list[int]()
    while not reading or reading[-1]:
        used.round([other, *active])
        counts.append(len(other.output))
        reading.append([number for number, each in enumerate(active) if each.is_reading])
        if later:
            active.append(used.begin(Request([5] * later.pop(0), gamma=0)))
    assert reading == [[0], [0, 1], [0, 2], [0, 2, 3], [0, 4], [0, 4], []]
    assert counts == [*range(2, 9)]


def test_a_prompt_that_cannot_be_read_ends_only_its_own_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the target or the draft. Fault: the error was raised to the callers of all texts."""
    for by in ("read_prompt", "read_ahead"):
        used = decoder(2)
        other, lost = used.admit(Request([5])), used.begin(Request(STORY))
        while by == "read_ahead" and lost.is_reading:
            used.round([lost])

        def failing(sequence: ActiveSequence) -> None:
            raise MemoryError

        monkeypatch.setattr(used.rounds, by, failing)
        used.round([other, lost])
        assert isinstance(lost.error, MemoryError) and lost.finish_reason == "error"
        assert len(other.output) > 1 and other.finish_reason is None


def test_a_text_is_charged_for_the_rounds_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of others included; but not for the time in which nothing runs. The time to the first
    token ends with the round."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("runtime.decoder.time.perf_counter", lambda: clock.now)
    used = decoder(2)
    read, run = used.rounds.read_prompt, used.rounds.run

    def timed_read(sequence: ActiveSequence) -> Any:
        clock.now += 10
        return read(sequence)

    def timed_run(plans: Any) -> Any:
        clock.now += 1
        return run(plans)

    monkeypatch.setattr(used.rounds, "read_prompt", timed_read)
    monkeypatch.setattr(used.rounds, "run", timed_run)
    first = used.admit(Request([5], gamma=0))
    second = ActiveSequence(Request(STORY[:20], gamma=0))  # two chunks
    assert not second.has_slot
    for _ in range(3):
        clock.now += 100
        first.asked_at = clock.now - 2  # as if another round had been running
        used.round([first, second])
    assert (first.stats.ttft, first.stats.elapsed) == (10, 10 + 13 + 13 + 3)
    assert (second.stats.ttft, second.stats.elapsed) == (22, 23)


def test_other_texts_go_on_while_a_draft_reads_a_prompt() -> None:
    """Fault: they wait until it has read all of the prompt, or a part of it is never read."""
    used = decoder(2)
    other = used.admit(Request([5, 6], gamma=2, max_new_tokens=40))
    long = used.admit(Request(STORY + STORY[5:], gamma=2, max_new_tokens=40))
    used.draft.calls.clear()
    counts = [len(other.output)]
    while len(long.output) == 1:
        used.round([long, other])
        counts.append(len(other.output))
    assert [call.width for call in used.draft.calls if call.width > 2] == [16, 16, 16, 16, 10]
    assert counts == sorted(set(counts)) and len(counts) == 1 + 5, counts
    finish(used, long, other)
    check_rows(used, long)
    assert outcome(long) == outcome(run(decoder(1), long.request))


def test_a_text_with_a_known_beginning_overwrites_no_other_while_there_is_an_empty_slot() -> None:
    used = decoder(3)
    first, *_ = (run(used, Request([*STORY[:40], *end], gamma=0)) for end in ([1, 2, 3], [4]))
    assert used.admit(Request([*STORY[:40], 5], gamma=0)).slot.index == 2
    assert used.admit(first.request).slot.index == first.slot.index


def test_a_continued_text_keeps_its_slot() -> None:
    """Fault: because its slot also holds rows of rejected drafts, it moved to the empty slot, and
    the next new text overwrote another one."""
    used = decoder(3)
    stopping = Request(STORY, stop=lambda token: "stop" if token == 9 else None, max_new_tokens=99)
    first, other = run(used, stopping), run(used, Request([7, 8, 9], gamma=0, max_new_tokens=40))
    rows = used.target.cached_rows
    assert rows.length(0) > rows.common_prefix(0, first.slot.tokens)
    assert run(used, Request([*first.slot.tokens, 3, 4])).slot.index == first.slot.index
    assert run(used, Request([5, 6])).slot.index not in (first.slot.index, other.slot.index)


def test_a_draft_reads_no_row_alone_after_a_copy() -> None:
    """Fault: the call of one token may round differently, so what a seed gives depended on what
    another slot held."""
    used = decoder(2)
    for ends in ([3, 4], [5, 6]):
        active = used.admit(Request([*STORY[:40], *ends], gamma=2))
        used.draft.calls.clear()
        while len(active.output) < 2:
            used.round([active])
    caught_up = used.draft.calls[0]
    assert (caught_up.width, caught_up.position) == (2, (39,))


def test_rows_of_a_failed_sequence_are_not_used_again() -> None:
    def failing(context: Context) -> np.ndarray:
        return np.full(VOCAB_SIZE, np.nan) if len(context) == 33 else MODEL(context)

    used = make_decoder(failing, DRAFT, max_len=96, order=None)
    sequence = used.admit(Request(STORY[:30], gamma=0, max_new_tokens=9))
    finish(used, sequence)
    used.release(sequence)
    assert sequence.error is not None
    assert used.admit(Request(STORY[:30], gamma=0)).stats.reused_tokens == 0


def test_beams_in_between(tmp_path: Path) -> None:
    """Beam search uses all slots without going through the slot table."""
    model = random_model(1, never=[EOS])
    engine, fresh = (
        make_text_engine(tmp_path, model, near(model, 2, 1.0), slots=4, order=None)
        for _ in range(2)
    )
    expected = fresh.generate("hello there", max_new_tokens=20).token_ids
    for _ in range(2):
        result = engine.generate("hello there", max_new_tokens=20)
        assert result.token_ids == expected
        engine.decoder.target.copy_rows = lambda *_: None
        beam_texts(engine, "hello", beams=1, max_new_tokens=3, gamma=0)
