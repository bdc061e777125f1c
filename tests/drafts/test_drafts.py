"""Other draft sources and their options: tables, chains, a corpus, a temperature and a threshold of
the draft. None of them changes the distribution of the output, and each serves its purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from commands import CHECKOUT
from exact import at, by_bisection, by_keys
from fakes import VOCAB_SIZE, near, random_model, script
from rounds import (
    accept_everything,
    broken,
    cases,
    ids,
    make_decoder,
    on_host,
    oracle,
    plain,
    run,
    run_all,
)

from export import ngram
from runtime.drafts import draft as draft_math
from runtime.drafts.draft import Sources
from runtime.drafts.lookup import Lookup
from runtime.drafts.proposer import Proposer
from runtime.drafts.registry import KINDS
from runtime.drafts.tables import Tables
from runtime.files.errors import EXIT_STATUS
from runtime.sampling.softmax import confidence
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request
from runtime.slots import Slot, SlotTable

pytestmark = pytest.mark.usefixtures("sampler")

LOOKUPS = [name for name, kind in KINDS.items() if kind.point_masses]
REPEATS = script("abcab.abcdab,", period=True, start=1)


def tables(vocab_size: int = VOCAB_SIZE, seed: int = 0, length: int = 400) -> Tables:
    rng = np.random.default_rng(seed)
    return Tables.count(rng.integers(0, vocab_size, length).astype(np.int32), vocab_size, 3)


def sampled(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": 5, **options})


# Exactness


@on_host
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"model"}))  # "model": test_decoder.py
@pytest.mark.parametrize("gamma", [1, 8])
def test_temperature_0_is_plain_decoding(kind: Any, gamma: int) -> None:
    alone = kind != "chain"
    for model, draft in product((REPEATS, random_model(1)), (True, False) if alone else (True,)):
        decoder = make_decoder(model, near(model, 2, 1.0) if draft else None, tables=tables())
        request = Request([2, 3, 2], gamma=gamma, draft=kind, max_new_tokens=40)
        sequence = run(decoder, request)
        assert ids(sequence) == plain(decoder, request) == oracle(model, request)
        assert sequence.stats.drafted > 0
        if kind == "ngram" and model is REPEATS:
            assert sequence.stats.accepted > 10
        if alone and draft:
            assert decoder.draft.calls == []


@on_host
@pytest.mark.parametrize(("kind", "rule"), [("bigram", "token"), ("skip", "block")])
def test_tables_over_five_tokens(kind: str, rule: str) -> None:
    params = at(verify=rule, top_k=4, repetition_penalty=1.3)
    distance = by_bisection(params, 2, 5, asked={"draft": kind}, tables=tables(5, length=60))
    assert distance < 1e-6


@on_host
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_a_draft_with_its_own_temperature(temperature: float) -> None:
    params = at(temperature=0.8, top_p=0.9, repetition_penalty=1.3)
    assert by_bisection(params, 2, 5, asked={"draft_temperature": temperature}) < 1e-6


@pytest.mark.parametrize(
    ("sampler", "threshold"),
    cases([("numpy", 0.75), ("kernel", 0.3)], product(("numpy", "kernel"), (0.3, 0.75))),
    indirect=["sampler"],
)
def test_drafting_that_stops_early(threshold: float) -> None:
    """Over several rounds, in which every random number is an independent draw."""
    for rule in ("token", "block"):
        asked = {"params": at(verify=rule), "draft_threshold": threshold}
        assert by_keys(2, 4, **asked) < 1e-12


# Contains every pair of tokens, so that a lookup after any of them finds two tokens or more.
_CYCLE = [x for a in range(8) for b in range(a, 8) for x in ((a, b) if a < b else (a,))]
ALL_PAIRS = _CYCLE[50:] + _CYCLE[:51]


@on_host
@pytest.mark.parametrize(
    ("gamma", "count", "seed"), cases([(2, 4, 1), (2, 4, 10)], [(1, 3, 1), (3, 5, 20)])
)
def test_a_chain(gamma: int, count: int, seed: int) -> None:
    """With seed 10 the row of a token after an accepted lookup matters, with seed 1 the numbers
    that two inner rounds might share. Seed 20 has inner and outer rounds of every outcome in a
    quarter of the runs that other seeds need."""
    proposed = 0

    def propose(self: Lookup, most: int, after: Sequence[int] = ()) -> list[int]:
        nonlocal proposed
        found = original(self, most, after)
        proposed += len(found)
        return found

    original = Lookup.propose
    with broken("drafts.lookup.Lookup.propose", propose):
        assert by_keys(gamma, count, seed, ALL_PAIRS, draft="chain") < 1e-12
    assert proposed or gamma == 1


@on_host
@pytest.mark.parametrize("rule", ["token", "block"])
def test_lookups(rule: Any) -> None:
    asked = {"prompt": ALL_PAIRS, "draft": "ngram", "params": at(verify=rule)}
    assert by_keys(2, 4, **asked) < 1e-12


def test_a_rule_that_takes_every_lookup_is_noticed() -> None:
    with broken("sampling.reference.verify", accept_everything):
        assert by_keys(2, 4, prompt=ALL_PAIRS, draft="ngram") > 0.01


def test_a_chain_that_shares_its_numbers_is_noticed() -> None:
    with broken("drafts.chain._seed", lambda sequence: sequence.request.params.seed):
        assert by_keys(2, 3, 1, ALL_PAIRS, draft="chain") > 0.01


def test_a_chain_whose_rows_are_others_is_noticed() -> None:
    """Its tokens are verified as if they had been drawn uniformly."""
    fill = Proposer._fill_row

    def flat(self: Proposer, row: Any, *others: Any) -> None:
        fill(self, row, *others)
        row[:] = 0

    with broken("drafts.proposer.Proposer._fill_row", flat):
        assert by_keys(2, 3, 1, ALL_PAIRS, draft="chain") > 0.01


# Their purpose


@on_host
def test_a_chain_drafts_what_the_model_drafts() -> None:
    """At temperature 0 the tokens are the same, with fewer calls of the draft model."""
    model = REPEATS
    draft = near(model, 2, 0.3)
    texts, calls, stats = [], [], []
    for kind in ("model", "chain"):
        decoder = make_decoder(model, draft, order=None)
        sequence = run(decoder, Request([2], gamma=6, draft=kind, max_new_tokens=50))
        texts.append([(token.id, token.origin) for token in sequence.output])
        calls.append(len(decoder.draft.calls))
        stats.append((sequence.stats.drafted, sequence.stats.accepted))
    assert texts[0] == texts[1] and stats[0] == stats[1]
    assert calls[1] < 0.6 * calls[0]


@on_host
def test_all_kinds_side_by_side() -> None:
    """Their rows share a buffer, which may be the engine's; each has the same output as alone."""
    model = random_model(4)
    kinds: list[Any] = [*sorted(KINDS), "model"]
    requests = [
        Request(
            [2, 3, 4, 2, 3], sampled(seed=i) if i % 3 else SamplingParams(), gamma=(1 + i) % 6,
            draft=kind, draft_threshold=0.2 if i == len(KINDS) else 0.0, max_new_tokens=15 + i,
        )
        for i, kind in enumerate(kinds)
    ]  # fmt: skip

    def decoder(slots: int) -> Any:
        return make_decoder(model, near(model, 2, 0.5), tables=tables(), slots=slots)

    alone = [ids(run(decoder(1), request)) for request in requests]
    for i, sequence in enumerate(run_all(decoder(len(requests)), requests)):
        assert ids(sequence) == alone[i], kinds[i]


