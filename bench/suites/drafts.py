"""What each kind of draft brings on a bundle.

Table 3 of Leviathan et al. 2023 for the drafts of this runtime, with the speedups that the theorem
expects and those measured; lookups where there is much to copy; the draft's own temperature;
stopping where it is unsure. Prompts are held-out documents of the bundled pair's corpus; tables and
the lookups' corpus are counted from its training documents. All ways of a group decode a prompt
before the next one, and the times of the rounds are compared (bench.core.runs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.corpus import collect
from runtime.drafts.lookup import Corpus
from runtime.drafts.tables import Tables
from runtime.round import HostRounds
from runtime.text.engine import TextEngine

from ..core import machine
from ..core.clock import DISTURBED, Clock
from ..core.command import Results, Suite, bundle_option
from ..core.costs import acceptance, costs_object, of_rounds, predicted, total
from ..core.fit import rounded
from ..core.prompts import Prompts
from ..core.runs import (
    Texts,
    Way,
    decode_all,
    disturbance,
    fresh,
    gain,
    load_pair,
    quiet,
    warm_up,
)
from ..core.table import Column, Table, decimals, table_of

PLAIN = "plain"
CORPUS = "ngram + corpus"
DRAFTS = ("random", "unigram", "bigram", "skip", "ngram", CORPUS, "copy", "chain", "model")
COUNTED = frozenset({"unigram", "bigram", "skip", CORPUS})  # of the training documents
DISTANCES = 8  # of pairs, for "skip"
SEVERAL = 4  # draft tokens, where only one gamma is measured and none is long
TABLE_3, COPYING, HOT, UNSURE = "Table 3", "copying", "draft's temperature", "early stop"
KINDS = {"completion": "held-out code", "editing": "functions", "table": "tables"}


@dataclass(frozen=True)
class DraftScale:
    """texts: of a group. prompt, tokens: of a prompt, of an output. characters: of training
    documents. patience: seconds for disturbed texts."""

    texts: int
    tokens: int
    gammas: tuple[int, ...]
    characters: int
    patience: float
    prompt: int = 128


# Prompt, output and drafts fit 256 rows, so that a cache has one size throughout.
FULL = DraftScale(10, 96, (1, 2, 4, 8), 4_000_000, 30)
QUICK = DraftScale(3, 48, (2, 8), 1_000_000, 0)


@dataclass(frozen=True)
class Group:
    """Ways of drafting of one kind, so of one draft's costs, on prompts of one kind.

    ways: by name their draft, gamma and other options.
    """

    section: str
    name: str
    prompts: str
    temperature: float
    ways: Mapping[str, Mapping[str, Any]]


def groups(scale: DraftScale, most: int) -> Iterator[Group]:
    """All that is measured. most: the largest gamma of the bundle."""
    gammas = [gamma for gamma in scale.gammas if gamma <= most]
    for draft in DRAFTS:
        for t in (0.0, 1.0):
            ways = {f"{gamma}": {"draft": draft, "gamma": gamma} for gamma in gammas}
            yield Group(TABLE_3, draft, "completion", t, ways)
    for kind, name in KINDS.items():
        for draft in ("ngram", "copy", "model"):
            ways = {draft: {"draft": draft, "gamma": gammas[-1]}}
            yield Group(COPYING, f"{name}, {draft}", kind, 0.0, ways)
    model = {"draft": "model", "gamma": min(SEVERAL, most)}
    ways = {f"{t:g}": {**model, "draft_temperature": t} for t in (0.5, 0.7, 1.0, 1.4)}
    yield Group(HOT, "model", "completion", 1.0, ways)
    for t in (0.0, 1.0):
        model = {"draft": "model", "gamma": most}
        ways = {f"{p:g}": {**model, "draft_threshold": p} for p in (0.0, 0.2, 0.4, 0.6)}
        yield Group(UNSURE, "model", "completion", t, ways)


@dataclass
class Drafting:
    """One run. counted: the engine with tables and a corpus. prompts: by kind."""

    engine: TextEngine
    counted: TextEngine
    scale: DraftScale
    clock: Clock
    prompts: Mapping[str, Sequence[Sequence[int]]]

    def measure(self, group: Group) -> dict[str, Any]:
        """The group's texts, and what they come to."""
        made = {PLAIN: Way(self.engine, {"gamma": 0, "temperature": group.temperature})}
        for name, options in group.ways.items():
            draft = options["draft"]
            made[name] = Way(
                self.counted if draft in COUNTED else self.engine,
                {**options, "draft": "ngram" if draft == CORPUS else draft,
                 "temperature": group.temperature},
            )  # fmt: skip
        prompts = self.prompts[group.prompts]
        warm_up(made, prompts[0])
        texts = [
            decode_all(made, prompt, self.scale.tokens, seed, self.clock)
            for seed, prompt in enumerate(prompts)
        ]
        return {
            "section": group.section, "name": group.name, "temperature": group.temperature,
            **figures(texts, self.engine.decoder.max_gamma),
        }  # fmt: skip


