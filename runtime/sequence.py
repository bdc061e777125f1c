"""What is asked of one sequence, what it emits, and what a round is told and tells of it."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .backends.engine import Engine, Logits, Source, source_ids
from .files.errors import OutriderError
from .policy import Policy
from .sampling.processors import LogitsProcessor
from .sampling.rules import Verdict
from .sampling.warp import SamplingParams
from .slots import Slot, SlotTable
from .stats import Stats

Origin = str  # "first" (from the prefill), "accepted", "corrected", "bonus" or "plain"


@dataclass(frozen=True, slots=True)
class Request:
    """What is wanted of one sequence.

    gamma: most draft tokens a round, 0 is plain decoding. policy: what chooses among 0 .. gamma for
    each round; None for gamma itself. It is this request's own. draft: who proposes them, a
    name of `drafts.registry`. draft_temperature: of their distribution, None for the target's.
    draft_threshold: no more are drafted in a round after one to which the draft itself gave less
    probability; 0 for never. logprobs: how many alternatives to report for each token, None
    for none. stop: called with each new token in order; a text ends after the token for which it
    returns a finish reason. source: what an encoder reads, none where there is none. second: ids of
    which the target's most probable one after the prompt's first token, unprocessed, becomes its
    second (a language that is detected). processors: of the logits of target and draft, in this
    order.
    """

    prompt: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    gamma: int = 4
    draft: str = "model"
    draft_temperature: float | None = None
    draft_threshold: float = 0.0
    policy: Policy | None = None
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    eos_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    stop: Callable[[int], str | None] | None = None
    source: Source = ()
    second: Sequence[int] = ()
    processors: tuple[LogitsProcessor, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token. logprob: log p of the target's own distribution, before any warping and
    after the request's processors; alternatives: the most probable ids with theirs, best first."""

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
        read = source_ids(request.source)
        self.stats = Stats(prompt_tokens=len(request.prompt), source_tokens=len(read))
        self.started = time.perf_counter()

    @property
    def seen(self) -> Sequence[int]:
        """What there is to copy from: the source, where there is one, and the text."""
        text, source = self.slot.tokens, source_ids(self.request.source)
        return [*source, *text] if source else text


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One sequence's part of a round.

    gamma: draft tokens that are wanted. limit: how many can still become text or fit a context.
    left: tokens that the text can still have.
    """

    sequence: ActiveSequence
    gamma: int
    limit: int
    left: int


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What a round made of one sequence. rows: the target's raw logits [K, V], K > len(drafts);
    valid until the next round. error: what broke it instead ("numeric"); nothing can be said of the
    sequence then, and it must be released."""

    drafts: list[int]
    verdict: Verdict
    rows: Callable[[], Logits]
    error: OutriderError | None = None

    @classmethod
    def broken(cls, error: OutriderError) -> SlotResult:
        return cls([], Verdict(0, -1, ()), lambda: np.empty((0, 0), np.float32), error)


@dataclass(slots=True)
class RoundResult:
    """One part for each plan, and seconds: in the draft's steps, in rows that it lacked before
    them, in the target, in draws and verification. A GPU's draws count as drafting, and its
    verification as the target's."""

    parts: list[SlotResult] = field(default_factory=list)
    time_draft: float = 0.0
    time_draft_prefill: float = 0.0
    time_verify: float = 0.0
    time_sample: float = 0.0


class Rounds(Protocol):
    """Two engines, their slots, and the sampling between them; one thread at a time.

    kinds: who can propose here, names of `drafts.registry`. on_host: whether a draft can have a
    temperature of its own, and stop where it is unsure, and the sampling knows frequency and
    presence penalties, biases, and processors.
    """

    target: Engine
    draft: Engine | None
    slots: SlotTable
    on_host: bool

    @property
    @abstractmethod
    def kinds(self) -> frozenset[str]: ...

    @abstractmethod
    def start(self, sequence: ActiveSequence) -> SlotResult:
        """Prefill the target with what it lacks of the prompt, and draw the first token."""

    @abstractmethod
    def run(self, plans: Sequence[SlotPlan], /) -> RoundResult:
        """One round: draft, verify, accept or correct or extend. Nothing is committed to the slots,
        but `draft_len` where the draft was given rows that it lacked. One that was launched ahead
        keeps the gamma of its launch."""

    @abstractmethod
    def forget(self, sequence: ActiveSequence) -> None:
        """The sequence leaves its slot."""

    def clear(self, sequence: ActiveSequence) -> None:
        """What broke its logits may lie in its rows."""
        for engine in (self.target, self.draft):
            if engine is not None:
                engine.clear(sequence.slot.index)
