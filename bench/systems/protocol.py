"""What a system is asked and what it answers, as it crosses between the processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.clock import Sample

# What a text is made of: token ids; or a sound's log-mel features, float32 [bands, frames].
Prompt = list[int] | npt.NDArray[np.float32]


class Unavailable(Exception):
    """A system, or what is asked of it, is not there; the text says why."""


@dataclass(frozen=True)
class Setup:
    """What a worker is started with.

    target, draft: Hugging Face folders. threads: of every pool that decodes. work: where converted
    checkpoints are kept. max_len: rows of a cache, prompt and gamma too. slots: texts that are
    decoded together, where a cache is made for so many.
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
    """Texts of exactly `new_tokens` tokens: their end is never recognised. prompts: one, or several
    that are decoded together, greedily, and have one length, so that nothing has to be padded.
    gamma: tokens drafted a round. seed: of the draws at a temperature above 0, which are from the
    whole vocabulary. begin: the tokens that the output of an encoder-decoder, which reads the
    prompt, begins with."""

    prompts: Sequence[Prompt]
    new_tokens: int
    mode: str = "plain"
    temperature: float = 0.0
    seed: int = 0
    gamma: int = 4
    begin: tuple[int, ...] = ()


@dataclass(frozen=True)
class Steps:
    """Calls of Outrider's engines alone: a step of the draft, if there is one, and the target with
    each of `widths` tokens in each of `slots`, at row `position`. rounds, patience: as
    `clock.sampled`."""

    position: int
    widths: list[int]
    slots: int = 1
    rounds: int = 5
    patience: float = 2.0


@dataclass
class Text:
    """A system's answer.

    times: seconds from the request to each token; tokens of one round share theirs. lost: seconds
    for which its threads have waited for a core by then (`core.clock`). peak: the most bytes that
    the worker has held since it started, so whoever compares peaks asks each worker for one mode,
    and gives it a draft only to draft with. notes: what the system itself has counted, if anything;
    "encode", seconds until all encoders had run.
    """

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    peak: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Sample:
        """To the first token: all of the prefill, and the first round where one drafts."""
        return Sample(self.times[0], self.lost[0] / self.times[0])

    def round_tokens(self) -> list[int]:
        """Of each round after the first."""
        return [len(list(tokens)) for _, tokens in groupby(self.times)][1:]


def decoding(texts: Sequence[Text]) -> Sample | None:
    """Seconds a token, of texts decoded together, after all of them have their first; None where
    there is none after that. A draft's prefill counts where it comes later."""
    begin, end = (max(text.times[i] for text in texts) for i in (0, -1))
    after = sum(time > begin for text in texts for time in text.times)
    if not after:
        return None
    lost = max(text.lost[-1] for text in texts) - max(text.lost[0] for text in texts)
    return Sample((end - begin) / after, lost / (end - begin))
