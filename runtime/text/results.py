"""The output of a request: its text round by round (`Event`), and the whole (`Result`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..files.errors import OutriderError
from ..sequence import ActiveSequence, Token
from ..stats import Stats
from .options import Options
from .tokenizer import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True)
class Result:
    """A finished request.

    finish_reason: "eos", "stop" (see stopped_by), "length" (max_new_tokens), "context" (the
    bundle's max_len) or, in a batch, "error". stopped_by: the stop string, or the id of the stop
    token, that ended the text. tokens: ids with origin and log-probabilities. token_ids includes
    the token that ended the text (end-of-text, or the one that completed a stop string). error: why
    a request of a batch was refused or failed; text and tokens are those generated until then.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    stopped_by: str | int | None
    seed: int
    stats: Stats
    error: OutriderError | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def logprobs(self) -> list[float | None]:
        return [token.logprob for token in self.tokens]


@dataclass(frozen=True)
class Event:
    """The output of one round. pieces: (text, origin of its token) each; text: their
    concatenation. Text that may still become a stop string, and incomplete characters, come with a
    later event. result: set on the last event."""

    pieces: tuple[tuple[str, str], ...]
    tokens: tuple[Token, ...]
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Transcript:
    """The text side of one request: detokenization and stop strings, token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], seed: int, options: Options):
        # Special tokens do not appear in the text, so they are matched by id.
        stops = [options.stop] if isinstance(options.stop, str) else options.stop
        self._special = {i: t for t in stops if (i := tokenizer.special_id(t)) is not None}
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings([t for t in stops if t not in self._special.values()])
        self._stop_ids = frozenset(options.stop_token_ids)
        self._pieces: list[str] = []  # one for each token pushed since the last event
        self._reported = 0  # tokens reported in events
        self.seed, self.text = seed, ""
        self.stopped_by: str | int | None = None

    def push(self, token: int) -> str | None:
        """`Request.stop`: a finish reason if the text ends after this token."""
        if token in self._stop_ids or token in self._special:
            self.stopped_by = self._special.get(token, token)
            return "stop"
        piece, match = self._stops.push(self._detokenizer.push(token))
        self._pieces.append(piece)
        if match is None:
            return None
        self.stopped_by = match
        return "stop"

    def event(self, sequence: ActiveSequence) -> Event:
        """The event for the tokens since the last one, with the result if the text has ended."""
        new = sequence.output[self._reported :]
        self._reported += len(new)
        # A token that ends the text and is not shown (end-of-text, a stop id) has no piece.
        pieces = [(p, t.origin) for p, t in zip(self._pieces, new, strict=False) if p]
        self._pieces.clear()
        ended = sequence.finish_reason
        if ended is not None and (tail := self._flush()):
            pieces.append((tail, new[-1].origin))
        self.text += "".join(piece for piece, _ in pieces)
        result = None if ended is None else self.result(sequence, ended)
        return Event(tuple(pieces), tuple(new), result)

    def result(
        self, sequence: ActiveSequence, reason: str, error: OutriderError | None = None
    ) -> Result:
        tokens, stats = tuple(sequence.output), sequence.stats
        return Result(self.text, tokens, reason, self.stopped_by, self.seed, stats, error)

    def _flush(self) -> str:
        """The text held back; none once a stop string has been found."""
        piece, _ = self._stops.push(self._detokenizer.flush())
        return piece + self._stops.flush()
