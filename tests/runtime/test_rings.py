"""Every call reads from a ring of states only those of its own sequence. A shadow engine records
from which text each row was computed, in rounds with random tokens.

Comparing outputs is not enough: wrong states of a draft cost only acceptance, and wrong states of a
target often go unnoticed by luck.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rounds import broken

from runtime.backends.engine import CachedRows, Engine, Ids, Logits
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.files.graphs import StateFacts
from runtime.round import HostRounds
from runtime.sampling.rules import Verdict
from runtime.sampling.sampler import Array, SlotSampling
from runtime.sequence import ActiveSequence, Request

KINDS = ["model", "model", "chain", "chain", "ngram", "copy", "random"]
WORDS, V, MARK = 4, 7, -9e8  # tokens; columns, of which the last two are a text's number and a mark
MAX_LEN = 56


class Interrupt(BaseException):
    pass


class Lost(BaseException):  # an Exception would count as a failure of the draft
    pass


class Texts:
    """Numbers for texts: 0 for the empty one, -1 for states that belong to no single text."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._all = [(0, 0)]  # each one's length, and the text before its last token

    def after(self, text: int, tokens: Sequence[int]) -> list[int]:
        """The numbers of `text` extended by each of the tokens in turn."""
        found = []
        for token in tokens:
            if text >= 0:
                before, text = text, self._numbers.setdefault((text, token), len(self._all))
                if text == len(self._all):
                    self._all.append((self._all[before][0] + 1, before))
            found.append(text)
        return found

    def before(self, rows: Sequence[int], start: int) -> int:
        """The text whose latest states these are, newest first; it must have `start` tokens."""
        text = expected = rows[0] if rows else 0
        for found in rows:
            if found < 0 or found != expected:
                return -1
            expected = self._all[expected][1]
        return text if self._all[text][0] == start else -1


class Shadow(Engine):
    """An engine whose logits contain the number of their text. A call may be interrupted between
    two layers; the rows that it changes are then lost."""

    vocab_size, chunk = V, 16

    def __init__(
        self, texts: Texts, dice: np.random.Generator, states: StateFacts,
        slots: int, capacity: int, min_width: int = 1,
    ):  # fmt: skip
        self.texts, self.dice, self.states = texts, dice, states
        self.slots, self.capacity, self.min_width = slots, capacity, min_width
        self.cached_rows = CachedRows(slots, V, states)
        self.ring = [[-1] * states.rows for _ in range(slots)]

    def forward(
        self, input_ids: Ids, position: Ids, logits_index: Ids, first_slot: int = 0, buffer: int = 0
    ) -> Logits:
        (batch, width), rows = input_ids.shape, self.states.rows
        assert width <= self.chunk and position.max() + width <= self.capacity
        for slot, start in enumerate(position.tolist(), first_slot):
            self.cached_rows.begin_call(slot, start, width)
        interrupted = self.dice.random() < 0.02
        logits = np.zeros((batch, len(logits_index), V), np.float32)
        for b, (start, ids) in enumerate(zip(position.tolist(), input_ids.tolist(), strict=True)):
            ring = self.ring[first_slot + b]
            reach = range(start - 1, max(-1, start - 1 - self.states.reach), -1)
            found = self.texts.after(self.texts.before([ring[i % rows] for i in reach], start), ids)
            for i, text in enumerate(found, start):
                ring[i % rows] = -1 if interrupted and ring[i % rows] != text else text
            logits[b, :, V - 2], logits[b, :, V - 1] = -np.array(found)[logits_index], MARK
        if interrupted:
            raise Interrupt
        self.cached_rows.end_call(first_slot, input_ids, position)
        return logits

    def clear(self, slot: int) -> None:
        self.cached_rows.truncate(slot, 0)


