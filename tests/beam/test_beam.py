"""Beam search: plain compared with enumeration and Transformers, speculative with plain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE
from fakes import CopyingFake, FakeEngine, Model, near, random_model
from transformers import AutoModelForCausalLM
from workshop import Workshop

from runtime.backends.engine import CachedRows, Engine
from runtime.backends.host import HostEngine
from runtime.backends.registry import host_engine
from runtime.beam.pool import Pool, PoolStats
from runtime.beam.search import BeamResult, beam_search
from runtime.files.errors import OutriderError
from runtime.files.manifest import read_bundle
from runtime.sampling.processors import BadWords

V = 5
PROMPT = [3, 1, 4]
EOS = 2
MAX_LEN = 48


class Copying(CopyingFake):
    """Attends to all rows, so a stale or wrongly copied row changes the logits."""

    def __init__(self, model: Model, vocab_size: int = V, **options: Any):
        options = {"slots": 16, "capacity": MAX_LEN, "order": None, **options}
        super().__init__(model, vocab_size=vocab_size, **options)


class Forgetful(Copying):
    def copy_rows(self, source: int, destination: int, rows: int) -> None:
        """Copy nothing (control)."""


def search(target: Engine | Model, draft: Engine | Model | None = None, **options: Any) -> Any:
    """Run `beam_search` on fake engines with these models."""
    options = {
        "width": 3, "gamma": 0 if draft is None else 3, "max_new_tokens": 9, "max_len": MAX_LEN,
        "eos_token_ids": {EOS}, "prompt": PROMPT, **options,
    }  # fmt: skip
    engines = [
        one if one is None or hasattr(one, "forward") else Copying(one) for one in (target, draft)
    ]
    return beam_search(engines[0], engines[1], options.pop("prompt"), **options)


def as_tuples(result: BeamResult) -> list[tuple[tuple[int, ...], float, bool]]:
    return [(one.tokens, one.score, one.finished) for one in result.hypotheses]


def logprob(model: Model, tokens: Sequence[int], vocab_size: int = V) -> float:
    """Log-probability of a continuation of the prompt, by definition."""
    total, text = 0.0, list(PROMPT)
    for token in tokens:
        row = model(tuple(text))[:vocab_size].tolist()
        total += row[token] - math.log(sum(map(math.exp, row)))
        text.append(token)
    return total


def enumerated(
    model: Model, width: int, steps: int, ends: Sequence[int], vocab_size: int = V
) -> list[tuple[int, ...]]:
    """Plain beam search by definition: each step considers all continuations of all texts."""
    beam: list[tuple[int, ...]] = [()]
    for _ in range(steps):
        candidates = []
        for text in beam:
            done = bool(text) and text[-1] in ends
            candidates += [text] if done else [(*text, token) for token in range(vocab_size)]
        # Stable: candidates are in the order of parent and token.
        beam = sorted(candidates, key=lambda text: -logprob(model, text, vocab_size))[:width]
    return beam


# Plain


@pytest.mark.parametrize("width", [1, 2, 3, 7])
@pytest.mark.parametrize("ends", [(), (EOS,), (0, EOS)])
def test_plain_is_beam_search_by_definition(width: int, ends: Sequence[int]) -> None:
    for seed in range(8):
        model = random_model(seed, V, scale=1.0)
        result = search(model, width=width, eos_token_ids=ends, length_penalty=0)
        expected = enumerated(model, width, 9, ends)
        assert [one.tokens for one in result.hypotheses] == expected
        for one in result.hypotheses:
            assert one.score == pytest.approx(logprob(model, one.tokens), abs=1e-5)
            assert one.finished == (one.tokens[-1] in ends)


def test_ties_go_to_the_better_parent_and_the_lower_token() -> None:
    flat: Model = lambda context: np.zeros(V, np.float32)  # noqa: E731
    for draft in (None, random_model(0, V)):
        result = search(flat, draft, width=4, max_new_tokens=3, eos_token_ids=())
        assert [one.tokens for one in result.hypotheses] == [(0, 0, token) for token in range(4)]


def test_length_penalty_ranks_the_result_alone() -> None:
    results = []
    for penalty in (0, 1, -2):
        result = search(random_model(3, V), width=6, length_penalty=penalty)
        keys = [one.score / len(one.tokens) ** penalty for one in result.hypotheses]
        assert keys == sorted(keys, reverse=True)
        results.append([one.tokens for one in result.hypotheses])
    assert sorted(results[0]) == sorted(results[1]) == sorted(results[2])
    assert len({len(tokens) for tokens in results[0]}) > 1
    assert results[0] != results[1], "a penalty that changes nothing proves nothing"


def test_what_has_no_probability_is_never_in_the_beam() -> None:
    def two_tokens(context: tuple[int, ...]) -> np.ndarray:
        return np.array([0, 1, *[-np.inf] * 3], np.float32)

    result = search(two_tokens, width=4, max_new_tokens=1)
    assert [one.tokens for one in result.hypotheses] == [(1,), (0,)]


@pytest.mark.parametrize("gamma", [0, 3])
def test_rules_that_leave_nothing_are_told(gamma: int) -> None:
    model, words = random_model(0, V), BadWords([[token] for token in range(V) if token != EOS])
    options = {"processors": [words], "gamma": gamma}
    assert [one.tokens for one in search(model, model, **options).hypotheses] == [(EOS,)]
    with pytest.raises(
        OutriderError, match=r"target, position 3: every logit is -inf\. Forbid fewer tokens"
    ):
        search(model, model, min_new_tokens=2, **options)


def test_it_ends_when_all_are_finished() -> None:
    def ends_soon(context: tuple[int, ...]) -> np.ndarray:
        return np.array([1, 0, 3, 0, -4], np.float32)

    for draft in (None, random_model(0, V), ends_soon):
        result = search(ends_soon, draft, max_new_tokens=40)
        assert all(one.finished for one in result.hypotheses)
        assert result.stats.steps < 40 and len(result.hypotheses) == 3


# Speculative


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_speculative_is_plain(gamma: int, width: int) -> None:
    """With drafts that are never, sometimes and mostly right, on few slots and on many."""
    outcomes = set()
    for seed, amount in enumerate((0.2, 0.7, 9.0) * 3):
        model = random_model(seed, V, scale=1.5)
        draft = near(model, seed, amount)
        plain = search(model, width=width)
        for more, slots, chunk in ((0, 16, 16), (2, 3, 16), (width, 1, 2), (11, 4, 3)):
            result = search(
                Copying(model, slots=slots, chunk=chunk),
                Copying(draft, slots=slots, chunk=chunk),
                width=width, draft_width=width + more, gamma=gamma,
            )  # fmt: skip
            assert as_tuples(result) == as_tuples(plain)
            stats = result.stats
            assert stats.steps == plain.stats.steps == stats.rounds + stats.accepted
            assert 0 <= stats.accepted <= stats.drafted
            outcomes.add(
                "none" if not stats.accepted
                else "all" if stats.accepted == stats.drafted else "some"
            )  # fmt: skip
    assert outcomes >= {"some", "all"}


def test_a_draft_that_is_the_target_is_always_right() -> None:
    for seed, gamma, width, steps in product(range(4), (1, 2, 4), (1, 2, 4), (1, 7, 12)):
        model = random_model(seed, V)
        result = search(
            model, model, width=width, draft_width=width, gamma=gamma, max_new_tokens=steps,
            eos_token_ids=(),
        )  # fmt: skip
        assert result.stats.rounds == math.ceil(steps / (gamma + 1))
        assert result.stats.accepted == result.stats.drafted == steps - result.stats.rounds


def test_control_rows_that_are_not_copied_show() -> None:
    model = random_model(0, V)
    with pytest.raises(AssertionError, match="rows"):  # raised by the fake: a row was never written
        search(Forgetful(model), eos_token_ids=())
    stale = Forgetful(model)
    stale.cache[:] = 1
    assert as_tuples(search(stale, eos_token_ids=())) != as_tuples(search(model, eos_token_ids=()))


@pytest.mark.parametrize("draft_size", [3, V, 8])
def test_vocabularies_of_other_sizes(draft_size: int) -> None:
    """The target's last column is padding. A narrower draft reads a token that it lacks as 0."""
    for seed in range(6):
        model = random_model(seed, V + 1, scale=1.0)
        draft = random_model(seed, draft_size)  # fakes assert that its ids exist
        options = {"vocab_size": V, "eos_token_ids": {EOS}, "length_penalty": 0}
        plain = search(Copying(model, V + 1), **options)
        assert [one.tokens for one in plain.hypotheses] == enumerated(model, 3, 9, [EOS])
        result = search(Copying(model, V + 1), Copying(draft, draft_size), **options)
        assert as_tuples(result) == as_tuples(plain)


