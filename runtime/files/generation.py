"""What a bundle records of the target's generation config and of a model that transcribes; names
are those of Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from .records import Count, Rule, SmallCount, TokenId, between

BadWord = Annotated[list[TokenId], Rule("a non-empty list", bool)]


@dataclass(frozen=True)
class FeatureFacts:
    """The input of an audio encoder: log-mel spectra, float32 [feature_size, frames], as computed
    by Transformers' feature extractor with these fields.

    sampling_rate: in Hz. feature_size: mel bands. n_fft, hop_length: samples per window, and from
    one window to the next. n_samples: samples per source, which is padded to that length.
    """

    sampling_rate: Count
    feature_size: SmallCount
    n_fft: SmallCount
    hop_length: SmallCount
    n_samples: Count

    @property
    def frames(self) -> int:
        return self.n_samples // self.hop_length


@dataclass(frozen=True)
class AudioFacts:
    """What transcription needs of the target's generation config.

    max_length: most tokens of a text, without its prompt. language_detected: whether a request
    without a prompt detects the language, which becomes the second token of the prompt
    (`Pair.start_ids` has an arbitrary one there). language_names: codes by the names that
    Transformers accepts for them, in lower case. language, task: defaults of the checkpoint.
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
    language: str | None = None
    task: str | None = None

    def tokens(self) -> Iterator[int]:
        """All token ids in these fields."""
        yield self.decoder_start_token_id
        for ids in (self.lang_to_id.values(), self.task_to_id.values(), self.suppress_tokens):
            yield from ids
        yield from self.begin_suppress_tokens
        yield from filter(None, (self.no_timestamps_token_id, self.prev_sot_token_id))


@dataclass(frozen=True)
class TextRules:
    """Defaults for options that a request does not set; None turns the rule off. min_length: least
    tokens of a text with its prompt; min_new_tokens, without the prompt, overrides it.
    forced_eos_token_id: the last token of a text that reaches its maximum length."""

    min_length: SmallCount | None = None
    no_repeat_ngram_size: SmallCount | None = None
    encoder_no_repeat_ngram_size: SmallCount | None = None
    bad_words_ids: list[BadWord] | None = None
    forced_eos_token_id: TokenId | None = None
    min_new_tokens: SmallCount | None = None
