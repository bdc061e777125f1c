"""A round's exact distribution by integration over its uniforms, without sampling noise.

Two methods, one general and one complete. Bisection: any rows, one round; it finds the pieces of
every uniform by running the round. Keys: probabilities that are multiples of 1/2, several rounds,
and no assumptions; every number that the counter can address is a separate coin, so reuse of one
would show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fakes import Context, Model, random_model
from rounds import broken, ids, make_decoder, run
from samplers import BISECTIONS, ONE

from runtime.decoder import Decoder
from runtime.sampling.philox import Purpose
from runtime.sampling.processors import LogitsProcessor
from runtime.sampling.warp import SamplingParams, warp
from runtime.sequence import Request

V = 8
NEAR = 2.0**-20
Probs = Callable[[Context], np.ndarray]


# --- bisection --------------------------------------------------------------------------------

# An outcome is piecewise constant in each uniform that it depends on. Bisection finds where it
# changes; the length of each piece is the probability of its outcome.


def pieces(token_at: Callable[[float], int], guesses: Iterable[float] = ()) -> dict[int, float]:
    """{token: length of its interval of u} for an inverse CDF, which is monotone in u.

    guesses: where it may change. A right guess saves calls, a wrong one costs two.
    """
    around = (guess + step for guess in guesses for step in (-NEAR, NEAR))
    points = [0.0, *sorted(u for u in around if 0 < u < ONE), ONE]
    tokens = [token_at(u) for u in points]
    lengths: dict[int, float] = {}

    def split(a: float, token_a: int, b: float, token_b: int) -> None:
        if token_a == token_b or b - a <= 2.0**-BISECTIONS:
            lengths[token_a] = lengths.get(token_a, 0.0) + (b - a)
            return
        middle = (a + b) / 2
        token = token_at(middle)
        split(a, token_a, middle, token)
        split(middle, token, b, token_b)

    assert tokens == sorted(tokens)
    for i in range(len(points) - 1):
        split(points[i], tokens[i], points[i + 1], tokens[i + 1])
    return lengths


class Round:
    """One round of one request, run repeatedly with chosen uniforms."""

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
            self.decoder.round([sequence])
        # The target's cache holds every draft token, accepted or not.
        rows = self.decoder.target.cache[0, self.start : self.start + self.gamma]
        return [int(token) for token in rows], [token.id for token in sequence.output[1:]]


def blocks(round_: Round, rule: str, probs: Probs) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield (probability, emitted tokens) of every outcome of a round, by bisection.

    probs: the target's probabilities, whose CDF gives the first guesses for the last token's
    pieces.
    """
    gamma, before = round_.gamma, tuple(round_.sequence.slot.tokens)
    others = ONE if rule == "block" else 0.0

    def drafts(u: list[float], weight: float) -> Iterator[tuple[float, list[float]]]:
        if len(u) == gamma:
            yield weight, u
            return
        rest = [0.5] * (gamma - len(u) - 1)

        def drafted(value: float) -> int:
            return round_([*u, value, *rest], [0.0] * gamma, 0.0)[0][len(u)]

        begin = 0.0
        for _, length in sorted(pieces(drafted).items()):
            yield from drafts([*u, begin + length / 2], weight * length)
            begin += length

    finals: dict[tuple[int, ...], dict[int, float]] = {}
    for weight, u in drafts([], 1.0):
        points = []
        for i in range(gamma):

            def is_rejected(value: float, i: int = i, u: list[float] = u) -> bool:
                accept = [others] * gamma
                accept[i] = value
                return len(round_(u, accept, 0.0)[1]) <= i + 1

            points.append(pieces(is_rejected).get(False, 0.0))
        for below in itertools.product((True, False), repeat=gamma):
            cell = math.prod(t if b else 1 - t for t, b in zip(points, below, strict=True))
            if cell < 1e-12:
                continue
            accept = [t / 2 if b else (t + 1) / 2 for t, b in zip(points, below, strict=True)]
            kept = tuple(round_(u, accept, 0.0)[1][:-1])
            if kept not in finals:

                def last(value: float, u: list[float] = u, accept: list[float] = accept) -> int:
                    return round_(u, accept, value)[1][-1]

                row = probs((*before, *kept))
                finals[kept] = pieces(last, np.cumsum(row[row > 0]))
            for token, length in finals[kept].items():
                yield weight * cell * length, (*kept, token)


