"""Policies against simulated texts: coins for the drafts, injected costs, no clock."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import MAX_GAMMA, STEP, Machine, simulate, texts

from runtime.costs import MOST_SETTINGS, Costs
from runtime.policy import LONGEST_PAUSE, make_policy
from runtime.theory.formulas import best_gamma, speedup

# auto


@pytest.mark.parametrize("alpha", [0.9, 0.6, 0.2])
@pytest.mark.parametrize(("cost", "growth"), [(0.05, 0.02), (0.15, 0.05), (0.3, 0.1), (0.05, 0.1)])
@pytest.mark.parametrize(("count", "tokens"), [(48, 256), (1, 4096), (3, 4096)])
def test_auto_is_near_the_best(
    cost: float, growth: float, alpha: float, count: int, tokens: int
) -> None:
    """Within 5 % of the best fixed gamma, what it takes to find it included."""
    widths = [1 + growth * gamma for gamma in range(MAX_GAMMA + 1)]
    best, expected = best_gamma(alpha, cost, widths)
    fixed = texts(best, Machine(cost, growth), [alpha] * count, tokens, fallback=False)
    assert fixed == pytest.approx(expected, rel=0.05)
    assert texts("auto", Machine(cost, growth), [alpha] * count, tokens) > 0.95 * fixed


@pytest.mark.parametrize(("cost", "growth"), [(0.05, 0.02), (0.1, 0.05), (0.15, 0.05), (0.3, 0.1)])
def test_auto_beats_any_gamma_on_a_mixture(cost: float, growth: float) -> None:
    alphas = [0.9, 0.6, 0.2] * 6
    fixed = [
        texts(gamma, Machine(cost, growth), alphas, fallback=False)
        for gamma in range(MAX_GAMMA + 1)
    ]
    assert texts("auto", Machine(cost, growth), alphas) > 1.03 * max(fixed)


def test_deeper_positions() -> None:
    """A draft that copies: if the first token is right, most others are. No common alpha says so;
    probes see it."""
    conditional = [0.3] + [0.95] * (MAX_GAMMA - 1)

    def speed(gamma: int | str) -> float:
        return float(np.mean([of_one(gamma, seed) for seed in range(6)]))

    def of_one(gamma: int | str, seed: int) -> float:
        rng, costs = np.random.default_rng(seed), Costs(MAX_GAMMA)
        policy = make_policy(gamma, costs, MAX_GAMMA, fallback=False)

        def copied(drafted: int) -> int:
            heads = rng.random(drafted) < conditional[:drafted]
            return drafted if heads.all() else int(heads.argmin())

        return simulate(policy, costs, Machine(0.01, 0.05), copied, 4096).speed

    fixed = {gamma: speed(gamma) for gamma in (1, 4, 8)}
    assert fixed[8] > 1.2 * fixed[4] > 1.5 * fixed[1]
    assert speed("auto") > max(0.88 * fixed[8], 1.08 * fixed[4])


# The promise


@pytest.mark.parametrize("tokens", [256, 4096])
@pytest.mark.parametrize("gamma", ["auto", 4, 8, "transformers"])
@pytest.mark.parametrize(
    ("cost", "growth", "alpha"),
    [(0.05, 0.02, 0.0), (0.3, 0.1, 0.0), (1.5, 0.1, 0.0), (1.5, 0.1, 0.9), (0.15, 0.05, 0.1)],
)
def test_a_hopeless_draft(
    cost: float, growth: float, alpha: float, gamma: int | str, tokens: int
) -> None:
    """At most 5 % slower than plain decoding, from the first text of a decoder on."""
    machine = Machine(cost, growth)
    assert texts(gamma, machine, [alpha], tokens) > 0.95
    if gamma != "auto":  # the control
        assert texts(gamma, machine, [alpha], tokens, fallback=False) < 0.95


@pytest.mark.parametrize("gamma", ["auto", 4, 8, "transformers"])
@pytest.mark.parametrize(("cost", "growth"), [(0.05, 0.02), (0.3, 0.1), (0.9, 0.1), (1.5, 0.1)])
@pytest.mark.parametrize("most", [0, 1, 2])
def test_the_bound_holds_against_an_adversary(
    cost: float, growth: float, gamma: int | str, most: int
) -> None:
    """A draft that is good for as long as it is tried with few tokens, and then never. After every
    round the loss is within 3 steps + 3 %, the costs known."""

    def tempting(drafted: int) -> int:
        return drafted if drafted <= most else 0

    costs, machine = Costs(MAX_GAMMA), Machine(cost, growth, noise=0)
    for seen in (0, MAX_GAMMA) * 3:
        costs.observe(1, seen, *machine.timings(seen))
    policy = make_policy(gamma, costs, MAX_GAMMA, fallback=True)
    assert simulate(policy, costs, machine, tempting, 2048).loss <= 1e-9
    constant = make_policy(8, Costs(MAX_GAMMA), MAX_GAMMA, fallback=False)
    assert simulate(constant, Costs(MAX_GAMMA), machine, tempting, 2048).loss > 10, "the control"


@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize(("cost", "growth", "alpha"), [(0.05, 0.02, 0.0), (0.3, 0.1, 0.3)])
def test_texts_that_slow_down(cost: float, growth: float, alpha: float, gamma: int | str) -> None:
    """A step costs 1.6 times as much at the end of a long text; the short one after it is not
    compared with that."""
    costs, machine = Costs(MAX_GAMMA), Machine(cost, growth)
    for number in range(12):
        policy = make_policy(gamma, costs, MAX_GAMMA, fallback=True)
        tokens, slower = (1024, 0.6) if number % 2 == 0 else (256, 0.15)
        run = simulate(policy, costs, machine, alpha, tokens, number, slower)
        assert run.speed > 0.95, number


def test_fallback_stays_away_from_a_good_draft() -> None:
    machine = Machine(0.15, 0.05)
    for gamma, alpha in ((4, 0.9), (8, 0.9), (4, 0.75)):
        fixed = texts(gamma, machine, [alpha] * 32, fallback=False)
        assert texts(gamma, machine, [alpha] * 32) > 0.97 * fixed


@pytest.mark.parametrize("gamma", ["auto", 4])
@pytest.mark.parametrize("bad", [128, 512, 4096])
def test_a_draft_that_becomes_good_again(bad: int, gamma: int | str) -> None:
    """Found after at most as many tokens again as it was bad, and 1,024 and some in any case."""
    alpha = np.concatenate([np.zeros(bad), np.full(3072, 0.9)])
    for seed in range(5):
        costs = Costs(MAX_GAMMA)
        policy = make_policy(gamma, costs, MAX_GAMMA, fallback=True)
        run = simulate(policy, costs, Machine(0.15, 0.05), alpha, len(alpha), seed)
        before = [g for g, at in zip(run.gammas, run.at, strict=True) if bad / 2 < at < bad]
        assert np.mean(before) < 0.3
        found = next(
            at for at, a, b in zip(run.at, run.gammas, run.gammas[1:], strict=False)
            if at >= bad and min(a, b) >= 3
        )  # fmt: skip
        assert found - bad <= min(1.5 * bad, LONGEST_PAUSE) + 64
        after = [g for g, at in zip(run.gammas, run.at, strict=True) if at > found + 64]
        assert np.mean(after) > 3


def test_catching_up_is_a_loss() -> None:
    """A draft whose reading of what it missed costs 5 % of a step for each token, and which never
    gains, is tried seldom enough."""
    costs, reading = Costs(MAX_GAMMA), 0.05
    policy = make_policy("auto", costs, MAX_GAMMA, fallback=True)
    machine, time, behind = Machine(0.3, 0.05, noise=0), 0.0, 0
    for _ in range(4096):
        gamma = policy.next(1)
        if gamma and behind:
            costs.caught_up(1, behind, (0.3 + behind * reading) * STEP)
            time += 0.3 + behind * reading
        behind = 0 if gamma else behind + 1
        policy.observe(gamma, min(gamma, 1), 0, gamma == 0)
        costs.observe(1, gamma, *machine.timings(gamma))
        time += machine.round(gamma)
    assert costs.reading(1, 100) == pytest.approx(0.3 + 100 * reading)
    assert time / 4096 < 1.05


# Costs


def test_outliers_move_nothing() -> None:
    """1 % of the rounds take 50 times as long; with means the choice would be another."""

    def gammas(outliers: float) -> float:
        costs, machine = Costs(MAX_GAMMA), Machine(0.15, 0.05, outliers=outliers)
        policy = make_policy("auto", costs, MAX_GAMMA, fallback=True)
        run = simulate(policy, costs, machine, 0.6, 4096, 3)
        return float(np.mean(run.gammas))

    assert gammas(0.01) == pytest.approx(gammas(0), abs=0.25)

    costs, machine, means = Costs(MAX_GAMMA), Machine(0.1, 0.05, outliers=0.01), []
    for _ in range(300):
        for gamma in (0, 4):
            draft, rest = machine.timings(gamma)
            costs.observe(1, gamma, draft, rest)
            means.append((gamma, draft + rest))
    assert costs.rounds(1)[4] == pytest.approx(machine.round(4), rel=0.05)
    assert abs(np.mean([time for gamma, time in means if gamma == 0]) / STEP - 1) > 0.08, "control"


def test_a_first_timing_that_is_an_outlier() -> None:
    """What compiles or loads when it is first run."""
    costs = Costs(MAX_GAMMA)
    for factor in (50, 1, 1):
        costs.observe(1, 0, 0, STEP * factor)
        costs.observe(1, 2, 2 * 0.1 * STEP * factor, STEP * factor)
    assert costs.rounds(1)[2] == pytest.approx(1.2)


def test_widths_that_were_not_seen() -> None:
    costs = Costs(MAX_GAMMA)
    for _ in range(3):
        costs.observe(1, 2, 0.4, 2.0)
    # Every verification costs what the one seen does: 2 seconds; a draft step 0.2.
    assert costs.rounds(1) == pytest.approx([1 + 0.1 * g for g in range(9)])
    for _ in range(3):
        costs.observe(1, 6, 1.2, 2.8)
    # A line through 2 at gamma 2 and 2.8 at gamma 6: 1.6 at 0, 3.2 at 8.
    assert costs.rounds(1) == pytest.approx([(1.6 + 0.4 * g) / 1.6 for g in range(9)])
    for _ in range(3):
        costs.observe(1, 0, 0.0, 1.9)
    assert costs.rounds(1)[:3] == pytest.approx([1, (1.95 + 0.2) / 1.9, (2 + 0.4) / 1.9])
    # No verification costs more than a wider one.
    for _ in range(9):
        costs.observe(1, 2, 0.4, 2.0)
        costs.observe(1, 0, 0.0, 5.0)
    assert costs.rounds(1)[0] == 1
    assert costs.rounds(1)[2] == pytest.approx((2 + 0.4) / 2)


def test_a_line_is_never_steeper_than_in_proportion() -> None:
    costs = Costs(MAX_GAMMA)
    for _ in range(3):
        costs.observe(1, 5, 0.5, 1.0)
        costs.observe(1, 6, 0.6, 2.0)
    rest = [cost - g * 0.1 * 6 for g, cost in enumerate(costs.rounds(1))]  # plain: 1 / 6
    assert rest == pytest.approx([1, 2, 3, 4, 5, 6, 12, 12 * 8 / 7, 12 * 9 / 7])


def test_batch_sizes_keep_apart() -> None:
    costs = Costs(4)
    for _ in range(3):
        costs.observe(1, 0, 0, 1.0)
        costs.observe(1, 4, 0.4, 1.0)
        costs.observe(8, 0, 0, 3.0)
        costs.observe(8, 4, 4 * 1.5, 15.0)
    assert costs.rounds(1)[4] == pytest.approx(1.4)
    assert costs.rounds(8)[4] == pytest.approx(7)
    assert costs.rounds(2) == costs.rounds(1) and costs.rounds(32) == costs.rounds(8)
    # What costs twice as much in company is left there.
    policy = make_policy("auto", costs, 4, fallback=True)
    for _ in range(4):
        policy.observe(4, 4, 3, False)
    assert policy.next(1) > 2
    assert policy.next(8) == 0
    # Before a batch size has a draft step, it has the ratio of another.
    for _ in range(3):
        costs.observe(16, 0, 0, 4.0)
    assert costs.rounds(16)[1] == pytest.approx(1 + 0.5)


# Rounds that are not what was asked for


@pytest.mark.parametrize("max_gamma", [1, 2])
def test_few_tokens_at_most(max_gamma: int) -> None:
    for gamma in ("auto", "transformers", max_gamma):
        costs = Costs(max_gamma)
        policy = make_policy(gamma, costs, max_gamma, fallback=True)
        run = simulate(policy, costs, Machine(0.1, 0.02), 0.8, 512)
        assert max(run.gammas) == max_gamma
        share = 0.85 if gamma == "transformers" else 0.92
        assert run.speed > share * speedup(0.8, max_gamma, 0.1, 1 + 0.02 * max_gamma)


def test_smaller_rounds_than_asked_for() -> None:
    """A lookup finds fewer tokens or none; a context or a text ends."""
    costs, machine, rng = Costs(MAX_GAMMA), Machine(0.05, 0.02), np.random.default_rng(0)
    for gamma in ("auto", 8, "transformers"):
        policy = make_policy(gamma, costs, MAX_GAMMA, fallback=True)
        asked = []
        for _ in range(200):
            asked.append(policy.next(1))
            got = min(asked[-1], int(rng.integers(0, 4)))
            policy.observe(got, got, got, True)
            costs.observe(1, got, *machine.timings(got))
        assert all(0 <= g <= MAX_GAMMA for g in asked)
        assert np.mean(asked[50:]) > 5


@pytest.mark.parametrize("alpha", [0.9, 0.0])
def test_choices_that_come_late(alpha: float) -> None:
    """A round that was launched ahead keeps the gamma of its launch."""
    for gamma in ("auto", 4):
        costs = Costs(MAX_GAMMA)
        policy = make_policy(gamma, costs, MAX_GAMMA, fallback=True)
        run = simulate(policy, costs, Machine(0.05, 0.02), alpha, 1024, late=1)
        assert run.speed > (0.95 if alpha == 0 else 2.9)


def test_a_cut_block_says_nothing_about_the_rest() -> None:
    """Accepted to the end of the text, or rejected by a rule that judges whole blocks: positions
    that were not reached do not count."""
    costs = Costs(MAX_GAMMA)
    policy = make_policy("auto", costs, MAX_GAMMA, fallback=True)
    for lacking, gamma in ((0, 0), (0, 0), (0, 0), (1, 1), (1, 1), (1, 1), (None, 1)):
        assert costs.lacking == lacking and costs.timed == (lacking is None)
        costs.observe(1, gamma, 0.05 * gamma * STEP, STEP)
    for _ in range(50):
        costs.observe(1, 8, 0.4 * STEP, STEP)
        policy.observe(8, 2, 2, False)
        policy.next(1)
    assert policy.next(1) == 8
    for _ in range(50):
        policy.observe(8, 8, 1, False)
        policy.next(1)
    assert policy.next(1) <= 3


# The other policies


def test_the_schedule_of_transformers() -> None:
    policy = make_policy("transformers", Costs(16), 16, fallback=False)
    seen = []
    for all_accepted in (True, True, False, False, True, *[False] * 15):
        seen.append(policy.next(1))
        policy.observe(seen[-1], 1, seen[-1] if all_accepted else 0, all_accepted)
    assert seen == [5, 7, 9, 8, 7, 9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1, 1, 1, 1]
    policy.observe(0, 0, 0, True)
    assert policy.next(1) == 1, "a round without drafts says nothing"
    for _ in range(20):
        policy.observe(policy.next(1), 1, 1, True)
    assert policy.next(1) == 16


def test_a_constant() -> None:
    for gamma in (0, 3):
        policy = make_policy(gamma, Costs(4), 4, fallback=False)
        for _ in range(40):
            assert policy.next(1) == gamma
            policy.observe(gamma, min(gamma, 1), 0, gamma == 0)
    assert make_policy(0, Costs(4), 4, fallback=True).next(1) == 0


def test_the_same_again() -> None:
    """No chance and no clock in it."""

    def gammas() -> list[int]:
        costs = Costs(MAX_GAMMA)
        policy = make_policy("auto", costs, MAX_GAMMA, fallback=True)
        return simulate(policy, costs, Machine(0.1, 0.05), 0.7, 512).gammas

    assert gammas() == gammas()


@pytest.mark.parametrize("gamma", ["best", -1, 5])
def test_what_is_refused(gamma: int | str) -> None:
    with pytest.raises(ValueError, match=str(gamma)):
        make_policy(gamma, Costs(4), 4, fallback=True)


def test_a_pause_lasts_whoever_comes_and_goes() -> None:
    """Other requests change the batch, which is no reason to try a hopeless draft again."""
    tried = {}
    for changing in (False, True):
        costs = Costs(MAX_GAMMA)
        for batch in (1, 2):
            for gamma in (0, 0, 0, 1, 1, 1):
                costs.observe(batch, gamma, 0.3 * gamma, 1.0)
        policy = make_policy("auto", costs, MAX_GAMMA, fallback=False)
        gammas = []
        for turn in range(400):
            gammas.append(policy.next(1 + (changing and turn % 3 == 0)))
            policy.observe(gammas[-1], min(gammas[-1], 1), 0, False)
        tried[changing] = sum(gamma > 0 for gamma in gammas)
    assert tried[True] <= tried[False] + 1


def test_short_texts_find_out_that_the_draft_is_better_than_it_was() -> None:
    """Texts of 8 rounds, too short for a trial in a pause, after some with a hopeless draft."""
    costs = Costs(MAX_GAMMA)
    for gamma in (0, 0, 0, 1, 1, 1):
        costs.observe(1, gamma, 0.2 * gamma, 1.0)
    costs.openings().add(200, 10)
    drafted = []
    for _ in range(400):
        policy = make_policy("auto", costs, MAX_GAMMA, fallback=False)
        drafted.append(0)
        for _ in range(8):
            gamma = policy.next(1)
            drafted[-1] += gamma
            policy.observe(gamma, gamma, gamma, True)
    assert not any(drafted[:20]), "the control: there is something to find out"
    assert all(drafted[-20:])


def test_settings_are_remembered_apart() -> None:
    """Requests whose sampling makes the draft hopeless, and others, take turns."""
    spoiled = {}
    for apart in (True, False):
        costs, machine = Costs(MAX_GAMMA), Machine(0.15, 0.05)
        runs = []
        for seed in range(12):
            settings = seed % 2 if apart else None
            policy = make_policy("auto", costs, MAX_GAMMA, fallback=False, settings=settings)
            runs.append(simulate(policy, costs, machine, (0.9, 0.1)[seed % 2], 64, seed))
        good, bad = runs[6::2], runs[7::2]
        spoiled[apart] = sum(run.time / run.plain for run in bad) / len(bad)
        opened = np.mean([run.gammas[0] for run in good])
        assert (opened >= 5) == apart, opened
    assert spoiled[True] < 1.03 < spoiled[False]


def test_new_settings_begin_with_what_all_others_began_with() -> None:
    costs = Costs(MAX_GAMMA)
    first = costs.openings("first").prior
    costs.openings("first").add(200, 20)
    assert costs.openings("second").prior == pytest.approx(costs.openings("first").prior, abs=0.05)
    assert costs.openings("second").prior < first / 4
    for other in range(MOST_SETTINGS):
        costs.openings(other).add(50, 50)
    assert costs.openings("first").prior > 0.9, "forgotten: there were too many since"


def test_a_gamma_off_the_line_is_found() -> None:
    """4, the widest verification before one that is twice as dear; neither 3 nor 7 say so."""
    rest = [1, 1.6, 1.6, 1.6, 1.6, 3.2, 3.2, 3.2, 3.2]

    class Blocks(Machine):
        def round(self, gamma: int) -> float:
            return rest[gamma] + gamma * self.cost

        def timings(self, gamma: int, slow: float = 1.0) -> tuple[float, float]:
            return gamma * self.cost * STEP * slow, rest[gamma] * STEP * slow

    costs, machine, gammas = Costs(MAX_GAMMA), Blocks(0.1, 0), []
    for seed in range(8):
        policy = make_policy("auto", costs, MAX_GAMMA, fallback=False)
        gammas = simulate(policy, costs, machine, 0.9, 256, seed).gammas
    assert 4 not in costs.unseen(1)
    assert np.mean([gamma == 4 for gamma in gammas]) > 0.7


def test_a_text_that_never_runs_tells_nothing() -> None:
    costs = Costs(MAX_GAMMA)
    costs.openings().add(200, 10)
    before = costs.openings().prior
    waiting = [make_policy("auto", costs, MAX_GAMMA, fallback=False) for _ in range(200)]
    assert costs.openings().prior == before
    costs.openings().add(200, 200)  # and a text that waited begins with what is known by then
    waiting[0].next(1)
    assert waiting[0].kept / waiting[0].seen > 0.5  # type: ignore[attr-defined]
