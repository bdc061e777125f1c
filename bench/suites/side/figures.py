"""What the texts of the side-by-side benchmark come to: speeds and their ratios, acceptance, bytes
a second, the prediction of Theorem 3.8, batches, memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.costs import RoundCosts
from runtime.theory.formulas import expected_tokens

from ...core.clock import DISTURBED
from ...core.costs import Traffic, predicted, row_bytes, verification
from ...core.fit import Spread
from ...systems.protocol import Text
from .goals import BASE, DRAFT, LLAMA, OWN, Row, decodes, goals, ratios
from .run import GAMMA, MEMORY_SHAPE, OURS, Batches, Found, Job, Place, System

ROUND = ("time_draft", "time_verify", "time_sample", "time_host")  # ms, the draft's prefill apart


def acceptance(texts: Sequence[Text], system: System) -> dict[str, float]:
    """Accepted of examined and of drafted, and drafted a round, where it is known.

    Ours are counted. Those of a system that drafts GAMMA tokens each round follow from how many its
    rounds gave; the last round may be cut short and is left out.
    """
    if system.mode == "plain":
        return {}
    if all("drafted" in text.notes for text in texts):
        sums = {
            key: sum(text.notes[key] for text in texts)
            for key in ("accepted", "examined", "drafted", "rounds")
        }
    elif system.mode == "draft":
        rounds = [tokens for text in texts for tokens in text.round_tokens()[:-1]]
        sums = {
            "accepted": sum(rounds) - len(rounds),
            "examined": sum(min(tokens, GAMMA) for tokens in rounds),
            "drafted": GAMMA * len(rounds),
            "rounds": len(rounds),
        }
    else:
        return {}
    if not sums["drafted"]:
        return {}
    return {
        "accepted_of_examined": round(sums["accepted"] / max(1, sums["examined"]), 4),
        "accepted_of_drafted": round(sums["accepted"] / sums["drafted"], 4),
        "drafted_a_round": round(sums["drafted"] / sums["rounds"], 3),
    }


def summary(
    rows: Sequence[Row], system: System, traffic: Traffic | None = None, bandwidth: float = 1.0
) -> dict[str, Any] | None:
    """Of one system: tokens a second, TPOT and TTFT in ms (medians over prompts), how many times as
    fast as the bases, tau and acceptance, our host's share, and what a round reads.

    None without texts of more than a round. traffic: None where the prompts are of several lengths.
    bandwidth: bytes a second.
    """
    name = system.name
    texts = [row[name] for row in rows if decodes(row, name)]
    if not texts:
        return None
    tpot = statistics.median(text.decoding().seconds for text in texts)
    counts = [count for text in texts for count in text.round_tokens()]
    accepted = acceptance(texts, system)
    found: dict[str, Any] = {
        "tpot_ms": round(1e3 * tpot, 3),
        "tokens_per_second": round(1 / tpot, 2),
        "ttft_ms": round(1e3 * statistics.median(t.first.seconds for t in texts), 2),
        "texts": len(texts),
        "lost": sum(text.decoding().lost > DISTURBED for text in texts),
        "tau": round(statistics.mean(counts), 3),
        **accepted,
        **{
            f"over {base}": round(statistics.median(gains), 3)
            for base in (BASE, OWN, LLAMA)
            if (gains := ratios(rows, name, base))
        },
    }
    if all("time_host" in text.notes for text in texts):
        host = sum(text.notes["time_host"] for text in texts)
        found["host"] = round(host / sum(text.notes[k] for text in texts for k in ROUND), 4)
    # Of others' lookups and assistants nobody knows what they have drafted.
    drafted = accepted.get("drafted_a_round", 0.0 if system.mode in ("plain", "lookup") else None)
    if traffic is not None and drafted is not None:
        size = traffic.of_round(0.0 if system.mode == "lookup" else drafted)
        floor = size / bandwidth / found["tau"]
        found |= {
            "gb_s": round(size / found["tau"] / tpot / 1e9, 3),
            "floor_ms": round(1e3 * floor, 3),
            "of_bandwidth": round(floor / tpot, 4),
        }
    return found


def theory(rows: Sequence[Row], costs: Sequence[RoundCosts | None]) -> dict[str, Any] | None:
    """Our drafted texts against Theorem 3.8. None without them.

    measured: speed over our plain decoding, without any prefill. predicted: from alpha (accepted of
    examined), from gamma (drafted of a round) and from c and verify: calls of the engines alone,
    measured after the prompt's texts. So what the prediction does not know, sampling and host and
    that acceptances are not independent, shows in the quotients; tau against tau_expected is the
    last of them. All of it prompt by prompt, and medians told.
    """
    found = [
        _predicted(row[OWN].notes, row[DRAFT].notes, cost)
        for row, cost in zip(rows, costs, strict=False)
        if cost and OWN in row and DRAFT in row and row[DRAFT].notes.get("drafted")
    ]
    measured = Spread.of([one["measured"] for one in found])
    if measured is None:
        return None
    return {
        **{key: round(statistics.median(one[key] for one in found), 4) for key in found[0]},
        "measured": measured.median,
        "measured_low": measured.low,
        "measured_high": measured.high,
        "quotients": [round(one["measured_over_predicted"], 4) for one in found],
    }


def _predicted(plain: dict[str, Any], fast: dict[str, Any], costs: RoundCosts) -> dict[str, float]:
    """`theory` of one prompt. plain, fast: what our two texts have counted."""

    def pace(notes: dict[str, Any]) -> float:
        """Milliseconds a token after the first."""
        return float(sum(notes[part] for part in ROUND)) / (float(notes["output_tokens"]) - 1)

    # The last round may draft less, so that gamma is no whole number.
    alpha, gamma = fast["accepted"] / fast["examined"], fast["drafted"] / fast["rounds"]
    measured, expected = pace(plain) / pace(fast), predicted(alpha, [gamma], costs)
    return {
        "alpha": alpha,
        "gamma": gamma,
        "tau": (fast["output_tokens"] - 1) / fast["rounds"],
        "tau_expected": expected_tokens(alpha, gamma),
        "c": costs.draft,
        "verify": verification(costs, gamma),
        "measured": measured,
        "predicted": expected,
        "measured_over_predicted": measured / expected,
    }


def of_texts(
    work: Sequence[Job], chosen: Sequence[System], found: Found, place: Place, bandwidth: float
) -> dict[str, Any]:
    """What the texts tell: by workload, all together, memory, loads and goals."""
    models = place.pair.target, place.pair.draft
    every: list[Row] = []
    cells: list[dict[str, Any]] = []
    whole: dict[str, list[Row]] = {}
    for job in work:
        rows = found.texts[job.name]
        every += rows
        if set(job.systems) == set(chosen):  # or medians would be over different prompts
            whole.setdefault(f"{job.temperature:g}", []).extend(rows)
        length = len(job.load.prompts[0])
        cells.append(
            {
                "name": job.name, "kind": job.load.name.split()[0], "prompt": length,
                "new_tokens": job.load.new_tokens, "temperature": job.temperature,
                "systems": _there(
                    (s.name, summary(rows, s, _traffic(found, job, s, models), bandwidth))
                    for s in job.systems
                    if s.worker in found.facts
                ),
                "theory": theory(rows, found.costs.get(job.name, ())),
            }
        )  # fmt: skip
    memory = of_memory(found, *models)
    quotients = [q for cell in cells if cell["theory"] for q in cell["theory"]["quotients"]]
    told = goals(every, quotients, memory, found.loads.get(f"{OURS} float32", []))
    floats = [facts["weights"] for facts in found.facts.values() if facts["dtype"] == "float32"]
    return {
        "floor_ms": round(1e3 * min(floats, default=0) / bandwidth, 3),  # weights, without a cache
        "cells": cells,
        "all": {
            temperature: {"systems": _there((s.name, summary(rows, s)) for s in chosen)}
            for temperature, rows in whole.items()
        },
        "memory": memory,
        "loads": {
            worker: asdict(spread)
            for worker, seconds in found.loads.items()
            if (spread := Spread.of(seconds))
        },
        "goals": [goal.json_object() for goal in told],
    }


def _there(pairs: Iterable[tuple[str, dict[str, Any] | None]]) -> dict[str, dict[str, Any]]:
    return {name: entry for name, entry in pairs if entry is not None}


def _traffic(found: Found, job: Job, system: System, models: tuple[Path, Path]) -> Traffic:
    """models: target and draft. The rows are those halfway through the output."""
    facts = found.facts[system.worker]
    row, draft_row = (row_bytes(model, facts["cache_element"]) for model in models)
    rows = len(job.load.prompts[0]) + job.load.new_tokens / 2
    return Traffic(facts["weights"], row, rows, facts["draft_weights"], draft_row)


def of_memory(found: Found, target: Path, draft: Path) -> dict[str, dict[str, Any]]:
    """Of each system the bytes of its peak against those of weights and cache.

    cache: of the rows that the text has in the end, of the models that decode it.
    """
    rows, told = sum(MEMORY_SHAPE), {}
    for name, sizes in found.memory.items():
        models = [target, draft] if sizes["draft_weights"] else [target]
        cache = rows * sum(row_bytes(model, sizes["cache_element"]) for model in models)
        needed = sizes["weights"] + sizes["draft_weights"] + cache
        told[name] = {
            "peak": sizes["peak"],
            "before": sizes["before"],
            "weights": sizes["weights"] + sizes["draft_weights"],
            "cache": cache,
            "ratio": round(sizes["peak"] / needed, 3),
            "ratio_without_libraries": round((sizes["peak"] - sizes["before"]) / needed, 3),
        }
    return told


# Batches


@dataclass(frozen=True)
class Together:
    """A batch: its size; tokens a second, all texts together, after every text has its first token
    and from the request on; and the share of that time lost to other processes.

    A draft's own prefill, where it comes after the first token, counts as decoding.
    """

    size: int
    decoding: float
    whole: float
    lost: float

    @staticmethod
    def of(texts: Sequence[Text]) -> Together:
        begin = max(text.times[0] for text in texts)
        last = max(texts, key=lambda text: text.times[-1])
        end = last.times[-1]
        after = sum(time > begin for text in texts for time in text.times)
        if not after:
            raise ValueError("no token after the prefill of the last text")
        every = sum(len(text.tokens) for text in texts)
        return Together(len(texts), after / (end - begin), every / end, last.lost[-1] / end)


def of_batches(batches: Batches, names: Sequence[str]) -> list[dict[str, Any]]:
    """For each size and system: tokens a second, medians; as multiples of the same system's at the
    smallest size, and of Transformers' at this size, batch by batch."""
    rows = {
        size: [{name: Together.of(texts) for name, texts in row.items()} for row in repeated]
        for size, repeated in batches.items()
    }
    one, told = rows[min(rows)], []
    for size, repeated in rows.items():
        for name in names:
            mine = [row[name] for row in repeated if name in row]
            if not mine:
                continue
            decoding = statistics.median(batch.decoding for batch in mine)
            told.append(
                {
                    "size": size,
                    "system": name,
                    "tokens_per_second": round(decoding, 2),
                    "each": round(decoding / size, 2),
                    "whole": round(statistics.median(batch.whole for batch in mine), 2),
                    "over_one": _over(repeated, name, one, name),
                    "over_transformers": _over(repeated, name, repeated, BASE),
                    "texts": len(mine),
                    "lost": sum(batch.lost > DISTURBED for batch in mine),
                }
            )
    return told


def _over(
    rows: Sequence[dict[str, Together]], name: str, others: Sequence[dict[str, Together]], base: str
) -> float | None:
    """How many times as fast a system decoded as another, batch by batch; None without both."""
    gains = [
        row[name].decoding / other[base].decoding
        for row, other in zip(rows, others, strict=True)
        if name in row and base in other
    ]
    return round(statistics.median(gains), 3) if gains else None
