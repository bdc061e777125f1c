"""python -m bench.decode: what decoding costs, as ratios in one run, beside what physics allows.

Progress goes to stderr, figures to stdout, one JSON line last. bench/timing.py says how noise is
kept out, bench/models.py what is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.engine import Engine
from runtime.bundle import load
from runtime.files.errors import OutriderError, run_command
from runtime.text.engine import TextEngine

from . import machine, memory, models, peers, share
from .timing import Figure, Sample, alternate, figure, sample, turns

WIDTHS = (1, 2, 3, 5, 8, 9)
PROMPT = [1 + 7 * i % 250 for i in range(64)]  # ids of bytes


@dataclass(frozen=True)
class Scale:
    """How much is measured: the shapes, the slot's length, how often."""

    name: str
    target: models.Shape
    draft: models.Shape
    max_len: int
    rounds: int
    tokens: int  # of a generation
    read_bytes: int
    patience: float  # seconds for which a section waits for undisturbed samples


FULL = Scale("smollm-135m", models.TARGET, models.DRAFT, 2048, 10, 16, machine.READ_BYTES, 30)
QUICK = Scale("quick", models.QUICK_TARGET, models.QUICK_DRAFT, 512, 5, 16, 1 << 27, 3)
TINY = Scale("tiny", models.TINY_TARGET, models.TINY_DRAFT, 256, 2, 8, 1 << 24, 0.2)


@dataclass
class Bench:
    """One run: the figures so far. Each section adds its own under its name."""

    scale: Scale
    threads: int
    work: Path
    results: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.reader = machine.MemoryReader(self.threads, self.scale.read_bytes)

    @property
    def bandwidth(self) -> float:
        """Bytes a second, by the fastest pass so far."""
        return self.reader.bandwidth

    def note(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.started:5.0f} s] {text}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def alternate(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, Figure]:
        return alternate(calls, rounds=self.scale.rounds, patience=self.scale.patience)

    def floor_ms(self, size: int) -> float:
        return 1e3 * size / self.bandwidth

    def floor(self, size: int, ms: float) -> str:
        """`floor 21.3 ms (613 MiB at 28.8 GB/s), 71% of the floor's speed`."""
        floor = self.floor_ms(size)
        return (
            f"floor {floor:.2f} ms ({size / 2**20:.0f} MiB at {self.bandwidth / 1e9:.1f} GB/s), "
            f"{floor / ms:.0%} of the floor's speed"
        )


def step(
    engine: Engine, width: int, position: int, outputs: int, slots: int = 1
) -> Callable[[], object]:
    """A call of `width` tokens in each of the first `slots`, logits for the last `outputs`."""
    ids, index = np.ones((slots, width), np.int64), np.arange(width - outputs, width)
    return lambda: engine.forward(ids, np.full(slots, position), index)


def bytes_of(engine: TextEngine, role: str) -> int:
    """What one step has to read: every weight once, and the rows that the cache has now.

    Tied embeddings are read once, as the output matrix; looking up a token reads one row.
    """
    pair = engine.manifest.pair
    model: Any = getattr(engine.decoder, role)
    facts = pair.target if role == "target" else pair.draft
    assert facts is not None
    return engine.memory[role] + facts.cache_bytes(1) * int(model.rows) // facts.capacity


# Sections


def say_bandwidth(bench: Bench) -> None:
    size = f"{bench.reader.bytes / 2**20:.0f} MiB"
    bench.results["bandwidth"] = {"bytes_per_second": round(bench.bandwidth), "read": size}
    bench.say(
        f"bandwidth   {bench.bandwidth / 1e9:.1f} GB/s: {bench.threads} threads take the maximum "
        f"of {size} of float32, fastest of the passes between the steps below"
    )


