"""Texts and costs to try policies on: coins for the drafts, injected costs, no clock."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime import costs
from runtime import policy as adaptive
from runtime.costs import Costs
from runtime.policy import ALLOWANCE, RATE, Policy, make_policy

MAX_GAMMA = 8
STEP = 0.02  # seconds of a plain step


@dataclass
class Machine:
    """cost: c. growth: of a verification, for each draft token. noise: relative, of each timing.
    outliers: how many of the rounds take 50 times as long. reading: what the draft has to catch up
    with, in plain steps for each token beside the c of a call; None if that takes no time. first:
    how much longer the first call of a width takes. level: where in a text all becomes slower (the
    cache grows), and by what factor. instruction: plain steps for one of Python's that a policy
    executes.
    """

    cost: float
    growth: float
    noise: float = 0.05
    outliers: float = 0.0
    reading: float | None = None
    first: float = 1.0
    level: tuple[int, float] = (0, 1.0)
    instruction: float = 0.0
    seed: int = 0
    rng: np.random.Generator = field(init=False)
    called: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def round(self, gamma: int) -> float:
        """What it takes on average, in plain steps."""
        return gamma * (self.cost + self.growth) + 1

    def timings(self, gamma: int, slow: float = 1.0) -> tuple[float, float]:
        factor = STEP * slow * (1 + self.noise * self.rng.standard_normal(2).clip(-3, 3))
        factor *= 50 if self.rng.random() < self.outliers else 1
        return gamma * self.cost * factor[0], (1 + gamma * self.growth) * factor[1]

    def slow(self, place: int, gamma: int) -> float:
        """By what factor a round takes longer here."""
        first = 1.0 if gamma in self.called else self.first
        self.called.add(gamma)
        return first * (self.level[1] if place >= self.level[0] else 1.0)


@dataclass
class Run:
    """Of one text: tokens, time in plain steps, gammas; loss: the largest excess over the promise
    of `adaptive.Measured`, after any round, in plain steps."""

    tokens: int = 0
    time: float = 0.0
    plain: float = 0.0
    gammas: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # where in the text each round began
    loss: float = 0.0
    instructions: int = 0

    @property
    def speed(self) -> float:
        return self.plain / self.time


def simulate(
    policy: Policy,
    costs: Costs,
    machine: Machine,
    alpha: float | npt.NDArray[Any] | Callable[[int], int],
    tokens: int = 256,
    seed: int = 0,
    slower: float = 0.0,
    late: int = 0,
) -> Run:
    """A text. alpha: acceptance, for all or by place in the text (a place's coin is the same for
    every policy); or a function from gamma to accepted tokens. slower: by how much a step has
    slowed down at the end. late: rounds between a choice and its use."""
    coins = np.random.default_rng(seed).random(tokens + 1)
    heads = None if callable(alpha) else coins < np.append(np.broadcast_to(alpha, tokens), 0)
    run, behind = Run(), 0
    waiting = [0] * late
    with counted(run, machine.instruction > 0):
        while run.tokens < tokens:
            waiting.append(policy.next(1))
            gamma = min(waiting.pop(0), tokens - run.tokens - 1)
            if heads is None:
                accepted = alpha(gamma)  # type: ignore[operator]
            else:
                block = heads[run.tokens : run.tokens + gamma]
                accepted = gamma if block.all() else int(block.argmin())
            plain = 1 + slower * run.tokens / tokens
            plain *= machine.level[1] if run.tokens >= machine.level[0] else 1.0
            slow = 1 + slower * run.tokens / tokens
            slow *= machine.slow(run.tokens, gamma)
            policy.observe(gamma, min(gamma, accepted + 1), accepted, accepted == gamma)
            costs.observe(1, gamma, *machine.timings(gamma, slow))
            if gamma and behind and machine.reading is not None:
                reading = plain * (machine.cost + behind * machine.reading)
                noise = 1 + machine.noise * float(machine.rng.standard_normal())
                costs.caught_up(1, behind, STEP * reading * noise)
                run.time += reading
            behind = 0 if gamma else behind + 1
            run.at.append(run.tokens)
            run.gammas.append(gamma)
            run.tokens += accepted + 1
            run.time += slow * machine.round(gamma)
            run.plain += plain * (accepted + 1)
            thinking = run.instructions * machine.instruction
            run.loss = max(
                run.loss, run.time + thinking - run.plain - RATE * run.tokens - ALLOWANCE
            )
    run.time += run.instructions * machine.instruction
    return run


@contextmanager
def counted(run: Run, wanted: bool) -> Iterator[None]:
    """Python's instructions within the policies, which are the same on every machine."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in (adaptive.__file__, costs.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        run.instructions += event == "opcode"
        return trace

    before = sys.gettrace()
    if wanted:
        sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def texts(
    gamma: int | str,
    machine: Machine,
    alphas: list[Any],
    tokens: int = 256,
    fallback: bool = True,
) -> float:
    """Speed over plain decoding of several texts, one after the other on the same machine."""
    costs = Costs(MAX_GAMMA)
    runs = [
        simulate(make_policy(gamma, costs, MAX_GAMMA, fallback=fallback), costs, machine, alpha,
                 tokens, seed)
        for seed, alpha in enumerate(alphas)
    ]  # fmt: skip
    return sum(run.plain for run in runs) / sum(run.time for run in runs)
