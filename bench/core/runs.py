"""The same texts decoded in several ways by engines in this process, and what that gains."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from runtime.bundle import load
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.sequence import Rounds
from runtime.text.engine import TextEngine

from .clock import DISTURBED, Clock, order, undisturbed
from .fit import ratio_estimates, rounded
from .record import Run, recorded

WARM_UP = 24  # tokens
PASSES = 3  # over a text that was disturbed
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Way:
    """How to decode. options: those of `Options`, but for the length and the seed."""

    engine: TextEngine
    options: Mapping[str, Any]


Texts = Sequence[Mapping[Name, Run]]  # of each text, a run of every way


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the same text without drafts."""
    return {"gamma": 0, "temperature": options["temperature"]}


def load_pair(folder: str, threads: int) -> TextEngine:
    """A bundle on the CPU, for one text at a time. Raises OutriderError as `load`, and "option"."""
    engine = load(folder, slots=1, threads=threads, device="cpu", verify=False)
    if engine.decoder.draft is None:
        cause = "the bundle has no draft model"
        raise OutriderError("option", cause, "Build it with DRAFT=<draft>.")
    return engine


def fresh(engine: TextEngine, rounds: Rounds | None = None) -> TextEngine:
    """The same models behind a decoder whose policies have seen no costs.

    rounds: other ones on these models; None for the engine's own. One text at a time, of all that
    share them.
    """
    old, pair = engine.decoder, engine.manifest.pair
    decoder = Decoder(
        rounds or old.rounds,
        vocab_size=pair.vocab_size,
        max_len=old.max_len,
        max_gamma=old.max_gamma,
        draft_max_len=old.draft_max_len,
    )
    return TextEngine(engine.manifest, engine.tokenizer, decoder, engine.memory)


def decode(way: Way, prompt: Sequence[int], tokens: int, seed: int) -> Run:
    """Exactly `tokens` tokens: an end of the text counts as any other token."""
    options = {**way.options, "max_new_tokens": tokens, "seed": seed, "ignore_eos": True}
    return recorded(way.engine, lambda: way.engine.generate(prompt, **options))


def warm_up(ways: Mapping[Name, Way], prompt: Sequence[int]) -> None:
    """Calls of shapes that were not seen before cost more. What a policy learns is left to it."""
    for way in ways.values():
        gamma = way.options["gamma"]
        if isinstance(gamma, int) and way.options.get("fallback", "off") == "off":
            decode(way, prompt, max(WARM_UP, 2 * gamma), 0)


def decode_all(
    ways: Mapping[Name, Way], prompt: Sequence[int], tokens: int, seed: int, clock: Clock
) -> dict[Name, Run]:
    """A run of each way on one prompt, in an order of its own (`clock.order` of the seed).

    If other processes disturbed that it is done again, while the clock has patience. The least
    disturbed pass counts.
    """
    best: dict[Name, Run] = {}
    least = math.inf
    for again in range(PASSES):
        begin = time.perf_counter()
        runs = {name: decode(ways[name], prompt, tokens, seed) for name in order(list(ways), seed)}
        worst = disturbance([runs])
        if worst < least:
            best, least = runs, worst
        if again:
            clock.patience -= time.perf_counter() - begin
        if worst <= DISTURBED or clock.patience <= 0:
            break
    return {name: best[name] for name in ways}


@dataclass(frozen=True, slots=True)
class Gain:
    """Times as fast as plain decoding.

    total: all texts as one. error: its standard error, relative, to which the texts' own
    differences add. median: of the texts.
    """

    total: float
    median: float
    error: float

    def json_object(self) -> dict[str, Any]:
        return {name: rounded(value) for name, value in asdict(self).items()}


def disturbance(texts: Texts[Any]) -> float:
    """The largest share of its time that any of these runs lost."""
    return max(run.lost for text in texts for run in text.values())


def quiet(texts: Texts[Name]) -> list[Mapping[Name, Run]]:
    """The texts of which no way was disturbed; the less disturbed half where they are fewer."""
    return undisturbed(texts, lambda text: disturbance([text]), (len(texts) + 1) // 2)


def gain(texts: Texts[Name], way: Name, plain: Name) -> Gain:
    """Of at least one text; all have the same number of tokens."""
    ours = np.array([text[way].seconds for text in texts])
    theirs = np.array([text[plain].seconds for text in texts])
    (total,), (error,) = ratio_estimates(theirs[:, None], ours)
    return Gain(total, statistics.median((theirs / ours).tolist()), error / total)
