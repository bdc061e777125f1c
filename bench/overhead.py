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
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.sampling.native import RoundSampler

from .rounds import TOKEN, Round, random_logits

KERNEL, NUMPY, TRANSFORMERS, PAPER = "kernel", "NumPy", "Transformers", "the paper's τ and a"


@dataclass(frozen=True)
class Overhead:
    """Bytes, see above; `vocab_size`, `gamma` and `batch` are the round's."""

    name: str
    vocab_size: int
    gamma: int
    batch: int
    held: int
    call: int

    @property
    def extra(self) -> int:
        """All but the draft's rows, which everybody keeps."""
        return self.held + self.call - kept(self.vocab_size, self.gamma, self.batch)

    def json_object(self) -> dict[str, Any]:
        return {
            "name": self.name, "V": self.vocab_size, "gamma": self.gamma, "B": self.batch,
            "held": self.held, "call": self.call, "extra": self.extra,
        }  # fmt: skip


def kept(vocab_size: int, gamma: int, batch: int) -> int:
    """Bytes of the draft's rows of a round, float32."""
    return 4 * batch * gamma * vocab_size


def overheads(vocab_size: int, gamma: int, batch: int, threads: int) -> list[Overhead]:
    """All implementations on one round of the token rule; Transformers where it is installed."""
    logits = random_logits(vocab_size, gamma, batch, seed=0)  # NumPy's peak is the outcome's
    round_ = Round(vocab_size, gamma, batch, TOKEN, threads, logits)
    rows = kept(vocab_size, gamma, batch)
    found = {KERNEL: _kernel(round_, threads), NUMPY: _numpy(round_)}
    theirs = round_.transformers_verify(round_.numpy_draw())
    if theirs is not None:
        theirs()
        found[TRANSFORMERS] = rows, _torch_peak(theirs)  # held: the scores of its draft steps
    # By formula: section 3.2.1, step 3 writes tau and a for every token of the gamma rows. That p
    # and q, its inputs, are themselves made from logits is not in it.
    found[PAPER] = rows, 2 * rows
    return [
        Overhead(name, vocab_size, gamma, batch, held, call) for name, (held, call) in found.items()
    ]


def _kernel(round_: Round, threads: int) -> tuple[int, int]:
    def prepare() -> object:
        round_.sampler = RoundSampler(round_.vocab_size, round_.gamma, round_.batch, threads)
        return round_.kernel_draw()

    return _traced(prepare, round_.kernel_verify)


def _numpy(round_: Round) -> tuple[int, int]:
    return _traced(round_.numpy_draw, round_.numpy_verify)


def _traced(prepare: Callable[[], object], call: Callable[[], object]) -> tuple[int, int]:
    """What `prepare` leaves behind, and the peak of `call` above that."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = prepare()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
    finally:
        tracemalloc.stop()
    return held, peak - held


def _torch_peak(call: Callable[[], object]) -> int:
    """The peak of what PyTorch's CPU allocator hands out during `call`, of several: where they
    reject, which is chance, they allocate more."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(8):
            call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    total = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        total += change
        peak = max(peak, total)
    return peak
