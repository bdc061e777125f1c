"""Measure what the bits of a target's logits depend on, on this processor.

`python -m runtime.backends.invariance FOLDER`, which a build runs, teacher-forces one text through
the target of a bundle in every way that decoding may choose, and prints an `Invariance` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from ..files.errors import CommandParser, OutriderError, run_command
from ..files.graphs import Pair
from ..files.machine import processor
from ..files.manifest import FIRST_ROWS, CallBits, Invariance, Manifest, read_bundle
from .bits import runs_measured_graph
from .engine import Features, Ids, Source
from .host import HostEngine
from .registry import host_engine

PREFIX, TOKENS, MIN_TOKENS = 32, 24, 8  # tokens of the text: given, compared at most and at least
SAMPLE_SECONDS = 0.6  # limit of sampling the text; all the rest takes about twenty times as long
SLOTS = 3  # of the engine with several
PROMPT_WIDTH = 16  # width of a prompt's chunks, compared with the engine's own chunks
# In half precision, narrower calls run kernels that change the bits of so few tokens that they may
# agree on the text. So they are not compared, and nothing is promised for them: in float16 calls of
# one token, in bfloat16 (AOTInductor) those of all steps.
_COMPARED_FROM = {"float16": 2, "bfloat16": PROMPT_WIDTH}

Digests = dict[int, list[bytes]]  # by the width of a call: digests of the logits of each slot


def measure(folder: Path, manifest: Manifest) -> Invariance:
    """Measure a bundle for the CPU. Opens one engine at a time. Raises OutriderError as `load`
    does."""
    pair = manifest.pair
    if not runs_measured_graph(pair.target):
        raise OutriderError("backend", "liboutrider is missing", "Build it: make plugins.")
    open_engine = partial(
        host_engine(manifest.backend), folder / "target", pair.target, max_outputs=TOKENS + 1
    )
    prefix_len, text = min(PREFIX, pair.max_len // 2), np.zeros(0, np.int64)
    sources = _sources(pair)
    results, digests_by_slots = [], []
    least = _COMPARED_FROM.get(pair.target.dtype, 1)
    for slots in (1, SLOTS):
        engine = _with_sources(open_engine(slots=slots), sources)
        if not len(text):
            text = sample_text(engine, pair.vocab_size, prefix_len, pair.max_len)
        replay_text = partial(replay, prefix_len=prefix_len)
        chunk, widest = engine.chunk, pair.max_gamma + 1
        digests = replay_text(engine, text[None], {*range(least, widest + 1), PROMPT_WIDTH, chunk})
        widths, other_widths = _largest_agreeing_group(digests)
        compared = {1, 2, widest} & set(widths)  # plain steps and rounds that may be promised
        neighbours = True
        if slots > 1:
            neighbour_texts = np.stack([text, text[::-1], text])
            neighbours = _digests_agree(digests, replay_text(engine, neighbour_texts, compared))
        if sources and pair.target.reads is None:
            engine.encode(0, [0] * min(4 * FIRST_ROWS, pair.max_len))
            engine = _with_sources(engine, sources)
        rows = _digests_agree(
            digests, replay_text(engine, text[None], compared, rows=4 * FIRST_ROWS)
        )
        del engine
        single = _with_sources(open_engine(slots=slots, threads=1), sources)
        threads = _digests_agree(digests, replay_text(single, text[None], {*compared, chunk}))
        del single
        results.append(CallBits(widths, other_widths, neighbours, threads, rows))
        digests_by_slots.append(digests)
    (one, several), (one_slot, several_slots) = results, digests_by_slots
    return Invariance(
        processor(), one, several, _digests_agree(one_slot, several_slots, one.widths)
    )


def _sources(pair: Pair) -> list[Source]:
    """Two sources: for the first and last slot, and for those between. Empty without an encoder."""
    if pair.start_ids is None:
        return []
    rng, longest, features = np.random.default_rng(1), pair.max_len, pair.target.reads
    if features:
        shape = features.feature_size, features.frames
        return [Features(rng.standard_normal(shape)) for _ in range(2)]
    return [rng.integers(0, pair.vocab_size, min(n, longest)).tolist() for n in (PREFIX, 3)]


def _with_sources(engine: HostEngine[Any], sources: list[Source]) -> HostEngine[Any]:
    """The engine, with a source in each slot if it has an encoder."""
    for slot in range(engine.slots if sources else 0):
        engine.encode(slot, sources[0 < slot < engine.slots - 1])
    return engine


def sample_text(engine: HostEngine[Any], vocab_size: int, prefix_len: int, max_len: int) -> Ids:
    """A text [L]: `prefix_len` random tokens, then tokens sampled at temperature 1."""
    rng = np.random.default_rng(0)
    text, began = rng.integers(0, vocab_size, prefix_len).tolist(), time.perf_counter()
    ids, start = text, 0
    while len(text) < min(prefix_len + TOKENS, max_len):
        if len(text) >= prefix_len + MIN_TOKENS and time.perf_counter() - began > SAMPLE_SECONDS:
            break
        logits = engine.forward(
            np.array([ids]), np.array([start]), np.array([len(text) - 1 - start])
        )
        row = logits[0, 0, :vocab_size].astype(np.float64)
        start = len(text)
        text.append(int((row + rng.gumbel(size=vocab_size)).argmax()))
        ids = [text[-1], 0]
    return np.array(text, np.int64)


def replay(
    engine: HostEngine[Any], texts: Ids, widths: Iterable[int], prefix_len: int, rows: int = 0
) -> Digests:
    """Digests of the logits of texts [B, L] in the first slots, after `prefix_len` tokens, in calls
    of each width.

    rows: number of rows that the slots have beforehand; 0 for as few as the text needs.
    """
    _feed(engine, texts, PROMPT_WIDTH, 0, prefix_len)
    if rows := min(rows, engine.capacity):
        engine.forward(np.zeros((1, 2), np.int64), np.array([rows - 2]), np.zeros(1, np.int64))
    # Widths of prompts start at the beginning, unless that would shrink the rows again. Texts with
    # a recurrent state always do, since the state has moved on.
    restart = engine.cached_rows.states is not None
    start_at = {
        width: 0 if restart or (width >= PROMPT_WIDTH and not rows) else prefix_len
        for width in sorted(widths)
    }
    return {
        width: _feed(engine, texts, width, begin, prefix_len) for width, begin in start_at.items()
    }


def _feed(
    engine: HostEngine[Any], texts: Ids, width: int, first: int, prefix_len: int
) -> list[bytes]:
    """Feed the tokens from `first` on, in calls that always have the full width. Returns for each
    slot a digest of the logits from token `prefix_len` on. Neighbours in the middle are at another
    position of their texts."""
    batch, length = texts.shape
    hashes = [hashlib.blake2b() for _ in texts]
    for begin in range(first, length, width):
        start = min(begin, engine.capacity - width)
        position = np.full(batch, start)
        position[1:-1] //= 2
        ids = np.zeros((batch, width), np.int64)
        for row, text, at in zip(ids, texts, position.tolist(), strict=True):
            piece = text[at : at + width]
            row[: len(piece)] = piece
        index = np.arange(max(begin, prefix_len), min(begin + width, length)) - start
        logits = engine.forward(ids, position, index if len(index) else np.zeros(1, np.int64))
        for digest, answer in zip(hashes, logits, strict=True):
            digest.update(answer.tobytes() if len(index) else b"")
    return [digest.digest() for digest in hashes]


def _digests_agree(alone: Digests, others: Digests, widths: Iterable[int] | None = None) -> bool:
    """Whether the first and the last slot of `others` have the same digests as slot 0 alone."""
    return all(
        alone[width][0] == others[width][0] == others[width][-1] for width in widths or others
    )


def _largest_agreeing_group(digests: Digests) -> tuple[list[int], list[int]]:
    """The largest group of widths that agree, of equally large groups the wider one; and the other
    widths."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for width, (digest, *_) in digests.items():
        groups[digest].append(width)
    largest = max(groups.values(), key=lambda widths: (len(widths), widths))
    return largest, [width for width in digests if width not in largest]


def exit_when_stdout_closes() -> None:
    """From here on, end this process once nobody reads stdout any more: the build was killed."""
    poller = select.poll()
    poller.register(1, 0)  # report only hang-ups

    def wait() -> None:
        poller.poll()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def main() -> int:
    exit_when_stdout_closes()
    parser = CommandParser(prog="python -m runtime.backends.invariance", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a bundle for the CPU")
    folder = parser.parse_args().folder
    print(json.dumps(asdict(measure(folder, read_bundle(folder, verify=False)))))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