@on_host
@pytest.mark.parametrize(("gamma", "threshold"), [(2, 0.0), (8, 0.4)])
def test_a_lookup_beside_fewer_steps(gamma: int, threshold: float) -> None:
    """A lookup drafts as much as alone, and causes no calls of the draft model."""
    lookup = Request([2, 3, 2, 3], sampled(), gamma=8, draft="ngram", max_new_tokens=40)
    steps = replace(lookup, gamma=gamma, draft="model", draft_threshold=threshold)
    decoders = [make_decoder(REPEATS, random_model(2), slots=slots) for slots in (1, 1, 2)]
    alone = [run(decoders[0], lookup), run(decoders[1], steps)]
    beside = run_all(decoders[2], [lookup, steps])
    assert [x.output for x in beside] == [x.output for x in alone]
    assert beside[0].stats.drafted == alone[0].stats.drafted > 2 * alone[0].stats.rounds
    calls = [len(decoder.draft.calls) for decoder in decoders]
    assert calls[2] == calls[1]


@on_host
def test_a_chain_near_the_end_of_a_context() -> None:
    model = REPEATS
    decoder = make_decoder(model, near(model, 1, 0.2), slots=2, max_len=48)
    requests = [
        Request([2] * length, gamma=8, draft="chain", max_new_tokens=60) for length in (3, 40)
    ]
    for sequence, request in zip(run_all(decoder, requests), requests, strict=True):
        assert sequence.finish_reason == "context"
        assert ids(sequence) == oracle(
            model, replace(request, max_new_tokens=48 - len(request.prompt))
        )


@on_host
def test_stopping_saves_drafts() -> None:
    model = random_model(3)
    request = Request([2, 3], sampled(), gamma=8, max_new_tokens=60)

    def rates(threshold: float) -> tuple[float, float]:
        decoder = make_decoder(model, near(model, 2, 1.0))
        stats = run(decoder, replace(request, draft_threshold=threshold)).stats
        return stats.accepted / stats.drafted, stats.drafted / stats.rounds

    always, seldom = rates(0.0), rates(0.4)
    assert seldom[0] > 1.3 * always[0] and seldom[1] < 0.7 * always[1]
    assert rates(0.999)[1] < 2


