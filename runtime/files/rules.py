"""What a bundle says of the texts that the target's generation config asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .records import Rule, Small, TokenId

Word = Annotated[list[TokenId], Rule("some tokens", bool)]


@dataclass(frozen=True)
class TextRules:
    """What holds of each text unless its request says otherwise; names and meaning are those of
    Transformers, and None is nothing. min_length: tokens of a text, the prompt among them, which
    min_new_tokens, those without it, takes the place of.
    forced_eos_token_id: what a text ends with that reaches its most tokens."""

    min_length: Small | None = None
    no_repeat_ngram_size: Small | None = None
    encoder_no_repeat_ngram_size: Small | None = None
    bad_words_ids: list[Word] | None = None
    forced_eos_token_id: TokenId | None = None
    min_new_tokens: Small | None = None
