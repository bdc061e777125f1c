"""The round at temperature 0: speculation says what the target alone says, whatever is drafted, who
joins or leaves and who sits out; the caches hold the text after every round; the counts are right;
what cannot be run is refused. Each proof comes with a control: the same check on a broken round.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fakes import VOCAB_SIZE, Context, FakeEngine, Model, near, random_model
from rounds import (
    accept_everything,
    both,
    broken,
    cases,
    check_rows,
    ids,
    make_decoder,
    oracle,
    plain,
    run,
)

from runtime.decoder import Decoder
from runtime.sampling.distribution import Distribution
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request
from runtime.slots import Slot
from runtime.stats import Stats

pytestmark = pytest.mark.usefixtures("sampler")

SEEDS = range(8)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


# --- speculation equals plain decoding --------------------------------------------------------


def compare(gamma: int, seeds: range = SEEDS) -> tuple[int, float]:
    """How many texts, one for each seed, are not what the target alone says; and the acceptance."""
    wrong, drafted, accepted = 0, 0, 0
    for seed in seeds:
        target = random_model(seed)
        decoder = make_decoder(target, near(target, 100 + seed, 1.2))
        request = Request(prompt(seed, 1 + seed), gamma=gamma, max_new_tokens=30)
        sequence = run(decoder, request)
        wrong += ids(sequence) != oracle(target, request)
        assert plain(decoder, request) == oracle(target, request)
        drafted += sequence.stats.drafted
        accepted += sequence.stats.accepted
    return wrong, accepted / max(1, drafted)


@both
@pytest.mark.parametrize("gamma", [0, 1, 2, 5, 8])
def test_temperature_0_is_plain_decoding(gamma: int) -> None:
    wrong, acceptance = compare(gamma)
    assert wrong == 0
    assert gamma == 0 or 0.1 < acceptance < 0.9, "all outcomes of a round occur"


def test_a_rule_that_accepts_everything_is_noticed() -> None:
    with broken("sampling.reference.verify", accept_everything):
        assert compare(3)[0] > 0


def restless(seed: int) -> None:
    """Another gamma every round, 0 included, as an automatic choice of gamma would do it."""
    rng = np.random.default_rng(seed)
    target = random_model(seed)
    decoder = make_decoder(target, near(target, 1, 1.0))
    request = Request(prompt(seed, 20), max_new_tokens=40)
    sequence = decoder.admit(request)
    while sequence.finish_reason is None:
        sequence.request = replace(request, gamma=int(rng.choice([0, 0, 1, 3, 8])))
        decoder.round([sequence])
        check_rows(decoder, sequence)
    assert ids(sequence) == oracle(target, request)


def test_gamma_may_change_from_round_to_round() -> None:
    for seed in SEEDS:
        restless(seed)


def test_rows_that_plain_rounds_leave_out_are_noticed() -> None:
    real = Slot.commit

    def commit(self: Slot, tokens: list[int], gamma: int) -> None:
        real(self, tokens, gamma or 1)

    with broken("slots.Slot.commit", commit), pytest.raises(AssertionError):
        restless(0)


# --- ties -------------------------------------------------------------------------------------


def tied_model(seed: int, width: int = 8) -> Model:
    """Logits of only three values: nearly every row has several largest."""

    def model(context: Context) -> np.ndarray:
        rng = np.random.default_rng([seed, len(context), *context])
        return rng.integers(0, 3, width).astype(np.float32)

    return model


def tied_origins(seeds: range) -> set[str]:
    """The origins of tokens that won a tie, over texts that must be the oracle's."""
    origins = set()
    for seed in seeds:
        target, other = tied_model(seed), tied_model(seed + 100)

        def draft(context: Context, target: Model = target, other: Model = other) -> np.ndarray:
            return (target if sum(context) % 3 else other)(context)

        decoder = make_decoder(target, draft, vocab_size=8)
        for gamma in (0, 3):
            request = Request([1, 2], gamma=gamma, max_new_tokens=24)
            sequence = run(decoder, request)
            assert ids(sequence) == oracle(target, request, 8)
            text = sequence.slot.tokens
            for i, token in enumerate(sequence.output):
                row = target(tuple(text[: 2 + i]))
                if (row == row.max()).sum() > 1:
                    origins.add(token.origin)
    return origins


@both
def test_ties_go_to_the_lowest_index_on_every_path() -> None:
    assert tied_origins(range(6)) == {"first", "plain", "accepted", "corrected", "bonus"}


def test_ties_that_go_to_the_highest_index_are_noticed() -> None:
    def last_of_ties(logits, params, *args, vocab_size=None, **kwargs):  # type: ignore[no-untyped-def]
        row = np.asarray(logits)[:vocab_size]
        return Distribution.point(len(row) - 1 - int(row[::-1].argmax()), len(row))

    with broken("sampling.reference.warp", last_of_ties), pytest.raises(AssertionError):
        tied_origins(range(2))


# --- the caches -------------------------------------------------------------------------------


class OneTokenFirst(FakeEngine):
    """A draft that feeds only the newest token first, as a round without the extra row would."""

    def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self.cache.fill(0)  # so that what it lacks is wrong rather than an error

    def forward(self, input_ids, position, logits_index, first_slot=0, buffer=0):  # type: ignore[no-untyped-def]
        if input_ids.shape[1] == 2 and self.cache[first_slot, 0]:
            input_ids, position, logits_index = input_ids[:, 1:], position + 1, logits_index - 1
        return super().forward(input_ids, position, logits_index, first_slot, buffer)


