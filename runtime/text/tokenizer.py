"""Text on both sides of the engine: prompts become token ids, token ids become streamed text.

Nothing here depends on models, slots or rounds. Text is a function of the ids alone, however rounds
split them. A stream is `Tokenizer` -> `Detokenizer` -> `StopStrings`, one token at a time.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from ..files.errors import OutriderError, convert_errors
from .chat import ChatTemplate
from .literal import LiteralTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # SentencePiece's spelling of one byte
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# Byte-level BPE spells a printable Latin-1 byte as itself and the other 68, in order, from U+0100.
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}


class Tokenizer:
    """The checkpoint's own tokenizer, and a chat template.

    path: `tokenizer.json`. chat_template: Jinja source; None if there is none.
    special_tokens: strings by role (`bos_token`, `eos_token`, ...), as the template names them.
    Raises OutriderError "bundle" if the file cannot be read.
    """

    def __init__(
        self,
        path: Path,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ):
        what = f"cannot read the tokenizer {path}"
        with convert_errors("bundle", what, "Build the bundle again"):
            self._model = tokenizers.Tokenizer.from_file(str(path))
        # A saved file may include the padding and truncation of the training run.
        self._model.no_truncation()
        self._model.no_padding()
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None:
            self.chat_template = ChatTemplate(chat_template, special_tokens)
        added = self._model.get_added_tokens_decoder().values()
        self._special_texts = frozenset(token.content for token in added if token.special)
        self._decoder = self._model.decoder
        kinds = b"" if self._decoder is None else self._decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in kinds
        self._byte_fallback = b'"ByteFallback"' in kinds

    def vocabulary(self) -> dict[str, int]:
        """All tokens and their ids, added tokens included."""
        return self._model.get_vocab(with_added_tokens=True)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, special_tokens: str = "control"
    ) -> list[int]:
        """The token ids of a prompt.

        add_special_tokens: also add those that the checkpoint puts around every text.
        special_tokens: "control" recognises those spelled out in the text, as Transformers does;
        "text" encodes them as ordinary text. Raises OutriderError "prompt" if the text is not valid
        Unicode (lone surrogates).
        """
        _check_unicode(text)
        if special_tokens == "text":
            return self._literal.encode(text, add_special_tokens=add_special_tokens)
        return self._model.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, special_tokens: str = "control"
    ) -> list[int]:
        """The token ids of a conversation's prompt. special_tokens: how to treat those in the
        messages; those of the chat template are always control tokens. Raises OutriderError
        "prompt"."""
        if special_tokens == "control":
            return self.encode(self.render_chat(messages), add_special_tokens=False)
        try:
            broken = self._literal.break_special_tokens(messages)
        except RecursionError:
            cause = "the messages are nested too deeply"
            raise OutriderError("prompt", cause, "Pass text, or a list of parts.") from None
        rendered = self.render_chat(broken)
        _check_unicode(rendered)
        return self._literal.encode_rendered(rendered)

    @cached_property
    def _literal(self) -> LiteralTokenizer:
        return LiteralTokenizer(self._model)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids without a token (of a padded vocabulary) give no text.

        Equal to Transformers' `decode`, with one exception. If byte-fallback tokens spell
        characters and then an invalid byte, Transformers drops the characters as well, so that a
        newline already shown would be retracted. Here, as in SentencePiece, they stay.
        """
        return self.join([p for i in ids if (p := self.piece(i, skip_special_tokens)) is not None])

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, which is left out of decoded text; None if
        there is no such token."""
        return self._model.token_to_id(text) if text in self._special_texts else None

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text of a conversation; see `ChatTemplate.render`."""
        if self.chat_template is None:
            raise OutriderError(
                "prompt",
                "this checkpoint has no chat template",
                "Pass plain text as the prompt, or load the bundle with a template "
                "(chat_template=FILE, --chat-template FILE).",
            )
        return self.chat_template.render(messages)

    def piece(self, token: int, skip_special_tokens: bool = True) -> str | None:
        """The vocabulary's spelling of a token; None if it gives no text."""
        piece = self._model.id_to_token(token)
        return None if skip_special_tokens and piece in self._special_texts else piece

    def join(self, pieces: list[str]) -> str:
        """The text of pieces. Appending changes only the last `undecided_length` characters."""
        if self._byte_fallback and any(map(_is_byte, pieces)):
            pieces = _isolate_invalid_bytes(pieces)
        return " ".join(pieces) if self._decoder is None else self._decoder.decode(pieces)

    def undecided_length(self, pieces: list[str]) -> int:
        """How many characters at the end of `join(pieces)` the next piece may still change.

        They are U+FFFD, standing for at most 3 bytes that begin a character: one for all of them
        with a byte-level vocabulary, one for each with byte fallback.
        """
        tail = pieces[-3:]  # of at least one byte each
        if self._byte_level:
            return min(1, _incomplete_bytes(b"".join(map(_byte_level_bytes, tail))))
        if self._byte_fallback:
            return _incomplete_bytes(
                b"".join(_fallback_byte(p) if _is_byte(p) else b" " for p in tail)  # ends a run
            )
        return 0