@on_host
def test_confidence_is_the_drafts_own() -> None:
    """Independent of the temperature at which its tokens are drawn."""
    row = np.log(np.array([0.1, 0.2, 0.7], np.float32))
    decoder = make_decoder(random_model(1), random_model(2))
    for own_temperature in (None, 0.5, 2.0):
        request = Request([2], sampled(), draft_temperature=own_temperature)
        sequence = decoder.admit(request)
        tempered = row.copy()
        draft_math.apply_draft_temperature(tempered, sequence)
        weights = np.exp(tempered / np.float32(0.9))
        expected = np.exp(row / np.float32(own_temperature or 0.9))
        np.testing.assert_allclose(weights / weights.sum(), expected / expected.sum(), rtol=1e-5)
        found = confidence(tempered, 1, draft_math.temperature_factor(sequence))
        assert found == pytest.approx(0.2, rel=1e-5)
        decoder.release(sequence)


# Tables and texts


def test_tables_by_definition() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(0, 6, 80).tolist()
    made = Tables.count(np.array(text, np.int32), 7, 3)
    unigram = np.array([text.count(x) + 1 for x in range(7)]) / (len(text) + 7)
    np.testing.assert_allclose(np.exp(made.unigram), unigram, rtol=1e-6)

    def pairs(token: int, distance: int) -> np.ndarray:
        later = [b for a, b in zip(text, text[distance:], strict=False) if a == token]
        weights = np.array([later.count(x) for x in range(7)]) + 2 * unigram
        return weights / weights.sum()

    def check(kind: str, drafts: list[int], expected: np.ndarray) -> None:
        draft = KINDS[kind](Sources(7, SlotTable(1), tables=made))
        text = SimpleNamespace(slot=Slot(0, [4, 2]))
        row = np.exp(draft.row(text, drafts).astype(np.float64))
        np.testing.assert_allclose(row / row.sum(), expected, rtol=1e-5)

    check("unigram", [], unigram)
    for drafts in ([], [3], [3, 1]):
        check("bigram", drafts, pairs((drafts or [2])[-1], 1))
        check("skip", drafts, pairs(2, len(drafts) + 1))
    check("skip", [3, 1, 0], unigram)
    check("bigram", [6], unigram)  # 6 never occurs
    assert made.after(1000, 1) is made.unigram


@on_host
def test_copying_looks_into_the_prompt_alone() -> None:
    model = REPEATS
    request = Request([9, 9], gamma=4, max_new_tokens=30)
    by_kind = {}
    for kind in sorted(LOOKUPS):
        by_kind[kind] = run(make_decoder(model, None), replace(request, draft=kind)).stats.drafted
    assert by_kind["ngram"] > 0 == by_kind["copy"]
    long = replace(request, prompt=oracle(model, Request([2], max_new_tokens=26)), draft="copy")
    assert run(make_decoder(model, None), long).stats.accepted > 15


# Files


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("def f(x):\n    return x\n\n" * 50 + "é" * 30)
    return path


TOKENIZER = CHECKOUT / "models" / "target"


def test_the_table_of_a_text(text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "table.npz"
    argv = ["--tokenizer", str(TOKENIZER), "--out", str(out), "--distances", "2", str(text_file)]
    assert ngram.main(argv) == 0
    made, tokens = ngram.count(TOKENIZER, [text_file], 2)
    assert tokens > 300 and math.isclose(np.exp(made.unigram).sum(), 1, rel_tol=1e-5)
    from transformers import AutoTokenizer

    vocabulary = AutoTokenizer.from_pretrained(TOKENIZER).get_vocab()
    read = Tables.load(out, vocabulary, len(vocabulary) + 3)
    assert len(read.unigram) == len(vocabulary) + 3
    np.testing.assert_array_equal(read.unigram[:-3], made.unigram)
    for token in (0, 50, 4000, len(vocabulary) + 1):
        row = read.after(token, 1)
        np.testing.assert_allclose(row[:-3], made.after(token, 1), rtol=1e-6)
    assert [path.name for path in out.parent.iterdir()] == ["table.npz"]


@pytest.mark.parametrize(
    ("argv", "words", "kind"),
    [
        (["--tokenizer", "nowhere", "--out", "x.npz", "{text}"], "is not a folder", "checkpoint"),
        (["--tokenizer", "{empty}", "--out", "x.npz", "{text}"], "cannot read", "checkpoint"),
        (["--tokenizer", str(TOKENIZER), "--out", "x.npz", "none"], "cannot read none", "option"),
        (["--tokenizer", str(TOKENIZER), "--out", "x.npz", "--distances", "0", "{text}"],
         "out of range", "option"),
        (["--tokenizer", str(TOKENIZER), "--out", "{text}/x.npz", "{text}"], "File exists", "disk"),
        (["--tokenizer", str(TOKENIZER), "--out", "{text}", "{text}"], "is not a table", "option"),
        (["--tokenizer", str(TOKENIZER), "--out", "", "{text}"], "is not a table", "option"),
    ],
)  # fmt: skip
def test_what_the_counting_refuses(
    argv: list[str], words: str, kind: str, text_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    places = {"{text}": str(text_file), "{empty}": str(tmp_path / "empty")}
    for name, place in places.items():
        argv = [word.replace(name, place) for word in argv]
    assert ngram.main(argv) == EXIT_STATUS[kind]
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x.npz").exists()
