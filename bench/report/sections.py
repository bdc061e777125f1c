"""The sections of a report: of each a title, a caption, a plot and the table of its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from runtime.theory.formulas import break_even, expected_tokens, oracle, speedup

from ..core.plot import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, legend, panels
from ..core.table import Table
from .numbers import (
    PARTS,
    Measurement,
    ahead_from,
    by_length,
    by_position,
    interval,
    parts,
    speed_ratios,
    traced,
)

CROWDED = 12  # bars, from which on there is no room for their figures
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
COLORS = dict(zip(PARTS, (SKY, PURPLE, ORANGE, "0.7"), strict=True))


@dataclass(frozen=True)
class Section:
    """plot: a figure of matplotlib. table: its title is the section's."""

    name: str
    caption: str
    plot: Any
    table: Table


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def times(factor: float) -> str:
    return f"{factor:.2f}x"


def _ticks(axes: Any, least: int, most: int) -> None:
    """Whole numbers, at most some 16 of them."""
    axes.set_xticks(range(least, most + 1, max(1, round((most - least) / 16))))
    axes.grid(axis="x", visible=False)


def _shares(value: float, _: int) -> str:
    return percent(value)


def sweep(m: Measurement) -> Section:
    found, gammas = m.found, m.gammas
    ranges = {g: speed_ratios(m.texts, g) for g in gammas}
    rows = []
    for gamma in m.texts:
        stats = m.stats(gamma)
        of_prompts = "-"
        if gamma:
            of_prompts = f"{times(min(ranges[gamma]))} to {times(max(ranges[gamma]))}"
        rows.append(
            (
                f"{gamma}",
                f"{stats.round_tokens / stats.time_rounds:.1f}",
                times(found.measured.get(gamma, 1.0)),
                of_prompts,
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
    cost = found.costs.draft
    bound = oracle(found.alpha, cost)
    figure, (axes,) = panels(1, 3.4)
    if isfinite(bound):
        label = f"oracle's bound, {times(bound)}"
        axes.axhline(bound, color=BLACK, linewidth=1, linestyle=":", label=label)
    theory = [speedup(found.alpha, g, cost) for g in gammas]
    axes.plot(gammas, theory, color=ORANGE, marker="^", linestyle="--", label="Theorem 3.8")
    label = "Theorem 3.8 with the measured widths"
    axes.plot(gammas, [m.expected(g) for g in gammas], color=BLUE, marker="s", label=label)
    measured = list(found.measured.values())
    axes.plot(gammas, measured, color=RED, marker="o", label="measured, median of the prompts")
    axes.vlines(
        gammas, [min(r) for r in ranges.values()], [max(r) for r in ranges.values()], color=RED,
        alpha=0.35, linewidth=3, label="least and most of the prompts",
    )  # fmt: skip
    axes.axhline(1, color="0.4", linewidth=1, label="plain decoding")
    axes.set(xlabel="draft tokens γ", ylabel="speedup, without the prefill", ylim=(0, None))
    _ticks(axes, 1, max(gammas))
    legend(figure, axes, 2)
    caption = (
        f"Speed of the rounds over that of plain decoding, by γ. Theorem 3.8 has α = "
        f"{found.alpha:.3f} and c = {cost:.3f} of this run, and takes a verification of any "
        f"width for one plain step; the second line has what each width costs here (the last "
        f"column, sampling and host included). The oracle's bound, {times(bound)}, is for a γ "
        "chosen anew each round by one who knows how many drafts will stand (section 3.5), at "
        "verifications of one plain step."
    )
    return Section("sweep", caption, figure, Table("Which γ", head, rows))


def positions(m: Measurement) -> Section:
    alpha, rows = m.found.alpha, []
    counts = by_position([x for g in m.gammas for text in m.texts[g] for x in text.rounds])
    figure, (axes,) = panels(1, 2.8)
    for i, (reached, accepted) in enumerate(counts, start=1):
        low, high = interval(accepted, reached)
        share = accepted / reached if reached else None
        rows.append(
            (f"{i}", f"{reached}", f"{accepted}", "-" if share is None else percent(share, 1),
             f"{percent(low)} to {percent(high)}")
        )  # fmt: skip
        if share is None:
            continue
        axes.bar(i, share, 0.65, color=SKY, label="accepted of reached" if i == 1 else None)
        axes.errorbar(
            i, share, [[share - low], [high - share]], color=BLACK, linewidth=1, capsize=2,
            label="95 % interval" if i == 1 else None,
        )  # fmt: skip
        if len(counts) <= CROWDED:
            axes.text(i, 0.03, percent(share), ha="center", fontsize=8)
    axes.axhline(alpha, color=RED, linestyle="--", label=f"α = {alpha:.3f}, all positions")
    axes.set(xlabel="draft position of a round", ylabel="accepted of reached", ylim=(0, 1.05))
    axes.yaxis.set_major_formatter(_shares)
    _ticks(axes, 1, len(counts))
    legend(figure, axes, 3)
    caption = (
        "A draft is reached when all before it in its round were accepted. The paper takes "
        "acceptance for the same everywhere (section 3.1): the dashed line, accepted of examined "
        "over all positions. Rounds of every γ."
    )
    head = ("position", "reached", "accepted", "share", "95 % interval")
    return Section("positions", caption, figure, Table("Acceptance by draft position", head, rows))


def shares(m: Measurement) -> Section:
    figure, (axes,) = panels(1, 3.1)
    rows, room = [], len(m.texts) <= CROWDED
    for gamma in m.texts:
        seconds = parts(m.stats(gamma))
        whole, below = sum(seconds.values()), 0.0
        rows.append(
            (f"{gamma}", f"{1e3 * whole:.3f}", *(percent(x / whole, 1) for x in seconds.values()))
        )
        for name, x in seconds.items():
            label = name if gamma == 0 else None
            axes.bar(gamma, x / whole, 0.75, below, color=COLORS[name], label=label)
            if x / whole >= 0.06 and room:
                at = below + x / whole / 2
                axes.text(gamma, at, percent(x / whole), ha="center", va="center", fontsize=7)
            below += x / whole
        if room:
            axes.text(gamma, 1.015, f"{1e3 * whole:.3g} ms", ha="center", fontsize=8)
    axes.set(xlabel="draft tokens γ", ylabel="share of a round", ylim=(0, 1.08))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(_shares)
    axes.grid(visible=False)
    _ticks(axes, 0, max(m.texts))
    legend(figure, axes, 4)
    caption = (
        "draft: the draft's steps; verify: the target's call; sample: draws, verdict and commit; "
        "host: what is left. The draft's prefill is not in it. On a GPU the draws count as draft "
        "and the verdict as verify. Above each bar: ms of a round, the mean."
    )
    head = ("γ", "ms a round", *PARTS)
    return Section("shares", caption, figure, Table("Where the time of a round goes", head, rows))


def lengths(m: Measurement) -> Section:
    points = by_length(m)
    count = len(points)
    rows = [
        (f"{n}", *(times(x) for x in points[n - 1]))
        for n in sorted({count, *(n for n in LENGTHS if n < count)})
    ]
    pays, ahead = break_even(m.found.overhead, m.expected(m.shown)), ahead_from(points)
    figure, (axes,) = panels(1, 3.0)
    middle, low, high = zip(*points, strict=True)
    places = range(1, count + 1)
    label = "least and most of the prompts"
    axes.fill_between(places, low, high, color=SKY, alpha=0.35, linewidth=0, label=label)
    axes.plot(places, middle, color=BLUE, label=f"γ = {m.shown}, median of the prompts")
    axes.axhline(1, color="0.4", linewidth=1, label="plain decoding")
    if pays <= count:
        label = f"break-even by the formula: {max(1, pays):.0f} tokens"
        axes.axvline(max(1, pays), color=RED, linestyle="--", label=label)
    axes.set(xlabel="output tokens", ylabel="speedup, prefill included", ylim=(0, None))
    axes.set_xlim(0, count + 1)
    legend(figure, axes, 2)
    formula = f"from {max(1, pays):.0f} tokens on" if isfinite(pays) else "at no length"
    measured = "never, up to here" if ahead is None else f"from {ahead} tokens on"
    caption = (
        f"Time to the first n tokens of a text, from the start of the request, prefills included: "
        f"plain over γ = {m.shown}. The draft's prefill takes {m.found.overhead:.2f} plain steps "
        f"once; by the formula, which takes acceptance for the same all along, speculation pays "
        f"{formula}. The median prompt was ahead for good {measured}."
    )
    head = ("output tokens", "speedup, median", "least of the prompts", "most")
    return Section("lengths", caption, figure, Table("Speedup by output length", head, rows))


def trace(m: Measurement) -> Section:
    chosen, rows, named = traced(m), [], set()
    figure, (axes,) = panels(1, 0.9 + 0.75 * len(chosen))
    end = 0.0
    for row, (gamma, rounds) in enumerate(chosen.items()):
        start = rounds[0].begin
        for number, x in enumerate(rounds, start=1):
            cells = (x.begin - start, x.end - start, x.catch_up, x.draft, x.verify, x.sample)
            rows.append(
                (f"{gamma}", f"{number}", *(f"{1e3 * t:.3f}" for t in cells),
                 f"{x.accepted}/{x.gamma}", f"{x.emitted}")
            )  # fmt: skip
            left = 1e3 * (x.begin - start)
            for name, seconds, color, count in (
                ("draft's prefill", x.catch_up, GREEN, 1),
                ("draft call", x.draft, SKY, x.gamma),
                ("target call", x.verify, PURPLE, 1),
                ("sampling", x.sample, ORANGE, 1),
            ):
                width = 1e3 * seconds
                for i in range(count if seconds else 0):
                    axes.barh(
                        row, width / count, 0.5, left + i * width / count, color=color,
                        edgecolor="white", linewidth=0.5, label=None if name in named else name,
                    )  # fmt: skip
                    named.add(name)
                if name == "target call" and gamma:
                    at = left + width / 2
                    axes.text(at, row - 0.29, f"+{x.emitted}", ha="center", fontsize=7)
                left += width
        width = 1e3 * (rounds[-1].end - start)
        end = max(end, width)
        tokens = sum(x.emitted for x in rounds)
        axes.text(width, row, f"  {tokens} tokens, {width:.3g} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(chosen)), [f"γ = {g}" if g else "plain" for g in chosen])
    axes.set(xlabel="ms from the first token on", xlim=(0, 1.3 * end))
    axes.set_ylim(len(chosen) - 0.5, -0.6)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    legend(figure, axes, 4)
    caption = (
        "As the paper's Figure 5, to scale: the first prompt, from its first token on (the "
        "target's prefill gave that). A round's draft calls were timed together and are drawn "
        "equally long; draws from the draft are drawn with the sampling, behind the target's "
        "call. Above it: the tokens that the round emitted. White between blocks: the host."
    )
    head = ("γ", "round", "begin, ms", "end", "draft's prefill", "drafts", "target", "sampling",
            "accepted", "emitted")  # fmt: skip
    return Section("trace", caption, figure, Table("The first rounds of a text", head, rows))


SECTIONS: tuple[Callable[[Measurement], Section], ...] = (sweep, positions, shares, lengths, trace)
