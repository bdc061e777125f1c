"""Times of the sampling of a round with the kernel and with other implementations, and the bytes
that must be read for its outcome."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from runtime.files.errors import OutriderError
from runtime.sampling import kernel
from runtime.sampling.native import RoundSampler

from ...core import machine
from ...core.clock import Clock, median_time, sample_in_turn
from ...core.fit import rounded
from .rounds import RULES, Round, disagreements, random_logits

# Ways to run a verification, or a whole round (gamma draws and the verification).
VERIFY, FROM_LOGITS = "verify", "verify, q from logits"
ROUND = "round"
NUMPY, NUMPY_ROUND = "NumPy verify", "NumPy round"
TRANSFORMERS, FUNCTION_ONLY = "Transformers", "Transformers, its function alone"

SAMPLES = 5  # undisturbed samples of each call
PATIENCE = 1.0  # seconds per size to wait for them
READ_BYTES, READS = 1 << 28, 3  # bytes per pass over memory, for the floor; passes after each job
SLOTS_PER_SAMPLE = 16  # on different logits, which are the same in every run

Call = Callable[[], object]
Job = tuple[Sequence[str], tuple[int, int, int]]  # rules; V, gamma and B


def _from_logits(round_: Round) -> Call:
    """The kernel without the normalisers that its own draft steps provide."""
    sampler = RoundSampler(round_.vocab_size, round_.gamma, round_.batch, round_.threads)
    sampler.begin(round_.slots)
    sampler.drafts[:] = round_.native.drafts
    return partial(round_.verify, sampler)


def _transformers(round_: Round, *, processed: bool) -> Call:
    """What assisted generation does with the logits of a round.

    It applies its processors to the target's rows, then calls `_speculative_sampling` slot by slot,
    because that takes one sequence. The draft's scores are already processed by its own generate.
    processed: process the target's rows beforehand too, so that only `_speculative_sampling` is
    timed.
    """
    import torch
    from transformers import LogitsProcessorList, TemperatureLogitsWarper
    from transformers.generation.utils import _speculative_sampling

    target = torch.from_numpy(round_.target)  # [B, gamma + 1, V]
    drafts = torch.from_numpy(round_.native.drafts.copy())  # [B, gamma]
    processors: Any = LogitsProcessorList([TemperatureLogitsWarper(round_.params.temperature)])

    def scores_of(logits: torch.Tensor) -> torch.Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        scores: torch.Tensor = processors(drafts[:, :0], flat).reshape(logits.shape)
        return scores

    scores = scores_of(torch.from_numpy(round_.draft))
    ready = scores_of(target) if processed else None

    def call() -> None:
        for b in range(len(drafts)):
            ids = drafts[b : b + 1]
            if ready is not None:
                new_logits = ready[b : b + 1]
            else:
                new_logits = target[b : b + 1].clone()  # assisted generation's own copy
                for i in range(round_.gamma + 1):
                    new_logits[:, i] = processors(ids[:, :i], new_logits[:, i])
            _speculative_sampling(ids, scores[b : b + 1], round_.gamma, new_logits)

    return call


WAYS: dict[str, Callable[[Round], Call]] = {
    VERIFY: lambda r: partial(r.verify, r.native),
    FROM_LOGITS: _from_logits,
    ROUND: lambda r: lambda: (r.draw(r.native), r.verify(r.native)),
    NUMPY: lambda r: partial(r.verify, r.reference),
    NUMPY_ROUND: lambda r: lambda: (r.draw(r.reference), r.verify(r.reference)),
    TRANSFORMERS: lambda r: _transformers(r, processed=False),
    FUNCTION_ONLY: lambda r: _transformers(r, processed=True),  # what the paper timed
}


def run(
    jobs: Iterable[Job], calls: Sequence[str], args: argparse.Namespace, clock: Clock
) -> dict[str, Any]:
    """Measure every job with those `calls` whose rule it has; returns the JSON object."""
    import torch

    library = kernel.load()  # raises an error with the remedy if there is no library
    reader = machine.MemoryReader(args.threads, READ_BYTES)
    torch.set_num_threads(args.threads)
    points = []
    for rules, size in jobs:
        clock.note("{}: V {:,}, gamma {}, B {}".format(", ".join(rules), *size))
        logits = [
            random_logits(*size, seed=seed) for seed in range(max(1, SLOTS_PER_SAMPLE // size[2]))
        ]
        rounds = {
            rule: [
                Round(x, RULES[rule], seed=n, threads=args.threads) for n, x in enumerate(logits)
            ]
            for rule in rules
        }
        points.append(measure(rounds, calls))
        for _ in range(READS):
            reader()
    return {
        "machine": machine.describe(args.threads),
        "instruction_set": library.outrider_instruction_set().decode(),
        "bandwidth_gb_s": round(reader.bandwidth / 1e9, 2),
        "points": points,
    }


def measure(rounds: Mapping[str, Sequence[Round]], calls: Sequence[str]) -> dict[str, Any]:
    """Check the rounds against the reference, then time them.

    rounds: for each rule the same number, on the same logits. calls: "rule: way", with a way
    of WAYS. One sample runs all rounds of a rule, so that it covers short and long ones. Calls
    must neither evict the logits from the caches for the next call nor preload them for themselves:
    every call finds the logits in the last cache level, as after an engine's call. Raises
    OutriderError("numeric") if a round differs from the reference.
    """
    accepted, bytes_read, work, sizes = {}, {}, {}, {}
    for rule, some in rounds.items():
        if wrong := [f"slot {b}" for r in some for b in disagreements(r, r.outcomes(r.native))]:
            cause = f"{rule}, V {some[0].vocab_size}: {', '.join(wrong)} differ from NumPy"
            raise OutriderError("numeric", cause, "Do not use this kernel; please report it.")
        verdicts = [(r, r.verify(r.native)) for r in some]
        accepted[rule] = statistics.mean(v.accepted for _, each in verdicts for v in each)
        bytes_read[rule] = statistics.mean(r.bytes_read(each) for r, each in verdicts)
    first = next(iter(rounds.values()))
    row = first[0].vocab_size * first[0].batch * first[0].draft.itemsize
    for name in calls:
        rule, way = name.split(": ")
        if rule in rounds:
            work[name] = partial(_run_all, [WAYS[way](r) for r in rounds[rule]])
            # Some ways normalise the draft's rows themselves instead of in the draft steps.
            normalised_rows = (
                accepted[rule] if way in (FROM_LOGITS, TRANSFORMERS, FUNCTION_ONLY) else 0
            )
            sizes[name] = bytes_read[rule] + row * normalised_rows

    def touch() -> None:  # the first call in turn may run twice in a row, which would favour it
        for round_ in first:
            round_.target.max(), round_.draft.max()

    samples = sample_in_turn({"": touch, **work}, rounds=SAMPLES, patience=PATIENCE)
    taken = {name: median_time(samples[name]) for name in work}
    times = {
        name: {"ms": rounded(each.ms / len(first)), "kept": each.kept}
        for name, each in taken.items()
    }
    return {
        "vocab_size": first[0].vocab_size, "gamma": first[0].gamma, "batch": first[0].batch,
        "accepted": accepted, "bytes": sizes, "times": times,
    }  # fmt: skip


def _run_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
