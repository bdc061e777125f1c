"""What choosing gamma for each round brings, by the clock.

Texts of three workloads, which a draft serves well, fairly and hardly at all, take turns, as
requests to a service do. Each is decoded with every fixed gamma, with gamma="auto", which has to
learn costs and acceptance meanwhile, with the schedule of Transformers and, so that the noise is
seen, plainly once more; in an order of its own (bench.core.runs), and always to the same text with
the same luck (`retold`). Then the fallback: what is lost to plain decoding with drafts that are
never worth their time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.corpus import collect
from runtime.text.engine import TextEngine

from ...core import machine
from ...core.clock import DISTURBED, Clock
from ...core.command import Results, Suite, bundle_option
from ...core.costs import acceptance, total
from ...core.fit import rounded
from ...core.prompts import Prompts
from ...core.runs import (
    WARM_UP,
    Run,
    Texts,
    Way,
    decode_all,
    disturbance,
    fresh,
    gain,
    load_pair,
    plain_options,
    quiet,
    warm_up,
)
from ...core.table import Column, Table, decimals, table_of
from .retold import retelling, story

AUTO, SCHEDULE, AGAIN, PLAIN = "auto", "transformers", "plain again", "0"
WITHOUT, FALLBACK = "gamma 4", "fallback"
NEAR, LOSS, NOISE = 0.95, 0.05, 0.02  # of the best fixed gamma; of plain decoding; of a total
GAMMA = 4  # that the fallback has to do with
ALL = "all, taking turns"


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
    """options: of the draft model."""

    name: str
    prompts: Sequence[Sequence[int]]
    options: Mapping[str, Any]


def workloads(engine: TextEngine, scale: PolicyScale) -> list[Load]:
    """Prompts that greedy decoding goes on with; held-out code; the same with a draft so hot that
    it guesses."""
    made = Prompts.of(engine.tokenizer, collect().held_out)
    tables, code = (made.many(kind, scale.texts, scale.prompt) for kind in ("table", "completion"))
    model = {"draft": "model", "temperature": 1.0}
    return [
        Load("tables, T=0", tables, {**model, "temperature": 0.0}),
        Load("code, T=1", code, model),
        Load("code, T=1, draft 3", code, {**model, "draft_temperature": 3.0}),
    ]


# The stream


def stream(
    engine: TextEngine, loads: Sequence[Load], scale: PolicyScale, clock: Clock
) -> dict[str, list[Mapping[str, Run]]]:
    """By workload the runs of each text."""
    fixed, sampler = retelling(engine)
    # Each policy has measured for itself alone.
    auto, schedule = fresh(fixed), fresh(fixed)
    made: dict[str, dict[str, Way]] = {}
    for load_ in loads:
        options, plain = load_.options, Way(fixed, plain_options(load_.options))
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


def outcome(texts: Texts[str], max_gamma: int) -> dict[str, Any]:
    """Of one workload, or of all as one stream, the object of the JSON line.

    speeds: over plain decoding, by way. alpha: of all fixed gammas. best: of the gammas, chosen
    with hindsight and therefore a little lucky. auto_of_best: auto's speed over that, and its
    standard error, of the clock and of which texts there are. noise: that of plain decoding against
    itself, of the clock alone.
    """
    gammas = [f"{gamma}" for gamma in range(max_gamma + 1)]
    drafting = [text[gamma] for text in texts for gamma in gammas[1:]]
    plain, auto = (total([text[way] for text in texts]) for way in (PLAIN, AUTO))
    speeds = {name: gain(texts, name, PLAIN).total for name in texts[0] if name != AGAIN}
    best = max(gammas, key=speeds.__getitem__)
    near = gain(texts, AUTO, best)
    return {
        "speeds": {name: rounded(speed) for name, speed in speeds.items()},
        "best": int(best),
        "auto_of_best": rounded(near.total),
        "auto_of_best_error": rounded(near.error),
        "noise": rounded(gain(texts, AGAIN, PLAIN).error),
        "plain_tokens_per_second": rounded(
            plain.round_tokens / sum(text[PLAIN].seconds for text in texts)
        ),
        "alpha": rounded(acceptance(drafting)),
        "auto_mean_gamma": rounded(auto.drafted / auto.rounds),
        "texts": len(texts),
        "lost": rounded(disturbance(texts)),
    }


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
        texts = quiet(
            [
                decode_all(ways, prompt, scale.long, seed, clock)
                for seed, prompt in enumerate(hopeless.prompts[: scale.fallback])
            ]
        )
        found[name] = {way: losses(texts, way) for way in (WITHOUT, FALLBACK, AUTO, AGAIN)}
    return found


def losses(texts: Texts[str], way: str) -> dict[str, float]:
    """loss: of all texts as one, the share of plain decoding's speed; worst: of a single text."""
    worst = min(text[PLAIN].seconds / text[way].seconds for text in texts)
    return {"loss": rounded(1 - gain(texts, way, PLAIN).total), "worst": rounded(1 - worst)}