def test_padding_is_not_drafted() -> None:
    """A draft that prefers tokens beyond the vocabulary drafts its best valid tokens."""
    model = random_model(0, V)

    def padded(context: tuple[int, ...]) -> np.ndarray:
        return np.append(model(context), np.full(3, 90, np.float32))

    result = search(model, Copying(padded, V + 3), draft_width=3, eos_token_ids=())
    assert result.stats.accepted == result.stats.drafted > 0


def test_contexts_end() -> None:
    """Capacities are exact, so the fake raises an error for any row too many."""
    model = random_model(5, V)
    for max_len, draft_max_len in product((4, 5, 9, 12), (2, 3, 4, 6, 12)):
        options = {"max_len": max_len, "max_new_tokens": 30, "eos_token_ids": ()}
        plain = search(Copying(model, capacity=max_len), **options)
        assert plain.stats.steps == max_len - len(PROMPT)
        draft = Copying(model, capacity=draft_max_len)
        result = search(
            Copying(model, capacity=max_len), draft, draft_max_len=draft_max_len, **options
        )
        assert as_tuples(result) == as_tuples(plain)
        assert (result.stats.drafted > 0) == (max_len > 4 and draft_max_len > 3)


def test_a_prompt_is_prefilled_once_and_in_pieces() -> None:
    prompt = np.random.default_rng(0).integers(0, V, 40).tolist()
    model = random_model(0, V)
    engines = [Copying(model, capacity=64, chunk=16) for _ in range(2)]
    result = search(*engines, prompt=prompt, max_len=64, max_new_tokens=8)
    for engine, stats in zip(engines, (result.stats.target, result.stats.draft), strict=True):
        assert [call.width for call in engine.calls[:3]] == [16, 16, 8]
        assert stats.calls == len(engine.calls)
        assert stats.rows == sum(call.batch * call.width for call in engine.calls)
        assert sum(call.batch for call in engine.calls if call.width > 5) == 3
        assert stats.copied >= 40
    assert as_tuples(result) == as_tuples(
        search(model, prompt=prompt, max_len=64, max_new_tokens=8)
    )


