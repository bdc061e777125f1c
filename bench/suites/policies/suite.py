"""Measure the policies that choose gamma for each round.

Texts of three workloads, for which the draft is good, fair and almost useless, are interleaved like
requests to a service. Each is decoded with every fixed gamma, with gamma="auto", which has to learn
costs and acceptance meanwhile, with the schedule of Transformers and, to show the noise, plainly a
second time. The order changes from text to text (bench.core.runs); all ways generate the same text
with the same acceptance decisions (`retold`). Then the fallback: the loss compared with plain
decoding when drafts never pay off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.corpus import collect
from runtime.text.engine import TextEngine

from ...core import machine, runs
from ...core.clock import DISTURBED, Clock
from ...core.command import Results, Suite, bundle_option
from ...core.costs import plain_steps, total
from ...core.fit import rounded
from ...core.prompts import Prompts
from ...core.record import Run
from ...core.runs import Texts, Way, gain
from ...core.table import Column, Table, table_of
from .retold import retelling, story

AUTO, SCHEDULE, AGAIN, PLAIN = "auto", "transformers", "plain again", "0"
WITHOUT, FALLBACK = "gamma 4", "fallback"
# Goals: the share of the best fixed gamma's speed to reach, and the share of plain decoding's speed
# that may be lost. And the relative error of a speed above which a note is printed.
NEAR, LOSS, NOISE = 0.95, 0.05, 0.02
GAMMA = 4  # gamma of the fallback's drafts
ALL = "all, taking turns"


@dataclass(frozen=True)
class PolicyScale:
    """texts: number per workload. prompt, tokens: length of a prompt, of an output. fallback: texts
    per draft for the fallback, at most `texts`. long: tokens of each of these; the goal applies to
    256. patience: seconds for repeating disturbed texts."""

    texts: int
    prompt: int
    tokens: int
    fallback: int
    long: int
    patience: float


# Prompt, output and drafts fit into 256 rows, so that the size of a cache never changes.
FULL = PolicyScale(50, 64, 160, 24, 256, 60)
QUICK = PolicyScale(3, 64, 96, 2, 128, 0)


# A workload: prompts, and options for the draft model.
Load = tuple[Sequence[Sequence[int]], Mapping[str, Any]]


def workloads(engine: TextEngine, scale: PolicyScale) -> dict[str, Load]:
    """Tables that greedy decoding continues; held-out code; the same code with a draft temperature
    so high that its tokens are nearly random."""
    made = Prompts(engine.tokenizer, collect().held_out)
    tables, code = (made.many(kind, scale.texts, scale.prompt) for kind in ("table", "completion"))
    model = {"draft": "model", "temperature": 1.0}
    return {
        "tables, T=0": (tables, {**model, "temperature": 0.0}),
        "code, T=1": (code, model),
        "code, T=1, draft 3": (code, {**model, "draft_temperature": 3.0}),
    }


def stream(
    engine: TextEngine, loads: Mapping[str, Load], scale: PolicyScale, clock: Clock
) -> dict[str, list[Mapping[str, Run]]]:
    """The undisturbed texts of each workload with their runs; all ways generate the same text."""
    fixed, sampler = retelling(engine)
    auto, schedule = runs.fresh(fixed), runs.fresh(fixed)  # with separate measured costs
    most = engine.decoder.max_gamma
    made: dict[str, dict[str, Way]] = {}
    for name, (prompts, options) in loads.items():
        plain = Way(fixed, runs.plain_options(options))
        made[name] = {
            PLAIN: plain,
            AGAIN: plain,
            **{f"{gamma}": Way(fixed, {**options, "gamma": gamma}) for gamma in range(1, most + 1)},
            AUTO: Way(auto, {**options, "gamma": AUTO}),
            SCHEDULE: Way(schedule, {**options, "gamma": SCHEDULE}),
        }
        sampler.story = story(engine, prompts[0], max(runs.WARM_UP, 2 * most), 0, options)
        runs.warm_up(made[name], prompts[0])
    texts: dict[str, list[Mapping[str, Run]]] = {name: [] for name in loads}
    for number in range(scale.texts):
        clock.note(f"text {number + 1} of {scale.texts} of each workload")
        for seed, (name, (prompts, options)) in enumerate(loads.items(), len(loads) * number):
            prompt = prompts[number]
            sampler.story = story(engine, prompt, scale.tokens, seed, options)
            texts[name].append(runs.decode_all(made[name], prompt, scale.tokens, seed, clock))
    return {name: runs.quiet(some) for name, some in texts.items()}


def outcome(texts: Texts[str], max_gamma: int) -> dict[str, Any]:
    """The JSON object of one workload, or of all of them as one stream.

    speeds: relative to plain decoding, by way. alpha: over all fixed gammas. best: the best gamma,
    chosen with hindsight and therefore slightly too good. auto_of_best: auto's speed relative to
    it, with its standard error, from timing and from the choice of texts. noise: standard error of
    plain decoding compared with itself, from timing only.
    """
    gammas = [f"{gamma}" for gamma in range(max_gamma + 1)]
    drafting = total(text[gamma] for text in texts for gamma in gammas[1:])
    plain = total([text[PLAIN] for text in texts])
    speeds = {name: gain(texts, name, PLAIN).total for name in texts[0] if name != AGAIN}
    best = max(gammas, key=speeds.__getitem__)
    near = gain(texts, AUTO, best)
    seconds = sum(text[PLAIN].seconds for text in texts)
    return {
        "speeds": {name: rounded(speed) for name, speed in speeds.items()},
        "best": int(best),
        "auto_of_best": rounded(near.total),
        "auto_of_best_error": rounded(near.error),
        "noise": rounded(gain(texts, AGAIN, PLAIN).error),
        "plain_tokens_per_second": rounded(plain.round_tokens / seconds),
        "alpha": rounded(drafting.acceptance_rate),
        "lost": rounded(runs.disturbance(texts)),
    }


def fallback(
    engine: TextEngine, hopeless: Load, scale: PolicyScale, clock: Clock
) -> dict[str, dict[str, float]]:
    """The loss compared with plain decoding, by draft and way. Drafts: the workload's own, and
    random tokens."""
    prompts, own = hopeless
    gamma, found = min(GAMMA, engine.decoder.max_gamma), {}
    for name, options in {
        "code, T=1, draft 3": own,
        "random, T=1": {"draft": "random", "temperature": 1.0},
        "random, T=0": {"draft": "random", "temperature": 0.0},
    }.items():
        clock.note(f"fallback: {name}")
        plain = Way(engine, runs.plain_options(options))
        ways = {
            PLAIN: plain,
            AGAIN: plain,
            WITHOUT: Way(engine, {**options, "gamma": gamma}),
            FALLBACK: Way(runs.fresh(engine), {**options, "gamma": gamma, "fallback": "auto"}),
            AUTO: Way(runs.fresh(engine), {**options, "gamma": AUTO}),
        }
        runs.warm_up(ways, prompts[0])
        texts = [
            runs.decode_all(ways, prompt, scale.long, seed, clock)
            for seed, prompt in enumerate(prompts[: scale.fallback])
        ]
        kept = runs.quiet(texts)
        found[name] = {way: loss(kept, way) for way in (WITHOUT, FALLBACK, AUTO, AGAIN)}
    return found


def loss(texts: Texts[str], way: str) -> float:
    """The loss over all texts, as a share of plain decoding's speed."""
    return rounded(1 - gain(texts, way, PLAIN).total)


