"""What choosing gamma for each round brings, by the clock.

Texts of three workloads, which a draft serves well, fairly and hardly at all, take turns, as
requests to a service do. Each is decoded with every fixed gamma, with gamma="auto", which has to
learn costs and acceptance meanwhile, with the schedule of Transformers and, so that the noise is
seen, plainly once more; in an order of its own (bench.core.runs), and always to the same text with
the same luck (`retold`). The bound of an oracle that drafts what will be accepted and no more is
computed from the rounds of the largest gamma. Then the fallback: what is lost to plain decoding
with drafts that are never worth their time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from models.corpus import collect
from runtime.text.engine import TextEngine
from runtime.theory import formulas as theory

from ...core import machine
from ...core.clock import DISTURBED, Clock
from ...core.command import Results, Suite
from ...core.costs import acceptance, of_rounds, oracle, total
from ...core.fit import rounded
from ...core.prompts import Prompts
from ...core.runs import (
    WARM_UP,
    Gain,
    Run,
    Texts,
    Way,
    decode_all,
    disturbance,
    fresh,
    gain,
    load_pair,
    quiet,
    warm_up,
)
from ...core.table import Column, Table, decimals, table_of
from .retold import retelling, story

AUTO, SCHEDULE, AGAIN, PLAIN = "auto", "transformers", "plain again", "0"
WITHOUT, FALLBACK = "gamma 4", "fallback"
NEAR, LOSS, NOISE = 0.95, 0.05, 0.02  # of the best fixed gamma; of plain decoding; of a total
GAMMA = 4  # that the fallback has to do with


@dataclass(frozen=True)
class PolicyScale:
    """texts: of a workload. fallback: of a draft, no more than of a workload. prompt, tokens, long:
    of a prompt, an output, one of the fallback's, which promises a share of 256 tokens. patience:
    seconds for disturbed texts.
    """

    texts: int
    prompt: int
    tokens: int
    fallback: int
    long: int
    patience: float


# Prompt, output and drafts fit 256 rows, so that a cache has one size throughout.
FULL = PolicyScale(50, 64, 160, 24, 256, 60)
QUICK = PolicyScale(3, 64, 96, 2, 128, 0)


@dataclass(frozen=True)
class Load:
    """options: of the draft model. plain: those of them that plain decoding has too."""

    name: str
    prompts: Sequence[Sequence[int]]
    temperature: float
    draft_temperature: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        tempered = {"draft_temperature": self.draft_temperature} if self.draft_temperature else {}
        return {"draft": "model", "temperature": self.temperature, **tempered}


def workloads(engine: TextEngine, scale: PolicyScale) -> list[Load]:
    """Prompts that greedy decoding goes on with; held-out code; the same with a draft so hot that
    it guesses."""
    made = Prompts.of(engine.tokenizer, collect().held_out)
    code = made.many("completion", scale.texts, scale.prompt)
    return [
        Load("tables, T=0", made.many("table", scale.texts, scale.prompt), 0.0),
        Load("code, T=1", code, 1.0),
        Load("code, T=1, draft 3", code, 1.0, 3.0),
    ]


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"gamma": 0, "temperature": options["temperature"]}


# The stream


@dataclass(frozen=True, slots=True)
class Told:
    """Of one workload, or of all as one stream. speeds: over plain decoding, by way.

    alpha: of all fixed gammas. best: of the gammas, chosen with hindsight and therefore a little
    lucky. near: auto's speed over that of the best, and its standard error, of the clock and of
    which texts there are. noise: that of plain decoding against itself, of the clock alone.
    oracle: as `costs.oracle`; None for a stream. texts, lost: as in `drafts.figures`.
    """

    speeds: Mapping[str, float]
    best: str
    near: Gain
    noise: float
    plain: float
    alpha: float
    gamma: float
    oracle: float | None
    formula: float | None
    costs: Mapping[str, Any] | None
    texts: int
    lost: float

    def json_object(self) -> dict[str, Any]:
        bounds = {"oracle": self.oracle, "oracle_formula": self.formula}
        return {
            "speeds": {name: rounded(speed) for name, speed in self.speeds.items()},
            "best": int(self.best),
            "auto_of_best": rounded(self.near.total),
            "auto_of_best_error": rounded(self.near.error),
            "noise": rounded(self.noise),
            "plain_tokens_per_second": rounded(self.plain),
            "alpha": rounded(self.alpha),
            "auto_mean_gamma": rounded(self.gamma),
            **{name: rounded(x) for name, x in bounds.items() if x is not None},
            **(self.costs or {}),
            "texts": self.texts,
            "lost": rounded(self.lost),
        }


def outcome(texts: Texts[str], max_gamma: int, *, one: bool) -> Told:
    """one: whether all texts are of one workload, and so have one acceptance and an oracle."""
    gammas = [f"{gamma}" for gamma in range(max_gamma + 1)]
    drafting = [text[gamma] for text in texts for gamma in gammas[1:]]
    plain, auto = [text[PLAIN] for text in texts], total([text[AUTO] for text in texts])
    alpha = acceptance(drafting)
    costs = of_rounds(plain, drafting, max_gamma) if one else None
    deepest = [text[gammas[-1]] for text in texts]
    seconds = sum(text[PLAIN].seconds for text in texts)
    speeds = {name: gain(texts, name, PLAIN).total for name in texts[0] if name != AGAIN}
    best = max(gammas, key=speeds.__getitem__)
    return Told(
        speeds=speeds,
        best=best,
        near=gain(texts, AUTO, best),
        noise=gain(texts, AGAIN, PLAIN).error,
        plain=sum(text[PLAIN].stats.round_tokens for text in texts) / seconds,
        alpha=alpha,
        gamma=auto.drafted / auto.rounds,
        oracle=oracle((x for text in deepest for x in text.rounds), costs) if costs else None,
        formula=theory.oracle(alpha, costs.draft) if costs else None,
        costs=costs.json_object() if costs else None,
        texts=len(texts),
        lost=disturbance(texts),
    )


def stream(
    engine: TextEngine, loads: Sequence[Load], scale: PolicyScale, clock: Clock
) -> dict[str, list[Mapping[str, Run]]]:
    """By workload the runs of each text."""
    fixed, sampler = retelling(engine)
    # Each policy has measured for itself alone.
    auto, schedule = fresh(fixed), fresh(fixed)
    made: dict[str, dict[str, Way]] = {}
    for load_ in loads:
        options = load_.options
        plain = Way(fixed, plain_options(options))
        ways = {PLAIN: plain, AGAIN: plain}
        for gamma in range(1, engine.decoder.max_gamma + 1):
            ways[f"{gamma}"] = Way(fixed, {**options, "gamma": gamma})
        ways[AUTO] = Way(auto, {**options, "gamma": AUTO})
        ways[SCHEDULE] = Way(schedule, {**options, "gamma": SCHEDULE})
        made[load_.name] = ways
        longest = max(WARM_UP, 2 * engine.decoder.max_gamma)
        sampler.story = story(engine, load_.prompts[0], longest, 0, options)
        warm_up(ways, load_.prompts[0])
    texts: dict[str, list[Mapping[str, Run]]] = {load_.name: [] for load_ in loads}
    begin = clock.seconds
    for number in range(scale.texts):
        left = (clock.seconds - begin) / max(1, number) * (scale.texts - number)
        to_go = f" | {left:.0f} s to go, then the fallback" if number else ""
        clock.note(f"text {number + 1} of {scale.texts} of each workload{to_go}")
        for seed, load_ in enumerate(loads, start=len(loads) * number):
            prompt = load_.prompts[number]
            sampler.story = story(engine, prompt, scale.tokens, seed, load_.options)
            runs = decode_all(made[load_.name], prompt, scale.tokens, seed, clock)
            texts[load_.name].append(runs)
    return texts


# The fallback


def fallback(
    engine: TextEngine, loads: Sequence[Load], scale: PolicyScale, clock: Clock
) -> dict[str, dict[str, Any]]:
    """By draft and way: what is lost to plain decoding, all texts as one, and of the worst text.

    loads: the one with the worst draft, which is tried as it is and with any token as the draft.
    """
    hopeless = loads[-1]
    found: dict[str, dict[str, Any]] = {}
    for name, options in {
        hopeless.name: hopeless.options,
        "random, T=1": {"draft": "random", "temperature": 1.0},
        "random, T=0": {"draft": "random", "temperature": 0.0},
    }.items():
        clock.note(f"fallback: {name}")
        gamma = min(GAMMA, engine.decoder.max_gamma)
        plain = Way(engine, plain_options(options))
        ways = {
            PLAIN: plain,
            AGAIN: plain,
            WITHOUT: Way(engine, {**options, "gamma": gamma}),
            FALLBACK: Way(fresh(engine), {**options, "gamma": gamma, "fallback": "auto"}),
            AUTO: Way(fresh(engine), {**options, "gamma": AUTO}),
        }
        warm_up(ways, hopeless.prompts[0])
        texts = [
            decode_all(ways, prompt, scale.long, seed, clock)
            for seed, prompt in enumerate(hopeless.prompts[: scale.fallback])
        ]
        shown = WITHOUT, FALLBACK, AUTO, AGAIN
        found[name] = {way: losses(quiet(texts), way) for way in shown}
    return found


def losses(texts: Texts[str], way: str) -> dict[str, float]:
    """loss: of all texts as one, the share of plain decoding's speed; worst: of a single text.
    overhead: what a round without drafts takes longer than in plain decoding, relative."""
    whole = gain(texts, way, PLAIN)
    worst = min(text[PLAIN].seconds / text[way].seconds for text in texts)
    found = {"loss": rounded(1 - whole.total), "worst": rounded(1 - worst)}
    plain, ours = (
        [x.seconds - x.catch_up for text in texts for x in text[name].rounds if x.gamma == 0]
        for name in (PLAIN, way)
    )
    if way in (FALLBACK, AUTO) and ours:
        found["overhead"] = rounded(median(ours) / median(plain) - 1)
    return found


# The run


def run(folder: str, scale: PolicyScale, threads: int, clock: Clock) -> dict[str, Any]:
    """The JSON object. Raises OutriderError as `load_pair`."""
    clock.patience = scale.patience
    engine = load_pair(folder, threads)
    most = engine.decoder.max_gamma
    clock.note("the corpus of the bundled pair")
    loads = workloads(engine, scale)
    texts = stream(engine, loads, scale, clock)
    kept = {name: quiet(some) for name, some in texts.items()}
    outcomes = {name: outcome(some, most, one=True) for name, some in kept.items()}
    mixed = [text for some in kept.values() for text in some]
    outcomes["all, taking turns"] = whole = outcome(mixed, most, one=False)
    found = fallback(engine, loads, scale, clock)
    return {
        "bundle": engine.manifest.name,
        "machine": machine.describe(threads),
        "texts": scale.texts,
        "tokens": scale.tokens,
        "long": scale.long,
        "workloads": {name: x.json_object() for name, x in outcomes.items()},
        "fallback": found,
        "goals": goals_of(outcomes, whole, found),
    }


def goals_of(
    outcomes: Mapping[str, Told], whole: Told, found: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What the policies promise, and whether it held."""
    near = rounded(min(x.near.total for x in outcomes.values() if x is not whole))
    mixed = rounded(whole.near.total)
    worst = max(ways[way]["loss"] for ways in found.values() for way in (FALLBACK, AUTO))
    return [
        {"goal": f"auto at least {NEAR} of the best gamma", "measured": near, "met": near >= NEAR},
        {"goal": "auto faster than any gamma on the stream", "measured": mixed, "met": mixed > 1},
        {"goal": f"a loss of at most {LOSS}", "measured": worst, "met": worst <= LOSS},
    ]


