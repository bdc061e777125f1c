"""Special tokens that stand in a user's text, read as the text that they are.

Only those that the checkpoint's template writes control then. The two are told apart by
noncharacters, which Unicode reserves for such uses: in messages every special token is broken by
one, and what the rendered template still has whole is the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from ..files.errors import OutriderError

_OPEN, _CLOSE, _BREAK = "\ufdd0", "\ufdd1", "\ufdd2"


class LiteralTokenizer:
    """A copy of a tokenizer that knows special tokens only between `_OPEN` and `_CLOSE`."""

    def __init__(self, model: tokenizers.Tokenizer):
        self._model = tokenizers.Tokenizer.from_str(model.to_str())
        self._model.encode_special_tokens = True  # as text
        self._ids: dict[
            int | None, int
        ] = {}  # of the tokens between the marks: what they stand for
        names = []
        for number, token in model.get_added_tokens_decoder().items():
            if token.special:
                names.append(token.content)
                marked = tokenizers.AddedToken(
                    _OPEN + token.content + _CLOSE,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                )
                self._model.add_tokens([marked])
                self._ids[self._model.token_to_id(marked.content)] = number
        names.sort(key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text in which nothing controls. Raises OutriderError "prompt"."""
        ids = self._model.encode(_checked(text), add_special_tokens=add_special_tokens).ids
        return [self._ids.get(i, i) for i in ids]

    def broken(self, value: Any) -> Any:
        """Messages, or a part of them, whose special tokens are broken."""
        if isinstance(value, str):
            _checked(value)
            while self._special.search(value):  # breaking one may leave another that overlaps it
                value = self._special.sub(lambda found: found[0][0] + _BREAK + found[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {key: self.broken(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item) for item in value]
        return value

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a template's text, rendered from `broken` messages."""
        marked = self._special.sub(lambda found: _OPEN + found[0] + _CLOSE, text)
        ids = self._model.encode(marked.replace(_BREAK, ""), add_special_tokens=False).ids
        return [self._ids.get(i, i) for i in ids]


def _checked(text: str) -> str:
    if odd := {_OPEN, _CLOSE, _BREAK} & set(text):
        raise OutriderError(
            "prompt",
            f"the prompt has the noncharacter U+{ord(min(odd)):04X}",
            "Leave it out; special_tokens=text needs it.",
        )
    return text
