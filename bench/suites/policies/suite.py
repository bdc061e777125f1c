"""Measure the policies that choose gamma for each round.

Texts of three workloads, for which the draft is good, fair and almost useless, are interleaved like
requests to a service. Each is decoded with every fixed gamma, with gamma="auto", which has to learn
costs and acceptance meanwhile, with the schedule of Transformers and, to show the noise, plainly a
second time. The order changes from text to text (bench.core.runs); all ways generate the same text
with the same acceptance decisions (`replay`). Then the fallback: the loss compared with plain
decoding when drafts never pay off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.corpus import collect
from runtime.stats import Stats
from runtime.text.engine import TextEngine

from ...core import machine, runs
from ...core.clock import LOST_LIMIT, Clock
from ...core.command import Results, Suite, bundle_option
from ...core.costs import describe_plain_steps
from ...core.fit import rounded
from ...core.prompts import Prompts
from ...core.record import Run
from ...core.runs import TextRuns, Way, measured_speedup
from ...core.table import Column, Table, make_table
from .replay import replaying_engine, sample_text

AUTO, SCHEDULE, PLAIN_REPEAT, PLAIN = "auto", "transformers", "plain again", "0"
FIXED_GAMMA, FALLBACK = "gamma 4", "fallback"
# Goals: the share of the best fixed gamma's speed to reach, and the share of plain decoding's speed
# that may be lost. And the relative error of a speed above which a note is printed.
MIN_SHARE, MAX_LOSS, MAX_NOISE = 0.95, 0.05, 0.02
FALLBACK_GAMMA = 4  # gamma of the fallback's drafts
ALL = "all, taking turns"


@dataclass(frozen=True)
class PolicyScale:
    """texts: number per workload. prompt, tokens: length of a prompt, of an output. fallback: texts
    per draft for the fallback, at most `texts`. fallback_tokens: tokens of each of these; the goal
    applies to 256. patience: seconds for repeating disturbed texts."""

    texts: int
    prompt: int
    tokens: int
    fallback: int
    fallback_tokens: int
    patience: float


# Prompt, output and drafts fit into 256 rows, so that the size of a cache never changes.
FULL = PolicyScale(50, 64, 160, 24, 256, 60)
QUICK = PolicyScale(3, 64, 96, 2, 128, 0)


# A workload: prompts, and options for the draft model.
Workload = tuple[Sequence[Sequence[int]], Mapping[str, Any]]


def make_workloads(engine: TextEngine, scale: PolicyScale) -> dict[str, Workload]:
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


def decode_workloads(
    engine: TextEngine, workloads: Mapping[str, Workload], scale: PolicyScale, clock: Clock
) -> dict[str, list[Mapping[str, Run]]]:
    """The undisturbed texts of each workload with their runs; all ways generate the same text."""
    fixed, sampler = replaying_engine(engine)
    auto, schedule = (runs.fresh_engine(fixed) for _ in range(2))  # each measures its own costs
    max_gamma = engine.decoder.max_gamma
    ways: dict[str, dict[str, Way]] = {}
    for name, (prompts, options) in workloads.items():
        plain = Way(fixed, runs.plain_options(options))
        ways[name] = {
            PLAIN: plain,
            PLAIN_REPEAT: plain,
            **{
                f"{gamma}": Way(fixed, {**options, "gamma": gamma})
                for gamma in range(1, max_gamma + 1)
            },
            AUTO: Way(auto, {**options, "gamma": AUTO}),
            SCHEDULE: Way(schedule, {**options, "gamma": SCHEDULE}),
        }
        sampler.text = sample_text(engine, prompts[0], max(runs.WARM_UP, 2 * max_gamma), 0, options)
        runs.warm_up(ways[name], prompts[0])
    texts: dict[str, list[Mapping[str, Run]]] = {name: [] for name in workloads}
    for number in range(scale.texts):
        clock.note(f"text {number + 1} of {scale.texts} of each workload")
        for seed, (name, (prompts, options)) in enumerate(
            workloads.items(), len(workloads) * number
        ):
            prompt = prompts[number]
            sampler.text = sample_text(engine, prompt, scale.tokens, seed, options)
            texts[name].append(runs.decode_all(ways[name], prompt, scale.tokens, seed, clock))
    return {name: runs.undisturbed_texts(some) for name, some in texts.items()}


def summarise(texts: TextRuns[str], max_gamma: int) -> dict[str, Any]:
    """The JSON object of one workload, or of all of them as one stream.

    speeds: relative to plain decoding, by way. alpha: over all fixed gammas. best: the best gamma,
    chosen with hindsight and therefore slightly too good. auto_of_best: auto's speed relative to
    it, with its standard error, from timing and from the choice of texts. noise: standard error of
    plain decoding compared with itself, from timing only.
    """
    gammas = [f"{gamma}" for gamma in range(max_gamma + 1)]
    drafting = Stats.total(text[gamma].stats for text in texts for gamma in gammas[1:])
    names = [name for name in texts[0] if name != PLAIN_REPEAT]
    speeds = {name: measured_speedup(texts, name, PLAIN).total for name in names}
    best = max(gammas, key=speeds.__getitem__)
    near = measured_speedup(texts, AUTO, best)
    return {
        "speeds": {name: rounded(speed) for name, speed in speeds.items()},
        "best": int(best),
        "auto_of_best": rounded(near.total),
        "auto_of_best_error": rounded(near.total * near.error),
        "noise": rounded(measured_speedup(texts, PLAIN_REPEAT, PLAIN).error),
        "alpha": rounded(drafting.acceptance_rate),
        "lost": rounded(runs.disturbance(texts)),
    }


def measure_fallback(
    engine: TextEngine, workload: Workload, scale: PolicyScale, clock: Clock
) -> dict[str, dict[str, float]]:
    """The loss compared with plain decoding, by draft and way. Drafts: the workload's own, and
    random tokens."""
    prompts, own = workload
    gamma, losses = min(FALLBACK_GAMMA, engine.decoder.max_gamma), {}
    for name, options in {
        "code, T=1, draft 3": own,
        "random, T=1": {"draft": "random", "temperature": 1.0},
        "random, T=0": {"draft": "random", "temperature": 0.0},
    }.items():
        clock.note(f"fallback: {name}")
        plain = Way(engine, runs.plain_options(options))
        ways = {
            PLAIN: plain,
            PLAIN_REPEAT: plain,
            FIXED_GAMMA: Way(engine, {**options, "gamma": gamma}),
            FALLBACK: Way(
                runs.fresh_engine(engine), {**options, "gamma": gamma, "fallback": "auto"}
            ),
            AUTO: Way(runs.fresh_engine(engine), {**options, "gamma": AUTO}),
        }
        runs.warm_up(ways, prompts[0])
        texts = [
            runs.decode_all(ways, prompt, scale.fallback_tokens, seed, clock)
            for seed, prompt in enumerate(prompts[: scale.fallback])
        ]
        undisturbed = runs.undisturbed_texts(texts)
        losses[name] = {
            way: speed_loss(undisturbed, way) for way in (FIXED_GAMMA, FALLBACK, AUTO, PLAIN_REPEAT)
        }
    return losses


def speed_loss(texts: TextRuns[str], way: str) -> float:
    """The loss over all texts, as a share of plain decoding's speed."""
    return rounded(1 - measured_speedup(texts, way, PLAIN).total)


