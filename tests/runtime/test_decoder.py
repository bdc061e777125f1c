"""The round at temperature 0: speculation generates the same tokens as the target alone; the caches
hold the sequence after every round; the counts are right.
"""

from __future__ import annotations

import numpy as np
import pytest
from fakes import VOCAB_SIZE, Context, near, random_model
from rounds import (
    accept_everything,
    all_samplers,
    broken,
    check_rows,
    ids,
    make_decoder,
    oracle,
    plain,
    run,
)

from runtime.decoder import Decoder
from runtime.sequence import Request
from runtime.stats import Stats

pytestmark = pytest.mark.usefixtures("sampler")


# --- speculation equals plain decoding --------------------------------------------------------


def acceptance(gamma: int) -> float:
    """The share of accepted drafts, in sequences that must equal the target's own."""
    drafted, accepted = 0, 0
    for seed in range(8):
        target = random_model(seed)
        decoder = make_decoder(target, near(target, 100 + seed, 1.2))
        prompt = np.random.default_rng(seed).integers(0, VOCAB_SIZE, 1 + seed).tolist()
        request = Request(prompt, gamma=gamma, max_new_tokens=30)
        sequence = run(decoder, request)
        assert ids(sequence) == plain(decoder, request) == oracle(target, request)
        drafted += sequence.stats.drafted
        accepted += sequence.stats.accepted
    return accepted / drafted


@all_samplers
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_temperature_0_is_plain_decoding(gamma: int) -> None:
    assert 0.1 < acceptance(gamma) < 0.9, "all outcomes of a round occur"


def test_a_rule_that_accepts_everything_is_noticed() -> None:
    with broken("sampling.reference.verify", accept_everything), pytest.raises(AssertionError):
        acceptance(3)


@pytest.mark.parametrize("done", [False, True])
def test_an_interrupt_while_tokens_are_committed(done: bool) -> None:
    """The text ends with an error, or goes on as if there had been none. Fault: it went on with
    lengths of the caches that were not those of its tokens, and became another text."""

    class Interrupted(list):
        def extend(self, tokens):
            if done:
                super().extend(tokens)
            raise KeyboardInterrupt

    target = random_model(1)
    decoder = make_decoder(target, near(target, 2, 0.5))
    request = Request([2, 3], gamma=4, max_new_tokens=30, ignore_eos=True)
    sequence = decoder.admit(request)
    sequence.slot.tokens = Interrupted(sequence.slot.tokens)
    with pytest.raises(KeyboardInterrupt):
        decoder.round([sequence])
    sequence.slot.tokens = list(sequence.slot.tokens)
    assert (sequence.finish_reason == "error") != done
    while sequence.finish_reason is None:
        decoder.round([sequence])
    decoder.release(sequence)
    assert not done or ids(sequence) == plain(decoder, request)


# --- the caches -------------------------------------------------------------------------------


GAMMA = 4


def scripted_token(position: int) -> int:
    """The token that the scripted target generates at this position."""
    return 2 + position * 7 % 29


def scripted(wrong: set[int]) -> Decoder:
    """A target with one fixed output, and a draft that is wrong at these positions."""

    def target(context: Context) -> np.ndarray:
        return one_hot(scripted_token(len(context)))

    def draft(context: Context) -> np.ndarray:
        return one_hot(scripted_token(len(context)) - (len(context) in wrong))

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
    decoder.round([sequence])
    slot = sequence.slot
    assert len(sequence.output) == 1 + accepted + 1
    assert slot.tokens == [*range(5), *map(scripted_token, range(5, length + accepted + 1))]
    assert slot.pending == scripted_token(length + accepted)
    assert slot.target_len == length + accepted
    # If all drafts are accepted, the draft model has not processed the last one.
    assert slot.draft_len == length + min(accepted, GAMMA - 1)
    check_rows(decoder, sequence)
    # The next round first writes the row of the pending token.
    decoder.round([sequence])
    check_rows(decoder, sequence)


# --- counts -----------------------------------------------------------------------------------


def test_stats_of_a_scripted_run() -> None:
    """Rounds that start at lengths 6 (2 accepted), 9 (all 4, bonus), 14 (none of 2) and 15 (the
    only one)."""
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
    total = Stats.total([stats, short])
    assert (total.drafted_at, total.accepted_at) == ([4, 3, 2, 2], [3, 2, 1, 1])
    assert (total.output_tokens, total.rounds, total.round_tokens) == (14, 5, 12)
    summary = total.summary()
    assert summary["ttft_ms"] == round(500 * (stats.ttft + short.ttft), 3)
    assert summary["acceptance_by_position"] == [0.75, 0.6667, 0.5, 0.5]
    assert summary["mean_acceptance_length"] == 2.4


def test_stats_of_a_text_that_ends_inside_a_block() -> None:
    """Tokens after the end count as drafted, but neither as examined nor as accepted."""
    decoder = scripted(set())
    request = Request(list(range(5)), gamma=GAMMA, eos_token_ids=[scripted_token(7)])
    stats = run(decoder, request).stats
    assert (stats.output_tokens, stats.rounds, stats.round_tokens) == (3, 1, 2)
    assert (stats.drafted, stats.examined, stats.accepted) == (4, 2, 2)
    assert stats.accepted_at == [1, 1, 0, 0]
    assert stats.summary()["acceptance_by_position"] == [1.0, 1.0], "no others were reached"
