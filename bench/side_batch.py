"""Several texts decoded together: 1, 2, 4 and 8 of them, by every system that can."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from .peers import Batch, Text, Unavailable
from .side_run import GAMMA, Place, Run, System, order, say, start
from .timing import DISTURBED

MODES = ("plain", "draft")
BASE = "transformers plain"


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


Rows = list[dict[str, Together]]  # for each repetition, by system


def batched(chosen: Sequence[System]) -> list[System]:
    return [s for s in chosen if s.mode in MODES and s.precision == "float32"]


def measure(
    chosen: Sequence[System], sizes: Sequence[int], times: int, new_tokens: int,
    prompt: Callable[[], list[int]], place: Place, run: Run,
) -> dict[int, Rows]:  # fmt: skip
    """Batches of fresh prompts, `times` of each size; each goes to all systems in turn."""
    rows: dict[int, Rows] = {size: [] for size in sizes}
    alive = {size: batched(chosen) for size in sizes}
    with ExitStack() as stack:
        peers = start(alive[sizes[0]], place, run, stack, slots=max(sizes))
        for turn in range(-1, times):  # the first is the warm-up
            for size in sizes:
                prompts = [prompt() for _ in range(size)]
                row: dict[str, Together] = {}
                for system in order(alive[size], turn, times):
                    if system.worker not in peers:
                        continue
                    request = Batch(prompts, new_tokens, system.mode, GAMMA)
                    try:
                        row[system.name] = Together.of(peers[system.worker].batch(request))
                    except Unavailable as error:
                        alive[size] = [s for s in alive[size] if s != system]
                        run.lacks(f"{system.name}, {size} together", error)
                if turn >= 0:
                    rows[size].append(row)
                    say(f"{size} together: {turn + 1} of {times}")
    return rows


def summary(rows: dict[int, Rows], names: Sequence[str]) -> list[dict[str, Any]]:
    """For each size and system: tokens a second, medians; as multiples of the same system's at the
    smallest size, and of Transformers' at this size, batch by batch."""
    found = []
    one = rows[min(rows)]
    for size, repeated in rows.items():
        for name in names:
            mine = [row[name] for row in repeated if name in row]
            if not mine:
                continue
            decoding = statistics.median(batch.decoding for batch in mine)
            found.append(
                {
                    "size": size,
                    "system": name,
                    "tokens_per_second": round(decoding, 2),
                    "each": round(decoding / size, 2),
                    "whole": round(statistics.median(batch.whole for batch in mine), 2),
                    "over_one": _over(repeated, name, one, name),
                    "over_transformers": _over(repeated, name, repeated, BASE),
                    "batches": len(mine),
                    "disturbed": sum(batch.lost > DISTURBED for batch in mine),
                }
            )
    return found


def _over(rows: Rows, name: str, others: Rows, base: str) -> float | None:
    """How many times as fast a system decoded as another, batch by batch; None without both."""
    ratios = [
        row[name].decoding / other[base].decoding
        for row, other in zip(rows, others, strict=True)
        if name in row and base in other
    ]
    return round(statistics.median(ratios), 3) if ratios else None
