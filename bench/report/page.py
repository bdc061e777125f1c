"""python -m bench report: an HTML page about the speedup of speculative decoding on a bundle.

Measures every prompt with every gamma and writes one HTML file with an embedded plot, which can be
viewed offline. Progress goes to stderr, the path of the page to stdout.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from runtime.bundle import load
from runtime.cli.prompts import prompt_from, source_name
from runtime.files.errors import CommandParser, OutriderError, run_command
from runtime.files.folders import replacing
from runtime.files.manifest import Manifest
from runtime.text.options import Options
from runtime.theory.formulas import speedup
from runtime.theory.measure import format_report

from ..core import machine
from ..core.clock import Clock
from ..core.command import check_writable
from ..core.prompts import PROMPTS
from .measurement import REPEATS, Measurement, measure_prompts

PAGE_FILE = "index.html"
PAGE_MARK = b'<meta name="generator" content="Outrider bench.report">'  # in pages of this report
BUSY_LOST = 0.1  # value of `Measurement.lost` above which the page shows a warning
# Okabe and Ito's palette: distinguishable with any colour vision. Markers and dashes differ too.
ORANGE, BLUE, RED = "#E69F00", "#0072B2", "#D55E00"
SETTINGS: Any = {  # mypy expects literal keys
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "lines.markersize": 4,
    "lines.linewidth": 1.4, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 150,
}  # fmt: skip
SIZE = 7.0, 3.4  # inches


def render(name: str, facts: Mapping[str, str], text: str, m: Measurement) -> str:
    """The page as HTML. text: `format_report` of the measurement. Text from models, prompts and
    bundles is escaped."""
    image = render_png(m)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        name=name,
        mark=PAGE_MARK.decode(),
        text=text,
        facts=facts,
        lost=m.lost if m.lost > BUSY_LOST else None,
        plot=f"data:image/png;base64,{base64.b64encode(image).decode()}",
    )


def render_png(m: Measurement) -> bytes:
    """The plot as a PNG file, with the legend above."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    image = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        plot_speedups(axes, m)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        figure.savefig(image)
    return image.getvalue()


def plot_speedups(axes: Any, m: Measurement) -> None:
    found, gammas = m.findings, list(m.findings.measured)
    theory = [speedup(found.alpha, g, found.costs.draft) for g in gammas]
    axes.plot(gammas, theory, color=ORANGE, marker="^", linestyle="--", label="Theorem 3.8")
    label = "Theorem 3.8 with the measured cost of each width"
    axes.plot(gammas, [m.expected_speedup(g) for g in gammas], color=BLUE, marker="s", label=label)
    label = "measured, median over prompts"
    axes.plot(gammas, list(found.measured.values()), color=RED, marker="o", label=label)
    low, high = zip(*((min(r), max(r)) for r in map(m.measured_speedups, gammas)), strict=True)
    label = "measured, range over prompts"
    axes.vlines(gammas, low, high, color=RED, alpha=0.35, linewidth=3, label=label)
    axes.axhline(1, color="0.4", linewidth=1, label="plain decoding")
    axes.set(xlabel="draft tokens γ", ylabel="speedup, without the prefill", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)


def collect_facts(manifest: Manifest, args: argparse.Namespace, prompts: int) -> dict[str, str]:
    pair, description = manifest.pair, machine.describe(machine.physical_cores())
    models = {"Target": pair.target, "Draft": pair.draft}
    command = ["python", "-m", "bench", "report"]
    command += [f"--{key}={value}" for key, value in vars(args).items() if value is not None]
    return {
        "Bundle": f"{manifest.name}, context {pair.max_len:,}, γ up to {pair.max_gamma}",
        **{
            name: f"{m.source} ({m.architecture}, {m.parameters / 1e6:.1f} M parameters, {m.dtype})"
            for name, m in models.items()
            if m is not None
        },
        "Backend": ", ".join([manifest.backend, *manifest.gpu_targets()]),
        "Machine": machine.summary_line(description),
        "Versions": ", ".join(
            f"{k} {v}" for k, v in {**description["versions"], **manifest.versions}.items() if v
        ),
        "Measured": f"{prompts} prompts with every γ, the fastest of {REPEATS} runs",
        "Command": shlex.join(command),
    }


def check_page(page: Path) -> None:
    """Raises OutriderError("disk") if a file that is not a report page would be replaced, or if the
    folder is not writable."""
    check_writable(page.parent)
    if page.exists() and PAGE_MARK not in page.read_bytes()[:2000]:
        raise OutriderError(
            "disk", f"{page} exists and is not a report page", "Choose another --out."
        )


def write_page(text: str, page: Path) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    with replacing(page) as new:
        # With some tokenizers a token may be half of a surrogate pair.
        new.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_prompts(source: str | None) -> list[str]:
    """The prompts of a file, one per line; a line may be a JSON string. Raises
    OutriderError("prompt") if there are none."""
    if source is None:
        return list(PROMPTS)
    whole = prompt_from(argparse.Namespace(messages=None, prompt=None, prompt_file=source))
    prompts = []
    for line in str(whole).split("\n"):
        try:
            prompts.append(json.loads(line) if line.startswith('"') else line.removesuffix("\r"))
        except ValueError:
            prompts.append(line.removesuffix("\r"))
    prompts = [prompt for prompt in prompts if prompt.strip()]
    if not prompts:
        cause = f"{source_name(source)} has no prompts"
        raise OutriderError("prompt", cause, "Write one prompt per line.")
    return prompts


def parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m bench report", description=__doc__)
    add = parser.add_argument
    add("--engines", required=True, metavar="DIR", help="bundle with a draft model")
    add("--prompts", metavar="FILE", help="file with one prompt per line; a line may be a JSON "
        'string, "for several\\nlines" (default: four beginnings of Python files)')  # fmt: skip
    add("--out", metavar="DIR", help="folder of the page (default: build/report/<name>)")
    add("--tokens", type=int, default=96, metavar="N",
        help="number of tokens for each prompt and gamma (default: %(default)s)")  # fmt: skip
    add("--temperature", type=float, default=0.0, metavar="T",
        help="sampling temperature (default: 0)")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run_command(lambda: _main(parser().parse_args(argv)))


def _main(args: argparse.Namespace) -> int:
    clock = Clock()
    # Check everything that can be checked before anything is measured.
    if importlib.util.find_spec("matplotlib") is None:
        raise OutriderError(
            "backend", "matplotlib is not installed", "Install it: pip install 'matplotlib>=3.10'."
        )
    if args.tokens < 2:
        raise OutriderError("option", f"tokens={args.tokens} is out of range", "Use 2 or more.")
    prompts = read_prompts(args.prompts)
    page = Path(args.out or Path("build/report", Path(args.engines).resolve().name)) / PAGE_FILE
    engine = load(args.engines, reuse=False)  # every text includes its own prefill
    if engine.decoder.draft is None:
        raise OutriderError(
            "option", f"{args.engines} has no draft model", "Build it with DRAFT=<draft>."
        )
    for prompt in prompts:
        engine.request(prompt, Options(temperature=args.temperature))
    check_page(page.resolve())
    measurement = measure_prompts(engine, prompts, args.temperature, args.tokens, clock.note)
    facts = collect_facts(engine.manifest, args, len(prompts))
    text = format_report(measurement.findings, len(prompts), args.temperature, args.tokens)
    write_page(render(engine.manifest.name, facts, text, measurement), page.resolve())
    print(page.resolve())
    return 0
