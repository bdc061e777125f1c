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

from runtime import policy
from runtime.costs import Costs

MAX_GAMMA = 8
STEP = 0.02  # seconds of a plain step
COLD = 4  # rounds until caches are warm
# For each position, whether a draft token is accepted; or a function from gamma to the number
# accepted.
Acceptance = Sequence[bool] | Callable[[int], int]


@dataclass
class Machine:
    """The costs of rounds, in plain steps. cost: c, of a draft step. growth: extra cost of a
    verification per draft token; or table: its cost by gamma. noise: relative noise of a timing.
    outliers: fraction of rounds that take 50 times as long. reading: cost per token that the draft
    catches up with, besides the c of the call. cold: relative slowdown of the first round with
    drafts after rounds without, decreasing over the three rounds after it. rise: relative increase
    of all times over the first hundred tokens of a sequence."""

    cost: float
    growth: float = 0.0
    table: Sequence[float] = ()
    noise: float = 0.05
    outliers: float = 0.0
    reading: float = 0.0
    cold: float = 0.0
    rise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def parts(self, gamma: int) -> tuple[float, float]:
        """Mean costs of a round: drafts, and the rest."""
        return gamma * self.cost, self.table[gamma] if self.table else 1 + gamma * self.growth

    def timings(self, gamma: int, slow: float = 1.0) -> tuple[float, float]:
        """Seconds of the two parts, as a clock would measure them."""
        slow *= STEP * (50 if self.rng.random() < self.outliers else 1)
        noise = (self.noise * self.rng.standard_normal(2).clip(-3, 3)).tolist()
        draft, rest = self.parts(gamma)
        return slow * draft * (1 + noise[0]), slow * rest * (1 + noise[1])


@dataclass
class Run:
    """The result for one sequence: tokens, time in plain steps, time of plain decoding, gammas, and
    the position at which each round began. loss: the largest excess, after any round, over the
    bound that `policy.MeasuredPolicy` promises."""

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


def simulate(
    chooser: policy.Policy, known: Costs | None, machine: Machine, acceptance: Acceptance,
    tokens: int,
) -> Run:  # fmt: skip
    """Simulate one sequence. known: the costs that the policy uses, updated with each timing; None
    if it uses none."""
    run, behind, stay = Run(), 0, 0
    while run.tokens < tokens:
        gamma = min(chooser.next(1), tokens - run.tokens - 1)
        if callable(acceptance):
            accepted = acceptance(gamma)
        else:
            accepted = [*acceptance[run.tokens : run.tokens + gamma], False].index(False)
        level = 1 + machine.rise * min(1.0, run.tokens / 100)
        slow = level * (1 + machine.cold * max(0, COLD - stay) / COLD if gamma else 1)
        reading = machine.cost + behind * machine.reading if gamma and behind else 0.0
        chooser.observe(gamma, min(gamma, accepted + 1), accepted)
        if known:
            known.observe(1, gamma, *machine.timings(gamma, slow))
            if reading:
                known.observe_catch_up(1, behind, STEP * level * reading)
        stay, behind = (stay + 1, 0) if gamma else (0, behind + 1)
        run.at.append(run.tokens)
        run.gammas.append(gamma)
        run.tokens += accepted + 1
        run.time += slow * sum(machine.parts(gamma)) + level * reading
        run.plain += level * (accepted + 1)
        promise = policy.LOSS_ALLOWANCE + policy.LOSS_RATE * run.tokens
        run.loss = max(run.loss, run.time - run.plain - promise)
    return run


def speeds(
    gamma: int | str, machine: Machine, loads: Mapping[str, Sequence[Acceptance]], tokens: int,
    fallback: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Speed-ups over plain decoding, by workload and for "all", whose sequences take turns on one
    machine. Each workload has its own settings."""
    known, machine = Costs(MAX_GAMMA), replace(machine)
    runs: dict[str, list[Run]] = {name: [] for name in loads}
    for texts in zip(*loads.values(), strict=True):
        for name, acceptance in zip(loads, texts, strict=True):
            chooser = policy.make_policy(gamma, known, MAX_GAMMA, fallback=fallback, settings=name)
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
