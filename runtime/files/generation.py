"""What a bundle says of the target's generation config, and of a model that transcribes; names are
those of Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from .records import Count, Rule, Small, TokenId, between

Word = Annotated[list[TokenId], Rule("some tokens", bool)]


@dataclass(frozen=True)
class FeatureFacts:
    """What an encoder of sound reads: log-mel spectra, float32 [feature_size, frames], made as
    Transformers' feature extractor of these fields makes them.

    sampling_rate: in Hz. feature_size: mel bands. n_fft, hop_length: samples of a window, and from
    one to the next. n_samples: of one source, which is padded to them.
    """

    sampling_rate: Count
    feature_size: Small
    n_fft: Small
    hop_length: Small
    n_samples: Count

    @property
    def frames(self) -> int:
        return self.n_samples // self.hop_length


@dataclass(frozen=True)
class AudioFacts:
    """What transcribing needs of the target's generation config.

    max_length: most tokens of a text, the prompt among them. language_detected: whether the prompt
    of a request without one has the most probable language in its second place (`Pair.start_ids`
    has any there). language_names: codes by the names that Transformers takes for them, in lower
    case.
    """

    decoder_start_token_id: TokenId
    lang_to_id: dict[str, TokenId]
    task_to_id: dict[str, TokenId]
    is_multilingual: bool
    suppress_tokens: list[TokenId]
    begin_suppress_tokens: list[TokenId]
    max_length: Count
    language_detected: bool
    no_timestamps_token_id: TokenId | None = None
    prev_sot_token_id: TokenId | None = None
    max_initial_timestamp_index: Annotated[int, between(0, 1 << 16)] | None = None
    language_names: dict[str, str] | None = None

    def tokens(self) -> Iterator[int]:
        """Every id that is named."""
        yield self.decoder_start_token_id
        for ids in (self.lang_to_id.values(), self.task_to_id.values(), self.suppress_tokens):
            yield from ids
        yield from self.begin_suppress_tokens
        yield from filter(None, (self.no_timestamps_token_id, self.prev_sot_token_id))


@dataclass(frozen=True)
class TextRules:
    """What holds of each text unless its request says otherwise; None is nothing. min_length: of a
    text with its prompt, which min_new_tokens, those without it, takes the place of.
    forced_eos_token_id: what a text ends with that reaches its most tokens."""

    min_length: Small | None = None
    no_repeat_ngram_size: Small | None = None
    encoder_no_repeat_ngram_size: Small | None = None
    bad_words_ids: list[Word] | None = None
    forced_eos_token_id: TokenId | None = None
    min_new_tokens: Small | None = None