def plain_decoding(bench: Bench, engine: TextEngine, checkpoint: Path) -> None:
    """Milliseconds a token at N = 1 against `generate`, in alternation."""
    reason = peers.missing()
    tokens = bench.scale.tokens

    def ours() -> list[Sample]:
        events = engine.stream(PROMPT, max_new_tokens=tokens, gamma=0, ignore_eos=True)
        next(events)  # the prefill and its token
        return [sample(lambda: next(events)) for _ in range(tokens - 1)]

    prompts = {attention: cycle((PROMPT, PROMPT[::-1])) for attention in peers.ATTENTION}

    def theirs(peer: peers.Peer, attention: str) -> list[Sample]:
        request = peers.Request(next(prompts[attention]), tokens, peers.ATTENTION[attention])
        return peer.generate(request).steps()

    names = tuple(peers.ATTENTION) if reason is None else ()
    samples: dict[str, list[Sample]] = {name: [] for name in ("outrider", *names)}
    with ExitStack() as stack:
        peer = None
        if reason is None:
            peer = stack.enter_context(
                peers.Peer("transformers", checkpoint, threads=bench.threads, work=bench.work)
            )
            for attention in names:
                theirs(peer, attention)  # warm-up
        ours()
        wanted, patience = 2 * bench.scale.rounds, bench.scale.patience
        for _ in turns(samples, least=1, wanted=wanted, patience=patience):
            bench.reader()
            samples["outrider"] += ours()
            for attention in names:
                assert peer is not None
                samples[attention] += theirs(peer, attention)
                samples["outrider"] += ours()
    figures = {name: figure(x) for name, x in samples.items()}
    mine = figures.pop("outrider")
    result: dict[str, Any] = {
        "outrider": mine.json_object(),
        "floor_ms": round(bench.floor_ms(bytes_of(engine, "target")), 3),
    }
    bench.say(f"plain       {mine} a token | {bench.floor(bytes_of(engine, 'target'), mine.ms)}")
    if reason is None:
        best = min(figures, key=lambda name: figures[name].ms)
        ratio = figures[best].ms / mine.ms
        each = ", ".join(f"{name} {figures[name]}" for name in figures)
        result["transformers"] = {name: f.json_object() for name, f in figures.items()}
        result["ratio"] = round(ratio, 3)
        bench.say(f"            Transformers generate: {each} -> {ratio:.2f}x with {best}")
    else:
        result["transformers"] = "missing"
        bench.say(f"            Transformers: missing ({reason})")
    bench.results["plain"] = result


def widths(bench: Bench, engine: TextEngine) -> None:
    """What a verification of N tokens and a draft step cost in single target steps."""
    target, draft = engine.decoder.target, engine.decoder.draft
    assert draft is not None
    position = 200
    calls = {f"{n}": step(target, n, position, n) for n in WIDTHS}
    calls["draft"] = step(draft, 1, position, 1)
    calls["read"] = bench.reader
    figures = bench.alternate(calls)
    del figures["read"]
    say_bandwidth(bench)
    one, draft_step = figures["1"], figures.pop("draft")
    c = draft_step.ms / one.ms
    bench.results["verify"] = {
        name: {**f.json_object(), "ratio": round(f.ms / one.ms, 3)} for name, f in figures.items()
    }
    bench.results["draft_step"] = {**draft_step.json_object(), "c": round(c, 4)}
    for name, f in figures.items():
        bench.say(f"verify {name:<4} {f} | {f.ms / one.ms:.2f} single steps")
    bench.say(f"            N = 1: {bench.floor(bytes_of(engine, 'target'), one.ms)}")
    size = bytes_of(engine, "draft")
    bench.say(f"draft step  {draft_step} | c {c:.3f} | {bench.floor(size, draft_step.ms)}")


