"""The real round has the target's distribution: by integration over its uniforms, without noise.

Three ways, from general to complete. Bisection: any rows, one round, the pieces of every uniform
found in the round's own behaviour. Grid: rows in quarters, whose changes all lie on a grid, so that
midpoints integrate one round exactly and nothing is assumed about it. Keys: rows in halves, several
rounds; every number that the counter can name is a coin of its own, and reuse of one would show.
Each with controls: rounds that are wrong by little, and must be found out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import Context, Model, random_model
from proof import ONE, change_point, pieces
from rounds import (
    accept_everything,
    broken,
    flattened_q,
    ids,
    make_decoder,
    run,
    with_uniforms,
)

from runtime.decoder import Decoder
from runtime.sampling.distribution import Distribution
from runtime.sampling.philox import Purpose
from runtime.sampling.reference import NumpySampler
from runtime.sampling.rules import Verdict, residual, verify
from runtime.sampling.sampler import SlotSampling
from runtime.sampling.warp import SamplingParams, warp
from runtime.sequence import Request

pytestmark = pytest.mark.usefixtures("sampler")

V = 8
DEPTH = 26  # a boundary is known to 2^-26, and a row has seven
Probs = Callable[[Context], np.ndarray]


class Round:
    """One round of one request, run again and again with uniforms of our choice."""

    def __init__(self, decoder: Decoder, request: Request):
        self.decoder, self.gamma = decoder, request.gamma
        with broken("sampling.reference.uniform", lambda *key: 0.5):
            self.sequence = decoder.admit(request)
        self.start = len(self.sequence.slot.tokens)

    def __call__(
        self, draft_u: list[float], accept_u: list[float], final_u: float
    ) -> tuple[list[int], list[int]]:
        """The tokens that were drafted, and those that were emitted."""
        sequence = self.sequence
        del sequence.output[1:]
        sequence.finish_reason = None
        sequence.slot.roll_back(self.start)
        table = {Purpose.DRAFT: draft_u, Purpose.ACCEPT: accept_u, Purpose.RESIDUAL: [final_u]}

        def controlled(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
            return table[purpose][position - self.start]

        with broken("sampling.reference.uniform", controlled):
            emitted = self.decoder.round([sequence])[sequence]
        # What was drafted stands in the target's cache, whether it was accepted or not.
        rows = self.decoder.target.cache[0, self.start : self.start + self.gamma]  # type: ignore[attr-defined]
        return rows.tolist(), [token.id for token in emitted]


def blocks(round_: Round, rule: str) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yields (weight, emitted tokens) of every outcome of a round, by bisection."""
    gamma = round_.gamma
    others = ONE if rule == "block" else 0.0

    def drafts(u: list[float], weight: float) -> Iterator[tuple[float, list[float]]]:
        if len(u) == gamma:
            yield weight, u
            return
        rest = [0.5] * (gamma - len(u) - 1)

        def drafted(value: float) -> int:
            return round_([*u, value, *rest], [0.0] * gamma, 0.0)[0][len(u)]

        begin = 0.0
        for _, length in sorted(pieces(drafted, depth=DEPTH).items()):
            yield from drafts([*u, begin + length / 2], weight * length)
            begin += length

    finals: dict[tuple[int, ...], dict[int, float]] = {}
    for weight, u in drafts([], 1.0):
        points = []
        for i in range(gamma):

            def stands(value: float, i: int = i, u: list[float] = u) -> bool:
                accept = [others] * gamma
                accept[i] = value
                return len(round_(u, accept, 0.0)[1]) > i + 1

            points.append(change_point(stands, DEPTH))
        for below in itertools.product((True, False), repeat=gamma):
            cell = math.prod(t if b else 1 - t for t, b in zip(points, below, strict=True))
            if cell == 0:
                continue
            accept = [t / 2 if b else (t + 1) / 2 for t, b in zip(points, below, strict=True)]
            kept = tuple(round_(u, accept, 0.0)[1][:-1])
            if kept not in finals:

                def last(value: float, u: list[float] = u, accept: list[float] = accept) -> int:
                    return round_(u, accept, value)[1][-1]

                finals[kept] = pieces(last, depth=DEPTH)
            for token, length in finals[kept].items():
                yield weight * cell * length, (*kept, token)


