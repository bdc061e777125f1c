"""Times in a text of Whisper: which tokens may come when, and what they say of a window.

The rules are those of Transformers' `WhisperTimeStampLogitsProcessor`, and of the loop around it in
`WhisperForConditionalGeneration.generate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

STRIDE = 2  # frames of features to a position of the encoder, and to a step of the timestamps


@dataclass(frozen=True)
class TimestampRule:
    """A logits processor: see `sampling.processors`.

    Timestamps come in pairs, the end of a segment and the beginning of the next, but for the first
    one and one before the end of the text. They do not fall, and a segment takes some time. The
    text begins with one, of at most `latest_start` steps. One comes where all together are more
    probable than any other token.

    no_timestamps: the token that asks for none; time 0 is the next one, and the times go on to the
    end of the vocabulary. end: of text. latest_start: None for any.
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
            opens = timed and not paired  # the next segment, where this one ended or later
            scores[zero : times[-1] + (not opens)] = -np.inf
        if not len(output):
            scores[:zero] = -np.inf
            if self.latest_start is not None:
                scores[zero + self.latest_start + 1 :] = -np.inf
        if _log_sum(scores[zero:]) > scores[:zero].max():
            scores[:zero] = -np.inf


def _log_sum(scores: npt.NDArray[np.float32]) -> float:
    """Of the exponentials; -inf where there are none."""
    peak = scores.max(initial=-np.inf)
    if not np.isfinite(peak):
        return float(peak)
    return float(peak + np.log(np.exp(scores - peak).sum()))


@dataclass(frozen=True)
class Cut:
    """A part of a window. begin, end: seconds. tokens: with its timestamps."""

    begin: float
    end: float
    tokens: list[int]


def cut(
    tokens: Sequence[int], *, zero: int, seek: int, frames: int, seconds: float
) -> tuple[list[Cut], int]:
    """The segments of a window's tokens, and how many frames further the next window begins.

    tokens: without the end of the text. zero: the token of time 0. seek: frame at which the window
    begins; frames: that it has of the audio; seconds: of a frame. What follows the last pair of
    timestamps is given up: the next window begins there and hears it whole. Without a pair all is
    one segment.
    """
    step = STRIDE * seconds
    offset = seek * step / STRIDE
    timed = [token >= zero for token in tokens]
    pairs = [i for i, (a, b) in enumerate(pairwise(timed), start=1) if a and b]
    closed = timed[-2:] == [False, True]  # nothing is said after the last timestamp
    if not pairs:
        steps = frames // STRIDE  # one less in Transformers where float32 rounds that way
        last = next((token for token in reversed(tokens) if token >= zero), zero)
        if last != zero:
            steps = last - zero
        return [Cut(offset, offset + steps * step, list(tokens))], frames
    # The last timestamp of an open text stays, so that the text says that it is.
    ends = [*pairs, len(tokens)] if closed else [*pairs[:-1], pairs[-1] + 1]
    parts = [tokens[begin:end] for begin, end in pairwise([0, *ends])]
    cuts = []
    for i, part in enumerate(parts):
        last = part[-2] if i == len(parts) - 1 and not closed else part[-1]
        begin, end = offset + (part[0] - zero) * step, offset + (last - zero) * step
        cuts.append(Cut(begin, end, list(part)))
    # A pair at 0, which only a text that was asked for no times can have, would lead nowhere.
    return cuts, frames if closed else (last - zero) * STRIDE or frames