def text_length(bench: Bench, long: TextEngine, short: TextEngine) -> None:
    """Attention reads all rows that a slot has; they double with the text."""
    memory.fill(long)
    engines = {"long": long, "short": short}
    positions = {"long": bench.scale.max_len - 8, "short": 64}
    calls = {name: step(e.decoder.target, 1, positions[name], 1) for name, e in engines.items()}
    figures = bench.alternate(calls)
    sizes = {name: bytes_of(e, "target") for name, e in engines.items()}
    rows = {name: getattr(e.decoder.target, "rows") for name, e in engines.items()}  # noqa: B009
    more = sizes["long"] - sizes["short"]
    cost = figures["long"].ms - figures["short"].ms
    bench.results["text_length"] = {
        name: {**figures[name].json_object(), "rows": rows[name], "bytes": sizes[name]}
        for name in figures
    }
    bench.say(
        f"slot        {rows['long']} rows {figures['long']}, {rows['short']} rows "
        f"{figures['short']}: {more / 2**20:.0f} MiB more to read cost {cost:.2f} ms "
        f"(floor {bench.floor_ms(more):.2f})"
    )


def host_share(bench: Bench, engine: TextEngine) -> None:
    bench.results["host_share"] = shares = {}
    rounds, patience = 2 * bench.scale.rounds, bench.scale.patience / 2
    for temperature in (0.0, 1.0):
        measured = share.measure(engine, PROMPT, temperature, rounds=rounds, patience=patience)
        with share.agreeing(engine):
            accepted = share.measure(engine, PROMPT, temperature, rounds=rounds, patience=patience)
        for name, result in (("drawn", measured), ("all accepted", accepted)):
            shares[f"temperature {temperature:g}, {name}"] = result.json_object()
            bench.say(f"share       temperature {temperature:g}, {name + ':':<13} {result}")


def memory_use(bench: Bench, bundle: Path) -> None:
    report = memory.measure(bundle, bench.threads, bench.scale.patience)
    stages, weights = report["stages"], sum(report["weights"].values())
    begin = stages["before"]["rss"]
    for name, stage in stages.items():
        grown, expected = stage["rss"] - begin, weights + stage["cache"]
        stage["ratio"] = round(grown / expected, 3)
        bench.say(
            f"memory      {name + ':':<23} {stage['rss'] / 2**20:6.0f} MiB (anonymous "
            f"{stage['anonymous'] / 2**20:.0f}, files {stage['file'] / 2**20:.0f}, "
            f"peak {stage['peak'] / 2**20:.0f}), grown by {grown / expected:.2f} x weights "
            f"{weights / 2**20:.0f} + cache {stage['cache'] / 2**20:.0f} MiB"
        )
    in_place = report["in_place"]
    one, other = (Figure(**in_place["figures"][n]) for n in ("in place", "copying"))
    bench.say(
        f"in place    a step {one}, growth {in_place['growth_in_place'] / 2**20:.0f} MiB | caches "
        f"bound elsewhere: {other} ({other.ms / one.ms:.2f}x), "
        f"growth {in_place['growth_copying'] / 2**20:.0f} MiB"
    )
    bench.results["memory"] = {
        "stages": stages,
        "weights": weights,
        "in_place": {
            "in_place": one.json_object(),
            "copying": other.json_object(),
            "growth_in_place": in_place["growth_in_place"],
            "growth_copying": in_place["growth_copying"],
        },
    }


def load_time(bench: Bench, bundle: Path) -> None:
    calls = {
        name: lambda verify=verify: load(bundle, threads=bench.threads, verify=verify)
        for name, verify in (("verified", True), ("unverified", False))
    }
    figures = bench.alternate(calls)
    size = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
    bench.results["load"] = {name: f.json_object() for name, f in figures.items()}
    bench.say(
        f"load        {figures['verified']} with every file's hash, {figures['unverified']} "
        f"without | reading {size / 2**20:.0f} MiB once: {bench.floor_ms(size):.0f} ms"
    )


