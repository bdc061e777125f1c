"""The C session says what the Python runtime says, to the bit: the same requests join, advance and
leave in both, in the same company."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from checkpoints import RECURRENT, TOKENS
from commands import CHECKOUT
from native_session import NativeSession, NativeToken
from rounds import cases
from workshop import MAX_GAMMA, Workshop

from runtime import load
from runtime.files.errors import OutriderError
from runtime.files.machine import processor
from runtime.files.manifest import MANIFEST_FILE, CallBits, Invariance, read_bundle
from runtime.files.records import write_json
from runtime.sequence import ActiveSequence, Token
from runtime.text.engine import TextEngine
from runtime.text.options import Options

TINY = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "phi3", "gpt2", "olmo2",
    "cohere",
]  # fmt: skip
SLOTS = 4
CHAINED = {"temperature": 1.0, "max_new_tokens": 40}
USUAL = CallBits([2, 3, 16], [1], neighbours=True, threads=True, rows=True)
MEASURED = {
    "nothing": None, "usual": USUAL, "any width": replace(USUAL, widths=[1, 2, 16], others=[]),
    "wide": replace(USUAL, widths=[5, 16], others=[1, 2]), "no row": replace(USUAL, rows=False),
    "two kinds": replace(USUAL, widths=[2, 3], others=[1, 16]),
    "neighbours": replace(USUAL, neighbours=False),
}  # fmt: skip


def some_options(random: Random, vocab_size: int) -> dict[str, Any]:
    """Any that go together."""
    chosen: dict[str, Any] = {
        "max_new_tokens": random.randint(1, 40),
        "seed": random.getrandbits(63),
        "ignore_eos": random.random() < 0.7,
        "logprobs": random.choice([None, 0, 3]),
        "temperature": random.choice([0.0, 0.0, 0.7, 1.0, 1.3]),
        "min_new_tokens": random.choice([0, 0, 1]),
    }
    if random.random() < 0.4:
        chosen |= {"top_k": random.choice([0, 20]), "top_p": random.choice([1.0, 0.9]),
                   "min_p": random.choice([0.0, 0.05])}  # fmt: skip
    if random.random() < 0.3:
        chosen |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    if random.random() < 0.2:
        chosen |= {"logit_bias": {random.randrange(vocab_size): 2.5, 0: -3.0},
                   "stop_token_ids": [random.randrange(vocab_size) for _ in range(3)]}  # fmt: skip
    draft = random.choice(["model", "model", "ngram", "copy", "chain", "random", None])
    chosen["gamma"] = random.randint(1, MAX_GAMMA) if draft else 0
    rules = ["token", "coupled", *(["block"] if draft else [])]
    if draft:
        chosen["draft"] = draft
    if draft in ("model", "chain", "random") and chosen["temperature"]:
        rules.append("sigmoid")
        if random.random() < 0.3:
            chosen["draft_temperature"] = random.choice([0.5, 1.5])
    if draft in ("model", "random") and random.random() < 0.3:
        chosen["draft_threshold"] = random.choice([0.1, 0.5])
    return chosen | {"verify": random.choice(rules)}


@contextmanager
def both(bundle: Path, **config: int) -> Iterator[tuple[TextEngine, NativeSession]]:
    python = {name: value for name, value in config.items() if name != "no_reuse"}
    with (
        load(bundle, verify=False, reuse=not config.get("no_reuse"), **python) as engine,
        NativeSession(bundle, unverified=1, **config) as session,
    ):
        yield engine, session


def same(python: Token, native: NativeToken) -> bool:
    logprob = native.logprob if native.logprob == native.logprob else None
    said = (native.id, native.origin, logprob, native.alternatives)
    return (python.id, python.origin, python.logprob, python.alternatives) == said


def in_step(
    engine: TextEngine,
    session: NativeSession,
    asked: Sequence[tuple[list[int], Mapping[str, Any]]],
    random: Random,
) -> int:
    """Join, advance and leave in both; how many tokens were compared."""
    decoder, waiting, compared = engine.decoder, list(asked)[::-1], 0
    active: dict[int, tuple[ActiveSequence, Mapping[str, Any]]] = {}

    def compare(number: int, expected: Sequence[Token]) -> None:
        nonlocal compared
        sequence, options = active[number]
        found, finish = session.take(number)
        assert len(found) == len(expected) and all(map(same, expected, found)), (options, found)
        compared += len(found)
        stats, own = session.stats(number), sequence.stats
        assert finish == sequence.finish_reason, options
        assert (stats.reused_tokens, stats.rounds, stats.drafted, stats.accepted) == (
            own.reused_tokens, own.rounds, own.drafted, own.accepted
        ), options  # fmt: skip
        if finish is not None or random.random() < 0.02:  # or the client has gone away
            decoder.release(sequence)
            session.cancel(number)
            session.release(number)
            del active[number]

    while waiting or active:
        if waiting and decoder.slots.free and random.random() < 0.6:
            prompt, options = waiting.pop()
            request = engine.request(prompt, Options(**options))
            sequence = decoder.admit(request)
            stops = options.get("stop_token_ids", ())
            number = session.admit(prompt, **{**options, "stop_token_ids": stops})
            active[number] = sequence, options
            compare(number, sequence.output[:1])
            continue
        if not active:
            continue
        before = {number: len(sequence.output) for number, (sequence, _) in active.items()}
        decoder.round([sequence for sequence, _ in active.values()])
        session.round()
        for number, length in before.items():
            compare(number, active[number][0].output[length:])
    return compared


def requests(
    engine: TextEngine, count: int, random: Random
) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts some of which begin alike, so that slots have rows of theirs, and some of whose texts
    come to the context's end."""
    vocab_size, max_len = engine.decoder.vocab_size, engine.decoder.max_len
    stems = [[random.randrange(vocab_size) for _ in range(max_len)] for _ in range(3)]
    longest = [*range(1, 61)] * 2 + [*range(max_len - 30, max_len - 4)]
    return [
        (
            random.choice(stems)[: random.choice(longest)]
            + [random.randrange(vocab_size) for _ in range(random.randint(1, 4))],
            some_options(random, vocab_size),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_join_and_leave(llama_bundle: Path, slots: int) -> None:
    random = Random(slots)
    with both(llama_bundle, slots=slots, threads=1) as (engine, session):
        assert in_step(engine, session, requests(engine, 40, random), random) > 300


@pytest.mark.parametrize("name", cases(["qwen3.5"], RECURRENT))
@pytest.mark.parametrize("slots", [1, 3])
def test_texts_go_on_where_their_state_is(workshop: Workshop, name: str, slots: int) -> None:
    """Or begin anew. Who sits a call out, beside other kinds of drafts, keeps its rows."""
    random = Random(slots)
    bundle = workshop.bundle(workshop.checkpoint(name), workshop.checkpoint(name, blur=0.2))
    with both(bundle, slots=slots, threads=1) as (engine, session):
        assert in_step(engine, session, requests(engine, 40, random), random) > 300
        chained = [
            (prompt, {**CHAINED, "draft": draft, "gamma": random.randint(1, MAX_GAMMA), "seed": i})
            for i, (prompt, _) in enumerate(requests(engine, 40, random))
            for draft in random.choices(["chain", "model"], [2, 1])
        ]
        assert in_step(engine, session, chained, random) > 300
        known = random.choices(range(200), k=60)  # what the first rows are of is lost by then
        for prompt, reused in ((known, 0), ([*known, 1, 2], 60), ([*known[:40], 3], 0)):
            number = session.admit(prompt, max_new_tokens=1, gamma=0)
            assert session.stats(number).reused_tokens == reused
            session.release(number)


def test_a_draft_that_cannot_read_every_token(workshop: Workshop) -> None:
    """It reads ids that it has no embedding for as 0, in a prompt and where a round begins. The
    target has 264 tokens in 320 columns, the draft 257 in 260."""
    tokens = (*TOKENS, *(f"<extra {i}>" for i in range(7)))
    target = workshop.checkpoint("llama", tokens=tokens, vocab_size=320, num_hidden_layers=1)
    draft = workshop.checkpoint("llama", seed=7, vocab_size=260, num_hidden_layers=1)
    random = Random(7)
    with both(workshop.bundle(target, draft), slots=2, threads=1) as (engine, session):
        asked = [
            ([263, *prompt[:40], 263], {**CHAINED, "draft": kind, "gamma": 4, "seed": i})
            for i, (prompt, _) in enumerate(requests(engine, 8, random))
            for kind in ("model", "chain")
        ]
        assert in_step(engine, session, asked, random) > 100


def test_without_the_rows_of_other_texts(llama_bundle: Path) -> None:
    random = Random(5)
    with both(llama_bundle, slots=2, threads=1, no_reuse=1) as (engine, session):
        assert in_step(engine, session, requests(engine, 10, random), random)


def test_a_corpus(llama_bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("what the text itself does not have, the corpus may have: " * 8)
    with load(llama_bundle, verify=False, threads=1, corpus=text) as engine:
        corpus = engine.tokenizer.encode(text.read_text(), add_special_tokens=False)
        options = {"draft": "ngram", "gamma": 6, "max_new_tokens": 40, "ignore_eos": True}
        prompt = corpus[3:8]
        expected = engine.generate(prompt, **options)
        with NativeSession(llama_bundle, corpus=corpus, threads=1) as session:
            number = session.admit(prompt, **options)
            assert [token.id for token in session.tokens(number)] == expected.token_ids
            stats = session.stats(number)
        with NativeSession(llama_bundle, threads=1) as session:  # the control
            number = session.admit(prompt, **options)
            assert len(list(session.tokens(number))) == 40
            assert session.stats(number).drafted < stats.drafted == expected.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights"),
    [*product(TINY, [None]), ("qwen3-moe", "int4"), ("gpt-oss", "int8"), ("deepseek3", None)],
)
def test_architectures(workshop: Workshop, name: str, weights: str | None) -> None:
    draft, random = workshop.checkpoint(name, blur=0.2), Random(name)
    few = {"weights": weights, "draft_weights": weights} if weights else {}
    bundle = workshop.bundle(workshop.checkpoint(name), draft, measure=True, **few)
    with both(bundle, slots=SLOTS, threads=1) as (engine, session):
        assert session.facts.one_text == engine.bits.of_gamma
        assert in_step(engine, session, requests(engine, 60, random), random) > 500


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bundled_pair(workshop: Workshop, weights: str | None, threads: int) -> None:
    bundle = workshop.bundle(
        CHECKOUT / "models" / "target", CHECKOUT / "models" / "draft",
        measure=True, max_len=1536, weights=weights, draft_weights=weights,
    )  # fmt: skip
    random = Random(threads)
    with pytest.raises(OutriderError, match="65536 slots need") as caught:
        NativeSession(bundle, slots=1 << 16)
    assert caught.value.kind == "memory"
    with both(bundle, slots=SLOTS, threads=threads) as (engine, session):
        assert in_step(engine, session, requests(engine, 200, random), random) > 2000


def test_what_is_refused(llama_bundle: Path) -> None:
    """The same kind of failure as in Python, and none is taken silently."""
    wrong: list[dict[str, Any]] = [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": 1e9},
        {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 2.0},
        {"repetition_penalty": 0.0}, {"frequency_penalty": 3.0}, {"lenience": 0.0},
        {"lenience": 0.0, "temperature": 1.0}, {"lenience": 0.5, "verify": "block"},
        {"verify": "sigmoid"}, {"gamma": 9},
        {"gamma": 0, "draft": "model"}, {"gamma": 2, "draft": "none"},
        {"gamma": 0, "verify": "block"}, {"max_new_tokens": 0}, {"logprobs": 10**6},
        {"min_new_tokens": 9, "max_new_tokens": 8}, {"logit_bias": {10**6: 1.0}},
        {"logit_bias": {1: 101.0}}, {"stop_token_ids": [10**6]},
        {"draft": "ngram", "verify": "sigmoid", "temperature": 1.0},
        {"draft_temperature": 0.5}, {"draft_temperature": 1e9, "temperature": 1.0},
        {"draft_threshold": 1.0}, {"draft_threshold": 0.5, "draft": "ngram"},
        {"draft_threshold": 0.5, "draft": "chain"},
    ]  # fmt: skip
    prompts: list[list[int]] = [[], [-1], [10**6], [1] * 128]
    with both(llama_bundle, slots=1, threads=1) as (engine, session):
        for prompt, options in [([5, 6], o) for o in wrong] + [(p, {}) for p in prompts]:
            kinds = []
            for generate in (engine.generate, session.generate):
                with pytest.raises(OutriderError) as caught:
                    generate(prompt, **options)
                kinds.append(caught.value.kind)
                assert caught.value.cause and caught.value.remedy
            assert kinds[0] == kinds[1], (options, kinds)
        assert session.generate([5, 6], max_new_tokens=3)  # none of them took the slot
        assert session.generate([5, 6], max_new_tokens=3, draft="none", gamma=0)


@pytest.mark.parametrize("width", [0, 1, 2])
@pytest.mark.parametrize("found", MEASURED)
def test_one_text_for_every_gamma_or_none(
    llama_bundle: Path, tmp_path: Path, found: str, width: int
) -> None:
    """By what the build measured; the coupled rule promises what a plain width of 1 gives up."""
    bundle = Path(shutil.copytree(llama_bundle, tmp_path / "bundle"))
    if (calls := MEASURED[found]) is not None:
        invariance = Invariance(processor(), one=calls, several=calls, slots=True)
        manifest = replace(read_bundle(bundle, verify=False), invariance=invariance)
        write_json(bundle / MANIFEST_FILE, "manifest", manifest)
    with both(bundle, threads=1, **({"plain_width": width} if width else {})) as (engine, session):
        same_text = {"gamma", "draft", "slot", "neighbour"} <= {*engine.bits.same}
        assert session.facts.one_text == same_text
        plain = {"gamma": 0, "max_new_tokens": 9, "logprobs": 0, "ignore_eos": True}
        number = session.admit([5, 6], **plain)
        logprobs = [token.logprob for token in session.tokens(number)]
        assert logprobs == engine.generate([5, 6], **plain).logprobs
        session.release(number)
        for generate in (engine.generate, session.generate):
            refused = pytest.raises(OutriderError, match="promises a text of every gamma")
            with refused if engine.bits.forgone else nullcontext():
                assert generate([5, 6], verify="coupled", max_new_tokens=3)
