"""The memory that one verification needs beside the logits it is given.

Two figures, both in bytes of allocations. held: what lives from the draft steps to the verification
(the draft's rows, because its engine overwrites them) or for good (the kernel's workspace). call:
the most that a verification has allocated at any moment, on top. Python and NumPy by tracemalloc;
of PyTorch, whose allocator it does not see, the running sum in the profiler's trace. The kernel
itself allocates nothing (outrider.h), so tracemalloc sees all there is. Unlike the resident set,
these figures repeat; pages that are allocated and never touched count in them.
"""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernel.rounds import TOKEN, Round, random_logits
from ..kernel.times import TRANSFORMERS, WAYS

KERNEL, NUMPY, PAPER = "kernel", "NumPy", "the paper's τ and a"
CALLS = 8  # of PyTorch: where they reject, which is chance, they allocate more


@dataclass(frozen=True)
class Overhead:
    """Bytes, see above. size: V, gamma and B of the round."""

    name: str
    size: tuple[int, int, int]
    held: int
    call: int

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Overhead:
        """From its fields."""
        return cls(**{**found, "size": tuple(found["size"])})

    @property
    def extra(self) -> int:
        """All but the draft's rows, which everybody keeps."""
        return self.held + self.call - kept(*self.size)


def kept(vocab_size: int, gamma: int, batch: int) -> int:
    """Bytes of the draft's rows of a round, float32."""
    return 4 * batch * gamma * vocab_size


def overheads(size: tuple[int, int, int], threads: int) -> list[Overhead]:
    """All implementations on one round of the token rule; Transformers where it is installed."""
    logits = random_logits(*size, seed=0)  # NumPy's peak is the outcome's
    round_ = Round(logits, TOKEN, threads=threads)

    def prepare() -> object:
        round_.sampler = round_.new_sampler()
        return round_.draw()

    rows = kept(*size)
    found = {
        KERNEL: _traced(prepare, round_.verify),
        NUMPY: _traced(round_.numpy_draw, round_.numpy_verify),
    }
    if (theirs := WAYS[TRANSFORMERS](round_)) is not None:
        theirs()
        found[TRANSFORMERS] = rows, torch_peak(theirs)  # held: the scores of its draft steps
    # By formula: section 3.2.1, step 3 writes tau and a for every token of the gamma rows. That p
    # and q, its inputs, are themselves made from logits is not in it.
    found[PAPER] = rows, 2 * rows
    return [Overhead(name, size, held, call) for name, (held, call) in found.items()]


def _traced(prepare: Callable[[], object], call: Callable[[], object]) -> tuple[int, int]:
    """What `prepare` leaves behind, and the peak of `call` above that."""
    gc.collect()
    tracemalloc.start()
    try:
        alive = prepare()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        del alive
    finally:
        tracemalloc.stop()
    return held, peak - held


def torch_peak(call: Callable[[], object]) -> int:
    """The peak of what PyTorch's CPU allocator hands out during `CALLS` calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(CALLS):
            call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    peak: int = max(itertools.accumulate((change for _, change in changes), initial=0))
    return peak