def distance(
    outcomes: Iterator[tuple[float, tuple[int, ...]]], probs: Probs, before: Context, length: int
) -> float:
    """Total variation distance between the target's next `length` tokens and `outcomes`, which the
    target continues to that length."""
    memo: dict[Context, np.ndarray] = {}

    def continued(tokens: Context) -> np.ndarray:
        """The joint distribution of the tokens after `tokens`, up to `length`."""
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


def by_bisection(
    params: SamplingParams,
    gamma: int = 1,
    vocab_size: int = V,
    *,
    target: Model | None = None,
    draft: Model | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
    asked: dict[str, Any] | None = None,
    **options: Any,
) -> float:
    """The distance of one round, by bisection. asked: more fields of the request."""
    target = target or random_model(1, vocab_size, scale=1.5)
    draft = draft or random_model(2, vocab_size, scale=1.5)
    decoder = make_decoder(target, draft, vocab_size=vocab_size, max_len=16, **options)
    request = Request(
        [1, 2, 1], params, gamma=gamma, max_new_tokens=gamma + 2, ignore_eos=True,
        processors=processors, **(asked or {}),
    )  # fmt: skip
    round_ = Round(decoder, request)

    def probs(context: Context) -> np.ndarray:
        row = target(context)
        if processors:
            edited = row.copy()
            for token, bias in params.logit_bias:
                edited[token] += bias
            for token in set(context):
                edited[token] *= params.repetition_penalty ** (1 if edited[token] < 0 else -1)
            for processor in processors:
                processor(edited, np.array(context), 3)
            row = np.where(np.isneginf(edited), edited, row)
        return warp(row[:vocab_size], params, list(context)).probs()

    outcomes = blocks(round_, params.verify, probs)
    return distance(outcomes, probs, tuple(round_.sequence.slot.tokens), gamma + 1)


def at(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **options})


# --- keys -------------------------------------------------------------------------------------


def models_of_halves(seed: int) -> tuple[Model, Model, Probs]:
    """Target, draft and the target's probabilities, all multiples of 1/2, so that a round's outcome
    changes only at 1/2 of a uniform."""
    made: dict[Context, tuple[np.ndarray, np.ndarray]] = {}

    def counts(context: Context) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([seed, *context])
        while context not in made:
            p, q = (np.bincount(rng.integers(0, V, 2), minlength=V) for _ in range(2))
            # Target and draft overlap in three of four contexts, or nothing would be accepted.
            if rng.random() > int(np.maximum(p - q, 0).sum()) / 5:
                made[context] = p, q
        return made[context]

    def logits(which: int) -> Model:
        def model(context: Context) -> np.ndarray:
            with np.errstate(divide="ignore"):
                return np.log(counts(context)[which]).astype(np.float32)

        return model

    return logits(0), logits(1), lambda context: counts(context)[0] / 2


Key = tuple[Any, ...]


def by_keys(
    gamma: int,
    count: int,
    seed: int = 1,
    prompt: Sequence[int] = (1, 2),
    *,
    key_of: Callable[[int, Purpose, int], Key] = lambda *key: key,
    **asked: Any,
) -> float:
    """Total variation distance of `count` tokens over several rounds from the target's.

    Every key is a separate coin; key_of: of a position, a purpose and a lane. The search is depth
    first over the keys, in the order of their first use.
    """
    target, draft, probs = models_of_halves(seed)
    decoder = make_decoder(target, draft, vocab_size=V, max_len=len(prompt) + 14)
    request = Request(prompt, **{"params": at(), **asked}, gamma=gamma, max_new_tokens=count)
    coins: dict[Key, int] = {}  # in the order of first use

    def coin(seed: int, position: int, purpose: Purpose, lane: int = 0) -> float:
        return 0.25 + 0.5 * coins.setdefault((seed, *key_of(position, purpose, lane)), 0)

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
