"""Compare Outrider with Transformers, llama.cpp, ONNX Runtime GenAI and CTranslate2 in one run.

The pair is the bundled one, grown to the shape of a real model without changing its output, with a
draft that agrees with it at about the requested rate (bench.core.pair); or it is your own (--model,
--draft). Every system runs in its own process (bench.systems). Each prompt goes to all of them, one
after the other in a changing order. Ratios are computed prompt by prompt; tables show their median.
Other lengths, batches, and the comparison with Theorem 3.8 are measured in the fewest bits of each
system.

An encoder-decoder (--shape t5-base, whisper-small) reads sources instead of prompts. The time to
the first token includes the encoder, whose time is also reported separately if it is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.corpus import collect
from runtime.files.errors import OutriderError, refuse_first
from runtime.files.graphs import TOKENIZER_FILE
from runtime.text.tokenizer import Tokenizer

from ...core import machine, pair
from ...core.clock import Clock
from ...core.command import Suite
from ...core.prompts import KINDS, Prompts
from ...systems import SYSTEMS
from ...systems.protocol import Request
from . import seq2seq, tables
from .run import (
    DEFAULT_PRECISIONS,
    DRAFTLESS,
    GAMMA,
    LENGTHS,
    LONG_MODES,
    MEMORY_SHAPE,
    PLAIN_DRAFT,
    PRECISIONS,
    SHARED,
    TOGETHER,
    Job,
    SideRun,
    System,
    systems,
    with_fewest_bits,
)

SEQ2SEQ_MAX_LEN = 448  # rows of an encoder-decoder's cache, the maximum of Whisper
TEMPERATURES, GREEDY = (0.0, 1.0), (0.0,)
TextShape = tuple[Sequence[str], int, int, Sequence[float]]  # kinds, prompt and output tokens, T


@dataclass(frozen=True)
class SideScale:
    """count: prompts per workload. shared: the shape for all systems. lengths: further shapes, for
    the main modes of each system in its fewest bits. batch_sizes: batch sizes. batches: batches of
    each size. batch: (prompt, output) tokens in a batch."""

    count: int
    shared: TextShape
    lengths: Sequence[TextShape]
    batch_sizes: Sequence[int]
    batches: int
    batch: tuple[int, int]


FULL = SideScale(
    count=3,
    shared=(KINDS, 128, 64, TEMPERATURES),
    lengths=[
        (["completion"], 16, 8, TEMPERATURES),
        (["completion"], 16, 512, GREEDY),
        (["editing", "question"], 1024, 64, GREEDY),
        (["continuation"], 1500, 32, GREEDY),
    ],
    batch_sizes=(1, 2, 4, 8),
    batches=3,
    batch=(64, 32),
)
QUICK = SideScale(2, (["completion", "editing"], 128, 24, TEMPERATURES), [], (1, 4), 1, (64, 16))


def single_jobs(scale: SideScale, prompts: Prompts, chosen: Sequence[System]) -> list[Job]:
    """Jobs whose texts are decoded one at a time; jobs without any system are omitted."""
    long_systems = [
        system for system in with_fewest_bits(chosen)
        if system.mode in LONG_MODES.get(system.peer, ("plain",))
    ]  # fmt: skip
    groups = [(SHARED, scale.shared, chosen)]
    groups += [(LENGTHS, shape, long_systems) for shape in scale.lengths]
    jobs = []
    for group, (kinds, length, new_tokens, temperatures), group_systems in groups:
        for kind in kinds if group_systems else ():
            made = prompts.many(kind, scale.count, length)
            for temperature in temperatures:
                requests = [
                    Request([prompt], new_tokens, temperature=temperature, seed=seed)
                    for seed, prompt in enumerate(made)
                ]
                jobs.append(Job(group, f"{kind} {length}+{new_tokens}", requests, group_systems))
    return jobs


def batch_jobs(scale: SideScale, prompts: Prompts, chosen: Sequence[System]) -> list[Job]:
    """Jobs with batches, plain and with drafts, in each system's fewest bits."""
    some = [system for system in with_fewest_bits(chosen) if system.mode in PLAIN_DRAFT]
    length, new_tokens = scale.batch
    return [
        Job(TOGETHER, f"{size} together",
            [Request(prompts.many("completion", size, length), new_tokens, seed=seed)
             for seed in range(scale.batches)], some)
        for size in scale.batch_sizes
        if some
    ]  # fmt: skip