def recorded(folder: str, scale: PolicyScale = FULL) -> dict[str, list[str]]:
    """For each workload and text, whether a draft token would be accepted ("1") at each position
    after the prompt. tests/support/acceptance.json has these for 16 texts."""
    engine = runs.load_pair(folder, 1)
    return {
        name: [
            "".join("01"[stands] for stands in told.stands[len(prompt) :])
            for number, prompt in enumerate(prompts)
            for told in [story(engine, prompt, scale.tokens, 3 * number + seed, options)]
        ]
        for seed, (name, (prompts, options)) in enumerate(workloads(engine, scale).items())
    }


def run(folder: str, scale: PolicyScale, threads: int, clock: Clock) -> dict[str, Any]:
    """Measure everything; returns the JSON object. Raises OutriderError as `load_pair` does."""
    clock.patience = scale.patience
    engine = runs.load_pair(folder, threads)
    most = engine.decoder.max_gamma
    clock.note("reading the bundled pair's corpus")
    loads = workloads(engine, scale)
    kept = stream(engine, loads, scale, clock)
    kept[ALL] = [text for some in kept.values() for text in some]
    return {
        "bundle": engine.manifest.name,
        "machine": machine.describe(threads),
        "plain_width": engine.decoder.target.min_width,
        "texts": scale.texts,
        "tokens": scale.tokens,
        "long": scale.long,
        "workloads": {name: outcome(some, most) for name, some in kept.items()},
        "fallback": fallback(engine, [*loads.values()][-1], scale, clock),
    }


