"""What the clock found in policies and the rest of the simulation leaves out: the draft has to read
what rounds without it added, caches grow, first calls are slow, and choosing takes time itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from simulated import MAX_GAMMA, STEP, Machine, simulate, texts

from runtime.costs import Costs
from runtime.policy import make_policy

COST, GROWTH, READING = 0.2, 0.03, 0.0125  # about those of the bundled pair
INSTRUCTION = 3e-5  # of a plain step: 1 ms, and 30 ns with the caches that the models leave
PAIR = Machine(COST, GROWTH, reading=READING)
MACHINES = {
    "as it is": PAIR,
    "a cache that grows": replace(PAIR, level=(100, 1.15)),
    "slow first calls": replace(PAIR, first=2.0),
    "all of it": replace(PAIR, level=(100, 1.15), first=2.0, instruction=INSTRUCTION),
}
ALPHAS = {"high": 0.93, "middle": 0.65, "low": 0.21}


def stream(count: int) -> list[float]:
    """Acceptances of texts, the three workloads in turn; within one they differ."""
    rng = np.random.default_rng(7)
    return [float(rng.beta(12 * a, 12 * (1 - a))) for _ in range(count) for a in ALPHAS.values()]


@cache
def speeds(gamma: int | str, name: str) -> dict[str, float]:
    """Of the stream, by workload; and of all."""
    costs, machine = Costs(MAX_GAMMA), replace(MACHINES[name], called=set())
    if gamma != "auto":  # warmed up, and nothing to choose
        machine = replace(machine, first=1.0, instruction=0.0)
    runs = [
        simulate(make_policy(gamma, costs, MAX_GAMMA, fallback=False), costs, machine, alpha, 160,
                 seed)
        for seed, alpha in enumerate(stream(16))
    ]  # fmt: skip
    kept = {load: runs[i::3] for i, load in enumerate(ALPHAS)} | {"all": runs}
    return {
        load: sum(run.plain for run in some) / sum(run.time for run in some)
        for load, some in kept.items()
    }


@pytest.mark.parametrize("name", MACHINES)
def test_near_the_best_of_each_and_better_than_any_of_all(name: str) -> None:
    best = {load: max(speeds(g, name)[load] for g in range(MAX_GAMMA + 1)) for load in ALPHAS}
    for load in ALPHAS:
        assert speeds("auto", name)[load] > 0.95 * best[load], load
    assert speeds("auto", name)["all"] > 1.05 * max(
        speeds(g, name)["all"] for g in range(MAX_GAMMA + 1)
    )


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize(("alpha", "cost"), [(0.0, 0.2), (0.0, 0.5), (0.1, 0.2)])
def test_a_hopeless_draft(alpha: float, cost: float, gamma: int | str, name: str) -> None:
    """At most 5 % is lost, in the first text of a decoder and in several; in the first one not
    counted is what first calls take."""
    for count in (1, 6):
        first = MACHINES[name].first if count > 1 else 1.0
        machine = replace(MACHINES[name], cost=cost, first=first, called=set())
        assert texts(gamma, machine, [alpha] * count, 256) > 0.95


# A text that begins badly


def bad_then_good(count: int) -> list[Any]:
    return [np.concatenate([np.full(24, 0.05), np.full(136, 0.8)]), 0.8] * (count // 2)


def test_a_text_that_begins_badly() -> None:
    """It is not left to plain decoding: after 24 bad tokens, drafts are used again."""
    alphas = bad_then_good(20)
    fixed = max(texts(gamma, PAIR, alphas, 160, fallback=False) for gamma in range(1, 9))
    assert texts("auto", PAIR, alphas, 160) > 0.95 * fixed
    costs, late = Costs(MAX_GAMMA), []
    for seed, alpha in enumerate(alphas):
        policy = make_policy("auto", costs, MAX_GAMMA, fallback=True)
        run = simulate(policy, costs, PAIR, alpha, 160, seed)
        if seed % 2 == 0:
            late.append(sum(g > 0 for g, at in zip(run.gammas, run.at, strict=True) if at > 100))
    assert min(late) > 0 and np.mean(late) > 15


def test_short_readings_say_little_of_long_ones() -> None:
    """Of a token alone the call is all there is to time."""
    costs, call, each = Costs(MAX_GAMMA), COST * STEP, READING * STEP
    for gamma in (0, 4) * 3:
        costs.observe(1, gamma, gamma * call, STEP)
    for tokens in (60, 1, 1, 1, 40, 1, 1, 1, 50):
        costs.caught_up(1, tokens, (1.1 if tokens == 1 else 1) * call + tokens * each)
    assert costs.reading(1, 64) == pytest.approx(COST + 64 * READING, rel=0.01)
    assert costs.reading(1, 0) == 0


def test_texts_begin_where_others_did() -> None:
    def first_gammas(alpha: float) -> list[int]:
        costs = Costs(MAX_GAMMA)
        for seed in range(6):
            policy = make_policy("auto", costs, MAX_GAMMA, fallback=True)
            run = simulate(policy, costs, PAIR, alpha, 160, seed)
        return run.gammas[:3]

    assert max(first_gammas(0.05)) == 0
    assert min(first_gammas(0.9)) >= 3


# Costs


def test_a_level_for_all_widths() -> None:
    """Where a longer cache makes everything slower, what is not in use does not look cheap."""
    costs = Costs(MAX_GAMMA)
    for gamma in (1, *range(MAX_GAMMA + 1)):
        for _ in range(10):
            costs.observe(1, gamma, gamma * COST * STEP, (1 + gamma * GROWTH) * STEP)
            assert not costs.timed or costs.rounds(1)  # asked after each round, as policies do
    before = costs.rounds(1)
    assert before == pytest.approx([1 + g * (COST + GROWTH) for g in range(9)])
    for used in (4, 0, 8):
        for slow in (1.0, 1.3, 1.0):
            for _ in range(12):
                costs.observe(1, used, used * COST * slow * STEP, (1 + used * GROWTH) * slow * STEP)
                costs.rounds(1)
            assert costs.rounds(1) == pytest.approx(before, rel=0.02), used
    # What is timed beside it changes in relation to it.
    for _ in range(9):
        costs.observe(1, 8, 8 * COST * STEP, (1 + 8 * GROWTH) * STEP)
        costs.observe(1, 8, 8 * COST * STEP, (1 + 8 * GROWTH) * STEP)
        costs.observe(1, 0, 0, 0.5 * STEP)
        costs.rounds(1)
    assert costs.rounds(1)[8] == pytest.approx(2 * before[8], rel=0.02)


def test_what_was_timed_at_another_level_is_learned_anew() -> None:
    """A machine that was twice as slow just when a gamma was first tried."""
    costs = Costs(MAX_GAMMA)

    def use(gamma: int, slow: float = 1.0) -> None:
        for _ in range(12):
            costs.observe(1, gamma, gamma * COST * slow * STEP, (1 + gamma * GROWTH) * slow * STEP)
            assert not costs.timed or costs.rounds(1)

    use(0)
    use(1, 2.0)
    assert costs.rounds(1)[1] == pytest.approx(2 * (1 + COST + GROWTH))
    for _ in range(3):
        use(0)
        use(1)
    assert costs.rounds(1)[1] == pytest.approx(1 + COST + GROWTH)


def test_gammas_that_never_settle_are_timed_all_the_same() -> None:
    """A lookup finds another number of tokens each time."""
    costs, rng = Costs(MAX_GAMMA), np.random.default_rng(0)
    for number in range(300):
        gamma = int(rng.integers(0, MAX_GAMMA + 1))
        growth = GROWTH if number > 150 else 3 * GROWTH
        costs.observe(1, gamma, gamma * COST * STEP, (1 + gamma * growth) * STEP)
        assert not costs.timed or costs.rounds(1)
    assert costs.rounds(1) == pytest.approx([1 + g * (COST + GROWTH) for g in range(9)], rel=0.02)


def test_first_rounds_after_a_change_are_slower() -> None:
    """What a gamma costs is what it does once caches are warm, also where it is mostly tried."""
    costs = Costs(MAX_GAMMA)
    for rounds in (20, 1, 1, 1, 8, 1, 1):
        for gamma, count in ((0, 20), (1, rounds)):
            for i in range(count):
                cold = 1.1 if i < 4 else 1.0
                costs.observe(
                    1, gamma, gamma * COST * cold * STEP, (1 + gamma * GROWTH) * cold * STEP
                )
                assert not costs.timed or costs.rounds(1)
    assert costs.rounds(1)[1] == pytest.approx(1 + COST + GROWTH, rel=0.001)


def test_first_calls_do_not_count() -> None:
    """The first is slow, and the second a little; the other widths are known."""
    costs, machine = Costs(MAX_GAMMA), Machine(COST, GROWTH, noise=0)
    for gamma in (0, MAX_GAMMA) * 5:
        costs.observe(1, gamma, *machine.timings(gamma))
    for slow in (5.0, 1.5, 1.0):
        costs.observe(1, 4, *machine.timings(4, slow))
        assert costs.rounds(1) == pytest.approx([machine.round(g) for g in range(9)])


# The time that choosing takes


@pytest.mark.parametrize(("alpha", "most"), [(0.0, 0.006), (0.65, 0.018), (0.93, 0.012)])
def test_choosing_is_cheap(alpha: float, most: float) -> None:
    costs, machine = Costs(MAX_GAMMA), replace(PAIR, instruction=INSTRUCTION)
    policy = make_policy("auto", costs, MAX_GAMMA, fallback=True)
    run = simulate(policy, costs, machine, alpha, 1024)
    assert 0 < run.instructions * INSTRUCTION < most * run.time
