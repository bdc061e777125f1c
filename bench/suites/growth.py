"""Measure how time and memory grow with prompt length, positions per call, slots and model size.

Each curve gets an exponent with its interval and, if there are enough points, the exponent of the
part that grows on top of a constant (bench.core.fit). Below each curve is its floor. For a time it
is set by memory: the bytes that must be read, over the bandwidth measured in this run. A model that
fits into the processor's caches can be faster than that, and a prefill is bound by arithmetic. For
a peak it is the weights plus the memory of the process before it loaded anything. A star marks
figures that were disturbed by other processes.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from models.corpus import collect
from runtime.files.graphs import TOKENIZER_FILE
from runtime.text.tokenizer import Tokenizer

from ..core import machine
from ..core.clock import MIN_SAMPLES, Clock, Sample, median_time, order, turns
from ..core.command import Results, Suite
from ..core.costs import Traffic, row_bytes
from ..core.fit import fit_power_law, fit_shifted_power_law, rounded
from ..core.pair import SHAPES, TARGET, Shape
from ..core.pair.grow import grow
from ..core.prompts import Prompts
from ..core.table import Table
from ..systems.peer import Peer
from ..systems.protocol import Request, StepsRequest, time_per_token

SIZES = {"16m": Shape(384, 1024, 8, 6, 2, 8192), "46m": Shape(512, 1408, 12, 8, 2, 24_576)} | SHAPES
PROMPTS = (16, 64, 192, 448, 960, 1500)  # tokens
POSITIONS = tuple(range(1, 10))
SLOTS = (1, 2, 3, 4, 6, 8)
ROWS = 200  # in the cache of a slot before a call
ROUNDS = 10  # samples of a call in each process, at least
TOKENS = 17  # per text; the first comes from the prefill
READS = 8  # passes over memory to measure its bandwidth
WARM_UPS = 3
MIB = 2**20


@dataclass(frozen=True)
class GrowthScale:
    """target: model for all curves except those of model size. sizes: models besides the bundled
    target. loads: processes per point. patience: seconds that each waits for undisturbed
    samples."""

    target: str
    sizes: Sequence[str]
    loads: int
    patience: float


Setup = tuple[str, int]  # name of a model, and number of slots
# Facts of `Peer`, and calls by width.
StepSamples = tuple[Mapping[str, Any], Mapping[str, Sequence[Sample]]]

FULL = GrowthScale("smollm-135m", list(SIZES), loads=3, patience=10)
QUICK = GrowthScale("16m", ["16m", "46m"], loads=2, patience=0.5)

Point = dict[str, Any]
Curves = Mapping[str, Sequence[Point]]


def make_point(x: float, y: float, floor: float, *, quiet: bool = True) -> Point:
    """A point as in the JSON object: y at x; peaks are in MiB, everything else in ms.

    quiet: whether enough samples were undisturbed.
    """
    return {"x": x, "quiet": quiet, "y": rounded(y), "floor": rounded(floor)}


@dataclass
class GrowthRun:
    """One run. work: folder in which checkpoints and bundles are kept. precision: of the
    weights."""

    scale: GrowthScale
    threads: int
    work: Path
    prompts: Prompts
    reader: machine.MemoryReader
    clock: Clock
    precision: str = "float32"

    def checkpoint(self, name: str) -> Path:
        """The bundled target, grown to the size of that name unless it exists already."""
        if name not in SIZES:
            return TARGET
        folder = self.work / name
        if not folder.is_dir():
            self.clock.note(f"growing the bundled target to {name}")
            grow(TARGET, folder, asdict(SIZES[name]))
        return folder

    def start_peer(self, name: str, slots: int = 1) -> Peer:
        """A process that has loaded the model of that name."""
        checkpoint = self.checkpoint(name)
        return Peer(
            "outrider", checkpoint, threads=self.threads, work=self.work, slots=slots,
            precision=self.precision,
        )  # fmt: skip

    def bytes_read(self, name: str, facts: Mapping[str, Any], rows: float) -> float:
        """Bytes that a call reads: the weights, and `rows` cache rows over all slots. facts: of
        `Peer`."""
        row = row_bytes(self.checkpoint(name), facts["cache_element"])
        return Traffic(facts["weights"], row, rows).round_bytes()

    def time_point(self, x: float, samples: Sequence[Sample], read: float) -> Point:
        """A point from samples. read: bytes, for the floor."""
        found, floor = median_time(samples), 1e3 * read / self.reader.bandwidth
        quiet = found.kept >= min(found.taken, MIN_SAMPLES)
        return make_point(x, found.ms, floor, quiet=quiet)

    def measure_steps(
        self, setups: Sequence[Setup], positions: Sequence[int]
    ) -> dict[Setup, list[StepSamples]]:
        """Measure each setup in several new processes, in turn."""
        found: dict[Setup, list[StepSamples]] = {setup: [] for setup in setups}
        for turn in range(self.scale.loads):
            for name, slots in order(setups, turn):
                request = StepsRequest(ROWS, list(positions), slots, ROUNDS, self.scale.patience)
                with self.start_peer(name, slots) as peer:
                    found[name, slots].append((peer.facts, peer.time_steps(request)))
        return found

    def call_point(
        self, x: float, setup: Setup, processes: Sequence[StepSamples], positions: int
    ) -> Point:
        """A point of one call, from the samples of all processes of a setup."""
        (name, slots), (facts, _) = setup, processes[0]
        samples = [sample for _, calls in processes for sample in calls[f"{positions}"]]
        return self.time_point(x, samples, self.bytes_read(name, facts, slots * (ROWS + positions)))


# The measurements along each axis


def by_prompt(run: GrowthRun) -> Curves:
    """Time to the first token, and time per token after it."""
    target, samples = run.scale.target, defaultdict[tuple[str, int], list[Sample]](list)
    prompts = {n: cycle(run.prompts.many("completion", MIN_SAMPLES, n)) for n in PROMPTS}
    with run.start_peer(target) as peer:
        for _ in range(WARM_UPS):
            peer.generate(Request([next(prompts[PROMPTS[0]])], TOKENS))
        patience = len(PROMPTS) * run.scale.patience
        for turn in turns(samples, min_turns=MIN_SAMPLES, wanted=MIN_SAMPLES, patience=patience):
            for n in order(PROMPTS, turn):
                (text,) = peer.generate(Request([next(prompts[n])], TOKENS))
                samples["first token", n].append(text.first_token)
                after = time_per_token([text])
                assert after is not None  # plain decoding has a round for each token
                samples["a token", n].append(after)
    curves = defaultdict[str, list[Point]](list)
    for (name, n), some in sorted(samples.items()):
        rows = n if name == "first token" else n + TOKENS / 2
        curves[name].append(run.time_point(n, some, run.bytes_read(target, peer.facts, rows)))
    return curves


def by_positions(run: GrowthRun) -> Curves:
    """Time of a call of the target, such as a verification of gamma + 1 tokens."""
    ((setup, processes),) = run.measure_steps([(run.scale.target, 1)], POSITIONS).items()
    return {"a call": [run.call_point(n, setup, processes, n) for n in POSITIONS]}


def by_slots(run: GrowthRun) -> Curves:
    """Time of a step of all slots."""
    found = run.measure_steps([(run.scale.target, slots) for slots in SLOTS], [1])
    return {"step": [run.call_point(setup[1], setup, some, 1) for setup, some in found.items()]}


def by_size(run: GrowthRun) -> Curves:
    """Load time, peak memory after loading, and time of a step."""
    curves = defaultdict[str, list[Point]](list)
    setups = [(name, 1) for name in ("bundled", *run.scale.sizes)]
    for setup, processes in run.measure_steps(setups, [1]).items():
        all_facts = [facts for facts, _ in processes]
        weights, before = all_facts[0]["weights"], all_facts[0]["before"]
        x = all_facts[0]["parameters"]
        loads = [Sample(facts["load_seconds"], facts["load_lost"]) for facts in all_facts]
        peak = max(facts["loaded"] for facts in all_facts) / MIB
        curves["load"].append(run.time_point(x, loads, weights))
        curves["peak of memory"].append(make_point(x, peak, (before + weights) / MIB))
        curves["step"].append(run.call_point(x, setup, processes, 1))
    return curves


SECTIONS: Mapping[str, tuple[str, Callable[[GrowthRun], Curves]]] = {  # name: axis, measurement
    "prompt": ("tokens of the prompt", by_prompt),
    "positions": ("positions of a call, gamma + 1", by_positions),
    "slots": ("slots", by_slots),
    "model size": ("parameters", by_size),
}


def run(growing: GrowthRun) -> dict[str, Any]:
    """Measure all sections; returns the JSON object."""
    sections = {}
    for name, (axis, measure) in SECTIONS.items():
        growing.clock.note(name)
        for _ in range(READS):
            growing.reader()
        sections[name] = {"axis": axis, "curves": measure(growing)}
    return {
        "machine": machine.describe(growing.threads), "target": growing.scale.target,
        "precision": growing.precision,
        "bytes_per_second": round(growing.reader.bandwidth), "sections": sections,
    }  # fmt: skip


# Output


def heading(results: Results) -> str:
    """The conditions of the figures."""
    return (
        f"{machine.summary_line(results['machine'])}; the target is {results['target']} in "
        f"{results['precision']}; memory is read at "
        f"{results['bytes_per_second'] / 1e9:.1f} GB/s. * other processes took over 2 % of the "
        "time: do not quote exponents of such points"
    )


def tables(results: Results) -> list[Table]:
    """One table per section: values and floors of each curve, with the exponents below."""
    made = []
    for name, section in results["sections"].items():
        rows, notes = list[list[str]](), []
        for curve, points in section["curves"].items():
            unit = "MiB" if curve.startswith("peak") else "ms"
            values = [_format_number(p["y"]) + ("" if p["quiet"] else "*") for p in points]
            rows.append([f"{curve}, {unit}", *values])
            rows.append(["  floor", *(_format_number(p["floor"]) for p in points)])
            notes.append(f"{curve}: {describe_exponents(points, unit)}")
        heads = [f"{x / 1e6:.1f} M" if x >= 1e6 else f"{x:,.0f}" for x in (p["x"] for p in points)]
        made.append(Table(f"{name}: {section['axis']}", ["", *heads], rows, notes))
    return made


def describe_exponents(points: Sequence[Point], unit: str) -> str:
    """A description of a curve's exponents."""
    x, y = [p["x"] for p in points], [p["y"] for p in points]
    line, shifted = fit_power_law(x, y), fit_shifted_power_law(x, y)
    if line is None:
        return "no fit: too few points"
    if shifted is None:
        return str(line)
    if shifted.low is None or shifted.high is None:
        return f"{line} | a constant cannot be distinguished"
    interval = f"({shifted.low:.2f} to {shifted.high:.2f})"
    # Ignore a constant that is only rounding of the fit.
    constant = shifted.constant if shifted.constant > 1e-9 * max(y) else 0
    return f"{line} | beyond {_format_number(constant)} {unit}: x^{shifted.exponent:.2f} {interval}"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="folder for checkpoints and bundles (default: build/side)")  # fmt: skip
    parser.add_argument("--precision", choices=("float32", "int8", "int4"), default="float32",
        help="precision of the weights (default: float32)")  # fmt: skip


def _measure(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    args.work.mkdir(parents=True, exist_ok=True)
    clock.note("reading the text for the prompts")
    prompts = Prompts(Tokenizer(TARGET / TOKENIZER_FILE), collect().held_out)
    reader = machine.MemoryReader(args.threads)
    scale = QUICK if args.quick else FULL
    return run(GrowthRun(scale, args.threads, args.work, prompts, reader, clock, args.precision))


SUITE = Suite(
    name="growth",
    about=__doc__ or "",
    quick="smaller models: two minutes, plus the time to build them once",
    measure=_measure,
    tables=tables,
    heading=heading,
    options=_options,
)
main = SUITE.main