def test_a_pool_gives_the_logits_of_any_trees_on_any_number_of_slots() -> None:
    """Successive trees share varying parts, and no row of another branch is ever used."""
    rng = np.random.default_rng(0)
    model = random_model(0, V)
    for slots, chunk in ((1, 2), (2, 16), (3, 4), (5, 3), (8, 16)):
        pool = Pool(Copying(model, slots=slots, chunk=chunk), PROMPT, PoolStats(), "target")
        for _ in range(30):
            trunk = rng.integers(0, 2, (4, 6))
            depth = int(rng.integers(0, 6))
            nodes = {tuple(row[:depth].tolist()) for row in trunk}
            for _ in range(int(rng.integers(0, 4))):
                more = [(*node, token) for node in nodes for token in (0, 1)]
                nodes |= {more[i] for i in rng.integers(0, len(more), 4)}
            answer = pool.logits(nodes)
            assert set(answer) == nodes
            for node, row in answer.items():
                np.testing.assert_array_equal(row, model((*PROMPT, *node)))


# What is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(({name: value}, "option: " + name.replace("width", "beams")) for name, value in (
            ("width", 0), ("width", 2.0), ("width", True), ("width", None),
            ("draft_width", 2),
            ("gamma", "auto"), ("gamma", -1),  # "auto" was a TypeError
            ("length_penalty", math.nan), ("length_penalty", 11), ("length_penalty", "1"),
            ("length_penalty", np.int8(-128)),  # its abs is -128
        )),
        # Engines that cannot copy rows, like those of a GPU:
        ({"target": FakeEngine(random_model(0, V), vocab_size=V)}, "option: .* CPU"),
        ({"draft": FakeEngine(random_model(0, V), vocab_size=V)}, "option: .* CPU"),
    ],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    model = random_model(0, V)
    with pytest.raises(OutriderError, match=words):
        search(**{"target": model, "draft": model, **given})


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_broken_logits_are_an_error_that_names_model_and_position(
    broken: str, value: float
) -> None:
    model = random_model(0, V)

    def breaks(context: tuple[int, ...]) -> np.ndarray:
        return np.full(V, value, np.float32) if len(context) == 6 else model(context)

    models = (breaks, model) if broken == "target" else (model, breaks)
    with pytest.raises(OutriderError, match=f"^numeric: .*{broken}, position 6"):
        search(*models, gamma=5, eos_token_ids=())