def bundled_pair(bench: Bench, root: Path) -> None:
    """Speculative against plain decoding of the pair in models/, where it is."""
    target, draft = root / "models" / "target", root / "models" / "draft"
    if not ((target / "config.json").is_file() and (draft / "config.json").is_file()):
        bench.results["bundled_pair"] = "missing"
        bench.say("pair        models/target and models/draft: missing")
        return
    from .pair import compare

    bundle = models.make_bundle("pair", target, draft, bench.work, max_len=None)
    engine = load(bundle, threads=bench.threads)
    assert engine.decoder.draft is not None
    calls = {f"{n}": step(engine.decoder.target, n, 128, n) for n in (1, share.GAMMA + 1)}
    costs = bench.alternate({**calls, "draft": step(engine.decoder.draft, 1, 128, 1)})
    one, wide, drafting = costs.values()
    bench.say(
        f"pair        a step {one}, verification of {share.GAMMA + 1} {wide.ms / one.ms:.2f} "
        f"steps, c {drafting.ms / one.ms:.2f}"
    )
    results = compare(engine, rounds=max(3, bench.scale.rounds // 2), gamma=share.GAMMA)
    bench.results["bundled_pair"] = {
        "steps": {name: cost.json_object() for name, cost in costs.items()},
        **{name: r.json_object() for name, r in results.items()},
    }
    for name, result in results.items():
        bench.say(f"pair        {name}: {result}")


def run(
    scale: Scale, work: Path, threads: int, root: Path | None, *, sections: tuple[str, ...] = ()
) -> dict[str, Any]:
    """All sections, or those named; the object of the JSON line. root: where models/ is."""
    bench = Bench(scale, threads, work)
    bench.results = {"benchmark": "decode", "scale": scale.name, "max_len": scale.max_len}
    bench.results["machine"] = machine.describe(threads)
    bench.note(f"preparing the pair under {work} (minutes the first time)")
    target, draft = (
        models.make_checkpoint(shape, work / f"{scale.name}-{role}", max_len=scale.max_len)
        for role, shape in (("target", scale.target), ("draft", scale.draft))
    )
    bundle = models.make_bundle(scale.name, target, draft, work, max_len=scale.max_len)
    engine = load(bundle, threads=threads, verify=False)

    def slots() -> None:
        second = load(bundle, threads=threads, verify=False)
        text_length(bench, second, engine)

    plan: dict[str, tuple[str, Callable[[], None]]] = {
        "verify": ("verification by width, memory bandwidth", lambda: widths(bench, engine)),
        "plain": ("plain decoding", lambda: plain_decoding(bench, engine, target)),
        "text_length": ("length of a text", slots),
        "host_share": ("host share", lambda: host_share(bench, engine)),
        "memory": ("memory", lambda: memory_use(bench, bundle)),
        "load": ("load time", lambda: load_time(bench, bundle)),
    }
    if root is not None:
        plan["bundled_pair"] = ("the bundled pair", lambda: bundled_pair(bench, root))
    for name, (title, section) in plan.items():
        if not sections or name in sections or name == "verify":  # the floors need it
            bench.note(title)
            section()
    bench.results["seconds"] = round(time.perf_counter() - bench.started, 1)
    return bench.results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="a small shape, under a minute")
    add("--json", type=Path, metavar="FILE", help="write the JSON object there too")
    add("--threads", type=int, default=machine.physical_cores(), help="default: all cores")
    add("--patience", type=float, metavar="SECONDS", help="how long a section waits for quiet")
    add("--only", nargs="+", default=(), metavar="SECTION", help="plain, verify, ...")
    add("--work", type=Path, default=Path("build/bench"), help="default: build/bench")
    arguments = parser.parse_args(argv)

    def command() -> int:
        if arguments.threads < 1:
            raise OutriderError("option", "threads must be at least 1", "Leave it out for all.")
        scale, root = (QUICK, None) if arguments.quick else (FULL, Path(__file__).parents[1])
        if arguments.patience is not None:
            scale = replace(scale, patience=arguments.patience)
        results = run(
            scale, arguments.work, arguments.threads, root, sections=tuple(arguments.only)
        )
        line = json.dumps(results)
        if arguments.json is not None:
            arguments.json.write_text(line + "\n")
        print(line)
        return 0

    return run_command(command)


if __name__ == "__main__":
    raise SystemExit(main())
