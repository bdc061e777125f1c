"""Gamma policies on recorded and on random acceptance, with injected costs and no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from rounds import cases
from simulated import (
    MAX_GAMMA,
    STEP,
    Machine,
    auto,
    choose,
    random_acceptance,
    recorded,
    simulate,
    speeds,
    timed,
)

from runtime.gamma.costs import MAX_SETTINGS, Costs
from runtime.gamma.measured import LONGEST_PAUSE, MeasuredPolicy, SharedGamma
from runtime.gamma.policy import choose_together, make_policy
from runtime.theory.formulas import best_gamma

PAIR = Machine(0.2, 0.03, reading=0.0125, cold=0.15)  # about those of the bundled pair
MACHINES = {
    "the bundled pair": PAIR,
    "a cache that grows": replace(PAIR, rise=0.15),
    "a larger pair": Machine(0.085, 0.02, reading=0.004, noise=0.01, cold=0.03),
    "a noisy machine": replace(PAIR, noise=0.15, outliers=0.02),
    "a busy machine": replace(PAIR, busy=0.3),
    # The target evicts the draft from the caches, and its own narrow calls are cheap.
    "a measured pair": Machine(
        0.107, table=[1, 1.16, 1.31, 1.46, 1.53, 1.63, 1.84, 1.95, 2.04], first=0.12, reading=0.008
    ),
    # In a round, the best gamma may lose more than a new request is allowed to.
    "a dear draft": replace(PAIR, cost=0.4, growth=0.1),
    # Beyond gamma 4, a verification costs much more: timings of 3 or 7 do not show that.
    "blocks": Machine(0.1, table=[1, *[1.1] * 4, *[1.6] * 4], reading=0.005),
}


# The choice of auto


@pytest.mark.parametrize(
    "name", cases(["the bundled pair", "a busy machine", "a dear draft", "blocks"], MACHINES)
)
def test_near_the_best_of_each_and_better_than_any_of_all(name: str) -> None:
    """Recorded acceptance of the bundled pair: on texts that the draft predicts well, fairly or
    hardly, and on all of them in turn."""
    machine = MACHINES[name]
    fixed = [speeds(gamma, machine, recorded(), 160) for gamma in range(MAX_GAMMA + 1)]
    runs = [speeds("auto", replace(machine, seed=seed), recorded(), 160) for seed in range(3)]
    found = {load: np.mean([each[load] for each in runs]) for load in runs[0]}
    for load in recorded():
        assert found[load] > 0.95 * max(each[load] for each in fixed), load
    assert found["all"] > 1.05 * max(each["all"] for each in fixed)


@pytest.mark.parametrize("alpha", [0.9, 0.6, 0.2])
@pytest.mark.parametrize(("cost", "growth"), [(0.05, 0.02), (0.15, 0.05), (0.3, 0.1), (0.05, 0.1)])
def test_auto_is_near_the_best_of_the_theorem(cost: float, growth: float, alpha: float) -> None:
    """Within 5 % of the best fixed gamma, including the cost of finding it; also in long texts."""
    best, expected = best_gamma(alpha, cost, [1 + growth * g for g in range(MAX_GAMMA + 1)])
    for count, tokens in ((48, 256), (2, 4096)):
        texts = {"": [random_acceptance(alpha, tokens, seed) for seed in range(count)]}
        fixed = speeds(best, Machine(cost, growth), texts, tokens)["all"]
        assert fixed == pytest.approx(expected, rel=0.05)
        assert speeds("auto", Machine(cost, growth), texts, tokens)["all"] > 0.95 * fixed


def test_deeper_positions() -> None:
    """A draft that copies: if the first token is right, most others are. No single alpha describes
    that."""
    conditional = [0.3] + [0.95] * (MAX_GAMMA - 1)

    def speed(gamma: int | str) -> float:
        rng = np.random.default_rng(0)

        def copied(drafted: int) -> int:
            return [*(rng.random(drafted) < conditional[:drafted]), False].index(False)

        return speeds(gamma, Machine(0.01, 0.05), {"": [copied] * 6}, 2048)["all"]

    fixed = {gamma: speed(gamma) for gamma in (1, 4, 8)}
    assert fixed[8] > 1.15 * fixed[4] > 1.5 * fixed[1]
    assert speed("auto") > max(0.88 * fixed[8], 1.08 * fixed[4])


# The guarantee


@pytest.mark.parametrize("gamma", ["auto", 8, "transformers"])
@pytest.mark.parametrize(
    ("cost", "growth", "alpha"),
    [(0.05, 0.02, 0.0), (0.3, 0.1, 0.0), (1.5, 0.1, 0.0), (1.5, 0.1, 0.9), (0.15, 0.05, 0.1)],
)
def test_a_hopeless_draft(cost: float, growth: float, alpha: float, gamma: int | str) -> None:
    """At most 5 % slower than plain decoding, from the first request of a decoder on; also if
    caches are cold, and if steps become slower within a text and fast again in the next one."""
    as_it_is = Machine(cost, growth)
    for machine in (as_it_is, replace(as_it_is, cold=0.15, reading=0.0125, rise=0.6)):
        for count, tokens in ((1, 256), (6, 256), (1, 2048)):
            texts = {"": [random_acceptance(alpha, tokens, seed) for seed in range(count)]}
            assert speeds(gamma, machine, texts, tokens, fallback=True)["all"] > 0.95
        if gamma != "auto":  # the control
            assert speeds(gamma, machine, texts, tokens)["all"] < 0.95


@pytest.mark.parametrize("gamma", ["auto", 8, "transformers"])
@pytest.mark.parametrize(("cost", "growth"), [(0.05, 0.02), (0.3, 0.1), (1.5, 0.1)])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_bound_holds_against_an_adversary(
    cost: float, growth: float, gamma: int | str, most: int
) -> None:
    """A draft that is always right while few tokens are drafted, and always wrong for more. If the
    costs are known, the loss after every round is at most 3 steps + 3 %: an average over texts
    cannot show that."""

    def tempting(drafted: int) -> int:
        return drafted if drafted <= most else 0

    costs, machine = Costs(MAX_GAMMA), Machine(cost, growth, noise=0, reading=0.005)
    for seen in (0, MAX_GAMMA) * 4:
        costs.observe(1, seen, *machine.timings(seen))
    costs.observe_catch_up(1, 64, STEP * (cost + 64 * 0.005))
    assert simulate(auto(costs, gamma), costs, machine, tempting, 2048).loss <= 1e-9
    constant = make_policy(8, SharedGamma(Costs(MAX_GAMMA)), fallback=False)
    assert simulate(constant, Costs(MAX_GAMMA), machine, tempting, 2048).loss > 10, "the control"


@dataclass
class BusyAtFirst(Machine):
    """Rounds 3 to 40 take three times as long."""

    rounds: int = 0

    def timings(self, gamma: int, slow: float = 1.0) -> tuple[float, float]:
        self.rounds += 1
        return super().timings(gamma, slow * (3 if 3 <= self.rounds <= 40 else 1))


@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize("machine", [Machine, BusyAtFirst])
def test_a_draft_that_is_slow_while_its_caches_are_cold(
    machine: type[Machine], gamma: int | str
) -> None:
    """What it costs when it is used is found out, in texts of 64 tokens too."""
    slow = machine(0.2, 0.06, reading=0.006, cold=0.8)
    texts = {"": [random_acceptance(0.85, 64, seed) for seed in range(60)]}
    best = speeds(4, slow, texts, 64)["all"]
    share = 0.95 if machine is Machine else 0.8  # it is timed again after 1,024 rounds
    assert speeds(gamma, slow, texts, 64, fallback=True)["all"] > share * best > 1.2


@dataclass
class SlowLater(Machine):
    """A step of the draft takes twelve times as long from round 200 on."""

    rounds: int = 0

    def parts(self, gamma: int) -> tuple[float, float]:
        draft, rest = super().parts(gamma)
        return draft * (12 if self.rounds > 200 else 1), rest

    def timings(self, gamma: int, slow: float = 1.0) -> tuple[float, float]:
        self.rounds += 1
        return super().timings(gamma, slow)


@pytest.mark.parametrize("gamma", ["auto", 4])
def test_a_draft_that_becomes_slow_while_it_is_used(gamma: int | str) -> None:
    """Timings from before the last change of gamma do not hide it."""
    texts = {"": [random_acceptance(0.5, 4096, seed=0)]}
    machine = SlowLater(0.05, 0.02)
    assert speeds(gamma, machine, texts, 4096, fallback=True)["all"] > 1
    assert speeds(4, Machine(12 * 0.05, 0.02), texts, 4096)["all"] < 0.75, "the control"


@pytest.mark.parametrize("gamma", ["auto", 4])
def test_measuring_again_does_not_read_long_texts(gamma: int | str) -> None:
    """Reading what a draft has missed may cost more than its rounds could ever gain."""
    texts = {"": [random_acceptance(0.2, 2048, seed) for seed in range(10)]}
    machine = Machine(0.2, 0.1, reading=0.05)
    assert speeds(gamma, machine, texts, 2048, fallback=True)["all"] > 0.985


def test_fallback_stays_away_from_a_good_draft() -> None:
    for gamma, alpha in ((4, 0.9), (8, 0.9), (4, 0.75)):
        texts = {"": [random_acceptance(alpha, 256, seed) for seed in range(32)]}
        fixed, kept = (speeds(gamma, Machine(0.15, 0.05), texts, 256, x)["all"] for x in (0, 1))
        assert kept > 0.97 * fixed


@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize("bad", [128, 512, 4096])
def test_a_draft_that_becomes_good_again(bad: int, gamma: int | str) -> None:
    """It is used again after at most 1.5 times as many tokens as it was bad for, and after 1,024 in
    any case, plus 64. The median over texts, because a single trial may meet one of the 10 % of
    tokens that are rejected."""
    delays = []
    for seed in range(5):
        costs = Costs(MAX_GAMMA)
        acceptance = random_acceptance(np.repeat([0.0, 0.9], [bad, 3072]), bad + 3072, seed)
        run = simulate(auto(costs, gamma), costs, Machine(0.15, 0.05), acceptance, len(acceptance))
        at, gammas = np.array(run.at), np.array(run.gammas)
        assert gammas[(at > bad / 2) & (at < bad)].mean() < 0.3
        found = at[:-1][(at[:-1] >= bad) & (gammas[:-1] >= 3) & (gammas[1:] >= 3)][0]
        delays.append(found - bad)
        assert gammas[at > found + 64].mean() > 3
    assert np.median(delays) <= min(1.5 * bad, LONGEST_PAUSE) + 64


@pytest.mark.parametrize("gamma", ["auto", 4])
def test_a_draft_that_was_good_is_missed_sooner(gamma: int | str) -> None:
    """After it has gained something, the pauses are short again."""
    costs, acceptance = Costs(MAX_GAMMA), random_acceptance(np.repeat([0, 0.9, 0], 2000), 6000)
    run = simulate(auto(costs, gamma), costs, Machine(0.15, 0.05), acceptance, 6000)
    used = [at for at, drafted in zip(run.at, run.gammas, strict=True) if drafted]
    assert sum(4060 <= at < 4400 for at in used) > 2 > sum(1400 <= at < 1740 for at in used)


# Observations


@pytest.mark.parametrize("gamma", ["auto", MAX_GAMMA, "transformers"])
@pytest.mark.parametrize("rarely", [False, True])
def test_smaller_rounds_than_asked_for(gamma: int | str, rarely: bool) -> None:
    """A lookup finds fewer tokens or none; a context or a sequence ends; a GPU ran ahead. Fault: if
    rounds of a size were seldom timed twice, the draft counted as unknown."""
    costs, machine, rng = Costs(MAX_GAMMA), Machine(0.002, 0.02), np.random.default_rng(0)
    policy, asked = auto(costs, gamma), []
    for _ in range(3000):
        asked.append(choose(policy))
        found = rng.integers(1, 9) * (rng.random() < 0.05) if rarely else rng.integers(0, 4)
        got = min(asked[-1], int(found))
        policy.observe(got, got, got)
        costs.observe(1, got, *machine.timings(got))
    assert all(0 <= g <= MAX_GAMMA for g in asked)
    assert np.mean(asked[50:]) > 5


def test_a_cut_block_says_nothing_about_the_rest() -> None:
    """A block that the end of the sequence cuts off, or that a rule for whole blocks rejects:
    positions that were not reached do not count."""
    policy = auto(timed(cost=0.05))
    for _ in range(50):
        policy.observe(8, 2, 2)
        choose(policy)
    assert choose(policy, 2) == 0 and choose(policy) == 8
    policy = auto(timed(1, 2, cost=0.05))
    assert isinstance(policy, MeasuredPolicy) and choose(policy) > 0
    policy.observe(8, 8, 1)
    assert choose(policy, 2) > 0 and policy.acceptance
    assert policy.acceptance.examined_at[:3] == [1, 1, 0]


def test_texts_begin_where_others_with_their_settings_did() -> None:
    """Requests with sampling settings that make the draft hopeless alternate with others."""
    for distinct in (True, False):
        costs, opened = Costs(MAX_GAMMA), []
        for seed in range(12):
            policy = auto(costs, settings=seed % 2 if distinct else None)
            acceptance = random_acceptance((0.9, 0.05)[seed % 2], 160, seed)
            opened.append(simulate(policy, costs, PAIR, acceptance, 160).gammas[0])
        assert (min(opened[6::2]) >= 3 and max(opened[7::2]) == 0) == distinct, opened


def test_new_settings_begin_with_what_all_others_did() -> None:
    costs = Costs(MAX_GAMMA)
    costs.earlier_texts("first").add(200, 20, loss=-5.0)
    assert costs.earlier_texts("second").acceptance < 0.2
    assert costs.earlier_texts("second").gained == 5
    for other in range(MAX_SETTINGS):
        costs.earlier_texts(other).add(50, 50)
    assert costs.earlier_texts("first").acceptance > 0.9, "forgotten after too many others"


def test_short_texts_find_out_that_the_draft_is_better_than_it_was() -> None:
    """Texts of 8 rounds, which end before a pause does, after texts with a hopeless draft. Requests
    that never run are not counted, otherwise refused requests would cause new trials."""
    costs, drafted = timed(), []
    costs.earlier_texts().add(200, 10)
    _waiting = [auto(costs) for _ in range(200)]
    for _ in range(400):
        policy = auto(costs)
        drafted.append(0)
        for _ in range(8):
            gamma = choose(policy)
            drafted[-1] += gamma
            policy.observe(gamma, gamma, gamma)
    assert not any(drafted[:20])
    assert all(drafted[-20:])


def test_a_pause_lasts_whoever_comes_and_goes() -> None:
    """A change of the batch size, or a text with a draft as hopeless as the others', is no reason
    to retry the draft; a text with a good one is."""
    tried = {}
    for joins in ("nobody", "others", "hopeless", "good"):
        shared = SharedGamma(timed(1, 2, cost=0.3))
        shared.costs.earlier_texts("hopeless").add(250, 5)
        shared.costs.earlier_texts("good").add(250, 245)
        policy, gammas = make_policy("auto", shared, fallback=True, settings="hopeless"), []
        for turn in range(200):
            texts = [policy]
            if joins != "nobody" and turn % 3 == 0:
                texts += [make_policy("auto", shared, fallback=True, settings=joins)]
            choose_together(texts[: 1 if joins == "others" else 2], len(texts))
            gammas.append(policy.next())
            policy.observe(gammas[-1], min(gammas[-1], 1), 0)
        tried[joins] = np.count_nonzero(gammas)
    assert 0 < tried["hopeless"] <= tried["nobody"] + 1
    assert 0 < tried["others"] <= tried["nobody"] + 1 < 8 < tried["good"], tried


# The other policies


def test_the_schedule_of_transformers() -> None:
    policy = make_policy("transformers", SharedGamma(Costs(16)), fallback=False)
    seen = []
    for all_accepted in (True, True, False, False, True, *[False] * 15):
        seen.append(choose(policy))
        policy.observe(seen[-1], 1, seen[-1] if all_accepted else 0)
    assert seen == [5, 7, 9, 8, 7, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    policy.observe(0, 0, 0)
    assert choose(policy) == 1, "a round without drafts changes nothing"
    for _ in range(20):
        policy.observe(*[choose(policy)] * 3)
    assert choose(policy) == 16


def test_what_is_refused() -> None:
    for gamma in ("best", -1, 5):
        with pytest.raises(ValueError, match=str(gamma)):
            make_policy(gamma, SharedGamma(Costs(4)), fallback=True)
