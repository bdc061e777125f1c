"""The base classes of drafts. A kind of draft is a subclass of `Draft` and a registry entry.

A draft that names tokens derives from `GuessedDraft`; one that gives logits for the next token
implements `row`. The `Proposer` does the rest of the round: whatever a draft returns, q is the
distribution that its tokens were drawn from, so the output has the target's distribution. Only a
draft that is `at_once` and has rows draws from them itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from ..backends.engine import Engine, Logits
from ..calls import first_forbidden
from ..sampling.sampler import Sampler
from ..sequence import ActiveSequence
from ..slots import SlotTable

if TYPE_CHECKING:
    from .lookup import Corpus
    from .tables import Tables


@dataclass
class Sources:
    """What drafts can use.

    width: V that target and draft share. slots: those of the rounds. engine: the draft model.
    inner: a sampler for rounds in which another draft proposes and the draft model verifies,
    `width` wide. tables, corpus: from the files that the bundle was opened with.
    """

    width: int
    slots: SlotTable
    engine: Engine | None = None
    inner: Sampler | None = None
    tables: Tables | None = None
    corpus: Corpus | None = None


class Draft:
    """A source of draft tokens: one object for all sequences of a decoder.

    help: its line in `--help`. needs: the fields of `Sources` that it requires. reads_model: its
    tokens pass through the draft model's cache. point_masses: its tokens have no distribution.
    at_once: `propose` returns all tokens of a round before the first is drawn; otherwise each is
    drawn from its `row`. reads_corpus: it searches `Sources.corpus`. usual_gamma: the default
    gamma.
    """

    help: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    reads_model: ClassVar[bool] = False
    point_masses: ClassVar[bool] = False
    at_once: ClassVar[bool] = False
    reads_corpus: ClassVar[bool] = False
    usual_gamma: ClassVar[int] = 8  # for drafts whose tokens cost next to nothing

    def __init__(self, sources: Sources):
        self.sources = sources

    @classmethod
    def is_available(cls, sources: Sources) -> bool:
        return all(getattr(sources, name) is not None for name in cls.needs)

    @classmethod
    def needs_model(cls) -> bool:
        """Whether it requires the draft model."""
        return cls.reads_model or bool({"engine", "inner"} & set(cls.needs))

    def propose(self, wanted: Mapping[ActiveSequence, int]) -> dict[ActiveSequence, list[int]]:
        """The draft tokens of each sequence, at most as many as wanted; of those left out, none.
        Called if `at_once`. Excess tokens are dropped, as are all from the first one that sampling
        cannot produce."""
        raise NotImplementedError

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        """Logits [V or more] that the token after the text and these drafts is drawn from, or was
        drawn from. Callers do not write to it. Not called if `point_masses`."""
        raise NotImplementedError

    def forget(self, sequence: ActiveSequence) -> None:
        """Called when the sequence leaves its slot."""


class GuessedDraft(Draft, ABC):
    """A draft that guesses the next tokens. A guess x is accepted with probability p(x)."""

    point_masses = at_once = True

    @abstractmethod
    def guess(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens to follow the text (`sequence.slot.tokens`) and these drafts;
        empty if there is no guess."""

    def propose(self, wanted: Mapping[ActiveSequence, int]) -> dict[ActiveSequence, list[int]]:
        return {sequence: self.guess(sequence, [], count) for sequence, count in wanted.items()}

    def possible(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
        """The guess up to the first token that sampling cannot produce."""
        found = list(self.guess(sequence, drafts, count))[:count] if count > 0 else []
        return found[: first_forbidden(sequence, found, self.sources.width, len(drafts))]


def temperature_factor(sequence: ActiveSequence) -> float:
    """The factor for logits that makes division by the target's temperature amount to division by
    the draft's: q then has the filters and penalties of p, at its own temperature."""
    request = sequence.request
    own = request.draft_temperature
    return 1.0 if own is None else request.params.temperature / own


def apply_draft_temperature(rows: npt.NDArray[np.float32], sequence: ActiveSequence) -> None:
    if (factor := temperature_factor(sequence)) != 1:
        rows *= np.float32(factor)
