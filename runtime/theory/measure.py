"""Acceptance and costs of a bundle, from rounds that it really runs; and what they recommend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..bundle import load
from ..files.errors import OutriderError
from ..stats import Stats
from ..text.engine import TextEngine
from .formulas import best_gamma, break_even, oracle, speedup, table

WARM_UP = 16  # tokens


@dataclass(slots=True)
class Costs:
    """Of one gamma, a value for each prompt. Seconds: round, a draft step, all of a round but the
    draft; and generated tokens per second, without the prefill."""

    drafts: list[float] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)

    def add(self, stats: Stats) -> None:
        if stats.drafted:
            self.drafts.append(stats.time_draft / stats.drafted)
        self.rests.append((stats.time_rounds - stats.time_draft) / stats.rounds)
        self.speeds.append(stats.round_tokens / stats.time_rounds)


def measure(
    engine: TextEngine, prompts: Sequence[str], temperature: float, tokens: int
) -> tuple[dict[int, Costs], Stats]:
    """Costs by gamma, and the sum of the statistics of all speculative texts.

    All prompts with every gamma, one gamma after the other for each prompt, so that what changes
    meanwhile changes for all of them.
    """
    costs = {gamma: Costs() for gamma in range(engine.decoder.max_gamma + 1)}
    total = Stats()
    for number, prompt in enumerate(prompts):
        for gamma, cost in costs.items():
            options = {"gamma": gamma, "temperature": temperature, "seed": number}
            if number == 0:
                engine.generate(prompt, max_new_tokens=WARM_UP, ignore_eos=True, **options)
            stats = engine.generate(prompt, max_new_tokens=tokens, ignore_eos=True, **options).stats
            if stats.rounds:
                cost.add(stats)
                if gamma:
                    total.add(stats)
    return costs, total


@dataclass(frozen=True, slots=True)
class Findings:
    """What costs and statistics come to.

    alpha: accepted of examined. cost: c. plain: seconds of a plain step, sampling and host
    included; verify[gamma] and overhead (the draft's prefill) are in plain steps.
    measured[gamma]: speed over that of plain decoding, without the prefill.
    """

    alpha: float
    cost: float
    plain: float
    verify: list[float]
    overhead: float
    measured: dict[int, float]


def findings(costs: Mapping[int, Costs], total: Stats) -> Findings:
    """costs, total: as `measure` gives them, with a text for each gamma at least."""
    plain = median(costs[0].rests)
    texts = sum(len(each.rests) for gamma, each in costs.items() if gamma)
    speed = median(costs[0].speeds)
    return Findings(
        alpha=total.accepted / max(1, total.examined),
        cost=median(draft for each in costs.values() for draft in each.drafts) / plain,
        plain=plain,
        verify=[median(each.rests) / plain for each in costs.values()],
        overhead=total.time_draft_prefill / max(1, texts) / plain,
        measured={gamma: median(each.speeds) / speed for gamma, each in costs.items() if gamma},
    )


def recommend(folder: str, prompts: Sequence[str], temperature: float, tokens: int) -> str:
    """Measure a bundle and say which gamma to use. Raises OutriderError as `load`."""
    engine = load(folder)
    if engine.decoder.draft is None:
        raise OutriderError(
            "option", f"{folder} has no draft", "Build it with DRAFT=<draft>, or give --alpha."
        )
    if tokens < 2:
        raise OutriderError("option", f"tokens={tokens} is out of range", "Use 2 or more.")
    costs, total = measure(engine, prompts, temperature, tokens)
    if not all(each.speeds for each in costs.values()):
        raise OutriderError("prompt", "no prompt leaves room for a round", "Shorten the prompts.")
    found = findings(costs, total)
    alpha, cost, verify = found.alpha, found.cost, found.verify
    head, *lines = table(alpha, cost, verify, list(found.measured)).splitlines()
    said = [
        f"measured on {len(prompts)} prompts, {tokens} tokens for each gamma, temperature "
        f"{temperature:g}",
        f"alpha {alpha:.3f} (accepted of examined) | c {cost:.3f} | a plain step "
        f"{found.plain * 1e3:.2f} ms",
        "verify " + " ".join(f"{v:.2f}" for v in verify) + "  (widths 1 to "
        f"{len(verify)}, in plain steps; sampling and host included)",
        f"{head}  measured",
        *(f"{x}  {m:>7.2f}x" for x, m in zip(lines, found.measured.values(), strict=True)),
    ]
    gamma, gain = best_gamma(alpha, cost, verify)
    if not gamma:
        return "\n".join([*said, "use --gamma 0: no draft length gains anything here"])
    return "\n".join(
        [
            *said,
            f"use --gamma {gamma}: {gain:.2f}x expected, {found.measured[gamma]:.2f}x measured; "
            f"Theorem 3.8 without the width of the verification {speedup(alpha, gamma, cost):.2f}x;"
            f" an oracle's bound {oracle(alpha, cost):.2f}x",
            f"it pays from {max(1, break_even(found.overhead, gain)):.0f} output tokens on (the "
            f"draft's prefill is {found.overhead:.1f} plain steps)",
        ]
    )