def figures(texts: Texts[str], most: int) -> dict[str, Any]:
    """Of texts decoded in several ways, one of them PLAIN: costs of all ways together; a row for
    each; alpha of all, since it is none of gamma's business (section 3.1); the fastest way.

    What is timed comes from the undisturbed texts, what is counted from all.
    """
    kept = quiet(texts)
    names = [name for name in texts[0] if name != PLAIN]
    costs = of_rounds(
        [text[PLAIN] for text in kept], [text[name] for text in kept for name in names], most
    )
    rows, best = {}, max(names, key=lambda name: gain(kept, name, PLAIN).total)
    for name in names:
        runs = [text[name] for text in texts]
        stats, alpha = total(runs), acceptance(runs)
        gammas = [x.gamma for text in kept for x in text[name].rounds]
        rows[name] = {
            "alpha": rounded(alpha),
            "tau": rounded(stats.mean_acceptance_length),
            "drafted_of_a_round": rounded(stats.drafted / stats.rounds),
            "accepted_of_drafted": rounded(stats.accepted / max(1, stats.drafted)),
            "speedup": gain(kept, name, PLAIN).json_object(),
            "predicted": rounded(predicted(alpha, gammas, costs)),
        }
    return {
        "alpha": rounded(acceptance([text[name] for text in texts for name in names])),
        "best": best, "texts": len(kept), "lost": rounded(disturbance(kept)),
        **costs_object(costs), "rows": rows,
    }  # fmt: skip


def training_part(documents: Sequence[str], characters: int) -> list[str]:
    """Documents from all over the corpus, until they have so many characters."""
    part: list[str] = []
    for i in np.random.default_rng(0).permutation(len(documents)):
        if characters <= 0:
            break
        part.append(documents[i][:characters])
        characters -= len(part[-1])
    return part


def counting(
    engine: TextEngine, documents: Sequence[str], distances: int
) -> tuple[TextEngine, int]:
    """The same models, on the CPU, with tables and a corpus of these documents; and how many tokens
    those have."""
    rounds, tokenizer = engine.decoder.rounds, engine.tokenizer
    assert isinstance(rounds, HostRounds)
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document)  # a separator in front, as in training
    tables = Tables.count(np.array(ids, np.int32), engine.decoder.vocab_size, distances)
    own = HostRounds(rounds.target, rounds.draft, rounds.sampler, tables=tables, corpus=Corpus(ids))
    return fresh(engine, own), len(ids)


def run(folder: str, scale: DraftScale, threads: int, clock: Clock) -> dict[str, Any]:
    """All groups; the JSON object. Raises OutriderError as `load_pair`."""
    clock.patience = scale.patience
    engine = load_pair(folder, threads)
    clock.note("the corpus of the bundled pair, and its tables")
    corpus = collect()
    part = training_part(corpus.train, scale.characters)
    counted, tokens = counting(engine, part, DISTANCES)
    made = Prompts.of(engine.tokenizer, corpus.held_out)
    prompts = {kind: made.many(kind, scale.texts, scale.prompt) for kind in KINDS}
    drafting = Drafting(engine, counted, scale, clock, prompts)
    every, found, began = list(groups(scale, engine.decoder.max_gamma)), [], clock.seconds
    for number, group in enumerate(every):
        left = (clock.seconds - began) / max(1, number) * (len(every) - number)
        to_go = f" | {left:.0f} s to go" if number else ""
        clock.note(f"{group.section}: {group.name}, temperature {group.temperature:g}{to_go}")
        found.append(drafting.measure(group))
    return {
        "bundle": engine.manifest.name, "machine": machine.describe(threads),
        "texts": scale.texts, "tokens": scale.tokens, "counted_tokens": tokens, "groups": found,
    }  # fmt: skip


TWO, THREE = decimals(2), decimals(3)
SHARE: Callable[[Any], str] = "{:.0%}".format
ROWS: tuple[Column, ...] = (
    ("alpha", "alpha", THREE),
    ("tau", "tau", TWO),
    ("drafted_of_a_round", "drafted", TWO),
    ("accepted_of_drafted", "kept", SHARE),
    ("total", "speed", TWO),
    ("median", "median", TWO),
    ("predicted", "expected", TWO),
)
BEST: tuple[Column, ...] = tuple(
    column
    for t in (0, 1)
    for column in (
        (f"alpha {t}", f"alpha, T={t}", THREE),
        (f"best {t}", "gamma", str),
        (f"total {t}", "speed", TWO),
        (f"median {t}", "median", TWO),
        (f"predicted {t}", "expected", TWO),
    )
)


def tables(results: Results) -> list[Table]:
    """The best gamma of each draft; of the other sections every way."""
    best: dict[str, dict[str, Any]] = {}
    others: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for group in results["groups"]:
        disturbed = group["lost"] > DISTURBED
        if group["section"] == TABLE_3:
            row, t = group["rows"][group["best"]], f"{group['temperature']:g}"
            values = {"alpha": group["alpha"], "best": group["best"], **row["speedup"]}
            values["predicted"] = row["predicted"]
            mine = best.setdefault(group["name"], {})
            mine |= {f"{key} {t}": value for key, value in values.items()}
            mine["disturbed"] = mine.get("disturbed", False) or disturbed
            continue
        for way, row in group["rows"].items():
            name = group["name"] if way in group["name"] else f"T={group['temperature']:g}, {way}"
            values = {**row, **row["speedup"], "disturbed": disturbed}
            others.setdefault(group["section"], []).append((name, values))
    made = [table_of("The drafts, each with its best gamma", best.items(), BEST)]
    return made + [table_of(section, rows, ROWS) for section, rows in others.items()]


def heading(results: Results) -> str:
    """What the figures are of."""
    return (
        f"{machine.sentence(results['machine'])}; {results['texts']} prompts of a kind, "
        f"{results['tokens']} tokens each; tables and corpus of {results['counted_tokens']:,} "
        "tokens. speed: of all texts, over plain decoding, without the prefill; median: of the "
        "texts; expected: Theorem 3.8 with this run's costs. * other processes took over 2 % of "
        "the time"
    )


SUITE = Suite(
    name="drafts",
    about=__doc__ or "",
    quick="3 short texts of each kind, 2 gammas: half a minute",
    measure=lambda args, clock: run(
        args.engines, QUICK if args.quick else FULL, args.threads, clock
    ),
    tables=tables,
    heading=heading,
    options=bundle_option,
)
main = SUITE.main