def distance(
    outcomes: Iterator[tuple[float, tuple[int, ...]]], probs: Probs, before: Context, length: int
) -> float:
    """Total variation between the target's next `length` tokens and outcomes continued by it."""
    memo: dict[Context, np.ndarray] = {}

    def continued(tokens: Context) -> np.ndarray:
        """The joint distribution of what follows `tokens`, up to `length`."""
        if tokens not in memo:
            rest = np.ones(())
            if len(tokens) < length:
                row = probs((*before, *tokens))
                rest = np.stack([p * continued((*tokens, x)) for x, p in enumerate(row)])
            memo[tokens] = rest
        return memo[tokens]

    joint = np.zeros((len(probs(before)),) * length)
    for weight, tokens in outcomes:
        joint[tokens] += weight * continued(tokens)
    assert joint.sum() == pytest.approx(1, abs=1e-6)
    return float(0.5 * np.abs(joint - continued(())).sum())


# --- bisection --------------------------------------------------------------------------------


def by_bisection(
    params: SamplingParams,
    gamma: int = 1,
    vocab_size: int = V,
    *,
    target: Model | None = None,
    draft: Model | None = None,
    min_new_tokens: int = 0,
    asked: dict[str, Any] | None = None,
    **options: Any,
) -> float:
    """asked: more of the request."""
    target = target or random_model(1, vocab_size, scale=1.5)
    draft = draft or random_model(2, vocab_size, scale=1.5)
    decoder = make_decoder(target, draft, vocab_size=vocab_size, max_len=16, **options)
    request = Request(
        [1, 2, 1], params, gamma=gamma, max_new_tokens=gamma + 2, min_new_tokens=min_new_tokens,
        eos_token_ids=[0] if min_new_tokens else [], ignore_eos=True, **(asked or {}),
    )  # fmt: skip
    round_ = Round(decoder, request)

    def probs(context: Context) -> np.ndarray:
        early = len(context) - 3 < min_new_tokens
        suppress = [0] if early and min_new_tokens else []
        return warp(target(context), params, list(context), suppress, vocab_size).probs()

    outcomes = blocks(round_, params.verify)
    return distance(outcomes, probs, tuple(round_.sequence.slot.tokens), gamma + 1)


def at(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **options})


ALL = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4}


@with_uniforms
@pytest.mark.parametrize(
    "params",
    [
        at(),
        at(verify="block"),
        at(temperature=0.6),
        at(top_k=3),
        at(top_p=0.7),
        at(min_p=0.15),
        at(repetition_penalty=1.8),
        at(**ALL),
        at(**ALL, verify="block"),
    ],
    ids=lambda p: "-".join(f"{k}={v}" for k, v in vars_of(p).items()) or "plain",
)
def test_one_draft_token_over_eight(params: SamplingParams) -> None:
    assert by_bisection(params) < 1e-6


def vars_of(params: SamplingParams) -> dict[str, Any]:
    default = at()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "verify")
    return {n: getattr(params, n) for n in names if getattr(params, n) != getattr(default, n)}


@with_uniforms
@pytest.mark.parametrize(("rule", "vocab_size"), [("token", V), ("token", 5), ("block", 5)])
def test_two_draft_tokens(rule: str, vocab_size: int) -> None:
    options = {} if vocab_size == V else ALL
    assert by_bisection(at(**options, verify=rule), 2, vocab_size) < 1e-6


@with_uniforms
def test_end_of_text_masked_in_the_middle_of_a_block() -> None:
    """The first token and the first draft are masked, the second draft and the bonus are not."""
    assert by_bisection(at(), 2, 4, min_new_tokens=2) < 1e-6


@with_uniforms
@pytest.mark.parametrize(("target_width", "draft_width"), [(12, 10), (8, 8), (12, 5), (8, 3)])
def test_padded_and_narrow_vocabularies(target_width: int, draft_width: int) -> None:
    target = random_model(1, target_width)
    draft = random_model(2, draft_width)
    options = {"target_width": target_width, "draft_width": draft_width}
    assert by_bisection(at(), target=target, draft=draft, **options) < 1e-6
    assert by_bisection(at(verify="block"), target=target, draft=draft, **options) < 1e-6


@with_uniforms
@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0, 9, -np.inf, 1], [0, 9, -np.inf, 1]),  # the same
        ([-np.inf, 0, -np.inf, -np.inf], [-np.inf, 0, -np.inf, -np.inf]),  # one and the same token
        ([-np.inf, 0, -np.inf, -np.inf], [0, -np.inf, -np.inf, -np.inf]),  # two tokens
        ([0, 1, -np.inf, -np.inf], [-np.inf, -np.inf, 0, 1]),  # nothing in common
        ([0, 1, 2, -np.inf], [-np.inf, 0, 0, 0]),  # each lacks one
        ([1e4, 1e4 + 1, 1e4, 1e4], [-1e4, -1e4, -1e4 - 2, -1e4]),  # far from 0
    ],
)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_rows_that_are_easily_divided_by_zero(rule: str, p: list[float], q: list[float]) -> None:
    target, draft = np.array(p, np.float32), np.array(q, np.float32)
    params = at(verify=rule)
    with np.errstate(all="raise", under="ignore"):
        found = by_bisection(params, 1, 4, target=lambda c: target, draft=lambda c: draft)
    assert found < 1e-6


