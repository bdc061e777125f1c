"""The curves of bench/growth.py: what is measured at which points, section by section.

Times are medians of runs in alternation (bench/timing.py), after three warm-ups. Seconds of
decoding have no prefill in them, neither the target's nor the draft's.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.bundle import load
from runtime.files.manifest import read_bundle
from runtime.files.torch_files import WEIGHTS_FILE
from runtime.text.engine import TextEngine

from . import code_text, inflate, machine, peer_outrider
from .core.costs import step
from .growth_process import WARM_UPS, ask, row_bytes, step_position
from .peers import Setup
from .timing import ENOUGH, Figure, Sample, alternate, figure, turns
from .ways import Clock, Way, decode, warm_up

Sizes = dict[str, int]  # fields of a configuration, as bench/inflate.py takes them


@dataclass(frozen=True)
class Scale:
    """Where the curves have their points. shape: of the pair, None for the bundled one. vocab: all
    of one hidden size, since more tokens take three channels more. sizes: what of the bundled
    target is larger, by name. rounds: of each text and step, at least; loads: likewise."""

    name: str
    shape: str | None
    outputs: tuple[int, ...]
    contexts: tuple[int, ...]
    slots: tuple[int, ...]
    vocab: tuple[int, ...]
    hidden: int
    gammas: tuple[int, ...]
    sizes: Mapping[str, Sizes]
    rounds: int
    loads: int
    patience: float  # seconds for which a section waits for undisturbed samples
    read_bytes: int = machine.READ_BYTES
    max_len: int = 2048
    prompt: int = 32  # tokens, but where they are what grows
    tokens: int = 16  # of a text, likewise
    alpha: float = 0.8  # of the pair that is made
    gamma: int = 4


@dataclass(frozen=True, slots=True)
class Point:
    """y, in seconds or bytes, at x, with the range of the middle 80 % of its samples. floor: what y
    would be if nothing but what has to be read, or kept, took time, or room; None where that says
    nothing. quiet: enough of the samples were undisturbed."""

    x: float
    y: float
    low: float
    high: float
    floor: float | None = None
    quiet: bool = True


@dataclass(frozen=True, slots=True)
class Timed:
    """read: bytes that had to be."""

    sample: Sample
    read: float


Key = tuple[str, float]  # curve and x
Call = Callable[[int], Mapping[Key, Timed]]  # of a turn
Curves = dict[str, list[Point]]


@dataclass
class Bench:
    """One run. source: the checkpoint that is grown. documents: of what prompts are cut from."""

    scale: Scale
    threads: int
    work: Path
    source: Path
    bundle: Path
    documents: Sequence[str]
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.reader = machine.MemoryReader(self.threads, self.scale.read_bytes)

    def open(self, bundle: Path) -> TextEngine:
        return load(bundle, slots=1, threads=self.threads, verify=False)

    def prompts(self, engine: TextEngine, length: int) -> list[list[int]]:
        """One for each turn: code of held-out documents."""
        made = code_text.prompts(engine.tokenizer, self.documents, seed=length)
        return [made.completion(length) for _ in range(max(ENOUGH, self.scale.rounds))]

    def point(self, x: float, timed: Figure, read: float | None) -> Point:
        floor = None if read is None else read / self.reader.bandwidth
        quiet = timed.kept >= min(timed.taken, ENOUGH)
        return Point(x, timed.ms / 1e3, timed.low / 1e3, timed.high / 1e3, floor, quiet)

    def texts(self, calls: Sequence[Call]) -> Curves:
        """The calls in turn, forwards and backwards; a call's turns have different prompts."""
        scale, samples, reads = self.scale, defaultdict[Key, list[Sample]](list), dict[Key, float]()
        for turn in turns(
            samples, least=scale.rounds, wanted=scale.rounds, patience=scale.patience
        ):
            for call in calls[:: 1 if turn % 2 == 0 else -1]:
                for key, timed in call(turn).items():
                    samples[key].append(timed.sample)
                    reads[key] = reads.get(key, 0.0) + timed.read
        return self._curves({key: (figure(x), reads[key] / len(x)) for key, x in samples.items()})

    def steps(self, calls: Mapping[Key, tuple[Callable[[], object], float]]) -> Curves:
        """Single calls in alternation, each with the bytes that it has to read."""
        names = {f"{name} {x}": (name, x) for name, x in calls}
        for call, _ in list(calls.values()) * (WARM_UPS - 1):  # the third is that of `alternate`
            call()
        figures = alternate(
            {text: calls[key][0] for text, key in names.items()},
            rounds=2 * self.scale.rounds, patience=self.scale.patience,
        )  # fmt: skip
        return self._curves(
            {names[text]: (f, calls[names[text]][1]) for text, f in figures.items()}
        )

    def _curves(self, figures: Mapping[Key, tuple[Figure, float]]) -> Curves:
        curves: Curves = defaultdict(list)
        for (name, x), (timed, read) in figures.items():
            curves[name].append(self.point(x, timed, read))
        return {name: sorted(points, key=lambda p: p.x) for name, points in curves.items()}

    def checkpoint(self, name: str, sizes: Sizes) -> Path:
        """The bundled target with other sizes, made unless it is there."""
        if not sizes:
            return self.source
        folder = self.work / name
        if not folder.is_dir():
            inflate.grow(str(self.source), folder, sizes)
        return folder


