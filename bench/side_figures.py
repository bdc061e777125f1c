"""What the texts of bench/side.py come to: speeds and their ratios, acceptance, bytes a second,
the prediction of Theorem 3.8, memory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.theory.formulas import expected_tokens, speedup

from .peers import StepCosts, Text
from .side_run import GAMMA, MEMORY_SHAPE, Job, Run, System
from .timing import DISTURBED

BASE = "transformers plain"
OWN = "outrider plain"
DRAFT = "outrider draft"
LLAMA = "llama.cpp plain"
ROUND = ("time_draft", "time_verify", "time_sample", "time_host")  # ms, the draft's prefill apart
Row = dict[str, Text]  # the texts of one prompt, by system


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles, of `count` values."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of no values."""
        if not values:
            return None
        low, middle, high = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else [values[0]] * 3
        )
        return Spread(round(middle, 3), round(low, 3), round(high, 3), len(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def decodes(row: Row, name: str) -> bool:
    """Whether the system has a text with more than one round: a short one may have no other."""
    return name in row and bool(row[name].round_tokens())


def ratios(rows: Iterable[Row], fast: str, slow: str) -> list[float]:
    """How many times as fast one system decoded as another, for each prompt that both have."""
    return [
        row[slow].decoding().seconds / row[fast].decoding().seconds
        for row in rows
        if decodes(row, fast) and decodes(row, slow)
    ]


def best(rows: Sequence[Row], names: Sequence[str]) -> str | None:
    """The fastest of some systems, on the prompts that all of those have that are there at all."""
    there = [name for name in names if any(name in row for row in rows)]
    shared = [row for row in rows if all(decodes(row, name) for name in there)]
    if not there or not shared:
        return None

    def gain(name: str) -> float:
        return statistics.median(ratios(shared, name, there[0]))

    return max(there, key=gain)


@dataclass(frozen=True)
class Sizes:
    """Bytes: of the weights, of a row of all layers' caches, and the draft's. reads: rows that are
    in the cache halfway through the output. bandwidth: bytes a second."""

    weights: int
    row: int
    draft_weights: int
    draft_row: int
    reads: float
    bandwidth: float

    def of_round(self, drafted: float) -> float:
        """What a round with so many draft steps has to read."""
        target = self.weights + self.reads * self.row
        return target + drafted * (self.draft_weights + self.reads * self.draft_row)


def row_bytes(checkpoint: Path, element: int) -> int:
    """Of one token's keys and values in all layers. element: bytes of a number."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * width * element)


def acceptance(texts: Sequence[Text], system: System) -> dict[str, float]:
    """Accepted of examined and of drafted, and drafted a round, where it is known.

    Ours are counted. A peer's that drafts GAMMA tokens each round follow from how many its rounds
    gave; the last round may be cut short and is left out.
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


def summary(rows: Sequence[Row], system: System, sizes: Sizes | None) -> dict[str, Any] | None:
    """Of one system: tokens a second, TPOT and TTFT in ms (medians over prompts), how many times as
    fast as the bases, tau and acceptance, our host's share, and what a round reads. None without
    texts of more than a round. sizes: None where the prompts are of several lengths."""
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
        "ttft_ms": round(1e3 * statistics.median(t.first_seconds for t in texts), 2),
        "prompts": len(texts),
        "disturbed": sum(text.decoding().lost > DISTURBED for text in texts),
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
    drafted = accepted.get("drafted_a_round", 0.0 if system.mode in ("plain", "lookup") else None)
    if sizes is not None and drafted is not None:
        size = sizes.of_round(0.0 if system.mode == "lookup" else drafted)
        floor = size / sizes.bandwidth / found["tau"]
        found |= {
            "round_bytes": round(size),
            "gb_s": round(size / found["tau"] / tpot / 1e9, 3),
            "floor_ms": round(1e3 * floor, 3),
            "of_bandwidth": round(floor / tpot, 4),
        }
    return found


def theory(rows: Sequence[Row], costs: Sequence[StepCosts | None]) -> dict[str, Any] | None:
    """Our drafted texts against Theorem 3.8. None without them.

    measured: speed over our plain decoding, without any prefill. predicted: from alpha (accepted of
    examined), from gamma (drafted of a round) and from c and verify, in plain steps: calls of the
    engines alone, measured after the prompt's texts. So what the prediction does not know, sampling
    and host and that acceptances are not independent, shows in the quotients; tau against
    tau_expected is the last of them. All of it prompt by prompt, and medians told.
    """
    found = [
        _predicted(row[OWN].notes, row[DRAFT].notes, cost)
        for row, cost in zip(rows, costs, strict=False)
        if cost and OWN in row and DRAFT in row and row[DRAFT].notes.get("drafted")
    ]
    if not found:
        return None
    measured = Spread.of([one["measured"] for one in found])
    assert measured is not None
    return {
        **{key: round(statistics.median(one[key] for one in found), 4) for key in found[0]},
        "measured": measured.median,
        "measured_low": measured.low,
        "measured_high": measured.high,
        "quotients": [round(one["measured_over_predicted"], 4) for one in found],
    }


def _predicted(plain: dict[str, Any], fast: dict[str, Any], cost: StepCosts) -> dict[str, float]:
    """`theory` of one prompt. plain, fast: what our two texts have counted."""

    def pace(notes: dict[str, Any]) -> float:
        """Milliseconds a token after the first."""
        return float(sum(notes[part] for part in ROUND)) / (float(notes["output_tokens"]) - 1)

    alpha, gamma = fast["accepted"] / fast["examined"], fast["drafted"] / fast["rounds"]
    c = cost.draft / cost.widths[0]
    widths = range(1, len(cost.widths) + 1)
    # The last round may draft less, so that gamma is no whole number.
    verify = float(np.interp(gamma + 1, widths, cost.widths)) / cost.widths[0]
    measured, expected = pace(plain) / pace(fast), speedup(alpha, gamma, c, verify)
    return {
        "alpha": alpha,
        "gamma": gamma,
        "tau": (fast["output_tokens"] - 1) / fast["rounds"],
        "tau_expected": expected_tokens(alpha, gamma),
        "c": c,
        "verify": verify,
        "measured": measured,
        "predicted": expected,
        "measured_over_predicted": measured / expected,
    }


def memory(run: Run, target: Path, draft: Path) -> dict[str, dict[str, Any]]:
    """Of each system the bytes of its peak against those of weights and cache.

    cache: of the rows that the text has in the end, of the models that decode it.
    """
    rows, found = sum(MEMORY_SHAPE), {}
    for name, sizes in run.memory.items():
        models = [target, draft] if sizes["draft_weights"] else [target]
        cache = rows * sum(row_bytes(model, sizes["cache_element"]) for model in models)
        needed = sizes["weights"] + sizes["draft_weights"] + cache
        found[name] = {
            "peak": sizes["peak"],
            "before": sizes["before"],
            "weights": sizes["weights"] + sizes["draft_weights"],
            "cache": cache,
            "ratio": round(sizes["peak"] / needed, 3),
            "ratio_without_libraries": round((sizes["peak"] - sizes["before"]) / needed, 3),
        }
    return found


def sizes_of(run: Run, job: Job, system: System, pair: tuple[Path, Path], rate: float) -> Sizes:
    """pair: target and draft. rate: the machine's, bytes a second."""
    facts = run.facts[system.worker]
    target, draft = (row_bytes(model, facts["cache_element"]) for model in pair)
    reads = len(job.load.prompts[0]) + job.load.new_tokens / 2
    return Sizes(facts["weights"], target, facts["draft_weights"], draft, reads, rate)
