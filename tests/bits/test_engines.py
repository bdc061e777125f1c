"""Real engines return bitwise the same tokens and log-probabilities in every mode: each gamma and
draft source, alone and in a batch, with one thread and two, prompts in any chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import CHECKOUT
from workshop import MAX_GAMMA, Workshop

from export import ngram
from runtime import load
from runtime.backends import host
from runtime.certificate import check
from runtime.drafts.registry import KINDS
from runtime.files.manifest import read_bundle
from runtime.sampling import kernel
from runtime.text.engine import TextEngine
from runtime.text.options import Options

pytestmark = pytest.mark.slow  # fast tests of the parts: test_rounds.py, test_invariance.py

OWN = os.environ.get("BUNDLE")
PROMPTS = [
    "import os\n\ndef load(path):\n    with open(path) as file:\n",
    "a",
    "The quick brown fox jumps over the lazy dog, and then it",
]
GREEDY = Options(ignore_eos=True, logprobs=0)
COUPLED = [
    replace(GREEDY, temperature=0.7, top_p=0.9, seed=3, verify="coupled"),
    replace(GREEDY, temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.3, seed=4,
            verify="coupled"),
]  # fmt: skip
TINY = [
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4", "phi3", "gpt2", "olmo2",
    "cohere", "qwen3.5", "lfm2", "granite4",
]  # fmt: skip

Outputs = list[tuple[list[int], list[float | None]]]


def all_modes(engine: TextEngine) -> Iterator[dict[str, Any]]:
    """All modes but plain decoding: each gamma, each draft source, and those that measure time."""
    kinds = sorted(engine.decoder.rounds.kinds)
    yield from ({"gamma": gamma} for gamma in range(1, MAX_GAMMA + 1))
    yield from ({"draft": kind} for kind in kinds)
    yield from ({"gamma": "auto"}, {"fallback": "auto"}, {"draft_threshold": 0.4, "gamma": 8})


def outputs(engine: TextEngine, options: Options, **mode: Any) -> Outputs:
    results = [engine.generate(prompt, replace(options, **mode)) for prompt in PROMPTS]
    return [(result.token_ids, result.logprobs) for result in results]


def check_batched(engine: TextEngine, options: Options, modes: Iterable[dict[str, Any]]) -> None:
    """Requests of all modes join and leave: each has its output of plain decoding alone."""
    alone = outputs(engine, options, gamma=0)
    requests = [
        (prompt, replace(options, **mode, max_new_tokens=options.max_new_tokens - number))
        for mode in modes
        for number, prompt in enumerate(PROMPTS)
    ]
    for index, result in engine.batch(requests):
        tokens, logprobs = alone[index % len(PROMPTS)]
        count = len(result.token_ids)
        assert (result.token_ids, result.logprobs) == (
            tokens[:count], logprobs[:count]
        ), requests[index]  # fmt: skip


@contextmanager
def chunks(size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "CHUNK", size)
        yield


def check_all_modes(
    bundle: Path,
    all_options: Iterable[Options],
    *,
    modes: Callable[[TextEngine], Iterable[dict[str, Any]]] = all_modes,
    slots: int = 3,
    **sources: Any,
) -> None:
    for options in all_options:
        expected = None
        for threads, chunk in ((1, 256), (2, 16)):
            with chunks(chunk), load(bundle, threads=threads, verify=False, **sources) as engine:
                plain = outputs(engine, options, gamma=0)
                assert expected in (None, plain), (threads, chunk)
                expected = plain
                for mode in modes(engine) if threads == 1 else ({"gamma": 3},):
                    assert outputs(engine, options, **mode) == plain, mode
        with load(bundle, slots=slots, threads=1, verify=False, **sources) as engine:
            check_batched(engine, options, [{"gamma": 0}, *modes(engine)])


@pytest.mark.parametrize("name", TINY)
def test_tiny_architectures(workshop: Workshop, name: str) -> None:
    draft = workshop.checkpoint(name, blur=0.2)
    bundle = workshop.bundle(workshop.checkpoint(name), draft, measure=True)
    with load(bundle, verify=False) as engine:
        assert engine.bits.independent_of_gamma, engine.bits.line()
    check_all_modes(bundle, [replace(one, max_new_tokens=24) for one in (GREEDY, *COUPLED)])


@pytest.mark.skipif(OWN is None, reason="BUNDLE names no bundle with a draft model")
def test_a_bundle_of_your_own() -> None:
    """Fewer modes and shorter texts, for models of any size."""
    assert OWN is not None
    bundle = Path(OWN)
    with load(bundle) as engine:
        assert engine.bits.independent_of_gamma and engine.bits.slots, engine.bits.line()
    few = [{"gamma": 1}, {"gamma": 4}, {"gamma": 8}, {"draft": "ngram"}, {"gamma": "auto"}]
    coupled = replace(GREEDY, temperature=0.8, top_p=0.95, seed=3, verify="coupled")
    all_options = [replace(one, max_new_tokens=48) for one in (GREEDY, coupled)]
    check_all_modes(bundle, all_options, modes=lambda _: few, slots=4)


class TestBundledPair:
    """Trained models, which generate real text, with weights of every kind."""

    @pytest.fixture(scope="class", params=["full", "int8", "int4"])
    def sources(
        self,
        workshop: Workshop,
        tmp_path_factory: pytest.TempPathFactory,
        request: pytest.FixtureRequest,
    ) -> dict[str, Any]:
        bundle = workshop.bundle(
            CHECKOUT / "models" / "target",
            CHECKOUT / "models" / "draft",
            measure=True,
            max_len=1536,
            weights=request.param,
            draft_weights=request.param,
        )
        table = tmp_path_factory.mktemp("table") / "table.npz"
        texts = [str(path) for path in sorted((CHECKOUT / "runtime").glob("*.py"))]
        tokenizer = str(bundle / "tokenizer")
        assert ngram.main(["--tokenizer", tokenizer, "--out", str(table), *texts]) == 0
        corpus = CHECKOUT / "runtime" / "round.py"
        return {"bundle": bundle, "table": table, "corpus": corpus}

    def test_every_way(self, sources: dict[str, Any]) -> None:
        files = {name: sources[name] for name in ("table", "corpus")}
        with load(sources["bundle"], **files) as engine:
            assert engine.decoder.rounds.kinds == frozenset(KINDS)
        all_options = [replace(one, max_new_tokens=64) for one in (GREEDY, *COUPLED)]
        check_all_modes(all_options=all_options, **sources)

    def test_ten_thousand_tokens(
        self, sources: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Plain and speculative outputs agree. Control: calls of one token round differently."""
        starts = [PROMPTS[0] + f"    # {number}\n" for number in range(10)]
        options = replace(GREEDY, max_new_tokens=1024)

        def texts(engine: TextEngine, gamma: int, count: int = 10) -> Outputs:
            given = vars(replace(options, gamma=gamma))
            results = [engine.generate(start, **given) for start in starts[:count]]
            return [(result.token_ids, result.logprobs) for result in results]

        with load(sources["bundle"]) as engine:
            plain, drafted = texts(engine, 0), texts(engine, 5)
            assert sum(len(tokens) for tokens, _ in plain) >= 10_000 and drafted == plain
            certificate = check(engine, starts[0], replace(options, gamma=5, logprobs=None))
            assert certificate.passed and certificate.identical and not certificate.near_ties
        if read_bundle(sources["bundle"]).pair.target.weights:
            return  # with quantised weights it has no portable graph
        # Control: the graph without Outrider's attention, with calls of one token allowed.
        monkeypatch.setattr(kernel, "available", lambda: False)
        with load(sources["bundle"], plain_width=1) as engine:
            assert texts(engine, 0, 1) != texts(engine, 5, 1)
