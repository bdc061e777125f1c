"""python -m bench.side: Outrider and what a user would pick instead, side by side in one run.

The pair is the bundled one, grown to the shape of a real model without changing what it says
(bench/inflate.py), with a draft that agrees with it about as often as is asked for. Every system is
a process of its own (bench/peers.py). Each prompt goes to all of them, one after the other in an
order that rotates; ratios are taken prompt by prompt, and their median is told.

Progress goes to stderr, tables to stdout, one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.corpus import collect
from runtime.errors import CommandParser, OutriderError, run_command
from runtime.theory import speedup

from . import machine, side_pair
from .peers import PEERS, Peer, Request, Text, Unavailable
from .timing import DISTURBED
from .workloads import Prompts, Workload, workloads

GAMMA = 4
WARM_UPS = 3
MAX_LEN = 2048
BASE = "transformers plain"
OWN = "outrider plain"
MODES = ("plain", "draft", "assistant", "auto", "lookup")  # "eager" is never the faster one
PRECISIONS = {"llama.cpp": ("float32", "q8_0", "q4_0")}


@dataclass(frozen=True)
class Scale:
    """count: prompts of a workload. shapes: (prompt, output) tokens."""

    name: str
    shape: str
    count: int
    shapes: tuple[tuple[int, int], ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)


FULL = Scale("full", "smollm-135m", 3, ((16, 64), (128, 64), (1024, 64)))
QUICK = Scale("quick", "smollm-135m", 2, ((128, 32),))


@dataclass(frozen=True)
class System:
    """A mode of a peer. name: what tables call it."""

    peer: str
    mode: str
    precision: str = "float32"

    @property
    def name(self) -> str:
        weights = "" if self.precision == "float32" else f" {self.precision}"
        return f"{self.peer}{weights} {self.mode}"


@dataclass
class Run:
    """texts: by (workload, temperature), for each prompt by system. missing: why, by system."""

    texts: dict[tuple[str, float], list[dict[str, Text]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, dict[str, str]] = field(default_factory=dict)


def systems(wanted: Sequence[str]) -> list[System]:
    made = []
    for name, kind in PEERS.items():
        for precision in PRECISIONS.get(name, ("float32",)) if name in wanted else ():
            modes = [m for m in MODES if m in kind.modes]
            made += [
                System(name, mode, precision)
                for mode in modes[: None if precision == "float32" else 1]
            ]
    return made


def measure(
    all_systems: Sequence[System],
    loads: Sequence[Workload],
    temperatures: Sequence[float],
    pair: side_pair.Pair,
    *,
    threads: int,
    work: Path,
) -> Run:
    """Every prompt through every system, at every temperature."""
    run = Run()
    with ExitStack() as stack:
        peers = _start(all_systems, pair, threads, work, run, stack)
        alive = [s for s in all_systems if (s.peer, s.precision) in peers]
        _warm_up(peers, alive, loads, run)
        seconds, begin = 0.0, time.perf_counter()
        total = sum(len(load.prompts) for load in loads) * len(temperatures)
        done = 0
        for temperature in temperatures:
            for load in loads:
                rows = run.texts.setdefault((load.name, temperature), [])
                for number, prompt in enumerate(load.prompts):
                    alive = [s for s in alive if s.name not in run.missing]
                    turn = number % max(1, len(alive))
                    rows.append({})
                    for system in alive[turn:] + alive[:turn]:
                        request = Request(
                            prompt, load.new_tokens, system.mode, temperature, number, GAMMA
                        )
                        text = _ask(peers, system, request, run)
                        if text is not None:
                            rows[-1][system.name] = text
                    done += 1
                    seconds = time.perf_counter() - begin
                    left = f"{seconds / done * (total - done):.0f} s to go"
                    say(f"{load.name}, temperature {temperature:g}: {done}/{total}, {left}")
    return run


def _start(
    all_systems: Sequence[System], pair: side_pair.Pair, threads: int, work: Path, run: Run,
    stack: ExitStack,
) -> dict[tuple[str, str], Peer]:  # fmt: skip
    peers: dict[tuple[str, str], Peer] = {}
    for system in all_systems:
        key = (system.peer, system.precision)
        if key in peers or f"{system.peer} {system.precision}" in run.missing:
            continue
        say(f"starting {system.peer} {system.precision}")
        try:
            peer = Peer(
                system.peer, pair.target, draft=pair.draft, threads=threads, work=work,
                precision=system.precision, max_len=MAX_LEN,
            )  # fmt: skip
        except Unavailable as error:
            run.missing[f"{system.peer} {system.precision}"] = str(error)
            say(f"missing: {system.peer} {system.precision}: {error}")
            continue
        peers[key] = stack.enter_context(peer)
        run.facts[f"{system.peer} {system.precision}"] = peer.facts
    return peers


def _ask(
    peers: dict[tuple[str, str], Peer], system: System, request: Request, run: Run
) -> Text | None:
    """Its text; None from a system that has no such mode, which is noted."""
    peer = peers[system.peer, system.precision]
    try:
        return peer.generate(request)
    except Unavailable as error:
        run.missing[system.name] = str(error)
        say(f"missing: {system.name}: {error}")
        return None


def _warm_up(
    peers: dict[tuple[str, str], Peer], alive: Sequence[System], loads: Sequence[Workload], run: Run
) -> None:
    say("warming up")
    for turn in range(WARM_UPS):
        for number, system in enumerate(alive):
            if system.name not in run.missing:
                prompt = loads[turn % len(loads)].prompts[0][: 8 + len(alive) * turn + number]
                _ask(peers, system, Request(prompt, 12, system.mode, 0.0, turn, GAMMA), run)


# What it comes to


def ratios(rows: Sequence[dict[str, Text]], fast: str, slow: str) -> list[float]:
    """How many times as fast one system decoded as another, for each prompt that both have."""
    return [
        row[slow].decoding().seconds / row[fast].decoding().seconds
        for row in rows
        if fast in row and slow in row
    ]


def summary(rows: Sequence[dict[str, Text]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Of each system: tokens a second, TPOT and TTFT in ms (medians over prompts), and how many
    times as fast as the bases."""
    table: dict[str, dict[str, Any]] = {}
    for name in names:
        texts = [row[name] for row in rows if name in row]
        if not texts:
            continue
        tpot = statistics.median(text.decoding().seconds for text in texts)
        table[name] = {
            "tpot_ms": round(1e3 * tpot, 3),
            "tokens_per_second": round(1 / tpot, 2),
            "ttft_ms": round(1e3 * statistics.median(t.first_seconds for t in texts), 2),
            "prompts": len(texts),
            "disturbed": sum(text.decoding().lost > DISTURBED for text in texts),
        }
        for base in (BASE, OWN, "llama.cpp plain"):
            if found := ratios(rows, name, base):
                table[name][f"over {base}"] = round(statistics.median(found), 3)
    return table


