"""The C session and the Python runtime give bitwise the same results: the same requests join,
advance and leave in both, in the same batches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from checkpoints import RECURRENT, TOKENS
from commands import CHECKOUT
from native_session import MAX_GAMMA, NativeSession, compare_runtimes, requests
from rounds import cases
from workshop import Workshop

from runtime import load
from runtime.files.errors import OutriderError
from runtime.files.machine import processor
from runtime.files.manifest import MANIFEST_FILE, CallBits, Invariance, read_bundle
from runtime.files.records import write_json
from runtime.text.engine import TextEngine

TINY = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "phi3", "gpt2", "olmo2",
    "cohere",
]  # fmt: skip
SLOTS = 4
CHAINED = {"temperature": 1.0, "max_new_tokens": 40}
INVARIANT = CallBits([2, 3, 16], [1], neighbours=True, threads=True, rows=True)
MEASURED = {
    "nothing": None, "usual": INVARIANT,
    "any width": replace(INVARIANT, widths=[1, 2, 16], others=[]),
    "wide": replace(INVARIANT, widths=[5, 16], others=[1, 2]),
    "no row": replace(INVARIANT, rows=False),
    "two kinds": replace(INVARIANT, widths=[2, 3], others=[1, 16]),
    "neighbours": replace(INVARIANT, neighbours=False),
}  # fmt: skip


@contextmanager
def both(bundle: Path, **config: int) -> Iterator[tuple[TextEngine, NativeSession]]:
    python = {name: value for name, value in config.items() if name != "no_reuse"}
    with (
        load(bundle, verify=False, reuse=not config.get("no_reuse"), **python) as engine,
        NativeSession(bundle, unverified=1, **config) as session,
    ):
        yield engine, session


@pytest.mark.parametrize("slots", [1, 3])
def test_requests_join_and_leave(llama_bundle: Path, slots: int) -> None:
    random = Random(slots)
    with both(llama_bundle, slots=slots, threads=1) as (engine, session):
        assert compare_runtimes(engine, session, requests(engine, 40, random), random) > 300


@pytest.mark.parametrize("name", cases(["qwen3.5"], RECURRENT))
@pytest.mark.parametrize("slots", [1, 3])
def test_texts_go_on_where_their_state_is(workshop: Workshop, name: str, slots: int) -> None:
    """A recurrent state is reused only where it matches the prompt exactly; otherwise the prompt is
    read from the start. A sequence that skips a draft call, beside other kinds of drafts, keeps its
    rows."""
    random = Random(slots)
    bundle = workshop.bundle(workshop.checkpoint(name), workshop.checkpoint(name, blur=0.2))
    with both(bundle, slots=slots, threads=1) as (engine, session):
        assert compare_runtimes(engine, session, requests(engine, 40, random), random) > 300
        chained = [
            (prompt, {**CHAINED, "draft": draft, "gamma": random.randint(1, MAX_GAMMA), "seed": i})
            for i, (prompt, _) in enumerate(requests(engine, 40, random))
            for draft in random.choices(["chain", "model"], [2, 1])
        ]
        assert compare_runtimes(engine, session, chained, random) > 300
        known = random.choices(range(200), k=60)  # too long for the first rows' state to remain
        for prompt, reused in ((known, 0), ([*known, 1, 2], 60), ([*known[:40], 3], 0)):
            number = session.admit(prompt, max_new_tokens=1, gamma=0)
            assert session.stats(number).reused_tokens == reused
            session.release(number)


def test_a_draft_that_cannot_read_every_token(workshop: Workshop) -> None:
    """The draft reads ids for which it has no embedding as 0, in a prompt and at the start of a
    round. The target has 264 tokens in 320 columns, the draft 257 in 260."""
    tokens = (*TOKENS, *(f"<extra {i}>" for i in range(7)))
    target = workshop.checkpoint("llama", tokens=tokens, vocab_size=320, num_hidden_layers=1)
    draft = workshop.checkpoint("llama", seed=7, vocab_size=260, num_hidden_layers=1)
    random = Random(7)
    with both(workshop.bundle(target, draft), slots=2, threads=1) as (engine, session):
        common = {**CHAINED, "gamma": 4, "logprobs": 2}  # log-probabilities of real tokens only
        jobs = [
            ([263, *prompt[:40], 263], {**common, "draft": kind, "seed": i})
            for i, (prompt, _) in enumerate(requests(engine, 8, random))
            for kind in ("model", "chain")
        ]
        assert compare_runtimes(engine, session, jobs, random) > 100


def test_without_the_rows_of_other_texts(llama_bundle: Path) -> None:
    random = Random(5)
    with both(llama_bundle, slots=2, threads=1, no_reuse=1) as (engine, session):
        assert compare_runtimes(engine, session, requests(engine, 10, random), random)


def test_a_corpus(llama_bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("what the text itself does not have, the corpus may have: " * 8)
    with load(llama_bundle, verify=False, threads=1, corpus=text) as engine:
        corpus = engine.tokenizer.encode(text.read_text(), add_special_tokens=False)
        options = {"draft": "ngram", "gamma": 6, "max_new_tokens": 40, "ignore_eos": True}
        prompt = corpus[3:12]
        # Finds ten tokens of the corpus at first, and then ever more of its own.
        forced = {**options, "logit_bias": {corpus[12]: 100.0}}
        expected = [engine.generate(prompt, **each) for each in (forced, options)]
        with NativeSession(llama_bundle, corpus=corpus, threads=1) as session:
            for each, result in zip((forced, options), expected, strict=True):
                number = session.admit(prompt, **each)
                assert [token.id for token in session.tokens(number)] == result.token_ids
                stats = session.stats(number)
                assert stats.drafted == result.stats.drafted
                session.release(number)
        with NativeSession(llama_bundle, threads=1) as session:  # control: without the corpus
            number = session.admit(prompt, **options)
            assert len(list(session.tokens(number))) == 40
            assert session.stats(number).drafted < stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "weights"),
    [*product(TINY, [None]), ("qwen3-moe", "int4"), ("gpt-oss", "int8"), ("deepseek3", None)],
)
def test_architectures(workshop: Workshop, name: str, weights: str | None) -> None:
    draft, random = workshop.checkpoint(name, blur=0.2), Random(name)
    options = {"weights": weights, "draft_weights": weights} if weights else {}
    bundle = workshop.bundle(workshop.checkpoint(name), draft, measure=True, **options)
    with both(bundle, slots=SLOTS, threads=1) as (engine, session):
        assert session.facts.output_invariant == engine.bits.independent_of_gamma
        assert compare_runtimes(engine, session, requests(engine, 60, random), random) > 500


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["full", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_bundled_pair(workshop: Workshop, weights: str, threads: int) -> None:
    bundle = workshop.bundle(
        CHECKOUT / "models" / "target", CHECKOUT / "models" / "draft",
        measure=True, max_len=1536, weights=weights, draft_weights=weights,
    )  # fmt: skip
    random = Random(threads)
    with pytest.raises(OutriderError, match=r"^memory: .*65536 slots need"):
        NativeSession(bundle, slots=1 << 16)
    with both(bundle, slots=SLOTS, threads=threads) as (engine, session):
        assert compare_runtimes(engine, session, requests(engine, 200, random), random) > 2000


def test_what_is_refused(llama_bundle: Path) -> None:
    """Invalid options and prompts are refused with the same kind of error as in Python; none is
    silently accepted."""
    wrong: list[dict[str, Any]] = [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": 1e9},
        {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 2.0},
        {"repetition_penalty": 0.0}, {"frequency_penalty": 3.0}, {"lenience": 0.0},
        {"lenience": 0.0, "temperature": 1.0}, {"lenience": 0.5, "verify": "block"},
        {"verify": "sigmoid"}, {"gamma": 9},
        {"gamma": 0, "draft": "model"}, {"gamma": 2, "draft": "none"},
        {"gamma": 0, "verify": "block"}, {"max_new_tokens": 0}, {"logprobs": 10**6},
        {"min_new_tokens": 9, "max_new_tokens": 8}, {"logit_bias": {10**6: 1.0}},
        {"logit_bias": {1: 101.0}}, {"logit_bias": [(5, 1.0), (5, 2.0)]},
        {"stop_token_ids": [10**6]},
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
    """Whether the output depends on gamma follows from the build's measurements. The coupled rule
    is refused where a plain width of 1 gives that invariance up."""
    bundle = Path(shutil.copytree(llama_bundle, tmp_path / "bundle"))
    if (calls := MEASURED[found]) is not None:
        invariance = Invariance(processor(), one=calls, several=calls, slots=True)
        manifest = replace(read_bundle(bundle, verify=False), invariance=invariance)
        write_json(bundle / MANIFEST_FILE, "manifest", manifest)
    with both(bundle, threads=1, **({"plain_width": width} if width else {})) as (engine, session):
        same_text = {"gamma", "draft", "slot", "neighbour"} <= {*engine.bits.same}
        assert session.facts.output_invariant == same_text
        plain = {"gamma": 0, "max_new_tokens": 9, "logprobs": 0, "ignore_eos": True}
        number = session.admit([5, 6], **plain)
        logprobs = [token.logprob for token in session.tokens(number)]
        assert logprobs == engine.generate([5, 6], **plain).logprobs
        session.release(number)
        for generate in (engine.generate, session.generate):
            refused = pytest.raises(OutriderError, match="promises the same text for every gamma")
            with refused if engine.bits.forgone else nullcontext():
                assert generate([5, 6], verify="coupled", max_new_tokens=3)
