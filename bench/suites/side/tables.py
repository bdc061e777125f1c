"""The tables of the side-by-side benchmark, from its JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.command import Results
from ...core.machine import sentence
from ...core.table import Column, Shown, Table, decimals, table_of

ONE, TWO, THREE = decimals(1), decimals(2), decimals(3)


def _percent(value: float) -> str:
    return f"{value:.0%}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f}"


SPEEDS: tuple[Column, ...] = (
    ("tokens_per_second", "tok/s", ONE),
    ("tpot_ms", "TPOT ms", TWO),
    ("floor_ms", "floor ms", TWO),
    ("gb_s", "GB/s", ONE),
    ("ttft_ms", "TTFT ms", ONE),
    ("tau", "tau", TWO),
    ("accepted_of_examined", "of exam.", _percent),
    ("accepted_of_drafted", "of drafted", _percent),
    ("host", "host", lambda value: f"{value:.1%}"),
    ("over transformers plain", "x Transf.", TWO),
    ("over llama.cpp plain", "x llama", TWO),
    ("over outrider plain", "x own", TWO),
)
THEORY: tuple[Column, ...] = (
    ("alpha", "alpha", THREE),
    ("gamma", "gamma", TWO),
    ("c", "c", THREE),
    ("verify", "verify", TWO),
    ("tau", "tau", TWO),
    ("tau_expected", "expected", TWO),
    ("predicted", "predicted", TWO),
    ("measured", "measured", TWO),
    ("measured_low", "from", TWO),
    ("measured_high", "to", TWO),
    ("measured_over_predicted", "quotient", TWO),
)
BATCHES: tuple[Column, ...] = (
    ("size", "texts", str),
    ("tokens_per_second", "tok/s", ONE),
    ("each", "of each", ONE),
    ("whole", "with prefill", ONE),
    ("over_one", "x one text", TWO),
    ("over_transformers", "x Transf.", TWO),
)
MEMORY: tuple[Column, ...] = (
    ("peak", "peak MiB", _mib),
    ("before", "libraries", _mib),
    ("weights", "weights", _mib),
    ("cache", "cache", _mib),
    ("ratio", "x needed", TWO),
    ("ratio_without_libraries", "without libraries", TWO),
)
LOADS: tuple[Column, ...] = (
    ("median", "seconds", TWO), ("low", "from", TWO), ("high", "to", TWO), ("count", "times", str),
)  # fmt: skip
MET: dict[bool | None, str] = {True: "yes", False: "no", None: "not measured"}
GOALS: tuple[Column, ...] = (
    ("wanted", "wanted", str),
    ("found", "median (quartiles)", str),
    ("told", "met", str),
)


def _marked(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "disturbed": values["lost"] > values["texts"] // 2}


def speeds(title: str, cell: Mapping[str, Any]) -> Table:
    """Of a workload. cell: `systems`."""
    rows = ((name, _marked(values)) for name, values in cell["systems"].items())
    return table_of(title, rows, SPEEDS)


def tables(results: Results) -> list[Table]:
    """All of a run, the goals last."""
    cells, systems = results["cells"], "Load of the target, from converted files"
    made = [speeds(cell["name"], cell) for cell in cells]
    made += [speeds(f"all, temperature {t}", cell) for t, cell in results["all"].items()]
    theory = ((cell["name"], cell["theory"]) for cell in cells if cell["theory"])
    batches = ((entry["system"], _marked(entry)) for entry in results["batches"])
    missing = ((name, {"why": why}) for name, why in results["missing"].items())
    show_why: Shown = str
    goals = (
        (
            goal["goal"],
            {
                "wanted": f"at {'most' if goal['at_most'] else 'least'} {goal['wanted']:g}",
                "found": goal["found"],
                "told": MET[goal["met"]],
            },
        )
        for goal in results["goals"]
    )
    return [
        *made,
        table_of("Speedup of outrider draft over plain, Theorem 3.8", theory, THEORY),
        table_of("Texts decoded together", batches, BATCHES),
        table_of("Memory, a process for each", results["memory"].items(), MEMORY),
        table_of(
            systems, results["loads"].items(), LOADS,
            ["Outrider's bundle has the draft too, but where one process decodes without it."],
        ),
        table_of("Missing", missing, [("why", "why", show_why)]),
        table_of("Goals", goals, GOALS),
    ]  # fmt: skip


def heading(results: Results) -> str:
    """What the figures are of: the machine, the pair, the floor."""
    pair, rate = results["pair"], results["bytes_per_second"]
    return (
        f"{sentence(results['machine'])}; a pair of shape {pair['shape']}, acceptance wanted "
        f"{pair['alpha_wanted']:g}, gamma {results['gamma']}; memory reads at {rate / 1e9:.1f} "
        "GB/s, and the floor of a token is the time in which weights and cache of its round are "
        "read at that rate. Ratios are medians over prompts, each taken prompt by prompt. * other "
        "processes took over 2 % of the time of most texts."
    )
