"""The curves of the growth benchmark: what is measured at which points, section by section.

All of it is asked of processes of their own (`bench.systems`): several in turn where what is loaded
first would be slower, fresh ones where memory is told. Times are medians of runs in alternation
(`clock.order`), after three warm-ups. Seconds of decoding have no prefill in them, neither the
target's nor the draft's.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from runtime.files.manifest import read_bundle

from ...core import machine, pair
from ...core.clock import ENOUGH, Clock, Figure, Sample, figure, order, turns
from ...core.costs import Traffic, row_bytes
from ...core.pair import Built
from ...core.pair.grow import grow
from ...core.prompts import Prompts
from ...systems.peer import Peer
from ...systems.protocol import Batch, Request, Steps, Text

Sizes = dict[str, int]  # fields of a configuration, as `grow` takes them
ELEMENT = 4  # bytes of a number in the cache
NEW_TOKENS = 8  # of texts whose memory is told
POSITION = 200  # of a step, where a slot has so many rows
WARM_UPS = 3


@dataclass(frozen=True)
class GrowthScale:
    """Where the curves have their points.

    shape: of the pair, None for the bundled one. vocab: all of one hidden size, since more tokens
    take three channels more. sizes: what of the bundled target is larger, by name. rounds: of each
    text and step, at least; loads: likewise. patience: seconds for which a section waits for
    undisturbed samples.
    """

    name: str
    shape: str | None
    vocab: tuple[int, ...]
    sizes: Mapping[str, Sizes]
    loads: int
    patience: float
    read_bytes: int = machine.READ_BYTES
    outputs: tuple[int, ...] = (8, 24, 64, 192, 512)
    contexts: tuple[int, ...] = (16, 64, 192, 448, 960, 1500)
    slots: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    rounds: int = 5
    max_len: int = 2048
    prompt: int = 32  # tokens, but where they are what grows
    tokens: int = 16  # of a text, likewise
    gamma: int = 4


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """y, in seconds or bytes, at x, with the range of the middle 80 % of its samples.

    floor: what y would be if nothing but what has to be read, or kept, took time, or room; None
    where that says nothing. quiet: enough of the samples were undisturbed.
    """

    x: float
    y: float
    low: float
    high: float
    floor: float | None = None
    quiet: bool = True


Curves = dict[str, list[CurvePoint]]
Key = tuple[str, float]  # curve and x
Answer = tuple[Sample, float]  # and the bytes that had to be read
Asked = Callable[[int], Mapping[Key, Answer]]  # of a turn


@dataclass(frozen=True)
class Opened:
    """A process that had opened a bundle: its facts, a batch if it was asked for one, samples of
    steps, and the peak after those."""

    facts: Mapping[str, Any]
    texts: Sequence[Text]
    steps: Sequence[Sample]
    peak: int


@dataclass
class Growing:
    """One run. target, draft: the pair. prompts: of its tokens."""

    scale: GrowthScale
    threads: int
    work: Path
    target: Path
    draft: Path
    prompts: Prompts
    clock: Clock
    reader: machine.MemoryReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = machine.MemoryReader(self.threads, self.scale.read_bytes)

    def peer(self, target: Path, draft: Path | None = None, slots: int = 1) -> Peer:
        return Peer(
            "outrider", target, draft=draft, threads=self.threads, work=self.work,
            max_len=self.scale.max_len, slots=slots,
        )  # fmt: skip

    def completions(self, length: int) -> Iterator[list[int]]:
        """Endless, and never one twice in a row."""
        return cycle(self.prompts.many("completion", ENOUGH, length))

    def warm_up(self, peer: Peer, modes: Iterable[str]) -> None:
        for prompt in self.prompts.many("completion", WARM_UPS, self.scale.prompt):
            for mode in modes:
                peer.generate(Request(prompt, 24, mode, gamma=self.scale.gamma))

    def traffic(self, facts: Mapping[str, Any], rows: float) -> Traffic:
        """Of a process that has both models of the pair."""
        row, draft_row = (row_bytes(model, ELEMENT) for model in (self.target, self.draft))
        return Traffic(facts["weights"], row, rows, facts["draft_weights"], draft_row)

    def point(self, x: float, timed: Figure, read: float | None) -> CurvePoint:
        floor = None if read is None else read / self.reader.bandwidth
        quiet = timed.kept >= min(timed.taken, ENOUGH)
        return CurvePoint(x, timed.ms / 1e3, timed.low / 1e3, timed.high / 1e3, floor, quiet)

    def curves(self, asked: Sequence[Asked]) -> Curves:
        """Ask each in turn until the samples of all are enough."""
        scale, samples, reads = self.scale, defaultdict[Key, list[Sample]](list), dict[Key, float]()
        for turn in turns(
            samples, least=scale.rounds, wanted=scale.rounds, patience=scale.patience
        ):
            for ask in order(asked, turn):
                for key, (taken, read) in ask(turn).items():
                    samples[key].append(taken)
                    reads[key] = reads.get(key, 0.0) + read
        found: Curves = defaultdict(list)
        for (name, x), some in sorted(samples.items()):
            found[name].append(self.point(x, figure(some), reads[name, x] / len(some)))
        return {name: found[name] for name, _ in samples}

    def checkpoint(self, name: str, sizes: Sizes) -> Path:
        """The bundled target with other sizes, made unless it is there."""
        folder = self.work / name if sizes else pair.TARGET
        if not folder.is_dir():
            self.clock.note(f"growing the bundled target: {name}")
            grow(pair.TARGET, folder, sizes)
        return folder

    def opened(
        self, places: Mapping[float, tuple[Path, int]], texts: Callable[[float], int] | None = None
    ) -> dict[float, list[Opened]]:
        """Checkpoints opened with so many slots, by x, each in fresh processes, in turn.

        texts: from x to the length of prompts that all slots decode first, for the memory.
        """
        found = defaultdict[float, list[Opened]](list)
        for turn in range(self.scale.loads):
            for x in order(list(places), turn):
                target, slots = places[x]
                with self.peer(target, slots=slots) as peer:
                    batch: list[Text] = []
                    if texts is not None:
                        prompts = self.prompts.many("completion", slots, texts(x))
                        batch = peer.batch(Batch(prompts, NEW_TOKENS))
                    request = Steps(self.position, [1], slots, 2 * self.scale.rounds, 0.0)
                    samples, peak = peer.steps(request)
                    found[x].append(Opened(peer.facts, batch, samples["1"], peak))
        return {x: found[x] for x in places}

    @property
    def position(self) -> int:
        return min(POSITION, self.scale.max_len - 32)

    def steps(
        self, opened: Mapping[float, list[Opened]], places: Mapping[float, tuple[Path, int]]
    ) -> list[CurvePoint]:
        """Steps of a token in each slot, of all processes together."""
        points = []
        for x, found in opened.items():
            target, slots = places[x]
            read = found[0].facts["weights"] + slots * self.position * row_bytes(target, ELEMENT)
            points.append(self.point(x, figure([s for one in found for s in one.steps]), read))
        return points


def peak_memory(opened: Mapping[float, list[Opened]], row: int) -> Curves:
    """Of processes that decoded a batch. The floor: what they had before, weights, rows written."""
    curves: Curves = {"peak memory": [], "anonymous memory": []}
    for x, found in opened.items():
        texts, facts = found[0].texts, found[0].facts
        rows = sum(text.notes["prompt_tokens"] + NEW_TOKENS for text in texts)
        least = facts["before"] + facts["weights"] + rows * row
        for name, floor in (("peak", least), ("anonymous", None)):
            sizes = [max(text.memory[name] for text in one.texts) for one in found]
            curves[f"{name} memory"].append(_bytes(x, sizes, floor))
    return curves


def _bytes(x: float, sizes: Sequence[int], floor: float | None = None) -> CurvePoint:
    """The median of some sizes, and their range."""
    every = sorted(sizes)
    return CurvePoint(x, every[len(every) // 2], every[0], every[-1], floor)


def seconds_of(text: Text) -> Sample:
    """Of its rounds, without any prefill."""
    parts = ("time_draft", "time_verify", "time_sample", "time_host")
    return Sample(sum(text.notes[part] for part in parts) / 1e3, text.decoding().lost)


# Sections: the curves of each


def output_length(run: Growing) -> Curves:
    """Decoding, plain and with drafts, by the tokens decoded."""
    scale, prompts = run.scale, run.completions(run.scale.prompt)
    with run.peer(run.target, run.draft) as peer:

        def asked(mode: str, tokens: int) -> Asked:
            name = "plain" if mode == "plain" else f"gamma {scale.gamma}"
            traffic = run.traffic(peer.facts, scale.prompt + tokens / 2)

            def ask(turn: int) -> Mapping[Key, Answer]:
                # One more: the first is the prefill's.
                request = Request(next(prompts), tokens + 1, mode, 0.0, turn, scale.gamma)
                text = peer.generate(request)
                rounds, drafted = text.notes["rounds"], text.notes["drafted"]
                read = rounds * traffic.of_round(drafted / rounds)
                return {(name, tokens): (seconds_of(text), read)}

            return ask

        run.warm_up(peer, ("plain", "draft"))
        return run.curves(
            [asked(mode, tokens) for tokens in scale.outputs for mode in ("plain", "draft")]
        )


def context(run: Growing) -> Curves:
    """The first token, and a token after it, by the tokens of the prompt; memory."""
    scale = run.scale
    with run.peer(run.target) as peer:

        def asked(length: int) -> Asked:
            prompts = run.completions(length)
            reading = run.traffic(peer.facts, length).of_round()
            decoding = run.traffic(peer.facts, length + scale.tokens / 2).of_round()

            def ask(turn: int) -> Mapping[Key, Answer]:
                text = peer.generate(Request(next(prompts), scale.tokens + 1, "plain", 0.0, turn))
                whole = seconds_of(text)
                a_token = Sample(whole.seconds / text.notes["rounds"], whole.lost)
                return {
                    ("TTFT", length): (text.first, reading),
                    ("TPOT", length): (a_token, decoding),
                }

            return ask

        run.warm_up(peer, ("plain",))
        curves = run.curves([asked(length) for length in scale.contexts])
    opened = run.opened(dict.fromkeys(scale.contexts, (run.target, 1)), int)
    return {**curves, **peak_memory(opened, row_bytes(run.target, ELEMENT))}


def batch(run: Growing) -> Curves:
    """A step for all slots, and memory. One slot has a graph of its own (export/one_slot.py)."""
    places = {float(slots): (run.target, slots) for slots in run.scale.slots}
    opened = run.opened(places, lambda _: run.scale.prompt)
    memory = peak_memory(opened, row_bytes(run.target, ELEMENT))
    return {"step": run.steps(opened, places), **memory}


def vocabulary(run: Growing) -> Curves:
    """A step and the bundle by the tokens of the vocabulary, all of one hidden size."""
    places: dict[float, tuple[Path, int]] = {}
    sizes = []
    for tokens in run.scale.vocab:
        grown = {"hidden_size": pair.DRAFT_HIDDEN, "vocab_size": tokens}
        places[tokens] = run.checkpoint(f"vocab-{tokens}", grown), 1
        folder = pair.bundle(places[tokens][0], None, run.work, max_len=run.scale.max_len)
        parameters = read_bundle(folder, verify=False).pair.target.parameters
        sizes.append(_bytes(tokens, [_size(folder)], 4 * parameters))
    return {"step": run.steps(run.opened(places), places), "bundle": sizes}


def gamma(run: Growing) -> Curves:
    """A verification by the tokens verified."""
    scale = run.scale
    with run.peer(run.target) as peer:
        request = Steps(run.position, list(scale.widths), 1, 2 * scale.rounds, scale.patience)
        samples, _ = peer.steps(request)
        points = [
            run.point(
                n, figure(samples[str(n)]), run.traffic(peer.facts, run.position + n).of_round()
            )
            for n in scale.widths
        ]
    return {"verification": points}


def model_size(run: Growing) -> Curves:
    """Export, build, load and a step by the parameters, each with the peak of its process."""
    curves: Curves = defaultdict(list)
    places: dict[float, tuple[Path, int]] = {}
    bundles: dict[float, int] = {}
    with tempfile.TemporaryDirectory(prefix="growth-", dir=run.work) as name:
        fresh = Growing(**{**_fields(run), "work": Path(name)})
        for size, sizes in run.scale.sizes.items():
            checkpoint = run.checkpoint(size, sizes)
            run.clock.note(f"export and build of {size}")
            made: list[Built] = []
            folder = pair.bundle(
                checkpoint, None, fresh.work, max_len=run.scale.max_len, built=made.append
            )
            x = float(read_bundle(folder, verify=False).pair.target.parameters)
            places[x], bundles[x] = (checkpoint, 1), _size(folder)
            for stage, taken, read in (
                ("export", made[0].export, None), ("build", made[0].build, 4 * x),
            ):  # fmt: skip
                curves[stage].append(run.point(x, figure([taken.sample]), read))
                curves[f"{stage}, peak"].append(_bytes(x, [taken.peak]))
        run.clock.note("loads and steps")
        opened = fresh.opened(places)
    curves["step"] = run.steps(opened, places)
    for x, found in opened.items():
        loads = [Sample(one.facts["load_seconds"], one.facts["load_lost"]) for one in found]
        curves["load"].append(run.point(x, figure(loads), bundles[x]))
        least = found[0].facts["before"] + bundles[x]
        curves["load, peak"].append(_bytes(x, [one.facts["loaded"] for one in found], least))
        curves["step, peak"].append(_bytes(x, [one.peak for one in found], least))
    return dict(curves)


def _fields(run: Growing) -> dict[str, Any]:
    return {name: value for name, value in vars(run).items() if name != "reader"}


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class CurveSection:
    """What grows along the axis, and how it is measured."""

    axis: str
    measure: Callable[[Growing], Curves]


SECTIONS = {
    "output length": CurveSection("tokens decoded", output_length),
    "context": CurveSection("tokens of the prompt", context),
    "batch": CurveSection("slots", batch),
    "vocabulary": CurveSection("tokens of the vocabulary", vocabulary),
    "gamma": CurveSection("positions verified, gamma + 1", gamma),
    "model size": CurveSection("parameters", model_size),
}
