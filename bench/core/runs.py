"""Decoding the same texts in several ways in this process, and the speedups."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from runtime.backends.engine import Engine
from runtime.bundle import load
from runtime.calls import replace_unknown_ids
from runtime.decoder import Decoder
from runtime.files.errors import OutriderError
from runtime.sequence import Rounds
from runtime.text.engine import TextEngine
from runtime.text.options import Options

from .clock import LOST_LIMIT, Clock, order, select_undisturbed
from .fit import ratio_estimates, rounded
from .record import Run, record_run

WARM_UP = 24  # tokens
MAX_PASSES = 3  # over a text that was disturbed
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Way:
    """A way to decode. options: fields of `Options`, except length and seed."""

    engine: TextEngine
    options: Mapping[str, Any]


TextRuns = Sequence[Mapping[Name, Run]]  # for each text, one run per way


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for the same text without drafts."""
    return {"gamma": 0, "temperature": options["temperature"]}


def load_pair(folder: str, threads: int) -> TextEngine:
    """Load a bundle on the CPU, for one text at a time. Raises OutriderError as `load` does, and
    OutriderError("option") if there is no draft model."""
    engine = load(folder, slots=1, threads=threads, device="cpu", verify=False)
    if engine.decoder.draft is None:
        cause = "the bundle has no draft model"
        raise OutriderError("option", cause, "Build it with DRAFT=<draft>.")
    return engine


def fresh_engine(engine: TextEngine, rounds: Rounds | None = None) -> TextEngine:
    """A new engine with the same models, whose policies have not seen any costs yet.

    rounds: other rounds on these models; None for the engine's own. Engines that share models must
    decode one text at a time.
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


def text_logits(
    engine: TextEngine, model: Engine, ids: Sequence[int]
) -> Iterator[npt.NDArray[np.float32]]:
    """The logits [V] of one of the engine's models after each token of a text. V: the pair's."""
    width, vocab_size = engine.decoder.max_gamma, engine.decoder.vocab_size
    for begin in range(0, len(ids), width):
        part = np.array([replace_unknown_ids(model, ids[begin : begin + width])])
        (rows,) = model.forward(part, np.array([begin]), np.arange(part.shape[1]))
        yield from rows[:, :vocab_size].copy()


def decode(way: Way, prompt: Sequence[int], tokens: int, seed: int) -> Run:
    """Decode exactly `tokens` tokens; end-of-text tokens are ignored."""
    options = Options(**way.options, max_new_tokens=tokens, seed=seed, ignore_eos=True)
    return record_run(way.engine.decoder, way.engine.request(prompt, options))


def warm_up(ways: Mapping[Name, Way], prompt: Sequence[int]) -> None:
    """Decode a short text in each way, because the first call of a shape takes longer. Ways whose
    policy learns costs are skipped."""
    for way in ways.values():
        gamma = way.options["gamma"]
        if isinstance(gamma, int) and way.options.get("fallback", "off") == "off":
            decode(way, prompt, max(WARM_UP, 2 * gamma), 0)


def decode_all(
    ways: Mapping[Name, Way], prompt: Sequence[int], tokens: int, seed: int, clock: Clock
) -> dict[Name, Run]:
    """One run of each way on one prompt, in an order that depends on the seed (`clock.order`).

    A pass that other processes disturbed is repeated while the clock has patience. The least
    disturbed pass is returned.
    """
    best: dict[Name, Run] = {}
    lowest = math.inf
    for repeat in range(MAX_PASSES):
        begin = time.perf_counter()
        runs = {name: decode(ways[name], prompt, tokens, seed) for name in order(list(ways), seed)}
        worst = disturbance([runs])
        if worst < lowest:
            best, lowest = runs, worst
        if repeat:
            clock.patience -= time.perf_counter() - begin
        if worst <= LOST_LIMIT or clock.patience <= 0:
            break
    return {name: best[name] for name in ways}


@dataclass(frozen=True, slots=True)
class Speedup:
    """Speedup over plain decoding.

    total: speedup over all texts together. error: its relative standard error, which includes the
    differences between texts. median: median over texts.
    """

    total: float
    median: float
    error: float

    def json_object(self) -> dict[str, Any]:
        return {name: rounded(value) for name, value in asdict(self).items()}


def disturbance(texts: TextRuns[Any]) -> float:
    """The largest share of time that any of these runs lost to other processes."""
    return max(run.lost for text in texts for run in text.values())


def undisturbed_texts(texts: TextRuns[Name]) -> list[Mapping[Name, Run]]:
    """The texts with no disturbed run; if these are fewer than half, the less disturbed half."""
    return select_undisturbed(texts, lambda text: disturbance([text]), (len(texts) + 1) // 2)


def measured_speedup(texts: TextRuns[Name], way: Name, plain: Name) -> Speedup:
    """The speedup of `way` over `plain`. There must be at least one text; all texts have the same
    number of tokens."""
    seconds = np.array([text[way].seconds for text in texts])
    plain_seconds = np.array([text[plain].seconds for text in texts])
    (total,), (error,) = ratio_estimates(plain_seconds[:, None], seconds)
    return Speedup(total, statistics.median((plain_seconds / seconds).tolist()), error / total)
