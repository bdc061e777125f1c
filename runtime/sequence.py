"""The data of a sequence: its request, the tokens it emits, and a round's inputs and results."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .backends.engine import Engine, Logits, Source, source_ids
from .files.errors import OutriderError
from .gamma.measured import Policy
from .sampling.processors import LogitsProcessor
from .sampling.rules import Verdict
from .sampling.warp import SamplingParams
from .slots import NO_SLOT, Slot, SlotTable
from .stats import Stats

Origin = str  # "first" (from the prefill), "accepted", "corrected", "bonus" or "plain"


@dataclass(frozen=True, slots=True)
class Request:
    """How to generate one sequence.

    gamma: most draft tokens per round, 0 is plain decoding. policy: chooses among 0 .. gamma for
    each round; None for gamma itself. It is not shared with other requests. draft: the kind of
    draft, a name of `drafts.registry`. draft_temperature: of the draft's distribution, None for the
    target's. draft_threshold: a round stops drafting after a token to which the draft gave less
    probability; 0 for never. logprobs: number of alternatives reported for each token, None for no
    log-probabilities. stop: called with each new token in order; the text ends after the token for
    which it returns a finish reason. source: input of the encoder; empty without one.
    second_token_candidates: the candidates for the second token of the prompt, of which the
    target's most probable one after the first token, unprocessed, is used (to detect a language).
    processors: applied to the logits of target and draft, in this order.
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
    second_token_candidates: Sequence[int] = ()
    processors: tuple[LogitsProcessor, ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token. logprob: log p under the target's own distribution, before any warping and
    after the request's processors; alternatives: the most probable ids with their log p, best
    first."""

    id: int
    origin: Origin
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()


class ActiveSequence:
    """A request in its slot, which it gets in its first round.

    finish_reason: None until the text ends; "error" if `error` ended it. turn: those whose prompt
    is being read have their turns in this order. asked_at: when its next round was asked for, None
    for when that round begins.
    """

    def __init__(self, request: Request, slot: Slot | None = None):
        self.request, self.slot = request, slot or Slot(NO_SLOT)
        self.turn = 0
        self.asked_at: float | None = None
        self.output: list[Token] = []
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        read = source_ids(request.source)
        self.stats = Stats(prompt_tokens=len(request.prompt), source_tokens=len(read))
        self.started = time.perf_counter()

    @property
    def has_slot(self) -> bool:
        return self.slot.index != NO_SLOT

    @property
    def is_reading(self) -> bool:
        """Whether the target still reads the prompt: the last chunk gives the first token."""
        return not self.output and self.finish_reason is None

    def fail(self, error: Exception) -> None:
        self.error, self.finish_reason = error, "error"

    @contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Errors within end this sequence, and are not raised."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, others go on
            self.fail(error)

    @property
    def copyable_tokens(self) -> Sequence[int]:
        """The tokens that drafts can copy: the source, if there is one, and the text."""
        text, source = self.slot.tokens, source_ids(self.request.source)
        return [*source, *text] if source else text


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """One sequence's part of a round.

    gamma: draft tokens wanted. max_drafts: how many can still become text and fit into the
    contexts. tokens_left: how many more tokens the text can have.
    """

    sequence: ActiveSequence
    gamma: int
    max_drafts: int
    tokens_left: int

    @property
    def drafts(self) -> int:
        """How many tokens to draft."""
        return min(self.gamma, self.max_drafts)


@dataclass(frozen=True, slots=True)
class SlotResult:
    """The result of a round for one sequence. rows: the target's raw logits [K, V], K >
    len(drafts); valid until the next round. error: set if the round failed ("numeric"); the other
    fields are then meaningless, and the sequence must be released."""

    drafts: list[int]
    verdict: Verdict
    rows: Callable[[], Logits]
    error: OutriderError | None = None

    @classmethod
    def failed(cls, error: OutriderError) -> SlotResult:
        return cls([], Verdict(0, -1, ()), lambda: np.empty((0, 0), np.float32), error)


@dataclass(slots=True)
class RoundResult:
    """One part for each plan, and seconds: in the draft's steps, in rows that the draft lacked
    before them, in the target, in draws and verification. On a GPU, draws count as drafting, and
    the verification counts as the target's."""

    parts: list[SlotResult] = field(default_factory=list)
    time_draft: float = 0.0
    time_draft_prefill: float = 0.0
    time_verify: float = 0.0
    time_sample: float = 0.0


class Rounds(Protocol):
    """Runs rounds: two engines, their slots, and the sampling. For one thread at a time.

    kinds: the available drafts, names of `drafts.registry`. on_host: whether a draft may have its
    own temperature and a threshold, and sampling supports frequency and presence penalties, biases
    and processors.
    """

    target: Engine
    draft: Engine | None
    slots: SlotTable
    on_host: bool

    @property
    @abstractmethod
    def kinds(self) -> frozenset[str]: ...

    def prepare_prompt(self, sequence: ActiveSequence) -> int:
        """Copy what other slots hold of the prompt. Returns how many tokens are left to read."""
        return len(sequence.slot.tokens)

    @abstractmethod
    def read_prompt(self, sequence: ActiveSequence) -> SlotResult | None:
        """Let the target read the next chunk of the prompt, or all of it, after `prepare_prompt`.
        Returns None, or after its end the first token."""

    def read_ahead(self, sequence: ActiveSequence) -> bool:
        """Let the draft model read one chunk of a text of which it lacks more; returns whether it
        did. If not, it reads all of it in the text's next round."""
        return False

    @abstractmethod
    def run(self, plans: Sequence[SlotPlan], /) -> RoundResult:
        """Run one round: draft, verify, then accept, correct or extend. Nothing is committed to the
        slots, except `draft_len` if the draft read tokens that it lacked. A round that was launched
        ahead keeps the gamma it was launched with."""

    @abstractmethod
    def forget(self, sequence: ActiveSequence) -> None:
        """Called when the sequence leaves its slot."""

    def clear(self, sequence: ActiveSequence) -> None:
        """Clear the rows of a sequence, which may contain what broke its logits."""
        for engine in (self.target, self.draft):
            if engine is not None:
                engine.clear(sequence.slot.index)
