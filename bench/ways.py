"""The same texts decoded in several ways, one after the other: for bench/drafts.py and
bench/policies.py.

A text's time is that of its rounds. The prompts' prefills, the draft's too, are left out; what a
draft has to read after rounds that went without it is not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from runtime.bundle import load
from runtime.costs import RoundCosts
from runtime.decoder import Decoder
from runtime.files.errors import CommandParser, OutriderError, run_command
from runtime.sequence import Rounds
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.formulas import expected_tokens

from . import machine
from .core.record import RoundRecord as Round
from .core.record import recording
from .estimates import ratio_estimates, rounded
from .timing import DISTURBED, sample

WARM_UP = 24  # tokens
BUSY = "the machine was busy: what is timed needs a quieter one (largest share of time lost {:.0%})"
PASSES = 3  # over a text that was disturbed
SEEN = 8  # rounds with so many drafts, for their median to count
Name = TypeVar("Name", bound=Hashable)


def command(
    name: str,
    about: str | None,
    quick: str,
    each: str,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    argv: Sequence[str] | None,
) -> int:
    """The command line of such a benchmark: its result is the last line of stdout.

    quick: what --quick means. each: of what --texts are so many.
    """
    parser = CommandParser(prog=f"python -m bench.{name}", description=about)
    add = parser.add_argument
    add("--engines", default="build/demo", metavar="DIR", help="a bundle; default build/demo")
    add("--quick", action="store_true", help=quick)
    add("--texts", type=int, metavar="N", help=f"of each {each}, instead")
    add("--threads", type=int, default=machine.physical_cores(), help="default: all cores")

    def work() -> int:
        args = parser.parse_args(argv)
        if (args.texts is not None and args.texts < 1) or args.threads < 1:
            raise OutriderError("option", "texts and threads must be at least 1", "See --help.")
        print(json.dumps(run(args)))
        return 0

    return run_command(work)


def load_pair(folder: str, threads: int) -> TextEngine:
    """A bundle on the CPU, for one text at a time. Raises OutriderError as `load`, and "option"."""
    engine = load(folder, slots=1, threads=threads, device="cpu", verify=False)
    if engine.decoder.draft is None:
        raise OutriderError("option", "the bundle has no draft", "Build it with DRAFT=<draft>.")
    return engine


@dataclass(frozen=True)
class Way:
    """How to decode. options: those of `Options`, but for the length and the seed."""

    engine: TextEngine
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One text. lost: the share of its time that went to other processes (bench/timing.py)."""

    rounds: tuple[Round, ...]
    stats: Stats
    lost: float

    @property
    def seconds(self) -> float:
        prompt = next((x.catch_up for x in self.rounds if x.catch_up), 0.0)
        return sum(x.seconds for x in self.rounds) - prompt


