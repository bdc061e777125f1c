"""python -m bench.drafts: what each kind of draft brings on a bundle: Table 3 of Leviathan et al.
2023 for the drafts of this runtime, with the speedups that the theorem expects and those measured;
lookups where there is much to copy; the draft's own temperature; stopping where it is unsure.

Prompts are held-out documents of the bundled pair's corpus; tables and the lookups' corpus are
counted from its training documents. All ways of a group decode a prompt before the next one, and
the times of the rounds are compared (bench/ways.py). Progress goes to stderr, tables to stdout, one
JSON line last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from models.corpus import collect
from runtime.costs import RoundCosts
from runtime.text.engine import TextEngine

from . import code_text, machine
from .estimates import rounded
from .timing import DISTURBED
from .ways import (
    BUSY,
    Clock,
    Gain,
    Run,
    Way,
    acceptance,
    command,
    costs_object,
    costs_of,
    decode_all,
    disturbance,
    gain,
    load_pair,
    predicted,
    quiet,
    total,
    warm_up,
)

PLAIN = "plain"
CORPUS = "ngram + corpus"
LOOKUPS = "ngram", "copy"
DRAFTS = ("random", "unigram", "bigram", "skip", "ngram", CORPUS, "copy", "chain", "model")
COUNTED = frozenset({"unigram", "bigram", "skip", CORPUS})  # of the training documents
DISTANCES = 8  # of pairs, for "skip"
TEMPERATURES = (0.0, 1.0)
DRAFT_TEMPERATURES = (0.5, 0.7, 1.0, 1.4)
THRESHOLDS = (0.0, 0.2, 0.4, 0.6)
SEVERAL = 4  # draft tokens, where only one gamma is measured and none is long

Options = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """texts: of a group. prompt, function, tokens: of a prompt, of one with a function twice, of an
    output. characters: of training documents. patience: seconds for disturbed texts."""

    texts: int
    prompt: int
    function: int
    tokens: int
    gammas: tuple[int, ...]
    characters: int
    patience: float


# Prompt, output and drafts fit 256 rows, so that a cache has one size throughout.
FULL = Scale(10, 96, 128, 96, (1, 2, 4, 8), 4_000_000, 30)
QUICK = Scale(3, 96, 128, 48, (2, 8), 1_000_000, 0)


@dataclass(frozen=True, slots=True)
class Row:
    """A way against plain decoding.

    alpha: accepted of examined. tau, drafted: tokens of a round. kept: accepted of drafted. costs:
    of all ways of the group.
    """

    alpha: float
    examined: int
    tau: float
    drafted: float
    kept: float
    costs: RoundCosts
    gain: Gain
    predicted: float
    texts: int
    lost: float

    def json_object(self) -> dict[str, Any]:
        return {
            "alpha": rounded(self.alpha),
            "examined": self.examined,
            "tau": rounded(self.tau),
            "drafted_of_a_round": rounded(self.drafted),
            "accepted_of_drafted": rounded(self.kept),
            "speedup": self.gain.json_object(),
            "predicted": rounded(self.predicted),
        }


def json_of(rows: Mapping[str, Row], gamma: int | None = None) -> dict[str, Any]:
    """Of a group, whose costs are the same for all rows. gamma: where all rows have it."""
    some = next(iter(rows.values()))
    return {
        **({} if gamma is None else {"gamma": gamma}),
        "texts": some.texts,
        "lost": rounded(some.lost),
        **costs_object(some.costs),
        "rows": {name: row.json_object() for name, row in rows.items()},
    }


def rows_of(texts: Sequence[Mapping[str, Run]], max_gamma: int) -> dict[str, Row]:
    """texts: of each the runs by way, one of them PLAIN. Costs are those of all ways together, so
    ways with one kind of draft. What is timed comes from the undisturbed texts, what is counted
    from all."""
    kept = quiet(texts)
    names = [name for name in texts[0] if name != PLAIN]
    drafting = [text[name] for text in kept for name in names]
    costs = costs_of([text[PLAIN] for text in kept], drafting, max_gamma)
    rows = {}
    for name in names:
        runs = [text[name] for text in texts]
        stats, alpha = total(runs), acceptance(runs)
        rows[name] = Row(
            alpha=alpha,
            examined=stats.examined,
            tau=stats.mean_acceptance_length,
            drafted=stats.drafted / stats.rounds,
            kept=stats.accepted / max(1, stats.drafted),
            costs=costs,
            gain=gain(kept, name, PLAIN),
            predicted=predicted(alpha, [text[name] for text in kept], costs),
            texts=len(kept),
            lost=disturbance(kept),
        )
    return rows


@dataclass
class Bench:
    """One run. counted: the engine with tables and a corpus. prompts: by kind."""

    engine: TextEngine
    counted: TextEngine
    scale: Scale
    clock: Clock
    prompts: Mapping[str, Sequence[Sequence[int]]]
    results: dict[str, Any] = field(default_factory=dict)
    groups: int = 0  # measured so far
    began: float = 0.0
    lost: float = 0.0  # the largest of all rows

    @property
    def most(self) -> int:
        return self.engine.decoder.max_gamma

    def group(
        self, title: str, kind: str, temperature: float, ways: Mapping[str, Options]
    ) -> dict[str, Row]:
        """Rows of these ways, on the prompts of a kind. ways: options of one kind of draft."""
        self.began = self.began or self.clock.seconds
        left = (self.clock.seconds - self.began) / max(1, self.groups) * (GROUPS - self.groups)
        self.clock.note(title + (f" | {left:.0f} s to go" if self.groups else ""))
        made = {PLAIN: Way(self.engine, {"gamma": 0, "temperature": temperature})}
        for name, options in ways.items():
            made[name] = self._way({**options, "temperature": temperature})
        prompts = self.prompts[kind]
        warm_up(made, prompts[0])
        texts = [
            decode_all(made, prompt, self.scale.tokens, seed, self.clock)
            for seed, prompt in enumerate(prompts)
        ]
        self.groups += 1
        rows = rows_of(texts, self.most)
        self.lost = max(self.lost, next(iter(rows.values())).lost)
        return rows

    def _way(self, options: Options) -> Way:
        draft = options["draft"]
        engine = self.counted if draft in COUNTED else self.engine
        return Way(engine, {**options, "draft": "ngram" if draft == CORPUS else draft})


# The sections: lines of a table as they are measured, and their part of the JSON object


def table_3(bench: Bench) -> Iterator[str]:
    """Every draft with every gamma; shown is the gamma that was fastest."""
    gammas = [gamma for gamma in bench.scale.gammas if gamma <= bench.most]
    found: dict[str, dict[str, Any]] = {}
    columns = "alpha  gamma  speedup  median   3.8 "
    yield "".join([f"{'held-out code':<15}", *(f" | T={t:g} {columns}" for t in TEMPERATURES)])
    for draft in DRAFTS:
        cells = [f"{draft:<15}"]
        for temperature in TEMPERATURES:
            ways = {f"{gamma}": {"draft": draft, "gamma": gamma} for gamma in gammas}
            title = f"{draft}, temperature {temperature:g}"
            rows = bench.group(title, "held-out", temperature, ways)
            best = max(rows, key=lambda name: rows[name].gain.total)
            alpha = pooled(list(rows.values()))
            row = rows[best]
            cells.append(
                f" | {alpha:9.3f}  {best:>5}  {row.gain.total:>6.2f}x {row.gain.median:>6.2f}x "
                f"{row.predicted:>5.2f}x"
            )
            found.setdefault(draft, {})[f"{temperature:g}"] = {
                "alpha": rounded(alpha), "best": int(best), **json_of(rows),
            }  # fmt: skip
        yield "".join(cells)
    bench.results["table_3"] = found


def pooled(rows: Sequence[Row]) -> float:
    """alpha of all gammas together: it is none of gamma's business (section 3.1)."""
    examined = sum(row.examined for row in rows)
    return sum(row.alpha * row.examined for row in rows) / max(1, examined)


