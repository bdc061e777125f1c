"""What drafting costs and how often it is right, and what Theorem 3.8 makes of both.

The costs of a draft step and of a verification by its width come from one of two places: from calls
of the engines alone (`of_calls`), or from the rounds of recorded texts (`of_rounds`), where
sampling and host are inside. Either way they are `RoundCosts` in plain steps, and `predicted` is
the theorem with them. The formulas themselves are `runtime.theory.formulas`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.costs import RoundCosts
from runtime.stats import Stats
from runtime.theory.formulas import expected_tokens

from .clock import Sample, figure
from .record import Run

SEEN = 8  # rounds with so many drafts, for their median to count


def plain_steps(width: int) -> str:
    """What a table's heading says of ours. width: tokens of the target's narrowest calls."""
    return f"our plain steps are calls of {width} token{'s' * (width > 1)}"


def of_calls(samples: Mapping[str, Sequence[Sample]]) -> RoundCosts:
    """By calls of the engines alone: "draft", and the target with "1", "2", ... tokens."""
    seconds = {name: figure(some).ms / 1e3 for name, some in samples.items()}
    draft = seconds.pop("draft")
    return RoundCosts.of(draft, {int(n) - 1: x for n, x in seconds.items()}, len(seconds) - 1)


def of_rounds(plain: Sequence[Run], texts: Sequence[Run], most: int) -> RoundCosts:
    """By recorded texts: `plain` without drafts, `texts` with up to `most` a round.

    A draft step is the median over texts of its mean, a verification the median over rounds. A
    width that few rounds had does not count.
    """
    rests: dict[int, list[float]] = defaultdict(list)
    for x in (x for text in texts for x in text.rounds):
        rests[x.gamma].append(x.seconds - x.catch_up - x.draft)
    rests[0] = [statistics.median(x.seconds for text in plain for x in text.rounds)] * SEEN
    drafts = [text.stats.time_draft / text.stats.drafted for text in texts if text.stats.drafted]
    few = min(SEEN, max(map(len, rests.values())))
    seen = {k: statistics.median(times) for k, times in rests.items() if len(times) >= few}
    return RoundCosts.of(statistics.median(drafts) if drafts else 0.0, seen, most)


def verification(costs: RoundCosts, drafts: float) -> float:
    """Plain steps of all of a round but its draft steps; between whole numbers a line."""
    return float(np.interp(drafts, range(len(costs.verify)), costs.verify))


def predicted(alpha: float, gammas: Iterable[float], costs: RoundCosts) -> float:
    """The speedup of Theorem 3.8 with measured costs.

    gammas: the drafts that rounds had. A lookup finds fewer tokens than it is asked for, and a
    text's end has no room for more. One number that is their mean will do.
    """
    every = list(gammas)
    spent = sum(g * costs.draft + verification(costs, g) for g in every)
    return sum(expected_tokens(alpha, g) for g in every) / spent


def total(texts: Iterable[Run]) -> Stats:
    """The counts and times of several texts."""
    return Stats.total(text.stats for text in texts)


# Bytes


def row_bytes(checkpoint: Path, element: int) -> int:
    """Of one token's keys and values in all layers, and of an encoder-decoder's source in all of
    the decoder's. element: bytes of a number."""
    from transformers import AutoConfig  # here: it takes seconds, and most suites do not ask

    config = AutoConfig.from_pretrained(checkpoint).get_text_config(decoder=True)

    def first(*names: str) -> Any:
        return next((found for name in names if (found := getattr(config, name, None))), None)

    layers = first("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    queries = first("num_heads", "decoder_attention_heads", "num_attention_heads")
    heads = first("num_key_value_heads") or queries
    width = first("head_dim", "d_kv") or first("d_model", "hidden_size") // queries
    return int(2 * layers * heads * width * element)


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
