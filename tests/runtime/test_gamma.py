"""Policies in rounds: whatever chooses gamma, the text is the target's. (What they choose, and what
that costs, is in test_policy.py.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import make_text_engine, near, random_model
from rounds import both, ids, make_decoder, plain, run, together

from runtime.decoder import Decoder
from runtime.policy import Measured, make_policy
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request
from runtime.text.options import Options

pytestmark = pytest.mark.usefixtures("sampler")

MODEL = random_model(1)
NAMES = ["auto", "transformers", 4]


def chosen(decoder: Decoder, name: int | str, fallback: bool = True, **request: object) -> Request:
    policy = make_policy(name, decoder.costs["model"], decoder.max_gamma, fallback=fallback)
    gamma = decoder.max_gamma if isinstance(name, str) else name
    return Request(**{"prompt": [2, 3], "gamma": gamma, "policy": policy, **request})  # type: ignore[arg-type]


@both
@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_temperature_0_is_plain_decoding(sampler: None, noise: float) -> None:
    """Several at once, each with a policy of its own, by drafts that pay and that do not."""
    decoder = make_decoder(MODEL, near(MODEL, 2, noise), slots=3)
    for first in (2, 5):  # the costs that the first ones measured are those of the others
        requests = [
            chosen(decoder, name, prompt=[first + i, 5], max_new_tokens=20 + 9 * i)
            for i, name in enumerate(NAMES)
        ]
        alone = [plain(decoder, request) for request in requests]
        assert [ids(sequence) for sequence in together(decoder, requests)] == alone


def test_what_policies_and_costs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round once: what was drafted and accepted. Choosing is no part of what it costs, or the
    gamma that is chosen anew each time would look dearer than the one that is kept."""
    now, rounds, seconds = 0.0, [], []

    class Slow:
        def next(self, batch: int) -> int:
            nonlocal now
            assert batch == 1
            now += 1.0
            return 3

        def observe(self, *told: int) -> None:
            rounds.append(told)

    decoder = make_decoder(MODEL, near(MODEL, 2, 1.0))
    monkeypatch.setattr("runtime.decoder.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(
        decoder.costs["model"], "observe", lambda batch, gamma, *told: seconds.append(sum(told))
    )
    stats = run(decoder, Request([2, 3], gamma=8, policy=Slow(), max_new_tokens=40)).stats
    assert len(rounds) == len(seconds) == stats.rounds
    assert sum(gamma for gamma, *_ in rounds) == stats.drafted <= 3 * stats.rounds
    assert sum(accepted for *_, accepted in rounds) == stats.accepted
    assert stats.time_rounds == pytest.approx(len(seconds), rel=0.01), "the text waits for it"
    assert max(seconds) == pytest.approx(0)


def test_a_draft_that_is_hopeless_is_left_alone() -> None:
    decoder = make_decoder(MODEL, random_model(99), max_len=600, order=2)
    request = chosen(decoder, 4, max_new_tokens=500, params=SamplingParams(temperature=0.9, seed=1))
    # A stand-in's draft step costs as much as its target's: drafting never pays.
    sequence = run(decoder, request)
    assert sequence.stats.undrafted > sequence.stats.rounds / 2
    always = run(decoder, replace(request, policy=None))
    assert always.stats.undrafted <= 1, "the control"


def test_what_counts_as_the_same_settings(tmp_path: Path) -> None:
    """What p and q depend on: every option of the sampling, and no seed."""
    engine = make_text_engine(tmp_path, MODEL, near(MODEL, 2, 0.5))
    told = []
    for options in (
        {"seed": 1}, {"seed": 2}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "draft_temperature": 2.0},
    ):  # fmt: skip
        request = engine.request([2, 3], Options(gamma="auto", **options))  # type: ignore[arg-type]
        assert isinstance(request.policy, Measured)
        told.append(request.policy.settings)
    assert told[0] == told[1] and len(set(told)) == 4
