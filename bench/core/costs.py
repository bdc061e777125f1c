"""What drafting costs and how often it is right, and what Theorem 3.8 makes of both.

The costs of a draft step and of a verification by its width come from one of two places: from calls
of the engines alone (`of_engines`), or from the rounds of recorded texts (`of_rounds`), where
sampling and host are inside. Either way they are in plain steps, and `predicted` is the theorem
with them. The formulas themselves are `runtime.theory.formulas`.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.backends.engine import Engine
from runtime.stats import Stats
from runtime.theory.formulas import expected_tokens

from .clock import alternate
from .fit import rounded
from .record import RoundRecord, TextRecord

SEEN = 8  # rounds with so many drafts, for their median to count


@dataclass(frozen=True, slots=True)
class Costs:
    """plain: seconds of a plain step. In plain steps: draft, c, a draft step; verify[k], all of a
    round with k drafts but those."""

    plain: float
    draft: float
    verify: list[float]

    def verification(self, drafts: float) -> float:
        """Of a round with so many drafts, in plain steps; between whole numbers a line."""
        return float(np.interp(drafts, range(len(self.verify)), self.verify))

    def round(self, drafts: float) -> float:
        """All of a round with so many drafts, in plain steps."""
        return drafts * self.draft + self.verification(drafts)

    def json_object(self) -> dict[str, Any]:
        return {
            "plain_ms": rounded(1e3 * self.plain),
            "c": rounded(self.draft),
            "verify": [rounded(x) for x in self.verify],
        }


def step(
    engine: Engine, width: int, position: int, outputs: int, slots: int = 1
) -> Callable[[], object]:
    """A call of `width` tokens in each of the first `slots`, at row `position`, with logits for the
    last `outputs` of them."""
    ids, index = np.ones((slots, width), np.int64), np.arange(width - outputs, width)
    return lambda: engine.forward(ids, np.full(slots, position), index)


def of_engines(
    target: Engine, draft: Engine, position: int, gamma: int, *, rounds: int, patience: float
) -> Costs:
    """By calls of the engines alone at row `position`, with 1 to gamma + 1 tokens, in alternation.

    rounds, patience: as `clock.alternate`.
    """
    calls = {"draft": step(draft, 1, position, 1)}
    calls |= {str(n): step(target, n, position, n) for n in range(1, gamma + 2)}
    draft_ms, *widths = (f.ms for f in alternate(calls, rounds=rounds, patience=patience).values())
    return Costs(1e-3 * widths[0], draft_ms / widths[0], [ms / widths[0] for ms in widths])


def of_rounds(plain: Sequence[TextRecord], texts: Sequence[TextRecord], most: int) -> Costs:
    """By recorded texts: `plain` without drafts, `texts` with up to `most` a round.

    A draft step is the median over texts of its mean, a verification the median over rounds. A
    width that few rounds had lies between its neighbours.
    """
    rests: dict[int, list[float]] = defaultdict(list)
    for x in (x for text in texts for x in text.rounds):
        rests[x.gamma].append(x.seconds - x.catch_up - x.draft)
    one = statistics.median(x.seconds for text in plain for x in text.rounds)
    rests[0] = [one] * SEEN
    drafts = [text.stats.time_draft / text.stats.drafted for text in texts if text.stats.drafted]
    fewest = min(SEEN, max(map(len, rests.values())))
    seen = sorted(k for k, times in rests.items() if len(times) >= fewest)
    values = [statistics.median(rests[k]) / one for k in seen]
    verify = np.interp(range(most + 1), seen, values).tolist()
    return Costs(one, (statistics.median(drafts) if drafts else 0.0) / one, verify)


def predicted(alpha: float, gammas: Iterable[float], costs: Costs) -> float:
    """The speedup of Theorem 3.8 with measured costs.

    gammas: the drafts that rounds had. A lookup finds fewer tokens than it is asked for, and a
    text's end has no room for more. One number that is their mean will do.
    """
    every = list(gammas)
    return sum(expected_tokens(alpha, g) for g in every) / sum(costs.round(g) for g in every)


def oracle(rounds: Iterable[RoundRecord], costs: Costs) -> float:
    """Speed over plain decoding if each of these rounds had drafted only what was accepted.

    Section 3.5 of Leviathan et al. 2023, with the acceptance that was really met. rounds: with the
    largest gamma there is, which bounds this oracle too.
    """
    accepted = [x.accepted for x in rounds]
    return sum(a + 1 for a in accepted) / sum(costs.round(a) for a in accepted)


def total(texts: Iterable[TextRecord]) -> Stats:
    """The counts and times of several texts."""
    stats = Stats()
    for text in texts:
        stats.add(text.stats)
    return stats


def acceptance(texts: Iterable[TextRecord]) -> float:
    """alpha: accepted of examined."""
    stats = total(texts)
    return stats.accepted / max(1, stats.examined)


# Bytes


def row_bytes(checkpoint: Path, element: int) -> int:
    """Of one token's keys and values in all layers. element: bytes of a number."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * heads * width * element)


def weights_bytes(folder: str | Path, pattern: str = "*.safetensors") -> int:
    """Of the files that hold a model's weights."""
    return sum(file.stat().st_size for file in Path(folder).glob(pattern))


@dataclass(frozen=True)
class Traffic:
    """Bytes that decoding has to read: of the weights, of a row of all layers' caches; the draft's.

    rows: how many are in the cache, on average.
    """

    weights: float
    row: float
    rows: float
    draft_weights: float = 0.0
    draft_row: float = 0.0

    def of_round(self, drafted: float = 0.0) -> float:
        """What a round with so many draft steps has to read."""
        target = self.weights + self.rows * self.row
        return target + drafted * (self.draft_weights + self.rows * self.draft_row)