def build(target: Path, draft: Path | None, bench_work: Path, scale: Scale, threads: int) -> Path:
    """The bundle of a pair, made unless it is there."""
    setup = Setup(
        target=str(target), draft=str(draft) if draft else None, threads=threads,
        precision="float32", work=str(bench_work), max_len=scale.max_len,
    )  # fmt: skip
    return peer_outrider.build(setup)


def memory_points(x: float, answer: Mapping[str, Any]) -> Iterator[tuple[str, Point]]:
    for name in ("peak", "anonymous"):
        value = answer[name]
        least = answer["least"] if name == "peak" else None
        yield f"{name} memory", Point(x, value, value, value, least)


def add_memory(curves: Curves, bench: Bench, asked: Mapping[float, tuple[int, int]]) -> None:
    """asked: (slots, tokens of the prompts) by x. One process each."""
    for x, (slots, length) in asked.items():
        answer = ask("texts", bench.bundle, bench.threads, slots, length)
        for name, point in memory_points(x, answer):
            curves.setdefault(name, []).append(point)


# Sections: the curves of each


def output_length(bench: Bench) -> Curves:
    scale, engine = bench.scale, bench.open(bench.bundle)
    prompts = bench.prompts(engine, scale.prompt)
    ways = {"plain": Way(engine, {"gamma": 0})}
    if engine.decoder.draft is not None:
        ways[f"gamma {scale.gamma}"] = Way(engine, {"gamma": scale.gamma})
    weights = engine.memory
    rows = {role: row_bytes(engine, role) for role, _ in engine.manifest.pair.models()}

    def call(name: str, tokens: int, place: int) -> Call:
        def timed(turn: int) -> Mapping[Key, Timed]:
            # One more: the first is the prefill's.
            run = decode(ways[name], prompts[(place + turn) % len(prompts)], tokens + 1, turn)
            calls = {"target": run.stats.rounds, "draft": run.stats.drafted}
            read = sum(
                calls[role] * (weights[role] + row * (scale.prompt + tokens / 2))
                for role, row in rows.items()
            )
            return {(name, tokens): Timed(Sample(run.seconds, run.lost), read)}

        return timed

    for prompt in prompts[:WARM_UPS]:
        warm_up(ways, prompt)
    pairs = [(name, tokens) for tokens in scale.outputs for name in ways]
    return bench.texts([call(*pair, place) for place, pair in enumerate(pairs)])


def context(bench: Bench) -> Curves:
    scale, engine = bench.scale, bench.open(bench.bundle)
    way = Way(engine, {"gamma": 0})
    weights, row = engine.memory["target"], row_bytes(engine, "target")

    def call(length: int) -> Call:
        prompts = bench.prompts(engine, length)

        def timed(turn: int) -> Mapping[Key, Timed]:
            run = decode(way, prompts[turn % len(prompts)], scale.tokens + 1, turn)
            step_seconds = Sample(run.seconds / run.stats.rounds, run.lost)
            read = weights + row * (length + scale.tokens / 2)
            return {
                ("TTFT", length): Timed(Sample(run.stats.ttft, run.lost), weights + row * length),
                ("TPOT", length): Timed(step_seconds, read),
            }

        return timed

    for prompt in bench.prompts(engine, scale.prompt)[:WARM_UPS]:
        warm_up({"plain": way}, prompt)
    curves = bench.texts([call(length) for length in scale.contexts])
    add_memory(curves, bench, {length: (1, length) for length in scale.contexts})
    return curves


def batch(bench: Bench) -> Curves:
    """One slot has a graph of its own (export/one_slot.py)."""
    answers = opened(bench, {slots: (bench.bundle, slots) for slots in bench.scale.slots})
    curves = {"step": steps_of(bench, answers)}
    add_memory(curves, bench, {slots: (slots, bench.scale.prompt) for slots in bench.scale.slots})
    return curves


