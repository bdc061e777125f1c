"""Special tokens that occur in a user's text, encoded as ordinary text.

Only those that the checkpoint's template writes are control tokens then. The two are told apart by
noncharacters, which Unicode reserves for internal use: every special token in a message is broken
up by one, so that those still whole in the rendered text are the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from ..files.errors import OutriderError

_OPEN, _CLOSE, _BREAK = "\ufdd0", "\ufdd1", "\ufdd2"
_BEFORE_SINGLE = "\ufdd3"  # before a special token of one character, which cannot be broken


class LiteralTokenizer:
    """A copy of a tokenizer that recognises special tokens only between `_OPEN` and `_CLOSE`."""

    def __init__(self, model: tokenizers.Tokenizer):
        self._model = tokenizers.Tokenizer.from_str(_without_pieces(model))
        self._model.encode_special_tokens = True  # as text
        self._ids: dict[int | None, int] = {}  # from ids of marked tokens to the original ids
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
        any_name = "|".join(map(re.escape, names)) or r"(?!)"
        self._special = re.compile(f"(?<!{_BEFORE_SINGLE})(?:{any_name})")
        self._heads = tuple({name[:n] for name in names for n in range(1, len(name))})
        self._tails = tuple({name[n:] for name in names for n in range(1, len(name))})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text without control tokens. Raises OutriderError "prompt"."""
        return self._encode(_check_text(text), add_special_tokens)

    def break_special_tokens(self, value: Any) -> Any:
        """Messages, or a part of them, with their special tokens broken up.

        This includes those that a template could assemble from the end of one text and the
        beginning of another, trimmed or not.
        """
        if isinstance(value, str):
            _check_text(value)
            while self._special.search(value):  # breaking one may leave another that overlaps it
                value = self._special.sub(_break_token, value)
            begin, end = len(value) - len(value.lstrip()), len(value.rstrip())
            cuts = {at for at in (0, begin) if value.startswith(self._tails, at)}
            cuts |= {at for at in (end, len(value)) if value.endswith(self._heads, 0, at)}
            for at in sorted(cuts, reverse=True):
                value = value[:at] + _BREAK + value[at:]
            return value
        if isinstance(value, Mapping):
            each = self.break_special_tokens
            return {each(k) if isinstance(k, str) else k: each(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_special_tokens(item) for item in value]
        return value

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a template's output for messages from `break_special_tokens`."""
        marked = self._special.sub(lambda found: _OPEN + found[0] + _CLOSE, text)
        plain = marked.replace(_BREAK, "").replace(_BEFORE_SINGLE, "")
        return self._encode(plain, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._model.encode(text, add_special_tokens=add_special_tokens).ids
        return [self._ids.get(i, i) for i in ids]


def _without_pieces(model: tokenizers.Tokenizer) -> str:
    """As `to_str`, but without the special tokens that are pieces of a Unigram model, as in T5,
    which would match them in text. Single characters and bytes stay: nothing else may spell them.
    """
    if not isinstance(model.model, tokenizers.models.Unigram):
        return model.to_str()
    config = json.loads(model.to_str())
    special = {token["content"] for token in config["added_tokens"] if token["special"]}
    removed = {name for name in special if len(name) > 1 and not name.startswith("<0x")}
    pieces = config["model"]["vocab"]
    removed &= {piece for piece, _ in pieces}
    config["model"]["vocab"] = [
        [_OPEN + piece + _CLOSE if piece in removed else piece, score] for piece, score in pieces
    ]
    tokens = config["added_tokens"]
    config["added_tokens"] = [each for each in tokens if each["content"] not in removed]
    return json.dumps(config)


def _break_token(found: re.Match[str]) -> str:
    token = found[0]
    return _BEFORE_SINGLE + token if len(token) == 1 else token[0] + _BREAK + token[1:]


def _check_text(text: str) -> str:
    if odd := {_OPEN, _CLOSE, _BREAK, _BEFORE_SINGLE} & set(text):
        raise OutriderError(
            "prompt",
            f"the prompt contains the noncharacter U+{ord(min(odd)):04X}",
            "Leave it out; special_tokens=text reserves it for its own use.",
        )
    return text