@dataclass
class Clock:
    """Notes on stderr with the time, and how many seconds texts may take that are decoded again
    because they were disturbed."""

    patience: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def note(self, text: str) -> None:
        print(f"[{self.seconds:5.0f} s] {text}", file=sys.stderr, flush=True)


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
    with recording(way.engine) as recorder:
        lost = sample(lambda: way.engine.generate(prompt, **options)).lost
        (text,) = recorder.take()
    return Run(text.rounds, text.stats, lost)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the same text without drafts."""
    return {"gamma": 0, "temperature": options["temperature"]}


def warm_up(ways: Mapping[Name, Way], prompt: Sequence[int]) -> None:
    """Calls of shapes that were not seen before cost more. What a policy learns is left to it."""
    for way in ways.values():
        gamma = way.options["gamma"]
        if isinstance(gamma, int) and way.options.get("fallback", "off") == "off":
            decode(way, prompt, max(WARM_UP, 2 * gamma), 0)


def decode_all(
    ways: Mapping[Name, Way], prompt: Sequence[int], tokens: int, seed: int, clock: Clock
) -> dict[Name, Run]:
    """Of one prompt, in an order of its own; if that was disturbed again, while there is patience.
    The least disturbed pass counts."""
    names, best, least = list(ways), {}, math.inf
    for again in range(PASSES):
        begin = time.perf_counter()
        order = np.random.default_rng(seed).permutation(len(names))
        runs = {names[i]: decode(ways[names[i]], prompt, tokens, seed) for i in order}
        worst = disturbance([runs])
        if worst < least:
            best, least = runs, worst
        if again:
            clock.patience -= time.perf_counter() - begin
        if worst <= DISTURBED or clock.patience <= 0:
            break
    return {name: best[name] for name in names}


# What runs come to


@dataclass(frozen=True, slots=True)
class Gain:
    """Times as fast as plain decoding.

    total: all texts as one. error: its standard error, relative, to which the texts' own
    differences add. median, low, high: of the texts, without a tenth at either end.
    """

    total: float
    median: float
    low: float
    high: float
    error: float

    def json_object(self) -> dict[str, Any]:
        return {name: rounded(value) for name, value in asdict(self).items()}


def disturbance(texts: Sequence[Mapping[Name, Run]]) -> float:
    """The largest share of its time that any of these runs lost."""
    return max(run.lost for text in texts for run in text.values())


def quiet(texts: Sequence[Mapping[Name, Run]]) -> list[Mapping[Name, Run]]:
    """The texts of which no way was disturbed; the less disturbed half where they are fewer."""
    by_loss = sorted(texts, key=lambda text: disturbance([text]))
    good = sum(disturbance([text]) <= DISTURBED for text in texts)
    return by_loss[: max(good, (len(texts) + 1) // 2)]


def gain(texts: Sequence[Mapping[Name, Run]], way: Name, plain: Name) -> Gain:
    """All texts have the same number of tokens; at least one of them."""
    ours = np.array([text[way].seconds for text in texts])
    theirs = np.array([text[plain].seconds for text in texts])
    (total,), (error,) = ratio_estimates(theirs[:, None], ours)
    ratios = sorted((theirs / ours).tolist())
    cut = len(ratios) // 10
    return Gain(total, statistics.median(ratios), ratios[cut], ratios[-1 - cut], error / total)


def costs_object(costs: RoundCosts) -> dict[str, Any]:
    return {
        "plain_ms": rounded(1e3 * costs.plain),
        "c": rounded(costs.draft),
        "verify": [rounded(x) for x in costs.verify],
    }


def costs_of(plain: Sequence[Run], runs: Sequence[Run], max_gamma: int) -> RoundCosts:
    """Medians: over the texts of a draft step's mean time, over the rounds of a verification's.

    plain: texts without drafts. A width that few rounds had does not count.
    """
    rests: dict[int, list[float]] = defaultdict(list)
    for x in (x for run in runs for x in run.rounds):
        rests[x.gamma].append(x.seconds - x.catch_up - x.draft)
    rests[0] = [statistics.median(x.seconds for run in plain for x in run.rounds)] * SEEN
    drafts = [run.stats.time_draft / run.stats.drafted for run in runs if run.stats.drafted]
    few = min(SEEN, max(map(len, rests.values())))
    seen = {k: statistics.median(times) for k, times in rests.items() if len(times) >= few}
    return RoundCosts.of(statistics.median(drafts) if drafts else 0.0, seen, max_gamma)


def predicted(alpha: float, runs: Sequence[Run], costs: RoundCosts) -> float:
    """Theorem 3.8 with measured costs, over the gammas that the rounds had: a lookup finds fewer
    tokens than it is asked for, and a text's end has no room for more."""
    gammas = [x.gamma for run in runs for x in run.rounds]
    return sum(expected_tokens(alpha, g) for g in gammas) / sum(costs.round(g) for g in gammas)


def total(runs: Sequence[Run]) -> Stats:
    stats = Stats()
    for run in runs:
        stats.add(run.stats)
    return stats


def acceptance(runs: Sequence[Run]) -> float:
    """alpha: accepted of examined."""
    stats = total(runs)
    return stats.accepted / max(1, stats.examined)
