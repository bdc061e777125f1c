"""What a report measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runtime.files.errors import OutriderError
from runtime.stats import Stats
from runtime.text.engine import TextEngine
from runtime.theory.formulas import speedup
from runtime.theory.measure import Findings, findings, measure

from ..core.clock import lost_seconds

REPEATS = 3


@dataclass(frozen=True)
class Measurement:
    """texts[gamma]: one for each prompt, in their order. lost: seconds for which threads waited for
    a core, in each second of measuring."""

    found: Findings
    texts: Mapping[int, Sequence[Stats]]
    lost: float = 0.0

    def expected(self, gamma: int) -> float:
        """Theorem 3.8 with the verification's measured width."""
        found = self.found
        return speedup(found.alpha, gamma, found.costs.draft, found.costs.verify[gamma])

    def ratios(self, gamma: int) -> list[float]:
        """Of each prompt, the speed over plain decoding's, without the prefill."""
        return [
            (a.round_tokens / a.time_rounds) / (b.round_tokens / b.time_rounds)
            for a, b in zip(self.texts[gamma], self.texts[0], strict=True)
        ]


def take(
    engine: TextEngine,
    prompts: Sequence[str],
    temperature: float,
    tokens: int,
    note: Callable[[str], None],
) -> Measurement:
    """Every prompt with every gamma, several times over; of each the quickest counts, because on a
    machine that is not ours alone the others were kept waiting. Raises OutriderError "prompt"."""
    texts: dict[int, list[Stats]] = {g: [] for g in range(engine.decoder.max_gamma + 1)}
    begin, waited = time.perf_counter(), lost_seconds()
    for number, prompt in enumerate(prompts, start=1):
        note(f"prompt {number} of {len(prompts)}, with gamma 0 to {engine.decoder.max_gamma}")
        # All gammas each time: what changes, changes for all of them.
        runs = [measure(engine, [prompt], temperature, tokens) for _ in range(REPEATS)]
        if not all(runs[0].values()):
            cause = f"prompt {number} leaves no room for a round"
            remedy = "Shorten it, or build the bundle with a larger MAX_LEN."
            raise OutriderError("prompt", cause, remedy)
        for gamma, some in texts.items():
            some.append(min((run[gamma][0] for run in runs), key=lambda text: text.time_rounds))
    lost = (lost_seconds() - waited) / (time.perf_counter() - begin)
    return Measurement(findings(texts), texts, lost)
