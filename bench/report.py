"""python -m bench.report: one page on what speculative decoding gains on a bundle, and why.

It measures every prompt with every gamma, keeping every round (bench/report_record.py), and writes
index.html with its plots, for a browser without a network. Progress goes to stderr, the page's path
to stdout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from runtime.bundle import load
from runtime.cli.prompts import prompt_from, source_name
from runtime.files.errors import CommandParser, OutriderError, run_command
from runtime.files.manifest import GraphFacts, Manifest
from runtime.text.engine import TextEngine
from runtime.text.options import Options
from runtime.theory.formulas import break_even

from . import machine
from .pair import PROMPTS
from .report_data import (
    Measurement,
    Section,
    Table,
    ahead_from,
    by_length,
    sections,
    times,
)
from .report_plots import PLOTS, draw
from .report_record import REPEATS, record, recording

MORE_PROMPTS = (
    "def main():\n    parser = argparse.ArgumentParser(",
    "class Node:\n    def __init__(self, value):\n",
    "def add(first, second):\n    return",
    '"""Return the ',
)
TEMPLATE = "report.html.jinja"
PAGE = "index.html"
MARK = b'<meta name="generator" content="Outrider bench.report">'  # tells our pages apart
BUSY = 0.1  # of `Measurement.lost`, from which on the page warns
CONTEXT = 8  # tokens before a rejected draft, for its text


# The coloured text


@dataclass(frozen=True)
class Piece:
    """kind: of `runtime.request.Origin`, or "rejected", or "unread" for drafts behind one."""

    kind: str
    text: str
    title: str


@dataclass(frozen=True)
class Sample:
    prompt: str
    pieces: Sequence[Piece]
    said: str


def colored(
    engine: TextEngine, prompt: str, gamma: int, temperature: float, tokens: int, seed: int
) -> Sample:
    """A text as it comes, until the model ends it, with what became of each token."""
    options: dict[str, Any] = {
        "gamma": gamma, "temperature": temperature, "max_new_tokens": tokens, "seed": seed,
    }  # fmt: skip
    ids = engine.encode(prompt, Options())
    with recording(engine) as recorder:
        events = list(engine.stream(prompt, **options))
    (text,) = recorder.take()
    pieces = [Piece(origin, piece, "by the prefill") for piece, origin in events[0].pieces]
    ids += events[0].token_ids
    for number, (event, x) in enumerate(zip(events[1:], text.rounds, strict=True), start=1):
        title = f"round {number}: {x.accepted} of {x.gamma} accepted"
        made = [Piece(origin, piece, title) for piece, origin in event.pieces]
        if event.tokens and event.tokens[-1].origin == "corrected":
            before = [*ids[-CONTEXT:], *x.drafts[: x.accepted]]
            parts = (x.drafts[x.accepted : x.accepted + 1], x.drafts[x.accepted + 1 :])
            # In front of the correction, which may have no text yet.
            place = len(made) - bool(made and made[-1].kind == "corrected")
            for kind, drafts in zip(("rejected", "unread"), parts, strict=True):
                said = _continuation(engine, before, drafts)
                if said:
                    made.insert(place, Piece(kind, said, title))
                    place += 1
                before += drafts
        pieces += made
        ids += event.token_ids
    stats = text.stats
    said = "The model ended this text at once"
    if stats.rounds:
        said = (
            f"{stats.output_tokens} tokens, {stats.rounds} rounds, "
            f"τ {stats.mean_acceptance_length:.2f}, "
            f"{stats.accepted} of {stats.drafted} drafts accepted"
        )
    return Sample(prompt, pieces, said)


