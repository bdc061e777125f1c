"""gamma for texts that are decoded together, with injected costs and no clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from simulated import (
    MAX_GAMMA,
    STEP,
    Machine,
    choose,
    random_acceptance,
    simulate,
    simulate_together,
    timed,
)

from runtime.gamma.costs import Costs, EarlierTexts
from runtime.gamma.measured import MeasuredPolicy, SharedGamma
from runtime.gamma.policy import choose_together, make_policy


def together(gamma: int | str, alphas: Sequence[float], machine: Machine, rounds: int = 6) -> float:
    """Speed relative to plain decoding of texts decoded together, with these acceptance rates."""
    shared, runs = SharedGamma(Costs(MAX_GAMMA)), []
    for turn in range(rounds):
        texts = [random_acceptance(x, 128, 100 * turn + i) for i, x in enumerate(alphas)]
        some = [make_policy(gamma, shared, fallback=False, settings=x) for x in alphas]
        runs += simulate_together(some, shared.costs, machine, texts, 128)
    return sum(run.plain for run in runs) / sum(run.time for run in runs)


@pytest.mark.parametrize("alphas", [[0.8] * 8, [0.95, 0.9, 0.4, 0.2], [0.95, 0.2], [0.3] * 4])
@pytest.mark.parametrize(("cost", "growth"), [(0.1, 0.05), (0.2, 0.15), (0.25, 0.4)])
def test_texts_together_have_the_gamma_that_is_best_for_all(
    cost: float, growth: float, alphas: list[float]
) -> None:
    """A round takes as long as its largest gamma. Fault: each text chose its own, so that one text
    with a good draft slowed down all others."""
    machine = Machine(cost, growth)
    best = max(together(gamma, alphas, machine) for gamma in range(MAX_GAMMA + 1))
    assert together("auto", alphas, machine) > 0.95 * best


def test_a_round_costs_every_text_as_much_as_its_longest_draft() -> None:
    """Each of two requests with a fallback drafts when it is alone. Together, the one that drafts a
    single token would wait for the other's five."""
    shared = SharedGamma(timed(1, 2, cost=0.4))
    texts = [make_policy(gamma, shared, fallback=True) for gamma in (1, 5)]
    assert [choose(text) for text in texts] == [1, 5]
    choose_together(texts, 2)
    assert [text.next() for text in texts] == [0, 0]


def test_the_loss_of_a_round_is_shared() -> None:
    """A lookup found eight tokens for one text, all wrong, and none for the other, whose draft has
    therefore read nothing."""
    shared = SharedGamma(timed(2, cost=0.1))
    shared.costs.observe_catch_up(2, 50, STEP)
    first, second = texts = [MeasuredPolicy(shared) for _ in range(2)]
    choose_together(texts, 2)
    second.unread_tokens = 50
    first.observe(8, 1, 0)
    second.observe(0, 0, 0)
    choose_together([second], 2)
    assert first.loss == second.loss == pytest.approx(8 * 0.1)
    assert second.unread_tokens == 51


def drafting(unread: Sequence[int]) -> list[bool]:
    """Which of three texts draft, if the draft must read so many tokens of each: 0.2 plain steps +
    0.016 per token, of a budget of 3, of which a round takes 0.2."""
    shared = SharedGamma(timed(3, cost=0.2))
    shared.costs.observe_catch_up(3, 50, STEP)
    shared.costs.earlier_texts().add(250, 245)
    texts = [MeasuredPolicy(shared) for _ in unread]
    for text, tokens in zip(texts, unread, strict=True):
        text.unread_tokens = tokens
    choose_together(texts, 3)
    assert len({text.next() for text in texts} - {0}) == 1
    return [text.next() > 0 for text in texts]


def test_texts_that_would_take_long_to_read_are_left_behind() -> None:
    """Fault: what the draft had to read of all texts together was compared with what one of them
    may lose, so that three long texts or more were never drafted again."""
    assert drafting([10, 500, 0]) == [True, False, True]
    assert drafting([140, 50, 60]) == [False, True, True], "those that take least"
    assert drafting([78, 78, 400]) == [True, False, False], "with enough left for a round"


def test_a_text_left_behind_while_a_batch_size_is_timed_is_judged_anew() -> None:
    """By the batch size's own costs: the text can be read, but no round with a draft can follow.
    Without the draft's step in the comparison, the text would be read for nothing."""
    costs = timed(1, cost=0.3)
    costs.observe_catch_up(1, 50, 5 * STEP)  # too dear, by the costs of the nearest batch size
    for _ in range(2):
        costs.observe(2, 0, 0.0, STEP)
    texts = [MeasuredPolicy(SharedGamma(costs))]
    texts[0].unread_tokens, texts[0].loss = 50, 1.5
    choose_together(texts, 2)
    assert (texts[0].next(), texts[0].is_drafting) == (0, False)