def corrected_from_p(p, q, drafts, accept_u, final_u, params):  # type: ignore[no-untyped-def]
    """A correction drawn from the target instead of the residual."""
    verdict = verify(p, q, drafts, accept_u, final_u, params)
    return Verdict(verdict.accepted, p[verdict.accepted].draw(final_u), verdict.ratios)


WRONG_RULES = [accept_everything, flattened_q, corrected_from_p]


@pytest.mark.parametrize("wrong", WRONG_RULES)
@pytest.mark.parametrize("params", [at(), at(**ALL)], ids=["plain", "all"])
def test_bisection_notices(wrong: Callable[..., Verdict], params: SamplingParams) -> None:
    with broken("sampling.reference.verify", wrong):
        assert by_bisection(params) > 0.01


def test_bisection_notices_a_penalty_without_the_drafts() -> None:
    real = NumpySampler._warp

    def careless(self: NumpySampler, place: SlotSampling, drafted, row, model):  # type: ignore[no-untyped-def]
        return real(self, place, (), row, model)

    with broken("sampling.reference.NumpySampler._warp", careless):
        assert by_bisection(at(repetition_penalty=1.8), 1) > 0.01


# --- grid -------------------------------------------------------------------------------------


def in_parts(seed: int, parts: int, most: int) -> tuple[Model, Model, Probs]:
    """Target, draft and the target's probabilities, all multiples of 1/parts.

    The draft gives no token more than most/parts. Where they differ, the parts in which the target
    exceeds the draft divide `parts`: so all changes of a round's outcome lie on a grid.
    """
    made: dict[Context, tuple[np.ndarray, np.ndarray]] = {}

    def counts(context: Context) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([seed, *context])
        while context not in made:
            p, q = (np.bincount(rng.integers(0, V, parts), minlength=V) for _ in range(2))
            more = int(np.maximum(p - q, 0).sum())
            # Three in four contexts with something in common, or nothing would be accepted.
            if q.max() <= most and (more == 0 or parts % more == 0) and rng.random() > more / 5:
                made[context] = p, q
        return made[context]

    def logits(which: int) -> Model:
        def model(context: Context) -> np.ndarray:
            with np.errstate(divide="ignore"):
                return np.log(counts(context)[which]).astype(np.float32)

        return model

    return logits(0), logits(1), lambda context: counts(context)[0] / parts


def midpoints(count: int) -> list[float]:
    return [(i + 0.5) / count for i in range(count)]


def by_grid(seed: int, gamma: int = 3) -> float:
    """Draws change at quarters, acceptance at halves (q is 1/4 or 2/4), corrections at quarters."""
    target, draft, probs = in_parts(seed, 4, 2)
    decoder = make_decoder(target, draft, vocab_size=V, max_len=16)
    round_ = Round(decoder, Request([1, 2], at(), gamma=gamma, max_new_tokens=gamma + 2))
    cells = [midpoints(4)] * gamma + [midpoints(2)] * gamma + [midpoints(4)]

    def outcomes() -> Iterator[tuple[float, tuple[int, ...]]]:
        weight = 1 / math.prod(map(len, cells))
        for u in itertools.product(*cells):
            _, emitted = round_(list(u[:gamma]), list(u[gamma:-1]), u[-1])
            yield weight, tuple(emitted)

    return distance(outcomes(), probs, tuple(round_.sequence.slot.tokens), gamma + 1)


@with_uniforms
def test_three_draft_tokens_over_eight() -> None:
    assert by_grid(1) < 1e-12
    assert by_grid(2, 2) < 1e-12


@pytest.mark.parametrize("wrong", WRONG_RULES)
def test_the_grid_notices(wrong: Callable[..., Verdict]) -> None:
    with broken("sampling.reference.verify", wrong):
        assert by_grid(2, 2) > 0.01


# --- keys -------------------------------------------------------------------------------------

Key = tuple[Any, ...]


