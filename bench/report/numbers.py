"""What a report measures, and what Theorem 3.8 makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.files.errors import OutriderError
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.formulas import best_gamma, break_even, expected_tokens, speedup
from runtime.theory.measure import Findings, findings, measure

from ..core.clock import lost_seconds
from ..core.table import Table

REPEATS = 3


@dataclass(frozen=True)
class Measurement:
    """texts[gamma]: one for each prompt, in their order. lost: seconds for which threads waited for
    a core, in each second of measuring."""

    found: Findings
    texts: Mapping[int, Sequence[Stats]]
    lost: float = 0.0

    @property
    def best(self) -> int:
        """The gamma to use; 0 where nothing gains."""
        found = self.found
        return best_gamma(found.alpha, found.costs.draft, found.costs.verify)[0]

    @property
    def shown(self) -> int:
        """The gamma, 1 or more, of the largest expected speedup."""
        return max(self.found.measured, key=self.expected)

    def expected(self, gamma: int) -> float:
        """Theorem 3.8 with the verification's measured width."""
        found = self.found
        return speedup(found.alpha, gamma, found.costs.draft, found.costs.verify[gamma])

    def total(self, *gammas: int) -> Stats:
        """The counts and times of all prompts."""
        return Stats.total(text for gamma in gammas for text in self.texts[gamma])

    def ratios(self, gamma: int) -> list[float]:
        """Of each prompt, the speed over plain decoding's, without the prefill."""
        return [
            (a.round_tokens / a.time_rounds) / (b.round_tokens / b.time_rounds)
            for a, b in zip(self.texts[gamma], self.texts[0], strict=True)
        ]


def take(
    engine: TextEngine,
    prompts: Sequence[str],
    temperature: float,
    tokens: int,
    note: Callable[[str], None],
) -> Measurement:
    """Every prompt with every gamma, several times over; of each the quickest counts, because on a
    machine that is not ours alone the others were kept waiting. Raises OutriderError "prompt"."""
    texts: dict[int, list[Stats]] = {g: [] for g in range(engine.decoder.max_gamma + 1)}
    begin, waited = time.perf_counter(), lost_seconds()
    for number, prompt in enumerate(prompts, start=1):
        note(f"prompt {number} of {len(prompts)}, with gamma 0 to {engine.decoder.max_gamma}")
        # All gammas each time: what changes, changes for all of them.
        runs = [measure(engine, [prompt], temperature, tokens) for _ in range(REPEATS)]
        if not all(runs[0].values()):
            cause = f"prompt {number} leaves no room for a round"
            remedy = "Shorten it, or build the bundle with a larger MAX_LEN."
            raise OutriderError("prompt", cause, remedy)
        for gamma, some in texts.items():
            some.append(min((run[gamma][0] for run in runs), key=lambda text: text.time_rounds))
    lost = (lost_seconds() - waited) / (time.perf_counter() - begin)
    return Measurement(findings(texts), texts, lost)


def times(factor: float) -> str:
    return f"{factor:.2f}x"


def key_figures(m: Measurement) -> list[tuple[str, str, str]]:
    """Name, figure, what it is."""
    found, best, shown = m.found, m.best, m.shown
    gain = f"{times(m.expected(shown))} expected, {times(found.measured[shown])} measured"
    pays = break_even(found.overhead, m.expected(shown))
    where = f"γ = {shown}" if best else f"γ = {shown}, the least bad"
    return [
        ("recommended γ", f"{best}" if best else "0: plain decoding",
         "largest expected speedup with the measured widths"),
        ("speedup", gain, f"at {where}, without the prefill"),
        ("α", f"{found.alpha:.3f}", "accepted of examined drafts, all γ"),
        ("c", f"{found.costs.draft:.3f}", "a draft step, in plain steps"),
        ("τ", f"{m.total(shown).mean_acceptance_length:.2f}", f"tokens of a round at {where}"),
        ("a plain step", f"{1e3 * found.costs.plain:.3g} ms", "target, sampling and host"),
        ("pays from", f"{max(1, pays):.0f} tokens" if pays < float("inf") else "never",
         f"of output; the draft's prefill takes {found.overhead:.2f} plain steps"),
    ]  # fmt: skip


def speed_table(m: Measurement) -> Table:
    found, rows = m.found, []
    for gamma in m.texts:
        stats, ratios = m.total(gamma), m.ratios(gamma)
        rows.append(
            (
                f"{gamma}",
                f"{stats.round_tokens / stats.time_rounds:.1f}",
                times(found.measured.get(gamma, 1.0)),
                f"{times(min(ratios))} to {times(max(ratios))}",
                times(speedup(found.alpha, gamma, found.costs.draft)),
                times(m.expected(gamma)),
                f"{stats.mean_acceptance_length:.2f}",
                f"{expected_tokens(found.alpha, gamma):.2f}",
                f"{stats.accepted}/{stats.examined}",
                f"{found.costs.verify[gamma]:.2f}",
            )
        )
    head = ("γ", "tokens/s", "measured", "of single prompts", "Theorem 3.8", "with widths", "τ",
            "equation (1)", "accepted/examined", "verification")  # fmt: skip
    return Table("Which γ", head, rows)


def position_table(m: Measurement) -> Table:
    stats = m.total(*m.found.measured)
    counts = zip(stats.drafted_at, stats.accepted_at, strict=True)
    rows = [
        (
            f"{i}",
            f"{drafted}",
            f"{accepted}",
            f"{accepted / drafted:.1%}",
            f"{m.found.alpha**i:.1%}",
        )
        for i, (drafted, accepted) in enumerate(counts, start=1)
        if drafted
    ]
    head = ("position", "drafted", "accepted", "share", "α to its power")
    return Table("Acceptance by draft position", head, rows)