def test_slots_with_broken_rows_are_emptied() -> None:
    """Fault: their row counts outlived the search, and the next request reused the NaN rows."""
    engine = Copying(lambda context: np.full(V, np.nan if len(context) == 6 else 0, np.float32))
    with pytest.raises(OutriderError, match="target, position 6"):
        search(engine, eos_token_ids=())
    assert engine.calls
    assert [engine.cached_rows.length(slot) for slot in range(engine.slots)] == [0] * engine.slots


# Real engines


@dataclass
class Bundle:
    folder: Path
    original: Any
    prompts: list[list[int]]

    def engine(self, role: str, slots: int) -> Engine:
        manifest = read_bundle(self.folder, verify=False)
        return host_engine(manifest.backend)(
            self.folder / role, getattr(manifest.pair, role), slots=slots,
            max_outputs=manifest.pair.max_gamma + 1 if role == "target" else 1, threads=1,
        )  # fmt: skip


@pytest.fixture(scope="module")
def bundle(workshop: Workshop) -> Bundle:
    target = workshop.checkpoint("llama")
    folder = workshop.bundle(target, workshop.checkpoint("llama", blur=0.1))
    original = AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager").eval()
    original.generation_config.eos_token_id = None
    rng = np.random.default_rng(3)
    return Bundle(folder, original, [rng.integers(1, VOCAB_SIZE, n).tolist() for n in (1, 30)])


@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (5, 0.0)])
def test_beam_search_is_that_of_transformers(
    bundle: Bundle, width: int, length_penalty: float
) -> None:
    """All hypotheses and their scores: plain, with a draft that is sometimes right, and with the
    target as its own draft on too few slots."""
    target, draft = bundle.engine("target", 16), bundle.engine("draft", 16)
    few, itself = bundle.engine("target", 3), bundle.engine("target", 2)
    accepted = {0: 0, 2: 0, 8: 0, 4: 0}
    for prompt in bundle.prompts:
        ids = torch.tensor([prompt])
        expected = bundle.original.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=width,
            num_return_sequences=width, length_penalty=length_penalty, max_new_tokens=24,
            pad_token_id=0, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        texts = expected.sequences[:, len(prompt) :].tolist()
        for gamma in accepted:
            engines = (few, itself) if gamma == 4 else (target, draft)
            result = beam_search(
                *engines, prompt, width=width, gamma=gamma, max_new_tokens=24,
                length_penalty=length_penalty, max_len=128,
            )  # fmt: skip
            assert [list(one.tokens) for one in result.hypotheses] == texts
            scores = [one.score / 24**length_penalty for one in result.hypotheses]
            np.testing.assert_allclose(scores, expected.sequences_scores, atol=1e-4)
            accepted[gamma] += result.stats.accepted
    assert accepted[0] == 0 < accepted[2] <= accepted[8] < accepted[4] <= 2 * 19


@pytest.mark.parametrize("zeros", [np.zeros, torch.zeros])
def test_copied_rows_are_the_first_of_every_layer_and_side(zeros: Any) -> None:
    cache = {name: zeros((3, 2, 6, 4)) for name in ("key_0", "value_0", "key_1")}
    for number, array in enumerate(cache.values(), 1):
        array[1] = number
    engine = SimpleNamespace(_cache=cache, cached_rows=CachedRows(3, 8))
    HostEngine.copy_rows(engine, 1, 2, 5)
    for number, array in enumerate(cache.values(), 1):
        assert (array[2, :, :5] == number).all() and (array[2, :, 5:] == 0).all()
        assert (array[0] == 0).all() and (array[1] == number).all()
