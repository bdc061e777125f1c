"""What a report says: recorded rounds as numbers, and the numbers as tables, captions and
alternative texts of the plots. All pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median

from runtime.stats import Stats
from runtime.theory.formulas import best_gamma, break_even, expected_tokens, oracle, speedup
from runtime.theory.measure import Findings

from .report_record import Round, Text

TRACED = 6  # rounds of the longest draft in the trace
PARTS = "draft", "verify", "sample", "host"


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Measurement:
    """texts[gamma]: one for each prompt, in their order. lost: seconds for which threads waited
    for a core, in each second of measuring."""

    found: Findings
    texts: Mapping[int, Sequence[Text]]
    lost: float = 0.0

    @property
    def gammas(self) -> list[int]:
        """Those with drafts."""
        return list(self.found.measured)

    @property
    def best(self) -> int:
        """The gamma to use; 0 where nothing gains."""
        return best_gamma(self.found.alpha, self.found.costs.draft, self.found.costs.verify)[0]

    @property
    def shown(self) -> int:
        """The gamma, 1 or more, whose rounds are looked into: of the largest expected speedup."""
        return max(self.gammas, key=self.expected)

    def expected(self, gamma: int) -> float:
        found = self.found
        return speedup(found.alpha, gamma, found.costs.draft, found.costs.verify[gamma])

    def rounds(self, *gammas: int) -> list[Round]:
        return [x for gamma in gammas for text in self.texts[gamma] for x in text.rounds]

    def stats(self, gamma: int) -> Stats:
        total = Stats()
        for text in self.texts[gamma]:
            total.add(text.stats)
        return total


# The numbers


def by_position(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """(reached, accepted) of each draft position; reached: all drafts before it were accepted."""
    longest = max((x.gamma for x in rounds), default=0)
    return [
        (
            sum(x.gamma > i and x.accepted >= i for x in rounds),
            sum(x.accepted > i for x in rounds),
        )
        for i in range(longest)
    ]


def accepted_counts(rounds: Sequence[Round], gamma: int) -> list[int]:
    """How many rounds with gamma drafts accepted 0, 1, ... gamma of them."""
    counts = [0] * (gamma + 1)
    for x in rounds:
        if x.gamma == gamma:
            counts[x.accepted] += 1
    return counts


def capped_geometric(alpha: float, gamma: int) -> list[float]:
    """The same as shares, where each draft is accepted with alpha (section 3.1): their mean is one
    less than equation (1)."""
    return [(1 - alpha) * alpha**k for k in range(gamma)] + [alpha**gamma]


def interval(part: int, whole: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's of a share, 95 %."""
    if not whole:
        return 0.0, 1.0
    share, square = part / whole, z * z
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = z * sqrt(share * (1 - share) / whole + square / (4 * whole**2)) / (1 + square / whole)
    return max(0.0, middle - half), min(1.0, middle + half)


def speed_ratios(texts: Mapping[int, Sequence[Text]], gamma: int) -> list[float]:
    """Of each prompt, the speed over plain decoding's, without the prefill."""
    return [
        (a.stats.round_tokens / a.stats.time_rounds) / (b.stats.round_tokens / b.stats.time_rounds)
        for a, b in zip(texts[gamma], texts[0], strict=True)
        if a.rounds and b.rounds
    ]


def widths(m: Measurement) -> list[float | None]:
    """The median time of the target's call alone, by gamma, in plain steps."""
    calls = [[x.verify for x in m.rounds(g) if x.gamma == g] for g in m.texts]
    return [median(each) / m.found.costs.plain if each else None for each in calls]


def parts(stats: Stats) -> dict[str, float]:
    """Seconds of a round, the mean."""
    times = stats.time_draft, stats.time_verify, stats.time_sample, stats.time_host
    return {name: x / max(1, stats.rounds) for name, x in zip(PARTS, times, strict=True)}


def times_of_tokens(text: Text) -> list[float]:
    """Seconds from the start of the request to each token."""
    return [text.stats.ttft] + [x.end for x in text.rounds for _ in range(x.emitted)]


def by_length(m: Measurement, gamma: int) -> list[tuple[float, float, float]]:
    """Speedup of the first 1, 2, ... tokens: median, least and most of the prompts that have as
    many. Prefills included."""
    curves = [
        [b / a for a, b in zip(times_of_tokens(fast), times_of_tokens(plain), strict=False)]
        for fast, plain in zip(m.texts[gamma], m.texts[0], strict=True)
    ]
    points = []
    for n in range(max(map(len, curves))):
        here = [curve[n] for curve in curves if len(curve) > n]
        points.append((median(here), min(here), max(here)))
    return points


def ahead_from(points: Sequence[tuple[float, float, float]]) -> int | None:
    """The output length from which on the median prompt is ahead of plain decoding for good."""
    behind = [n for n, point in enumerate(points, start=1) if point[0] <= 1]
    first = behind[-1] + 1 if behind else 1
    return first if first <= len(points) else None


