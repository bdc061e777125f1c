"""Gamma policies in rounds: whichever policy chooses gamma, the output is the target's.
(test_policy.py tests which gamma they choose, and what that costs.)"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes import FakeEngine, make_text_engine, near, random_model
from rounds import all_samplers, ids, make_decoder, plain, run, run_all

from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.gamma.measured import MeasuredPolicy
from runtime.gamma.policy import make_policy
from runtime.sequence import Request
from runtime.text.options import Options

pytestmark = pytest.mark.usefixtures("sampler")

MODEL = random_model(1)
NAMES = ["auto", "transformers", 4]


def make_request(decoder: Decoder, name: int | str, **request: object) -> Request:
    policy = make_policy(name, decoder.shared_gamma("model"), fallback=True)
    gamma = decoder.max_gamma if isinstance(name, str) else name
    return Request(**{"prompt": [2, 3], "gamma": gamma, "policy": policy, **request})


@all_samplers
@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_temperature_0_is_plain_decoding(sampler: None, noise: float) -> None:
    """Several requests at once, each with its own policy, with drafts that pay off and that do
    not."""
    decoder = make_decoder(MODEL, near(MODEL, 2, noise), slots=3)
    for first in (2, 5):  # the second requests use the costs that the first ones measured
        requests = [
            make_request(decoder, name, prompt=[first + i, 5], max_new_tokens=20 + 9 * i)
            for i, name in enumerate(NAMES)
        ]
        alone = [plain(decoder, request) for request in requests]
        assert [ids(sequence) for sequence in run_all(decoder, requests)] == alone


def test_plain_requests_beside_others_do_not_hide_what_rounds_cost() -> None:
    """A request that never drafts has a kind of draft too. Fault: beside it, "auto" was never told
    the cost of a round, and so never drafted."""
    decoder = make_decoder(MODEL, near(MODEL, 2, 0.5), slots=2)
    auto = make_policy("auto", decoder.shared_gamma("ngram"), fallback=False)
    requests = [
        Request([2, 3], gamma=8, policy=auto, draft="ngram", max_new_tokens=20),
        Request([2, 3], gamma=0, max_new_tokens=20),
    ]
    run_all(decoder, requests)
    assert decoder.shared_gamma("ngram").costs.rounds(2).plain > 0


def test_two_kinds_of_draft_in_the_same_rounds() -> None:
    """Fault: neither was told the cost of a round, and so neither was ever used."""
    decoder = make_decoder(MODEL, near(MODEL, 2, 0.5), slots=2)
    requests = [
        Request(
            [2, 3], gamma=8, draft=kind, max_new_tokens=60, ignore_eos=True,
            policy=make_policy("auto", decoder.shared_gamma(kind), fallback=False),
        )
        for kind in ("model", "ngram")
    ]  # fmt: skip
    model, _lookup = run_all(decoder, requests)
    assert model.stats.drafted
    for request in requests:
        assert decoder.shared_gamma(request.draft).costs.gamma_to_time(2) != 0


def test_what_policies_and_costs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They observe each round once: the tokens drafted and accepted, and the seconds spent on
    drafting and on everything else. These exclude the time to choose gamma, otherwise a gamma that
    is chosen in every round would look slower than a fixed one, and the draft's prefill."""
    now, rounds, costs = 0.0, [], []

    class Slow:
        def next(self) -> int:
            nonlocal now
            now += 1.0
            return 3

        def observe(self, *seen: int) -> None:
            rounds.append(seen)

    def slow_down(engine: FakeEngine, seconds: float) -> None:
        forward = engine.forward

        def slow(*given: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return forward(*given, **options)

        monkeypatch.setattr(engine, "forward", slow)

    for module in ("decoder", "stats"):
        clock = SimpleNamespace(perf_counter=lambda: now)
        monkeypatch.setattr(f"runtime.{module}.time", clock)
    decoder = make_decoder(MODEL, near(MODEL, 2, 1.0))
    slow_down(decoder.draft, 2.0)
    slow_down(decoder.target, 16.0)
    monkeypatch.setattr(
        decoder.shared_gamma("model").costs, "observe", lambda *seen: costs.append(seen)
    )
    stats = run(decoder, Request([2, 3], gamma=8, policy=Slow(), max_new_tokens=40)).stats
    assert len(rounds) == stats.rounds
    assert costs == [(1, gamma, 2.0 * gamma, 16.0) for gamma, *_ in rounds]
    assert sum(gamma for gamma, *_ in rounds) == stats.drafted <= 3 * stats.rounds
    assert sum(accepted for *_, accepted in rounds) == stats.accepted
    assert stats.time_rounds == 17 * stats.rounds + 2 * stats.drafted, "choosing included"


def test_what_counts_as_the_same_settings(tmp_path: Path) -> None:
    """Everything that p and q depend on: all sampling options except the seed."""
    engine = make_text_engine(tmp_path, MODEL, near(MODEL, 2, 0.5))
    settings = []
    for options in (
        {"seed": 1}, {"seed": 2}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "draft_temperature": 2.0},
    ):  # fmt: skip
        request = engine.request([2, 3], Options(gamma="auto", **options))
        assert isinstance(request.policy, MeasuredPolicy)
        settings.append(request.policy.settings)
    assert settings[0] == settings[1] and len(set(settings)) == 4


def test_a_number_of_numpy_is_a_gamma(tmp_path: Path) -> None:
    """Fault: with a fallback, it raised a ValueError."""
    engine = make_text_engine(tmp_path, MODEL, near(MODEL, 2, 0.5))
    request = engine.request([2, 3], Options(gamma=np.int64(2), fallback="auto"))
    assert type(request.gamma) is int and isinstance(request.policy, MeasuredPolicy)
    with pytest.raises(OutriderError, match="option: gamma=99 is over"):  # not the policy's error
        engine.request([2, 3], Options(gamma=99, fallback="auto"))
