"""python -m bench.policies: what choosing gamma for each round brings, by the clock.

Texts of three workloads, which a draft serves well, fairly and hardly at all, take turns, as
requests to a service do. Each is decoded with every fixed gamma, with gamma="auto", which has to
learn costs and acceptance meanwhile, with the schedule of Transformers and, so that the noise is
seen, plainly once more; in an order of its own (bench/ways.py), and always to the same text with
the same luck (bench/retold.py). Then the fallback: what is lost to plain decoding with drafts that
are never worth their time.

Progress goes to stderr, tables to stdout, one JSON line last.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.corpus import collect
from runtime.text.engine import TextEngine

from . import code_text, machine
from .estimates import rounded
from .retold import retelling, story
from .timing import DISTURBED
from .ways import (
    BUSY,
    WARM_UP,
    Clock,
    Run,
    Way,
    acceptance,
    command,
    decode_all,
    disturbance,
    fresh,
    gain,
    load_pair,
    plain_options,
    quiet,
    total,
    warm_up,
)

AUTO, SCHEDULE, AGAIN, PLAIN = "auto", "transformers", "plain again", "0"
WITHOUT, FALLBACK = "gamma 4", "fallback"
NEAR, LOSS, NOISE = 0.95, 0.05, 0.02  # of the best fixed gamma; of plain decoding; of a total
GAMMA = 4  # that the fallback has to do with
ALL = "all, taking turns"
Texts = Sequence[Mapping[str, Run]]


@dataclass(frozen=True)
class Scale:
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
FULL = Scale(50, 64, 160, 24, 256, 60)
QUICK = Scale(3, 64, 96, 2, 128, 0)


@dataclass(frozen=True)
class Workload:
    """options: of the draft model."""

    name: str
    prompts: Sequence[Sequence[int]]
    options: Mapping[str, Any]


def workloads(engine: TextEngine, scale: Scale) -> list[Workload]:
    """Prompts that greedy decoding goes on with; held-out code; the same with a draft so hot that
    it guesses."""
    tables = code_text.tables(engine.tokenizer, scale.texts, scale.prompt)
    code = code_text.held_out(engine.tokenizer, collect().held_out, scale.texts, scale.prompt)
    model = {"draft": "model", "temperature": 1.0}
    return [
        Workload("tables, T=0", tables, {**model, "temperature": 0.0}),
        Workload("code, T=1", code, model),
        Workload("code, T=1, draft 3", code, {**model, "draft_temperature": 3.0}),
    ]


# The stream


def stream(
    engine: TextEngine, loads: Sequence[Workload], scale: Scale, clock: Clock
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


def outcome(texts: Texts, max_gamma: int) -> dict[str, Any]:
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


def stream_lines(outcomes: Mapping[str, Mapping[str, Any]], max_gamma: int) -> Iterator[str]:
    """Columns: alpha, fixed gammas, the policies, auto against the best gamma."""
    gammas = [f"{gamma}" for gamma in range(max_gamma + 1)]
    head = "".join(f"{name:>6}" for name in gammas)
    yield f"{'':<19}alpha{head} |  auto (gamma)   HF | auto/best         noise"
    for name, x in outcomes.items():
        speeds = "".join(f"{x['speeds'][gamma]:6.2f}" for gamma in gammas)
        yield (
            f"{name:<19}{x['alpha']:5.2f}{speeds} | {x['speeds'][AUTO]:5.2f} "
            f"({x['auto_mean_gamma']:4.1f}) {x['speeds'][SCHEDULE]:4.2f} | "
            f"{x['auto_of_best']:9.3f} ± {x['auto_of_best_error']:.3f}  {x['noise']:.1%}"
        )


# The fallback


def fallback(
    engine: TextEngine, loads: Sequence[Workload], scale: Scale, clock: Clock
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


def losses(texts: Texts, way: str) -> dict[str, float]:
    """loss: of all texts as one, the share of plain decoding's speed; worst: of a single text."""
    worst = min(text[PLAIN].seconds / text[way].seconds for text in texts)
    return {"loss": rounded(1 - gain(texts, way, PLAIN).total), "worst": rounded(1 - worst)}


def fallback_lines(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[str]:
    names = "".join(f"{way:>17}" for way in next(iter(found.values())))
    yield f"{'loss (worst text)':<19}{names}"
    for name, ways in found.items():
        cells = "".join(f"{x['loss']:>+8.1%} ({x['worst']:+6.1%})" for x in ways.values())
        yield f"{name:<19}{cells}"


# The run


def recorded(folder: str, scale: Scale = FULL) -> dict[str, list[str]]:
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


def run(folder: str, scale: Scale, threads: int) -> dict[str, Any]:
    """The object of the JSON line. Raises OutriderError as `load_pair`."""
    clock = Clock(scale.patience)
    engine = load_pair(folder, threads)
    most = engine.decoder.max_gamma
    clock.note("the corpus of the bundled pair")
    loads = workloads(engine, scale)
    kept = {name: quiet(some) for name, some in stream(engine, loads, scale, clock).items()}
    outcomes = {name: outcome(some, most) for name, some in kept.items()}
    outcomes[ALL] = outcome([text for some in kept.values() for text in some], most)
    print(
        f"{scale.texts} texts of {scale.tokens} tokens of each workload; speeds over plain "
        "decoding, by gamma and policy"
    )
    print("\n".join(stream_lines(outcomes, most)), flush=True)
    found = fallback(engine, loads, scale, clock)
    print(f"\n{scale.fallback} texts of {scale.long} tokens")
    print("\n".join([*fallback_lines(found), ""]))
    goals = goals_of(outcomes, found)
    for goal in goals:
        print(f"{'met' if goal['met'] else 'NOT MET':<8}{goal['goal']}: {goal['measured']:.3f}")
    if (noise := max(x["noise"] for x in outcomes.values())) > NOISE:
        print(f"the noise of a speed is {noise:.1%}: more texts, or a quieter machine, are needed")
    if outcomes[ALL]["lost"] > DISTURBED:
        print(BUSY.format(outcomes[ALL]["lost"]))
    return {
        "benchmark": "policies",
        "bundle": engine.manifest.name,
        "machine": machine.describe(threads),
        "texts": scale.texts,
        "tokens": scale.tokens,
        "workloads": outcomes,
        "fallback": found,
        "goals": goals,
        "seconds": round(clock.seconds, 1),
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def measured(args: argparse.Namespace) -> dict[str, Any]:
        scale = QUICK if args.quick else FULL
        texts = args.texts or scale.texts
        scale = replace(scale, texts=texts, fallback=min(texts, scale.fallback))
        return run(args.engines, scale, args.threads)

    quick = "3 short texts of each workload: half a minute"
    return command("policies", __doc__, quick, "workload", measured, argv)


if __name__ == "__main__":
    raise SystemExit(main())
