"""python -m bench report: one page on what speculative decoding gains on a bundle, and why.

It measures every prompt with every gamma, keeping every round, and writes one HTML file with its
plots inside, for a browser without a network. Progress goes to stderr, the page's path to stdout.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from runtime.bundle import load
from runtime.cli.prompts import prompt_from, source_name
from runtime.files.errors import CommandParser, OutriderError, run_command
from runtime.files.manifest import GraphFacts, Manifest
from runtime.text.options import Options
from runtime.theory.formulas import break_even

from ..core import machine
from ..core.clock import Clock
from ..core.plot import SETTINGS
from ..core.prompts import PROMPTS
from .numbers import REPEATS, Measurement, ahead_from, by_length, take
from .sections import SECTIONS, Section, times
from .texts import ColoredText, colored

MORE_PROMPTS = (
    "def main():\n    parser = argparse.ArgumentParser(",
    "class Node:\n    def __init__(self, value):\n",
    "def add(first, second):\n    return",
    '"""Return the ',
)
TEMPLATE = "page.html.jinja"
PAGE = "index.html"
MARK = b'<meta name="generator" content="Outrider bench.report">'  # tells our pages apart
BUSY = 0.1  # of `Measurement.lost`, from which on the page warns


@dataclass(frozen=True)
class Report:
    """All that the page says. facts: of the head, by name."""

    name: str
    facts: Mapping[str, str]
    measurement: Measurement
    samples: Sequence[ColoredText]


def render(report: Report) -> str:
    """The page. Whatever a model, a prompt or a bundle says is text in it, never markup."""
    import matplotlib as mpl

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    with mpl.rc_context(SETTINGS):
        shown = [(s, _image(s)) for s in (make(report.measurement) for make in SECTIONS)]
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


def _image(section: Section) -> str:
    """A PNG as an address."""
    data = io.BytesIO()
    section.plot.savefig(data)
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def warning_of(m: Measurement) -> str:
    if m.lost <= BUSY:
        return ""
    return (
        f"The machine was busy: this process's threads waited {m.lost:.2f} seconds for a core in "
        "each second, all together. That costs wide calls more than narrow ones, so the times of "
        "this page, and the γ that follows from them, are those of a busy machine: make the page "
        "again on a quiet one."
    )


def key_figures(m: Measurement) -> list[tuple[str, str, str]]:
    """Name, figure, what it is."""
    found, best, shown = m.found, m.best, m.shown
    gain = f"{times(m.expected(shown))} expected, {times(found.measured[shown])} measured"
    pays, ahead = break_even(found.overhead, m.expected(shown)), ahead_from(by_length(m))
    where = f"γ = {shown}" if best else f"γ = {shown}, the least bad"
    formula = f"{max(1, pays):.0f}" if pays < float("inf") else "never"
    return [
        ("recommended γ", f"{best}" if best else "0: plain decoding",
         "largest expected speedup with the measured widths"),
        ("speedup", gain, f"at {where}, without the prefill"),
        ("α", f"{found.alpha:.3f}", "accepted of examined drafts, all γ"),
        ("c", f"{found.costs.draft:.3f}", "a draft step, in plain steps"),
        ("τ", f"{m.stats(shown).mean_acceptance_length:.2f}", f"tokens of a round at {where}"),
        ("a plain step", f"{1e3 * found.costs.plain:.3g} ms", "target, sampling and host"),
        ("pays from", "never" if ahead is None else f"{ahead} tokens",
         f"of output, the median prompt, prefills included; by the formula {formula}"),
    ]  # fmt: skip


def facts_of(
    manifest: Manifest, args: argparse.Namespace, prompts: Sequence[str]
) -> dict[str, str]:
    here, pair = machine.describe(0), manifest.pair
    assert pair.draft is not None
    words = ["python", "-m", "bench", "report", "--engines", args.engines]
    words += ["--prompts", args.prompts] if args.prompts else []
    words += ["--out", args.out] if args.out else []
    words += ["--tokens", f"{args.tokens}", "--temperature", f"{args.temperature:g}"]
    backend = [manifest.backend, *(f"{k} {v}" for k, v in manifest.versions.items() if v)]
    facts = {
        "Bundle": f"{manifest.name}, context {pair.max_len:,}, γ up to {pair.max_gamma}",
        "Target": _model(pair.target),
        "Draft": _model(pair.draft),
        "Backend": ", ".join(backend),
        "Compiled for": ", ".join(manifest.gpu_targets()),
        "Machine": f"{here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB, "
        f"{here['system']}",
        "Versions": ", ".join(f"{k} {v}" for k, v in here["versions"].items() if v != "missing"),
        "Date": here["date"],
        "Measured": f"{len(prompts)} prompts, {args.tokens} tokens each with every γ, temperature "
        f"{args.temperature:g}; a round's time is the least of {REPEATS} runs, "
        "or of more where other processes disturbed them",
        "Command": shlex.join(words),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _model(facts: GraphFacts) -> str:
    millions = facts.parameters / 1e6
    return f"{facts.source} ({facts.architecture}, {millions:.1f} M parameters, {facts.dtype})"


def check_place(page: Path) -> None:
    """Raises OutriderError "disk" where something else than a page of ours would be replaced, or
    nothing may be written."""
    cause = ""
    if page.exists() and MARK not in page.read_bytes()[:2000]:
        cause = f"{page} is not a page of ours"
    above = next(folder for folder in page.parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        cause = f"{above} is no folder that may be written to"
    if cause:
        raise OutriderError("disk", cause, "Choose another --out.")


def write(text: str, page: Path) -> None:
    """In one step: whole or not at all."""
    partial = page.with_name(f".{page.name}.partial-{os.getpid()}")
    fresh = not page.parent.exists()
    page.parent.mkdir(parents=True, exist_ok=True)
    try:
        # A token may be half a surrogate pair to some tokenizers.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(page)
    finally:
        partial.unlink(missing_ok=True)
        if fresh and not page.exists():
            page.parent.rmdir()


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
    made = CommandParser(prog="python -m bench report", description=__doc__)
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
    clock = Clock()
    # All that can be refused is refused before anything is measured.
    if importlib.util.find_spec("matplotlib") is None:
        raise OutriderError(
            "backend", "matplotlib is not installed", "Install it: pip install 'matplotlib>=3.10'."
        )
    if args.tokens < 2:
        raise OutriderError("option", f"tokens={args.tokens} is out of range", "Use 2 or more.")
    prompts = prompts_of(args.prompts)
    name = Path(args.engines).resolve().name
    page = Path(args.out or Path("build/report", name)).resolve() / PAGE
    engine = load(args.engines, reuse=False)  # every text has its prefill
    if engine.decoder.draft is None:
        raise OutriderError(
            "option", f"{args.engines} has no draft", "Build it with DRAFT=<draft>."
        )
    given: dict[str, Any] = {"temperature": args.temperature}
    for prompt in prompts:
        engine.request(prompt, Options(**given))
    check_place(page)
    facts = facts_of(engine.manifest, args, prompts)
    measurement = take(engine, prompts, args.temperature, args.tokens, clock.note)
    facts["Disturbed"] = (
        f"{measurement.lost:.3f} seconds of waiting for a core in each, by all threads together"
    )
    if warning := warning_of(measurement):
        clock.note(f"note: {warning}")
    clock.note(f"the texts, with gamma {measurement.shown}")
    samples = [
        colored(engine, prompt, measurement.shown, args.temperature, args.tokens, seed)
        for seed, prompt in enumerate(prompts)
    ]
    clock.note("plots and page")
    write(render(Report(name, facts, measurement, samples)), page)
    print(page)
    return 0
