"""Measure what clients of one engine cost each other: threads that share its slots and rounds.

A long prompt beside a stream: the longest time between two events of the stream while another
client gets a text. Target and draft read its prompt in chunks, between which rounds run. Several
texts of one prompt: the prompt is computed once, and rows of the cache are copied, so they are
compared with one text, and with as many texts of different prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from models.corpus import collect
from runtime import Options, TextEngine, load
from runtime.files.errors import refuse_first

from ..core import machine
from ..core.clock import LOST_LIMIT, Clock, Sample, median_time, order, sample, turns
from ..core.command import Results, Suite, bundle_option
from ..core.fit import rounded
from ..core.prompts import Prompts
from ..core.table import Table, make_table

SLOTS = 4
SHORT = 32  # tokens of the stream's prompt
TOKENS = 32  # of each text
EVENTS = 48  # of a stream alone


@dataclass(frozen=True)
class ClientScale:
    """length: tokens of a long prompt. turns: at least. patience: seconds to wait for undisturbed
    samples."""

    length: int
    turns: int
    patience: float


@dataclass
class ClientRun:
    """One run on an engine with `SLOTS` slots. length: tokens of a long prompt. prompts: each is
    used once, as a slot may still hold rows of an earlier one."""

    engine: TextEngine
    prompts: Iterator[list[int]]
    length: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def client(self, prompt: Sequence[int], tokens: int, seed: int = 0) -> float:
        """Get a text; returns the seconds until its first token."""
        options = Options(max_new_tokens=tokens, temperature=1.0, seed=seed, ignore_eos=True)
        begin, stream = time.perf_counter(), self.engine.stream(prompt, options)
        next(stream)
        first = time.perf_counter() - begin
        deque(stream, maxlen=0)
        return first

    def timed(self, work: Callable[[], dict[str, float]]) -> None:
        """Add a sample of each time, in seconds, that `work` returns by name."""
        found: dict[str, float] = {}
        whole = sample(lambda: found.update(work()))
        for name, seconds in found.items():
            self.samples.setdefault(name, []).append(Sample(seconds, whole.lost))

    def stream(self, pool: ThreadPoolExecutor | None) -> dict[str, float]:
        """A stream, alone or beside a client with a long prompt in this pool."""
        room = self.engine.decoder.max_len - SHORT
        options = Options(max_new_tokens=room, temperature=1.0, seed=1, ignore_eos=True)
        other: Future[float] | None = None
        long, times = next(self.prompts), list[float]()
        with self.engine.stream(next(self.prompts)[:SHORT], options) as stream:
            next(stream), next(stream)  # the second lets a draft read the stream's own prompt
            times.append(time.perf_counter())
            if pool is not None:
                other = pool.submit(self.client, long, TOKENS)
            for event in stream:
                times.append(time.perf_counter())
                if event.result is not None or (
                    len(times) > EVENTS if other is None else other.done()
                ):
                    break
        gaps = [after - before for before, after in pairwise(times)]
        if other is None:
            return {"a round": statistics.median(gaps), "longest pause": max(gaps)}
        return {"longest pause, prompt": max(gaps), "first token, stream": other.result()}

    def first_token(self) -> dict[str, float]:
        """A long prompt alone, and the mean time of its chunks."""
        first = self.client(next(self.prompts), 1)
        chunks = self.length / self.engine.decoder.target.chunk
        return {"first token": first, "a chunk": first / chunks}

    def texts(
        self, pool: ThreadPoolExecutor, name: str, count: int, *, same: bool
    ) -> dict[str, float]:
        """The time until the last of `count` clients has its text. same: of the same prompt."""
        different = [next(self.prompts) for _ in range(1 if same else count)]
        prompts = different * count if same else different
        begin = time.perf_counter()
        running = [pool.submit(self.client, p, TOKENS, i) for i, p in enumerate(prompts)]
        for each in running:
            each.result()
        return {name: time.perf_counter() - begin}


def run(folder: str, scale: ClientScale, threads: int, clock: Clock) -> dict[str, Any]:
    """Returns the JSON object. Raises OutriderError as `load` does, and "option" if the prompts do
    not fit."""
    engine = load(folder, slots=SLOTS, threads=threads, device="cpu", verify=False)
    length, least = scale.length, 2 * engine.decoder.target.chunk
    most = engine.decoder.max_len - TOKENS
    refuse_first([
        (engine.manifest.pair.start_ids is not None,
         f"{engine.manifest.name} is an encoder-decoder, which has no long prompts",
         "Choose another bundle."),
        (most < least, f"a prompt of two chunks, {least} tokens, does not fit into this bundle",
         f"Build one with MAX_LEN={least + TOKENS} or more."),
        (not least <= length <= most, f"--prompt={length} is not from {least} to {most}",
         "Choose a length in this range."),
    ])  # fmt: skip
    clock.note("reading the text for the prompts")
    maker = Prompts(engine.tokenizer, collect().held_out)
    prompts = iter(lambda: maker.completion(length), None)
    clients = ClientRun(engine, prompts, length)
    with ThreadPoolExecutor(SLOTS) as pool:
        measurements: list[Callable[[], dict[str, float]]] = [
            lambda: clients.stream(None),
            lambda: clients.stream(pool),
            clients.first_token,
            lambda: clients.texts(pool, "one text", 1, same=True),
            lambda: clients.texts(pool, "of one prompt", SLOTS, same=True),
            lambda: clients.texts(pool, "of different prompts", SLOTS, same=False),
        ]
        for measure in measurements:  # the first calls take longer
            measure()
        for turn in turns(
            clients.samples, min_turns=scale.turns, wanted=scale.turns, patience=scale.patience
        ):
            clock.note(f"turn {turn + 1}")
            for measure in order(measurements, turn):
                clients.timed(measure)
    figures = {}
    for name, some in clients.samples.items():
        found = median_time(some)
        figures[name] = {"ms": rounded(found.ms), "kept": found.kept, "taken": found.taken}
    return {
        "bundle": engine.manifest.name, "machine": machine.describe(threads), "slots": SLOTS,
        "prompt": length, "tokens": TOKENS, "figures": figures,
    }  # fmt: skip


# Title of each row, and what it is relative to.
ROWS = {
    "a round": ("a round of the stream, alone", "a round"),
    "longest pause": ("longest pause of the stream, alone", "a round"),
    "a chunk": ("a chunk of the prompt, alone", "a chunk"),
    "longest pause, prompt": ("longest pause of the stream beside a text", "a chunk"),
    "first token": ("first token of the prompt, alone", "first token"),
    "first token, stream": ("first token of the prompt beside the stream", "first token"),
    "one text": ("a text", "one text"),
    "of one prompt": (f"{SLOTS} texts of one prompt", "one text"),
    "of different prompts": (f"{SLOTS} texts of different prompts", "one text"),
}


def tables(results: Results) -> list[Table]:
    figures = results["figures"]
    rows = [
        (title, {
            "ms": figures[name]["ms"], "ratio": figures[name]["ms"] / figures[base]["ms"],
            "disturbed": figures[name]["kept"] < figures[name]["taken"] / 2,
        })
        for name, (title, base) in ROWS.items()
    ]  # fmt: skip
    columns = (("ms", "ms", ",.1f"), ("ratio", "relative", ",.2f"))
    return [make_table("clients of one engine", rows, columns)]


def heading(results: Results) -> str:
    """The conditions of the figures."""
    return (
        f"{machine.summary_line(results['machine'])}; bundle {results['bundle']}, "
        f"{results['slots']} slots, prompts of {results['prompt']:,} tokens, texts of "
        f"{results['tokens']}, temperature 1. Medians; relative to a round, a chunk, the prompt "
        f"alone and one text. * other processes took over {LOST_LIMIT:.0%} of the time of most"
    )


def _options(parser: argparse.ArgumentParser) -> None:
    bundle_option(parser)
    parser.add_argument("--prompt", type=int, default=1500, metavar="N",
        help="tokens of a long prompt (default: %(default)s)")  # fmt: skip


SUITE = Suite(
    name="clients",
    about=__doc__ or "",
    quick="two turns instead of at least five",
    measure=lambda args, clock: run(
        args.engines,
        ClientScale(args.prompt, 2, 0) if args.quick else ClientScale(args.prompt, 5, 120),
        args.threads,
        clock,
    ),
    tables=tables,
    heading=heading,
    options=_options,
)
main = SUITE.main