TWO, THREE = decimals(2), decimals(3)


def share(value: float) -> str:
    return f"{value:+.1%}"


def tables(results: Results) -> list[Table]:
    """Speeds over plain decoding by gamma and policy; losses of the fallback; goals."""
    names = next(iter(results["workloads"].values()))["speeds"]
    columns: list[Column] = [("alpha", "alpha", TWO), *((name, name, TWO) for name in names)]
    columns += [
        ("oracle", "oracle", TWO), ("auto_mean_gamma", "auto's gamma", TWO),
        ("auto_of_best", "auto/best", THREE), ("auto_of_best_error", "±", THREE),
        ("noise", "noise", "{:.1%}".format),
    ]  # fmt: skip
    speeds = (
        (name, {**x, **x["speeds"], "disturbed": x["lost"] > DISTURBED})
        for name, x in results["workloads"].items()
    )
    losses = (
        (f"{name}: {way}", values)
        for name, ways in results["fallback"].items()
        for way, values in ways.items()
    )
    lost: list[Column] = [("loss", "loss", share), ("worst", "of the worst text", share),
        ("overhead", "a round without drafts", share)]  # fmt: skip
    goals = ((goal["goal"], goal) for goal in results["goals"])
    told: list[Column] = [
        ("measured", "measured", THREE), ("met", "met", lambda met: "yes" if met else "no"),
    ]  # fmt: skip
    noise = max(x["noise"] for x in results["workloads"].values())
    busy = f"The noise of a speed is {noise:.1%}: more texts, or a quieter machine, are needed."
    return [
        table_of("Speed over plain decoding, by gamma and policy", speeds, columns,
                 [busy] if noise > NOISE else []),
        table_of(f"Loss to plain decoding, texts of {results['long']} tokens", losses, lost),
        table_of("Goals", goals, told),
    ]  # fmt: skip


def heading(results: Results) -> str:
    """What the figures are of."""
    return (
        f"{machine.sentence(results['machine'])}; {results['texts']} texts of "
        f"{results['tokens']} tokens of each workload. * other processes took over 2 % of the time"
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engines", default="build/demo", metavar="DIR", help="a bundle; default build/demo"
    )


SUITE = Suite(
    name="policies",
    about=__doc__ or "",
    quick="3 short texts of each workload: half a minute",
    measure=lambda args, clock: run(
        args.engines, QUICK if args.quick else FULL, args.threads, clock
    ),
    tables=tables,
    heading=heading,
    options=_options,
)
main = SUITE.main
