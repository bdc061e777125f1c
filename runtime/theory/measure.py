"""Measure acceptance and costs of a bundle in real rounds, and recommend a gamma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from ..bundle import load
from ..files.errors import OutriderError, refuse_first
from ..gamma.costs import RoundCosts
from ..stats import Stats
from ..text.engine import TextEngine
from ..text.options import Options
from .formulas import best_gamma, break_even, oracle, speedup, table

WARM_UP = 16  # tokens


def measure(
    engine: TextEngine, prompts: Sequence[str], temperature: float, tokens: int
) -> dict[int, list[Stats]]:
    """By gamma, the statistics of each prompt's text that has at least one round.

    Runs every gamma on each prompt before the next prompt, so that changes of the machine's speed
    affect all gammas alike. Raises OutriderError as `generate` does, and "option" for a model that
    reads a source.
    """
    if engine.manifest.pair.target.encoder is not None:
        raise OutriderError(
            "option",
            f"{engine.manifest.name} reads a source, but this can measure only prompts",
            "Measure with python -m runtime.generate --source TEXT --baseline.",
        )
    texts: dict[int, list[Stats]] = {gamma: [] for gamma in range(engine.decoder.max_gamma + 1)}
    for number, prompt in enumerate(prompts):
        for gamma, group in texts.items():
            options = Options(
                max_new_tokens=tokens, ignore_eos=True, temperature=temperature, seed=number,
                gamma=gamma,
            )  # fmt: skip
            if number == 0:
                engine.generate(prompt, options, max_new_tokens=WARM_UP)
            stats = engine.generate(prompt, options).stats
            if stats.rounds:
                group.append(stats)
    return texts


@dataclass(frozen=True, slots=True)
class Findings:
    """The results of the measured texts.

    alpha: share of examined tokens that were accepted. overhead: the draft's prefill, in plain
    steps. measured[gamma]: speed relative to plain decoding, without the prefill.
    """

    alpha: float
    costs: RoundCosts
    overhead: float
    measured: dict[int, float]


def summarise(texts: Mapping[int, Sequence[Stats]]) -> Findings:
    """Summarise texts by medians. texts: as `measure` returns them, at least one per gamma."""
    drafting = [stats for gamma, group in texts.items() if gamma for stats in group]
    total = Stats.total(drafting)
    costs = RoundCosts.of(
        median(stats.time_draft / stats.drafted for stats in drafting if stats.drafted),
        {
            gamma: median((stats.time_rounds - stats.time_draft) / stats.rounds for stats in group)
            for gamma, group in texts.items()
        },
        max(texts),
    )
    speeds = {
        g: median(x.round_tokens / x.time_rounds for x in group) for g, group in texts.items()
    }
    return Findings(
        alpha=total.acceptance_rate,
        costs=costs,
        overhead=total.time_draft_prefill / max(1, len(drafting)) / costs.plain,
        measured={gamma: speed / speeds[0] for gamma, speed in speeds.items() if gamma},
    )


def recommend(folder: str, prompts: Sequence[str], temperature: float, tokens: int) -> str:
    """Measure a bundle and report which gamma to use. Raises OutriderError as `load` does."""
    engine = load(folder, reuse=False)  # the prefills are part of what is measured
    no_draft = engine.decoder.draft is None
    refuse_first([
        (no_draft, f"{folder} has no draft model",
         "Build it with DRAFT=<draft>, or give --alpha; to measure lookups, use python -m "
         "runtime.generate --draft ngram --baseline."),
        (tokens < 3, f"tokens={tokens} is out of range", "Use 3 or more."),
    ])  # fmt: skip
    texts = measure(engine, prompts, temperature, tokens)
    drafted = any(stats.drafted for group in texts.values() for stats in group)
    if not all(texts.values()) or not drafted:
        raise OutriderError("prompt", "no prompt leaves room for a round", "Shorten the prompts.")
    return format_report(summarise(texts), len(prompts), temperature, tokens)


def format_report(findings: Findings, prompts: int, temperature: float, tokens: int) -> str:
    """The report in words: the findings on so many prompts, and which gamma to use."""
    alpha, cost, verify = findings.alpha, findings.costs.draft, findings.costs.verify
    head, *rows = table(alpha, cost, verify).splitlines()
    lines = [
        f"measured on {prompts} prompt{'s' * (prompts > 1)}, {tokens} tokens for each gamma, "
        f"temperature {temperature:g}",
        f"alpha {alpha:.3f} (accepted of examined) | c {cost:.3f} | a plain step "
        f"{findings.costs.plain * 1e3:.2f} ms",
        "verify " + " ".join(f"{v:.2f}" for v in verify) + "  (widths 1 to "
        f"{len(verify)}, in plain steps; sampling and host included)",
        f"{head}  measured",
        *(f"{x}  {m:>7.2f}x" for x, m in zip(rows, findings.measured.values(), strict=True)),
    ]
    gamma, gain = best_gamma(alpha, cost, verify)
    if gamma:
        lines += [
            f"use --gamma {gamma}: {gain:.2f}x expected, {findings.measured[gamma]:.2f}x measured; "
            f"Theorem 3.8 without the width of the verification {speedup(alpha, gamma, cost):.2f}x;"
            f" an oracle's bound {oracle(alpha, cost):.2f}x",
            f"it pays from {max(1, break_even(findings.overhead, gain)):.0f} output tokens on (the "
            f"draft's prefill is {findings.overhead:.1f} plain steps)",
        ]
    else:
        lines.append("use --gamma 0: no draft length gains anything here")
    if min(verify) < 0.9:
        lines.append("note: a verification cannot take less time than a plain step: other programs "
                     "disturbed the times; measure again")  # fmt: skip
    return "\n".join(lines)