def record_acceptances(folder: str, scale: PolicyScale = FULL) -> dict[str, list[str]]:
    """For each workload and text, whether a draft token would be accepted ("1") at each position
    after the prompt. tests/support/acceptance.json has these for 16 texts."""
    engine = runs.load_pair(folder, 1)
    return {
        name: [
            "".join("01"[accepted] for accepted in text.accepted[len(prompt) :])
            for number, prompt in enumerate(prompts)
            for text in [sample_text(engine, prompt, scale.tokens, 3 * number + seed, options)]
        ]
        for seed, (name, (prompts, options)) in enumerate(make_workloads(engine, scale).items())
    }


def run(folder: str, scale: PolicyScale, threads: int, clock: Clock) -> dict[str, Any]:
    """Measure everything; returns the JSON object. Raises OutriderError as `load_pair` does."""
    clock.patience = scale.patience
    engine = runs.load_pair(folder, threads)
    max_gamma = engine.decoder.max_gamma
    clock.note("reading the bundled pair's corpus")
    workloads = make_workloads(engine, scale)
    by_workload = decode_workloads(engine, workloads, scale, clock)
    by_workload[ALL] = [text for some in by_workload.values() for text in some]
    return {
        "bundle": engine.manifest.name,
        "machine": machine.describe(threads),
        "plain_width": engine.decoder.target.min_width,
        "texts": scale.texts,
        "tokens": scale.tokens,
        "long": scale.fallback_tokens,
        "workloads": {name: summarise(some, max_gamma) for name, some in by_workload.items()},
        "fallback": measure_fallback(engine, [*workloads.values()][-1], scale, clock),
    }


F2, F3 = ",.2f", ",.3f"


def goals(results: Results) -> list[tuple[str, float, bool]]:
    """The goals of the policies, each with the measured value and whether it is met."""
    ratios = {name: x["auto_of_best"] for name, x in results["workloads"].items()}
    mixed, near = ratios.pop(ALL), min(ratios.values())
    ways = results["fallback"].values()
    lost = max(losses[way] for losses in ways for way in (FALLBACK, AUTO))
    return [
        (f"auto: at least {MIN_SHARE} of the best gamma's speed", near, near >= MIN_SHARE),
        ("auto: faster than any gamma when interleaved", mixed, mixed > 1),
        (f"auto and fallback: lose at most {MAX_LOSS}", lost, lost <= MAX_LOSS),
    ]


def tables(results: Results) -> list[Table]:
    """Tables of speeds relative to plain decoding by gamma and policy, of losses, and of goals."""
    workloads = results["workloads"]
    columns: list[Column] = [
        ("alpha", "alpha", F2), *((name, name, F2) for name in workloads[ALL]["speeds"]),
        ("auto_of_best", "auto/best", F3), ("auto_of_best_error", "±", F3),
        ("noise", "noise", ".1%"),
    ]  # fmt: skip
    speeds = (
        (name, {**x, **x["speeds"], "disturbed": x["lost"] > LOST_LIMIT})
        for name, x in workloads.items()
    )
    lost = (
        (f"{name}: {way}", {"loss": loss})
        for name, ways in results["fallback"].items()
        for way, loss in ways.items()
    )
    noise = max(x["noise"] for x in workloads.values())
    noise_note = f"The noise of a speed is {noise:.1%}: use more texts or a quieter machine."
    rows = [[goal, f"{value:.3f}", "yes" if met else "no"] for goal, value, met in goals(results)]
    return [
        make_table("Speed relative to plain decoding, by gamma and policy", speeds, columns,
                 [noise_note] if noise > MAX_NOISE else []),
        make_table(f"Loss compared with plain decoding, texts of {results['long']} tokens", lost,
                 [("loss", "loss", "+.1%")]),
        Table("Goals", ["", "measured", "met"], rows),
    ]  # fmt: skip


def heading(results: Results) -> str:
    """The conditions of the figures."""
    return (
        f"{machine.summary_line(results['machine'])}; {results['texts']} texts of "
        f"{results['tokens']} tokens per workload; {describe_plain_steps(results['plain_width'])}. "
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
