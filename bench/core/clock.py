"""Times on a machine that is not ours alone.

Every sample comes with the share of its wall time for which this process's threads were ready to
run and did not. The kernel counts that for each thread (/proc/<pid>/task/*/schedstat). Samples
above `DISTURBED` are put aside. Where too few are left, the least disturbed ones stand in, and the
figure says so. What is compared runs in alternation (`order`), so that drift hits all sides.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

DISTURBED = 0.02
ENOUGH = 5
GOLDEN = 0.618
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """seconds, and the share of them lost to other processes."""

    seconds: float
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A median in milliseconds. kept: undisturbed samples. taken: all of them."""

    ms: float
    kept: int
    taken: int


@dataclass
class Clock:
    """Notes on stderr with the time since the start.

    patience: seconds that may still go into texts that are decoded again because something
    disturbed them.
    """

    patience: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def note(self, text: str) -> None:
        print(f"[{self.seconds:5.0f} s] {text}", file=sys.stderr, flush=True)


def lost_seconds() -> float:
    """Seconds that all threads of this process have waited for a core so far; 0 if not counted."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that ended
            total += int(path.read_text().split()[1])
    return total / 1e9


def sample(call: Callable[[], object]) -> Sample:
    """One timed call."""
    lost = lost_seconds()
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return Sample(seconds, (lost_seconds() - lost) / seconds)


def undisturbed(items: Sequence[T], lost: Callable[[T], float], least: int) -> list[T]:
    """The items that lost little to other processes; the `least` least disturbed where they are
    fewer."""
    by_loss = sorted(items, key=lost)
    return by_loss[: max(least, sum(lost(item) <= DISTURBED for item in items))]


def figure(samples: Sequence[Sample]) -> Figure:
    """What the undisturbed of these samples come to, at least ENOUGH of them."""
    used = undisturbed(samples, lambda s: s.lost, ENOUGH)
    kept = sum(s.lost <= DISTURBED for s in samples)
    return Figure(1e3 * statistics.median(s.seconds for s in used), kept, len(samples))


def order(items: Sequence[T], turn: int) -> list[T]:
    """The order of turn 0, 1, 2, ...: every other one backwards, and after two begun elsewhere.

    So nothing is always first, or always after the same.
    """
    begin = int(turn // 2 * GOLDEN * len(items)) % max(1, len(items))
    turned = [*items[begin:], *items[:begin]]
    return turned[::-1] if turn % 2 else turned


def turns(
    samples: Mapping[Any, Sequence[Sample]], *, least: int, wanted: int, patience: float
) -> Iterator[int]:
    """Yields 0, 1, 2, ..., at least `least` of them.

    It goes on until every series of `samples`, to which the caller adds, has `wanted` undisturbed
    ones, or `patience` (seconds) is over.
    """
    begin, turn = time.perf_counter(), 0
    while turn < least or (
        time.perf_counter() - begin < patience
        and any(sum(s.lost <= DISTURBED for s in x) < wanted for x in samples.values())
    ):
        yield turn
        turn += 1


def sampled(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, patience: float
) -> dict[str, list[Sample]]:
    """Run the calls in turn (`order`) until each has `rounds` undisturbed samples.

    patience: seconds after which what there is has to do.
    """
    for call in calls.values():
        call()  # shapes seen for the first time cost more
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for turn in turns(samples, least=rounds, wanted=rounds, patience=patience):
        for name in order(list(calls), turn):
            samples[name].append(sample(calls[name]))
    return samples