def vocabulary(bench: Bench) -> Curves:
    scale, sizes = bench.scale, list[Point]()
    bundles: dict[float, tuple[Path, int]] = {}
    for tokens in scale.vocab:
        bench.clock.note(f"a vocabulary of {tokens:,}")
        grown = {"hidden_size": scale.hidden, "vocab_size": tokens}
        checkpoint = bench.checkpoint(f"vocab-{tokens}", grown)
        bundle = build(checkpoint, None, bench.work, scale, bench.threads)
        bundles[tokens] = bundle, 1
        manifest = read_bundle(bundle, verify=False)
        size = sum(facts.size for facts in manifest.files.values())
        sizes.append(Point(tokens, size, size, size, 4 * manifest.pair.target.parameters))
    return {"step": steps_of(bench, opened(bench, bundles)), "bundle": sizes}


def gamma(bench: Bench) -> Curves:
    engine = bench.open(bench.bundle)
    position = step_position(engine)
    weights, row = engine.memory["target"], row_bytes(engine, "target")
    widths = [gamma + 1 for gamma in bench.scale.gammas]
    return bench.steps(
        {
            ("verification", n): (
                step(engine.decoder.target, n, position, n), weights + row * (position + n),
            )
            for n in widths
        }
    )  # fmt: skip


def model_size(bench: Bench) -> Curves:
    """Export, build, load and a step, each model's with the peak of its process."""
    curves: Curves = defaultdict(list)
    bundles: dict[float, Path] = {}
    with tempfile.TemporaryDirectory(prefix="growth-", dir=bench.work) as name:
        for size, sizes in bench.scale.sizes.items():
            checkpoint = bench.checkpoint(size, sizes)
            bench.clock.note(f"export and build of {size}")
            graphs, bundle = Path(name, f"{size}-graphs").resolve(), Path(name, size).resolve()
            made = {
                "export": ask("command", "export", "--model", checkpoint, "--draft", "none",
                              "--out", graphs, "--max-len", bench.scale.max_len,
                              "--cache", graphs.with_name("cache")),
                "build": ask("command", "engines", "--graphs", graphs, "--out", bundle),
            }  # fmt: skip
            target = read_bundle(bundle, verify=False).pair.target
            x, weights = float(target.parameters), target.files[WEIGHTS_FILE].size
            read = {"export": None, "build": float(weights)}
            bundles[x] = bundle
            for stage, answer in made.items():
                taken = figure([Sample(answer["seconds"], answer["lost"])])
                curves[stage].append(bench.point(x, taken, read[stage]))
                peak = answer["peak"]
                curves[f"{stage}, peak"].append(Point(x, peak, peak, peak))
        bench.clock.note("loads and steps")
        _loads(bench, bundles, curves)
    return dict(curves)


Answers = Mapping[float, Sequence[dict[str, Any]]]


def opened(bench: Bench, places: Mapping[float, tuple[Path, int]]) -> Answers:
    """Bundles opened with so many slots, by x: in a process each, for of several in one process the
    first are slower, in turn, forwards and backwards."""
    answers = defaultdict[float, list[dict[str, Any]]](list)
    for turn in range(bench.scale.loads):
        for x in list(places)[:: 1 if turn % 2 == 0 else -1]:
            bundle, slots = places[x]
            steps = 2 * bench.scale.rounds
            answers[x].append(ask("opened", bundle, bench.threads, steps, slots))
    return {x: answers[x] for x in places}


def steps_of(bench: Bench, answers: Answers) -> list[Point]:
    return [
        bench.point(x, figure([Sample(*s) for a in found for s in a["steps"]]), found[0]["read"])
        for x, found in answers.items()
    ]


def _loads(bench: Bench, bundles: Mapping[float, Path], curves: Curves) -> None:
    answers = opened(bench, {x: (bundle, 1) for x, bundle in bundles.items()})
    curves["step"] = steps_of(bench, answers)
    for x, found in answers.items():
        loads = figure([Sample(*a["load"]) for a in found])
        size = sum(path.stat().st_size for path in bundles[x].rglob("*") if path.is_file())
        curves["load"].append(bench.point(x, loads, size))
        for stage in ("load", "step"):
            peaks = sorted(a[f"{stage}_peak"] for a in found)
            middle = peaks[len(peaks) // 2]
            least = found[0]["before"] + size
            curves[f"{stage}, peak"].append(Point(x, middle, peaks[0], peaks[-1], least))


@dataclass(frozen=True)
class Section:
    axis: str
    measure: Callable[[Bench], Curves]


SECTIONS = {
    "output length": Section("tokens decoded", output_length),
    "context": Section("tokens of the prompt", context),
    "batch": Section("slots", batch),
    "vocabulary": Section("tokens of the vocabulary", vocabulary),
    "gamma": Section("positions verified, gamma + 1", gamma),
    "model size": Section("parameters", model_size),
}
