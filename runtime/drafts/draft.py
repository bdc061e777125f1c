"""What a kind of draft is: a subclass of `Draft`, and a line of the registry.

A draft that names tokens is a `GuessedDraft`; one that gives logits for the next token has a `row`.
The rest of the round is the `Proposer`'s: whatever a draft says, q is what its tokens were drawn
from, so what comes out has the target's distribution.
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
    """What drafts are made of.

    width: V that target and draft share. slots: those of the rounds. engine: the draft model.
    inner: a sampler for rounds between others and the draft model, `width` wide. tables, corpus: of
    the files that the bundle was opened with.
    """

    width: int
    slots: SlotTable
    engine: Engine | None = None
    inner: Sampler | None = None
    tables: Tables | None = None
    corpus: Corpus | None = None


class Draft:
    """Who proposes: one object for all sequences of a decoder.

    help: for `--help`. needs: the fields of `Sources` without which it is not there. reads_model:
    its tokens pass through the draft model's cache. point_masses: its tokens have no distribution.
    at_once: all tokens of a round are known before the first of them is drawn, from `propose`;
    otherwise each is drawn from its `row`. reads_corpus: it looks into `Sources.corpus`.
    usual_gamma: where the user asks for none.
    """

    help: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    reads_model: ClassVar[bool] = False
    point_masses: ClassVar[bool] = False
    at_once: ClassVar[bool] = False
    reads_corpus: ClassVar[bool] = False
    usual_gamma: ClassVar[int] = 8  # where a token costs next to nothing

    def __init__(self, sources: Sources):
        self.sources = sources

    @classmethod
    def there(cls, sources: Sources) -> bool:
        return all(getattr(sources, name) is not None for name in cls.needs)

    @classmethod
    def needs_model(cls) -> bool:
        """Whether it is there only where the draft model is opened."""
        return cls.reads_model or bool({"engine", "inner"} & set(cls.needs))

    def propose(self, wanted: Mapping[ActiveSequence, int]) -> dict[ActiveSequence, list[int]]:
        """At most as many tokens as are wanted of each sequence, where `at_once`; what is beyond,
        or comes from the first token on that the sampling cannot give, is left out."""
        raise NotImplementedError

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        """Logits [V or more] that the token after the text and these drafts is drawn from, or was;
        not to be written to. Not asked for where `point_masses`."""
        raise NotImplementedError

    def forget(self, sequence: ActiveSequence) -> None:
        """The sequence leaves its slot."""


class GuessedDraft(Draft, ABC):
    """Names the tokens that may come next. A guess x is accepted with probability p(x)."""

    point_masses = at_once = True

    @abstractmethod
    def guess(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens after the text (`sequence.slot.tokens`) and these drafts; none
        where nothing comes to mind."""

    def propose(self, wanted: Mapping[ActiveSequence, int]) -> dict[ActiveSequence, list[int]]:
        return {sequence: self.guess(sequence, [], count) for sequence, count in wanted.items()}

    def possible(self, sequence: ActiveSequence, drafts: Sequence[int], count: int) -> list[int]:
        """The guess up to the first token that the sampling cannot give."""
        found = list(self.guess(sequence, drafts, count))[:count] if count > 0 else []
        return found[: first_forbidden(sequence, found, self.sources.width, len(drafts))]


def scale(sequence: ActiveSequence) -> float:
    """What logits are multiplied with so that division by the target's temperature makes it the
    draft's: filters and penalties of q then are those of p, at its own temperature."""
    request = sequence.request
    own = request.draft_temperature
    return 1.0 if own is None else request.params.temperature / own


def temper(rows: npt.NDArray[np.float32], sequence: ActiveSequence) -> None:
    if (factor := scale(sequence)) != 1:
        rows *= np.float32(factor)
