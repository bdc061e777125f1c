"""Refusals whose remedy depends on more than the request."""

from __future__ import annotations

import pytest

from runtime.checks import Limits, check_request
from runtime.files.errors import OutriderError
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
    limits = Limits(100, 100, 64, 8, frozenset(), False, True, context)
    with pytest.raises(OutriderError) as caught:
        check_request(Request([2] * 70, gamma=0, max_new_tokens=20), limits)
    assert caught.value.kind == "prompt" and caught.value.remedy == remedy
