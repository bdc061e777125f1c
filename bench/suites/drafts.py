"""Measure acceptance and speedup of each kind of draft on a bundle.

Repeats Table 3 of Leviathan et al. 2023 for the drafts of this runtime, with measured speedups and
those that the theorem predicts; lookups on prompts with much to copy; the draft's own temperature;
stopping when the draft is unsure. Prompts are held-out documents of the bundled pair's corpus;
tables and the lookups' corpus are counted from its training documents. All ways of a group decode a
prompt before the next one, and the times of their rounds are compared (bench.core.runs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.corpus import collect
from runtime.drafts.lookup import Corpus
from runtime.drafts.tables import Tables
from runtime.round import HostRounds
from runtime.stats import Stats
from runtime.text.engine import TextEngine

from ..core import machine, runs
from ..core.clock import LOST_LIMIT, Clock
from ..core.command import Results, Suite, bundle_option
from ..core.costs import costs_from_rounds, describe_plain_steps, predicted_speedup
from ..core.fit import rounded
from ..core.prompts import Prompts
from ..core.runs import TextRuns, Way, measured_speedup
from ..core.table import Column, Table, make_table

PLAIN = "plain"
CORPUS = "ngram + corpus"
DRAFTS = ("random", "unigram", "bigram", "skip", "ngram", CORPUS, "copy", "chain", "model")
COUNTED_DRAFTS = frozenset({"unigram", "bigram", "skip", CORPUS})  # counts of training documents
DISTANCES = 8  # between the tokens of a pair, for "skip"
MODEL_GAMMA = 4  # draft tokens, where only one gamma is measured
TABLE_3, COPYING = "Drafts, each with its best gamma", "Lookups and the draft model, by prompts"
DRAFT_TEMPERATURE = "The draft's own temperature"
DRAFT_THRESHOLD = "Stopping when the draft is unsure"
KINDS = {"completion": "held-out code", "editing": "functions", "table": "tables"}


@dataclass(frozen=True)
class DraftScale:
    """texts: number per group. tokens: length of an output. characters: approximate size of the
    training documents used. patience: seconds for repeating disturbed texts. prompt: length of a
    prompt in tokens."""

    texts: int
    tokens: int
    gammas: tuple[int, ...]
    characters: int
    patience: float
    prompt: int = 128


# Prompt, output and drafts fit into 256 rows, so that the size of a cache never changes.
FULL = DraftScale(10, 96, (1, 2, 4, 8), 4_000_000, 30)
QUICK = DraftScale(3, 48, (2, 8), 1_000_000, 0)


@dataclass(frozen=True)
class Group:
    """Ways to use one draft, and therefore with the same costs, on prompts of one kind. ways: their
    options by name. counted: whether to use the engine with tables and corpus of the training
    documents."""

    section: str
    name: str
    prompts: str
    temperature: float
    ways: Mapping[str, Mapping[str, Any]]
    counted: bool = False


def groups(scale: DraftScale, max_gamma: int) -> Iterator[Group]:
    """All groups that are measured. max_gamma: the largest gamma of the bundle."""
    gammas = [gamma for gamma in scale.gammas if gamma <= max_gamma] or [max_gamma]
    for name in DRAFTS:
        draft = "ngram" if name == CORPUS else name
        ways = {f"gamma {gamma}": {"draft": draft, "gamma": gamma} for gamma in gammas}
        for t in (0.0, 1.0):
            yield Group(TABLE_3, f"{name}, T={t:g}", "completion", t, ways, name in COUNTED_DRAFTS)
    for kind, name in KINDS.items():
        for draft in ("ngram", "copy", "model"):
            ways = {draft: {"draft": draft, "gamma": gammas[-1]}}
            yield Group(COPYING, name, kind, 0.0, ways)
    model = {"draft": "model", "gamma": min(MODEL_GAMMA, max_gamma)}
    ways = {f"draft at {t:g}": {**model, "draft_temperature": t} for t in (0.5, 0.7, 1.0, 1.4)}
    yield Group(DRAFT_TEMPERATURE, "T=1", "completion", 1.0, ways)
    model = {"draft": "model", "gamma": max_gamma}
    ways = {f"threshold {p:g}": {**model, "draft_threshold": p} for p in (0.0, 0.2, 0.4, 0.6)}
    yield Group(DRAFT_THRESHOLD, "T=0", "completion", 0.0, ways)


def group_figures(texts: TextRuns[str], max_gamma: int) -> dict[str, Any]:
    """Figures of texts decoded in several ways, one of which is PLAIN: one row per way, with costs
    from all ways together; alpha over all ways, because it does not depend on gamma (section 3.1);
    and the fastest way.

    Times come from the undisturbed texts, counts from all.
    """
    undisturbed = runs.undisturbed_texts(texts)
    names = [name for name in texts[0] if name != PLAIN]
    costs = costs_from_rounds(
        [text[PLAIN] for text in undisturbed],
        [text[name] for text in undisturbed for name in names],
        max_gamma,
    )
    speedups = {name: measured_speedup(undisturbed, name, PLAIN) for name in names}
    rows = dict[str, Any]()
    for name in names:
        stats = Stats.total(text[name].stats for text in texts)
        gammas = [x.gamma for text in undisturbed for x in text[name].rounds]
        rows[name] = {
            "alpha": rounded(stats.acceptance_rate),
            "tau": rounded(stats.mean_acceptance_length),
            "drafted_of_a_round": rounded(stats.drafted / stats.rounds),
            "accepted_of_drafted": rounded(stats.accepted / max(1, stats.drafted)),
            "speedup": speedups[name].json_object(),
            "predicted": rounded(predicted_speedup(stats.acceptance_rate, gammas, costs)),
        }
    all_stats = Stats.total(text[name].stats for text in texts for name in names)
    return {
        "alpha": rounded(all_stats.acceptance_rate),
        "best": max(names, key=lambda name: speedups[name].total),
        "texts": len(undisturbed), "lost": rounded(runs.disturbance(undisturbed)),
        "rows": rows,
    }  # fmt: skip


def engine_with_counts(engine: TextEngine, documents: Sequence[str]) -> tuple[TextEngine, int]:
    """An engine with the same models, on the CPU, with tables and a corpus of these documents; and
    the number of their tokens."""
    rounds, tokenizer = engine.decoder.rounds, engine.tokenizer
    assert isinstance(rounds, HostRounds)
    ids: list[int] = []
    for document in documents:
        ids += tokenizer.encode(document)  # starts with a separator, as in training
    tables = Tables.count(np.array(ids, np.int32), engine.decoder.vocab_size, DISTANCES)
    own = HostRounds(rounds.target, rounds.draft, rounds.sampler, tables=tables, corpus=Corpus(ids))
    return runs.fresh_engine(engine, own), len(ids)


def run(folder: str, scale: DraftScale, threads: int, clock: Clock) -> dict[str, Any]:
    """Measure all groups; returns the JSON object. Raises OutriderError as `load_pair` does."""
    clock.patience = scale.patience
    engine = runs.load_pair(folder, threads)
    max_gamma = engine.decoder.max_gamma
    clock.note("reading the bundled pair's corpus, counting its tables")
    corpus = collect()
    step = max(1, sum(map(len, corpus.train)) // scale.characters)
    counted_engine, tokens = engine_with_counts(engine, corpus.train[::step])
    prompt_maker = Prompts(engine.tokenizer, corpus.held_out)
    prompts = {kind: prompt_maker.many(kind, scale.texts, scale.prompt) for kind in KINDS}
    all_groups, results = list(groups(scale, max_gamma)), []
    for number, group in enumerate(all_groups, 1):
        clock.note(f"{number} of {len(all_groups)} groups | {group.section}: {group.name}")
        at: dict[str, Any] = {"temperature": group.temperature}
        drafting = counted_engine if group.counted else engine
        ways = {name: Way(drafting, {**options, **at}) for name, options in group.ways.items()}
        ways[PLAIN] = Way(engine, {"gamma": 0, **at})
        runs.warm_up(ways, prompts[group.prompts][0])
        texts = [
            runs.decode_all(ways, prompt, scale.tokens, seed, clock)
            for seed, prompt in enumerate(prompts[group.prompts])
        ]
        results.append(
            {"section": group.section, "name": group.name, **group_figures(texts, max_gamma)}
        )
    return {
        "bundle": engine.manifest.name, "machine": machine.describe(threads),
        "plain_width": engine.decoder.target.min_width,
        "texts": scale.texts, "tokens": scale.tokens, "counted_tokens": tokens, "groups": results,
    }  # fmt: skip


F2, F3 = ",.2f", ",.3f"
COLUMNS: tuple[Column, ...] = (
    ("alpha", "alpha", F3), ("tau", "tau", F2), ("drafted_of_a_round", "drafted", F2),
    ("accepted_of_drafted", "accepted", ".0%"), ("total", "speed", F2),
    ("median", "median", F2), ("predicted", "predicted", F2),
)  # fmt: skip


def tables(results: Results) -> list[Table]:
    """One table per section with a row for each way; for Table 3 one row per draft, with its best
    gamma, and alpha over all gammas."""
    sections: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for group in results["groups"]:
        for way, row in group["rows"].items():
            values = {**row, **row["speedup"], "disturbed": group["lost"] > LOST_LIMIT}
            if group["section"] == TABLE_3:
                if way != group["best"]:
                    continue
                values["alpha"] = group["alpha"]
            sections.setdefault(group["section"], []).append((f"{group['name']}, {way}", values))
    return [make_table(section, rows, COLUMNS) for section, rows in sections.items()]


def heading(results: Results) -> str:
    """The conditions of the figures."""
    return (
        f"{machine.summary_line(results['machine'])}; {results['texts']} prompts per kind, "
        f"{results['tokens']} tokens each; tables and corpus of {results['counted_tokens']:,} "
        "tokens. drafted: tokens per round; accepted: share of the drafted tokens; speed: relative "
        "to plain decoding, over all texts, without the prefill "
        f"({describe_plain_steps(results['plain_width'])}); median: of the texts' speeds; "
        "predicted: by Theorem 3.8 with the costs of this run. * other processes took over 2 % of "
        "the time"
    )


SUITE = Suite(
    name="drafts",
    about=__doc__ or "",
    quick="3 short texts per kind, 2 gammas: half a minute",
    measure=lambda args, clock: run(
        args.engines, QUICK if args.quick else FULL, args.threads, clock
    ),
    tables=tables,
    heading=heading,
    options=bundle_option,
)
main = SUITE.main