def draft_is_target(
    temperature: float, draft_engine: type[FakeEngine] = FakeEngine, tokens: int = 2002
) -> Stats:
    model = random_model(3)
    decoder = make_decoder(
        model, model, max_len=2100, max_gamma=3, order=4, draft_engine=draft_engine
    )
    request = Request(
        prompt(3, 5),
        SamplingParams(temperature=temperature, seed=11),
        gamma=3,
        max_new_tokens=tokens,
    )
    sequence = decoder.admit(request)
    while sequence.finish_reason is None:
        decoder.round([sequence])
    if draft_engine is FakeEngine:
        check_rows(decoder, sequence)
    return sequence.stats


@pytest.mark.parametrize(
    ("sampler", "temperature"),
    cases(
        [("numpy", 0.0), ("kernel", 1.0), ("device", 1.0)],
        product(("numpy", "kernel", "device", "loop"), (0.0, 1.0)),
    ),
    indirect=["sampler"],
)
def test_a_draft_that_is_the_target_is_always_accepted(temperature: float) -> None:
    stats = draft_is_target(temperature)
    assert stats.rounds >= 500
    assert stats.accepted == stats.examined == stats.drafted
    assert stats.mean_acceptance_length > 3.99


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_row_that_a_full_acceptance_leaves_out_is_noticed(temperature: float) -> None:
    stats = draft_is_target(temperature, OneTokenFirst, 102)
    assert stats.accepted < stats.drafted


GAMMA = 4


def says(position: int) -> int:
    """What the scripted target says at this position of the text."""
    return 2 + position * 7 % 29


def scripted(wrong: set[int]) -> Decoder:
    """A target with one text, and a draft that errs at these positions of it."""

    def target(context: Context) -> np.ndarray:
        return one_hot(says(len(context)))

    def draft(context: Context) -> np.ndarray:
        return one_hot(says(len(context)) - (len(context) in wrong))

    return make_decoder(target, draft)


def one_hot(token: int) -> np.ndarray:
    row = np.zeros(VOCAB_SIZE, np.float32)
    row[token] = 9
    return row


@pytest.mark.parametrize("accepted", range(GAMMA + 1))
def test_lengths_after_each_number_of_accepted_tokens(accepted: int) -> None:
    length = 5 + 1  # the prompt and the first token
    decoder = scripted({length + accepted} if accepted < GAMMA else set())
    sequence = decoder.admit(Request(list(range(5)), gamma=GAMMA))
    assert (sequence.slot.target_len, sequence.slot.draft_len) == (5, 0)
    emitted = decoder.round([sequence])[sequence]
    slot = sequence.slot
    assert len(emitted) == accepted + 1
    assert slot.tokens == [*range(5), *map(says, range(5, length + accepted + 1))]
    assert slot.pending == says(length + accepted)
    assert slot.target_len == length + accepted
    # After a full acceptance the draft never fed its last token.
    assert slot.draft_len == length + min(accepted, GAMMA - 1)
    check_rows(decoder, sequence)
    # The row of the pending token is what the next round writes first.
    decoder.round([sequence])
    check_rows(decoder, sequence)


# --- counts -----------------------------------------------------------------------------------


def test_stats_of_a_scripted_run() -> None:
    """Rounds from lengths 6 (2 accepted), 9 (all 4, bonus), 14 (none of 2), 15 (the only one)."""
    decoder = scripted({6 + 2, 14})
    sequence = run(decoder, Request(list(range(5)), gamma=GAMMA, max_new_tokens=12))
    kinds = ["first", "accepted", "accepted", "corrected"]
    kinds += ["accepted"] * 4 + ["bonus", "corrected", "accepted", "bonus"]
    assert [token.origin for token in sequence.output] == kinds
    stats = sequence.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (5, 12)
    assert (stats.rounds, stats.round_tokens) == (4, 11)
    assert stats.drafted == 4 + 4 + 2 + 1  # no more than can become text before the bonus
    assert stats.examined == 3 + 4 + 1 + 1
    assert stats.accepted == 2 + 4 + 0 + 1
    assert (stats.drafted_at, stats.accepted_at) == ([4, 3, 2, 2], [3, 2, 1, 1])
    assert stats.mean_acceptance_length == 11 / 4

    short = run(scripted({9}), Request([1], gamma=2, max_new_tokens=2)).stats
    assert (short.rounds, short.drafted, short.drafted_at) == (1, 0, [])
    total = Stats()
    total.add(stats)
    total.add(short)
    assert (total.drafted_at, total.accepted_at) == ([4, 3, 2, 2], [3, 2, 1, 1])
    assert (total.output_tokens, total.rounds, total.round_tokens) == (14, 5, 12)
    summary = total.summary(2)
    assert summary["acceptance_by_position"] == [0.75, 0.6667, 0.5, 0.5]
    assert summary["mean_acceptance_length"] == 2.4


def test_stats_of_a_text_that_ends_inside_a_block() -> None:
    """Tokens after the end were drafted, and neither examined nor accepted."""
    decoder = scripted(set())
    request = Request(list(range(5)), gamma=GAMMA, eos_token_ids=[says(7)])
    stats = run(decoder, request).stats
    assert (stats.output_tokens, stats.rounds, stats.round_tokens) == (3, 1, 2)
    assert (stats.drafted, stats.examined, stats.accepted) == (4, 2, 2)
    assert stats.accepted_at == [1, 1, 0, 0]
    assert stats.summary()["acceptance_by_position"] == [1.0, 1.0], "others were not reached"


def test_the_limits_themselves_are_allowed() -> None:
    decoder = make_decoder(random_model(1), random_model(2))
    longest = run(decoder, Request([2] * 63, gamma=8, max_new_tokens=9, min_new_tokens=9))
    assert (longest.finish_reason, len(longest.output)) == ("context", 1)
    one = run(decoder, Request([VOCAB_SIZE - 1], gamma=8, max_new_tokens=1, min_new_tokens=1))
    assert (one.finish_reason, len(one.output)) == ("length", 1)