TWO, THREE = ",.2f", ",.3f"


def goals(results: Results) -> list[tuple[str, float, bool]]:
    """The goals of the policies, each with the measured value and whether it is met."""
    ratios = {name: x["auto_of_best"] for name, x in results["workloads"].items()}
    mixed, near = ratios.pop(ALL), min(ratios.values())
    ways = results["fallback"].values()
    lost = max(losses[way] for losses in ways for way in (FALLBACK, AUTO))
    return [
        (f"auto: at least {NEAR} of the best gamma's speed", near, near >= NEAR),
        ("auto: faster than any gamma when interleaved", mixed, mixed > 1),
        (f"auto and fallback: lose at most {LOSS}", lost, lost <= LOSS),
    ]


def tables(results: Results) -> list[Table]:
    """Tables of speeds relative to plain decoding by gamma and policy, of losses, and of goals."""
    loads = results["workloads"]
    columns: list[Column] = [
        ("alpha", "alpha", TWO), *((name, name, TWO) for name in loads[ALL]["speeds"]),
        ("auto_of_best", "auto/best", THREE), ("auto_of_best_error", "±", THREE),
        ("noise", "noise", ".1%"),
    ]  # fmt: skip
    speeds = (
        (name, {**x, **x["speeds"], "disturbed": x["lost"] > DISTURBED})
        for name, x in loads.items()
    )
    lost = (
        (f"{name}: {way}", {"loss": loss})
        for name, ways in results["fallback"].items()
        for way, loss in ways.items()
    )
    noise = max(x["noise"] for x in loads.values())
    busy = f"The noise of a speed is {noise:.1%}: use more texts or a quieter machine."
    told = [[goal, f"{value:.3f}", "yes" if met else "no"] for goal, value, met in goals(results)]
    return [
        table_of("Speed relative to plain decoding, by gamma and policy", speeds, columns,
                 [busy] if noise > NOISE else []),
        table_of(f"Loss compared with plain decoding, texts of {results['long']} tokens", lost,
                 [("loss", "loss", "+.1%")]),
        Table("Goals", ["", "measured", "met"], told),
    ]  # fmt: skip


def heading(results: Results) -> str:
    """The conditions of the figures."""
    return (
        f"{machine.sentence(results['machine'])}; {results['texts']} texts of "
        f"{results['tokens']} tokens per workload; {plain_steps(results['plain_width'])}. "
        "* other processes took over 2 % of the time"
    )


SUITE = Suite(
    name="policies",
    about=__doc__ or "",
    quick="3 short texts per workload: half a minute",
    measure=lambda args, clock: run(
        args.engines, QUICK if args.quick else FULL, args.threads, clock
    ),
    tables=tables,
    heading=heading,
    options=bundle_option,
)
main = SUITE.main