def theory(rows: Sequence[dict[str, Text]]) -> dict[str, float] | None:
    """The speculative texts against Theorem 3.8 with the costs of the same texts.

    alpha: accepted of examined. c, verify: a draft step, and the rest of a round, in plain steps.
    """
    plain = [row[OWN].notes for row in rows if OWN in row and "outrider draft" in row]
    fast = [row["outrider draft"].notes for row in rows if OWN in row and "outrider draft" in row]
    if not fast or not all(note.get("drafted") for note in fast):
        return None

    def total(notes: Sequence[dict[str, Any]], *names: str) -> float:
        return float(sum(note[name] for note in notes for name in names))

    rest = ("time_verify", "time_sample", "time_host")
    step = total(plain, *rest) / total(plain, "rounds")
    c = total(fast, "time_draft") / total(fast, "drafted") / step
    verify = total(fast, *rest) / total(fast, "rounds") / step
    alpha = total(fast, "accepted") / total(fast, "examined")
    gamma = total(fast, "drafted") / total(fast, "rounds")
    tokens = total(fast, "output_tokens") - len(fast)
    measured = (tokens / total(fast, *rest, "time_draft")) * step
    predicted = speedup(alpha, gamma, c, verify)
    return {
        "alpha": round(alpha, 4),
        "accepted_of_drafted": round(total(fast, "accepted") / total(fast, "drafted"), 4),
        "tau": round(tokens / total(fast, "rounds"), 3),
        "c": round(c, 4),
        "verify": round(verify, 3),
        "measured": round(measured, 3),
        "predicted": round(predicted, 3),
        "measured_over_predicted": round(measured / predicted, 3),
    }


