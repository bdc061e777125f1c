"""Requests to a system and its answers, as they are sent between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.clock import Sample

# Token ids, or the log-mel features of a sound, float32 [bands, frames].
Prompt = list[int] | npt.NDArray[np.float32]


class Unavailable(Exception):
    """A system, or a requested mode, is not available; the message is the reason."""


@dataclass(frozen=True)
class Setup:
    """The options that a worker is started with.

    target, draft: Hugging Face folders. threads: size of every thread pool that decodes. work:
    folder for converted checkpoints. max_len: rows of a cache, including prompt and gamma. slots:
    number of texts decoded together, for systems that allocate a cache for them.
    """

    target: Path
    draft: Path | None = None
    threads: int = 1
    work: Path = Path("build/side")
    precision: str = "float32"
    max_len: int = 2048
    slots: int = 1


@dataclass(frozen=True)
class Request:
    """A request for texts of exactly `new_tokens` tokens; end-of-text tokens are ignored. prompts:
    one, or several of the same length, so that nothing has to be padded, which are decoded together
    and greedily. gamma: tokens drafted per round. seed: for sampling at a temperature above 0,
    which is from the whole vocabulary. begin: tokens that the output of an encoder-decoder, which
    reads the prompt, begins with."""

    prompts: Sequence[Prompt]
    new_tokens: int
    mode: str = "plain"
    temperature: float = 0.0
    seed: int = 0
    gamma: int = 4
    begin: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepsRequest:
    """A request to time calls of Outrider's engines alone: a step of the draft, if there is one,
    and of the target with each number of tokens in `widths`, in each of `slots`, at row `position`.
    rounds, patience: as in `clock.sample_in_turn`."""

    position: int
    widths: list[int]
    slots: int = 1
    rounds: int = 5
    patience: float = 2.0


@dataclass
class Text:
    """A system's answer.

    times: seconds from the request to each token; tokens of the same round have the same time.
    lost: seconds for which the system's threads have waited for a core until then (`core.clock`).
    peak: the worker's peak memory in bytes since it started. To compare peaks, use each worker for
    one mode only, and give it a draft only if the mode uses it. notes: the system's own counters,
    if any; "encode": seconds until all encoders had run.
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    peak: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def first_token(self) -> Sample:
        """Time to the first token: the whole prefill and, with drafts in some systems, the first
        round."""
        return Sample(self.times[0], self.lost[0] / self.times[0])

    def round_tokens(self) -> list[int]:
        """The number of tokens of each round after the first."""
        return [len(list(tokens)) for _, tokens in groupby(self.times)][1:]


def time_per_token(texts: Sequence[Text]) -> Sample | None:
    """Seconds per token of texts decoded together, after all of them have their first token; None
    if there are no tokens after that. A draft's prefill is included if it happens later."""
    begin = max(text.times[0] for text in texts)
    end = max(text.times[-1] for text in texts)
    after = sum(time > begin for text in texts for time in text.times)
    if not after:
        return None
    lost = max(text.lost[-1] for text in texts) - max(text.lost[0] for text in texts)
    return Sample((end - begin) / after, lost / (end - begin))