def by_keys(
    gamma: int,
    count: int,
    key_of: Callable[[int, Purpose, int], Key],
    seed: int = 1,
    prompt: Sequence[int] = (1, 2),
    **asked: Any,
) -> float:
    """The joint distribution of `count` tokens over several rounds, against the target's.

    Every key is a coin of its own. Depth first over the keys in the order in which they are asked.
    """
    target, draft, probs = in_parts(seed, 2, 2)
    decoder = make_decoder(target, draft, vocab_size=V, max_len=16)
    request = Request(prompt, **{"params": at(), **asked}, gamma=gamma, max_new_tokens=count)
    coins: dict[Key, int] = {}  # in the order of the first question

    def coin(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
        return midpoints(2)[coins.setdefault((seed, *key_of(position, purpose, lane)), 0)]

    def outcomes() -> Iterator[tuple[float, tuple[int, ...]]]:
        while True:
            with broken("sampling.reference.uniform", coin):
                text = ids(run(decoder, request))
            yield 0.5 ** len(coins), tuple(text)
            while coins and coins[last := next(reversed(coins))] == 1:
                del coins[last]
            if not coins:
                return
            coins[last] = 1

    return distance(outcomes(), probs, tuple(prompt), count)


def own(position: int, purpose: Purpose, lane: int) -> Key:
    return position, purpose, lane


@with_uniforms
@pytest.mark.parametrize(("gamma", "count"), [(0, 4), (1, 4), (2, 4), (3, 5)])
def test_rounds_after_one_another(gamma: int, count: int) -> None:
    """A number drawn again in a later round must not have been looked at in an earlier one."""
    assert by_keys(gamma, count, own) < 1e-12


@pytest.mark.parametrize(
    "key_of",
    [
        lambda position, purpose, lane: (purpose, lane),  # the same at every position
        lambda position, purpose, lane: (position, purpose == Purpose.DRAFT),  # shared by two uses
        lambda position, purpose, lane: (position, purpose == Purpose.ACCEPT),
    ],
)
def test_keys_that_are_shared_are_noticed(key_of: Callable[[int, Purpose, int], Key]) -> None:
    assert max(by_keys(2, 4, key_of, seed) for seed in (1, 2)) > 0.01


# --- strictness -------------------------------------------------------------------------------


def support_at_u_0() -> None:
    """All uniforms 0: a draft token that the target never says must not be accepted."""
    target = np.array([-np.inf, -np.inf, 0, 1, 2], np.float32)
    draft = np.array([3, 2, 1, -np.inf, -np.inf], np.float32)
    decoder = make_decoder(lambda c: target, lambda c: draft, vocab_size=5)
    with broken("sampling.reference.uniform", lambda *key: 0.0):
        sequence = run(decoder, Request([2], at(), gamma=3, max_new_tokens=20))
    assert not {0, 1} & set(ids(sequence))
    assert sequence.stats.accepted == 0


@with_uniforms
def test_probability_0_is_not_accepted_at_u_0() -> None:
    support_at_u_0()


def test_a_test_that_is_not_strict_is_noticed() -> None:
    def not_strict(p, q, drafts, accept_u, final_u, params):  # type: ignore[no-untyped-def]
        return verify(p, q, drafts, [u - 1e-9 for u in accept_u], final_u, params)

    with broken("sampling.reference.verify", not_strict), pytest.raises(AssertionError):
        support_at_u_0()


def equal_up_to_rounding(rule: Callable[..., tuple[Distribution, float]]) -> None:
    """Rows that rounding alone tells apart, and the largest uniforms: they reject where p < q by
    the last bit, and p - q may be positive nowhere. There the correction comes from p."""
    rng = np.random.default_rng(0)
    row = rng.standard_normal(V).astype(np.float32)
    masses: list[float] = []

    def watched(p: Distribution, q: Distribution, scale: float = 1.0) -> tuple[Distribution, float]:
        rest, mass = rule(p, q, scale)
        masses.append(mass)
        return rest, mass

    nothing_left = 0
    for _ in range(60):
        other = row + np.float32(1e-7) * rng.standard_normal(V, dtype=np.float32)
        decoder = make_decoder(lambda c: row, lambda c, other=other: other, vocab_size=V)
        masses.clear()
        with (
            broken("sampling.reference.uniform", lambda *key: ONE),
            broken("sampling.rules.residual", watched),
            np.errstate(all="raise"),
        ):
            sequence = run(decoder, Request([2], at(), gamma=4, max_new_tokens=20))
        assert all(0 <= mass < 1e-6 for mass in masses)
        if 0 in masses:
            nothing_left += 1
            assert set(ids(sequence)) == {V - 1}, "what the largest uniform draws from p"
    assert nothing_left > 0


def test_equal_rows_up_to_rounding() -> None:
    equal_up_to_rounding(residual)


def test_a_residual_of_nothing_is_noticed() -> None:
    def left_as_it_is(p: Distribution, q: Distribution, scale: float) -> tuple[Distribution, float]:
        rest, mass = residual(p, q, scale)
        return (rest, mass) if mass else (Distribution.dense(np.zeros(V, np.float32)), mass)

    with pytest.raises(AssertionError):
        equal_up_to_rounding(left_as_it_is)