def traced(m: Measurement) -> dict[int, list[Round]]:
    """The first rounds of the first prompt by gamma, longest draft first, up to the same number of
    tokens or what a round takes it to."""
    gammas = {m.shown, 1, 0}
    if len(gammas) < 3:
        gammas.add(min(4, max(m.gammas)))
    order = sorted(gammas, reverse=True)
    longest = m.texts[order[0]][0].rounds[:TRACED]
    tokens = sum(x.emitted for x in longest)
    chosen: dict[int, list[Round]] = {}
    for gamma in order:
        chosen[gamma], emitted = [], 0
        for x in m.texts[gamma][0].rounds:
            if emitted >= tokens:
                break
            chosen[gamma].append(x)
            emitted += x.emitted
    return chosen


# The same as text


@dataclass(frozen=True)
class Section:
    """One plot's. name: of the PNG. alt: what is seen in it."""

    name: str
    title: str
    caption: str
    alt: str
    table: Table


def sections(m: Measurement) -> list[Section]:
    return [make(m) for make in SECTIONS]


def positions_section(m: Measurement) -> Section:
    rows = []
    for i, (reached, accepted) in enumerate(by_position(m.rounds(*m.gammas)), start=1):
        low, high = interval(accepted, reached)
        share = percent(accepted / reached, 1) if reached else "-"
        rows.append(
            (f"{i}", f"{reached}", f"{accepted}", share, f"{percent(low)} to {percent(high)}")
        )
    return Section(
        "positions",
        "Acceptance by draft position",
        "A draft is reached when all before it in its round were accepted. The paper takes "
        "acceptance for the same everywhere (section 3.1): the dashed line, accepted of examined "
        "over all positions. Rounds of every γ.",
        f"Bars of the share accepted at each draft position: {_listed(r[3] for r in rows)}. "
        f"A line at alpha, {m.found.alpha:.3f}.",
        Table(("position", "reached", "accepted", "share", "95 % interval"), rows),
    )


def histogram_section(m: Measurement) -> Section:
    rows, said = [], []
    for gamma in sorted({m.shown, max(m.gammas)}):
        counts = accepted_counts(m.rounds(gamma), gamma)
        total = max(1, sum(counts))
        expected = capped_geometric(m.found.alpha, gamma)
        for k, (count, share) in enumerate(zip(counts, expected, strict=True)):
            rows.append(
                (f"{gamma}", f"{k}", f"{count}", percent(count / total, 1), percent(share, 1))
            )
        said.append(
            f"at gamma {gamma} {percent(counts[0] / total)} of the rounds accepted none and "
            f"{percent(counts[-1] / total)} all, where the model has {percent(expected[0])} and "
            f"{percent(expected[-1])}"
        )
    return Section(
        "histogram",
        "Accepted drafts of a round",
        "Bars: rounds that drafted γ tokens, by how many of them were accepted. Diamonds: what "
        "equation (1) takes for granted, independent drafts that are all accepted with α. More "
        "weight at both ends than that means that acceptance comes in runs.",
        f"Histograms of accepted drafts: {'; '.join(said)}.",
        Table(("γ", "accepted drafts", "rounds", "share", "by equation (1)"), rows),
    )


def sweep_section(m: Measurement) -> Section:
    found, rows = m.found, []
    for gamma in m.texts:
        stats = m.stats(gamma)
        ratios = speed_ratios(m.texts, gamma)
        rows.append(
            (
                f"{gamma}",
                f"{stats.round_tokens / stats.time_rounds:.1f}",
                times(found.measured.get(gamma, 1.0)),
                f"{times(min(ratios))} to {times(max(ratios))}" if gamma else "-",
                times(speedup(found.alpha, gamma, found.costs.draft)),
                times(m.expected(gamma)),
                f"{stats.mean_acceptance_length:.2f}",
                f"{expected_tokens(found.alpha, gamma):.2f}",
                f"{stats.accepted}/{stats.examined}",
                f"{found.costs.verify[gamma]:.2f}",
            )
        )
    bound = oracle(found.alpha, found.costs.draft)
    return Section(
        "sweep",
        "Which γ",
        f"Speed of the rounds over that of plain decoding, by γ. Theorem 3.8 has α = "
        f"{found.alpha:.3f} and c = {found.costs.draft:.3f} of this run, and takes a verification "
        "of any width for one plain step; the second line has what each width costs here. The "
        f"oracle's bound, {times(bound)}, is for a γ chosen anew each round by one who knows how "
        "many drafts will stand (section 3.5), at verifications of one plain step.",
        f"Lines over gamma: measured speedup {_listed(r[2] for r in rows[1:])}; Theorem 3.8 "
        f"{_listed(r[4] for r in rows[1:])}; with the measured widths "
        f"{_listed(r[5] for r in rows[1:])}; the oracle's bound at {times(bound)}.",
        Table(
            ("γ", "tokens/s", "measured", "of single prompts", "Theorem 3.8", "with widths",
             "τ", "equation (1)", "accepted/examined", "verification"),
            rows,
        ),
    )  # fmt: skip


