"""The goals of the project that bench/side.py can tell, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .side_figures import BASE, LLAMA, OWN, Row, Spread, best, ratios

SPECULATIVE = ("outrider draft", "outrider auto", "outrider lookup")
ASSISTED = ("transformers draft", "transformers assistant", "transformers lookup")
PEERS_PLAIN = (BASE, "genai plain", LLAMA)  # in float32, as we are


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
        found = None
        if self.found is not None:
            found = [self.found.median, self.found.low, self.found.high, self.found.count]
        return {
            "goal": self.name, "wanted": self.wanted, "at_most": self.at_most, "found": found,
            "met": self.met,
        }  # fmt: skip


def first_tokens(rows: Sequence[Row]) -> list[float]:
    """How many times as fast as the best peer's our first token came, prompt by prompt."""
    found = []
    for row in rows:
        others = [row[name].first_seconds for name in PEERS_PLAIN if name in row]
        if OWN in row and others:
            found.append(min(others) / row[OWN].first_seconds)
    return found


def goals(
    rows: Sequence[Row], quotients: Sequence[float], memory: Mapping[str, Mapping[str, Any]],
    loads: Sequence[float],
) -> list[Goal]:  # fmt: skip
    """rows: of all prompts, at all temperatures. quotients: measured over predicted speedups, of
    each prompt. memory: see `side_figures.memory`. loads: seconds, of our bundle."""

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
        Goal("first token, times as fast as the best peer's", 1.0, Spread.of(first_tokens(rows))),
        Goal("seconds to load the bundle", 2.0, Spread.of(loads), at_most=True),
        Goal("peak memory over weights and cache, of each mode", 1.2, Spread.of(held),
             at_most=True),
    ]  # fmt: skip