class Detokenizer:
    """Incremental text of one request: never half a character, and nothing is retracted.

    The pieces from `push` and `flush` concatenate to exactly what `decode(prompt_ids + ids)` adds
    to the text of the prompt; without `prompt_ids`, to `decode(ids)`. Pass the prompt so that
    prompt + text reads naturally, as in Transformers' text-generation pipeline: with SentencePiece
    vocabularies, decoding the new ids alone would lose the leading space.

    Each token costs the decoding of at most `_WINDOW` tokens, however long the text is.
    """

    # Tokens before the newest that are decoded with it. One determines the leading space, and three
    # bytes how UTF-8 continues.
    _CONTEXT = 4
    _WINDOW = 12

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        pieces = (p for token in reversed(prompt_ids) if (p := tokenizer.piece(token)) is not None)
        self._window = list(islice(pieces, self._CONTEXT))[::-1]
        self._shown = 0
        self._show()

    def push(self, token: int) -> str:
        """The text that `token` completes; empty for special tokens and parts of characters."""
        piece = self._tokenizer.piece(token)
        if piece is None:
            return ""
        if len(self._window) == self._WINDOW:
            # Both windows end in the same bytes, so they continue alike, wherever they begin.
            self._window = self._window[-self._CONTEXT :]
            self._show()
        self._window.append(piece)
        return self._show()

    def _show(self) -> str:
        """The window's text after what was shown, except what the next token may change."""
        text, begin = self._tokenizer.join(self._window), self._shown
        self._shown = len(text) - self._tokenizer.undecided_length(self._window)
        return text[begin : self._shown]

    def flush(self) -> str:
        """An incomplete character at the end, as U+FFFD; empty if there is none."""
        text = self._tokenizer.join(self._window)
        begin, self._shown = self._shown, len(text)
        return text[begin:]


class StopStrings:
    """Finds a stop string in streamed text and holds back only what could still become one.

    The stop string that is completed first wins; of several that end at the same character, the
    longest. This is the one rule that needs no look-ahead and depends only on the text, not on how
    tokens split it: with stops "bcd" and "c", "abcd" ends at "c" however it is split into pieces.
    stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    def push(self, piece: str) -> tuple[str, str | None]:
        """The text that is safe to show, and the stop string once matched. After a match, no more
        text follows."""
        if self._matched is not None:
            return "", self._matched
        text = self._held + piece
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            _, start, self._matched = min(found)
            self._held = ""
            return text[:start], self._matched
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        safe = len(text) - keep
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """The text held back, for a text that ends without a match."""
        held, self._held = self._held, ""
        return held


def _check_unicode(text: str) -> None:
    """Refuse lone surrogates; the library's own message does not state the cause."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OutriderError(
            "prompt", f"character {error.start} is a lone surrogate", "Pass valid Unicode text"
        ) from None


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _incomplete_bytes(tail: bytes) -> int:
    """How many bytes at the end, 0 to 3, begin a UTF-8 character without completing it."""
    return len(tail) - codecs.utf_8_decode(tail, "replace", False)[1]


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:  # an added token, spelled as itself
        return piece.encode()


def _is_byte(piece: str) -> bool:
    return _BYTE_TOKEN.fullmatch(piece) is not None


def _fallback_byte(piece: str) -> bytes:
    return bytes.fromhex(piece[3:5])


def _isolate_invalid_bytes(pieces: list[str]) -> list[str]:
    """Spell each invalid byte as U+FFFD, because the decoder drops a whole run of bytes for one."""
    out: list[str] = []
    for is_bytes, group in groupby(pieces, _is_byte):
        run = list(group)
        if not is_bytes:
            out += run
            continue
        at = 0
        # surrogateescape makes every invalid byte one lone surrogate.
        for char in b"".join(map(_fallback_byte, run)).decode(errors="surrogateescape"):
            invalid = "\udc80" <= char <= "\udcff"
            width = 1 if invalid else len(char.encode())
            out += [REPLACEMENT] if invalid else run[at : at + width]
            at += width
    return out
