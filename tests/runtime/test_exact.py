"""The real round has the target's distribution, by the two integration methods of `exact`.

Each has controls: rounds with small errors, which must be detected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from exact import Key, V, at, by_bisection, by_keys
from rounds import WRONG_RULES, broken, cases, on_host

from runtime.sampling.philox import Purpose
from runtime.sampling.rules import Verdict
from runtime.sampling.warp import SamplingParams

pytestmark = pytest.mark.usefixtures("sampler")


# --- bisection --------------------------------------------------------------------------------

# All of them matter: without any one of them, the distribution differs.
ALL = {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.15, "repetition_penalty": 1.4}


@on_host
@pytest.mark.parametrize(
    "options",
    [{}, {"verify": "block"}, ALL, {**ALL, "verify": "block"}],
    ids=["plain", "block", "all", "all-block"],
)
def test_one_draft_token_over_eight(options: dict[str, Any]) -> None:
    assert by_bisection(at(**options)) < 1e-6


@on_host
@pytest.mark.parametrize(
    ("rule", "vocab_size"), cases([("token", 5), ("block", 5)], [("token", V), ("block", V)])
)
def test_two_draft_tokens(rule: str, vocab_size: int) -> None:
    options = {} if vocab_size == V else ALL
    assert by_bisection(at(**options, verify=rule), 2, vocab_size) < 1e-6


@pytest.mark.parametrize("wrong", WRONG_RULES)
@pytest.mark.parametrize("params", [at(), at(**ALL)], ids=["plain", "all"])
def test_bisection_notices(wrong: Callable[..., Verdict], params: SamplingParams) -> None:
    with broken("sampling.reference.verify", wrong):
        assert by_bisection(params) > 0.01


# --- keys -------------------------------------------------------------------------------------


@on_host
@pytest.mark.parametrize(("gamma", "count"), cases([(0, 4), (2, 4)], [(3, 5)]))
def test_rounds_after_one_another(gamma: int, count: int) -> None:
    """A random number that a later round uses must not have been read in an earlier one."""
    assert by_keys(gamma, count) < 1e-12


@pytest.mark.parametrize(
    "key_of",
    [
        lambda position, purpose, lane: (purpose, lane),  # the same at every position
        lambda position, purpose, lane: (position, purpose == Purpose.DRAFT),  # shared by two uses
        lambda position, purpose, lane: (position, purpose == Purpose.ACCEPT),
    ],
)
def test_keys_that_are_shared_are_noticed(key_of: Callable[[int, Purpose, int], Key]) -> None:
    assert max(by_keys(2, 4, seed, key_of=key_of) for seed in (1, 2)) > 0.01