class Dice:
    """A sampler that draws at random, and checks only to which text the logits belong."""

    def __init__(self, texts: Texts, dice: np.random.Generator):
        self.vocab_size, self.texts, self.dice = V, texts, dice
        self.q = 0

    def begin(self, slots: Sequence[SlotSampling]) -> None:
        self.places, self.drafts = list(slots), [list[int]() for _ in slots]

    def draw(self, logits: Array, step: int, *, first_slot: int = 0) -> Ids:
        if self.dice.random() < 0.01:
            raise Interrupt
        self.draft_slot = first_slot
        drawn = self.dice.integers(0, WORDS, len(self.places))
        for b, place in enumerate(self.places):
            if step < place.gamma:
                row = logits[place.index - first_slot]
                if row[V - 1] == -np.inf:  # the row of a lookup: take its token
                    drawn[b] = row.argmax()
                self.drafts[b].append(int(drawn[b]))
        return drawn

    def reduce_gamma(self, b: int, gamma: int) -> None:
        self.places[b] = replace(self.places[b], gamma=gamma)

    def set_drafts(self, drafts: Sequence[Sequence[int]], first_slot: int = 0) -> None:
        self.drafts, self.draft_slot = [list(tokens) for tokens in drafts], first_slot

    def verify(
        self, logits: Array, draft_logits: Sequence[Array] | None = None, *, first_slot: int = 0
    ) -> list[Verdict]:
        verdicts = []
        for place, drafts in zip(self.places, self.drafts, strict=True):
            gamma, text = place.gamma, place.text_with(()).tolist()
            expected = self.texts.after(0, [*text, *drafts[:gamma]])[len(text) - 1 :]
            rows = logits[place.index - first_slot, : gamma + 1]
            if (-rows[:, V - 2]).tolist() != expected:
                raise Lost(f"slot {place.index}")
            for k, step in enumerate((draft_logits or ())[:gamma]):
                row = step[place.index - self.draft_slot]
                if row[V - 1] == MARK:  # the draft model's
                    self.q += 1
                    if -row[V - 2] != expected[k]:
                        raise Lost(f"slot {place.index}, the draft")
            if self.dice.random() < 0.01:
                raise OutriderError("numeric", f"slot {place.index}", "")
            accepted = int(gamma * self.dice.choice([0, 0, self.dice.random(), 1]))
            verdicts.append(Verdict(accepted, int(self.dice.integers(WORDS)), (1.0,) * accepted))
        if self.dice.random() < 0.1:
            raise Interrupt
        return verdicts


class Wavering:
    """A policy that stops drafting for a while, and starts again."""

    def __init__(self, dice: np.random.Generator, gamma: int):
        self.dice, self.gamma, self.now = dice, gamma, gamma

    def next(self) -> int:
        if self.dice.random() < 0.3:
            self.now = int(self.dice.choice([0, 0, self.gamma, self.dice.integers(self.gamma + 1)]))
        return self.now

    def observe(self, *_: object) -> None:
        pass


def a_request(dice: np.random.Generator, before: list[list[int]], max_gamma: int) -> Request:
    """A request whose prompt continues an earlier sequence, or branches off from it."""
    base = before[dice.integers(len(before))]
    length = dice.choice([len(base), len(base) - 1, len(base) - 2, dice.integers(1 + len(base))])
    more = dice.integers(0, WORDS, 1 + dice.integers(3)).tolist()
    kind, gamma = str(dice.choice(KINDS)), int(dice.choice([0, 1, *[max_gamma] * 6]))
    policy = Wavering(dice, gamma) if dice.random() < 0.3 else None

    def stop(token: int) -> None:
        if dice.random() < 0.001:
            raise Interrupt

    return Request(
        [*base[: min(length, MAX_LEN - int(dice.choice([4, 20, 30])))], *more],
        gamma=gamma, draft=kind, policy=policy, stop=stop,
        draft_threshold=0.2 if kind == "model" and policy is None and dice.random() < 0.3 else 0,
        max_new_tokens=int(dice.choice([3, 30, MAX_LEN])),
        processors=(None,),  # so that the sampler receives the text
    )  # fmt: skip


