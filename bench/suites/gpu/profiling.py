"""Profiles one round: its kernels, and the gaps between them.

The host's share of a round (`times.py`) covers only the gaps between graphs. A step of the target
launches hundreds of kernels inside its graph, and the device's clock counts the gaps between these
as work. torch's profiler records when each kernel began and ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

FIRST, LAST = "outrider_begin", "outrider_commit"
MAX_KINDS = 10  # kinds of kernels that are listed
NAME_LENGTH = 90  # characters of a name


class Kernel(NamedTuple):
    """A kernel, copy or fill on the device. Times in microseconds."""

    name: str
    begin: float
    end: float


def profile_kernels(work: Callable[[], object]) -> list[Kernel]:
    """What the device executes during `work`."""
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == DeviceType.CUDA
    ]


def longest_round(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Of the complete rounds with the largest number of kernels, the middle one: this is neither a
    first token nor a plain step. Empty if there is no complete round."""
    every: list[list[Kernel]] = []
    current: list[Kernel] | None = None
    for kernel in sorted(kernels, key=lambda k: k.begin):
        if kernel.name == FIRST:
            current = []
        if current is None:
            continue
        current.append(kernel)
        if kernel.name == LAST:
            every.append(current)
            current = None
    most = max(map(len, every), default=0)
    largest = [each for each in every if len(each) == most]
    return largest[len(largest) // 2] if largest else []


def summarise(kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Summary of one round, whose kernels are in order. gap_share: share of the time from its first
    to its last kernel in which no kernel runs."""
    span = max(k.end for k in kernels) - kernels[0].begin
    # On one stream, kernels run one after the other, with little overlap.
    gaps = sum(max(0.0, after.begin - before.end) for before, after in pairwise(kernels))
    kinds: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        kinds[kernel.name[:NAME_LENGTH]].append(kernel.end - kernel.begin)
    largest = sorted(kinds.items(), key=lambda item: -sum(item[1]))
    return {
        "kernels": len(kernels), "span_us": round(span, 1), "gap_share": round(gaps / span, 4),
        "mean_gap_us": round(gaps / max(1, len(kernels) - 1), 3),
        "largest": [
            {"name": name, "count": len(each), "us": round(sum(each), 1),
             "share": round(sum(each) / span, 4)}
            for name, each in largest[:MAX_KINDS]
        ],
    }  # fmt: skip