def copying(bench: Bench) -> Iterator[str]:
    """Lookups where there is much to copy and where there is not, at temperature 0."""
    gamma = min(max(bench.scale.gammas), bench.most)
    found: dict[str, Any] = {}
    yield head("prompt, draft")
    for kind in bench.prompts:
        found[kind] = {}
        for draft in (*LOOKUPS, "model"):
            way = {"draft": draft, "gamma": gamma}
            rows = bench.group(f"{kind}, {draft}", kind, 0.0, {draft: way})
            found[kind][draft] = json_of(rows, gamma)
            yield line(f"{kind}, {draft}", rows[draft])
    bench.results["copying"] = found


def temperatures(bench: Bench) -> Iterator[str]:
    """The draft model hotter and colder than the target, which is at 1."""
    gamma = min(SEVERAL, bench.most)
    ways: dict[str, Options] = {
        f"{own:g}": {"draft": "model", "gamma": gamma, "draft_temperature": own}
        for own in DRAFT_TEMPERATURES
    }
    rows = bench.group("draft temperatures", "held-out", 1.0, ways)
    yield head(f"of the draft, gamma {gamma}")
    yield from (line(name, row) for name, row in rows.items())
    bench.results["draft_temperature"] = json_of(rows, gamma)


def thresholds(bench: Bench) -> Iterator[str]:
    """No more drafts after one that the draft gave a probability below a threshold."""
    found: dict[str, Any] = {}
    yield head(f"threshold, gamma {bench.most}")
    for temperature in TEMPERATURES:
        ways: dict[str, Options] = {
            f"{threshold:g}": {
                "draft": "model", "gamma": bench.most, "draft_threshold": threshold,
            }
            for threshold in THRESHOLDS
        }  # fmt: skip
        rows = bench.group(
            f"early stop, temperature {temperature:g}", "held-out", temperature, ways
        )
        yield from (line(f"T={temperature:g}, {name}", row) for name, row in rows.items())
        found[f"{temperature:g}"] = json_of(rows, bench.most)
    bench.results["threshold"] = found