def test_a_draft_that_reads_no_text_has_nothing_to_catch_up_with() -> None:
    for reads_model in (True, False):
        shared = SharedGamma(Costs(MAX_GAMMA, reads_model))
        text = MeasuredPolicy(shared)
        text.observe(0, 0, 0)
        assert text.unread_tokens == int(reads_model)


def test_reading_speaks_against_drafts() -> None:
    """For as many rounds as a choice is kept."""
    for unread in (0, 30):
        shared = SharedGamma(timed(cost=0.3))
        shared.costs.observe_catch_up(1, 50, STEP)
        shared.costs.earlier_texts().add(250, 85)
        policy = MeasuredPolicy(shared)
        policy.unread_tokens = unread
        assert choose(policy) == (unread == 0)


def test_a_batch_size_is_timed_in_a_pause_too() -> None:
    shared = SharedGamma(timed(cost=0.5))
    shared.costs.earlier_texts().add(250, 5)
    policy = MeasuredPolicy(shared)
    assert choose(policy) == 0
    for gamma in (0, 0, 1, 1, 1, 1, 1):
        assert choose(policy, 2) == gamma
        policy.observe(gamma, gamma, 0)
        shared.costs.observe(2, gamma, STEP / 2, STEP)


def test_beside_a_text_that_drafts_anyway() -> None:
    """A smaller gamma than that of a request with a fixed one saves nothing."""
    shared = SharedGamma(timed(2, cost=0.3))
    shared.costs.earlier_texts().add(250, 125)
    policy = make_policy("auto", shared, fallback=True)
    choose_together([policy], 2)
    assert policy.next() < 2
    choose_together([policy], 2, fixed=5)
    assert policy.next() == 5
    policy.observe(2, 2, 1)
    choose_together([policy], 2)
    assert policy.loss == pytest.approx(-shared.costs.rounds(2).round(5)), "one token more"
    constant = make_policy(6, shared, fallback=False)
    choose_together([policy, constant], 2)
    assert policy.next() == 6


def test_a_round_counts_with_the_costs_of_its_own_batch_size() -> None:
    """Fault: with those of the next round, when texts had come or gone."""
    costs = timed(1, cost=0.1)
    for gamma in (0, 0, 4, 4) * 2:
        costs.observe(8, gamma, 0.5 * gamma, 1.0)
    shared = SharedGamma(costs)
    policy = MeasuredPolicy(shared)
    choose_together([policy], 8)
    policy.observe(4, 1, 0)
    choose_together([policy], 1)
    assert policy.loss == pytest.approx(2)


def test_bad_luck_at_the_start_is_paid_from_what_earlier_texts_gained() -> None:
    """Fault: a text whose first rounds failed went on without drafts for tens of tokens."""
    drafted = {}
    for gained in (0.0, 50.0):
        shared = SharedGamma(timed(cost=0.15))
        shared.costs.earlier_texts().gained = gained
        unlucky = [False] * 14 + [True] * 50
        run = simulate(make_policy("auto", shared, fallback=True), None, Machine(0.15), unlucky, 64)
        drafted[gained] = sum(run.gammas)
    assert drafted[50.0] > 1.3 * drafted[0.0]


def test_a_text_without_room_for_drafts() -> None:
    """Beyond the draft's context, or at its end. Fault: it counted as one that the draft predicts
    as well as before, so that the others drafted too much."""
    shared = SharedGamma(timed(2, cost=0.1))
    for settings, accepted in (("good", 245), ("fair", 150)):
        shared.costs.earlier_texts(settings).add(250, accepted)
    texts = [MeasuredPolicy(shared, settings=settings) for settings in ("good", "fair")]
    choose_together(texts, 2)
    together = texts[1].next()
    texts[0].room = 0
    choose_together(texts[::-1], 2, fixed=1)  # another choice
    assert texts[0].next() == 0 < texts[1].next() < together
    assert not texts[0].is_drafting, "so that nothing is read of it"
    texts[1].room = 1
    assert texts[1].next() == 1


def test_an_interrupt_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: every later round of the same texts raised an AttributeError."""
    shared = SharedGamma(timed())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    policy = MeasuredPolicy(shared)
    with monkeypatch.context() as once:
        once.setattr(EarlierTexts, "record_start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            choose(policy)
    assert choose(policy) > 0
