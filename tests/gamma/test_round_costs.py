"""The costs of rounds, from injected times."""

from __future__ import annotations

import pytest
from simulated import MAX_GAMMA, STEP, choose, timed

from runtime.gamma.costs import Costs, RoundCosts
from runtime.gamma.measured import MeasuredPolicy, SharedGamma
from runtime.gamma.policy import make_policy


def test_gammas_that_were_not_timed_lie_on_lines() -> None:
    one = RoundCosts.of(0.2, {2: 2.0}, MAX_GAMMA)
    assert (one.plain, one.draft, one.verify) == (2.0, 0.1, [1.0] * 9)
    two = RoundCosts.of(0.2, {0: 1.6, 6: 2.8}, MAX_GAMMA)
    assert two.verify == pytest.approx([(1.6 + 0.2 * g) / 1.6 for g in range(9)])
    assert two.round(3) == pytest.approx((2.2 + 0.6) / 1.6)
    assert RoundCosts.of(0.2, {0: 1, 1: 3, 2: 2}, 4).verify == [1, 3, 2, 2.5, 3]
    assert RoundCosts.of(0.2, {1: 3, 4: 2}, 6).verify[-1] == pytest.approx(2 / 3), "never falls"


def test_no_verification_costs_more_than_a_wider_one() -> None:
    """Otherwise a plain step that was slow on a busy machine would make every draft look fast."""
    costs = timed(cost=0.1)
    for _ in range(9):
        costs.observe(1, 0, 0.0, 5 * STEP)
    assert costs.rounds(1).verify == pytest.approx([1.0] * 9)
    assert costs.rounds(1).draft == pytest.approx(0.1)


def test_short_readings_say_little_of_long_ones() -> None:
    """For a single token, the overhead of the call dominates the timing."""
    costs = timed(cost=0.2)
    for tokens in (60, 1, 1, 1, 40, 1, 1, 1, 50):
        costs.observe_catch_up(1, tokens, ((0.22 if tokens == 1 else 0.2) + tokens * 0.0125) * STEP)
    assert costs.rounds(1).catch_up(64) == pytest.approx(0.2 + 64 * 0.0125, rel=0.01)
    assert costs.rounds(1).catch_up(0) == 0


def test_batch_sizes_keep_apart() -> None:
    """Timings of one batch size affect no other: here, drafting pays off only for one request."""
    costs = timed(1, cost=0.1, most=4)
    for gamma in (0, 0, 4, 4) * 2:
        costs.observe(8, gamma, 1.5 * gamma, 3.0 * (1 + gamma))
    assert costs.rounds(1).round(4) == pytest.approx(1.4)
    assert costs.rounds(8).round(4) == pytest.approx(7)
    policy = make_policy("auto", SharedGamma(costs), fallback=True)
    for _ in range(4):
        policy.observe(4, 4, 3)
    assert choose(policy) > 2
    assert choose(policy, 8) == 0
    # A new batch size is timed first, although others may already supply its costs.
    policy = make_policy("auto", SharedGamma(costs), fallback=True)
    for gamma in (0, 0, 1, 1, 1, 1, 1):  # the last one with warm caches
        assert choose(policy, 2) == gamma
        costs.observe(2, gamma, gamma, 1.0)
    assert costs.gamma_to_time(2) is None and costs.gamma_to_time(3) == 0
    assert costs.rounds_if_timed(2) == costs.rounds(2) and costs.rounds_if_timed(3) is None
    for _ in range(8):
        costs.observe(3, 4, 1.0, 1.0)
    assert costs.gamma_to_time(3, fixed=4) is None and costs.rounds(3).verify[0] == 1
    assert costs.gamma_to_time(3) == 0, "without that request a plain step can be timed"
    assert costs.rounds_if_timed(3) is None, "its plain step is a guess"


def test_costs_without_a_plain_step() -> None:
    """Beside a request with a fixed gamma. Faults: the dearer first step of a short draft counted
    as part of a plain step; measuring again raised an IndexError."""
    costs = Costs(64)
    for gamma in range(1, 65):
        costs.observe(1, gamma, STEP * (0.5 + 0.1 * gamma), STEP * (1 + 0.01 * gamma))
    assert costs.rounds(1).plain == pytest.approx(1.01 * STEP)
    for _ in range(1024):
        costs.observe(1, 64, STEP, STEP)
    assert costs.gamma_to_time(1) == 0
    for gamma in range(2, 12):
        costs.observe(1, gamma, STEP, STEP)
    assert costs.gamma_to_time(1, fixed=64) is None
    assert costs.rounds(1).round(2) == pytest.approx(2)


def test_the_nearest_batch_size() -> None:
    costs = timed(1, 4, cost=0.1)
    costs.observe(9, 8, STEP, STEP)  # without a plain step
    assert costs.rounds_of_nearest(5) is costs.rounds_of_nearest(9) is costs.rounds(4)
    assert costs.rounds_of_nearest(2) is costs.rounds(1)
    assert Costs(8).rounds_of_nearest(1) is None


def test_a_gamma_that_was_disturbed_twice_is_timed_again() -> None:
    """Fault: two interrupted rounds made it look so slow that it was never used again."""
    costs = Costs(MAX_GAMMA)
    for _ in range(9):
        costs.observe(1, 0, 0.0, STEP)
        costs.observe(1, 1, 0.1 * STEP, STEP)
    for _ in range(2):
        costs.observe(1, 2, 0.2 * STEP, 2 * STEP)
    policy = MeasuredPolicy(SharedGamma(costs))
    assert choose(policy) == 2
    costs.earlier_texts().add(250, 60)  # a draft that is seldom right would not gain by it
    assert choose(MeasuredPolicy(SharedGamma(costs))) == 1


def test_a_plain_step_is_timed_again_too() -> None:
    """Fault: two slow ones at the start made drafts look fast for as long as they were used."""
    costs = timed()
    for _ in range(1024):
        costs.observe(1, 4, STEP, STEP)
    for gamma in (0, 0):
        assert costs.gamma_to_time(1) == gamma
        costs.observe(1, gamma, 0.0, STEP / 2)
    assert costs.gamma_to_time(1) == 1
    assert costs.rounds(1).plain == pytest.approx(STEP / 2)


def test_a_lookup_that_has_found_nothing_yet() -> None:
    """It costs nothing to ask. Fault: an untimed draft counts as slow, and the pauses doubled."""
    costs = Costs(MAX_GAMMA, reads_model=False)
    policy = MeasuredPolicy(SharedGamma(costs))
    for _ in range(200):
        gamma = choose(policy)
        policy.observe(0, 0, 0)
        costs.observe(1, 0, 0.0, STEP)
    assert gamma == MAX_GAMMA
