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
NEAR, LOSS, NOISE = 0.95, 0.05, 0.02  # of the best fixed gamma; of plain decoding; of a total
GAMMA = 4  # that the fallback has to do with
ALL = "all, taking turns"


@dataclass(frozen=True)
class PolicyScale:
    """texts: of a workload. prompt, tokens: of a prompt, of an output. fallback: texts of a draft,
    no more than of a workload. long: tokens of one of those; the promise is a share of 256.
    patience: seconds for disturbed texts."""

    texts: int
    prompt: int
    tokens: int
    fallback: int
    long: int
    patience: float


# Prompt, output and drafts fit 256 rows, so that a cache has one size throughout.
FULL = PolicyScale(50, 64, 160, 24, 256, 60)
QUICK = PolicyScale(3, 64, 96, 2, 128, 0)


# Of a workload: prompts, and the options of the draft model.
Load = tuple[Sequence[Sequence[int]], Mapping[str, Any]]


def workloads(engine: TextEngine, scale: PolicyScale) -> dict[str, Load]:
    """Prompts that greedy decoding goes on with; held-out code; the same with a draft so hot that
    it guesses."""
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
    """By workload the undisturbed texts, and the runs of each; all ways tell the same text."""
    fixed, sampler = retelling(engine)
    auto, schedule = runs.fresh(fixed), runs.fresh(fixed)  # each has measured for itself alone
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
    """Of one workload, or of all as one stream, the object of the JSON line.

    speeds: over plain decoding, by way. alpha: of all fixed gammas. best: of the gammas, chosen
    with hindsight and therefore a little lucky. auto_of_best: auto's speed over that, and its
    standard error, of the clock and of which texts there are. noise: that of plain decoding against
    itself, of the clock alone.
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
    """By draft and way what is lost to plain decoding: the workload's own draft, and any token as
    the draft."""
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
    """Of all texts as one, the share of plain decoding's speed."""
    return rounded(1 - gain(texts, way, PLAIN).total)


def recorded(folder: str, scale: PolicyScale = FULL) -> dict[str, list[str]]:
    """By workload, of each text after its prompt whether a draft token would stand ("1"), by place:
    tests/support/acceptance.json, of 16 texts."""
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
    """The JSON object. Raises OutriderError as `load_pair`."""
    clock.patience = scale.patience
    engine = runs.load_pair(folder, threads)
    most = engine.decoder.max_gamma
    clock.note("the corpus of the bundled pair")
    loads = workloads(engine, scale)
    kept = stream(engine, loads, scale, clock)
    kept[ALL] = [text for some in kept.values() for text in some]
    return {
        "bundle": engine.manifest.name,
        "machine": machine.describe(threads),
        "plain_width": engine.decoder.target.narrowest,
        "texts": scale.texts,
        "tokens": scale.tokens,
        "long": scale.long,
        "workloads": {name: outcome(some, most) for name, some in kept.items()},
        "fallback": fallback(engine, [*loads.values()][-1], scale, clock),
    }


TWO, THREE = ",.2f", ",.3f"


def goals(results: Results) -> list[tuple[str, float, bool]]:
    """What the policies promise, what was measured, and whether that holds."""
    ratios = {name: x["auto_of_best"] for name, x in results["workloads"].items()}
    mixed, near = ratios.pop(ALL), min(ratios.values())
    ways = results["fallback"].values()
    lost = max(losses[way] for losses in ways for way in (FALLBACK, AUTO))
    return [
        (f"auto at least {NEAR} of the best gamma", near, near >= NEAR),
        ("auto faster than any gamma on the stream", mixed, mixed > 1),
        (f"a loss of at most {LOSS}", lost, lost <= LOSS),
    ]


def tables(results: Results) -> list[Table]:
    """Speeds over plain decoding by gamma and policy; losses of the fallback; goals."""
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
    busy = f"The noise of a speed is {noise:.1%}: more texts, or a quieter machine, are needed."
    told = [[goal, f"{value:.3f}", "yes" if met else "no"] for goal, value, met in goals(results)]
    return [
        table_of("Speed over plain decoding, by gamma and policy", speeds, columns,
                 [busy] if noise > NOISE else []),
        table_of(f"Loss to plain decoding, texts of {results['long']} tokens", lost,
                 [("loss", "loss", "+.1%")]),
        Table("Goals", ["", "measured", "met"], told),
    ]  # fmt: skip


def heading(results: Results) -> str:
    """What the figures are of."""
    return (
        f"{machine.sentence(results['machine'])}; {results['texts']} texts of "
        f"{results['tokens']} tokens of each workload; {plain_steps(results['plain_width'])}. "
        "* other processes took over 2 % of the time"
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