def _continuation(engine: TextEngine, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of ids behind others: alone some tokenizers drop the space in front."""
    decode = engine.tokenizer.decode
    text = decode([*before, *ids])[len(decode(before)) :]
    return text.replace("\n", "⏎")  # a line that is not there should not break


# The page


@dataclass(frozen=True)
class Report:
    """All that the page says. facts: of the head, by name."""

    name: str
    facts: Mapping[str, str]
    measurement: Measurement
    samples: Sequence[Sample]


def render(report: Report) -> str:
    """The page. Whatever a model, a prompt or a bundle says is text in it, never markup."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown: list[Section] = sections(report.measurement)
    return environment.get_template(TEMPLATE).render(
        name=report.name,
        mark=MARK.decode(),
        key_figures=key_figures(report.measurement),
        facts=report.facts,
        warning=warning_of(report.measurement),
        sections=shown,
        samples=report.samples,
        gamma=report.measurement.shown,
    )


def warning_of(m: Measurement) -> str:
    if m.lost <= BUSY:
        return ""
    return (
        f"The machine was busy: this process's threads waited {m.lost:.2f} seconds for a core in "
        "each second, all together. That costs wide calls more than narrow ones, so the times of "
        "this page, and the γ that follows from them, are those of a busy machine: make the page "
        "again on a quiet one."
    )


def key_figures(m: Measurement) -> Table:
    """A row each: name, figure, what it is."""
    found, best, shown = m.found, m.best, m.shown
    use = f"{best}" if best else "0: plain decoding"
    gain = f"{times(m.expected(shown))} expected, {times(found.measured[shown])} measured"
    pays = break_even(found.overhead, m.expected(shown))
    ahead = ahead_from(by_length(m, shown))
    where = f"γ = {shown}" if best else f"γ = {shown}, the least bad"
    return Table(
        (),
        [
            ("recommended γ", use, "largest expected speedup with the measured widths"),
            ("speedup", gain, f"at {where}, without the prefill"),
            ("α", f"{found.alpha:.3f}", "accepted of examined drafts, all γ"),
            ("c", f"{found.costs.draft:.3f}", "a draft step, in plain steps"),
            ("τ", f"{m.stats(shown).mean_acceptance_length:.2f}", f"tokens of a round at {where}"),
            ("a plain step", f"{1e3 * found.costs.plain:.3g} ms", "target, sampling and host"),
            (
                "pays from",
                "never" if ahead is None else f"{ahead} tokens",
                "of output, the median prompt, prefills included; by the formula "
                + (f"{max(1, pays):.0f}" if pays < float("inf") else "never"),
            ),
        ],
    )


def facts_of(
    manifest: Manifest, args: argparse.Namespace, prompts: Sequence[str]
) -> dict[str, str]:
    here = machine.describe(0)
    versions = ", ".join(f"{k} {v}" for k, v in here["versions"].items() if v != "missing")
    pair = manifest.pair
    assert pair.draft is not None
    facts = {
        "Bundle": f"{manifest.name}, context {pair.max_len:,}, γ up to {pair.max_gamma}",
        "Target": _model(pair.target),
        "Draft": _model(pair.draft),
        "Backend": ", ".join(
            [manifest.backend, *(f"{k} {v}" for k, v in manifest.versions.items() if v)]
        ),
        "Compiled for": ", ".join(manifest.gpu_targets()),
        "Machine": f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, "
        f"{here['system']}",
        "Versions": versions,
        "Date": here["date"],
        "Measured": f"{len(prompts)} prompts, {args.tokens} tokens each with every γ, temperature "
        f"{args.temperature:g}; a round's time is the least of {REPEATS} runs, "
        "or of more where other processes disturbed them",
        "Command": command_of(args),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _model(facts: GraphFacts) -> str:
    millions = facts.parameters / 1e6
    return f"{facts.source} ({facts.architecture}, {millions:.1f} M parameters, {facts.dtype})"


def command_of(args: argparse.Namespace) -> str:
    words = ["python", "-m", "bench.report", "--engines", args.engines]
    words += ["--prompts", args.prompts] if args.prompts else []
    words += ["--out", args.out] if args.out else []
    return shlex.join(
        [*words, "--tokens", f"{args.tokens}", "--temperature", f"{args.temperature:g}"]
    )


@contextmanager
def new_page(out: Path) -> Iterator[Path]:
    """A folder that takes the place of `out` when the block ends well. Raises "disk", OSError."""
    refuse_foreign(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, replaced = (
        out.with_name(f".{out.name}.{what}-{os.getpid()}") for what in ("partial", "replaced")
    )
    try:
        partial.mkdir()
        yield partial
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
    finally:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)


def refuse_foreign(out: Path) -> None:
    """Raises OutriderError "disk" where a folder holds anything but a page of ours."""
    if not out.exists() or not any(out.iterdir()):
        return
    ours = {PAGE, *(f"{name}.png" for name in PLOTS)}
    strangers = sorted(path.name for path in out.iterdir() if path.name not in ours)
    page = out / PAGE
    if strangers or not page.is_file() or MARK not in page.read_bytes()[:2000]:
        why = f"it holds {strangers[0]}" if strangers else f"its {PAGE} is not ours, or missing"
        raise OutriderError("disk", f"{out} cannot be replaced: {why}", "Choose another --out.")


def write(report: Report, folder: Path) -> None:
    """The page and its plots, into a folder."""
    for name, figure in draw(report.measurement).items():
        figure.savefig(folder / f"{name}.png")
    # A token may be half a surrogate pair to some tokenizers.
    (folder / PAGE).write_text(render(report), encoding="utf-8", errors="backslashreplace")


# The command line


def prompts_of(source: str | None) -> list[str]:
    """One a line; a line that is a JSON string is what that says. Raises "prompt"."""
    if source is None:
        return [*PROMPTS, *MORE_PROMPTS]
    whole = prompt_from(argparse.Namespace(messages=None, prompt=None, prompt_file=source))
    assert isinstance(whole, str)
    prompts = []
    for line in whole.split("\n"):
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            said = line
        prompts.append(said if isinstance(said, str) else line.removesuffix("\r"))
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        raise OutriderError(
            "prompt", f"{source_name(source)} has no prompts", "Write one on each line."
        )
    return prompts


def parser() -> argparse.ArgumentParser:
    made = CommandParser(prog="python -m bench.report", description=__doc__)
    add = made.add_argument
    add("--engines", required=True, metavar="DIR", help="a bundle with a draft")
    add("--prompts", metavar="FILE", help="one a line, of your own kind; a line may be a JSON "
        'string, "for several\\nlines"; default: eight beginnings of Python files')  # fmt: skip
    add("--out", metavar="DIR", help="the page's folder; default: build/report/<name>")
    add("--tokens", type=int, default=96, metavar="N", help="for each prompt and gamma; default 96")
    add("--temperature", type=float, default=0.0, metavar="T", help="default 0")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    began = time.perf_counter()

    def note(text: str) -> None:
        print(f"[{time.perf_counter() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    # All that can be refused is refused before anything is measured.
    if importlib.util.find_spec("matplotlib") is None:
        raise OutriderError(
            "backend", "matplotlib is not installed", "Install it: pip install 'matplotlib>=3.10'."
        )
    if args.tokens < 2:
        raise OutriderError("option", f"tokens={args.tokens} is out of range", "Use 2 or more.")
    prompts = prompts_of(args.prompts)
    name = Path(args.engines).resolve().name
    out = Path(args.out or Path("build/report", name)).resolve()
    engine = load(args.engines)
    if engine.decoder.draft is None:
        raise OutriderError(
            "option", f"{args.engines} has no draft", "Build it with DRAFT=<draft>."
        )
    for prompt in prompts:
        engine.request(prompt, Options(temperature=args.temperature))
    facts = facts_of(engine.manifest, args, prompts)
    with new_page(out) as folder:
        measurement = Measurement(*record(engine, prompts, args.temperature, args.tokens, note))
        facts["Disturbed"] = (
            f"{measurement.lost:.3f} seconds of waiting for a core in each, by all threads together"
        )
        if warning := warning_of(measurement):
            note(f"note: {warning}")
        note(f"the texts, with gamma {measurement.shown}")
        samples = [
            colored(engine, prompt, measurement.shown, args.temperature, args.tokens, seed)
            for seed, prompt in enumerate(prompts)
        ]
        note("plots and page")
        write(Report(name, facts, measurement, samples), folder)
    print(out / PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