def table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    columns = ((28, ""), (8, "tok/s"), (9, "TPOT ms"), (9, "TTFT ms"), (11, "x Transf."),
               (9, "x llama"), (7, "x own"))  # fmt: skip
    head = "".join(f"{name:>{width}}" for width, name in columns)
    lines = [title, head]
    for name, row in rows.items():
        others = [row.get(f"over {b}") for b in (BASE, "llama.cpp plain", OWN)]
        cells = ["" if value is None else f"{value:.2f}" for value in others]
        mark = " *" if row["disturbed"] > row["prompts"] // 2 else ""
        lines.append(
            f"{name:<28}{row['tokens_per_second']:>8.1f}{row['tpot_ms']:>9.2f}{row['ttft_ms']:>9.1f}"
            f"{cells[0]:>11}{cells[1]:>9}{cells[2]:>7}{mark}"
        )
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="python -m bench.side", description=(__doc__ or "").split("\n\n")[1])
    add = made.add_argument
    add(
        "--quick", action="store_true", help="a few minutes: one shape of prompts, two of each kind"
    )
    add(
        "--alpha", type=float, default=0.8, metavar="A", help="acceptance of the draft; default 0.8"
    )
    add("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="default: all")
    add("--threads", type=int, default=machine.physical_cores(), metavar="N",
        help="of every system; default: the machine's cores")  # fmt: skip
    add("--work", type=Path, default=Path("build/side"), metavar="DIR",
        help="where pairs and what peers make of them are kept")  # fmt: skip
    return made


def _main(args: argparse.Namespace) -> int:
    if "outrider" not in args.peers:
        raise OutriderError("option", "--peers leaves outrider out", "Name it too.")
    scale = QUICK if args.quick else FULL
    pair = side_pair.make(scale.shape, args.alpha, args.work)
    corpus = collect()
    encode, begin = side_pair.encoder(pair.target)
    prompts = Prompts(corpus.held_out, encode, begin, seed=1)
    loads = workloads(prompts, scale.count, scale.shapes)
    chosen = systems(args.peers)
    reader = machine.MemoryReader(args.threads)
    for _ in range(5):
        reader()
    run = measure(chosen, loads, scale.temperatures, pair, threads=args.threads, work=args.work)
    results: dict[str, Any] = {
        "machine": machine.describe(args.threads), "scale": scale.name, "pair": pair.facts,
        "bytes_per_second": reader.bandwidth, "missing": run.missing, "facts": run.facts,
        "workloads": {},
    }  # fmt: skip
    names = [system.name for system in chosen]
    for temperature in scale.temperatures:
        whole: list[dict[str, Text]] = []
        for load in loads:
            rows = run.texts[load.name, temperature]
            whole += rows
            _tell(results, load.name, temperature, rows, names)
        _tell(results, "all", temperature, whole, names)
    print(json.dumps(results, separators=(",", ":")))
    return 0


def _tell(
    results: dict[str, Any], name: str, temperature: float, rows: Sequence[dict[str, Text]],
    names: Sequence[str],
) -> None:  # fmt: skip
    title = f"{name}, temperature {temperature:g}"
    found, predicted = summary(rows, names), theory(rows)
    results["workloads"][title] = {"systems": found, "theory": predicted}
    print(table(title, found))
    if predicted is not None:
        print("theory  " + " | ".join(f"{key} {value:g}" for key, value in predicted.items()))
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
