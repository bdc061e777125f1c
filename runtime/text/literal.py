"""Special tokens that stand in a user's text, read as the text that they are.

Only those that the checkpoint's template writes control then. The two are told apart by
noncharacters, which Unicode reserves for such uses: in messages every special token is broken by
one, and what the rendered template still has whole is the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

from ..files.errors import OutriderError

_OPEN, _CLOSE, _BREAK = "\ufdd0", "\ufdd1", "\ufdd2"
_ALONE = "\ufdd3"  # before a special token of one character, which cannot be broken


class LiteralTokenizer:
    """A copy of a tokenizer that knows special tokens only between `_OPEN` and `_CLOSE`."""

    def __init__(self, model: tokenizers.Tokenizer):
        said = json.loads(model.to_str())
        names = [token["content"] for token in said["added_tokens"] if token["special"]]
        marked = {name: _OPEN + name + _CLOSE for name in names}
        for token in said["added_tokens"]:
            if token["special"]:
                token |= {"content": marked[token["content"]], "normalized": False}
        # In the model too, which may find them in a text: as a piece, or as what is merged last.
        words = said["model"]
        if isinstance(words["vocab"], dict):
            words["vocab"] = {marked.get(word, word): i for word, i in words["vocab"].items()}
        else:
            words["vocab"] = [[marked.get(word, word), score] for word, score in words["vocab"]]
        if "merges" in words:
            merged = [(*pair, "".join(pair)) for pair in words["merges"]]
            words["merges"] = [[a, b] for a, b, both in merged if not marked.keys() & {a, b, both}]
        if "unk_token" in words:
            words["unk_token"] = marked.get(words["unk_token"], words["unk_token"])
        self._model = tokenizers.Tokenizer.from_str(json.dumps(said))
        names.sort(key=len, reverse=True)
        any_name = "|".join(map(re.escape, names)) or r"(?!)"
        self._special = re.compile(f"(?<!{_ALONE})(?:{any_name})")
        self._heads = tuple({name[:n] for name in names for n in range(1, len(name))})
        self._tails = tuple({name[n:] for name in names for n in range(1, len(name))})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text in which nothing controls. Raises OutriderError "prompt"."""
        return self._model.encode(_checked(text), add_special_tokens=add_special_tokens).ids

    def broken(self, value: Any) -> Any:
        """Messages, or a part of them, whose special tokens are broken.

        Those too that a template could put together from the end of one text and the begin of
        another, trimmed or not.
        """
        if isinstance(value, str):
            _checked(value)
            while self._special.search(value):  # breaking one may leave another that overlaps it
                value = self._special.sub(_apart, value)
            begin, end = len(value) - len(value.lstrip()), len(value.rstrip())
            cuts = {at for at in (0, begin) if value.startswith(self._tails, at)}
            cuts |= {at for at in (end, len(value)) if value.endswith(self._heads, 0, at)}
            for at in sorted(cuts, reverse=True):
                value = value[:at] + _BREAK + value[at:]
            return value
        if isinstance(value, Mapping):
            return {self.broken(key): self.broken(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item) for item in value]
        return value

    def encode_rendered(self, text: str) -> list[int]:
        """The token ids of a template's text, rendered from `broken` messages."""
        marked = self._special.sub(lambda found: _OPEN + found[0] + _CLOSE, text)
        plain = marked.replace(_BREAK, "").replace(_ALONE, "")
        return self._model.encode(plain, add_special_tokens=False).ids


def _apart(found: re.Match[str]) -> str:
    token = found[0]
    return _ALONE + token if len(token) == 1 else token[0] + _BREAK + token[1:]


def _checked(text: str) -> str:
    if odd := {_OPEN, _CLOSE, _BREAK, _ALONE} & set(text):
        raise OutriderError(
            "prompt",
            f"the prompt has the noncharacter U+{ord(min(odd)):04X}",
            "Leave it out; special_tokens=text needs it.",
        )
    return text
