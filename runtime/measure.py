"""Acceptance and costs of a bundle, from rounds that it really runs; and what they recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from .bundle import load
from .errors import OutriderError
from .stats import Stats
from .text_engine import TextEngine
from .theory import best_gamma, break_even, oracle, speedup, table

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
    plain = median(costs[0].rests)
    cost = median(draft for each in costs.values() for draft in each.drafts) / plain
    verify = [median(each.rests) / plain for each in costs.values()]
    alpha = total.accepted / max(1, total.examined)
    gammas = [gamma for gamma in costs if gamma]
    head, *lines = table(alpha, cost, verify, gammas).splitlines()
    measured = [median(costs[g].speeds) / median(costs[0].speeds) for g in gammas]
    gamma, gain = best_gamma(alpha, cost, verify)
    overhead = total.time_draft_prefill / max(1, len(gammas) * len(prompts)) / plain
    said = [
        f"measured on {len(prompts)} prompts, {tokens} tokens for each gamma, temperature "
        f"{temperature:g}",
        f"alpha {alpha:.3f} (accepted of examined) | c {cost:.3f} | a plain step "
        f"{plain * 1e3:.2f} ms",
        "verify " + " ".join(f"{v:.2f}" for v in verify) + "  (widths 1 to "
        f"{len(verify)}, in plain steps; sampling and host included)",
        f"{head}  measured",
        *(f"{line}  {m:>7.2f}x" for line, m in zip(lines, measured, strict=True)),
    ]
    if not gamma:
        return "\n".join([*said, "use --gamma 0: no draft length gains anything here"])
    here = measured[gamma - 1]
    return "\n".join(
        [
            *said,
            f"use --gamma {gamma}: {gain:.2f}x expected, {here:.2f}x measured; Theorem 3.8 without "
            f"the width of the verification {speedup(alpha, gamma, cost):.2f}x; an oracle's bound "
            f"{oracle(alpha, cost):.2f}x",
            f"it pays from {max(1, break_even(overhead, gain)):.0f} output tokens on (the draft's "
            f"prefill is {overhead:.1f} plain steps)",
        ]
    )
