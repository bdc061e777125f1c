"""The goals of the project that texts side by side can tell, and how far they are met."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.fit import Spread
from ...systems.protocol import Text

BASE = "transformers plain"
OWN = "outrider plain"
DRAFT = "outrider draft"
LLAMA = "llama.cpp plain"
SPECULATIVE = (DRAFT, "outrider auto", "outrider lookup")
ASSISTED = ("transformers draft", "transformers assistant", "transformers lookup")
OTHERS_PLAIN = (BASE, "genai plain", LLAMA)  # in float32, as we are
Row = dict[str, Text]  # the texts of one prompt, by system


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
    return max(there, key=lambda name: statistics.median(ratios(shared, name, there[0])))


def first_tokens(rows: Sequence[Row]) -> list[float]:
    """How many times as fast as the best of the others' our first token came, prompt by prompt."""
    found = []
    for row in rows:
        others = [row[name].first.seconds for name in OTHERS_PLAIN if name in row]
        if OWN in row and others:
            found.append(min(others) / row[OWN].first.seconds)
    return found


@dataclass(frozen=True)
class Goal:
    """wanted: the least, or where `at_most` the most, that the median of `found` may be; found is
    None where this run has nothing to tell it by."""

    name: str
    wanted: float
    found: Spread | None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.found is None:
            return None
        value = self.found.median
        return value <= self.wanted if self.at_most else value >= self.wanted

    def json_object(self) -> dict[str, Any]:
        return {
            "goal": self.name, "wanted": self.wanted, "at_most": self.at_most,
            "found": None if self.found is None else f"{self.found}", "met": self.met,
        }  # fmt: skip


def goals(
    rows: Sequence[Row], quotients: Sequence[float], memory: Mapping[str, Mapping[str, Any]],
    loads: Sequence[float],
) -> list[Goal]:  # fmt: skip
    """rows: of all prompts, at all temperatures. quotients: measured over predicted speedups, of
    each prompt. memory: see `figures.of_memory`. loads: seconds, of our bundle."""

    def over(fast: str | None, slow: str | None) -> Spread | None:
        return Spread.of(ratios(rows, fast, slow)) if fast and slow else None

    ours, theirs = best(rows, SPECULATIVE), best(rows, ASSISTED)
    held = [entry["ratio"] for name, entry in memory.items() if name.startswith("outrider")]
    return [
        Goal("plain decoding, times Transformers' plain", 3.0, over(OWN, BASE)),
        Goal("plain decoding, times llama.cpp's float32", 1.0, over(OWN, LLAMA)),
        Goal(f"{ours or 'speculative'}, times Transformers' plain", 6.0, over(ours, BASE)),
        Goal(f"{ours or 'speculative'}, times {theirs or 'Transformers assisted'}", 3.0,
             over(ours, theirs)),
        Goal(f"{ours or 'speculative'}, times our plain", 1.6, over(ours, OWN)),
        Goal("speedup measured over predicted by Theorem 3.8", 0.95, Spread.of(quotients)),
        Goal("first token, times as fast as the best of the others'", 1.0,
             Spread.of(first_tokens(rows))),
        Goal("seconds to load the bundle", 2.0, Spread.of(loads), at_most=True),
        Goal("peak memory over weights and cache, of each mode", 1.2, Spread.of(held),
             at_most=True),
    ]  # fmt: skip
