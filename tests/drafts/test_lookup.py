"""Drafts without a model: the proposals equal their definition, and the output is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from fakes import near, random_model, script
from rounds import check_rows, ids, make_decoder, on_host, oracle, plain

from runtime.drafts.lookup import MAX_NGRAM, Corpus, Lookup
from runtime.files.errors import OutriderError
from runtime.files.texts import read_text
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request

pytestmark = pytest.mark.usefixtures("sampler")


def matching(text: Sequence[int], ending: Sequence[int]) -> int:
    """How many tokens at the end of both are the same."""
    pairs = zip(reversed(text), reversed(ending), strict=False)
    return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])


def proposal(text: Sequence[int], count: int, after: Sequence[int]) -> list[int]:
    """The definition of a lookup, which searches the whole text each time."""
    whole = [*text, *after]
    for n in range(MAX_NGRAM, 0, -1):
        for position in range(len(text) - 1, 0, -1):
            if (length := matching(text[:position], whole)) >= n:
                grown = list(whole)
                for i in range(min(count, length)):
                    grown.append(grown[position + i])
                return grown[len(whole) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_proposals_by_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, int(rng.integers(1, 9)), int(rng.integers(1, 80))).tolist()
    lookup = Lookup()
    for end in range(1, len(text) + 1):
        if end == len(text) or rng.random() < 0.5:  # a few tokens at a time
            lookup.update(text[:end])
            count, after = int(rng.integers(0, 12)), text[: int(rng.integers(0, 6))]
            for more in ([], after):
                assert lookup.propose(count, more) == proposal(text[:end], count, more)


@pytest.mark.parametrize("seed", range(10))
def test_a_corpus_by_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, int(rng.integers(1, 9)), int(rng.integers(1, 80))).tolist()
    corpus = Corpus(text)
    for n in range(1, MAX_NGRAM + 2):
        for _ in range(30):
            ending = rng.integers(0, 9, 6).tolist()
            end = ending[-n:]
            starts = [i + n for i in range(len(text) - n) if text[i : i + n] == end]
            expected = []
            if starts and n <= MAX_NGRAM:
                count = min(5, matching(text[: starts[-1]], ending))
                expected = text[starts[-1] : starts[-1] + count]
            assert corpus.after(ending, n, 5) == expected


def test_a_collision_in_a_corpus_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "runtime.drafts.lookup._extend", lambda keys, tokens: np.zeros(len(tokens), np.uint64)
    )
    corpus = Corpus([1, 2, 3, 1, 2, 4])
    assert corpus.after([2, 3], 2, 1) == [] and corpus.after([1, 2], 2, 1) == [4]


def test_the_longer_match_wins() -> None:
    corpus = Corpus([1, 2, 3, 4, 5, 9, 7])
    lookup = Lookup(corpus=corpus)
    lookup.update([4, 8, 3, 4])
    assert lookup.propose(3) == [5, 9]  # "3 4" in the corpus, rather than "4" in the text
    assert lookup.propose(3, [8]) == [3, 4]  # "4 8" in the text
    assert lookup.propose(3, [6]) == []


# In rounds

REPEATS = script("abcab.abcdab,", period=True, start=1)


def lookups(**request: object) -> Request:
    return Request(**{"prompt": [2], "gamma": 6, "draft": "ngram", **request})


@on_host
def test_switching_between_them() -> None:
    """The draft's cache catches up after rounds in which the draft model was not used."""
    model = random_model(3)
    decoder = make_decoder(model, near(model, 2, 0.5))
    request = lookups(max_new_tokens=40, gamma=4)
    expected = plain(decoder, request)
    sequence = decoder.admit(request)
    kinds = ["ngram", "model", "ngram", "ngram", "model"] * 9
    while sequence.finish_reason is None:
        sequence.request = replace(request, draft=kinds.pop())
        decoder.round([sequence])
        check_rows(decoder, sequence)
    assert ids(sequence) == expected


@pytest.mark.parametrize("sampler", ["numpy"], indirect=True)
def test_a_lookup_beside_a_model_stays_a_point_mass(sampler: None) -> None:
    """The row of a looked-up token gives it probability 1, whatever the draft model left there;
    otherwise it would be verified with a q that it was not drawn from."""
    decoder = make_decoder(REPEATS, near(REPEATS, 2, 1.0), order=None, slots=2)
    beside = lookups(max_new_tokens=20, params=SamplingParams(temperature=1.0, seed=2), gamma=2)
    beside = replace(beside, prompt=[2, *oracle(REPEATS, Request([2], max_new_tokens=30))])
    batch = [decoder.admit(replace(beside, draft=kind)) for kind in ("model", "ngram")]
    gammas, proposer = dict.fromkeys(batch, 2), decoder.rounds.proposer
    for sequence in proposer.sequences_behind(gammas):
        proposer.catch_up(sequence)
    drafted = proposer.propose(gammas)
    guessed = drafted.tokens[batch[1]]
    assert len(guessed) == 2
    for logits, token in zip(drafted.logits, guessed, strict=True):
        row = logits[batch[1].slot.index]
        assert row[token] == 0 and np.isneginf(np.delete(row, token)).all()


@pytest.mark.parametrize("name", [".", "missing", "/dev/zero", "latin", "a\0b"])
def test_a_corpus_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    """Fault: a file name with a null byte raised Python's ValueError."""
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(OutriderError, match="option: cannot read it: "):
        read_text(tmp_path / name, "it")
