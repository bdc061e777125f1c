"""What encoder-decoders are measured on: texts to sum up, texts to translate, and sounds.

What such a target says is in its weights (`core.pair.seq2seq`), and goes on from the token that its
output begins with. Half of what it will say is in a text that it sums up, in pieces, among tokens
drawn at random; nothing of it on purpose in one that it translates. So lookups find that much to
copy, and a sound, which is noise, has nothing for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.pair import SEQ2SEQ, Pair
from ...systems.protocol import Prompt
from .run import Job, System

GROUP = "Encoder-decoder"
PIECE = 16  # tokens that stand together as they will be said
SECONDS, FRAMES = 30, 3000  # of a sound: Whisper's


@dataclass(frozen=True)
class ReadingScale:
    """count: requests of a workload. summary, translation: (source, output) tokens; sound: output
    tokens."""

    count: int
    summary: tuple[int, int]
    translation: tuple[int, int]
    sound: int


FULL = ReadingScale(5, (400, 128), (30, 64), 128)
QUICK = ReadingScale(1, (400, 64), (30, 64), 64)


def jobs(
    scale: ReadingScale, pair: Pair, chosen: Sequence[System], temperatures: Sequence[float]
) -> list[Job]:
    """Of the shape that the pair was made in; its vocabulary and bands are the shape's."""
    from ...core.pair.seq2seq import says  # here: torch

    shape, rng = SEQ2SEQ[pair.shape], np.random.default_rng(1)
    bands, tokens = shape.common.get("num_mel_bins", 0), shape.common["vocab_size"]
    kinds = {"summary": scale.summary, "translation": scale.translation}
    if shape.sound:
        kinds, chosen = {"sound": (SECONDS, scale.sound)}, [s for s in chosen if s.mode != "lookup"]
    made = []
    for kind, (length, new_tokens) in kinds.items():
        for temperature in temperatures:  # each has sources of its own: none comes twice in a row
            firsts = rng.integers(1, tokens, scale.count).tolist()
            requests: list[list[Prompt]] = []
            for first in firsts:
                if shape.sound:
                    source: Prompt = rng.standard_normal((bands, FRAMES), np.float32)
                else:
                    said = says(shape, pair.target, first, new_tokens) if kind == "summary" else []
                    source = document(rng, said, length, tokens)
                requests.append([source])
            begins = [(*shape.begin, first) for first in firsts]
            name = f"{kind} {length}{'s' * shape.sound}+{new_tokens}"
            made.append(Job(GROUP, name, requests, new_tokens, temperature, chosen, begins))
    return made


def document(rng: np.random.Generator, said: Sequence[int], length: int, tokens: int) -> list[int]:
    """So many random ids; in place of some of them every other piece of what will be said, in any
    order."""
    ids: list[int] = rng.integers(1, tokens, length).tolist()
    pieces = [said[i : i + PIECE] for i in range(0, len(said), 2 * PIECE)]
    places = rng.permutation(length // PIECE)[: len(pieces)] * PIECE
    for place, piece in zip(places.tolist(), pieces, strict=True):
        ids[place : place + len(piece)] = piece
    return ids
