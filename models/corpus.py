"""The training data of the bundled pair: Python's standard library, a tokenizer, token streams.

The standard library is on every machine that can run this project, and its license (PSF-2.0)
permits distribution of derived works. Nothing here depends on the models.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SEPARATOR = "<|endoftext|>"  # begins every document, and so also ends the one before
SEPARATOR_ID = 0
MAX_POSITIONS = 2048

SUFFIXES = {".py", ".txt", ".rst"}
# Installed packages have other licenses; character tables and parser pickles are not text.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "lib-dynload"}
MAX_FILE_BYTES = 400_000
HELD_OUT_OF_256 = 8  # files whose content hash starts with a byte below this are held out


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, each one string."""

    train: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class TokenStream:
    """All documents of one split as one sequence of tokens, each preceded by a separator.

    tokens: int64 [T]. starts: int64 [S], the positions where a top-level line starts.
    """

    tokens: torch.Tensor
    starts: torch.Tensor


def _is_prose_or_code(text: str) -> bool:
    """False for files that are mainly numbers, byte strings or tables in another script."""
    letters = sum(map(str.isalpha, text)) + sum(map(str.isspace, text))
    escapes = len(re.findall(r"\\[xuU0-9]", text))
    non_ascii = sum(character > "\x7f" for character in text)
    longest_line = max(map(len, text.splitlines()), default=0)
    return (
        letters > 0.6 * len(text)
        and escapes < 0.01 * len(text)
        and non_ascii < 0.02 * len(text)
        and longest_line < 1000
    )


def _library_documents(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.suffix not in SUFFIXES or SKIPPED_FOLDERS.intersection(parts):
            continue
        if parts[0].startswith("config-") or "topics.py" in parts:
            continue
        if not path.is_file() or not 200 <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # test data for the library's own decoders
    try:  # The language reference is one dictionary of texts: the best prose here.
        yield from importlib.import_module("pydoc_data.topics").topics.values()
    except ImportError:
        return  # some distributions leave it out


def collect(limit_bytes: int | None = None) -> Corpus:
    """Read this interpreter's standard library; `limit_bytes` stops early (for a smoke test)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[bytes] = set()
    train: list[str] = []
    held_out: list[str] = []
    size = 0
    for text in _library_documents(root):
        text = text.replace("\r\n", "\n").expandtabs(8).strip("\n") + "\n"
        digest = hashlib.sha256(" ".join(text.split()).encode()).digest()
        if digest in seen or SEPARATOR in text or not _is_prose_or_code(text):
            continue
        seen.add(digest)
        (held_out if digest[0] < HELD_OUT_OF_256 else train).append(text)
        size += len(text)
        if limit_bytes is not None and size > limit_bytes and held_out:
            break
    return Corpus(train, held_out)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text has an encoding, and every id below `vocab_size` has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[SEPARATOR],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # In the file itself, so that every user of tokenizer.json starts a text as in training.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A",
        pair=f"{SEPARATOR} $A $B",
        special_tokens=[(SEPARATOR, SEPARATOR_ID)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SEPARATOR,
        eos_token=SEPARATOR,
        pad_token=SEPARATOR,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> TokenStream:
    """Tokenize the documents in a shuffled order; each begins with the separator."""
    order = np.random.default_rng(seed).permutation(len(texts))
    encodings = tokenizer.backend_tokenizer.encode_batch([texts[i] for i in order])
    tokens = np.concatenate([np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings])
    # The pre-tokenizer puts the last space of an indentation with the following word, and the
    # others with the newline. So a token of newlines only is followed by an unindented line.
    newlines = [i for t, i in tokenizer.get_vocab().items() if t and set(t) == {"Ċ"}]
    starts_line = np.isin(tokens[:-1], [SEPARATOR_ID, *newlines])
    starts = np.flatnonzero(starts_line & (tokens[1:] != SEPARATOR_ID)) + 1
    return TokenStream(torch.from_numpy(tokens), torch.from_numpy(starts))


def windows(
    stream: TokenStream, count: int, length: int, generator: torch.Generator
) -> torch.Tensor:
    """Random windows int64 [count, length], each the separator followed by text.

    Half of the windows start at a top-level line, as prompts do, the others anywhere, since
    otherwise the inside of a long class would never be seen. All begin with the separator, as
    prompts do.
    """
    last = len(stream.tokens) - length
    anywhere = torch.randint(0, last, (count,), generator=generator)
    lines = stream.starts[torch.randint(0, len(stream.starts), (count,), generator=generator)]
    at_line = torch.rand(count, generator=generator) < 0.5
    begin = torch.where(at_line, lines, anywhere).clamp(max=last)
    text = stream.tokens[begin[:, None] + torch.arange(length - 1)]  # [count, length - 1]
    return torch.cat([torch.full((count, 1), SEPARATOR_ID), text], dim=1)
