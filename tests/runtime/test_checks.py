"""Refusals whose remedy depends on more than the request."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.checks import Limits, check_request
from runtime.drafts.draft import Draft
from runtime.drafts.registry import KINDS
from runtime.files.errors import OutriderError
from runtime.sampling.warp import SamplingParams
from runtime.sequence import Request


@pytest.mark.parametrize(
    ("context", "remedy"),
    [
        (None, "Shorten it, or build the bundle with MAX_LEN=90."),
        (90, "Shorten it, or build the bundle with MAX_LEN=90."),
        (89, "Shorten it, and build with MAX_LEN=89, all that the model can."),
        (64, "Shorten it: that is all that the model was made for."),
    ],
)
def test_a_prompt_that_is_too_long_gets_a_remedy_that_works(
    context: int | None, remedy: str
) -> None:
    """It once asked for a MAX_LEN beyond the model's own context, which the build then refuses."""
    limits = Limits(100, 100, 64, 8, frozenset(), False, True, True, context)
    with pytest.raises(OutriderError) as caught:
        check_request(Request([2] * 70, gamma=0, max_new_tokens=20), limits)
    assert caught.value.kind == "prompt" and caught.value.remedy == remedy


def test_a_draft_that_needs_a_corpus_gets_that_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU it was once refused as "for the CPU"."""

    class Quoting(Draft):
        needs = ("corpus",)

    monkeypatch.setitem(KINDS, "quoting", Quoting)
    limits = Limits(100, 100, 64, 8, frozenset(), False, True, True)
    with pytest.raises(OutriderError, match="draft=quoting needs a corpus") as caught:
        check_request(Request([2], gamma=2, draft="quoting"), limits)
    assert "--corpus" in caught.value.remedy


@pytest.mark.parametrize(
    "params",
    [{"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"logit_bias": {5: 1.0}}],
)
def test_counts_and_biases_are_refused_where_the_sampling_lacks_them(params: Any) -> None:
    """A GPU once took a slot first."""
    request = Request([2], SamplingParams(**params), gamma=0)
    check_request(request, Limits(100, 100, 64, 8, frozenset(), False, True, True))
    with pytest.raises(OutriderError, match="not in the sampling kernel of a GPU") as caught:
        check_request(request, Limits(100, 100, 64, 8, frozenset(), False, True, False))
    assert caught.value.kind == "option"