def widths_section(m: Measurement) -> Section:
    calls = widths(m)
    rows = [
        (
            f"{gamma + 1}",
            f"{m.found.costs.verify[gamma]:.2f}",
            "-" if call is None else f"{call:.2f}",
            f"{1e3 * m.found.costs.plain * m.found.costs.verify[gamma]:.3f}",
        )
        for gamma, call in zip(m.texts, calls, strict=True)
    ]
    return Section(
        "widths",
        "What a verification costs",
        f"By its width, in plain steps of {1e3 * m.found.costs.plain:.3g} ms, sampling and host "
        "included. Theorem 3.8 takes 1 for every width, which holds where reading the weights is "
        "what takes the time.",
        f"Lines over the width from 1 to {len(rows)}: all of a round but its draft takes "
        f"{_listed(r[1] for r in rows)} plain steps, the target's call alone "
        f"{_listed(r[2] for r in rows)}. A line at 1.",
        Table(
            ("width", "round without its draft, steps", "target's call, steps", "the former, ms"),
            rows,
        ),
    )


def shares_section(m: Measurement) -> Section:
    rows = []
    for gamma in m.texts:
        seconds = parts(m.stats(gamma))
        whole = sum(seconds.values())
        shares = [percent(x / whole, 1) for x in seconds.values()]
        rows.append((f"{gamma}", f"{1e3 * whole:.3f}", *shares))
    last = rows[-1]
    return Section(
        "shares",
        "Where the time of a round goes",
        "draft: the draft's steps; verify: the target's call; sample: draws, verdict and commit; "
        "host: what is left. The draft's prefill is not in it. On a GPU the draws count as draft "
        "and the verdict as verify. Above each bar: ms of a round, the mean.",
        f"Stacked bars for each gamma from 0 to {last[0]}. At gamma {last[0]}, a round of "
        f"{last[1]} ms: "
        + ", ".join(f"{n} {s}" for n, s in zip(PARTS, last[2:], strict=True))
        + ".",
        Table(("γ", "ms a round", *PARTS), rows),
    )


def lengths_section(m: Measurement) -> Section:
    points = by_length(m, m.shown)
    places = {len(points)} | {n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if n < len(points)}
    rows = [(f"{n}", *(times(x) for x in points[n - 1])) for n in sorted(places)]
    pays = break_even(m.found.overhead, m.expected(m.shown))
    formula = f"from {max(1, pays):.0f} tokens on" if pays < float("inf") else "at no length"
    ahead = ahead_from(points)
    measured = "never, up to here" if ahead is None else f"from {ahead} tokens on"
    return Section(
        "lengths",
        "Speedup by output length",
        f"Time to the first n tokens of a text, from the start of the request, prefills included: "
        f"plain over γ = {m.shown}. The draft's prefill takes {m.found.overhead:.2f} plain steps "
        f"once; by the formula, which takes acceptance for the same all along, speculation pays "
        f"{formula}. The median prompt was ahead for good {measured}.",
        "A line over output tokens: " + ", ".join(f"{r[1]} at {r[0]}" for r in rows) + ".",
        Table(("output tokens", "speedup, median", "least of the prompts", "most"), rows),
    )


def trace_section(m: Measurement) -> Section:
    rows, said = [], []
    for gamma, rounds in traced(m).items():
        start, emitted = rounds[0].begin, 1
        for number, x in enumerate(rounds, start=1):
            emitted += x.emitted
            rows.append(
                (
                    f"{gamma}",
                    f"{number}",
                    *(f"{1e3 * (t - start):.3f}" for t in (x.begin, x.end)),
                    *(f"{1e3 * t:.3f}" for t in (x.catch_up, x.draft, x.verify, x.sample)),
                    f"{x.accepted}/{x.gamma}",
                    f"{x.emitted}",
                )
            )
        said.append(
            f"gamma {gamma}: {emitted - 1} tokens in {len(rounds)} rounds and "
            f"{1e3 * (rounds[-1].end - start):.3g} ms"
        )
    return Section(
        "trace",
        "The first rounds of a text",
        "As the paper's Figure 5, to scale: the first prompt, from its first token on (the "
        "target's prefill gave that). A round's draft calls were timed together and are drawn "
        "equally long; draws from the draft are drawn with the sampling, behind the target's "
        "call. Above it: the tokens that the round emitted. White between blocks: the host.",
        f"Blocks on a time axis. {'; '.join(said)}.",
        Table(
            ("γ", "round", "begin, ms", "end", "draft's prefill", "drafts", "target", "sampling",
             "accepted", "emitted"),
            rows,
        ),
    )  # fmt: skip


SECTIONS: tuple[Callable[[Measurement], Section], ...] = (
    sweep_section,
    positions_section,
    histogram_section,
    widths_section,
    shares_section,
    lengths_section,
    trace_section,
)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def times(factor: float) -> str:
    return f"{factor:.2f}x"


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items)
