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
from ..files.machine import processor
from ..files.manifest import FIRST_ROWS, CallBits, Invariance, Manifest, Pair, read_bundle
from .bits import reproducible
from .engine import Features, Ids, Source
from .host import HostEngine
from .registry import host_engine

PREFIX, TOKENS, FEWEST = 32, 24, 8  # tokens of the text: given, compared at most and at least
SECONDS = 0.6  # time limit of sampling the text; all the rest takes about twenty times as long
SLOTS = 3  # of the engine with several
PROMPT = 16  # width of a prompt's chunks, compared with the engine's own chunks

Digests = dict[int, list[bytes]]  # by the width of a call: digests of the logits of each slot


def measure(folder: Path, manifest: Manifest) -> Invariance:
    """Measure a bundle for the CPU. Opens one engine at a time. Raises OutriderError as `load`
    does."""
    pair = manifest.pair
    if not reproducible(pair.target):
        raise OutriderError("backend", "liboutrider is missing", "Build it: make plugins.")
    engine_of = partial(
        host_engine(manifest.backend), folder / "target", pair.target, widest=TOKENS + 1
    )
    given, text = min(PREFIX, pair.max_len // 2), np.zeros(0, np.int64)
    sources = _sources(pair)
    found, said = [], []
    for slots in (1, SLOTS):
        engine = _reading(engine_of(slots=slots), sources)
        if not len(text):
            text = sample(engine, pair.vocab_size, given, pair.max_len)
        say = partial(replay, given=given)
        chunk, widest = engine.chunk, pair.max_gamma + 1
        ways = say(engine, text[None], {*range(1, widest + 1), PROMPT, chunk})
        widths, others = _alike(ways)
        looked = {1, 2, widest} & set(widths)  # plain steps and rounds that may be promised
        neighbours = True
        if slots > 1:
            crowd = np.stack([text, text[::-1], text])
            neighbours = _agree(ways, say(engine, crowd, looked))
        if sources and pair.target.reads is None:
            engine.encode(0, [0] * min(4 * FIRST_ROWS, pair.max_len))
            engine = _reading(engine, sources)
        rows = _agree(ways, say(engine, text[None], looked, rows=4 * FIRST_ROWS))
        del engine
        single = _reading(engine_of(slots=slots, threads=1), sources)
        threads = _agree(ways, say(single, text[None], {*looked, chunk}))
        del single
        found.append(CallBits(widths, others, neighbours, threads, rows))
        said.append(ways)
    (one, several), (alone, among) = found, said
    return Invariance(processor(), one, several, _agree(alone, among, one.widths))


def _sources(pair: Pair) -> list[Source]:
    """Two sources: for the first and last slot, and for those between. Empty without an encoder."""
    if pair.start_ids is None:
        return []
    rng, longest, features = np.random.default_rng(1), pair.max_len, pair.target.reads
    if features:
        shape = features.feature_size, features.frames
        return [Features(rng.standard_normal(shape)) for _ in range(2)]
    return [rng.integers(0, pair.vocab_size, min(n, longest)).tolist() for n in (PREFIX, 3)]


def _reading(engine: HostEngine[Any], sources: list[Source]) -> HostEngine[Any]:
    """The engine, with a source in each slot if it has an encoder."""
    for slot in range(engine.slots if sources else 0):
        engine.encode(slot, sources[0 < slot < engine.slots - 1])
    return engine


def sample(engine: HostEngine[Any], vocab_size: int, given: int, max_len: int) -> Ids:
    """A text [L]: `given` random tokens, then tokens sampled from the model at temperature 1."""
    rng = np.random.default_rng(0)
    text, began = rng.integers(0, vocab_size, given).tolist(), time.perf_counter()
    ids, start = text, 0
    while len(text) < min(given + TOKENS, max_len):
        if len(text) >= given + FEWEST and time.perf_counter() - began > SECONDS:
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
    engine: HostEngine[Any], texts: Ids, widths: Iterable[int], given: int, rows: int = 0
) -> Digests:
    """Digests of the logits of texts [B, L] in the first slots, after the `given` tokens, in calls
    of each width.

    rows: number of rows that the slots have beforehand; 0 for as few as the text needs.
    """
    _feed(engine, texts, PROMPT, 0, given)
    if rows := min(rows, engine.capacity):
        engine.forward(np.zeros((1, 2), np.int64), np.array([rows - 2]), np.zeros(1, np.int64))
    # Widths of prompts start at the beginning, unless that would shrink the rows again. Texts with
    # a recurrent state always do, since the state has moved on.
    anew = engine.held.states is not None
    since = {
        width: 0 if anew or (width >= PROMPT and not rows) else given for width in sorted(widths)
    }
    return {width: _feed(engine, texts, width, begin, given) for width, begin in since.items()}


def _feed(engine: HostEngine[Any], texts: Ids, width: int, since: int, given: int) -> list[bytes]:
    """Feed the tokens from `since` on, in calls that always have the full width. Returns for each
    slot a digest of the logits from token `given` on. Neighbours in the middle are at another
    position of their texts."""
    batch, length = texts.shape
    found = [hashlib.blake2b() for _ in texts]
    for begin in range(since, length, width):
        start = min(begin, engine.capacity - width)
        position = np.full(batch, start)
        position[1:-1] //= 2
        ids = np.zeros((batch, width), np.int64)
        for row, text, at in zip(ids, texts, position.tolist(), strict=True):
            piece = text[at : at + width]
            row[: len(piece)] = piece
        asked = np.arange(max(begin, given), min(begin + width, length)) - start
        logits = engine.forward(ids, position, asked if len(asked) else np.zeros(1, np.int64))
        for digest, answer in zip(found, logits, strict=True):
            digest.update(answer.tobytes() if len(asked) else b"")
    return [digest.digest() for digest in found]


def _agree(alone: Digests, others: Digests, widths: Iterable[int] | None = None) -> bool:
    """Whether the first and the last slot of `others` have the same digests as slot 0 alone."""
    return all(
        alone[width][0] == others[width][0] == others[width][-1] for width in widths or others
    )


def _alike(ways: Digests) -> tuple[list[int], list[int]]:
    """The largest group of widths that agree, of equally large groups the wider one; and the other
    widths."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for width, (digest, *_) in ways.items():
        groups[digest].append(width)
    best = max(groups.values(), key=lambda widths: (len(widths), widths))
    return best, [width for width in ways if width not in best]


def end_unheard() -> None:
    """From here on, end this process once nobody reads stdout any more: the build was killed."""
    reader = select.poll()
    reader.register(1, 0)  # report only hang-ups

    def wait() -> None:
        reader.poll()
        os._exit(1)

    Thread(target=wait, daemon=True).start()


def main() -> int:
    end_unheard()
    parser = CommandParser(prog="python -m runtime.backends.invariance", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of a bundle for the CPU")
    place = parser.parse_args().folder
    print(json.dumps(asdict(measure(place, read_bundle(place, verify=False)))))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
