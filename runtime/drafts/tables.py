"""Draft models that are tables: the file that `python -m export.ngram` writes, and its rows.

The tables count the tokens of a text, and its pairs of tokens 1 .. D apart. Their rows cost next to
nothing (the models with c near 0 in Leviathan et al. 2023, section 4.1).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backends.engine import Logits
from ..files.errors import OutriderError
from ..sequence import ActiveSequence
from .draft import Draft

Pairs = tuple[npt.NDArray[Any], ...]  # offsets, tokens, counts: see `Tables`
VERSION = 1
BACKOFF = 2.0  # weight of the unigram distribution, in occurrences, relative to a pair's counts
_REMEDY = "Create it again: see python -m export.ngram --help."


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """A hash of a tokenizer's vocabulary, equal for the same tokens with the same ids."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


class TableDraft(Draft):
    """A draft whose rows come from the table that the bundle was opened with."""

    needs = ("tables",)

    @property
    def tables(self) -> Tables:
        assert self.sources.tables is not None
        return self.sources.tables


class UnigramDraft(TableDraft):
    help = "token counts of a text (--table)"

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        return self.tables.unigram


class BigramDraft(TableDraft):
    help = "counts of what followed the previous token (--table)"

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        return self.tables.after(drafts[-1] if drafts else sequence.slot.pending, 1)


class SkipDraft(TableDraft):
    help = "for draft token i, counts of what followed the last token i places later (--table)"

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        return self.tables.after(sequence.slot.pending, len(drafts) + 1)


class RandomDraft(Draft):
    """All tokens equally likely: shows the cost of speculation without any knowledge."""

    help = "uniformly random tokens"

    def row(self, sequence: ActiveSequence, drafts: Sequence[int]) -> Logits:
        return np.broadcast_to(np.float32(0), self.sources.width)


def _find_damage(unigram: npt.NDArray[Any], pairs: Sequence[Pairs]) -> str | None:
    """Which arrays do not have the form that `Tables` documents; None if all do."""
    if not pairs:
        return "pairs"
    if unigram.dtype != np.float32 or unigram.ndim != 1 or not unigram.size:
        return "unigrams"
    if not np.isfinite(unigram).all():
        return "unigrams"
    for distance, (offsets, tokens, counts) in enumerate(pairs, start=1):
        kinds = [(array.dtype.name, array.ndim) for array in (offsets, tokens, counts)]
        if kinds != [("int64", 1), ("int32", 1), ("int32", 1)]:
            return f"pairs at distance {distance}"
        size = len(tokens)
        fits = len(offsets) == len(unigram) + 1 and len(counts) == size
        if not fits or offsets[0] != 0 or offsets[-1] != size or (np.diff(offsets) < 0).any():
            return f"offsets at distance {distance}"
        if (tokens < 0).any() or (tokens >= len(unigram)).any() or (counts < 1).any():
            return f"counts at distance {distance}"
    return None


def _narrow_pairs(pairs: Pairs, width: int) -> Pairs:
    """The pairs whose second token is below `width`."""
    offsets, tokens, counts = pairs
    keep = tokens < width
    before = np.concatenate([[0], np.cumsum(keep)])  # how many of the first n are kept
    return before[offsets], tokens[keep], counts[keep]


def _array_names(distance: int) -> list[str]:
    """The names of a distance's arrays in the file."""
    return [f"{what}_{distance}" for what in ("offsets", "tokens", "counts")]


class Tables:
    """Logits from tables of counts.

    unigram: float32 [V], log-probabilities, with one occurrence added for every token. pairs: by
    distance, from 1: offsets int64 [V + 1], tokens int32 [M], counts int32 [M]; the tokens that
    followed y, and their counts, are at offsets[y] .. offsets[y + 1].
    """

    def __init__(self, unigram: Logits, pairs: Sequence[Pairs], tokenizer: str = ""):
        self.unigram, self.pairs, self.tokenizer = unigram, pairs, tokenizer

    @classmethod
    def count(cls, text: npt.NDArray[np.int32], vocab_size: int, distances: int) -> Tables:
        """Count the tokens of a text. text: ids [N], each below vocab_size. distances: D."""
        counts = np.bincount(text, minlength=vocab_size) + 1
        pairs = []
        for distance in range(1, distances + 1):
            both = text[:-distance].astype(np.int64) * vocab_size + text[distance:]
            found, occurrences = np.unique(both, return_counts=True)
            offsets = np.searchsorted(found, np.arange(vocab_size + 1, dtype=np.int64) * vocab_size)
            tokens = (found % vocab_size).astype(np.int32)
            pairs.append((offsets.astype(np.int64), tokens, occurrences.astype(np.int32)))
        return cls(np.log(counts / counts.sum()).astype(np.float32), pairs)

    def after(self, token: int, distance: int) -> Logits:
        """Logits [V] of the token at this distance after `token`; callers do not write to them.

        log(counts + BACKOFF unigram), up to a constant; the unigrams alone if nothing was counted.
        """
        if distance > len(self.pairs):
            return self.unigram
        offsets, tokens, counts = self.pairs[distance - 1]
        if token >= len(offsets) - 1:
            return self.unigram
        start, end = offsets[token], offsets[token + 1]
        row: Logits = self.unigram + np.float32(np.log(BACKOFF))
        seen = tokens[start:end]
        row[seen] = np.log(counts[start:end] + np.exp(row[seen]))
        return row

    def save(self, path: Path) -> None:
        arrays = {"version": np.array(VERSION), "tokenizer": np.array(self.tokenizer),
                  "unigram": self.unigram}  # fmt: skip
        for distance, pair in enumerate(self.pairs, start=1):
            arrays |= dict(zip(_array_names(distance), pair, strict=True))
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path, vocabulary: Mapping[str, int], vocab_size: int) -> Tables:
        """Read a file. vocabulary: of the tokenizer that it was made with. vocab_size: V.

        Raises OutriderError "option", or "vocabulary" for a different tokenizer.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                version = int(file["version"])
                tokenizer, unigram = str(file["tokenizer"]), file["unigram"]
                pairs: list[Pairs] = []
                while version == VERSION and f"offsets_{len(pairs) + 1}" in file:
                    pairs.append(tuple(file[name] for name in _array_names(len(pairs) + 1)))
        except OSError as error:
            cause = error.strerror or "it is not a table"
            raise OutriderError("option", f"cannot read {path}: {cause}", _REMEDY) from None
        except Exception:  # noqa: BLE001 - zipfile, zlib and NumPy's parser, each its own
            raise OutriderError("option", f"{path} is not a table", _REMEDY) from None
        if version != VERSION:
            raise OutriderError("option", f"{path} has version {version}, not {VERSION}", _REMEDY)
        if tokenizer != fingerprint(vocabulary):
            raise OutriderError(
                "vocabulary", f"{path} was made with a tokenizer other than the bundle's",
                "Create it with --tokenizer <the bundle>/tokenizer: see python -m export.ngram "
                "--help.",
            )  # fmt: skip
        damaged = _find_damage(unigram, pairs)
        if damaged is not None:
            cause = f"{path} is not a table: its {damaged} are damaged"
            raise OutriderError("option", cause, _REMEDY)
        # A model may have more rows than its tokenizer has ids; they get the lowest probability.
        width = min(len(unigram), vocab_size)
        padded = np.full(vocab_size, unigram.min(), np.float32)
        padded[:width] = unigram[:width]
        if width < len(unigram):  # or fewer rows: then the missing ids are never drafted
            pairs = [_narrow_pairs(pair, vocab_size) for pair in pairs]
        return cls(padded, pairs, tokenizer)
