"""Timing on a machine that is shared with other processes.

Every sample records the share of its wall time during which threads of this process were ready to
run but had to wait for a core. Linux counts this for each thread (/proc/<pid>/task/*/schedstat).
Samples above `LOST_LIMIT` are discarded. If too few are left, the least disturbed ones are used,
and the figure shows it. Compared runs alternate (`order`), so that drift affects all of them.
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

LOST_LIMIT = 0.02
MIN_SAMPLES = 5
GOLDEN_RATIO = 0.618
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """seconds: wall time. lost: share of it lost to other processes."""

    seconds: float
    lost: float = 0.0


@dataclass(frozen=True, slots=True)
class MedianTime:
    """A median in milliseconds. kept: number of undisturbed samples. taken: number of all."""

    ms: float
    kept: int
    taken: int


@dataclass
class Clock:
    """Prints progress on stderr with the time since the start.

    patience: seconds that may still be spent on decoding disturbed texts again.
    """

    patience: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def note(self, text: str) -> None:
        print(f"[{self.seconds:5.0f} s] {text}", file=sys.stderr, flush=True)


def lost_seconds() -> float:
    """Total time for which threads of this process have waited for a core so far, in seconds; 0 if
    the kernel does not count it."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that ended
            total += int(path.read_text().split()[1])
    return total / 1e9


def sample(call: Callable[[], object]) -> Sample:
    """Time one call."""
    lost = lost_seconds()
    begin = time.perf_counter()
    call()
    seconds = time.perf_counter() - begin
    return Sample(seconds, (lost_seconds() - lost) / seconds)


def select_undisturbed(items: Sequence[T], lost: Callable[[T], float], min_count: int) -> list[T]:
    """The items that lost at most `LOST_LIMIT`; if these are fewer than `min_count`, the
    `min_count` least disturbed items."""
    by_loss = sorted(items, key=lost)
    return by_loss[: max(min_count, sum(lost(item) <= LOST_LIMIT for item in items))]


def median_time(samples: Sequence[Sample]) -> MedianTime:
    """The median of the undisturbed samples, of at least MIN_SAMPLES samples."""
    used = select_undisturbed(samples, lambda s: s.lost, MIN_SAMPLES)
    kept = sum(s.lost <= LOST_LIMIT for s in samples)
    return MedianTime(1e3 * statistics.median(s.seconds for s in used), kept, len(samples))


def order(items: Sequence[T], turn: int) -> list[T]:
    """The order of the items in turn 0, 1, 2, ...: every other turn is reversed, and the first item
    changes every two turns.

    So no item is always first, or always follows the same item.
    """
    begin = int(turn // 2 * GOLDEN_RATIO * len(items)) % max(1, len(items))
    turned = [*items[begin:], *items[:begin]]
    return turned[::-1] if turn % 2 else turned


def turns(
    samples: Mapping[Any, Sequence[Sample]], *, min_turns: int, wanted: int, patience: float
) -> Iterator[int]:
    """Yield 0, 1, 2, ..., at least `min_turns` numbers.

    The iteration ends when every series of `samples`, to which the caller adds, has `wanted`
    undisturbed samples, or after `patience` seconds.
    """
    begin, turn = time.perf_counter(), 0
    while turn < min_turns or (
        time.perf_counter() - begin < patience
        and any(sum(s.lost <= LOST_LIMIT for s in x) < wanted for x in samples.values())
    ):
        yield turn
        turn += 1


def sample_in_turn(
    calls: Mapping[str, Callable[[], object]], *, rounds: int, patience: float
) -> dict[str, list[Sample]]:
    """Run the calls in turn (`order`) until each has `rounds` undisturbed samples.

    patience: seconds after which to stop with the samples taken so far.
    """
    for call in calls.values():
        call()  # the first call of a shape takes longer
    samples: dict[str, list[Sample]] = {name: [] for name in calls}
    for turn in turns(samples, min_turns=rounds, wanted=rounds, patience=patience):
        for name in order(list(calls), turn):
            samples[name].append(sample(calls[name]))
    return samples
