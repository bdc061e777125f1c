"""How long the sampling of a round takes, by every rule and by others, and the bytes that have to
be read for its outcome."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from runtime.sampling.native import RoundSampler
from runtime.sampling.rules import Verdict
from runtime.sampling.warp import SamplingParams

from .rounds import TOKEN, VARIANTS, Round, Rows
from .timing import Figure, alternate

EXACT, BLOCK, SIGMOID = "kernel, exact", "kernel, block", "kernel, sigmoid"
RAW = "kernel, exact, q from logits"
NUMPY, TRANSFORMERS = "NumPy, exact", "Transformers"
FUNCTION = "Transformers, its function alone"  # logits processed before: what the paper timed
RULES = {EXACT: TOKEN, BLOCK: VARIANTS["block"], SIGMOID: VARIANTS["sigmoid"]}


@dataclass(frozen=True)
class Point:
    """A round at one V and gamma, B = 1: means over the draws.

    accepted: draft tokens that stand, by rule. sizes: bytes that have to be read for its outcome.
    times: of one round.
    """

    vocab_size: int
    gamma: int
    accepted: dict[str, float]
    sizes: dict[str, float]
    times: dict[str, Figure]

    def bandwidth(self, name: str) -> float:
        """Bytes a second."""
        return 1e3 * self.sizes[name] / self.times[name].ms

    def json_object(self) -> dict[str, Any]:
        return {
            "V": self.vocab_size,
            "gamma": self.gamma,
            "accepted": self.accepted,
            "bytes": {name: round(size) for name, size in self.sizes.items()},
            "times": {name: figure.json_object() for name, figure in self.times.items()},
            "gb_s": {name: round(self.bandwidth(name) / 1e9, 3) for name in self.times},
        }


def measure(
    logits: list[tuple[Rows, Rows]],
    gamma: int,
    threads: int,
    *,
    rounds: int,
    patience: float,
) -> Point:
    """One sample runs through all draws, so that it meets short rounds and long ones.

    logits: of each draw, for this gamma or a larger one: its first rows are a round's too. rounds,
    patience: see `alternate`. What is called in turn must not empty the caches for the next one,
    nor fill them for itself: all find the logits in the last level, as after an engine's call.
    """
    vocab_size = logits[0][0].shape[-1]

    def make(params: SamplingParams) -> list[Round]:
        return [
            Round(vocab_size, gamma, 1, params, threads, (target[:, : gamma + 1], draft[:, :gamma]))
            for target, draft in logits
        ]

    by_rule = {name: make(params) for name, params in RULES.items()}
    for some in by_rule.values():
        for n, round_ in enumerate(some):
            place = round_.places[0]
            round_.places = [replace(place, params=replace(place.params, seed=n))]
    calls: dict[str, Callable[[], object]] = {}
    verdicts: dict[str, list[Verdict]] = {}
    for name, some in by_rule.items():
        for round_ in some:
            round_.kernel_draw()
        calls[name] = _all(round_.kernel_verify for round_ in some)
        verdicts[name] = [round_.kernel_verify()[0] for round_ in some]
    exact = by_rule[EXACT]
    drafts = [round_.numpy_draw() for round_ in exact]
    pairs = list(zip(exact, drafts, strict=True))
    calls[RAW] = _all(_from_logits(round_, drawn, threads) for round_, drawn in pairs)
    calls[NUMPY] = _all(round_.numpy_verify for round_ in exact)
    theirs = [round_.transformers_verify(drawn) for round_, drawn in pairs]
    if None not in theirs:
        calls[TRANSFORMERS] = _all(call for call in theirs if call is not None)
        calls[FUNCTION] = _all(_function(round_, drawn) for round_, drawn in pairs)

    def touch() -> None:  # the first in turn runs twice in a row, which would favour it
        for target, draft in logits:
            target.max(), draft.max()

    figures = alternate({"": touch, **calls}, rounds=rounds, patience=patience)
    sizes = {name: _mean_size(by_rule[name], verdicts[name]) for name in RULES}
    sizes[NUMPY] = sizes[EXACT]
    # These normalise the draft's rows themselves, which bytes_read leaves to the draft step.
    row = vocab_size * exact[0].draft.itemsize
    sizes[RAW] = sizes[TRANSFORMERS] = sizes[FUNCTION] = sizes[EXACT] + row * statistics.mean(
        v.accepted for v in verdicts[EXACT]
    )
    return Point(
        vocab_size,
        gamma,
        {name: statistics.mean(v.accepted for v in verdicts[name]) for name in RULES},
        {name: sizes[name] for name in calls},
        {name: _per_round(figures[name], len(logits)) for name in calls},
    )


def _all(calls: Iterable[Callable[[], object]]) -> Callable[[], None]:
    each = tuple(calls)

    def call() -> None:
        for one in each:
            one()

    return call


def _from_logits(round_: Round, drafts: list[list[int]], threads: int) -> Callable[[], object]:
    """The kernel without the normalisers that its own draft steps hand over."""
    sampler = RoundSampler(round_.vocab_size, round_.gamma, 1, threads)
    sampler.begin(round_.places)
    sampler.drafts[:] = drafts
    return lambda: sampler.verify(round_.target, round_.draft)


def _function(round_: Round, drafts: list[list[int]]) -> Callable[[], object]:
    """`_speculative_sampling` on scores that are there already."""
    import torch
    from transformers.generation.utils import _speculative_sampling

    target, draft = (
        torch.from_numpy(logits) / round_.params.temperature
        for logits in (round_.target, round_.draft)
    )
    ids: Any = torch.tensor(drafts)
    return lambda: _speculative_sampling(ids, draft, round_.gamma, target)


def _mean_size(rounds: list[Round], verdicts: list[Verdict]) -> float:
    return statistics.mean(r.bytes_read([v]) for r, v in zip(rounds, verdicts, strict=True))


def _per_round(figure: Figure, draws: int) -> Figure:
    return replace(figure, ms=figure.ms / draws, low=figure.low / draws, high=figure.high / draws)
