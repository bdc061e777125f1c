"""Times on a machine that is not ours alone.

Every sample comes with the share of its wall time for which this process's threads were ready to
run and did not: the kernel counts that for each thread (/proc/<pid>/task/*/schedstat). Samples
above `DISTURBED` are put aside; where too few are left, the least disturbed ones stand in, and
the figure says so. What is compared is measured in alternation, so that drift hits both sides.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DISTURBED = 0.02
ENOUGH = 5


@dataclass(frozen=True, slots=True)
class Sample:
    """seconds, and the share of them lost to other processes."""

    seconds: float
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in milliseconds with its range; of how many samples, and out of how many."""

    ms: float
    low: float
    high: float
    kept: int
    taken: int

    @property
    def spread(self) -> float:
        """Half the range, relative to the median."""
        return (self.high - self.low) / (2 * self.ms) if self.ms else 0.0

    def __str__(self) -> str:
        mark = "" if self.kept >= ENOUGH else " (disturbed)"
        return f"{self.ms:.2f} ms ±{self.spread:.0%}{mark}"

    def json_object(self) -> dict[str, Any]:
        return {
            "ms": round(self.ms, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "kept": self.kept,
            "taken": self.taken,
        }


def lost_seconds() -> float:
    """Seconds that all threads of this process have waited for a core so far; 0 if not counted."""
    total = 0
    for task in Path("/proc/self/task").iterdir() if os.path.isdir("/proc/self/task") else ():
        try:
            total += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):  # a thread that ended, or a kernel without it
            continue
    return total / 1e9


def sample(call: Callable[[], object]) -> Sample:
    lost = lost_seconds()
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return Sample(seconds, (lost_seconds() - lost) / seconds)


def figure(samples: Sequence[Sample]) -> Figure:
    quiet = [s.seconds for s in samples if s.lost <= DISTURBED]
    used = quiet
    if len(quiet) < ENOUGH:
        used = [s.seconds for s in sorted(samples, key=lambda s: s.lost)[:ENOUGH]]
    ms = sorted(1e3 * seconds for seconds in used)
    # The range is that of the middle 80%: one stray sample in ten is the machine's, not the code's.
    cut = len(ms) // 10
    return Figure(statistics.median(ms), ms[cut], ms[-1 - cut], len(quiet), len(samples))


def enough(samples: Iterable[Sequence[Sample]], wanted: int) -> bool:
    """Whether every series has as many undisturbed samples as are wanted."""
    return all(sum(s.lost <= DISTURBED for s in series) >= wanted for series in samples)


def turns(
    samples: Mapping[Any, Sequence[Sample]], *, least: int, wanted: int, patience: float
) -> Iterator[int]:
    """0, 1, 2, ...: at least so many, and until every series of `samples`, to which the caller
    adds, has as many undisturbed ones as are wanted, or `patience` (seconds) is over."""
    begin, turn = time.perf_counter(), 0
    while turn < least or (
        time.perf_counter() - begin < patience and not enough(samples.values(), wanted)
    ):
        yield turn
        turn += 1


def alternate(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, patience: float
) -> dict[str, Figure]:
    """Call each in turn, forwards and backwards, until each has `rounds` undisturbed samples.

    patience: seconds after which what there is has to do.
    """
    for call in calls.values():
        call()  # shapes seen for the first time cost more
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for turn in turns(samples, least=rounds, wanted=rounds, patience=patience):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            samples[name].append(sample(calls[name]))
    return {name: figure(x) for name, x in samples.items()}
