"""Whisper's timestamps: which tokens may follow which, and how they cut a window into segments.

The rules are those of Transformers' `WhisperTimeStampLogitsProcessor`, and of the loop around it in
`WhisperForConditionalGeneration.generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

FRAMES_PER_STEP = 2  # frames of features per position of the encoder and per step of the timestamps


@dataclass(frozen=True)
class TimestampRule:
    """A logits processor: see `sampling.processors`.

    Timestamps come in pairs, the end of a segment and the beginning of the next, except for the
    first one and one before the end of the text. They never decrease, and no segment has length 0.
    The text begins with a timestamp of at most `latest_start` steps. A timestamp is forced where
    all of them together are more probable than any other token.

    no_timestamps: the token that requests none; the token of time 0 comes next, and timestamps go
    on to the end of the vocabulary. end: end-of-text token. latest_start: None for no limit.
    """

    no_timestamps: int
    end: int
    latest_start: int | None = None

    def __call__(
        self, scores: npt.NDArray[np.float32], text: npt.NDArray[np.int64], output_start: int, /
    ) -> None:
        zero, output = self.no_timestamps + 1, text[output_start:]
        scores[self.no_timestamps] = -np.inf
        times = output[output >= zero]
        timed = len(output) > 0 and output[-1] >= zero
        paired = timed and (len(output) == 1 or output[-2] >= zero)
        if paired:
            scores[zero:] = -np.inf
        elif timed:
            scores[: self.end] = -np.inf
        if len(times):
            opens = timed and not paired  # the next segment may begin where this one ended
            scores[zero : times[-1] + (not opens)] = -np.inf
        if not len(output):
            scores[:zero] = -np.inf
            if self.latest_start is not None:
                scores[zero + self.latest_start + 1 :] = -np.inf
        if _log_sum(scores[zero:]) > scores[:zero].max():
            scores[:zero] = -np.inf


def _log_sum(scores: npt.NDArray[np.float32]) -> float:
    """The logarithm of the sum of exponentials; -inf for an empty array."""
    peak = scores.max(initial=-np.inf)
    if not np.isfinite(peak):
        return float(peak)
    return float(peak + np.log(np.exp(scores - peak).sum()))


@dataclass(frozen=True)
class TimedTokens:
    """A segment of a window. begin, end: seconds. tokens: including its timestamps."""

    begin: float
    end: float
    tokens: list[int]


def split_window(
    tokens: Sequence[int], *, zero: int, seek: int, frames: int, seconds: float
) -> tuple[list[TimedTokens], int]:
    """Cut a window's tokens into segments. Returns them, and how many frames further the next
    window begins.

    tokens: without the end of the text. zero: the token of time 0. seek: frame at which the window
    begins. frames: number of its frames that are audio. seconds: duration of a frame. Tokens after
    the last pair of timestamps are dropped: the next window begins there and hears that part as a
    whole. Without a pair everything is one segment.
    """
    step = FRAMES_PER_STEP * seconds
    offset = seek * step / FRAMES_PER_STEP
    timed = [token >= zero for token in tokens]
    pairs = [i for i, (a, b) in enumerate(pairwise(timed), start=1) if a and b]
    closed = timed[-2:] == [False, True]  # no speech after the last timestamp
    if not pairs:
        steps = frames // FRAMES_PER_STEP  # Transformers may get one less by float32 rounding
        last = next((token for token in reversed(tokens) if token >= zero), zero)
        if last != zero:
            steps = last - zero
        return [TimedTokens(offset, offset + steps * step, list(tokens))], frames
    # Keep the last timestamp of a text that is not closed, which marks it as such.
    ends = [*pairs, len(tokens)] if closed else [*pairs[:-1], pairs[-1] + 1]
    parts = [tokens[begin:end] for begin, end in pairwise([0, *ends])]
    cuts = []
    for i, part in enumerate(parts):
        last = part[-2] if i == len(parts) - 1 and not closed else part[-1]
        begin, end = offset + (part[0] - zero) * step, offset + (last - zero) * step
        cuts.append(TimedTokens(begin, end, list(part)))
    advance = (last - zero) * FRAMES_PER_STEP
    # 0 after a pair at time 0, which only a text without requested timestamps can have.
    return cuts, frames if closed or advance == 0 else advance