def head(name: str) -> str:
    return f"{name:<22} alpha    tau  drafted  kept  speedup  median    3.8"


def line(name: str, row: Row) -> str:
    return (
        f"{name:<22} {row.alpha:5.3f}  {row.tau:5.2f}  {row.drafted:7.2f}  {row.kept:4.0%}  "
        f"{row.gain.total:6.2f}x {row.gain.median:6.2f}x {row.predicted:5.2f}x"
    )


SECTIONS: dict[str, Callable[[Bench], Iterator[str]]] = {
    "table_3": table_3, "copying": copying, "draft_temperature": temperatures,
    "threshold": thresholds,
}  # fmt: skip
GROUPS = len(DRAFTS) * len(TEMPERATURES) + 3 * (len(LOOKUPS) + 1) + 1 + len(TEMPERATURES)


def run(folder: str, scale: Scale, threads: int) -> dict[str, Any]:
    """All sections; the object of the JSON line. Raises OutriderError as `load_pair`."""
    clock = Clock(scale.patience)
    engine = load_pair(folder, threads)
    clock.note("the corpus of the bundled pair, and its tables")
    corpus = collect()
    part = code_text.training_part(corpus.train, scale.characters)
    counted, tokens = code_text.counting(engine, part, DISTANCES)
    tokenizer, texts = engine.tokenizer, scale.texts
    prompts = {
        "held-out": code_text.held_out(tokenizer, corpus.held_out, texts, scale.prompt),
        "functions": code_text.functions(tokenizer, corpus.held_out, texts, scale.function),
        "tables": code_text.tables(tokenizer, texts, scale.prompt),
    }
    bench = Bench(engine, counted, scale, clock, prompts)
    print(
        f"{texts} prompts of a kind, {scale.tokens} tokens each; tables and corpus of {tokens:,} "
        f"tokens in {len(part)} documents\nspeedup: of all texts; median: of the texts; 3.8: what "
        "Theorem 3.8 expects, with this run's costs"
    )
    for section in SECTIONS.values():
        print(flush=True)
        for text in section(bench):
            print(text, flush=True)
    if bench.lost > DISTURBED:
        print(f"\n{BUSY.format(bench.lost)}")
    return {
        "benchmark": "drafts",
        "bundle": engine.manifest.name,
        "machine": machine.describe(threads),
        "texts": texts,
        "tokens": scale.tokens,
        "counted_tokens": tokens,
        **bench.results,
        "seconds": round(clock.seconds, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""

    def measured(args: argparse.Namespace) -> dict[str, Any]:
        scale = QUICK if args.quick else FULL
        scale = replace(scale, texts=args.texts or scale.texts)
        return run(args.engines, scale, args.threads)

    quick = "3 short texts of each kind, 2 gammas: half a minute"
    return command("drafts", __doc__, quick, "kind", measured, argv)


if __name__ == "__main__":
    raise SystemExit(main())
