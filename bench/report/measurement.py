"""The measurements of a report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.files.errors import OutriderError
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.formulas import speedup
from runtime.theory.measure import Findings, measure, summarise

from ..core.clock import lost_seconds

REPEATS = 3


@dataclass(frozen=True)
class Measurement:
    """texts[gamma]: one text per prompt, in their order. lost: seconds for which threads waited for
    a core, per second of measuring."""

    findings: Findings
    texts: Mapping[int, Sequence[Stats]]
    lost: float = 0.0

    def expected_speedup(self, gamma: int) -> float:
        """The speedup of Theorem 3.8 with the measured cost of a verification of this width."""
        found = self.findings
        return speedup(found.alpha, gamma, found.costs.draft, found.costs.verify[gamma])

    def measured_speedups(self, gamma: int) -> list[float]:
        """For each prompt, the speedup over plain decoding, without the prefill."""
        return [
            (a.round_tokens / a.time_rounds) / (b.round_tokens / b.time_rounds)
            for a, b in zip(self.texts[gamma], self.texts[0], strict=True)
        ]


def measure_prompts(
    engine: TextEngine,
    prompts: Sequence[str],
    temperature: float,
    tokens: int,
    note: Callable[[str], None],
) -> Measurement:
    """Measure every prompt with every gamma several times. The fastest run of each counts, because
    on a shared machine slower runs had to wait for other processes. Raises OutriderError("prompt")
    if a prompt is too long."""
    texts: dict[int, list[Stats]] = {g: [] for g in range(engine.decoder.max_gamma + 1)}
    begin, waited = time.perf_counter(), lost_seconds()
    for number, prompt in enumerate(prompts, start=1):
        note(f"prompt {number} of {len(prompts)}, with gamma 0 to {engine.decoder.max_gamma}")
        # All gammas in each run, so that changes of the machine affect all of them.
        runs = [measure(engine, [prompt], temperature, tokens) for _ in range(REPEATS)]
        if not all(runs[0].values()):
            cause = f"prompt {number} leaves no room for a round"
            remedy = "Shorten it, or build the bundle with a larger MAX_LEN."
            raise OutriderError("prompt", cause, remedy)
        for gamma, some in texts.items():
            some.append(min((run[gamma][0] for run in runs), key=lambda text: text.time_rounds))
    lost = (lost_seconds() - waited) / (time.perf_counter() - begin)
    return Measurement(summarise(texts), texts, lost)