def play(seed: int, max_gamma: int, reach: int, rows: int, texts: int) -> Counter[str]:
    """Generate `texts` sequences with rings of `rows` rows, and count the events."""
    dice, known, seen = np.random.default_rng(seed), Texts(), Counter[str]()
    states, slots = StateFacts([[1, 1]], rows, reach), 3 - seed % 3
    options = known, dice, states, slots, MAX_LEN + max_gamma + 1
    target, draft = Shadow(*options, min_width=1 + seed % 2), Shadow(*options)
    outer, inner = Dice(known, dice), Dice(known, dice)
    rounds = HostRounds(target, draft, outer, inner)
    decoder = Decoder(
        rounds, vocab_size=V, max_len=MAX_LEN, max_gamma=max_gamma,
        draft_max_len=MAX_LEN - 5 * (seed % 2),
    )  # fmt: skip
    before, active = [[0]], list[ActiveSequence]()
    while seen["texts"] < texts:
        try:
            while decoder.slots.free and dice.random() < 0.7:
                active.append(decoder.begin(a_request(dice, before, max_gamma)))
                seen["reused"] += active[-1].stats.reused_tokens > 0
            if batch := [x for x in active if x.finish_reason is None and dice.random() < 0.8]:
                reading = [x for x in batch if x.is_reading]
                decoder.round(batch)
                seen["chunks"] += sum(x.is_reading for x in reading)
        except Interrupt:
            seen["interrupts"] += 1
        except OutriderError as error:
            seen[error.kind] += 1
        for sequence in active[:]:
            if sequence.error is not None:
                seen[sequence.error.kind] += 1
            if sequence.finish_reason is not None or dice.random() < 0.03:
                decoder.release(sequence)
                active.remove(sequence)
                before = [*before[-5:], list(sequence.slot.tokens)]
                seen["texts"] += 1
    seen["q"] = outer.q
    return seen


@pytest.mark.parametrize("max_gamma", [1, 2, 8])
def test_every_call_reads_its_own_text(max_gamma: int) -> None:
    """With the smallest ring that `export.part` makes; with one row less, states are lost."""
    seen, rows = Counter[str](), max_gamma + 3
    for seed in range(4):
        reach = 1 + 2 * (seed % 2)
        seen += play(seed, max_gamma, reach, rows + reach, 120)
    assert min(seen["q"] // 10, seen["interrupts"], seen["reused"], seen["chunks"]) > 60
    assert {*seen} == {"texts", "q", "interrupts", "reused", "chunks", "numeric", "busy"}
    with pytest.raises(Lost):
        play(0, max_gamma, 1, rows, 120)
    with (
        broken("backends.engine.CachedRows.resume_position", lambda *given: given[2]),
        pytest.raises(Lost),
    ):
        play(0, max_gamma, 1, rows + 1, 120)


def test_a_read_that_is_interrupted_twice_begins_anew() -> None:
    """Fault: the third time the draft went on from its old length, where its state was lost."""
    known, luck = Texts(), list[float]()
    dice = SimpleNamespace(random=lambda: luck.pop() if luck else 1.0)
    engines = [Shadow(known, dice, StateFacts([[1, 1]], 6, 1), 1, MAX_LEN + 3) for _ in range(2)]
    rounds = HostRounds(*engines, Dice(known, dice), Dice(known, dice))
    slot, tokens = rounds.slots.acquire(), [number % WORDS for number in range(40)]
    sequence = ActiveSequence(Request(tokens, gamma=2), slot)
    slot.tokens.extend(tokens)
    assert rounds.read_ahead(sequence) and slot.draft_len == 16
    for _ in range(2):
        luck.append(0.0)
        with pytest.raises(Interrupt):
            rounds.read_ahead(sequence)
    rounds.proposer.catch_up(sequence)
    read = known.after(0, tokens[: slot.draft_len])
    assert engines[1].ring[0][(slot.draft_len - 1) % 6] == read[-1] and slot.draft_len == 38