# The run


def recorded(folder: str, scale: PolicyScale = FULL) -> dict[str, list[str]]:
    """By workload, of each text after its prompt whether a draft token would stand ("1"), by place:
    tests/support/acceptance.json, of 16 texts."""
    engine = load_pair(folder, 1)
    return {
        load_.name: [
            "".join("01"[stands] for stands in told.stands[len(prompt) :])
            for number, prompt in enumerate(load_.prompts)
            for told in [story(engine, prompt, scale.tokens, 3 * number + seed, load_.options)]
        ]
        for seed, load_ in enumerate(workloads(engine, scale))
    }


def run(folder: str, scale: PolicyScale, threads: int, clock: Clock) -> dict[str, Any]:
    """The JSON object. Raises OutriderError as `load_pair`."""
    clock.patience = scale.patience
    engine = load_pair(folder, threads)
    most = engine.decoder.max_gamma
    clock.note("the corpus of the bundled pair")
    loads = workloads(engine, scale)
    kept = {name: quiet(some) for name, some in stream(engine, loads, scale, clock).items()}
    outcomes = {name: outcome(some, most) for name, some in kept.items()}
    outcomes[ALL] = outcome([text for some in kept.values() for text in some], most)
    found = fallback(engine, loads, scale, clock)
    return {
        "bundle": engine.manifest.name,
        "machine": machine.describe(threads),
        "texts": scale.texts,
        "tokens": scale.tokens,
        "long": scale.long,
        "workloads": outcomes,
        "fallback": found,
        "goals": goals_of(outcomes, found),
    }


def goals_of(
    outcomes: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What the policies promise, and whether it held."""
    near = min(x["auto_of_best"] for name, x in outcomes.items() if name != ALL)
    mixed = outcomes[ALL]["auto_of_best"]
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
        ("auto_mean_gamma", "auto's gamma", TWO), ("auto_of_best", "auto/best", THREE),
        ("auto_of_best_error", "±", THREE), ("noise", "noise", "{:.1%}".format),
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
    lost: list[Column] = [("loss", "loss", share), ("worst", "of the worst text", share)]
    told: list[Column] = [
        ("measured", "measured", THREE), ("met", "met", lambda met: "yes" if met else "no"),
    ]  # fmt: skip
    noise = max(x["noise"] for x in results["workloads"].values())
    busy = f"The noise of a speed is {noise:.1%}: more texts, or a quieter machine, are needed."
    return [
        table_of("Speed over plain decoding, by gamma and policy", speeds, columns,
                 [busy] if noise > NOISE else []),
        table_of(f"Loss to plain decoding, texts of {results['long']} tokens", losses, lost),
        table_of("Goals", ((goal["goal"], goal) for goal in results["goals"]), told),
    ]  # fmt: skip


def heading(results: Results) -> str:
    """What the figures are of."""
    return (
        f"{machine.sentence(results['machine'])}; {results['texts']} texts of "
        f"{results['tokens']} tokens of each workload. * other processes took over 2 % of the time"
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
    options=bundle_option,
)
main = SUITE.main
