"""Speculative against plain decoding on a pair that was made to agree: the one in models/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.stats import Stats
from runtime.text.engine import TextEngine

from .timing import Sample, figure, sample

PROMPTS = (
    "def read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\nimport sys\n\n",
    "for key, value in items.items():\n",
)
NEW_TOKENS = 96


@dataclass(frozen=True)
class Comparison:
    """Tokens a second, the ratio with its range over the prompts' turns, and why."""

    speculative: float
    plain: float
    low: float
    high: float
    tau: float
    drafted: float  # accepted / drafted
    examined: float  # accepted / examined

    @property
    def ratio(self) -> float:
        return self.speculative / self.plain

    def __str__(self) -> str:
        return (
            f"{self.speculative:.1f} tok/s against {self.plain:.1f} plain: {self.ratio:.2f}x "
            f"({self.low:.2f} to {self.high:.2f}) | tau {self.tau:.2f} | accepted "
            f"{self.drafted:.0%} of drafted, {self.examined:.0%} of examined"
        )

    def json_object(self) -> dict[str, Any]:
        return {
            "speculative_tokens_per_second": round(self.speculative, 2),
            "plain_tokens_per_second": round(self.plain, 2),
            "ratio": round(self.ratio, 3),
            "ratio_low": round(self.low, 3),
            "ratio_high": round(self.high, 3),
            "tau": round(self.tau, 3),
            "accepted_of_drafted": round(self.drafted, 4),
            "accepted_of_examined": round(self.examined, 4),
        }


def compare(engine: TextEngine, *, rounds: int, gamma: int) -> dict[str, Comparison]:
    """Each prompt in turn, with and without drafts, at temperature 0 and 1."""
    results = {}
    for temperature in (0.0, 1.0):
        ratios, total = [], Stats()
        fast: list[Sample] = []
        slow: list[Sample] = []
        for turn in range(rounds + 1):
            text = PROMPTS[turn % len(PROMPTS)]
            pair = []
            for g in (gamma, 0):
                taken, stats = _generate(engine, text, temperature, turn, g)
                pair.append(taken)
                if g and turn:
                    total.add(stats)
            if turn:  # the first is the warm-up
                fast.append(pair[0])
                slow.append(pair[1])
                ratios.append(pair[1].seconds / pair[0].seconds)
        results[f"temperature {temperature:g}"] = Comparison(
            speculative=1e3 / figure(fast).ms,
            plain=1e3 / figure(slow).ms,
            low=min(ratios),
            high=max(ratios),
            tau=total.mean_acceptance_length,
            drafted=total.accepted / max(1, total.drafted),
            examined=total.accepted / max(1, total.examined),
        )
    return results


def _generate(
    engine: TextEngine, text: str, temperature: float, seed: int, gamma: int
) -> tuple[Sample, Stats]:
    """Seconds a token, and what the request counted."""
    stats = Stats()

    def run() -> None:
        nonlocal stats
        stats = engine.generate(
            text,
            max_new_tokens=NEW_TOKENS,
            temperature=temperature,
            seed=seed,
            gamma=gamma,
            ignore_eos=True,
            chat=False,
        ).stats

    taken = sample(run)
    return Sample(stats.tpot(), taken.lost), stats
