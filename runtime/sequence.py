"""What is asked of one sequence, what it emits, and the request in its slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .files.errors import OutriderError
from .policy import Policy
from .sampling.warp import SamplingParams
from .slots import Slot
from .stats import Stats

DraftKind = Literal["model", "chain", "ngram", "copy", "unigram", "bigram", "skip", "random"]
MODELS: frozenset[DraftKind] = frozenset({"model", "chain"})  # the draft model computes rows
LOOKUPS: frozenset[DraftKind] = frozenset({"ngram", "copy"})  # point masses
TABLES: frozenset[DraftKind] = frozenset({"unigram", "bigram", "skip"})  # of a file
Origin = str  # "first" (from the prefill), "accepted", "corrected", "bonus" or "plain"


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of one sequence.

    gamma: most draft tokens a round, 0 is plain decoding. policy: what chooses among 0 .. gamma for
    each round; None for gamma itself. It is this request's own. draft: who proposes them; see
    `host_draft`. draft_temperature: of their distribution, None for the target's.
    draft_threshold: no more are drafted in a round after one to which the draft itself gave less
    probability; 0 for never. logprobs: how many alternatives to report for each token, None
    for none. stop: called with each new token in order; a text ends after the token for which it
    returns a finish reason.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    gamma: int = 4
    draft: DraftKind = "model"
    draft_temperature: float | None = None
    draft_threshold: float = 0.0
    policy: Policy | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    eos_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    stop: Callable[[int], str | None] | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token. logprob: log p of the target's own distribution, before any warping;
    alternatives: the most probable ids with theirs, best first."""

    id: int
    origin: Origin
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class ActiveSequence:
    """A request in its slot.

    finish_reason: None while there is more to come; "error" where `error` says what ended it.
    """

    def __init__(self, request: Request, slot: Slot):
        self.request, self.slot = request, slot
        self.output: list[Token] = []
        self.finish_reason: str | None = None
        self.error: OutriderError | None = None
        self.stats = Stats(prompt_tokens=len(request.prompt))
        self.started = time.perf_counter()
