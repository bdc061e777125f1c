"""Simulations for policies: recorded or random acceptance, given costs, no clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.gamma import measured, policy
from runtime.gamma.costs import Costs

MAX_GAMMA = 8
STEP = 0.02  # seconds of a plain step
COLD = 4  # rounds until caches are warm
# For each position, whether a draft token is accepted; or a function from gamma to the number
# accepted.
Acceptance = Sequence[bool] | Callable[[int], int]


@dataclass
class Machine:
    """The costs of rounds, in plain steps. cost: c, of a draft step. first: what the first one of a
    round costs more. growth: extra cost of a verification per draft token; or table: its cost by
    gamma. noise: relative noise of a timing. outliers: fraction of rounds that take 50 times as
    long. busy: how often other processes interrupt a plain step, for one and a half. reading: cost
    per token that the draft catches up with, besides the c of the call. cold: relative slowdown of
    the first round with drafts after rounds without, decreasing over the three rounds after it.
    rise: relative increase of all times over the first hundred tokens of a sequence."""

    cost: float
    growth: float = 0.0
    first: float = 0.0
    table: Sequence[float] = ()
    noise: float = 0.05
    outliers: float = 0.0
    busy: float = 0.0
    reading: float = 0.0
    cold: float = 0.0
    rise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def parts(self, gamma: int) -> tuple[float, float]:
        """Mean costs of a round: drafts, and the rest."""
        drafts = gamma * self.cost + (self.first if gamma else 0)
        return drafts, self.table[gamma] if self.table else 1 + gamma * self.growth

    def timings(self, gamma: int, slow: float = 1.0) -> tuple[float, float]:
        """Seconds of the two parts, as a clock would measure them."""
        slow *= STEP * (50 if self.rng.random() < self.outliers else 1)
        noise = (self.noise * self.rng.standard_normal(2).clip(-3, 3)).tolist()
        draft, rest = (part * (1 + x) for part, x in zip(self.parts(gamma), noise, strict=True))
        rest += 1.5 * self.rng.poisson(self.busy * (draft + rest)) if self.busy else 0
        return slow * draft, slow * rest


@dataclass
class Run:
    """The result for one sequence: tokens, time in plain steps, time of plain decoding, gammas, and
    the position at which each round began. loss: the largest excess, after any round, over the
    bound that `measured.SharedGamma` promises."""

    tokens: int = 0
    time: float = 0.0
    plain: float = 0.0
    gammas: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    loss: float = 0.0


def random_acceptance(alpha: Any, tokens: int, seed: int = 0) -> list[bool]:
    """Random acceptance. alpha: its rate, for all positions or for each; a position's outcome is
    the same for every policy."""
    heads: npt.NDArray[np.bool_] = np.random.default_rng(seed).random(tokens) < alpha
    return heads.tolist()


def auto(
    costs: Costs | None = None, gamma: int | str = "auto", settings: object = None
) -> measured.Policy:
    shared = measured.SharedGamma(costs or Costs(MAX_GAMMA))
    return policy.make_policy(gamma, shared, fallback=True, settings=settings)


def choose(chooser: measured.Policy, batch: int = 1) -> int:
    """gamma of a round in which the others of the batch do not choose."""
    policy.choose_together([chooser], batch)
    return chooser.next()


def timed(*batches: int, cost: float = 0.2, most: int = MAX_GAMMA) -> Costs:
    """Costs that are known from the start; a verification costs as much as a plain step."""
    costs = Costs(most)
    for batch in batches or (1,):
        for gamma in (0, 0, most, most) * 3:
            costs.observe(batch, gamma, cost * gamma * STEP, STEP)
    return costs


def simulate(
    chooser: measured.Policy, known: Costs | None, machine: Machine, acceptance: Acceptance,
    tokens: int,
) -> Run:  # fmt: skip
    """Simulate one sequence. known: the costs that the policy uses, updated with each timing; None
    if it uses none."""
    return simulate_together([chooser], known, machine, [acceptance], tokens)[0]


def simulate_together(
    choosers: Sequence[measured.Policy], known: Costs | None, machine: Machine,
    acceptances: Sequence[Acceptance], tokens: int,
) -> list[Run]:  # fmt: skip
    """Simulate sequences that begin together, and leave when they have their tokens."""
    runs, behind, stay = [Run() for _ in choosers], [0] * len(choosers), 0
    while active := [i for i, run in enumerate(runs) if run.tokens < tokens]:
        policy.choose_together([choosers[i] for i in active], len(active))
        drafted, emitted = {}, {}
        for i in active:
            drafted[i] = gamma = min(choosers[i].next(), tokens - runs[i].tokens - 1)
            at, acceptance = runs[i].tokens, acceptances[i]
            if callable(acceptance):
                accepted = acceptance(gamma)
            else:
                accepted = [*acceptance[at : at + gamma], False].index(False)
            choosers[i].observe(gamma, min(gamma, accepted + 1), accepted)
            emitted[i] = accepted + 1
        steps, unread = max(drafted.values()), [behind[i] for i in active if drafted[i]]
        level = 1 + machine.rise * min(1.0, max(runs[i].tokens for i in active) / 100)
        slow = level * (1 + machine.cold * max(0, COLD - stay) / COLD if steps else 1)
        reading = sum(machine.cost + n * machine.reading for n in unread if n)
        if known:
            known.observe(len(active), steps, *machine.timings(steps, slow))
            if reading:
                known.observe_catch_up(len(active), sum(unread), STEP * level * reading)
        stay = stay + 1 if steps else 0
        for i in active:
            run, behind[i] = runs[i], 0 if drafted[i] else behind[i] + 1
            run.at.append(run.tokens)
            run.gammas.append(drafted[i])
            run.tokens += emitted[i]
            run.time += slow * sum(machine.parts(steps)) + level * reading
            run.plain += level * emitted[i]
            promise = measured.LOSS_ALLOWANCE + measured.LOSS_RATE * run.tokens
            run.loss = max(run.loss, run.time - run.plain - promise)
    return runs


def speeds(
    gamma: int | str, machine: Machine, loads: Mapping[str, Sequence[Acceptance]], tokens: int,
    fallback: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Speed-ups over plain decoding, by workload and for "all", whose sequences take turns on one
    machine. Each workload has its own settings."""
    known, machine = Costs(MAX_GAMMA), replace(machine)
    shared = measured.SharedGamma(known)
    runs: dict[str, list[Run]] = {name: [] for name in loads}
    for texts in zip(*loads.values(), strict=True):
        for name, acceptance in zip(loads, texts, strict=True):
            chooser = policy.make_policy(gamma, shared, fallback=fallback, settings=name)
            observed = known if fallback or gamma == "auto" else None
            runs[name].append(simulate(chooser, observed, machine, acceptance, tokens))
    groups = {**runs, "all": [run for some in runs.values() for run in some]}
    return {name: sum(x.plain for x in g) / sum(x.time for x in g) for name, g in groups.items()}


@cache
def recorded() -> dict[str, list[list[bool]]]:
    """Acceptance of the bundled pair, from a file that
    `bench.suites.policies.suite.record_acceptances` wrote."""
    texts = json.loads(Path(__file__).with_name("acceptance.json").read_text())
    return {name: [[x == "1" for x in row] for row in rows] for name, rows in texts.items()}
