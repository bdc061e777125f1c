"""The workloads of encoder-decoders: texts to summarise, texts to translate, and sounds.

The output of such a target is determined by its weights (`core.pair.seq2seq`) and the token that it
begins with. A text to summarise contains half of the output, in pieces among random tokens; a text
to translate contains nothing of it, except by chance. This determines how much lookups can copy. A
sound is noise and has nothing to copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.pair import SEQ2SEQ, Pair
from ...systems.protocol import Prompt, Request
from .run import Job, System

GROUP = "Encoder-decoder"
PIECE = 16  # consecutive tokens of the output in a source
SECONDS, FRAMES = 30, 3000  # length of a sound, as for Whisper


@dataclass(frozen=True)
class Seq2SeqScale:
    """count: requests per workload. summary, translation: (source, output) tokens. sound: output
    tokens."""

    count: int
    summary: tuple[int, int]
    translation: tuple[int, int]
    sound: int


FULL = Seq2SeqScale(5, (400, 128), (30, 64), 128)
QUICK = Seq2SeqScale(1, (400, 64), (30, 64), 64)


def jobs(
    scale: Seq2SeqScale, pair: Pair, chosen: Sequence[System], temperatures: Sequence[float]
) -> list[Job]:
    """The jobs for a pair, with the vocabulary and the mel bands of its shape."""
    from ...core.pair.seq2seq import greedy_output  # imported here because it imports torch

    shape, rng = SEQ2SEQ[pair.shape], np.random.default_rng(1)
    bands, tokens = shape.common.get("num_mel_bins", 0), shape.common["vocab_size"]
    kinds = {"summary": scale.summary, "translation": scale.translation}
    if shape.is_audio:
        kinds, chosen = {"sound": (SECONDS, scale.sound)}, [s for s in chosen if s.mode != "lookup"]
    made = []
    for kind, (length, new_tokens) in kinds.items():
        for temperature in temperatures:  # each with its own sources, so that none is repeated
            requests = []
            for seed, first in enumerate(rng.integers(1, tokens, scale.count).tolist()):
                if shape.is_audio:
                    source: Prompt = rng.standard_normal((bands, FRAMES), np.float32)
                else:
                    output: list[int] = []
                    if kind == "summary":
                        output = greedy_output(shape, pair.target, first, new_tokens)
                    source = make_source(rng, output, length, tokens)
                begin = (*shape.begin, first)
                requests.append(
                    Request([source], new_tokens, temperature=temperature, seed=seed, begin=begin)
                )
            name = f"{kind} {length}{'s' * shape.is_audio}+{new_tokens}"
            made.append(Job(GROUP, name, requests, chosen))
    return made


def make_source(
    rng: np.random.Generator, output: Sequence[int], length: int, tokens: int
) -> list[int]:
    """`length` random ids, some of them replaced by every other piece of `output`, in
    random order."""
    ids: list[int] = rng.integers(1, tokens, length).tolist()
    pieces = [output[i : i + PIECE] for i in range(0, len(output), 2 * PIECE)]
    places = rng.permutation(length // PIECE)[: len(pieces)] * PIECE
    for place, piece in zip(places.tolist(), pieces, strict=True):
        ids[place : place + len(piece)] = piece
    return ids
