"""Prompts decoded with every gamma, for bench/report.py: their quickest rounds and costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from runtime.files.errors import OutriderError
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.measure import Costs, Findings, findings, measure

from .core.clock import DISTURBED, sample
from .core.record import RoundRecord as Round
from .core.record import TextRecord as Text
from .core.record import recording

__all__ = ["Round", "Text", "recording"]

REPEATS = 3
PATIENCE = 12.0  # seconds for which a prompt waits for as many undisturbed runs


def quickest(texts: Sequence[Text]) -> Text:
    """The same text several times over, of each round the time that was least: on a machine that is
    not ours alone the others were kept waiting. Texts of other rounds than the quickest's do not
    count."""
    best = min(texts, key=lambda text: text.stats.elapsed)
    alike = [
        text.rounds
        for text in texts
        if [x.fate() for x in text.rounds] == [x.fate() for x in best.rounds]
    ]
    now = ttft = min(text.stats.ttft for text in texts)
    rounds = []
    for same in zip(*alike, strict=True):
        least = min(same, key=lambda x: x.seconds)
        rounds.append(replace(least, begin=now, end=now + least.seconds))
        now = rounds[-1].end
    catch_up = sum(x.catch_up for x in rounds)
    stats = replace(
        best.stats,
        time_prefill=min(text.stats.time_prefill for text in texts),
        time_draft_prefill=catch_up,
        time_draft=sum(x.draft for x in rounds),
        time_verify=sum(x.verify for x in rounds),
        time_sample=sum(x.sample for x in rounds),
        time_rounds=now - ttft - catch_up,
        ttft=ttft,
        elapsed=now,
    )
    return Text(best.gamma, tuple(rounds), stats)


def record(
    engine: TextEngine,
    prompts: Sequence[str],
    temperature: float,
    tokens: int,
    note: Callable[[str], None],
) -> tuple[Findings, dict[int, list[Text]], float]:
    """What the costs come to; of every gamma the text of every prompt; and the seconds for which
    threads waited for a core in each second (bench/timing.py), the median of the quietest runs.
    Raises OutriderError "prompt"."""
    costs = {gamma: Costs() for gamma in range(engine.decoder.max_gamma + 1)}
    texts: dict[int, list[Text]] = {gamma: [] for gamma in costs}
    total = Stats()
    quiet: list[float] = []
    with recording(engine) as recorder:
        for number, prompt in enumerate(prompts, start=1):
            note(f"prompt {number} of {len(prompts)}, with gamma 0 to {engine.decoder.max_gamma}")
            runs: list[dict[int, Text]] = []
            lost: list[float] = []
            begin = time.perf_counter()
            while len(runs) < REPEATS or (
                sum(share <= DISTURBED for share in lost) < REPEATS
                and time.perf_counter() - begin < PATIENCE
            ):  # all gammas each time: what changes, changes for all of them
                lost.append(sample(partial(measure, engine, [prompt], temperature, tokens)).lost)
                # The last of each gamma: those before it warmed up.
                runs.append({text.gamma: text for text in recorder.take()})
            quiet += sorted(lost)[:REPEATS]
            for gamma, cost in costs.items():
                text = quickest([run[gamma] for run in runs])
                if not text.rounds:
                    raise OutriderError(
                        "prompt",
                        f"prompt {number} leaves no room for a round",
                        "Shorten it, or build the bundle with a larger MAX_LEN",
                    )
                texts[gamma].append(text)
                cost.add(text.stats)
                if gamma:
                    total.add(text.stats)
    return findings(costs, total), texts, median(quiet)
