"""A bundle on the CPU: its engines, samplers and rounds."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .backends.bits import Bits
from .backends.registry import host_engine
from .drafts.lookup import Corpus
from .drafts.tables import Tables
from .files.manifest import Manifest
from .files.texts import read_text
from .round import HostRounds
from .sampling import kernel
from .sampling.native import RoundSampler
from .sampling.reference import NumpySampler
from .sampling.sampler import Sampler
from .text.tokenizer import Tokenizer

logger = logging.getLogger("outrider")


def open_rounds(
    manifest: Manifest,
    folder: Path,
    slots: int,
    tokenizer: Tokenizer,
    bits: Bits,
    *,
    threads: int,
    table: str | Path | None,
    corpus: str | Path | None,
    reuse: bool,
) -> HostRounds:
    """Open both engines on the CPU, and the files that drafts read. The arguments are those of
    `bundle.load`. Raises OutriderError "backend", "memory", "option", "vocabulary"."""
    pair = manifest.pair
    tables = corpus_index = None
    if table is not None:
        tables = Tables.load(table, tokenizer.vocabulary(), pair.vocab_size)
    if corpus is not None:
        text = read_text(Path(corpus), f"the corpus {corpus}")
        corpus_index = Corpus(tokenizer.encode(text, add_special_tokens=False))
    engines = {
        role: host_engine(manifest.backend)(
            folder / role, facts, slots=slots,
            max_outputs=pair.max_gamma + 1,
            buffers=pair.max_gamma if role == "draft" else 1,
            threads=threads,
            # The draft's bitwise results do not matter: the target decides the text.
            min_width=bits.min_width if role == "target" else 1,
        )
        for role, facts in pair.models()
    }  # fmt: skip
    if pair.draft and pair.draft.encoder and pair.draft.encoder.shared:
        engines["draft"].read_states_of(engines["target"])
    if cause := kernel.unavailable_reason():
        logger.warning(
            "sampling in NumPy and attention over all rows, several times slower: %s", cause
        )
    threads = min(threads or os.cpu_count() or 1, kernel.MAX_THREADS)

    def sampler(vocab_size: int, draft_vocab_size: int | None) -> Sampler:
        if cause:
            return NumpySampler(vocab_size)
        return RoundSampler(vocab_size, pair.max_gamma, slots, threads, draft_vocab_size)

    shared_vocab_size = min(pair.draft.vocab_size, pair.vocab_size) if pair.draft else None
    return HostRounds(
        engines["target"], engines.get("draft"), sampler(pair.vocab_size, shared_vocab_size),
        None if shared_vocab_size is None else sampler(shared_vocab_size, None),
        tables, corpus_index, reuse=reuse,
    )  # fmt: skip