def run(
    side: SideRun,
    chosen: Sequence[System],
    job_groups: Sequence[Sequence[Job]],
    prompt: list[int] | None,
) -> dict[str, Any]:
    """Measure all jobs; returns the JSON object. job_groups: groups of jobs, each with its own
    workers. prompt: prompt for the measurement of memory; None to skip that."""
    reader = machine.MemoryReader(side.threads)
    for _ in range(5):
        reader()
    cells = [cell for jobs in job_groups if jobs for cell in side.measure(jobs, reader)]
    if side.missing and not any(row for cell in cells for row in cell["rows"]):
        cause = f"nothing could be measured: {', '.join(side.missing)} failed"
        raise OutriderError("backend", cause, "See the reasons above.")
    return {
        "machine": machine.describe(side.threads), "gamma": GAMMA,
        "pair": {"shape": side.pair.shape, "alpha_wanted": side.pair.alpha},
        "bytes_per_second": reader.bandwidth, "systems": [system.name for system in chosen],
        "cells": cells, "memory": side.measure_memory(chosen, prompt) if prompt else {},
        "loads": side.loads, "missing": side.missing, "facts": side.facts,
    }  # fmt: skip


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR",
        help="measure your own checkpoint instead of the grown pair")  # fmt: skip
    add("--draft", type=Path, metavar="DIR",
        help="draft model for --model (default: only lookups)")  # fmt: skip
    add("--alpha", type=float, metavar="A",
        help="acceptance rate of the grown pair's draft on held-out text "
        "(default: 0.8)")  # fmt: skip
    add("--shape", choices=[*pair.SHAPES, *pair.SEQ2SEQ],
        help="shape of the grown pair's target (default: smollm-135m)")  # fmt: skip
    add("--precision", nargs="+", choices=PRECISIONS,
        help="precision of the weights; peers use formats of as many bits; mixed is a float32 "
        "target with an int8 draft, bf16 llama.cpp's format for a --model stored in 16 bits, which "
        "Outrider's float32 keeps (default: all but bf16)")  # fmt: skip
    add("--systems", nargs="+", choices=SYSTEMS,
        help="systems to measure (default: all)")  # fmt: skip
    add("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="folder for pairs and converted checkpoints (default: build/side)")  # fmt: skip


def _measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    models = "seq2seq" if args.shape in pair.SEQ2SEQ else "text"
    shape = args.shape or "smollm-135m"
    refuse_first([
        (bool(args.systems) and "outrider" not in args.systems,
         "--systems does not include outrider", "Add it."),
        (bool(args.draft) and not args.model, "--draft needs a --model", "Add --model."),
        (bool(args.model) and not args.draft and "mixed" in (args.precision or ()),
         "--precision mixed is a precision of drafts, and there is none", "Add --draft."),
        (bool(args.model) and (args.shape, args.alpha) != (None, None),
         "--shape and --alpha apply to the grown pair, not to a --model",
         "Remove them, or --model."),
    ])  # fmt: skip
    chosen = systems(args.systems or list(SYSTEMS), args.precision or DEFAULT_PRECISIONS, models)
    measured = {system.peer for system in chosen}
    refuse_first(
        (name not in measured, f"{name} does not run this shape in this precision",
         "Leave it out of --systems.")
        for name in args.systems or ()
    )  # fmt: skip
    if args.model:
        model_pair = pair.from_checkpoints(args.model, args.draft)
        chosen = [system for system in chosen if model_pair.draft or system.mode in DRAFTLESS]
    else:
        model_pair = pair.make(shape, 0.8 if args.alpha is None else args.alpha, args.work)
    side = SideRun(model_pair, args.threads, args.work, clock)
    if models == "seq2seq":
        side.max_len, side.warm_ups = SEQ2SEQ_MAX_LEN, 1
        reading = seq2seq.QUICK if args.quick else seq2seq.FULL
        return run(side, chosen, [seq2seq.jobs(reading, model_pair, chosen, TEMPERATURES)], None)
    side.max_len = min(side.max_len, model_pair.context)
    scale = QUICK if args.quick else FULL
    texts = [MEMORY_SHAPE, *(sizes for _, *sizes, _ in (scale.shared, *scale.lengths))]
    longest = max(map(sum, texts)) + GAMMA
    refuse_first([
        (longest > side.max_len, f"texts of {longest} tokens are longer than the model's "
         f"{side.max_len}", "Use --quick." if scale is FULL else "Use another --model."),
    ])  # fmt: skip
    prompts = Prompts(Tokenizer(model_pair.target / TOKENIZER_FILE), collect().held_out, seed=1)
    try:
        job_groups = [single_jobs(scale, prompts, chosen), batch_jobs(scale, prompts, chosen)]
    except ValueError as error:
        raise OutriderError("option", str(error), "Use a --model with another tokenizer.") from None
    return run(side, chosen, job_groups, prompts.completion(MEMORY_SHAPE[0]))


SUITE = Suite(
    name="side",
    about=__doc__ or "",
    quick="one prompt length, two prompts of each kind: 10 minutes",
    measure=_measure,
    tables=tables.tables,
    heading=tables.heading,
    options=_options,
)
main = SUITE.main
